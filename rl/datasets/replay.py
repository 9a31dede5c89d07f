"""Replay of older feedback in a retrain: drawn by hash, so that the same feedback makes the same dataset. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rl.datasets.judgements import RowSet

LEFT_OUT = "not_replayed"
"""The reason that rows are left out for: older feedback that was not drawn this time."""


@dataclass(frozen=True)
class Replay:
    """All rows of the prompts that something new was said of, and a share of the other prompts' training rows."""

    share: float
    """In [0, 1]."""
    new: frozenset[str]
    """Hashes of the prompts with feedback that no run has learnt from."""

    def keeps(self, prompt_hash: str, salt: str) -> bool:
        """True if a prompt is in: every one has the chance `share`, the same for the same salt."""
        if prompt_hash in self.new:
            return True
        drawn = hashlib.sha256(f"replay:{salt}:{prompt_hash}".encode()).digest()
        return int.from_bytes(drawn[:8]) < self.share * 2**64

    def draw(self, rows: RowSet, salt: str) -> RowSet:
        """The rows that stay: held-out ones always, as what was learnt before is measured on them.

        salt: something that differs from retrain to retrain, so that what sat out once comes in another time.
        """
        sample: tuple[Any, ...] = tuple(
            row for row in rows.rows if row.split != "train" or self.keeps(row.prompt_hash, salt)
        )
        out = len(rows.rows) - len(sample)
        left_out = {**rows.left_out, LEFT_OUT: out} if out else rows.left_out
        return type(rows)(sample, left_out)

    def query(self, salt: str, rows: Iterable[Any]) -> dict[str, Any]:
        """Record of the draw for the snapshot: training rows of prompts with new and with older feedback."""
        train = [row.prompt_hash in self.new for row in rows if row.split == "train"]
        return {
            "share": self.share,
            "salt": salt,
            "new_prompts": len(self.new),
            "train_rows_new": sum(train),
            "train_rows_replayed": len(train) - sum(train),
        }
