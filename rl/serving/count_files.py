"""Files in which web processes count for `/metrics`: written with pwrite, so that a full disk cannot end a process.

prometheus_client keeps each process's counts in a memory-mapped file. A write through such a map has no return value:
where the disk has no block left for it, the kernel answers with SIGBUS and the process is gone, in the middle of a
request. Allocating the blocks beforehand (posix_fallocate) would not do on copy-on-write file systems, which need a
new block for every write. So the counts live in memory here, and each change is written to the file with pwrite, whose
failure is an OSError: counting goes on in memory and the file catches up when the disk takes it again. The format of
the files, and everything that reads them, is prometheus_client's own.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger("rl.serving")

HEADER_BYTES = 8
"""At the start of a file: how many bytes of it are used, as a 4-byte integer, and padding."""
RETRY_S = 5.0
"""Between two tries of a file that could not be opened or written."""


class CountFile:
    """A dict of doubles in memory, copied to a file; a file that cannot be written is done without, and retried.

    Takes the place of prometheus_client's MmapedDict. Not thread-safe: the values there hold one lock around it.
    """

    def __init__(self, filename: str) -> None:
        self._path = Path(filename)
        self._descriptor: int | None = None
        self._behind = True
        """True if the file lacks something that is in memory."""
        self._retry_at = 0.0
        self._data = bytearray(HEADER_BYTES)
        self._used = HEADER_BYTES
        self._positions: dict[str, int] = {}
        self._read()
        self._write_all()

    def _read(self) -> None:
        """The counts of a process that had this number before, which go on; what cannot be read begins anew."""
        try:
            data = self._path.read_bytes()
            used = used_bytes(data)
            entries = MmapedDict.read_all_values_from_file(str(self._path)) if used > HEADER_BYTES else ()
            positions = {key: at for key, _, _, at in entries}
        except (OSError, ValueError, struct.error, RuntimeError, UnicodeDecodeError):
            return
        self._data, self._used, self._positions = bytearray(data[:used]), used, positions

    def _init_value(self, key: str) -> None:
        encoded = key.encode("utf-8")
        padded = encoded + b" " * (8 - (len(encoded) + 4) % 8)
        del self._data[self._used :]
        self._data += struct.pack(f"i{len(padded)}sdd", len(encoded), padded, 0.0, 0.0)
        self._used = len(self._data)
        self._positions[key] = self._used - 16
        self._behind = True
        self._write_all()

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and timestamp, both 0 of a key that is new."""
        if key not in self._positions:
            self._init_value(key)
        value, timestamp = struct.unpack_from("dd", self._data, self._positions[key])
        return value, timestamp

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if key not in self._positions:
            self._init_value(key)
        at = self._positions[key]
        self._data[at : at + 16] = struct.pack("dd", value, timestamp)
        if self._behind or self._descriptor is None:
            self._behind = True
            self._write_all()
            return
        try:
            os.pwrite(self._descriptor, self._data[at : at + 16], at)
        except OSError as error:
            self._log_failure(error)

    def _write_all(self) -> None:
        """Bring the file up to what is in memory, its header last: a reader never looks beyond what is there."""
        if not self._behind or time.monotonic() < self._retry_at:
            return
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            at = HEADER_BYTES
            while at < self._used:
                at += os.pwrite(self._descriptor, self._data[at : self._used], at)
            self._data[:HEADER_BYTES] = struct.pack("ii", self._used, 0)
            os.pwrite(self._descriptor, self._data[:HEADER_BYTES], 0)
        except OSError as error:
            self._log_failure(error)
            return
        if self._retry_at:
            logger.info("counts for /metrics are written to %s again", self._path)
        self._behind, self._retry_at = False, 0.0

    def _log_failure(self, error: OSError) -> None:
        if not self._retry_at:
            logger.warning(
                "counts for /metrics stay in memory: %s cannot be written (%s). Free the disk, make the folder "
                "writable, or name another in PROMETHEUS_MULTIPROC_DIR",
                self._path,
                error.strerror or error,
            )
        self._behind = True
        self._retry_at = time.monotonic() + RETRY_S

    def close(self) -> None:
        if self._descriptor is not None:
            self._write_all()
            os.close(self._descriptor)
            self._descriptor = None


def used_bytes(data: bytes) -> int:
    """Bytes of a file that hold counts. Raises ValueError where the file is shorter than it says, or empty."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"expected at least {HEADER_BYTES} bytes, found {len(data)}")
    used: int = struct.unpack_from("i", data, 0)[0]
    if not HEADER_BYTES <= used <= len(data):
        raise ValueError(f"expected {used} bytes of counts, found {len(data)}")
    return used


def whole_files(folder: Path) -> list[str]:
    """The files of a folder that can be read; one that a full disk left without its content is passed over."""
    found = []
    for path in sorted(folder.glob("*.db")):
        try:
            if used_bytes(path.read_bytes()) > HEADER_BYTES:
                found.append(str(path))
        except (OSError, ValueError) as error:
            logger.debug("%s is left out of /metrics: %s", path, error)
    return found
