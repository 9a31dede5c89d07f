"""Files and fine-tuning jobs against the description that OpenAI publishes of its API.

OPENAI_DESCRIPTION names the file `openapi.json` of github.com/openai/openai-openapi (MIT); without it nothing is tested
here. tests/test_fine_tuning.py reads every answer with the official client's own types.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, settings
from jsonschema import Draft202012Validator
from rest_framework.settings import api_settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
)

from rl.models import FineTuningJob, TrainingRun
from tests.support.api_client import ApiClient
from tests.support.campaign_scale import CAMPAIGN, scaled
from tests.support.serving import policy_made
from tests.test_fine_tuning import CHAT, created, runs_wait, uploaded  # noqa: F401

DESCRIPTION = os.environ.get("OPENAI_DESCRIPTION", "")
if not DESCRIPTION:
    pytest.skip("OPENAI_DESCRIPTION names no file", allow_module_level=True)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("unqueued")]

EXAMPLES = scaled("FUZZ", 12)
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    ignored_auth,
]
ELSEWHERE = ("/pause", "/resume")
"""Ends of paths that are not offered here (docs/fine-tuning.md)."""


def described() -> dict[str, Any]:
    """The description of the paths that are served here, at their address here."""
    whole = json.loads(Path(DESCRIPTION).read_text("utf-8"))
    wanted = ("/files", "/fine_tuning/jobs")
    paths = {
        path: told
        for path, told in whole["paths"].items()
        if path.startswith(wanted) and not path.endswith(ELSEWHERE)
    }
    # described as JSON, and sent as the file's own bytes by OpenAI too
    paths["/files/{file_id}/content"]["get"]["responses"]["200"]["content"] = {"application/octet-stream": {}}
    return {**whole, "paths": paths, "servers": [{"url": "http://testserver/v1"}]}


TOLD = described()
ERROR = {**TOLD["components"]["schemas"]["ErrorResponse"], "components": TOLD["components"]}
_django = get_wsgi_application()


def served(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """This server, with OpenAI's description as one more address."""
    if environ["PATH_INFO"] != "/described":
        return _django(environ, start_response)  # type: ignore[no-any-return]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(TOLD).encode()]


REFUSED = ["400", "401", "404", "405", "409", "413", "415"]
schema = schemathesis.openapi.from_wsgi(
    "/described",
    served,
    config=schemathesis.Config.from_dict(
        {"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}}
    ),
)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A key, a file, a job that waits and a job that succeeded, by what names them."""
    rates = dict.fromkeys(api_settings.DEFAULT_THROTTLE_RATES, "1000000/s")
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", rates)
    api = ApiClient("operate", "read", "ingest")
    file, spare = uploaded(api), uploaded(api)
    done, waiting = (created(api, training_file=file, metadata={"n": n})["id"] for n in "12")
    job = FineTuningJob.objects.get(name=done)
    TrainingRun.objects.filter(pk=job.run.pk).update(
        status="succeeded", follow_up="done", started_at="2026-01-01T00:00Z", finished_at="2026-01-02T00:00Z"
    )
    job.run.metrics.create(step=1, values={"loss": 0.5})
    policy = policy_made("assistant-v1", "assistant", "candidate")
    policy.run = job.run
    policy.save()
    # Django's test client connects them; the end of a request must not close the test's connection
    request_started.disconnect(close_old_connections)
    request_finished.disconnect(close_old_connections)
    yield {"key": api.key, "file": file, "spare": spare, "done": done, "waiting": waiting}
    request_started.connect(close_old_connections)
    request_finished.connect(close_old_connections)


@pytest.fixture
def answers() -> Iterator[Counter[int]]:
    """How often an operation answered with which status: what was valid must have got through."""
    seen: Counter[int] = Counter()
    yield seen
    assert any(status < 300 for status in seen), f"it never took anything: {seen}"
    print(seen)


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=not CAMPAIGN,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_those_that_openai_describes(
    case: Any, there: dict[str, str], answers: Counter[int]
) -> None:
    filled = body_filled(case, there)
    path_filled(case, there)
    headers = {"Authorization": f"Bearer {there['key']}"}
    response = case.call(headers=headers)
    answers[response.status_code] += 1
    # a query parameter that is null is left out of the address
    as_made = not filled and all(value is not None for value in (case.query or {}).values())
    checks = CHECKS if as_made else [check for check in CHECKS if check is not negative_data_rejection]
    case.validate_response(response, checks=checks, headers=headers)
    if response.status_code >= 400:
        Draft202012Validator(ERROR).validate(response.json())


def path_filled(case: Any, there: dict[str, str]) -> None:
    """Let a path that may be valid name a file and a job of the fixture."""
    if not case.meta.is_negative_at(ParameterLocation.PATH):
        job = there["waiting" if case.operation.path.endswith("cancel") else "done"]
        file = there["spare" if case.operation.method.upper() == "DELETE" else "file"]
        known = {"file_id": file, "fine_tuning_job_id": job}
        case.path_parameters.update({name: known[name] for name in case.path_parameters or {}})


def body_filled(case: Any, there: dict[str, str]) -> bool:
    """Let a body that may be valid have a file's lines, or name a file; True if it does."""
    own: dict[str, dict[str, object]] = {
        "POST /files": {"file": CHAT, "purpose": "fine-tune"},
        "POST /fine_tuning/jobs": {"model": "bundled", "training_file": there["file"]},
    }
    if (
        case.operation.label not in own
        or not isinstance(case.body, dict)
        or case.meta.is_negative_at(ParameterLocation.BODY)
    ):
        return False
    case.body |= own[case.operation.label]
    return True
