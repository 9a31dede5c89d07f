"""Datasets: feedback as immutable snapshots with a hash, counts and the query behind them.

The names below are imported on first use, because the training package reads the pure modules (pairs, labels, split
arithmetic) and knows no Django.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl.datasets.builder import PreparedDataset as PreparedDataset
    from rl.datasets.builder import prepare_training_dataset as prepare_training_dataset
    from rl.datasets.rows import messages_plain as messages_plain
    from rl.datasets.snapshots import DatasetRefused as DatasetRefused
    from rl.datasets.snapshots import DatasetTooSmall as DatasetTooSmall
    from rl.datasets.snapshots import snapshot_rows as snapshot_rows
    from rl.datasets.stats import get_training_stats as get_training_stats

_MODULES = {
    "PreparedDataset": "builder",
    "prepare_training_dataset": "builder",
    "messages_plain": "rows",
    "DatasetRefused": "snapshots",
    "DatasetTooSmall": "snapshots",
    "snapshot_rows": "snapshots",
    "get_training_stats": "stats",
}
"""Public name -> module of this package that defines it."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
