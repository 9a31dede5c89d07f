"""One row that cannot be read stops nothing: it is refused on the way in, or skipped, counted and named by readers."""

import json
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, transaction
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedback.accounts.authentication import key_create
from feedback.models import Decision, ProblemRow
from feedback.recording.ingest import decision_ingest, trace_record
from feedback.selectors import agent_slugs
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from feedback.storage.problem_rows import RowReader, problems
from feedback.storage.validation import FeedbackRefused
from feedback.transfer import formats
from feedback.transfer.export import ExportReport, export_stream, file_export
from feedback.transfer.export_views import Selection
from rl.agents import AGENTS
from rl.datasets import DatasetTooSmall, prepare_training_dataset
from rl.datasets.held_out_evidence import evidence_counts
from rl.datasets.reward_records import rewards_calculate
from rl.evaluation.off_policy import logged_choices
from rl.models import RewardRecord, Snapshot
from tests.support.api_client import ApiClient, person
from tests.support.campaign_scale import CAMPAIGN, scaled
from tests.support.imports import file_import
from tests.support.said import printed

pytestmark = pytest.mark.django_db


def decided(agent: str = "helper", response: str = "Fine.", thumb: str = "up", **facts: Any) -> Decision:
    row = decision_record(agent=agent, messages="How?", response=response, **facts).row
    if thumb:
        rating_submit(decision=row, rater="ann", thumb=thumb)
    return row


def poisoned(row: Decision, **columns: Any) -> Decision:
    """A row as only an older version, or a hand in the database, could have left it."""
    Decision.objects.filter(pk=row.pk).update(**columns)
    return row


def client(scope: str) -> ApiClient:
    return ApiClient(key=key_create(str(uuid.uuid4()), [scope])[1])


RESERVED = {"response_is": "messages"}


@pytest.mark.parametrize("metadata", [RESERVED, {"serving": {"backend": "mine"}}, {"serving": "x"}])
def test_reserved_keys_are_refused_over_rest(metadata: dict[str, Any]) -> None:
    sent = {"agent": "helper", "messages": "How?", "response": "Fine.", "metadata": metadata}
    alone = client("ingest").post("/api/decisions/", sent)
    assert alone.status_code == 400
    error = alone.json()["error"]
    assert (error["code"], list(error["fields"])) == ("invalid", ["metadata"])
    assert next(iter(metadata)) in error["fields"]["metadata"]
    many = client("ingest").post("/api/decisions/", [sent, {**sent, "metadata": {"k": 1}}])
    assert (many.status_code, many.json()["created"], many.json()["refused"]) == (207, 1, 1)
    step = {"kind": "decision", "messages": "How?", "response": "Fine.", "metadata": metadata}
    traced = client("ingest").post("/api/traces/", {"agent": "helper", "steps": [step]})
    assert (traced.status_code, list(traced.json()["error"]["fields"])) == (400, ["steps[0].metadata"])
    assert Decision.objects.count() == 1


def test_reserved_keys_are_refused_by_the_gateway_and_decide() -> None:
    chat = {"model": "helper", "messages": [{"role": "user", "content": "How?"}], "metadata": RESERVED}
    answer = client("ingest").post("/v1/chat/completions", chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
    order = {"agent": "assistant", "messages": "How?", "candidates": ["a", "b"], "metadata": RESERVED}
    answer = client("ingest").post("/api/decide/", order)
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, ["metadata"])
    assert not Decision.objects.exists()


def test_a_file_may_only_say_how_a_response_is_read_where_it_can_be(tmp_path: Any) -> None:
    message = json.dumps([{"role": "assistant", "content": "Fine."}])
    kinds = [("Fine.", RESERVED), (message, RESERVED), ("Fine.", {"k": 1}), ("Fine.", {"serving": 3})]
    rows = [
        {
            "type": "decision",
            "agent": "helper",
            "messages": [{"role": "user", "content": f"How {n}?"}],
            "response": response,
            "metadata": metadata,
        }
        for n, (response, metadata) in enumerate(kinds)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = file_import(file, skip_bad=True)
    assert (report.decisions, report.refused_count) == (2, 2)
    assert [row.line for row in report.refused] == [1, 4]
    assert "response_is" in report.refused[0].reason
    assert "serving" in report.refused[1].reason


def test_the_reserved_keys_of_our_own_are_written() -> None:
    with pytest.raises(FeedbackRefused):
        decided(metadata={"serving": {"backend": "x"}})
    row = decided(metadata={"serving": {"backend": "x"}}, reserved=True)
    assert Decision.objects.get(pk=row.pk).metadata["serving"] == {"backend": "x"}


def pairs_of(agent: str, count: int = 12) -> None:
    for n in range(count):
        for response, thumb in (("good", "up"), ("bad", "down")):
            row = decision_record(agent=agent, messages=f"How {n}?", response=response).row
            rating_submit(decision=row, rater="ann", thumb=thumb)


def test_a_dataset_skips_counts_and_names_what_it_cannot_read() -> None:
    pairs_of("helper")
    bad = poisoned(decided(), metadata=RESERVED)
    prepared = prepare_training_dataset("helper")
    assert sum(prepared.counts.values()) == 12
    assert prepared.left_out["unreadable"] == 1
    assert list(prepared.unreadable) == [str(bad.pk)]
    assert "Expecting value" in prepared.unreadable[str(bad.pk)]
    assert list(prepared.snapshot.query["unreadable"]) == [str(bad.pk)]
    problem = ProblemRow.objects.get()
    assert (problem.decision, problem.agent, problem.reader) == (bad.pk, "helper", "dataset")


def test_what_can_be_read_again_is_no_problem_any_more() -> None:
    pairs_of("helper")
    bad = poisoned(decided(), metadata=RESERVED)
    prepare_training_dataset("helper")
    poisoned(bad, metadata={})
    prepare_training_dataset("helper")
    assert not ProblemRow.objects.exists()


def test_a_state_of_the_wrong_shape_is_taken_and_costs_its_own_reward_alone() -> None:
    bad = decided("widgets", json.dumps({"widget": "gauge"}), state={"widgets": "xx"})
    good = decided("widgets", json.dumps({"widget": "gauge"}), state={"widgets": ["gauge"], "question": "q"})
    other = decided("helper")
    found = rewards_calculate()
    assert (found.calculated, found.written, found.pending, found.refused) == (3, 2, 0, {})
    assert list(found.unreadable) == [str(bad.pk)]
    assert "widgets" in found.unreadable[str(bad.pk)]
    assert found.unreadable_count == 1
    assert set(RewardRecord.objects.values_list("decision", flat=True)) == {good.pk, other.pk}
    assert [row.decision for row in problems("widgets", "rewards")] == [bad.pk]


def test_what_was_skipped_before_never_takes_the_place_of_what_can_be_read() -> None:
    for n in range(3):
        decided("widgets", json.dumps({"widget": f"w{n}"}), state={"widgets": "xx"})
    rewards_calculate()
    good = decided("widgets", json.dumps({"widget": "gauge"}), state={"widgets": ["gauge"], "question": "q"})
    assert rewards_calculate(limit=1).written == 1
    assert RewardRecord.objects.get().decision == good.pk


def test_calculate_rewards_names_what_it_skips() -> None:
    bad = decided("widgets", json.dumps({"widget": "gauge"}), state={"widgets": "xx"})
    decided("widgets", json.dumps({"widget": "gauge"}), state={"widgets": ["gauge"], "question": "q"})
    out = printed("calculate_rewards", agent="widgets")
    assert f"Skipped decision {bad.pk}: " in out
    assert "/problems/" in out


def test_calculate_pending_answers_though_a_row_cannot_be_read() -> None:
    decided("widgets", json.dumps({"widget": "gauge"}), state={"widgets": "xx"})
    decided("helper")
    for body in ({}, {"agent": "widgets"}):
        answer = client("operate").post("/api/training/calculate-pending", body)
        assert answer.status_code == 200
        assert answer.json()["unreadable_count"] == 1
        assert answer.json()["pending"] == 0


def test_an_export_skips_counts_and_names_what_it_cannot_read(tmp_path: Any) -> None:
    good = decided()
    bad = poisoned(decided(), metadata=RESERVED)
    report = file_export(tmp_path / "out.jsonl", "openai-sft", Selection(agent="helper"))
    assert report.samples == 1
    assert report.left_out["unreadable"] == 1
    assert list(report.unreadable) == [str(bad.pk)]
    assert str(good.pk) not in report.unreadable
    assert ProblemRow.objects.get().reader == "export"


def test_a_fault_of_the_database_is_no_rows_fault() -> None:
    rows = RowReader("helper", "dataset")
    with pytest.raises(OperationalError), rows.row(uuid.uuid4()):
        raise OperationalError("away")
    with pytest.raises(OSError), rows.row(uuid.uuid4()):
        raise OSError("disk full")
    with rows.row(pk := uuid.uuid4()):
        raise KeyError("x")
    assert rows.unreadable == {pk: "KeyError: 'x'"}


ODD: tuple[Any, ...] = (
    1.5,
    True,
    "x",
    {"a": 1},
    [1],
    [None],
    [{}],
    [{"function": 1}],
    [{"function": {"name": 1, "arguments": 2}}],
    [{"function": {"name": None, "arguments": "{"}}],
    [["x"]],
)


def test_calls_of_any_kind_stop_no_export() -> None:
    """Of the fuzzer: `"tool_calls": 1.5` in a message ended the export for TensorZero, and all rows after it."""
    good = decided(response="good")
    for number, odd in enumerate(ODD):
        asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": odd}]
        row = decision_record(agent="helper", messages=f"q{number}", response=f"r{number}").row
        Decision.objects.filter(pk=row.pk).update(messages=asked)  # recording refuses most of these
        rating_submit(decision=row, rater="ann", thumb="up", correction="better")
    for name in formats.SHAPES:
        left_out: Counter[str] = Counter()
        text = b"".join(export_stream(name, Selection(), ExportReport(name, left_out=left_out)))
        if name == "ratchet":
            assert str(good.pk).encode() in text


def test_states_of_any_kind_are_listed_from_by_no_agent() -> None:
    """`{"drafts": 1.5}` ended an evaluation of every agent that chooses among drafts, and /api/decide/ with a 500."""
    keys = "drafts options widgets names tools steps goal tasks subjects passages inventory".split()
    for agent in AGENTS.values():
        for key in keys:
            for odd in (*ODD, None, {}, []):
                assert agent.choices({key: odd}) is not None
    api = client("ingest")
    for odd in ODD:
        answer = api.post("/api/decide/", {"agent": "prioritizer", "state": {"drafts": odd}})
        assert answer.status_code == 400, (odd, answer.content)


EXAMPLES = scaled("POISON", 6)
"""Few in the suite; a thousand in the campaign."""
ASKED = ("widgets", "filer", "prioritizer", "retriever", "tool-agent", "helper")

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | texts
KEYS = (
    "question widgets options context descriptions drafts right folders document tools facts tests answer "
    "expected_output trace error arm_propensity scenario k"
).split()
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
    {"agent": st.sampled_from(ASKED), "messages": messages | texts, "response": responses},
    optional={
        "state": values | objects,
        "candidates": candidates,
        "metadata": objects,
        "tags": st.lists(texts, max_size=2),
        "propensity": st.floats(0.01, 1),
        "unit": texts,
        "arm": texts,
        "run_id": texts,
        "latency_ms": st.floats(0, 1e12),
        "tokens_in": st.integers(0, 2**31 - 1),
    },
)
ratings = st.fixed_dictionaries(
    {"rater": st.sampled_from(["ann", "bob"])},
    optional={
        "thumb": st.sampled_from(["up", "down"]),
        "stars": st.integers(1, 5),
        "score": st.floats(0, 1),
        "correction": responses,
        "tags": st.lists(texts | st.just("demonstration"), max_size=2),
        "notes": texts,
    },
)
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
    max_examples=EXAMPLES, deadline=None, derandomize=not CAMPAIGN, suppress_health_check=list(HealthCheck)
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
    assert rewards_calculate().refused == {}
    assert set(RewardRecord.objects.values_list("decision", flat=True)) >= {row.pk for row in good}


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
def test_pages_of_many_rows_go_on(record_property: Callable[[str, object], None], odd: list[Any]) -> None:
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


@pytest.mark.slow
def test_a_conversation_of_2000_messages_is_taken_shown_and_read(client: Client) -> None:
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": f"turn {n} " + "word " * 40} for n in range(2_000)
    ]
    api, rows = ApiClient("ingest", "rate", "read"), []
    for response, thumb in (("good", "up"), ("bad", "down")):
        body = {"agent": "helper", "messages": turns, "response": response}
        made = api.post("/api/decisions/", body)
        assert made.status_code == 201
        rows.append(Decision.objects.get(pk=made.json()["id"]))
        rated = api.post(f"/api/decisions/{rows[-1].pk}/ratings/", {"thumb": thumb})
        assert rated.status_code == 201
    assert rows[0].messages == turns
    client.force_login(person("eve", "operator"))
    for page in (f"/decisions/{rows[0].pk}/", f"/rate/?decision={rows[0].pk}", "/rate/pairs/"):
        assert "turn 1999 " in client.get(page).text
    assert len(api.get(f"/api/decisions/{rows[0].pk}/").json()["messages"]) == 2_000
    for page in ("/decisions/", "/agreement/", "/problems/", "/", "/agents/helper/"):
        assert client.get(page).status_code == 200
    assert "helper" in agent_slugs()
    read_by_rewards(rows)
    read_by_datasets("helper")
    read_by_exports(rows)
