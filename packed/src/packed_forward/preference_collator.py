"""Batches of preference pairs for TRL's DPO loss, one packed row per prompt instead of two rows per pair."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.dpo_trainer import DataCollatorForPreference

from packed_forward.packing import completion_batch, flatten, pack
from packed_forward.selftest import Fit
from packed_forward.strategies import FLEX_STRATEGIES, Strategy


@dataclass
class PreferenceCollator(DataCollatorForPreference):
    """A batch of B pairs as TRL's loss takes it, the chosen half first.

    With a packed `strategy` TRL sees the completions alone, [2B, 1 + C], and the model finds the rows in `packed`.
    Rows that cannot be packed go as TRL's own: an empty prompt or completion, or one longer than `tested_tokens`.
    """

    strategy: Strategy = Strategy.STOCK
    fit: Fit | None = None
    """Widths that packed rows are padded to, see `packed.packing.pack`."""
    tested_tokens: int | None = None
    """Longest row, in tokens, that the strategy was tested on; None: there are no longer ones."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if self.strategy is Strategy.STOCK:
            return dict(super().torch_call(examples))
        sides = {
            side: [self.cut(example, side) for example in examples] for side in ("chosen_ids", "rejected_ids")
        }
        rows = [row for rows in sides.values() for row in rows]
        if not all(prompt and completion for prompt, completion in rows) or self._lacks_test(rows):
            return dict(super().torch_call(examples))
        packed = pack(
            [prompt for prompt, _ in rows],
            [completion for _, completion in rows],
            pad_token_id=self.pad_token_id,
            fit=self.fit,
        )
        if self.strategy in FLEX_STRATEGIES:
            packed = dataclasses.replace(packed, flat=flatten(packed))
        batch = completion_batch(packed, self.pad_token_id, len(rows))
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            if column in examples[0]:
                batch[column] = torch.tensor([example[column] for example in examples])
        return batch

    def cut(self, example: dict[str, Any], side: str) -> tuple[list[int], list[int]]:
        """Prompt and completion of one side, cut to `max_length` tokens together as TRL cuts them."""
        prompt, completion = example["prompt_ids"], example[side]
        excess = 0 if self.max_length is None else len(prompt) + len(completion) - self.max_length
        if excess <= 0:
            return prompt, completion
        if self.truncation_mode == "keep_end":
            return prompt[excess:], completion[max(excess - len(prompt), 0) :]
        limit = self.max_length or 0
        return prompt[:limit], completion[: max(limit - len(prompt), 0)]

    def _lacks_test(self, rows: list[tuple[list[int], list[int]]]) -> bool:
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        return self.tested_tokens is not None and longest > self.tested_tokens
