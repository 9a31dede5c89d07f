"""Opens files as the bytes they hold: gzip and Zstandard unpacked, zip archives into a folder, within bounds."""

from __future__ import annotations

import gzip
import io
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from backend import limits
from feedback.transfer.formats.records import FormatRefused

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_UNPACKED = limits.UNPACKED_BYTES
"""Most bytes a compressed file may unpack to."""

MAX_RATIO = limits.UNPACKED_RATIO
"""Largest ratio of unpacked to compressed size, where that is more than FREE bytes: text and JSON shrink 3 to
40 times, a bomb made of one byte 1,000 times and more."""

FREE = limits.UNPACKED_FREE_BYTES
"""Bytes a compressed file may unpack to whatever its size."""

HEAD = 512
"""Bytes looked at to tell what a file is."""

PICKLE = (
    "a pickle is never read: reading one runs whatever code it holds; export it as JSON lines, CSV or Parquet"
)
_WEIGHTS = "these are a model's weights, not feedback"
_UNPACK = "unpack it first, or make it a .zip, .gz or .zst"
_BY_SUFFIX = dict.fromkeys((".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt"), PICKLE) | {
    ".safetensors": _WEIGHTS,
    ".gguf": _WEIGHTS,
}
_BY_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", _WEIGHTS),
    (b"ARROW1", "an Arrow (Feather) file is not read; save it as Parquet"),
    (b"\xff\xff\xff\xff", "an Arrow stream is not read; save it as Parquet"),
    (b"Obj\x01", "an Avro file is not read; save it as Parquet or JSON lines"),
    (b"SQLite format 3", "a SQLite database is not read; export its table as CSV"),
    (b"\x89HDF", "an HDF5 file is not read; save its table as Parquet or CSV"),
    (b"\x93NUMPY", "a NumPy array is not read; save the rows as JSON lines or CSV"),
    (b"\xd0\xcf\x11\xe0", "an old Excel file is not read; save the sheet as CSV"),
    (b"%PDF", "a PDF is not read"),
    (b"BZh", f"bzip2 is not read; {_UNPACK}"),
    (b"\xfd7zXZ", f"xz is not read; {_UNPACK}"),
    (b"\x04\x22\x4d\x18", f"lz4 is not read; {_UNPACK}"),
    (b"7z\xbc\xaf", f"a 7z archive is not read; {_UNPACK}"),
    (b"Rar!", f"a rar archive is not read; {_UNPACK}"),
)
ZIP = b"PK\x03\x04"
PARQUET = b"PAR1"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _BoundedReader(io.RawIOBase):
    """Bytes as they are unpacked, counted: what goes on without end is refused. Can be read again from the start."""

    def __init__(self, file: IO[bytes], path: Path, name: str) -> None:
        self._file, self._name = file, name
        self._size = max(path.stat().st_size, 1)
        self._done = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a compressed file is read from its start")
        self._file.seek(0)
        self._done = 0
        return 0

    def tell(self) -> int:
        return self._done

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._done += len(data)
        if self._done > MAX_UNPACKED or self._done > max(FREE, MAX_RATIO * self._size):
            raise FormatRefused(
                f"{self._name}: unpacks to more than {self._done >> 20} MiB from {self._size:,} bytes; at most "
                f"{MAX_UNPACKED >> 30} GiB and {MAX_RATIO} times its size are read. If it is no bomb, unpack it first"
            )
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def is_packed(head: bytes) -> bool:
    """True if a file that begins so is gzip or Zstandard."""
    return head.startswith((_GZIP, _ZSTD))


def suffix_of(name: str) -> str:
    """The ending that says what a file holds, without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    lower = name.lower()
    for ending in (".gz", ".gzip", ".zst", ".zstd"):
        lower = lower.removesuffix(ending)
    return Path(lower).suffix


@contextmanager
def open_unpacked(path: Path, name: str = "") -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked; they can be read again after `seek(0)`.

    Raises FormatRefused for a file that is not there, damaged, a bomb, a pickle, an archive in a compressed file, or of
    a kind that is known and not read; it says what to do instead.
    """
    name = name or str(path)
    if reason := _BY_SUFFIX.get(suffix_of(path.name)):
        raise FormatRefused(f"{name}: {reason}")
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            file.seek(0)
            if not is_packed(head):
                _check(head, name)
                yield file
                return
        packed: Any = gzip.open(path) if head.startswith(_GZIP) else zstd.open(path)  # noqa: SIM115 - _Bounded closes it
        with io.BufferedReader(_BoundedReader(packed, path, name), 1 << 16) as unpacked:
            inside = unpacked.read(HEAD)
            unpacked.seek(0)
            if is_packed(inside) or inside.startswith(ZIP) or inside[257:262] == b"ustar":
                raise FormatRefused(f"{name}: an archive within a compressed file is not read; {_UNPACK}")
            _check(inside, name)
            yield unpacked
    except zstd.ZstdError as error:
        raise FormatRefused(f"{name}: the Zstandard file is damaged or cut short: {error}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatRefused(f"{name}: the compressed file is damaged or cut short: {error}") from error
    except OSError as error:
        raise FormatRefused(f"{name}: cannot be read: {error.strerror or error}") from error


def _check(head: bytes, name: str) -> None:
    for magic, reason in _BY_MAGIC:
        if head.startswith(magic):
            raise FormatRefused(f"{name}: {reason}")
    if head[257:262] == b"ustar":
        raise FormatRefused(f"{name}: a tar archive is not read; {_UNPACK}")
    # protocols 2 to 5 begin with a byte no text begins with, and the number of the protocol
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        raise FormatRefused(f"{name}: {PICKLE}")


# --- Zip archives ------------------------------------------------------------------------------------------

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
        _check_member(info, path)
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


def _check_member(info: zipfile.ZipInfo, path: Path) -> None:
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
