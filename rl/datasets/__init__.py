"""Feedback becomes immutable datasets: made from evidence, written once, hashed, counted, never changed."""

from rl.datasets.making import messages_plain as messages_plain
from rl.datasets.preparing import Prepared as Prepared
from rl.datasets.preparing import prepare_training_dataset as prepare_training_dataset
from rl.datasets.snapshots import DatasetRefused as DatasetRefused
from rl.datasets.snapshots import DatasetTooSmall as DatasetTooSmall
from rl.datasets.snapshots import snapshot_rows as snapshot_rows
from rl.datasets.stats import get_training_stats as get_training_stats
