"""The readable files of a zip archive, unpacked into a temporary folder within bounds."""

from __future__ import annotations

import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from backend import limits
from feedback.transfer.formats.compression import FREE, MAX_RATIO, MAX_UNPACKED, PICKLE, ZIP, suffix_of
from feedback.transfer.formats.records import FormatRefused

MAX_MEMBERS = limits.ARCHIVE_FILES

CHUNK = 1 << 20

READ = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".tab", ".parquet")
"""Endings of the files that are read, compressed or not."""

ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".jar", ".bz2", ".xz")
PICKLES = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt", ".bin")


@dataclass(frozen=True)
class Member:
    """A file of an archive, or the file itself where it is none."""

    name: str
    """Name in reports: `feedback.zip/ratings.csv`."""
    path: Path


@dataclass(frozen=True)
class ArchiveContents:
    """Contents of an archive."""

    members: tuple[Member, ...]
    left_out: tuple[str, ...] = ()
    """Names of files that are of no kind that is read: texts, licences, pictures."""


def is_archive(path: Path) -> bool:
    """True if a file is a zip archive, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(len(ZIP)) == ZIP
    except OSError:
        return False


@contextmanager
def archive_open(path: Path) -> Iterator[ArchiveContents]:
    """The files of an archive while the block lasts; of any other file the file itself.

    Members keep their names in a temporary folder, so that a description beside a file is found there. What macOS puts
    into archives is passed over. Raises FormatRefused for an archive that is damaged, encrypted or a bomb, that holds
    another archive, a pickle, a link or a path that leads out of it, or nothing that is read.
    """
    if not is_archive(path):
        yield ArchiveContents((Member(str(path), path),))
        return
    with tempfile.TemporaryDirectory(prefix="ratchet-import-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                found = _unpack(archive, path, Path(folder))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise FormatRefused(
                f"{path}: the zip archive is damaged or of a kind not read: {error}"
            ) from error
        except OSError as error:
            raise FormatRefused(f"{path}: cannot be unpacked: {error.strerror or error}") from error
        yield found


def _unpack(archive: zipfile.ZipFile, path: Path, folder: Path) -> ArchiveContents:
    infos = [info for info in archive.infolist() if not info.is_dir() and not _is_junk(info.filename)]
    if len(infos) > MAX_MEMBERS:
        raise FormatRefused(f"{path}: expected at most {MAX_MEMBERS} files in an archive, found {len(infos)}")
    names = [info.filename for info in infos]
    if any(name == "[Content_Types].xml" for name in names):
        raise FormatRefused(f"{path}: an Excel or Word file is not read; save the sheet as CSV")
    for info in infos:
        _check(info, path)
    if len({name.lower() for name in names}) < len(names):
        raise FormatRefused(f"{path}: two files of the archive have the same name")
    members: list[Member] = []
    left_out: list[str] = []
    room = min(MAX_UNPACKED, max(FREE, MAX_RATIO * path.stat().st_size))
    for info in infos:
        if suffix_of(info.filename) not in READ:
            left_out.append(info.filename)
            continue
        place = folder.joinpath(*PurePosixPath(info.filename).parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        room -= _extract(archive, info, place, room, path)
        if not info.filename.endswith("dataset_info.json"):
            members.append(Member(f"{path}/{info.filename}", place))
    if not members:
        raise FormatRefused(
            f"{path}: expected a file that ends in {', '.join(READ)} in the archive, found "
            f"{', '.join(left_out[:10]) or 'none'}"
        )
    return ArchiveContents(tuple(sorted(members, key=lambda member: member.name)), tuple(left_out))


def _check(info: zipfile.ZipInfo, path: Path) -> None:
    """Raises FormatRefused for what no archive of feedback needs."""
    name = info.filename
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ":" in name or ".." in parts or "\x00" in name:
        raise FormatRefused(f"{path}: the path {name[:200]!r} leads out of the archive")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise FormatRefused(f"{path}: {name} is a link; expected files")
    if info.flag_bits & 1:
        raise FormatRefused(f"{path}: {name} is encrypted; unpack it first")
    ending = PurePosixPath(name.lower()).suffix
    if ending in ARCHIVES or suffix_of(name) in ARCHIVES:
        raise FormatRefused(f"{path}: {name} is an archive within an archive; unpack it first")
    if suffix_of(name) in PICKLES:
        raise FormatRefused(f"{path}: {name}: {PICKLE}")


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, place: Path, room: int, path: Path) -> int:
    """Bytes written: counted, because what an archive says of its files' sizes need not be true."""
    done = 0
    with archive.open(info) as packed, place.open("xb") as file:
        while chunk := packed.read(CHUNK):
            done += len(chunk)
            if done > room:
                raise FormatRefused(
                    f"{path}: {info.filename} unpacks to more than {room >> 20} MiB; at most {MAX_UNPACKED >> 30} GiB "
                    f"and {MAX_RATIO} times the archive's size are read. If it is no bomb, unpack it first"
                )
            file.write(chunk)
    return done


def _is_junk(name: str) -> bool:
    """True if a file is what macOS and Windows add by themselves."""
    parts = PurePosixPath(name).parts
    return bool(parts) and (
        parts[0] == "__MACOSX" or parts[-1] in (".DS_Store", "Thumbs.db") or parts[-1].startswith("._")
    )
