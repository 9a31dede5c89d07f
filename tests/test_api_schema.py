"""The whole REST API against its own description: whatever is sent, no 5xx, no bad input taken, no auth ignored.

Schemathesis makes the requests from the schema, valid and broken ones, in this process; the same ones in every run.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, settings
from rest_framework.settings import api_settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from feedback.accounts.authentication import key_create
from feedback.models import ImportBatch, Withdrawal
from feedback.services import decision_record, rating_submit
from rl.models import Experiment, JudgedPair, JudgingRound, TrainingRun, Upstream
from rl.registry.service import policy_promote
from rl.serving import fallback, upstream_test
from rl.serving.assembly import answer_of
from rl.serving.base import Ask, Model
from tests.support.campaign_scale import CAMPAIGN, scaled
from tests.support.registry_rows import make_run, registered
from tests.support.serving import Parrot, written_by_the_asking_thread  # noqa: F401

pytestmark = pytest.mark.django_db

EXAMPLES = scaled("FUZZ", 12)
"""Random requests per endpoint, beside those at the edges of the schema."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    ignored_auth,
    unsupported_method,
]
"""positive_data_acceptance is not among them: what a schema cannot say (a rating says at least one thing, two decisions
are of one prompt) is refused for good reason. That valid ones get through is asserted per endpoint, by `answers`."""
UNSENT_CHECKS = [check for check in CHECKS if check is not negative_data_rejection]

KNOWN, OTHER = str(uuid.UUID(int=1)), str(uuid.UUID(int=0))
"""Two decisions that are there, on one prompt; a random id is hardly ever one."""
JUDGEMENT = {"pair": KNOWN, "preference": "tie"}
RUN = 2_000_000_000
"""A run that is there, beyond those that are made on the way."""

REFUSED = ["400", "401", "404", "405", "409", "413", "415"]
"""What bad input may be answered with; the library's own list takes 5xx for a refusal too."""


schema = schemathesis.openapi.from_wsgi(
    "/api/schema/",
    get_wsgi_application(),
    config=schemathesis.Config.from_dict(
        {"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}}
    ),
).exclude(path="/api/webhooks/slack/")
"""Without what takes bodies that Slack signed alone: tests/test_webhooks_in.py has it."""


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, written_at_once: None) -> Iterator[str]:
    """A key that may do everything, as often as it likes; some rows to be found, ratings enough to train on."""
    rates = dict.fromkeys(api_settings.DEFAULT_THROTTLE_RATES, "1000000/s")
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", rates)
    monkeypatch.setattr(fallback, "backends", lambda: [Parrot()])
    # as Django's own test client does: the end of a request must not close the connection with the test's transaction
    request_started.disconnect(close_old_connections)
    request_finished.disconnect(close_old_connections)
    for n in range(24):
        row = decision_record(id=uuid.UUID(int=n), agent="0", messages=f"q{n // 2}", response=f"r{n}").row
        rating_submit(decision=row, rater="ada", score=n % 2)
    TrainingRun.objects.create(pk=RUN, agent="0", method="dpo", base_model="bundled")
    ImportBatch.objects.create(pk=RUN, file="x.csv", sha256="0", bytes=1, format="table", actor="test")
    Withdrawal.objects.create(pk=RUN, actor="test", decisions_count=0)
    experiment = Experiment.objects.create(pk=RUN, name="0", agent="0")
    for name in ("control", "challenger"):
        experiment.arms.create(name=name, is_control=name == "control")
    for name in ("second", "third"):
        Upstream.objects.create(name=name, url="http://127.0.0.1:1/v1", model="m")
    monkeypatch.setattr(
        upstream_test, "_asked", lambda *_: answer_of(Parrot().pieces(Ask([]), Model("m", ""), 1.0), 1.0)
    )
    for name in ("first", "second", "third"):
        policy = registered(make_run("1"), name)
        if name == "third":
            judging = JudgingRound.objects.create(
                pk=RUN, agent="1", policy=policy, status="running", prompts=1, attempt=1, alpha=0.01
            )
            for number, decision in enumerate((KNOWN, OTHER)):
                pk = uuid.UUID(KNOWN) if number == 0 else uuid.uuid4()
                JudgedPair.objects.create(
                    pk=pk, round=judging, decision=decision, answer="a", other_answer="b", same=False
                )
        if name != "third":
            policy_promote(policy, actor="test", force=True, reason="a test")
    yield key_create("everything", ["ingest", "rate", "rate_as", "read", "operate"])[1]
    request_started.connect(close_old_connections)
    request_finished.connect(close_old_connections)


@pytest.fixture
def answers(record_property: Callable[[str, object], None]) -> Iterator[Counter[int]]:
    """How often an endpoint answered with which status: what was valid must have got through, what was not must not."""
    seen: Counter[int] = Counter()
    yield seen
    record_property("tried", seen.total())
    taken = sum(count for status, count in seen.items() if status < 300)
    assert taken > 0, f"it never took anything: {seen}"
    assert taken < seen.total(), f"it never refused anything: {seen}"


@pytest.mark.campaign
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=not CAMPAIGN,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_the_api_keeps_to_its_description(case: Any, key: str, answers: Counter[int]) -> None:
    if (
        answers.total() % 2 or "{token}" in case.operation.path
    ):  # every other valid request is about something that is there
        point_at_what_is_there(case)
    headers = {"Authorization": f"Bearer {key}"}
    response = case.call(headers=headers)
    answers[response.status_code] += 1
    case.validate_response(response, checks=CHECKS if sent_whole(case) else UNSENT_CHECKS, headers=headers)


def sent_whole(case: Any) -> bool:
    """Whether all that is wrong with a case reached the API: a query parameter that is null is left out of the address,
    and what a broken Authorization would have said, the test's own key says."""
    return all(value is not None for value in (case.query or {}).values())


def point_at_what_is_there(case: Any) -> None:
    policy = "second" if "rollback" in case.operation.path else "third"
    numbered = any(
        word in case.operation.path for word in ("runs", "experiments", "imports", "withdrawals", "judging")
    )
    if "upstreams" in case.operation.path:
        policy = "second" if case.operation.method.upper() == "DELETE" else "third"
    there = {"id": RUN if numbered else KNOWN, "agent": "0", "name": policy, "token": KNOWN}
    if not case.meta.is_negative_at(ParameterLocation.PATH):
        for name in case.path_parameters:
            case.path_parameters[name] = there[name]
    if (
        policy == "third"
        and "promote" in case.operation.path
        and not case.meta.is_negative_at(ParameterLocation.BODY)
    ):
        case.body = {"force": True, "reason": "a test"}
    judging = {"/api/judging-rounds/": {"policy": "third"}, "/api/judging-rounds/{id}/pairs/": JUDGEMENT}
    if (
        case.operation.method.upper() == "POST"
        and case.operation.path in judging
        and not case.meta.is_negative_at(ParameterLocation.BODY)
    ):
        case.body = judging[case.operation.path]
    if case.operation.label == "POST /api/runs/" and not case.meta.is_negative_at(ParameterLocation.BODY):
        case.body = {"agent": "0"}
    if case.operation.label == "POST /api/imports/" and not case.meta.is_negative_at(ParameterLocation.BODY):
        case.body = {"name": "x.csv", "content": "prompt,response,rating\nq,a,up\n", "agent": "0"}
    if case.operation.label == "POST /api/upstreams/" and not case.meta.is_negative_at(
        ParameterLocation.BODY
    ):
        case.body = {"name": "new", "url": "http://127.0.0.1:1/v1", "model": "m", "key": "sk-1"}
    if "decide" in case.operation.path and not case.meta.is_negative_at(ParameterLocation.BODY):
        case.body = {"agent": "0", "messages": "hello"}
    if "comparisons" in case.operation.path and not case.meta.is_negative_at(ParameterLocation.BODY):
        case.body |= {"left": KNOWN, "right": OTHER}
