"""Trainer of the method `preferred`: pairs become demonstrations, which the SFT trainer learns from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ratchet_mail.method import PreferredRecipe
from rl.training.estimates import Estimate, sft
from rl.training.hardware import Hardware
from rl.training.profiler import MeasuredBase
from rl.training.result import TrainResult
from rl.training.sft import SFTTrainer


def demonstrations(pairs: Iterable[Mapping[str, Any]], recipe: PreferredRecipe) -> list[dict[str, Any]]:
    """The preferred response of each pair as the one to give, in the order of the pairs."""
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    if not recipe.once:
        return rows
    return list({json.dumps(row, sort_keys=True): row for row in rows}.values())


class PreferredTrainer(SFTTrainer):
    """Trainer like `rl.training.sft.SFTTrainer`, on rows {"prompt", "chosen", "rejected"}; refusals are the same."""

    recipe: PreferredRecipe

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        train, held_out = (demonstrations(rows or [], self.recipe) for rows in (train_dataset, eval_dataset))
        result = super().train(train, held_out)
        result.notes.append(
            f"preferred: {len(train):,} responses shown, of {len(train_dataset or []):,} pairs"
        )
        return result


def preferred(
    base_model: str,
    recipe: PreferredRecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """Steps, minutes and memory of `PreferredTrainer.train(rows)`, for a dry run."""
    return sft(base_model, recipe, demonstrations(rows, recipe), hardware=hardware, base=base)
