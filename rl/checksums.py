"""SHA-256 of files that policies are made of: recorded when they are written, checked when they are loaded. Pure.

A flipped byte in a safetensors or GGUF file is read without a word: header and sizes still fit, and the model only
answers worse. So a folder carries the sums of its files (`sha256.json`), the registry those of single files, and
whoever loads one compares. A sum is computed once per process and file: what was computed is good for the same inode,
size and time of change.

`python -m rl.checksums FOLDER...` compares exported folders before another program loads them; standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

SUMS = "sha256.json"
"""File beside those of a folder: file name -> SHA-256 in hexadecimal."""
MANIFEST = "export.json"
"""In an exported folder (merged, LoRA, ONNX), in place of SUMS: `files` names each with its SHA-256."""
UNHASHED_FILES = ("README.md", SUMS)
"""Files whose words may change after the folder was made: cards are written again when figures are known."""

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
TOKENIZER_FILES: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TOKENIZER_FILES += ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
IDENTITY_FILES = ("config.json", "*.safetensors", *TOKENIZER_FILES, *TEMPLATE_FILES)
"""Files of a base model's folder that decide how it answers."""

_sums: dict[str, tuple[tuple[int, int, int, int], str]] = {}
"""Path -> (device, inode, size, time of change in ns), and the sum computed then."""
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


class FileDamaged(ValueError):
    """A file that is not what was written; the message names it, both sums, and what to do."""

    def __init__(self, path: Path, expected: str, found: str, remedy: str) -> None:
        self.path, self.expected, self.found, self.remedy = path, expected, found, remedy
        what = f"has SHA-256 {found[:16]}..., expected {expected[:16]}..." if found else "is not there"
        super().__init__(f"{path} is damaged: it {what}; {remedy}" if found else f"{path} {what}; {remedy}")


def file_sum(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, computed again where the file changed. Raises OSError."""
    name = str(path)
    with _guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:  # of many threads that ask for a large file at once, one reads it
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            known = _sums.get(name)
            if known is not None and known[0] == state:
                return known[1]
            found = hashlib.file_digest(file, "sha256").hexdigest()
        _sums[name] = (state, found)
        return found


def is_sum(text: str) -> bool:
    """True if a text is a SHA-256 in hexadecimal; rows of before sums were recorded hold none."""
    return len(text) == 64 and all(character in "0123456789abcdef" for character in text)


def file_check(path: Path, expected: str, remedy: str) -> None:
    """Raise FileDamaged unless the file has that sum; one without a recorded sum passes."""
    if not is_sum(expected):
        return
    try:
        found = file_sum(path)
    except FileNotFoundError:
        found = ""
    if found != expected:
        raise FileDamaged(path, expected, found, remedy)


def sums_write(folder: Path, names: Collection[str] | None = None) -> Path:
    """Record the sums of a folder's files, or of some of them beside those recorded before. Whole or not at all."""
    path = folder / SUMS
    before = sums_read(folder) if names is not None else {}
    files = [folder / name for name in names] if names is not None else _files(folder)
    sums = before | {str(file.relative_to(folder)): file_sum(file) for file in files}
    half = folder / f".{SUMS}.{os.getpid()}"
    half.write_text(json.dumps(sums, indent=1, sort_keys=True) + "\n", "utf-8")
    half.replace(path)
    return path


def sums_read(folder: Path) -> dict[str, str]:
    """The recorded sums of a folder; none where it was made before sums were. Raises FileDamaged for a torn record."""
    path = folder / SUMS
    if not path.is_file() and (folder / MANIFEST).is_file():
        path = folder / MANIFEST
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FileDamaged(path, "a record of sums", "no JSON", "copy the folder again") from error
    if path.name == MANIFEST:
        found = _manifest_sums(found)
    if not isinstance(found, dict) or not all(isinstance(s, str) and is_sum(s) for s in found.values()):
        raise FileDamaged(path, "a record of sums", "something else", "copy the folder again")
    return found


def _manifest_sums(manifest: object) -> object:
    """The sums that an export's manifest names; {} for a JSON file of another program that has its name."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, list) or not all(isinstance(file, dict) and "path" in file for file in files):
        return {}
    return {str(file["path"]): file.get("sha256") for file in files if file["path"] not in UNHASHED_FILES}


def sums_check(folder: Path, remedy: str) -> int:
    """Compare every file of a folder with its recorded sum; how many were. Raises FileDamaged for the first that
    differs or is gone."""
    sums = sums_read(folder)
    for name, expected in sums.items():
        file_check(folder / name, expected, remedy)
    return len(sums)


def base_files(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of each of a base model's IDENTITY_FILES."""
    files = {file for pattern in IDENTITY_FILES for file in folder.glob(pattern) if file.is_file()}
    return {str(file.relative_to(folder)): file_sum(file) for file in sorted(files)}


def base_hash(source: str, commit: str | None = None) -> str:
    """Identity of a base model: SHA-256 over its configuration, weights, tokenizer and chat template.

    Of a model of the hub it is the commit, which covers the same files.
    """
    if not Path(source).is_dir():
        return f"commit:{commit}" if commit else f"name:{source}"
    lines = "".join(f"{sum}  {name}\n" for name, sum in base_files(Path(source)).items())
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def base_fault(base_model: str, source: str, expected: str) -> str:
    """Reason why the folder of a base model is not the one with this identity, as words; empty where it is, or is no
    folder."""
    if not expected.startswith("sha256:"):
        return ""
    if not Path(source).is_dir():
        return f"its base model {base_model} is not there any more: put the folder back at {source}"
    if (found := base_hash(source)) == expected:
        return ""
    return (
        f"its base model {base_model} was changed since ({expected[:19]}, now {found[:19]}): put the former "
        "configuration, weights, tokenizer and chat template back, or train again"
    )


def _files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and str(file.relative_to(folder)) not in UNHASHED_FILES
        and not file.name.startswith(".")
    )


def main(folders: Sequence[str]) -> int:
    """Compare exported folders with their recorded sums, a line each. Exit code 1 where one is damaged or has none."""
    if not folders:
        sys.stderr.write("usage: python -m rl.checksums FOLDER...\n")
        return 2
    sound = True
    for folder in folders:
        try:
            count = sums_check(Path(folder), "export it again, or copy it again")
        except (FileDamaged, OSError) as error:
            line, count = str(error), 0
        else:
            line = (
                f"{folder}: {count} files are whole"
                if count
                else (f"{folder}: no checksums are recorded there")
            )
        sound = sound and count > 0
        sys.stdout.write(line + "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
