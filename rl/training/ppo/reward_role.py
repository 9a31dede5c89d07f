"""A reward model as one more role on the base in memory, where it was trained on that base: an adapter and a head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, set_peft_model_state_dict
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors.torch import load_file

from packed_forward.logps import collate
from rl.recipes.reward_model import CAUSAL, FACTS
from rl.training.encoding import EncodedResponse
from rl.training.policy import matmul
from rl.training.ppo.shared_base import REWARD, SharedBase
from rl.training.result import TrainingRefused
from rl.training.reward_scores import RewardModel

HEAD = "base_model.model.score.weight"
"""Name of the score head in a causal reward model's checkpoint."""


class SharedRewardModel(RewardModel):
    """A `RewardModel` that computes on the policy's own frozen base instead of a second copy of it."""

    def __init__(self, base: SharedBase, path: str | Path) -> None:
        """`path`: a checkpoint that `fits` said yes to. Raises TrainingRefused for one that is not whole."""
        path = Path(path)
        facts = json.loads((path / FACTS).read_text("utf-8"))
        super().__init__(base.model, base.policy.encoder, facts, base.policy.hardware)
        self.base = base
        config = LoraConfig.from_pretrained(path)
        tensors = load_file(path / "adapter_model.safetensors", device=str(base.policy.device))
        head = tensors.pop(HEAD, None)
        if head is None:
            raise TrainingRefused(f"expected a score head ({HEAD}) in {path}, found none: train it again")
        config.modules_to_save, config.task_type, config.inference_mode = None, "CAUSAL_LM", True
        base.model.add_adapter(REWARD, config)
        loaded = set_peft_model_state_dict(base.model, tensors, adapter_name=REWARD)
        missing = [name for name in loaded.missing_keys if f".{REWARD}." in name]
        if missing or loaded.unexpected_keys:
            raise TrainingRefused(
                f"the reward model {path} does not fit {base.policy.base_model}: "
                f"{len(missing)} weights missing, {len(loaded.unexpected_keys)} unknown"
            )
        base.settle()
        self.head = head

    def scores_encoded(self, items: Sequence[EncodedResponse], batch_size: int = 16) -> list[float]:
        """The head's number for each response, read at its last token."""
        order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_ids) + len(items[i].response_ids))
        score_list = [0.0] * len(items)
        with torch.no_grad(), matmul(self.hardware), self.base.speaking_as(REWARD) as model:
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = collate([items[i] for i in rows], self.encoder.tokenizer.pad_token_id)
                mask = batch["attention_mask"].to(self.base.policy.device)
                hidden = model.base_model(
                    input_ids=batch["input_ids"].to(mask.device), attention_mask=mask, use_cache=False
                ).last_hidden_state
                last = hidden[torch.arange(len(rows), device=mask.device), mask.sum(1) - 1]
                scores = (last.to(self.head.dtype) @ self.head.t())[:, 0].tolist()
                for i, value in zip(rows, scores, strict=True):
                    score_list[i] = value
        return score_list


def fits(path: str | Path, base: SharedBase) -> bool:
    """True if a reward model's checkpoint is a LoRA on just this base, in the precision it is loaded in, and the policy
    is one, too: layers hold either LoRAs or whole copies."""
    try:
        facts = json.loads((Path(path) / FACTS).read_text("utf-8"))
        if facts.get("architecture") != CAUSAL:
            return False
        config = LoraConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError):
        return False  # RewardModel.load says what is wrong with it
    same = facts.get("base_model") == base.policy.base_model
    as_lora = not base.recipe.whole and DUMMY_TARGET_MODULES not in (config.target_modules or ())
    return same and as_lora and base.policy.quantization == "none"
