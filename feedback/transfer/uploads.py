"""Uploads of the import page: held for an hour while their owner looks at what they would bring."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from django.conf import settings
from django.core.files.base import ContentFile
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse

from backend.http import body_refused
from backend.installation import PROGRAM
from feedback.transfer import formats
from feedback.transfer.formats.columns import FIELDS, ColumnMap, columns_guessed
from feedback.transfer.formats.files import rows_bounded
from feedback.transfer.formats.readers import ColumnSeen, FilePreview
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import ImportOrder, order_import
from feedback.transfer.import_report import COUNTS, ImportReport

KEPT_S = 3600
"""Seconds an upload waits for its import."""

ROWS_SHOWN = 5
"""First rows of a file that the page shows."""

_ENDING = re.compile(r"\.[A-Za-z0-9]{1,8}")


IN_A_SHELL = re.compile(r" Say which (with --format|column holds what|it is, as in --map).*", re.S)
"""End of a refusal that says which option of the command would help: the page asks for it itself."""
FIRST_FIELDS = ("prompt", "response", "rating", "correction")
"""Fields that the page offers first."""


@dataclass(frozen=True)
class Upload:
    """A file that was uploaded, and how it is to be read; as it is kept in the session of whoever uploaded it."""

    token: str
    path: str
    name: str
    """The name it had where it came from."""
    ratings_path: str = ""
    ratings_name: str = ""
    format: str = "auto"
    agent: str = ""
    simulated: bool = False
    licence: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    """Field -> column, where the reading by the columns' names was changed."""
    scale: str = ""
    """Of the rating (`0..100`), or its words for good and bad (`ok/faulty`)."""

    @classmethod
    def of(cls, kept: Any) -> Upload | None:
        """The upload that a session keeps, where it is still on disk."""
        try:
            upload = cls(**kept)
        except TypeError:
            return None
        return upload if Path(upload.path).exists() else None

    @property
    def column_map(self) -> ColumnMap | None:
        """The map of columns that was chosen. Raises FormatRefused for a scale that cannot be read."""
        if not self.columns:
            return None
        named: dict[str, Any] = dict(self.columns)
        chosen = ColumnMap(**named)
        if not self.scale:
            return chosen
        which = "rating" if chosen.rating else "score" if chosen.score else "preferred"
        read = ColumnMap.parse(f"{which}=column:{self.scale}")
        if read.scale is None and not read.words:
            raise FormatRefused(
                f"scale: expected two ends such as 0..100, or words for good and bad such as ok/faulty; "
                f"found {self.scale!r}"
            )
        return replace(chosen, scale=read.scale, words=read.words)

    def order(self, *, actor: str, skip_bad: bool) -> ImportOrder:
        """The import of it."""
        return ImportOrder(
            Path(self.path),
            name=self.name,
            format=self.format,
            agent=self.agent or None,
            ratings_path=Path(self.ratings_path) if self.ratings_path else None,
            ratings_name=self.ratings_name,
            columns=self.column_map,
            simulated=self.simulated,
            skip_bad=skip_bad,
            licence=self.licence,
            actor=actor,
            max_rows=settings.FEEDBACK_UPLOAD_MAX_ROWS,
        )

    def previews(self) -> tuple[FilePreview, ...]:
        """The first rows of each file in it, and what each column is taken for. Raises FormatRefused."""
        with rows_bounded(settings.FEEDBACK_UPLOAD_MAX_ROWS):
            return formats.preview(Path(self.path), self.column_map, ROWS_SHOWN)

    def without_paths(self, text: str) -> str:
        """A refusal with the names the files had, in place of where they lie here."""
        for path, name in ((self.ratings_path, self.ratings_name), (self.path, self.name)):
            if path:
                text = text.replace(path, name)
        return text

    def for_page(self, text: str) -> str:
        """A message with the files' names, and the page's choices in place of a command's options."""
        text = IN_A_SHELL.sub("", self.without_paths(text))
        text = _OPTION.sub(lambda found: _choice(found["field"], found["column"]), text)
        return text.replace("give --format NAME, or map columns with --map", "choose its format").replace(
            "with --map what", "below what"
        )


_OPTION = re.compile(
    r"(?:--map |(?<=\w),(?=\w+=))(?P<field>\w+)=(?P<column>.+?)(?=,\w+=|,? or |, wh|[.;]?$|[.;] )", re.M
)
"""A pair of the option `--map`, as in `--map prompt=question,response=answer`."""


def _choice(field: str, column: str) -> str:
    name, _, scale = column.partition(":")
    of = "a column" if name == "COLUMN" else ", ".join(name.split("+"))
    return f"“{'not read' if field == 'ignore' else field}” for {of}{f', scale {scale}' if scale else ''}"


def upload_store(file: UploadedFile, ratings: UploadedFile | None, **how: Any) -> Upload:
    """Keep a file, and the one with its ratings where there are two."""
    token = secrets.token_urlsafe(16)
    folder = _uploads() / token
    folder.mkdir(parents=True)
    return Upload(
        token=token,
        path=_keep(folder, "file", file),
        name=file.name or "file",
        ratings_path=_keep(folder, "ratings", ratings) if ratings else "",
        ratings_name=ratings.name or "ratings" if ratings else "",
        **how,
    )


def columns_chosen(previews: tuple[FilePreview, ...], given: Mapping[str, str]) -> dict[str, str]:
    """Field -> column from the selects of the form, `column-0` for the first column. Raises FormatRefused."""
    chosen: dict[str, str] = {}
    for number, column in enumerate(offered_columns(previews)):
        name = given.get(f"column-{number}", "")
        if not name:
            continue
        if name not in FIELDS:
            raise FormatRefused(f"{column.name}: expected one of {', '.join(FIELDS)}; found {name!r:.80}")
        if name == "ignore":
            chosen[name] = "+".join(filter(None, (chosen.get(name), column.name)))
            continue
        if name in chosen:
            raise FormatRefused(
                f"{name}: chosen for the columns {chosen[name]} and {column.name}; choose one"
            )
        chosen[name] = column.name
    return chosen


def offered_columns(previews: tuple[FilePreview, ...]) -> tuple[ColumnSeen, ...]:
    """The columns that the form offers: those of the first file that has any."""
    return next((preview.columns for preview in previews if preview.columns), ())


def columns_read(previews: tuple[FilePreview, ...]) -> dict[str, str]:
    """Field -> column as the file is read without a map."""
    return {column.field: column.name for column in offered_columns(previews) if column.field in FIELDS}


def uploads_sweep(*tokens: str) -> None:
    """Remove these uploads, and those that nobody came back for."""
    folders = list(_uploads().iterdir()) if _uploads().is_dir() else []
    for folder in folders:
        if folder.name in tokens or folder.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def pasted_text(text: str) -> str:
    """Pasted lines without blank ones at the ends. The tabs of empty cells in the last row stay."""
    lines = text.replace("\r\n", "\n").split(
        "\n"
    )  # as a form sends them; within a cell they would stand in the prompt
    said = [number for number, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[said[0] : said[-1] + 1]) if said else ""


def pasted_file(text: str) -> UploadedFile:
    """Pasted lines as a file; one that begins with no JSON is a table, by tabs where its first line has one."""
    first = text.partition("\n")[0]
    ending = "jsonl" if text.lstrip()[:1] in "[{" else "tsv" if "\t" in first else "csv"
    return cast(UploadedFile, ContentFile(text.encode(), name=f"pasted.{ending}"))


def _uploads() -> Path:
    folder: Path = settings.RATCHET_HOME / "uploads"
    return folder


def _keep(folder: Path, name: str, file: UploadedFile) -> str:
    """Keep a file under a name of ours: its own says nothing that reading needs but its ending."""
    endings = [suffix for suffix in Path(file.name or "").suffixes[-2:] if _ENDING.fullmatch(suffix)]
    path = folder / f"{name}{''.join(endings).lower()}"
    with path.open("wb") as stored_file:
        for chunk in file.chunks():
            stored_file.write(chunk)
    return str(path)


# --- Trial: what an upload would bring, without storing anything -------------------------------------------

MAX_ROWS = 100
"""Refused rows that a page lists."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial run over an upload."""

    fault: str
    """Reason why it cannot be read as it is; empty where it can."""
    readable: bool
    """False where no choice of columns would help either: the page asks for another file."""
    context: dict[str, Any]
    """Context of `feedback/_import_trial.html`."""
    upload: Upload
    """With its columns as they were guessed, where it could be read so alone."""


def too_large(request: HttpRequest) -> HttpResponse | None:
    """The refusal of a body above the limit, by its stated length, before anything of it is read; else None."""
    limit = settings.FEEDBACK_UPLOAD_MAX_BYTES
    if int(request.META.get("CONTENT_LENGTH") or 0) <= limit:
        return None
    fault = (
        f"The upload is larger than {limit >> 20} MB. Split the file, zip it, or read it with "
        f"`{PROGRAM} import_feedback FILE`, which takes any size."
    )
    return body_refused(fault)


def upload_mapped(upload: Upload, given: Mapping[str, str]) -> Upload:
    """The upload with the columns and the scale that a form chose. Raises FormatRefused."""
    plain = replace(upload, columns={}, scale="")
    previews = plain.previews()
    chosen = columns_chosen(previews, given)
    scale = given.get("scale", "").strip()
    unchanged = chosen == columns_read(previews) and not scale
    return plain if unchanged else replace(plain, columns=chosen, scale=scale)


def upload_try(upload: Upload, *, actor: str, fault: str = "") -> Trial:
    """Read a file without storing anything: what it would bring, or why it cannot be read, with its columns where a
    map may cure it. fault: known before, so that only the columns are read."""
    report: ImportReport | None = None
    previews: tuple[FilePreview, ...] = ()
    try:
        previews = replace(upload, columns={}, scale="").previews()
        if not fault:
            report = order_import(upload.order(actor=actor, skip_bad=True), dry_run=True)
    except FormatRefused as refusal:
        fault = upload.for_page(str(refusal))
    columns = offered_columns(previews)
    if fault and not upload.columns and (guessed := _trial_guessed(upload, columns, actor)):
        return guessed
    context = {
        "upload": upload,
        "name": upload.name,
        "fault": fault,
        "notes": list(dict.fromkeys(note for preview in previews for note in preview.notes)),
        "members": [preview.name for preview in previews] if len(previews) > 1 else [],
        **_columns(upload, columns, guess=bool(fault)),
        **(_trial_context(upload, report) if report else {"any": False}),
    }
    return Trial(fault, not fault or bool(columns), context, upload)


def _trial_guessed(upload: Upload, columns: tuple[ColumnSeen, ...], actor: str) -> Trial | None:
    """The trial of a file of unknown columns, read as their names suggest; None if that reads nothing."""
    if any(column.field for column in columns):
        return None
    guess = _guess(columns)
    if not {"prompt", "response"} <= set(guess):
        return None
    trial = upload_try(replace(upload, columns=guess), actor=actor)
    if trial.fault or not (trial.context["any"] or trial.context["already_here"]):
        return None
    words = "Its columns were guessed by their names and values: check them below."
    return replace(trial, context={**trial.context, "notes": [words, *trial.context["notes"]]})


def _trial_context(upload: Upload, report: ImportReport) -> dict[str, object]:
    """Result of a dry run, for the page."""
    found = report.as_dict()
    known = formats.FORMATS.get(report.format)
    return {
        "format": known.title if known else "Several formats",
        "whose": sorted(report.agents),
        "problem": upload.for_page(report.problem),
        "already_here": report.already_here,
        "rows": report.rows,
        "earlier": report.earlier,
        "counts": [(name, found[name]) for name in COUNTS if found[name]],
        "skipped": report.skipped_because.most_common(),
        "refused": [(row, upload.for_page(row.reason)) for row in report.refused[:MAX_ROWS]],
        "refused_count": report.refused_count,
        "more": max(report.refused_count - MAX_ROWS, 0),
        "notes": [upload.for_page(note) for note in report.notes],
        "any": report.rows_stored > 0 or report.stored_rows > 0,
    }


def _columns(upload: Upload, columns: tuple[ColumnSeen, ...], *, guess: bool) -> dict[str, object]:
    """The first rows as a table, with what each column is read as; with a guess of what it may be where the file cannot
    be read as it is."""
    chosen = {
        column: name
        for name, mapped in upload.columns.items()
        for column in (mapped.split("+") if name == "ignore" else [mapped])
    }
    guessed = not chosen and guess and not any(column.field for column in columns)
    if guessed:
        chosen = {column: name for name, column in _guess(columns).items()}
    rows = max((len(column.samples) for column in columns), default=0)
    return {
        "columns": [(column, chosen.get(column.name) if chosen else column.field) for column in columns],
        "fields": FIELDS,
        "first_fields": FIRST_FIELDS,
        "more_fields": [name for name in FIELDS if name not in (*FIRST_FIELDS, "ignore")],
        "is_mapped": bool(chosen),
        "is_guessed": guessed and bool(chosen),
        "first_rows": [
            [column.samples[row] if row < len(column.samples) else "" for column in columns]
            for row in range(rows)
        ],
    }


def _guess(columns: tuple[ColumnSeen, ...]) -> dict[str, str]:
    """Field -> column by their names; the column before the response is the prompt, where none is called so. Else the
    first two columns of text are prompt and response."""
    names = [column.name for column in columns]
    found = columns_guessed(names)
    if "prompt" not in found and (response := found.get("response")):
        before = [name for name in names[: names.index(response)] if name not in found.values()]
        return found | ({"prompt": before[-1]} if before else {})
    texts = [column.name for column in columns if column.name not in found.values() and _is_text(column)]
    for name in ("prompt", "response"):
        if name not in found and texts:
            found[name] = texts.pop(0)
    return found


TEXT_CHARS = 4
"""Mean length from which a column's values are taken for text."""


def _is_text(column: ColumnSeen) -> bool:
    words = [text for text in column.samples if re.search(r"[^\W\d_]{2}", text)]
    return bool(words) and sum(map(len, words)) / len(words) >= TEXT_CHARS
