"""Whatever row the API takes, every reader of many rows goes on: none raises, and the good rows beside it are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedback.models import Decision
from feedback.recording.ingest import decision_ingest, trace_record
from feedback.selectors import agent_slugs
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from feedback.storage.validation import FeedbackRefused
from feedback.transfer import formats
from feedback.transfer.export import ExportReport, export_stream
from feedback.transfer.export_views import Selection
from rl.datasets import DatasetTooSmall, prepare_training_dataset
from rl.datasets.held_out_evidence import evidence_counts
from rl.datasets.reward_records import rewards_calculate
from rl.evaluation.off_policy import logged_choices
from rl.jobs.label import rated_rows, waiting_rows
from rl.models import RewardRecord, Snapshot
from tests.support.api_client import person
from tests.support.campaign_scale import CAMPAIGN, scaled

pytestmark = pytest.mark.django_db

EXAMPLES = scaled("POISON", 6)
"""Few in the suite; a thousand in the campaign."""
AGENTS = ("widgets", "filer", "prioritizer", "retriever", "tool-agent", "helper")

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | texts
KEYS = ("question", "widgets", "options", "context", "descriptions", "drafts", "right", "folders", "document", "tools",
        "facts", "tests", "answer", "expected_output", "trace", "error", "arm_propensity", "scenario", "k")  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=3)
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from(KEYS) | texts, values, max_size=4)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | objects, max_size=2)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | texts},
        optional={"content": st.none() | texts | parts, "tool_calls": values, "name": values},
    ),
    min_size=1,
    max_size=3,
)
responses = (
    texts
    | values.map(json.dumps)
    | st.sampled_from(['{"widget": "gauge"}', '{"folder": "a/b"}', "[{}]", "{"])
)
candidates = st.lists(
    responses | st.fixed_dictionaries({"response": responses}, optional={"score": st.floats(0, 1)}),
    max_size=3,
)
decisions = st.fixed_dictionaries(
    {"agent": st.sampled_from(AGENTS), "messages": messages | texts, "response": responses},
    optional={
        "state": values | objects, "candidates": candidates, "metadata": objects, "tags": st.lists(texts, max_size=2),
        "propensity": st.floats(0.01, 1), "unit": texts, "arm": texts, "run_id": texts,
        "latency_ms": st.floats(0, 1e12), "tokens_in": st.integers(0, 2**31 - 1),
    },
)  # fmt: skip
ratings = st.fixed_dictionaries(
    {"rater": st.sampled_from(["ann", "bob"])},
    optional={
        "thumb": st.sampled_from(["up", "down"]), "stars": st.integers(1, 5), "score": st.floats(0, 1),
        "correction": responses, "tags": st.lists(texts | st.just("demonstration"), max_size=2), "notes": texts,
    },
)  # fmt: skip
rows = st.tuples(
    decisions, st.lists(ratings, max_size=2), st.floats(allow_nan=False, allow_infinity=False), values
)


def good_rows() -> list[Decision]:
    """Two answers to one prompt, one liked and one not: a pair, two labels, two rewards."""
    found = []
    for response, thumb in (("good", "up"), ("bad", "down")):
        row = decision_record(agent="helper", messages="How?", response=response).row
        rating_submit(decision=row, rater="ann", thumb=thumb)
        found.append(row)
    return found


def taken(row: Any) -> None:
    """Write a row as far as the services take it."""
    facts, said, value, step = row
    try:
        decision = decision_ingest(**facts).row
    except FeedbackRefused:
        return
    twin = decision_record(
        agent=decision.agent,
        messages=decision.messages,
        response=decision.response + "!",
        state=decision.state,
    ).row
    for write in (
        *(lambda words=words: rating_submit(decision=decision, **words) for words in said),
        lambda: comparison_submit(left=decision, right=twin, preference="left", rater="ann"),
        lambda: outcome_record(decision=decision, name="reward", value=value),
        lambda: trace_record(
            agent=decision.agent,
            steps=[
                {"kind": "tool_call", "name": "t", "result": step, "error": step},
                {"kind": "task", "status": step},
                {
                    "kind": "decision",
                    **{k: facts[k] for k in ("messages", "response", "state") if k in facts},
                },
            ],
            metadata={"status": step} if step else {},
        ),
    ):
        try:
            write()
        except FeedbackRefused:
            continue


@pytest.mark.campaign
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not CAMPAIGN,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(rows, min_size=1, max_size=3))
def test_every_reader_goes_on(record_property: Callable[[str, object], None], odd: list[Any]) -> None:
    record_property("tried", 1)
    with transaction.atomic():
        good = good_rows()
        for row in odd:
            taken(row)
        read_by_rewards(good)
        for agent in agent_slugs():
            read_by_datasets(agent)
        read_by_exports(good)
        transaction.set_rollback(True)


def read_by_rewards(good: list[Decision]) -> None:
    found = rewards_calculate()
    assert found.refused == {}
    known = set(RewardRecord.objects.values_list("decision", flat=True))
    assert known >= {row.pk for row in good}


def read_by_datasets(agent: str) -> None:
    for kind in Snapshot.Kind.values:
        try:
            prepared = prepare_training_dataset(agent, kind, min_samples=1, for_training=False, dry_run=True)
        except DatasetTooSmall:
            assert agent != "helper" or kind == "corrections"
            continue
        for row in prepared.rows():
            json.dumps(row)
        if agent == "helper" and kind == "pairs":
            assert any(row["chosen"] == "good" and row["rejected"] == "bad" for row in prepared.rows())
    evidence_counts(agent)[0]
    logged_choices(agent)
    rated_rows(agent)
    waiting_rows(agent, 100)


def read_by_exports(good: list[Decision]) -> None:
    for name in formats.SHAPES:
        text = b"".join(export_stream(name, Selection(), ExportReport(name, left_out=Counter())))
        if name == "ratchet":
            assert all(str(row.pk).encode() in text for row in good)


@pytest.mark.campaign
@settings(
    max_examples=max(EXAMPLES // 2, 2),
    deadline=None,
    derandomize=not CAMPAIGN,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(rows, min_size=1, max_size=3))
def test_every_page_of_many_rows_goes_on(
    record_property: Callable[[str, object], None], odd: list[Any]
) -> None:
    record_property("tried", 1)
    with transaction.atomic():
        user = person("eve", "operator")
        user.is_staff = user.is_superuser = True
        user.save()
        client = Client()
        client.force_login(user)
        good = good_rows()
        for row in odd:
            taken(row)
        listed = client.get("/decisions/")
        assert listed.status_code == 200
        assert all(str(row.pk) in listed.content.decode() for row in good)
        found = client.get("/api/decisions/").json()["results"]
        assert {str(row.pk) for row in good} <= {row["id"] for row in found}
        pages = ["/rate/", "/rate/pairs/", "/agreement/", "/problems/", "/"]
        for pk in Decision.objects.values_list("pk", flat=True):
            pages += [f"/decisions/{pk}/", f"/rate/?decision={pk}"]
        for page in pages:
            assert client.get(page).status_code == 200, page
        transaction.set_rollback(True)
