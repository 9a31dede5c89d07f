"""Files of the fine-tuning API: checked line by line, stored whole, deleted."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from backend import limits
from feedback.storage.masking import Masker, masks_of_all
from feedback.transfer import formats
from feedback.transfer.formats.files import Row, rows, rows_bounded
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    RowError,
    RowRefused,
    RowSkipped,
)
from rl.datasets.file_evidence import prompt_of
from rl.models import FineTuningJob, TrainingFile, TrainingRun
from rl.models.fine_tuning import FOLDER

Kind = TrainingFile.Kind
FILENAME_CHARACTERS = 255


class FineTuningRefused(ValueError):
    """A file or a job that is refused; `fields` names the parameter."""

    code = "invalid"

    def __init__(self, param: str, fault: str) -> None:
        super().__init__(f"{param}: {fault}" if param else fault)
        self.fields = {param: fault} if param else {}


class UnknownObject(FineTuningRefused):
    """There is no such file or job."""

    code = "not_found"


class StorageFull(FineTuningRefused):
    """The disk takes no file."""

    code = "pending"


def files_of(caller: str | None) -> QuerySet[TrainingFile]:
    """Files that a key uploaded, named as key:3; None: of everybody, for people with the role."""
    return TrainingFile.objects.all() if caller is None else TrainingFile.objects.filter(uploaded_by=caller)


def file_get(name: str, caller: str | None, param: str = "file_id") -> TrainingFile:
    """The caller's uploaded file of an id. Raises UnknownObject, also for a file of another key."""
    found = files_of(caller).filter(name=name[:40]).first()
    if found is None:
        raise UnknownObject(param, f"there is no file {name[:80]!r}; GET /v1/files lists them")
    return found


def file_store(chunks: Iterable[bytes], filename: str, *, actor: str) -> TrainingFile:
    """Check an upload and keep it. Nothing is stored of a file with a line that cannot be read. Its job names the agent
    later, so what the masks of any agent match is masked.

    Raises FineTuningRefused, with the number of each faulty line.
    """
    folder: Path = settings.RATCHET_HOME / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    row = TrainingFile(filename=filename[:FILENAME_CHARACTERS], uploaded_by=actor)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", suffix=".jsonl", delete=False) as file:
        draft = Path(file.name)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            row.kind, row.rows = _lines_checked(draft, row.filename)
            if masks := masks_of_all():
                _lines_mask(draft, masks)
            with transaction.atomic():
                row.save()
                draft.replace(row.path)
        except OSError as error:
            raise StorageFull("file", f"it cannot be stored now: {error.strerror or error}") from error
        finally:
            draft.unlink(missing_ok=True)
    return row


def file_delete(file: TrainingFile) -> None:
    """Delete a file. Refused while a job waits for it: a job that began has a snapshot of its own."""
    with transaction.atomic():
        if not TrainingFile.objects.select_for_update().filter(pk=file.pk).exists():
            raise UnknownObject("file_id", f"file {file.name} was deleted a moment ago")
        if job := _job_waiting(file.name):
            raise FineTuningRefused(
                "file_id", f"job {job.name} waits to read it: cancel the job, or wait until it runs"
            )
        path = file.path
        file.delete()
        transaction.on_commit(lambda: path.unlink(missing_ok=True))


def _job_waiting(name: str) -> FineTuningJob | None:
    unread = FineTuningJob.objects.filter(
        run__status__in=(TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING), run__snapshot=None
    )
    return (unread.filter(training_file=name) | unread.filter(validation_file=name)).first()


def _lines_checked(path: Path, filename: str) -> tuple[str, int]:
    """Kind of the examples and how many there are. Raises FineTuningRefused."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"{":
        # a compressed file would keep texts from `forget`
        found = "an empty file" if not start else f"a file that starts with {start!r}"
        raise FineTuningRefused("file", f"expected plain JSON lines, found {found}")
    try:
        with rows_bounded(settings.FEEDBACK_UPLOAD_MAX_ROWS):
            return _prompts_counted(path) if _is_of_prompts(path) else _kinds_counted(path)
    except FormatRefused as refusal:
        raise FineTuningRefused("file", str(refusal).replace(str(path), filename)) from refusal


def _lines_mask(path: Path, masks: Sequence[tuple[str, re.Pattern[str]]]) -> None:
    """Replace what the masks match in a file that was checked, each line by itself."""
    masked = path.with_suffix(".masked")
    try:
        with path.open("rb") as read, masked.open("wb") as written:
            for line in read:
                if line.strip():
                    value = Masker(masks).masked(json.loads(line.removeprefix(b"\xef\xbb\xbf")))
                    written.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            written.flush()
            os.fsync(written.fileno())
        masked.replace(path)
    finally:
        masked.unlink(missing_ok=True)


def _is_of_prompts(path: Path) -> bool:
    """True if the first example has messages without an answer."""
    first = next(iter(rows(path)), None)
    value = first.value if isinstance(first, Row) else None
    turns = value.get("messages") if isinstance(value, dict) else None
    last = turns[-1] if isinstance(turns, list) and turns else None
    return isinstance(last, dict) and last.get("role") == "user"


def _prompts_counted(path: Path) -> tuple[str, int]:
    count, faults = 0, dict[int, str]()
    for row in rows(path):
        try:
            if isinstance(row, RowRefused):
                raise RowError(row.reason)
            if prompt_of(row.value).messages[-1]["role"] != "user":
                raise RowError("expected messages that end with the user's")
            count += 1
        except RowError as error:
            faults[row.line] = str(error)
    _faults_refuse(faults)
    return Kind.PROMPT, count


def _kinds_counted(path: Path) -> tuple[str, int]:
    kind, lines, faults = "", set(), dict[int, str]()
    for record in formats.read(path, "openai"):
        if isinstance(record, (RowRefused, RowSkipped)):
            faults[record.line] = record.reason
            continue
        own = Kind.PREFERENCE if isinstance(record, ImportedComparison) else Kind.CHAT
        kind = kind or own
        lines.add(record.line)
        if own != kind:
            faults[record.line] = f"{own.label} in a file of {Kind(kind).label}"
    _faults_refuse(faults)
    return kind, len(lines)


def _faults_refuse(faults: dict[int, str]) -> None:
    if faults:
        named = [f"line {line}: {faults[line]}" for line in sorted(faults)[: limits.FAULTS_NAMED]]
        more = len(faults) - len(named)
        named += [f"and {more:,} more lines"] if more else []
        raise FineTuningRefused(
            "file", f"{len(faults):,} lines cannot be used, so nothing was stored: {'; '.join(named)}"
        )
