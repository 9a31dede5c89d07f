"""Forgetting a unit and withdrawing decisions: what goes, what stays, what was trained on it."""

import json
import uuid
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from feedback.accounts.authentication import key_create
from feedback.erasure.service import UnitUnknown, unit_forget
from feedback.erasure.withdrawals import (
    WithdrawalConflict,
    WithdrawalRefused,
    WithdrawalSelection,
    WithdrawalUnknown,
    decision_restore,
    decision_withdraw,
    decisions_withdraw,
    withdrawal_restore,
)
from feedback.models import Comparison, Decision, Lease, Outcome, ProblemRow, Rating, Trace, Withdrawal
from feedback.rating.pair_views import pairs_waiting
from feedback.rating.queue import next_decision, queue_progress
from feedback.recording.ingest import trace_record
from feedback.selectors import feedback_counts, feedback_counts_by_agent
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer.export import ExportReport, export_stream
from feedback.transfer.export_views import Selection
from rl.datasets import prepare_training_dataset
from rl.datasets.buffer import buffer_size, buffer_sizes
from rl.datasets.reward_records import rewards_calculate
from rl.models import Policy, RewardRecord, Snapshot, TrainingRun
from tests.support.api_client import ApiClient, error_of, person
from tests.support.imports import file_import
from tests.support.said import command, printed

pytestmark = pytest.mark.django_db


def decide(unit: str, response: str = "r", messages: str = "q", **more: Any) -> Decision:
    return decision_record(agent="a", messages=messages, response=response, unit=unit, **more).row


def rows() -> dict[str, int]:
    return {
        model.__name__: model._default_manager.count()
        for model in (Decision, Rating, Comparison, Outcome, Trace, Lease)
    }


def everything_of(unit: str) -> None:
    one, two = decide(unit, "1"), decide(unit, "2")
    rating_submit(decision=one, rater="ada", thumb="up")
    rating_withdraw(rating_submit(decision=one, rater="ada", thumb="down").row)
    rating_submit(decision=two, rater="bob", stars=3)
    comparison_submit(left=one, right=two, preference="left", rater="ada")
    comparison_submit(left=one, right=two, preference="tie", rater="ada")
    outcome_record(decision=one, name="clicked", value=1)
    Lease.objects.create(decision=two, rater="ada", until="2030-01-01T00:00:00Z")
    trace_record(agent="a", steps=[{"kind": "decision", "messages": "q", "response": "3", "unit": unit}])


def test_all_of_a_unit_goes_and_nothing_of_another_after_a_dry_run_that_counts_the_same() -> None:
    everything_of("ada")
    kept = rows()
    everything_of("bob")
    before = rows()
    tried = unit_forget("bob", dry_run=True)
    assert rows() == before
    done = unit_forget("bob")
    assert (done.decisions, done.ratings, done.comparisons, done.outcomes, done.traces) == (3, 4, 2, 1, 1)
    assert {**tried.__dict__, "dry_run": False, "not_compacted": "inside a transaction"} == done.__dict__
    assert rows() == kept
    assert not Decision.objects.filter(unit="bob").exists()


def test_a_comparison_with_anothers_decision_goes_and_the_other_stays() -> None:
    mine, theirs = decide("bob", "1"), decide("ada", "2")
    comparison_submit(left=theirs, right=mine, preference="left", rater="eve")
    assert unit_forget("bob").comparisons == 1
    assert list(Decision.objects.values_list("pk", flat=True)) == [theirs.pk]


def test_a_trace_of_several_units_loses_this_ones_steps() -> None:
    written = trace_record(
        agent="a",
        metadata={"unit": "bob", "status": "completed"},
        steps=[
            {"kind": "tool_call", "name": "find"},
            {"kind": "decision", "messages": "secret of bob", "response": "1", "unit": "bob", "n": 1},
            {"kind": "decision", "messages": "of ada", "response": "2", "unit": "ada"},
        ],
    )
    done = unit_forget("bob")
    assert (done.decisions, done.traces, done.traces_emptied) == (1, 0, 1)
    trace = Trace.objects.get(pk=written.trace.pk)
    assert trace.steps == [
        {"kind": "tool_call", "name": "find"},
        {"kind": "decision", "n": 1, "forgotten": True},
        {"kind": "decision", "messages": "of ada", "response": "2", "unit": "ada"},
    ]
    assert trace.metadata == {"status": "completed"}
    assert Decision.objects.get().unit == "ada"


def test_a_trace_without_decisions_that_names_the_unit_goes() -> None:
    trace_record(agent="a", metadata={"unit": "bob"}, steps=[{"kind": "step", "name": "x"}])
    trace_record(agent="a", metadata={"unit": "ada"}, steps=[{"kind": "step", "name": "x"}])
    assert unit_forget("bob").traces == 1
    assert Trace.objects.get().metadata == {"unit": "ada"}


@pytest.mark.slow
def test_more_decisions_than_one_statement_names() -> None:
    for n in range(900):
        decide("bob", str(n))
    other = decide("ada")
    assert unit_forget("bob").decisions == 900
    assert Decision.objects.get().pk == other.pk


def test_an_unknown_unit_is_refused() -> None:
    decide("bob")
    decide("")
    for unit in ("Bob", "bo", "%", "*", ""):
        with pytest.raises(UnitUnknown):
            unit_forget(unit)
    assert Decision.objects.count() == 2


def snapshot_with(unit: str) -> Snapshot:
    """A snapshot of twelve pairs, of which one prompt is the unit's."""
    for n in range(12):
        whose = unit if n == 0 else "others"
        left, right = (decide(whose, text, messages=f"{unit} asks {n}") for text in ("good", "bad"))
        comparison_submit(left=left, right=right, preference="left", rater="ada")
    prepared = prepare_training_dataset("a")
    assert prepared.snapshot is not None
    return prepared.snapshot


def trained_on(agent: str, snapshot: Snapshot | None, name: str) -> TrainingRun:
    """A run on a snapshot, and its policy."""
    base = {"agent": agent, "base_model": "bundled"}
    run = TrainingRun.objects.create(method="dpo", snapshot=snapshot, status="queued", **base)
    files = {"base_model_hash": "x", "adapter_path": "p", "adapter_sha256": "y"}
    Policy.objects.create(name=name, run=run, feedback_count=12, **base, **files)
    return run


def test_snapshots_with_its_prompts_are_listed_with_what_was_trained_on_them(ratchet_home: Any) -> None:
    snapshot = snapshot_with("bob")
    run = trained_on("a", snapshot, "a-v12")
    decide("eve", messages="something else")
    assert unit_forget("eve").snapshots == []
    assert unit_forget("others", dry_run=True).snapshots[0]["rows"] == 11
    out = printed("forget", "--unit", "bob", "--dry-run")
    assert snapshot.path.split("/")[-1][:8] in out
    listed = {"snapshot": snapshot.pk, "agent": "a", "path": snapshot.path, "rows": 1, "fault": ""}
    listed |= {"runs": [run.pk], "policies": ["a-v12"]}
    assert unit_forget("bob", dry_run=True).snapshots == [listed]
    (ratchet_home / snapshot.path).unlink()
    (found,) = unit_forget("bob").snapshots
    assert (found["rows"], found["snapshot"]) == (None, snapshot.pk)
    assert "cannot be read" in found["fault"]


def test_the_command_prints_one_object_and_refuses_in_one_line(settings: Any) -> None:
    settings.FEEDBACK_SNAPSHOTS_CONTAINING = ""  # feedback alone: nothing lists snapshots
    decide("bob")
    out = command("forget", "--unit", "bob")
    said = out
    assert (said["unit"], said["decisions"], said["dry_run"], said["snapshots"]) == ("bob", 1, False, [])
    with pytest.raises(CommandError, match="unit 'bob'"):
        call_command("forget", "--unit", "bob")


def decided(n: int = 0, response: str = "good", thumb: str = "", **facts: Any) -> Decision:
    row = decision_record(agent="helper", messages=f"How {n}?", response=response, **facts).row
    if thumb:
        rating_submit(decision=row, rater="ann", thumb=thumb)
    return row


def withdrawn(row: Decision) -> int:
    number = decision_withdraw(row.pk, actor="test").withdrawal
    assert number is not None
    return number


def client(*scopes: str) -> ApiClient:
    return ApiClient(key=key_create(str(uuid.uuid4()), scopes)[1])


def test_a_withdrawn_decision_is_in_no_dataset_and_no_count() -> None:
    rows = [
        decided(n, response, thumb) for n in range(12) for response, thumb in (("a", "up"), ("b", "down"))
    ]
    comparison_submit(left=rows[0], right=rows[1], preference="left", rater="ann")
    assert sum(prepare_training_dataset("helper", dry_run=True).counts.values()) == 12
    assert buffer_size("helper") == buffer_sizes()["helper"] == 25
    number = withdrawn(rows[0])
    assert sum(prepare_training_dataset("helper", dry_run=True).counts.values()) == 11
    counts = feedback_counts("helper")
    # its rating goes, and the comparison it stands in
    assert (counts.decisions, counts.ratings, counts.comparisons) == (23, 23, 0)
    assert feedback_counts_by_agent()["helper"].decisions == 23
    assert buffer_size("helper") == buffer_sizes()["helper"] == 23
    assert withdrawal_restore(number, actor="test") == 1
    assert sum(prepare_training_dataset("helper", dry_run=True).counts.values()) == 12
    assert buffer_size("helper") == 25


def test_nobody_is_asked_about_it() -> None:
    one, other = decided(response="a"), decided(response="b")
    assert pairs_waiting("ann").pair is not None
    number = withdrawn(one)
    assert next_decision("ann") == other
    assert queue_progress("ann").left == 1
    assert pairs_waiting("ann").pair is None
    withdrawal_restore(number, actor="test")
    assert queue_progress("ann").left == 2
    assert Decision.objects.get(pk=one.pk).ratings_wanted == 1


def test_its_reward_and_problems_go_and_the_reward_is_made_again() -> None:
    row = decided(thumb="up")
    outcome_record(decision=row, name="reward", value=1.0)
    ProblemRow.objects.create(decision=row.pk, agent="helper", reader="dataset", reason="x")
    rewards_calculate()
    number = withdrawn(row)
    assert not RewardRecord.objects.exists()
    assert not ProblemRow.objects.exists()
    assert rewards_calculate().calculated == 0
    withdrawal_restore(number, actor="test")
    assert rewards_calculate().written == 1


def test_it_is_in_no_export() -> None:
    kept, gone = decided(response="kept", thumb="up"), decided(response="gone", thumb="down")
    comparison_submit(left=kept, right=gone, preference="left", rater="ann")
    withdrawn(gone)
    for name in ("ratchet", "openai-sft", "trl", "simulation"):
        assert b"gone" not in b"".join(export_stream(name, Selection(), ExportReport(name))), name


def test_selections_take_what_meets_all_of_them(tmp_path: Any) -> None:
    first = decided(1, unit="bob", created_at=datetime(2020, 1, 1, tzinfo=UTC))
    second = decided(2, unit="bob", source="hook")
    third = decided(3, unit="ada", source="hook")
    file = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "?"}]
    file.write_text(
        json.dumps({"type": "decision", "agent": "other", "messages": messages, "response": "x"}) + "\n"
    )
    batch = file_import(file).batch
    cases = [
        (WithdrawalSelection(unit="bob"), 2),
        (WithdrawalSelection(unit="bob", source="hook"), 1),
        (WithdrawalSelection(agent="helper"), 3),
        (WithdrawalSelection(until=datetime(2021, 1, 1, tzinfo=UTC)), 1),
        (WithdrawalSelection(since=datetime(2021, 1, 1, tzinfo=UTC), agent="helper"), 2),
        (WithdrawalSelection(ids=[first.pk, third.pk]), 2),
        (WithdrawalSelection(batch=batch), 1),
        (WithdrawalSelection(ids=[second.pk], unit="ada"), 0),
    ]
    for selection, count in cases:
        assert decisions_withdraw(selection, actor="test", dry_run=True).decisions == count, selection
    assert not Withdrawal.objects.exists()
    with pytest.raises(WithdrawalRefused, match="at least one"):
        decisions_withdraw(WithdrawalSelection(), actor="test")
    assert decisions_withdraw(WithdrawalSelection(unit="nobody"), actor="test").withdrawal is None


def test_what_was_trained_on_it_is_listed() -> None:
    rows = [
        decided(n, response, thumb) for n in range(12) for response, thumb in (("a", "up"), ("b", "down"))
    ]
    snapshot = prepare_training_dataset("helper").snapshot
    run = trained_on("helper", snapshot, "helper-v12")
    done = decision_withdraw(rows[0].pk, actor="test")
    assert isinstance(snapshot, Snapshot)
    expected = {"runs": [run.pk], "policies": ["helper-v12"], "snapshots": [snapshot.pk]}
    assert done.trained_on == expected
    assert Withdrawal.objects.get().trained_on == expected


def test_one_of_several_is_put_back_alone() -> None:
    one, two = decided(1), decided(2)
    number = decisions_withdraw(WithdrawalSelection(agent="helper"), actor="test").withdrawal
    assert decision_restore(one.pk, actor="test")
    assert not decision_restore(one.pk, actor="test")
    assert Withdrawal.objects.get().restored_at is None
    assert decision_restore(two.pk, actor="eve")
    assert Withdrawal.objects.get().restored_by == "eve"
    with pytest.raises(WithdrawalConflict):
        withdrawal_restore(number or 0, actor="test")
    with pytest.raises(WithdrawalUnknown):
        withdrawal_restore(99, actor="test")
    with pytest.raises(WithdrawalUnknown):
        decision_withdraw(uuid.uuid4(), actor="test")


def test_rest_withdraws_lists_and_restores() -> None:
    row = decided(unit="bob")
    operate = client("operate")
    tried = operate.post("/api/withdrawals/", {"unit": "bob", "dry_run": True})
    assert (tried.status_code, tried.json()["decisions"], tried.json()["withdrawal"]) == (200, 1, None)
    done = operate.post("/api/withdrawals/", {"ids": [str(row.pk)], "reason": "a test"})
    assert (done.status_code, done.json()["ids"]) == (201, [str(row.pk)])
    number = done.json()["withdrawal"]
    read = client("read")
    assert read.get(f"/api/decisions/{row.pk}/").json()["withdrawal"] == number
    (listed,) = read.get("/api/withdrawals/").json()["results"]
    assert (listed["id"], listed["reason"], listed["decisions"]) == (number, "a test", 1)
    expected = {"withdrawal": number, "decisions": 1}
    assert operate.post(f"/api/withdrawals/{number}/restore/", {}).json() == expected
    assert operate.post(f"/api/withdrawals/{number}/restore/", {}).status_code == 409
    assert operate.post("/api/withdrawals/999/restore/", {}).status_code == 404


def test_rest_refuses_a_selection_it_cannot_read() -> None:
    operate = client("operate")
    bad = {"ids[0]": {"ids": ["x"]}, "batch": {"batch": "y"}, "since": {"since": "never"}}
    bad |= {"ids": {"ids": "x"}}
    for field, body in bad.items():
        answer = operate.post("/api/withdrawals/", body)
        assert answer.status_code == 400
        assert field in error_of(answer)["fields"]
    assert operate.post("/api/withdrawals/", {}).status_code == 400


def test_the_command_withdraws_lists_and_restores() -> None:
    row = decided()

    run = partial(printed, "withdraw_decisions")
    assert "Would withdraw 1 decision" in run("--id", str(row.pk), "--dry-run")
    found = json.loads(run("--id", str(row.pk), "--reason", "odd", "--json"))
    assert (found["decisions"], found["dry_run"]) == (1, False)
    number = str(found["withdrawal"])
    assert "odd" in run("--list")
    assert "Restored 1 decision" in run("--restore", number)
    with pytest.raises(CommandError, match="restored on"):
        run("--restore", number)
    with pytest.raises(CommandError, match="at least one"):
        run()


def signed_in(role: str) -> Client:
    user = person(f"a-{role}", role)
    user.is_staff = role != "rater"
    user.save()
    found = Client()
    found.force_login(user)
    return found


def test_the_page_of_problems_lists_filters_and_withdraws() -> None:
    row, other = decided(1), decided(2)
    ProblemRow.objects.create(
        decision=row.pk, agent="helper", reader="dataset", reason="Expecting <b>value</b>"
    )
    ProblemRow.objects.create(decision=other.pk, agent="filer", reader="rewards", reason="no widgets")
    operator = signed_in("operator")
    page = operator.get("/problems/").content.decode()
    assert str(row.pk) in page
    assert "Expecting &lt;b&gt;value" in page
    narrowed = operator.get("/problems/", {"agent": "filer", "reader": "rewards"}).content.decode()
    assert str(other.pk) in narrowed
    assert str(row.pk) not in narrowed
    assert operator.get("/problems/", {"reader": "nobody"}).status_code == 400
    done = operator.post(f"/decisions/{row.pk}/withdraw/", {"next": "/problems/"})
    assert (done.status_code, done["Location"]) == (302, "/problems/")
    assert str(row.pk) not in operator.get("/problems/").content.decode()
    assert "Withdrawn" in operator.get(f"/decisions/{row.pk}/").content.decode()
    operator.post(f"/decisions/{row.pk}/restore/")
    assert Decision.objects.get(pk=row.pk).withdrawal is None
    assert operator.post(f"/decisions/{row.pk}/withdraw/", {"next": "//evil.example/"})[
        "Location"
    ].startswith("/dec")


def test_ticked_decisions_are_withdrawn_after_a_page_that_asks() -> None:
    first, second, third = decided(1), decided(2), decided(3)
    operator = signed_in("operator")
    assert operator.get("/decisions/").text.count('form="withdraw"') == 3
    sent = {"which": "ticked", "id": [str(first.pk), str(second.pk)]}
    assert "Withdraw 2 decisions?" in operator.post("/decisions/withdraw/", sent).text
    assert not Withdrawal.objects.exists()
    confirmed = {**sent, "confirm": "on", "count": "2", "reason": "a load test"}
    assert operator.post("/decisions/withdraw/", confirmed)["Location"] == "/decisions/"
    made = Withdrawal.objects.get()
    assert (made.decisions_count, made.reason, made.actor) == (2, "a load test", "a-operator")
    assert list(Decision.objects.filter(withdrawal=None)) == [third]
    assert "withdrawn already" in operator.post("/decisions/withdraw/", confirmed, follow=True).text
    assert operator.get("/decisions/").text.count('form="withdraw"') == 1


def test_all_that_a_search_finds_is_withdrawn_and_what_learnt_from_it_is_named() -> None:
    bad, good = decided(1, thumb="down"), decided(2, thumb="up")
    prepared = prepare_training_dataset("helper", kind="labels", min_samples=1)
    TrainingRun.objects.create(agent="helper", method="kto", base_model="bundled", snapshot=prepared.snapshot)
    operator = signed_in("operator")
    sent = {"which": "found", "agent": "helper", "rated": "bad"}
    asked = operator.post("/decisions/withdraw/", sent).text
    assert "Withdraw 1 decision?" in asked
    assert "were trained on it" in asked or "was trained on it" in asked
    stale = operator.post("/decisions/withdraw/", {**sent, "confirm": "on", "count": "7"}).text
    assert "The number has changed meanwhile" in stale
    assert not Withdrawal.objects.exists()
    done = operator.post("/decisions/withdraw/", {**sent, "confirm": "on", "count": "1"})
    assert done["Location"] == "/decisions/?agent=helper&rated=bad"
    assert list(Decision.objects.filter(withdrawal=None)) == [good]
    assert Decision.objects.exclude(withdrawal=None).get() == bad


def test_everything_at_once_and_nothing_are_refused() -> None:
    decided()
    operator, rater = signed_in("operator"), signed_in("rater")
    sents: list[dict[str, str]] = [
        {},
        {"which": "found"},
        {"which": "ticked", "id": "x"},
        {"which": "found", "rated": "x"},
    ]
    for sent in sents:
        answer = operator.post("/decisions/withdraw/", {**sent, "confirm": "on", "count": "1"})
        assert answer["Location"] == "/decisions/"
        assert rater.post("/decisions/withdraw/", sent).status_code == 403
    assert not Withdrawal.objects.exists()
