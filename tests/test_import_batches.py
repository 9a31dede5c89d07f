"""Imports as batches: what a file brought is known by number, listed, and taken back without a trace."""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from feedback.erasure.service import unit_forget
from feedback.models import Comparison, Decision, ImportBatch, Outcome, Rating, Suggestion, Trace
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer import import_report
from feedback.transfer.import_ import ImportRefused, file_import
from feedback.transfer.import_undo import UndoRefused, import_undo
from rl.datasets import prepare_training_dataset
from rl.models import LabelRun, Policy, RewardRecord, TrainingRun
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import Server

pytestmark = pytest.mark.django_db

PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
THUMB = {"prompt": "q", "completion": "a", "label": True}


def written(path: Path, items: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    return path


def tables() -> dict[str, list[dict[str, Any]]]:
    """Every row of feedback and of what was made of it, but for the record of the imports themselves."""
    return {
        model.__name__: sorted(model._default_manager.order_by().values(), key=str)
        for app in ("feedback", "rl")
        for model in apps.get_app_config(app).get_models()
        if model.__name__ != "Tombstone"  # what was erased stays erased, whatever is undone
        if model is not ImportBatch
    }


def command(name: str, *arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    call_command(name, *arguments, "--json", stdout=out)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def failing(name: str, *arguments: str) -> tuple[str, str]:
    """What a command that exits with 1 prints on stdout, and its one line on stderr."""
    out = io.StringIO()
    with pytest.raises(CommandError) as error:
        call_command(name, *arguments, stdout=out)
    assert error.value.returncode == 1
    assert "\n" not in str(error.value)
    return out.getvalue(), str(error.value)


# --- An import that stores nothing says so ----------------------------------------------------------------


def test_an_import_that_stores_nothing_says_so_first_and_fails(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"prompt": "only a prompt"}, {"prompt": "another"}])
    out, line = failing("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    assert out.splitlines()[0] == f"{path} (trl): nothing could be stored of 2 rows"
    assert "nothing could be stored of 2 rows (2 " in line
    assert not ImportBatch.objects.exists()
    found = json.loads(failing("import_feedback", str(path), "--format", "trl", "--json")[0])
    assert (found["skipped"], found["rows"], found["batch"]) == (2, 2, None)
    assert found["files"][0]["problem"] == "nothing could be stored of 2 rows"


def test_an_import_that_leaves_out_more_than_it_stores_keeps_what_it_stored_and_fails(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [THUMB, *({"prompt": f"only {n}"} for n in range(2))])
    out, line = failing("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    assert "more was left out than stored: 2 of 3 rows left out, 1 stored" in line
    batch = ImportBatch.objects.get()
    assert f"Next: Take it back: python manage.py undo_import {batch.pk}" in out
    assert Rating.objects.get().import_batch == batch


def test_as_many_left_out_as_stored_is_no_problem(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [THUMB, {"prompt": "only a prompt"}])
    report = file_import(path, agent="helper", format="trl")
    assert (report.rows_stored, report.skipped, report.problem) == (1, 1, "")


def test_a_dry_run_of_nothing_fails_too_and_refused_rows_count_as_left_out(tmp_path: Path) -> None:
    nothing = written(tmp_path / "x.jsonl", [{"prompt": "only a prompt"}])
    assert (
        "nothing could be stored"
        in failing("import_feedback", str(nothing), "--format", "trl", "--dry-run")[1]
    )
    bad = written(tmp_path / "y.jsonl", [THUMB, {**THUMB, "label": 7}, {**THUMB, "label": 8}])
    report = file_import(bad, agent="helper", format="trl", skip_bad=True)
    assert (report.rows_stored, report.refused_count) == (1, 2)
    assert report.problem.startswith("more was left out than stored: 2 of 3 rows")


def test_a_file_imported_again_was_here_already_and_makes_no_second_import(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [THUMB, PAIR])
    first = command("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    out = io.StringIO()
    call_command("import_feedback", str(path), "--agent", "helper", "--format", "trl", stdout=out)
    today = timezone.now().date()
    assert f"nothing new: all 2 rows were here already (import {first['batch']} of {today})" in out.getvalue()
    again = command("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    assert (again["already_here"], again["skipped"], again["batch"]) == (2, 0, None)
    assert ImportBatch.objects.count() == 1


def test_rows_that_repeat_each_other_are_told_from_rows_that_were_here(tmp_path: Path) -> None:
    row = {"type": "decision", "agent": "helper", "messages": [{"role": "user", "content": "q"}], "response": "a",
           "id": str(uuid.uuid4()), "ratings": [{"rater": "ann", "thumb": "up"}]}  # fmt: skip
    report = file_import(written(tmp_path / "x.jsonl", [row, row]), agent="helper")
    assert (report.rows_stored, report.already_here) == (1, 0)
    assert report.skipped_because == {import_report.REPEATED: 1}
    assert file_import(tmp_path / "x.jsonl", agent="helper").already_here == 2


def test_the_report_ends_with_the_next_step(tmp_path: Path) -> None:
    said: dict[str, list[str]] = {}
    for name, row in (
        ("pairs", PAIR),
        ("thumbs", THUMB),
        ("shown", {"prompt": "how?", "completion": "so"}),
        ("plain", {"messages": [{"role": "user", "content": "hello"}], "response": "hi", "id": 1}),
    ):
        path = written(tmp_path / f"{name}.jsonl", [row])
        kind = "ratchet" if name == "plain" else "trl"
        if kind == "ratchet":
            path = written(path, [{"type": "decision", "agent": "helper", **row, "id": str(uuid.uuid4())}])
        said[name] = command("import_feedback", str(path), "--agent", "helper", "--format", kind)["next"]
    assert "train_dpo --agent helper --dry-run" in said["pairs"][-1]
    assert "train_kto --agent helper --dry-run" in said["thumbs"][-1]
    assert said["shown"] == ["See what can be trained: python manage.py train_sft --agent helper --dry-run"]
    assert said["plain"] == ["Rate them: /rate/?agent=helper"]
    liked = {"prompt": "a?", "response": "so", "thumb": "up"}
    corrected = {"prompt": "b?", "response": "so", "thumb": "down", "correction": "thus"}
    both = command(
        "import_feedback", str(written(tmp_path / "b.jsonl", [liked, corrected])), "--agent", "helper"
    )
    assert "train_sft --agent helper --dry-run" in both["next"][-1]
    for name, option in (("solved", " --outcome solved=GOOD:BAD"), ("reward", "")):
        row = {"prompt": f"{name}?", "response": "so", "outcomes": {name: 1}}
        (step,) = command("import_feedback", str(written(tmp_path / "o.jsonl", [row])), "--agent", "helper")[
            "next"
        ]
        assert step.endswith(f"python manage.py calculate_rewards --agent helper{option}")


# --- What is known of an import ---------------------------------------------------------------------------


def test_every_row_knows_the_import_that_brought_it(tmp_path: Path) -> None:
    here = decision_record(agent="helper", messages="other", response="x").row
    path = written(tmp_path / "x.jsonl", [PAIR, THUMB])
    report = file_import(path, agent="helper", format="trl", licence="CC-BY-4.0", actor="ann")
    batch = ImportBatch.objects.get()
    assert batch.pk == report.batch
    assert (batch.file, batch.format, batch.agent, batch.licence, batch.actor) == (
        "x.jsonl", "trl", "helper", "CC-BY-4.0", "ann",
    )  # fmt: skip
    assert batch.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert batch.bytes == path.stat().st_size
    assert {name: batch.counts[name] for name in ("rows", "rows_stored", "decisions", "ratings", "comparisons")} == {
        "rows": 2, "rows_stored": 2, "decisions": 3, "ratings": 1, "comparisons": 1,
    }  # fmt: skip
    assert batch.options == {"agent": "helper", "format": "trl"}
    assert batch.decisions.count() == 3
    assert Decision.objects.get(pk=here.pk).import_batch is None
    assert Rating.objects.get().import_batch == batch
    assert Comparison.objects.get().import_batch == batch


def test_a_dry_run_and_a_refused_file_make_no_import(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [PAIR, {**PAIR, "chosen": ""}])
    file_import(written(tmp_path / "y.jsonl", [PAIR]), agent="helper", dry_run=True)
    with pytest.raises(ImportRefused):
        file_import(path, agent="helper")
    assert not ImportBatch.objects.exists()


def test_refused_rows_are_counted_and_the_first_of_them_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_report, "REFUSED_KEPT", 3)
    rows = [THUMB, *({**THUMB, "label": 7} for _ in range(8))]
    report = file_import(written(tmp_path / "x.jsonl", rows), agent="helper", format="trl", skip_bad=True)
    assert (report.refused_count, [row.line for row in report.refused]) == (8, [2, 3, 4])
    batch = ImportBatch.objects.get()
    assert (batch.counts["refused"], len(batch.refused)) == (8, 3)
    with pytest.raises(ImportRefused, match="8 of 9 rows refused"):
        file_import(tmp_path / "x.jsonl", agent="other", format="trl")


def test_a_file_of_more_rows_than_allowed_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{**THUMB, "prompt": f"q{n}"} for n in range(4)])
    with pytest.raises(ValueError, match="more than 3 rows"):
        file_import(path, agent="helper", max_rows=3)
    assert file_import(path, agent="helper", max_rows=4).ratings == 4


def test_the_imports_are_listed(tmp_path: Path) -> None:
    nothing = command("imports")
    assert (nothing["count"], nothing["imports"]) == (0, [])
    for agent in ("helper", "other"):
        file_import(written(tmp_path / f"{agent}.jsonl", [{**PAIR, "prompt": agent}]), agent=agent)
    found = command("imports")
    assert [(row["file"], row["agent"], row["counts"]["comparisons"]) for row in found["imports"]] == [
        ("other.jsonl", "other", 1),
        ("helper.jsonl", "helper", 1),
    ]
    assert [row["agent"] for row in command("imports", "--agent", "helper")["imports"]] == ["helper"]
    words = io.StringIO()
    call_command("imports", stdout=words)
    assert "helper.jsonl" in words.getvalue()


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


def named(rater: str, **said: Any) -> dict[str, Any]:
    """A decision of Ratchet's own format that a rater rated."""
    return {"type": "decision", "id": "11111111-1111-4111-8111-111111111111", "agent": "helper", "response": "a",
            "messages": [{"role": "user", "content": "q"}], "ratings": [{"rater": rater, **said}]}  # fmt: skip


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


@pytest.mark.slow
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
        agent=agent, method="dpo", snapshot=prepared.snapshot, base_model="bundled", status="succeeded",
        finished_at=timezone.now(),
    )  # fmt: skip
    Policy.objects.create(
        name=f"{agent}-v12", agent=agent, run=run, base_model="bundled", base_model_hash="x", adapter_path="p",
        adapter_sha256="y", feedback_count=12,
    )  # fmt: skip
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
            agent="helper", method="dpo", snapshot=prepared.snapshot, base_model="b", status=status,
            finished_at=timezone.now(),
        )  # fmt: skip
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


# --- Any import, taken back, leaves everything as it was --------------------------------------------------

AGENT, RATERS = "helper", ("ann", "bob", "cem")
IDS = [str(uuid.UUID(int=n)) for n in range(1, 7)]
WORDS: list[dict[str, Any]] = [
    {"thumb": "up"},
    {"thumb": "down"},
    {"stars": 2},
    {"score": 0.9},
    {"withdrawn": True},
]


@st.composite
def histories(draw: Any) -> list[dict[str, Any]]:
    """Rows of Ratchet's own format: decisions on two prompts with ratings, outcomes and traces, and comparisons."""
    ids = draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True))
    rows: list[dict[str, Any]] = []
    traced = draw(st.booleans())
    if traced:
        steps = [{"kind": "step", "name": "x"}]
        rows.append({"type": "trace", "id": str(uuid.UUID(int=99)), "agent": AGENT, "steps": steps,
                     "created_at": "2026-01-01T00:00:00Z"})  # fmt: skip
    for id in ids:
        words = [
            {"rater": draw(st.sampled_from(RATERS)), "rater_kind": draw(st.sampled_from(["human", "simulated"])),
             **draw(st.sampled_from(WORDS))}
            for _ in range(draw(st.integers(0, 3)))
        ]  # fmt: skip
        outcomes = [{"name": "clicked", "value": draw(st.integers(0, 3)), "at": "2026-01-02T00:00:00Z"}]
        rows.append(
            {**row_of(id), "ratings": words, "outcomes": outcomes if draw(st.booleans()) else [],
             "trace": str(uuid.UUID(int=99)) if traced and draw(st.booleans()) else None}
        )  # fmt: skip
    for left in ids:
        for right in ids:
            if left < right and IDS.index(left) % 2 == IDS.index(right) % 2 and draw(st.booleans()):
                said = draw(st.sampled_from(["left", "right", "tie"]))
                rows.append({"type": "comparison", "left": left, "right": right, "preference": said,
                             "rater": draw(st.sampled_from(RATERS))})  # fmt: skip
    return rows


def row_of(id: str) -> dict[str, Any]:
    prompt = f"prompt {IDS.index(id) % 2}"
    return {"type": "decision", "id": id, "agent": AGENT, "messages": [{"role": "user", "content": prompt}],
            "response": f"response {id[-1]}", "source": "app", "created_at": "2026-01-01T00:00:00Z"}  # fmt: skip


def people_act(seed: int) -> None:
    """What people and the app do here meanwhile: rate, change their minds, take back, compare, measure."""
    draw = random.Random(seed)
    for _ in range(draw.randrange(6)):
        rows = list(Decision.objects.order_by("pk"))
        if not rows or draw.random() < 0.2:
            facts = {name: value for name, value in row_of(draw.choice(IDS)).items() if name != "type"}
            decision_record(**facts)
            continue
        row, rater = draw.choice(rows), draw.choice(RATERS)
        standing = Rating.objects.filter(
            decision=row, rater=rater, superseded_by=None, withdrawn=False
        ).first()
        if standing is not None and draw.random() < 0.4:
            rating_withdraw(standing)
        elif draw.random() < 0.6:
            rating_submit(decision=row, rater=rater, thumb=draw.choice(["up", "down"]))
        elif draw.random() < 0.5:
            outcome_record(decision=row, name="opened", value=draw.random())
        else:
            others = [other for other in rows if other.prompt_hash == row.prompt_hash and other.pk != row.pk]
            if others:
                comparison_submit(left=row, right=draw.choice(others), preference="tie", rater=rater)


def in_a_world_of_its_own(work: Callable[[], None]) -> None:
    with transaction.atomic():
        work()
        transaction.set_rollback(True)


def consistent() -> None:
    """What holds of the database at any time."""
    for row in Decision.objects.all():
        standing = Rating.objects.filter(
            decision=row, superseded_by=None, withdrawn=False, rater_kind="human"
        )
        assert row.ratings_human == standing.count()
    for model, chain in ((Rating, ("decision_id", "rater")), (Comparison, ("left_id", "right_id", "rater"))):
        rows: Any = model._default_manager
        for key in set(rows.order_by().values_list(*chain)):
            words = list(rows.filter(**dict(zip(chain, key, strict=True))))
            assert sum(word.supersedes_id is None for word in words) == 1
            assert {word.supersedes_id for word in words} - {None} <= {word.pk for word in words}
            assert not any(word.withdrawn and word.supersedes_id is None for word in words)
    assert not Outcome.objects.exclude(decision__in=Decision.objects.values("pk")).exists()


PROPERTY = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # an example takes a tenth of a second: shrinking one would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@PROPERTY
@given(rows=histories(), seed=st.integers(0, 10**6))
def test_any_import_taken_back_leaves_every_table_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], seed: int
) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any.jsonl", rows)

    def work() -> None:
        people_act(seed)
        before = tables()
        report = file_import(path, skip_bad=True)
        if report.batch is None:
            return
        consistent()
        import_undo(report.batch, actor="x")
        assert tables() == before

    in_a_world_of_its_own(work)


@pytest.mark.slow
@PROPERTY
@given(one=histories(), other=histories(), seed=st.integers(0, 10**6))
def test_two_imports_and_people_between_them_are_taken_back_in_either_order(
    tmp_path_factory: pytest.TempPathFactory, one: list[Any], other: list[Any], seed: int
) -> None:
    files = [
        written(tmp_path_factory.getbasetemp() / f"{name}.jsonl", rows)
        for name, rows in (("one", one), ("other", other))
    ]
    ends = []

    def work(order: int) -> None:
        people_act(seed)
        batches = []
        for n, file in enumerate(files):
            batches.append(file_import(file, skip_bad=True).batch)
            people_act(seed + n + 1)
        for number in batches[::order]:
            if number is not None:
                import_undo(number, actor="x")
                consistent()
        assert not Rating.objects.exclude(import_batch=None).exists()
        assert not Outcome.objects.exclude(import_batch=None).exists()
        said = {name: Decision.objects.filter(ratings_human__gt=0).count() for name in ("rated",)}
        ends.append(
            (sorted(map(str, Decision.objects.values_list("pk", flat=True))), said, Trace.objects.count())
        )

    for order in (1, -1):
        in_a_world_of_its_own(lambda order=order: work(order))  # type: ignore[misc]
    assert ends[0] == ends[1]


# --- PostgreSQL -------------------------------------------------------------------------------------------

ROUND = """
import json, sys
import django
django.setup()
from django.core.management import call_command
from feedback.agents.changes import agent_delete, agent_rename
from tests.test_import_batches import consistent, import_undo, file_import, people_act, tables
call_command("migrate", verbosity=0)
same = []
for seed in range(4):
    people_act(seed)
    before = tables()
    numbers = [file_import(path, skip_bad=True).batch for path in sys.argv[1:]]
    consistent()
    for number in numbers[::-1] if seed % 2 else numbers:
        import_undo(number, actor="x")
        consistent()
    same.append(tables() == before)
people_act(4)
file_import(sys.argv[1])
call_command("calculate_rewards", "--all", stdout=sys.stderr)
agent_rename("helper", "desk")
moved = {row["agent"] for rows in tables().values() for row in rows if "agent" in row}
agent_delete("desk", actor="x")
left = {name: len(rows) for name, rows in tables().items() if rows}
print(json.dumps([same, sorted(moved), left]))
"""


@pytest.mark.postgres
def test_postgresql_takes_imports_back_and_renames_and_deletes_agents(
    tmp_path: Path, postgres_url: str
) -> None:
    """Rows that came through COPY; chains, traces and foreign keys that are checked at the end of a transaction."""
    trace = str(uuid.UUID(int=99))
    words = [{"rater": rater, **said} for rater, said in zip(RATERS, WORDS, strict=False)]
    line = {"type": "trace", "id": trace, "agent": AGENT, "steps": [{"kind": "step", "name": "x"}]}
    outcome = {"name": "clicked", "value": 1, "at": "2026-01-02T00:00:00Z"}
    rows = [line, *({**row_of(id), "ratings": words, "outcomes": [outcome], "trace": trace} for id in IDS)]
    compared = {"type": "comparison", "left": IDS[0], "right": IDS[2], "preference": "left", "rater": "ann"}
    one = written(tmp_path / "one.jsonl", [*rows, compared])
    changed = [{**row_of(id), "ratings": [{"rater": "ann", "thumb": "down"}]} for id in IDS]
    other = written(tmp_path / "other.jsonl", [*changed, {**compared, "preference": "tie"}])
    server = Server(fresh_database(postgres_url), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(one), str(other)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1], env=server.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    same, moved, left = json.loads(done.stdout)
    assert same == [True] * 4
    # the name that was left stays hashed apart, also when the agent is gone
    assert (moved, left) == (["desk", "helper"], {"AgentName": 1})
