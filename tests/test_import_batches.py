"""Imports as batches: what a file brought is known by number, reported and listed."""

import hashlib
import json
import uuid
from pathlib import Path

import pytest
from django.utils import timezone

from feedback.models import Comparison, Decision, ImportBatch, Rating
from feedback.services import decision_record
from feedback.transfer import import_report
from feedback.transfer.import_ import ImportRefused
from tests.support.figures import figures_of
from tests.support.import_files import PAIR, THUMB, failing, written
from tests.support.imports import file_import
from tests.support.postgres import postgres_url as postgres_url
from tests.support.said import command, printed

pytestmark = pytest.mark.django_db


def test_an_import_that_stores_nothing_says_so_first_and_fails(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"prompt": "only a prompt"}, {"prompt": "another"}])
    out, line = failing("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    assert out.splitlines()[0].startswith(f"{path} (trl): ")
    assert figures_of(line.replace(str(path), ""))[:2] == [2, 2]
    assert not ImportBatch.objects.exists()
    found = json.loads(failing("import_feedback", str(path), "--format", "trl", "--json")[0])
    assert (found["skipped"], found["rows"], found["batch"]) == (2, 2, None)
    assert figures_of(found["files"][0]["problem"]) == [2]


def test_an_import_that_leaves_out_more_than_it_stores_keeps_what_it_stored_and_fails(tmp_path: Path) -> None:
    prompt = {"prompt": "only a prompt"}
    half = file_import(written(tmp_path / "x.jsonl", [THUMB, prompt]), agent="other", format="trl")
    assert (half.rows_stored, half.skipped, half.problem) == (1, 1, "")
    path = written(tmp_path / "x.jsonl", [THUMB, prompt, {"prompt": "another"}])
    out, line = failing("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    assert figures_of(line.replace(str(path), ""))[-4:-1] == [2, 3, 1]
    batch = ImportBatch.objects.get(agent="helper")
    assert f"Next: Undo it: python manage.py undo_import {batch.pk}" in out
    assert Rating.objects.get(decision__agent="helper").import_batch == batch
    # a dry run of nothing fails too, and refused rows count as left out
    nothing = written(tmp_path / "x.jsonl", [prompt])
    line = failing("import_feedback", str(nothing), "--format", "trl", "--dry-run")[1]
    assert "nothing could be stored" in line
    bad = written(tmp_path / "y.jsonl", [THUMB, {**THUMB, "label": 7}, {**THUMB, "label": 8}])
    report = file_import(bad, agent="third", format="trl", skip_bad=True)
    assert (report.rows_stored, report.refused_count, bool(report.problem)) == (1, 2, True)


def test_a_file_imported_again_was_here_already_and_makes_no_second_import(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [THUMB, PAIR])
    first = command("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    out = printed("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    today = timezone.now().date()
    assert f"nothing new: all 2 rows were here already (import {first['batch']} of {today})" in out
    again = command("import_feedback", str(path), "--agent", "helper", "--format", "trl")
    assert (again["already_here"], again["skipped"], again["batch"]) == (2, 0, None)
    assert ImportBatch.objects.count() == 1


def test_rows_that_repeat_each_other_are_told_from_rows_that_were_here(tmp_path: Path) -> None:
    row = {"type": "decision", "agent": "helper", "messages": [{"role": "user", "content": "q"}]}
    row |= {"response": "a", "id": str(uuid.uuid4()), "ratings": [{"rater": "ann", "thumb": "up"}]}
    report = file_import(written(tmp_path / "x.jsonl", [row, row]), agent="helper")
    assert (report.rows_stored, report.already_here, report.duplicates, report.skipped) == (1, 1, 1, 0)
    assert "2 rows: 1 stored, 1 already here" in report.headline
    assert report.problem == ""
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
    (demonstrations,) = said["shown"]
    assert demonstrations.endswith(": python manage.py train_sft --agent helper --dry-run")
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


def test_every_row_knows_the_import_that_brought_it(tmp_path: Path) -> None:
    here = decision_record(agent="helper", messages="other", response="x").row
    path = written(tmp_path / "x.jsonl", [PAIR, THUMB])
    report = file_import(path, agent="helper", format="trl", licence="CC-BY-4.0", actor="ann")
    batch = ImportBatch.objects.get()
    assert batch.pk == report.batch
    named = (batch.file, batch.format, batch.agent, batch.licence, batch.actor)
    assert named == ("x.jsonl", "trl", "helper", "CC-BY-4.0", "ann")
    assert batch.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert batch.bytes == path.stat().st_size
    counts = {"rows": 2, "rows_stored": 2, "decisions": 3, "ratings": 1, "comparisons": 1}
    assert {name: batch.counts[name] for name in counts} == counts
    assert batch.options == {"agent": "helper", "format": "trl"}
    assert batch.decisions.count() == 3
    assert Decision.objects.get(pk=here.pk).import_batch is None
    assert Rating.objects.get().import_batch == batch
    assert Comparison.objects.get().import_batch == batch


def test_a_dry_run_a_refused_file_and_one_of_too_many_rows_make_no_import(tmp_path: Path) -> None:
    file_import(written(tmp_path / "y.jsonl", [PAIR]), agent="helper", dry_run=True)
    with pytest.raises(ImportRefused):
        file_import(written(tmp_path / "x.jsonl", [PAIR, {**PAIR, "chosen": ""}]), agent="helper")
    path = written(tmp_path / "x.jsonl", [{**THUMB, "prompt": f"q{n}"} for n in range(4)])
    with pytest.raises(ValueError, match="more than 3 rows"):
        file_import(path, agent="helper", max_rows=3)
    assert not ImportBatch.objects.exists()
    assert file_import(path, agent="helper", max_rows=4).ratings == 4


def test_the_first_refused_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_report, "REFUSED_KEPT", 3)
    rows = [THUMB, *({**THUMB, "label": 7} for _ in range(8))]
    report = file_import(written(tmp_path / "x.jsonl", rows), agent="helper", format="trl", skip_bad=True)
    assert (report.refused_count, [row.line for row in report.refused]) == (8, [2, 3, 4])
    batch = ImportBatch.objects.get()
    assert (batch.counts["refused"], len(batch.refused)) == (8, 3)
    with pytest.raises(ImportRefused, match="8 of 9 rows refused"):
        file_import(tmp_path / "x.jsonl", agent="other", format="trl")


def test_the_imports_are_listed(tmp_path: Path) -> None:
    nothing = command("imports")
    assert (nothing["count"], nothing["imports"]) == (0, [])
    for agent in ("helper", "other"):
        file_import(written(tmp_path / f"{agent}.jsonl", [{**PAIR, "prompt": agent}]), agent=agent)
    found = command("imports")
    expected = [("other.jsonl", "other", 1), ("helper.jsonl", "helper", 1)]
    assert [(row["file"], row["agent"], row["counts"]["comparisons"]) for row in found["imports"]] == expected
    assert [row["agent"] for row in command("imports", "--agent", "helper")["imports"]] == ["helper"]
    words = printed("imports")
    assert "helper.jsonl" in words
