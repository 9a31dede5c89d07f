"""Removing a unit: all of its feedback, nothing of others', and the snapshots that hold its prompts listed."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from feedback.erasure.service import UnitUnknown, unit_forget
from feedback.models import Comparison, Decision, Lease, Outcome, Rating, Trace
from feedback.recording.ingest import trace_record
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from rl.datasets import prepare_training_dataset
from rl.models import Policy, Snapshot, TrainingRun

pytestmark = pytest.mark.django_db


def decide(unit: str, response: str = "r", messages: str = "q", **more: Any) -> Decision:
    row: Decision = decision_record(agent="a", messages=messages, response=response, unit=unit, **more).row
    return row


def rows() -> dict[str, int]:
    return {
        model.__name__: model._default_manager.count()
        for model in (Decision, Rating, Comparison, Outcome, Trace, Lease)
    }


def everything_of(unit: str) -> None:
    one, two = decide(unit, "1"), decide(unit, "2")
    rating_submit(decision=one, rater="ada", thumb="up")
    second = rating_submit(decision=one, rater="ada", thumb="down").row
    rating_withdraw(second)
    rating_submit(decision=two, rater="bob", stars=3)
    comparison_submit(left=one, right=two, preference="left", rater="ada")
    comparison_submit(left=one, right=two, preference="tie", rater="ada")
    outcome_record(decision=one, name="clicked", value=1)
    Lease.objects.create(decision=two, rater="ada", until="2030-01-01T00:00:00Z")
    trace_record(agent="a", steps=[{"kind": "decision", "messages": "q", "response": "3", "unit": unit}])


def test_all_of_a_unit_goes_and_nothing_of_another() -> None:
    everything_of("ada")
    kept = rows()
    everything_of("bob")
    done = unit_forget("bob")
    assert (done.decisions, done.ratings, done.comparisons, done.outcomes, done.traces) == (3, 4, 2, 1, 1)
    assert rows() == kept
    assert not Decision.objects.filter(unit="bob").exists()


def test_a_dry_run_counts_the_same_and_removes_nothing() -> None:
    everything_of("bob")
    before = rows()
    tried = unit_forget("bob", dry_run=True)
    assert rows() == before
    done = unit_forget("bob")
    assert {**tried.__dict__, "dry_run": False, "not_compacted": "inside a transaction"} == done.__dict__
    assert set(rows().values()) == {0}


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


def test_snapshots_with_its_prompts_are_listed_with_what_was_trained_on_them() -> None:
    snapshot = snapshot_with("bob")
    run = TrainingRun.objects.create(agent="a", method="dpo", snapshot=snapshot, base_model="bundled")
    Policy.objects.create(
        name="a-v12", agent="a", run=run, base_model="bundled", base_model_hash="x", adapter_path="p",
        adapter_sha256="y", feedback_count=12,
    )  # fmt: skip
    assert unit_forget("others", dry_run=True).snapshots[0]["rows"] == 11
    found = unit_forget("bob").snapshots
    assert found == [
        {
            "snapshot": snapshot.pk, "agent": "a", "path": snapshot.path, "rows": 1, "fault": "", "runs": [run.pk],
            "policies": ["a-v12"],
        }
    ]  # fmt: skip


def test_a_snapshot_without_its_prompts_is_not_listed() -> None:
    snapshot_with("others")
    decide("bob", messages="something else")
    assert unit_forget("bob").snapshots == []


def test_a_snapshot_whose_file_is_gone_is_listed_with_the_fault(ratchet_home: Any) -> None:
    snapshot = snapshot_with("bob")
    (ratchet_home / snapshot.path).unlink()
    found = unit_forget("bob").snapshots
    assert [(s["rows"], s["snapshot"]) for s in found] == [(None, snapshot.pk)]
    assert "cannot be read" in found[0]["fault"]


def test_feedback_alone_can_forget_where_nothing_lists_snapshots(settings: Any) -> None:
    settings.FEEDBACK_SNAPSHOTS_CONTAINING = ""
    decide("bob")
    assert unit_forget("bob").snapshots == []


def test_the_command_prints_one_object_and_refuses_in_one_line() -> None:
    decide("bob")
    out = io.StringIO()
    call_command("forget", "--unit", "bob", "--json", stdout=out)
    said = json.loads(out.getvalue())
    assert (said["unit"], said["decisions"], said["dry_run"]) == ("bob", 1, False)
    with pytest.raises(CommandError, match="nothing is recorded for the unit 'bob'"):
        call_command("forget", "--unit", "bob")


def test_what_a_person_reads_names_counts_and_snapshots() -> None:
    snapshot = snapshot_with("bob")
    out = io.StringIO()
    call_command("forget", "--unit", "bob", "--dry-run", stdout=out)
    assert "Would remove of bob" in out.getvalue()
    assert snapshot.path.split("/")[-1][:8] in out.getvalue()
