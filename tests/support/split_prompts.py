"""Prompts that stand on the side of the split where a test needs them."""

from typing import Any

from feedback.models import prompt_hash
from rl.datasets.feedback_types import Split
from rl.datasets.holdout import Shares, draw_split
from rl.models import PromptSplit


def stand(agent: str, messages: list[dict[str, Any]], split: Split) -> str:
    """Enter the prompt there before any dataset is made of it; returns its hash. Twice does no harm."""
    name = prompt_hash(agent, messages)
    row, _ = PromptSplit.objects.get_or_create(prompt_hash=name, defaults={"agent": agent, "split": split})
    assert row.split == split
    return name


def split_by_hash(prompt_hash: str) -> Split:
    """A split that depends on the hash alone: 80 % train, 10 % eval, 10 % holdout."""
    return draw_split(prompt_hash, Shares(0.1, 0.1))
