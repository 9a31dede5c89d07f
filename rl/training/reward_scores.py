"""A trained reward model, read from its folder: base with LoRA and a score head, an encoder, or a linear one. It scores
responses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from rl.agents.base import Message
from rl.checksums import base_hash
from rl.linear.model import LinearPolicy, LinearPolicyError
from rl.linear.rows import single_text
from rl.recipes.reward_model import FACTS, LINEAR
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.training.encoding import EncodedResponse
from rl.training.hardware import Hardware, detect
from rl.training.loading import load_shape, without_bars
from rl.training.model_files import PolicyLoadError, base_check, model_located
from rl.training.policy import matmul
from rl.training.reward_metrics import sigmoid
from rl.training.score_trainer import pad_batch

HEADS = ("score", "classifier")
"""Names of a score head: in causal models, in encoders."""


class RewardModel:
    """A trained reward model: `score` for PPO, GRPO and the engine, `scores` for raw numbers.

    Subclass it and override `scores`, or wrap it in a function, and name that with `--reward your.module.name`.
    """

    def __init__(self, model: Any, encoder: Any, facts: dict[str, Any], hardware: Hardware) -> None:
        self.model, self.encoder, self.facts, self.hardware = model, encoder, facts, hardware

    @property
    def name(self) -> str:
        return f"model:{self.facts.get('agent') or 'reward'}"

    @classmethod
    def load(cls, path: str | Path, hardware: Hardware | None = None) -> RewardModel:
        """Open a checkpoint of `train_reward_model`. Raises PolicyLoadError for anything else."""
        path, hardware = Path(path), hardware or detect()
        try:
            facts = json.loads((path / FACTS).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise PolicyLoadError(
                f"expected a reward model at {path} (with {FACTS}), found {error}; train one with train_reward_model"
            ) from error
        if facts.get("architecture") == LINEAR:
            try:
                return LinearRewardModel(LinearPolicy.load(path), facts, hardware)
            except LinearPolicyError as error:
                raise PolicyLoadError(f"the reward model {path}: {error}") from error
        base = str(facts["base_model"])
        model, encoder = backbone_load(base, facts["architecture"], hardware)
        found = base_hash(model_located(base), getattr(model.config, "_commit_hash", None))
        base_check(f"the reward model {path}", facts, facts["base_model"], found)
        model = PeftModel.from_pretrained(model, path, use_safetensors=True)
        if DUMMY_TARGET_MODULES in (model.peft_config["default"].target_modules or ()):
            model = model.merge_and_unload()  # whole weights take the base's place; nobody asks the base
        model.to(dtype_of(facts["architecture"], hardware)).eval()
        head_of(model.get_base_model() if isinstance(model, PeftModel) else model).float()
        return cls(model, encoder, facts, hardware)

    def scores(self, items: Sequence[tuple[Sequence[Message], str]], batch_size: int = 16) -> list[float]:
        """The head's number for each (prompt, response): a logit, or a score for regression; any real number."""
        return self.scores_encoded(self.encoder.responses(items, self.facts["max_length"]), batch_size)

    def scores_encoded(self, items: Sequence[EncodedResponse], batch_size: int = 16) -> list[float]:
        """Scores of responses that are tokens of this model's tokenizer already."""
        order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_ids) + len(items[i].response_ids))
        found = [0.0] * len(items)
        self.model.eval()
        with torch.inference_mode(), matmul(self.hardware):
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = _collate([items[i] for i in rows], self.encoder.tokenizer.pad_token_id)
                batch = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
                for i, value in zip(rows, self.model(**batch).logits[:, 0].float().tolist(), strict=True):
                    found[i] = value
        return found

    def row_scores(
        self, rows: Sequence[Mapping[str, Any]], max_completion_length: int = 512
    ) -> list[list[float]]:
        """The head's number for each response of each row: of pairs the chosen one's and the rejected one's, of single
        responses the one. Raises ValueError for rows of another shape."""
        columns = [self._column_scores(rows, side, max_completion_length) for side in row_sides(rows)]
        return [list(found) for found in zip(*columns, strict=True)]

    def _column_scores(
        self, rows: Sequence[Mapping[str, Any]], side: str, max_completion_length: int
    ) -> list[float]:
        return self.scores_encoded(
            self.encoder.column(rows, side, self.facts["max_length"], max_completion_length).items
        )

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        """Raw rewards in [-2, 2], as a reward function gives them, see `to_raw`."""
        scores = self.scores([([dict(m) for m in s.prompt], s.response) for s in samples])
        return [RewardValue(self.to_raw(score), {"score": round(score, 6)}) for score in scores]

    def to_raw(self, score: float) -> float:
        """The head's number as a raw reward.

        pairwise: how many standard deviations of the training responses' scores above their mean; binary: the
        probability of a thumb up, regression: the score, each from [0, 1] onto [-2, 2]. Cut to the range.
        """
        objective = self.facts["objective"]
        if objective == "pairwise":
            raw = (score - self.facts["mean"]) / max(self.facts["std"], 1e-6)
        else:
            share = sigmoid(score) if objective == "binary" else score
            raw = RAW_LOW + (RAW_HIGH - RAW_LOW) * share
        return min(RAW_HIGH, max(RAW_LOW, raw))


class LinearRewardModel(RewardModel):
    """A `RewardModel` that reads the words and fields of prompt and response (`rl.linear`), without a base model."""

    def __init__(self, policy: LinearPolicy, facts: dict[str, Any], hardware: Hardware) -> None:
        super().__init__(None, None, facts, hardware)
        self.policy = policy

    def scores(self, items: Sequence[tuple[Sequence[Message], str]], batch_size: int = 16) -> list[float]:
        """Log-odds that each (prompt, response) is liked; for regression the score itself, in (0, 1)."""
        intercept = float(self.policy.facts.get("intercept", 0.0))
        found = [self.policy.scores(messages, [text])[0] + intercept for messages, text in items]
        return [sigmoid(value) for value in found] if self.facts["objective"] == "regression" else found

    def _column_scores(
        self, rows: Sequence[Mapping[str, Any]], side: str, max_completion_length: int
    ) -> list[float]:
        return self.scores([(row["prompt"], single_text(row[side]) or "") for row in rows])


def row_sides(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Columns of the responses of preference pairs, or of single responses."""
    return ("chosen", "rejected") if rows and "chosen" in rows[0] else ("completion",)


def dtype_of(architecture: str, hardware: Hardware) -> torch.dtype:
    return torch.float32 if architecture == "encoder" else getattr(torch, hardware.dtype)


def backbone_load(base_model: str, architecture: str, hardware: Hardware) -> tuple[Any, Any]:
    """A transformers sequence classifier with one output, and the encoder of its tokenizer."""
    config, encoder, _ = load_shape(base_model, causal=architecture == "causal")
    config.num_labels = 1
    config.pad_token_id = encoder.tokenizer.pad_token_id
    source = model_located(base_model)
    try:
        # that a head is missing or of another width is what is meant to be
        with _quiet(), without_bars() if Path(source).is_dir() else contextlib.nullcontext():
            model = AutoModelForSequenceClassification.from_pretrained(
                source,
                config=config,
                dtype=dtype_of(architecture, hardware),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # the head is ours and new
            )
    except (OSError, ValueError, KeyError) as error:
        raise PolicyLoadError(
            f"{base_model} cannot carry a score head: {str(error).splitlines()[0]}"
        ) from error
    head_of(model).float().register_forward_pre_hook(_as_head)
    return model.to("cuda" if hardware.device == "cuda" else hardware.device), encoder


def head_of(model: Any) -> Any:
    """The score head. It works in float32 whatever the backbone does: in bfloat16 1 and 1.003 are one number."""
    return getattr(model, next(name for name in HEADS if hasattr(model, name)))


def _as_head(module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before the head: what comes from a backbone in half precision, in the head's own."""
    return (given[0].to(next(module.parameters()).dtype), *given[1:])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _collate(items: Sequence[EncodedResponse], pad: int) -> dict[str, torch.Tensor]:
    return pad_batch([item.prompt_ids + item.response_ids for item in items], pad)
