"""Erasure is complete: no copy of the text stays in rows, spool, files or the database's own file, and none returns."""

import json
import uuid
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from feedback.erasure.marks import REDACTION, marks_of, texts_of
from feedback.erasure.service import UnitUnknown, files_erase, unit_forget
from feedback.models import Comparison, Decision, ImportBatch, ProblemRow, Tombstone, Withdrawal
from feedback.recording.ingest import decisions_ingest, trace_record
from feedback.recording.recorder import Recorder, outbox_of, spool_folder
from feedback.services import decision_record, outcome_record, rating_submit
from feedback.storage import tombstones
from feedback.storage.tombstones import ErasedConflict
from rl.datasets import prepare_training_dataset, snapshot_rows
from rl.models import Evaluation, GoldenCase, RewardRecord, Snapshot, TrainingRun
from tests.support.api_client import ApiClient
from tests.support.imports import file_import
from tests.support.vanishing_folder import vanishes_when_listed

pytestmark = pytest.mark.django_db

SECRET = "the xylophone of aunt Griselda"
UNIT = "user-4711"


def asked(text: str, response: str, unit: str = "", **facts: Any) -> Decision:
    messages = [
        {"role": "system", "content": "You help with musical instruments."},
        {"role": "user", "content": text},
    ]
    return decision_record(agent="helper", messages=messages, response=response, unit=unit, **facts).row


def world() -> tuple[Decision, Decision]:
    """A unit's decisions with their text copied to everywhere it can go, and those of others."""
    for n in range(12):
        unit, text = (
            (UNIT, f"Repair {SECRET} now") if n == 0 else (f"other-{n}", f"Tune my violin number {n}")
        )
        for response, thumb in (("Loosen the two screws first.", "up"), ("No idea at all, sorry.", "down")):
            row = asked(text, response if n else f"{response} {SECRET}", unit, state={"note": text})
            rating_submit(decision=row, rater="ann", thumb=thumb, notes=f"about {text}")
    own = Decision.objects.filter(unit=UNIT).order_by("response").last()
    other = Decision.objects.exclude(unit=UNIT).first()
    assert own is not None
    assert other is not None
    rating_submit(decision=own, rater="bob", correction=f"Send {SECRET} to the workshop")
    outcome_record(decision=own, name="solved", value=1)
    trace_record(
        agent="helper", steps=[{"kind": "step", "text": f"thinks of {SECRET}"}], metadata={"unit": UNIT}
    )
    ProblemRow.objects.create(decision=own.pk, agent="helper", reader="rewards", reason=f"found {SECRET}")
    Withdrawal.objects.create(selection={"unit": UNIT}, reason="x", actor="ann", decisions_count=0)
    RewardRecord.objects.create(
        decision=own.pk, agent="helper", components={"agent": {"detail": SECRET}}, rows_said=1, basis="b"
    )
    ImportBatch.objects.create(
        file="f",
        sha256="0" * 64,
        bytes=1,
        format="ratchet",
        actor="ann",
        notes=[f"row of {UNIT}"],
        refused=[{"line": 1, "key": "k", "reason": f"found 'Repair {SECRET} now'"}],
    )
    return own, other


def copies(home: Path, own: Decision) -> Snapshot:
    """What training, serving and people left of it elsewhere."""
    snapshot = prepare_training_dataset("helper").snapshot
    assert snapshot is not None
    run = TrainingRun.objects.create(
        agent="helper",
        method="dpo",
        snapshot=snapshot,
        base_model="b",
        result={"samples": [f"Repair {SECRET} now"]},
    )
    case = {"prompt_hash": own.prompt_hash, "messages": own.messages, "answer": "a policy's word on it"}
    case |= {"gain": 0.5}
    Evaluation.objects.create(
        agent="helper",
        base_model="b",
        split="holdout",
        samples=1,
        figures={"kl": 0.1},
        evidence={"cases": [case], "answers": [{"messages": own.messages, "answer": "another word on it"}]},
    )
    GoldenCase.objects.create(agent="helper", name="g", messages=own.messages, accepted=[own.response])
    user = User.objects.create(username="ann")
    LogEntry.objects.create(
        user=user,
        action_flag=2,
        object_repr=f"Repair {SECRET} now"[:200],
        content_type=ContentType.objects.get_for_model(Decision),
    )
    apps.get_model("django_q.Task").objects.create(
        id=uuid.uuid4().hex,
        name="tick",
        func="rl.tasks.tick",
        started=timezone.now(),
        stopped=timezone.now(),
        result=[f"failed at Repair {SECRET} now"],
    )
    folder = home / "runs" / str(run.pk)
    folder.mkdir(parents=True)
    (folder / "worker.log").write_text(f"step 1\nsampled: Repair {SECRET} now\nuser {UNIT} done\n")
    (folder / "samples.jsonl").write_text(
        json.dumps(case) + "\n" + json.dumps({"prompt": "other", "answer": "x"}) + "\n"
    )
    (home / "cache" / "faults").mkdir(parents=True)
    (home / "cache" / "faults" / "rewards_helper.txt").write_text(f"found Repair {SECRET} now")
    (home / "cache" / "reference.sqlite3").write_bytes(SECRET.encode())
    (home / "uploads").mkdir()
    (home / "uploads" / "half.csv").write_text(f"prompt,response\nRepair {SECRET} now,x\n")
    (home / "snapshots" / "helper" / "orphan.jsonl").write_text(
        json.dumps({"prompt": f"Repair {SECRET} now"}) + "\n"
    )
    return snapshot


def spooled(own: Decision) -> None:
    """The server's outbox after a database that was away: refused, waiting, and records of others."""
    spool = outbox_of(spool_folder())
    at = (timezone.now() - timedelta(hours=1)).isoformat()
    body = {"agent": "helper", "messages": own.messages, "response": own.response, "unit": UNIT}
    body |= {"created_at": at}
    for _ in range(3):
        spool.put({"kind": "decision", "body": {**body, "id": str(uuid.uuid4())}})
    other = {
        **body,
        "id": str(uuid.uuid4()),
        "unit": "other-1",
        "messages": "Is it raining in Oslo?",
        "response": "Yes.",
    }
    spool.put({"kind": "decision", "body": other})
    spool.put({"kind": "decision", "body": {**body, "id": str(uuid.uuid4()), "propensity": 7}})
    assert Recorder(spool_folder).replay() == 5
    spool.put({"kind": "decision", "body": {**body, "id": str(uuid.uuid4())}})


def found_in(folder: Path, *words: str) -> list[str]:
    """Files below a folder, the database's own among them, that hold one of these words."""
    every = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in every for word in words if word.encode() in path.read_bytes()]


@pytest.mark.django_db(transaction=True)
def test_no_copy_is_left_anywhere_and_none_returns(ratchet_home: Path, tmp_path: Path) -> None:
    own, _ = world()
    snapshot = copies(ratchet_home, own)
    spooled(own)
    database = Path(connection.settings_dict["NAME"]) if connection.vendor == "sqlite" else None
    exported = tmp_path / "exported.jsonl"
    row = {"type": "decision", "id": str(own.pk), "agent": "helper", "messages": own.messages}
    row |= {"response": own.response}
    exported.write_text(json.dumps(row) + "\n")
    before = Decision.objects.exclude(unit=UNIT).count()
    tried = unit_forget(UNIT, dry_run=True)
    assert found_in(ratchet_home, SECRET, UNIT)  # a dry run leaves everything
    done = unit_forget(UNIT)
    assert tried.places == done.places
    assert set(done.places) >= {
        "problems",
        "task results",
        "withdrawals",
        "log entries",
        "rows of snapshots",
        "evaluations",
        "golden cases",
        "training runs",
        "spool records",
        "refused rows of imports",
        "import batches",
        "files in runs/",
        "files in cache/",
        "files in uploads/",
        "caches of tokens",
        "snapshot files of no run",
    }
    assert done.places["spool records"] == 2  # one refused, one that waits
    assert done.not_compacted == ""
    assert found_in(ratchet_home, SECRET, UNIT) == []
    if database is not None:
        files = [database, *database.parent.glob(database.name + "-*")]
        assert [str(file) for file in files if SECRET.encode() in file.read_bytes()] == []
        assert [str(file) for file in files if UNIT.encode() in file.read_bytes()] == []
    # what is not the unit's stays as it was
    assert Decision.objects.count() == before
    snapshot.refresh_from_db()
    assert len(list(snapshot_rows(snapshot))) == 11
    assert snapshot.query["erased"]["rows"] == 2  # a correction and a thumb up, each against a thumb down
    evaluation = Evaluation.objects.get()
    assert evaluation.evidence["cases"][0]["gain"] == 0.5
    assert evaluation.evidence["answers"][0]["answer"] == REDACTION
    assert not GoldenCase.objects.get().active
    assert "step 1" in (ratchet_home / "runs" / str(TrainingRun.objects.get().pk) / "worker.log").read_text()
    # and no way leads back: the memory of a process, an import, a retry
    again = {name: value for name, value in row.items() if name != "type"}
    outbox_of(spool_folder()).put({"kind": "decision", "body": {**again, "unit": UNIT}})
    assert Recorder(spool_folder).replay() == 1
    assert Decision.objects.count() == before
    report = file_import(exported)
    assert (report.decisions, report.skipped_because) == (0, {"erased here before: not brought back": 1})
    assert Decision.objects.count() == before
    assert found_in(ratchet_home, SECRET, UNIT) == []


def test_what_was_erased_is_refused_and_what_comes_after_is_taken() -> None:
    row = asked("Where is my order?", "Here.", UNIT)
    unit_forget(UNIT)
    again = {"id": row.pk, "agent": "helper", "messages": "Where?", "response": "Here."}
    with pytest.raises(ErasedConflict):
        decision_record(**again)
    (refused,) = decisions_ingest([again])
    assert isinstance(refused, ErasedConflict)
    earlier = {"agent": "helper", "messages": "x", "response": "y", "unit": UNIT}
    with pytest.raises(ErasedConflict):
        decision_record(**earlier, created_at=timezone.now() - timedelta(days=1))
    assert decision_record(**earlier).created
    assert {stone.kind for stone in Tombstone.objects.all()} == {"salt", "decision", "unit"}
    assert not any(UNIT in stone.digest or str(row.pk) in stone.digest for stone in Tombstone.objects.all())


def test_tombstones_are_asked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [1000.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(tombstones, "ABSENCE_S", 1.0)
    monkeypatch.setattr(tombstones, "_absent_at", float("-inf"))
    monkeypatch.setattr(tombstones, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    def looked() -> int:
        with CaptureQueriesContext(connection) as captured:
            row = asked("Where is my order?", "Here.", UNIT)
        now[0] += 0.4
        kept.append(row)
        return sum("tombstone" in query["sql"] for query in captured)

    kept: list[Decision] = []
    assert [looked() for _ in range(5)] == [1, 0, 0, 1, 0]
    # the first erasure waits until every process looks again; the second has nothing to wait for
    unit_forget(UNIT)
    assert slept == [1.0]
    (refused,) = decisions_ingest([{"id": kept[0].pk, "agent": "helper", "messages": "x", "response": "y"}])
    assert isinstance(refused, ErasedConflict)
    asked("Another question of this unit", "An answer.", UNIT)
    unit_forget(UNIT)
    assert slept == [1.0]


def test_an_api_that_sends_it_again_is_told(monkeypatch: Any) -> None:
    row = asked("Where is my order?", "Here.", UNIT)
    unit_forget(UNIT)
    body = {"id": str(row.pk), "agent": "helper", "messages": "Where?", "response": "Here."}
    answer = ApiClient("ingest").post("/api/decisions/", body)
    assert answer.status_code == 409
    assert "erased" in answer.json()["error"]["message"]
    assert not Decision.objects.exists()


def test_an_import_leaves_out_what_is_said_of_erased_decisions(tmp_path: Path) -> None:
    gone = [asked("Where is my order?", word, UNIT) for word in ("Here.", "There.")]
    kept = [asked("Where is my parcel?", word, "ada") for word in ("Here.", "There.")]
    unit_forget(UNIT)
    file = tmp_path / "comparisons.jsonl"
    rows = [
        {
            "type": "comparison",
            "left": str(left.pk),
            "right": str(right.pk),
            "preference": "left",
            "rater": "ann",
        }
        for left, right in (gone, kept)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = file_import(file)
    assert (report.comparisons, report.refused_count, report.skipped) == (1, 0, 1)
    assert Comparison.objects.get().left_id in {row.pk for row in kept}


def test_files_are_erased_during_a_training(ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = ratchet_home / "runs" / "1" / "checkpoints"
    for name in ("checkpoint-5", "checkpoint-10"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "samples.jsonl").write_text(json.dumps({"text": SECRET}) + "\n")
    vanishes_when_listed(checkpoints / "checkpoint-5", monkeypatch)
    row = asked(SECRET, "Yes, on Monday.", UNIT)
    assert files_erase(marks_of(UNIT, [row.pk], []), dry_run=False) == {"files in runs/": 1}
    assert SECRET not in (checkpoints / "checkpoint-10" / "samples.jsonl").read_text()
    assert not (checkpoints / "checkpoint-5").exists()


def test_what_others_say_too_is_no_mark() -> None:
    row = asked("Where is the nearest post office?", "In the long street.", UNIT)
    asked("Where is the nearest post office?", "I do not know that.", "ada")
    marks = marks_of(UNIT, [row.pk], [])
    assert marks.texts == ("In the long street.",)
    assert marks.own_prompts == frozenset()
    assert marks.redact("asked Where is the nearest post office? of user-4711.") == (
        "asked Where is the nearest post office? of [erased]."
    )
    assert marks.redact("user-47110 and my-user-4711 are others") == "user-47110 and my-user-4711 are others"
    assert not marks.in_text("user-47110")


def test_what_the_model_thought_is_a_mark_and_the_name_of_a_model_is_none() -> None:
    call = {"answer": {"object": "chat.completion"}, "request": {"model": "large-model-2026"}}
    facts = {"policy": "large-model-2026", "metadata": call}
    row = asked("Where?", "Monday.", UNIT, reasoning=f"It is {SECRET}.", **facts)
    asked("Where else?", "Nowhere.", "ada", **facts)
    marks = marks_of(UNIT, [row.pk], [])
    assert marks.texts == (f"It is {SECRET}.",)
    expected = {"prompt_hash": row.prompt_hash, "reasoning": REDACTION}
    assert marks.redact_json({"prompt_hash": row.prompt_hash, "reasoning": "a"}) == expected
    unit_forget(UNIT)
    assert not Decision.objects.filter(reasoning__contains=SECRET).exists()


def test_texts_are_found_in_json_within_texts() -> None:
    value = {"a": [{"b": json.dumps({"c": "a text that is long"})}, "short", None, 3]}
    assert "a text that is long" in set(texts_of(value))
    assert "short" not in set(texts_of(value))


def test_a_text_that_was_cut_short_is_known_by_how_it_begins() -> None:
    text = "My grandmother sang in the choir of Bergen until 1962, and then she moved to Oslo."
    row = asked(text, "ok", UNIT)
    asked("My neighbour sang in the choir of Bergen until 1962 as well.", "ok", "ada")
    marks = marks_of(UNIT, [row.pk], [])
    assert marks.redact(f"expected JSON, found {text[:60]!r}...") == (
        "expected JSON, found '[erased]en until 1962, and t'..."
    )
    assert not marks.in_text("My neighbour sang in the choir of Bergen until 1962 as well.")


def test_a_file_keeps_its_length_where_it_is_no_json() -> None:
    row = asked("Where is the nearest post office?", "Strasse: »Münchner Straße 7«", UNIT)
    marks = marks_of(UNIT, [row.pk], [])
    for written in (row.response, json.dumps(row.response), json.dumps(row.response, ensure_ascii=False)):
        data = f"before {written} after".encode()
        redacted = marks.redacted_bytes(data)
        assert (len(redacted), b"Stra" in redacted) == (len(data), False)
        assert redacted.startswith(b"before ")
        assert redacted.endswith(b" after")


def test_a_unit_that_is_in_the_spool_alone_is_erased_there() -> None:
    spool = outbox_of(spool_folder())
    spool.put({"kind": "decision", "body": {"unit": UNIT, "response": "only here, nowhere else"}})
    assert unit_forget(UNIT, dry_run=True).places == {"spool records": 1}
    assert unit_forget(UNIT).places == {"spool records": 1}
    assert found_in(spool.folder, "only here") == []
    with pytest.raises(UnitUnknown):
        unit_forget(UNIT)
