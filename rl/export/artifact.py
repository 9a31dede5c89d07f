"""The table of exporters, and the files of an export: written completely, hashed and checked, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic_core import to_jsonable_python

from rl.checksums import MANIFEST
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError

Progress = Callable[[str, int, int], None]
"""Progress callback: (task, amount done, total amount)."""

FREE_MARGIN = 64 * 1024**2
"""Bytes that must stay free on the disk beside the export."""


class ExportRefused(ValueError):
    """An export that cannot or must not be made; the message says what was expected, found, and what to do."""


@dataclass(frozen=True)
class ExportedFile:
    """One finished file, with its size in bytes and its SHA-256."""

    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ExportResult:
    """A finished export: its files, the figures of its checks, and notes for a person."""

    format: str
    files: list[ExportedFile]
    checked: Mapping[str, object]
    notes: list[str] = field(default_factory=list)


def silent(step: str, done: int, total: int) -> None:
    """A Progress that does nothing."""


def sha256_file(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def exported_file(path: Path) -> ExportedFile:
    return ExportedFile(path, path.stat().st_size, sha256_file(path))


@contextmanager
def staged_file(output: Path, needed_bytes: int) -> Iterator[Path]:
    """A path in a temporary folder beside `output`; the file becomes `output` when the block succeeds.

    Other files in the folder are deleted. `needed_bytes` is the most it will hold at once. Raises ExportRefused if the
    folder cannot be written or the disk is or becomes full. Nothing half-written remains.
    """
    if output.is_dir():
        raise ExportRefused(
            f"expected a file name for the export, found the folder {output}; add a file name"
        )
    with _stage(output, needed_bytes) as folder:
        staged = folder / output.name
        yield staged
        staged.replace(output)


@contextmanager
def staged_folder(output: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `output` that becomes `output` when the block succeeds; see `staged_file`.

    An existing `output` must be empty or an earlier export (it holds export.json), which is replaced.
    """
    if output.exists() and not output.is_dir():
        raise ExportRefused(
            f"expected a folder for the export, found the file {output}; choose another output"
        )
    if output.is_dir() and not (output / MANIFEST).is_file() and any(output.iterdir()):
        raise ExportRefused(
            f"expected a new or empty folder, or an earlier export, found other files in {output}; "
            "choose another output"
        )
    with _stage(output, needed_bytes) as folder:
        staged = folder / "export"
        staged.mkdir()
        yield staged
        if output.exists():
            output.replace(folder / "replaced")
        staged.replace(output)


def manifest_write(
    folder: Path, output: Path, format: str, checked: Mapping[str, object], notes: Sequence[str] = ()
) -> ExportResult:
    """Writes export.json into a staged folder, with file names relative to it. Returns the result at `output`."""
    found = [exported_file(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [replace(file, path=file.path.relative_to(folder)) for file in found]
    result = ExportResult(format, files, checked, list(notes))
    facts = to_jsonable_python(result)
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")
    files = [*files, replace(exported_file(folder / MANIFEST), path=Path(MANIFEST))]
    return replace(result, files=[replace(file, path=output / file.path) for file in files])


@contextmanager
def _stage(output: Path, needed_bytes: int) -> Iterator[Path]:
    parent = output.absolute().parent
    new_folders = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    is_done = False
    try:
        with _refusals(parent):
            parent.mkdir(parents=True, exist_ok=True)
            space_check(parent, needed_bytes)
            # beside the output, so that the last step is a rename on one file system
            folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=parent))
        try:
            with _refusals(parent):
                yield folder
            is_done = True
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        if not is_done:
            for folder in new_folders:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def space_check(folder: Path, needed_bytes: int) -> None:
    """Raises ExportRefused unless `folder`'s disk has room for `needed_bytes` and the margin."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + FREE_MARGIN:
        raise ExportRefused(
            f"the export needs {size_text(needed_bytes + FREE_MARGIN)} in {folder}, found {size_text(free)} free; "
            "free some space or choose an output on another disk"
        )


def size_text(count: int) -> str:
    """A number of bytes for people: 1.4 GB, 350 MB, 12 kB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.0f} kB"


@contextmanager
def _refusals(parent: Path) -> Iterator[None]:
    """Turns disk errors into refusals; other errors pass."""
    try:
        yield
    except OSError as error:
        # numpy's tofile reports a short write without saying why
        short = error.errno is None and shutil.disk_usage(parent).free < FREE_MARGIN
        if short or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportRefused(
                f"the disk of {parent} became full while exporting ({error.strerror or error}); nothing was left "
                "behind, free some space or choose an output on another disk"
            ) from error
        denied = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
        if error.errno in denied and not os.access(parent, os.W_OK | os.X_OK):
            raise ExportRefused(
                f"expected a folder that can be written for the export, found {parent} ({error.strerror}); "
                "choose another output or change its permissions"
            ) from error
        raise


# --- Table of exporters: formats of a policy and their writers, imported on use. Pure ---

ADAPTER, LINEAR = "adapter", "linear"

OPTIONS = ("quantization", "model_name", "system_prompt", "prompts")
"""Keyword arguments that a writer may take beside `progress`; `prompts` are the agent's held-out prompts."""


@dataclass(frozen=True)
class Exporter:
    """A format of a policy for other programs."""

    name: str
    """Name in `export_model --format`."""
    writer: str
    """`module:function`, imported on use. For an adapter `(base_model, adapter, output, *, progress, ...)`, for a
    linear policy `(policy, output)`. Returns an `rl.export.artifact.ExportResult` of files that were compared with the
    original, or raises ExportRefused and leaves nothing behind."""
    title: str
    """Its files and their readers, in a few words."""
    policy_kind: str = ADAPTER
    """Kind of policy: `adapter` or `linear`."""
    options: tuple[str, ...] = ()
    """OPTIONS that its writer takes."""
    names_file: bool = False
    """True if the writer names the file in the policy's folder; else it gets a folder with the exporter's name."""


EXPORTERS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        Exporter(
            "merged",
            "rl.export.hugging_face:export_merged",
            "a Hugging Face folder with the adapter merged in",
            options=("prompts",),
        ),
        Exporter("lora", "rl.export.hugging_face:export_lora", "the adapter's folder, for PEFT"),
        Exporter("onnx", "rl.export.onnx:export_onnx", "an ONNX folder in float32", options=("prompts",)),
        Exporter(
            "gguf",
            "rl.export.gguf:export_gguf",
            "one file for llama.cpp and Ollama",
            options=OPTIONS,
            names_file=True,
        ),
        Exporter(
            "gguf-lora",
            "rl.export.gguf_lora:export_gguf_lora",
            "the adapter alone, for llama.cpp and Ollama",
            options=("model_name", "prompts"),
        ),
        Exporter(
            "linear",
            "rl.export.artifact:export_linear",
            "a linear policy's own JSON",
            policy_kind=LINEAR,
            names_file=True,
        ),
    )
}
"""Name -> exporter: built-in ones, and plugins' once registered."""

NAME = r"[a-z0-9][a-z0-9_-]{0,15}"
DOTTED_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


def exporters_of(kind: str) -> list[str]:
    return [name for name, exporter in EXPORTERS.items() if exporter.policy_kind == kind]


def exporter_register(name: str, found: object) -> None:
    """Registers a plugin's exporter (`backend.plugins`). Raises ValueError if it is none, or its name is taken."""
    if not isinstance(found, Exporter):
        raise ValueError(f"expected an Exporter (rl.export.artifact), found {found!r:.80}")
    if EXPORTERS.get(found.name) == found:
        return
    if not re.fullmatch(NAME, str(found.name)):
        raise ValueError(f"expected a name of up to 16 small letters, digits, _ and -, found {found.name!r}")
    if found.name in EXPORTERS:
        raise ValueError(f"the name {found.name!r} is taken by another exporter: choose another name")
    if not re.fullmatch(DOTTED_PATH, str(found.writer)):
        raise ValueError(
            f"exporter {found.name}: expected its writer as `module:function`, found {found.writer!r}"
        )
    if found.policy_kind not in (ADAPTER, LINEAR):
        raise ValueError(
            f"exporter {found.name}: expected `policy_kind` as {ADAPTER} or {LINEAR}, found {found.policy_kind!r}"
        )
    if unknown := sorted(set(found.options) - set(OPTIONS)):
        raise ValueError(
            f"exporter {found.name}: expected options of {', '.join(OPTIONS)}, found {', '.join(unknown)}"
        )
    EXPORTERS[found.name] = found


def export_linear(policy: Path, output: Path) -> ExportResult:
    """Copies the file of a linear policy. output: a file name ending in `.json`, or a folder.

    Raises ExportRefused if there is no linear policy, or the copy differs.
    """
    target = output if output.suffix == ".json" else output / WEIGHTS
    try:
        LinearPolicy.load(policy)
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(policy / WEIGHTS, half)
        half.replace(target)
    except (LinearPolicyError, OSError) as error:
        raise ExportRefused(f"expected the linear policy {policy} to copy to {target}: {error}") from error
    found, expected = sha256_file(target), sha256_file(policy / WEIGHTS)
    if found != expected:
        raise ExportRefused(f"{target} has SHA-256 {found[:16]}, expected {expected[:16]}: is the disk full?")
    return ExportResult(
        "linear",
        [ExportedFile(target, target.stat().st_size, found)],
        {"same_bytes": True},
        [
            "a linear policy has no base model, so there is no merged model, LoRA, ONNX or GGUF of it; "
            "docs/training-reference.md says how another program reads its file"
        ],
    )
