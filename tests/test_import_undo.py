"""Undoing an import: what it brought goes, what people did since stays, and what was trained on it refuses."""

from __future__ import annotations

import io
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from feedback.erasure.service import unit_forget
from feedback.models import Decision, ImportBatch, Rating, Suggestion, Trace
from feedback.services import (
    decision_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer.import_undo import UndoRefused, import_undo
from rl.datasets import prepare_training_dataset
from rl.models import LabelRun, Policy, RewardRecord, TrainingRun
from tests.support.import_files import PAIR, THUMB, command, failing, named, tables, written
from tests.support.imports import file_import
from tests.support.postgres import postgres_url as postgres_url

pytestmark = pytest.mark.django_db


# --- Undo -------------------------------------------------------------------------------------------------


def test_an_undone_import_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    decision_record(agent="helper", messages="q", response="here before")
    before = tables()
    number = file_import(written(tmp_path / "x.jsonl", [PAIR, THUMB]), agent="helper", format="trl").batch
    tried = command("undo_import", str(number), "--dry-run")
    assert tables() != before
    done = command("undo_import", str(number))
    assert tables() == before
    assert (done["decisions"], done["ratings"], done["comparisons"], done["undone"]) == (3, 1, 1, True)
    assert tried.pop("next") == f"python manage.py undo_import {number}"
    assert done.pop("next") == "python manage.py imports"
    assert {**tried, "dry_run": False, "undone": True} == done
    batch = ImportBatch.objects.get()
    assert batch.is_undone
    assert (batch.undone_by, batch.undone["decisions"]) == ("undo_import", 3)
    assert "was undone on" in failing("undo_import", str(number))[1]
    assert "there is no import 9999" in failing("undo_import", "9999")[1]
    # and in again, as a new one
    assert file_import(tmp_path / "x.jsonl", agent="helper", format="trl").batch != number
    assert Rating.objects.count() == 1


def test_a_decision_that_a_person_rated_here_stays_with_that_rating(tmp_path: Path) -> None:
    rows = [{**THUMB, "prompt": f"q{n}"} for n in range(3)]
    number = file_import(written(tmp_path / "x.jsonl", rows), agent="helper", format="trl").batch
    rated = Decision.objects.get(messages__0__content="q1")
    mine = rating_submit(decision=rated, rater="ada", thumb="down").row
    assert Decision.objects.get(pk=rated.pk).ratings_human == 2
    done = import_undo(number, actor="ada")
    assert (done.decisions, done.decisions_kept, done.ratings) == (2, 1, 3)
    assert Decision.objects.get().pk == rated.pk
    assert Decision.objects.get().ratings_human == 1
    assert Rating.objects.get().pk == mine.pk
    # imported again, the verdict of the file is back beside the person's
    again = file_import(tmp_path / "x.jsonl", agent="helper", format="trl")
    assert (again.decisions, again.ratings) == (2, 3)
    import_undo(again.batch or 0, actor="ada")
    assert Rating.objects.get().pk == mine.pk


def test_a_word_that_was_changed_here_stands_by_itself_afterwards(tmp_path: Path) -> None:
    number = file_import(written(tmp_path / "x.jsonl", [named("ann", thumb="up")])).batch
    changed = rating_submit(decision=Decision.objects.get(), rater="ann", thumb="down").row
    assert Rating.objects.get(pk=changed.pk).supersedes is not None
    done = import_undo(number or 0, actor="x")
    assert (done.ratings, done.decisions_kept) == (1, 1)
    row = Rating.objects.get()
    assert (row.pk, row.supersedes, row.thumb) == (changed.pk, None, "down")
    assert Decision.objects.get().ratings_human == 1


def test_a_word_that_was_taken_back_here_goes_with_its_withdrawal(tmp_path: Path) -> None:
    before = tables()
    number = file_import(written(tmp_path / "x.jsonl", [named("ann", thumb="up")])).batch
    rating_withdraw(Rating.objects.get())
    done = import_undo(number or 0, actor="x")
    assert (done.ratings, done.withdrawals, done.decisions, done.decisions_kept) == (1, 1, 1, 0)
    assert tables() == before


def test_what_an_import_superseded_stands_again(tmp_path: Path) -> None:
    id = "11111111-1111-4111-8111-111111111111"
    here = decision_record(agent="helper", messages="q", response="a", id=id, source="ratchet").row
    rating_submit(decision=here, rater="ann", thumb="down")
    rating_submit(decision=here, rater="bob", thumb="down")
    before = tables()
    row = named("ann", thumb="up")
    row["ratings"] += [{"rater": "bob", "withdrawn": True}, {"rater": "cem", "stars": 4}]
    number = file_import(written(tmp_path / "x.jsonl", [row])).batch
    assert Decision.objects.get().ratings_human == 2
    import_undo(number or 0, actor="x")
    assert tables() == before
    assert Decision.objects.get().ratings_human == 2


def test_a_decision_that_two_imports_spoke_of_goes_with_the_second(tmp_path: Path) -> None:
    before = tables()
    first = file_import(written(tmp_path / "x.jsonl", [named("ann", thumb="up")])).batch or 0
    second = file_import(written(tmp_path / "y.jsonl", [named("bob", thumb="down")])).batch or 0
    done = import_undo(first, actor="x")
    assert (done.decisions, done.decisions_kept, done.ratings) == (0, 1, 1)
    assert Rating.objects.get().rater == "bob"
    done = import_undo(second, actor="x")
    assert (done.decisions, done.ratings) == (1, 1)
    assert tables() == before


def test_later_imports_that_found_rows_here_are_named(tmp_path: Path) -> None:
    first = file_import(written(tmp_path / "x.jsonl", [THUMB]), agent="helper", format="trl").batch or 0
    both = written(tmp_path / "y.jsonl", [THUMB, {**THUMB, "prompt": "another"}])
    second = file_import(both, agent="helper", format="trl").batch
    assert import_undo(first, actor="x").imports_since == [second]


def test_outcomes_traces_suggestions_and_rewards_go_with_their_decisions(tmp_path: Path) -> None:
    before = tables()
    trace, outcome = str(uuid.uuid4()), {"name": "clicked", "value": 1, "at": "2026-01-01T00:00:00Z"}
    rows = [
        {"type": "trace", "id": trace, "agent": "helper", "steps": [{"kind": "tool_call", "name": "find"}]},
        {**named("ann", thumb="up"), "trace": trace, "outcomes": [outcome]},
    ]
    number = file_import(written(tmp_path / "x.jsonl", rows)).batch or 0
    row = Decision.objects.get()
    Suggestion.objects.create(decision=row, labeller="m", good=0.7)
    call_command("calculate_rewards", "--all", stdout=io.StringIO())
    assert RewardRecord.objects.filter(decision=row.pk).exists()
    done = import_undo(number, actor="x")
    assert (done.outcomes, done.traces) == (1, 1)
    assert tables() == before


def test_a_trace_that_an_import_gave_to_an_earlier_decision_is_taken_from_it(tmp_path: Path) -> None:
    id, trace = "11111111-1111-4111-8111-111111111111", str(uuid.uuid4())
    decision_record(agent="helper", messages="q", response="a", id=id, source="ratchet")
    before = tables()
    rows = [
        {"type": "trace", "id": trace, "agent": "helper", "steps": [{"kind": "tool_call", "name": "find"}]},
        {**named("ann", thumb="up"), "trace": trace},
    ]
    number = file_import(written(tmp_path / "x.jsonl", rows)).batch or 0
    assert str(Decision.objects.get().trace_id) == trace
    import_undo(number, actor="x")
    assert tables() == before


def test_a_trace_of_an_undone_import_goes_with_the_last_that_needed_it(tmp_path: Path) -> None:
    id, trace = "11111111-1111-4111-8111-111111111111", str(uuid.uuid4())
    line = {"type": "trace", "id": trace, "agent": "helper", "steps": [{"kind": "tool_call", "name": "find"}]}
    decision_record(agent="helper", messages="q", response="a", id=id, source="ratchet")
    before = tables()
    first = file_import(written(tmp_path / "x.jsonl", [line])).batch or 0
    second = (
        file_import(written(tmp_path / "y.jsonl", [{**named("ann", thumb="up"), "trace": trace}])).batch or 0
    )
    assert (import_undo(first, actor="x").traces, Trace.objects.count()) == (0, 1)
    assert import_undo(second, actor="x").traces == 1
    assert tables() == before


@pytest.mark.campaign
def test_every_example_of_a_format_is_taken_back_exactly() -> None:
    folder, formats_read = Path(__file__).parent / "formats", set()
    before = tables()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if "dataset_info" in path.name:
            continue  # says which columns another file has
        report = file_import(path, agent=None if path.name == "ratchet.jsonl" else "helper", skip_bad=True)
        if report.batch is None:
            assert report.problem, path.name  # ratings of decisions that are not here, prompts alone
            continue
        formats_read.add(report.format)
        import_undo(report.batch, actor="x")
        assert tables() == before, path.name
    assert len(formats_read) >= 25


# --- What was trained on it -------------------------------------------------------------------------------


def trained(agent: str = "helper") -> TrainingRun:
    prepared = prepare_training_dataset(agent)
    run = TrainingRun.objects.create(
        agent=agent,
        method="dpo",
        snapshot=prepared.snapshot,
        base_model="bundled",
        status="succeeded",
        finished_at=timezone.now(),
    )
    Policy.objects.create(
        name=f"{agent}-v12",
        agent=agent,
        run=run,
        base_model="bundled",
        base_model_hash="x",
        adapter_path="p",
        adapter_sha256="y",
        feedback_count=12,
    )
    return run


def pairs(tmp_path: Path, name: str = "x") -> int:
    rows = [{"prompt": f"{name} asks {n}", "chosen": "good", "rejected": "bad"} for n in range(12)]
    return file_import(written(tmp_path / f"{name}.jsonl", rows), agent="helper").batch or 0


def test_what_was_trained_on_refuses_unless_forced(tmp_path: Path) -> None:
    number = pairs(tmp_path)
    run = trained()
    before = tables()
    out, line = failing("undo_import", str(number), "--json")
    assert f"run {run.pk}, policy helper-v12 were trained on it" in line
    assert "--force" in line
    assert json.loads(out)["trained_on"]["policies"] == ["helper-v12"]
    assert tables() == before
    done = command("undo_import", str(number), "--force")
    assert done["trained_on"]["runs"] == [run.pk]
    assert not Decision.objects.exists()
    assert ImportBatch.objects.get().undone["forced"] is True


def test_what_was_trained_before_or_on_other_prompts_refuses_nothing(tmp_path: Path) -> None:
    pairs(tmp_path, "first")
    trained()
    second = pairs(tmp_path, "second")
    assert import_undo(second, actor="x").trained_on == {}


def test_runs_that_came_to_nothing_refuse_nothing(tmp_path: Path) -> None:
    number = pairs(tmp_path)
    prepared = prepare_training_dataset("helper")
    for status in ("failed", "cancelled", "refused"):
        TrainingRun.objects.create(
            agent="helper",
            method="dpo",
            snapshot=prepared.snapshot,
            base_model="b",
            status=status,
            finished_at=timezone.now(),
        )
    assert prepared.snapshot is not None
    assert import_undo(number, actor="x").trained_on == {"snapshots": [prepared.snapshot.pk]}


def test_a_label_model_counts_as_trained(tmp_path: Path) -> None:
    number = file_import(written(tmp_path / "x.jsonl", [THUMB]), agent="helper", format="trl").batch or 0
    LabelRun.objects.create(agent="helper", base_model="b", path="labels/helper/1", ratings=1)
    with pytest.raises(UndoRefused, match="label model"):
        import_undo(number, actor="x")


def test_feedback_alone_can_undo_where_nothing_knows_of_training(tmp_path: Path, settings: Any) -> None:
    number = pairs(tmp_path)
    trained()
    settings.FEEDBACK_TRAINED_ON = settings.FEEDBACK_FORGET = ""
    assert import_undo(number, actor="x").decisions == 24


# --- Forgetting and undoing -------------------------------------------------------------------------------


def test_a_unit_that_was_forgotten_does_not_hinder_the_undo(tmp_path: Path) -> None:
    before = tables()
    rows = [
        {**named("ann", thumb="up"), "unit": "bob"},
        {**named("ann", thumb="up"), "id": str(uuid.uuid4())},
    ]
    number = file_import(written(tmp_path / "x.jsonl", rows)).batch or 0
    unit_forget("bob")
    done = import_undo(number, actor="x")
    assert done.decisions == 1
    assert tables() == before


def test_forgetting_a_unit_takes_it_out_of_the_report_of_refused_rows(tmp_path: Path) -> None:
    bad = {**named("ann", thumb="sideways by user-17"), "id": str(uuid.uuid4())}
    rows = [{**named("ann", thumb="up"), "unit": "user-17"}, bad]
    file_import(written(tmp_path / "x.jsonl", rows), skip_bad=True)
    assert "user-17" in json.dumps(ImportBatch.objects.get().refused)
    unit_forget("user-17")
    assert "user-17" not in json.dumps(ImportBatch.objects.get().refused)
    assert ImportBatch.objects.get().counts["refused"] == 1
