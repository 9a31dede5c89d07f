"""Caches on disk for later runs: values computed once per row, and the results of self-tests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TypedDict

import torch

logger = logging.getLogger("packed_forward.row_cache")

BUSY_S = 30.0
"""Seconds to wait for another process that is writing."""

LOOKUP = 500
"""Keys asked for in one statement; SQLite takes at most 999 in its oldest builds."""


class RowCache:
    """32-byte keys -> small values, in one SQLite file that several processes may read and write at once.

    It is a cache: a file that is broken, locked for too long or on a full disk is logged and left unused, never a
    reason for a run to fail. A crash in the middle of a write loses that write alone (WAL). Above `max_rows` the tenth
    that was not used for longest goes.
    """

    def __init__(self, path: Path, *, max_rows: int = 4_000_000) -> None:
        self.path = path
        self.max_rows = max_rows

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there."""
        rows: dict[bytes, bytes] = {}
        with self._open() as database:
            if database is None:
                return {}
            for start in range(0, len(keys), LOOKUP):
                some = keys[start : start + LOOKUP]
                marks = ",".join("?" * len(some))
                rows.update(
                    database.execute(f"SELECT key, value FROM rows WHERE key IN ({marks})", some)  # noqa: S608
                )
            self._touch(database, rows)
        return rows

    def put(self, values: Mapping[bytes, bytes]) -> None:
        """Store these values; beyond `max_rows` evict those not used for longest."""
        now = int(time.time())
        with self._open() as database:
            if database is None:
                return
            with database:
                database.executemany(
                    "INSERT OR REPLACE INTO rows (key, value, used) VALUES (?, ?, ?)",
                    [(key, value, now) for key, value in values.items()],
                )
            (count,) = database.execute("SELECT count(*) FROM rows").fetchone()
            if count > self.max_rows:
                with database:
                    database.execute(
                        "DELETE FROM rows WHERE key IN (SELECT key FROM rows ORDER BY used LIMIT ?)",
                        (count - self.max_rows + self.max_rows // 10,),
                    )

    def _touch(self, database: sqlite3.Connection, keys: Iterable[bytes]) -> None:
        # once a day is exact enough to tell what is used, and spares a write on every read
        today = int(time.time())
        with database:
            database.executemany(
                "UPDATE rows SET used = ? WHERE key = ? AND used < ?",
                [(today, key, today - 86_400) for key in keys],
            )

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        database = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, timeout=BUSY_S)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value BLOB NOT NULL, used INTEGER NOT NULL) "
                "WITHOUT ROWID"
            )
        except (sqlite3.Error, OSError) as error:
            self._give_up(database, error)
            database = None
        try:
            yield database
        except sqlite3.Error as error:
            self._give_up(database, error)
        finally:
            if database is not None:
                database.close()

    def _give_up(self, database: sqlite3.Connection | None, error: Exception) -> None:
        logger.warning("going on without the cache %s: %s", self.path, error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            # not a database any more: out of the way, so that the next run starts a new one
            if database is not None:
                database.close()
            with contextlib.suppress(OSError):
                self.path.replace(self.path.with_suffix(".broken"))


def row_key(*parts: str | Sequence[int]) -> bytes:
    """SHA-256 of texts and token ids, each with its length, so that no two lists of parts look alike."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else ",".join(map(str, part)).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


# --- Cache of self-test results on disk: a retrain need not measure again what has not changed ---

LIBRARIES = ("torch", "transformers", "peft", "trl")

SOURCES = (
    "forward.py",
    "fused_layers.py",
    "logps.py",
    "packing.py",
    "prefix_attention.py",
    "selection.py",
    "selftest.py",
    "triton_kernels.py",
)
"""Files beside this one that decide how a packed row is computed."""


@dataclass(frozen=True)
class SelftestCache:
    """Store of self-test results, with the facts about a model that it does not carry itself."""

    rows: RowCache
    base_model_hash: str
    quantization: str
    """`none` or `4bit`."""
    processor: str
    """The CPU's name; a result on CUDA goes by the card's."""


class SelftestResult(TypedDict):
    """A stored result: the strategy, why it was taken, how well it agreed, and the longest row in tokens."""

    rung: str
    reason: str
    agreement: dict[str, str]
    longest: int


class CachedPolicy(Protocol):
    """The part of `selftest.PackablePolicy` that a key is made of."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def selftest_cache(self) -> SelftestCache | None: ...


def selftest_key(policy: CachedPolicy, *conditions: str) -> bytes | None:
    """Key of all that a result depends on but the rows: weights, arithmetic, adapter, machine, libraries, our code.

    None for a policy without a cache.
    """
    cache = policy.selftest_cache
    if cache is None:
        return None
    shapes = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    ]
    cuda = policy.device.type == "cuda"
    return row_key(
        cache.base_model_hash,
        str(policy.model.dtype),
        cache.quantization,
        _attention(policy.model),
        json.dumps(shapes),
        torch.cuda.get_device_name(policy.device) if cuda else cache.processor,
        str(torch.is_autocast_enabled(policy.device.type)),
        packed_code(),
        *conditions,
    )


def selftest_read(policy: CachedPolicy, key: bytes, longest: int) -> SelftestResult | None:
    """The result under the key, unless only shorter rows were tested: a sliding window shows beyond its width."""
    if policy.selftest_cache is None:
        return None
    stored = policy.selftest_cache.rows.get([key]).get(key)
    result: SelftestResult | None = json.loads(stored) if stored is not None else None
    return result if result is not None and result["longest"] >= longest else None


def selftest_store(policy: CachedPolicy, key: bytes, longest: int, **result: object) -> None:
    """Store a result under the key, with the tokens of the longest row it was measured on."""
    if policy.selftest_cache is not None:
        policy.selftest_cache.rows.put({key: json.dumps({**result, "longest": longest}).encode()})


def _attention(model: torch.nn.Module) -> str:
    from packed_forward.prefix_attention import ATTENTION

    kind = str(model.config._attn_implementation)
    return "sdpa" if kind == ATTENTION else kind  # prefix attention was put in sdpa's place


@functools.cache
def packed_code() -> str:
    """Sum over the code that computes packed rows, and the versions of its libraries."""
    digest = hashlib.sha256()
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()
