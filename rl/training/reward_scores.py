"""Reward models in use, how they are measured, and the linear one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from rl.agents.base import Message, Row
from rl.checksums import base_hash
from rl.linear.fit import fit
from rl.linear.model import LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, single_text
from rl.recipes import RewardModelRecipe
from rl.recipes.reward_model import FACTS, LINEAR
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.statistics import calibration_curve, concordance, expected_calibration_error
from rl.training.adapter_trainer import versions
from rl.training.encoding import EncodedResponse, Encoder
from rl.training.hardware import Hardware, detect
from rl.training.loading import PolicyLoadError, base_check, load_shape, model_located, without_bars
from rl.training.policy import matmul
from rl.training.result import TrainingRefused, TrainResult
from rl.training.run import RunContext, folder_prepare

HEADS = ("score", "classifier")
"""Names of a score head: in causal models, in encoders."""


class ScoreFacts(TypedDict, total=False):
    """Facts stored beside a reward model's weights; `mean` and `std` are those of the training responses' scores."""

    objective: str
    architecture: str
    base_model: str
    base_model_hash: str
    agent: str
    max_length: int
    mean: float
    std: float
    held_out: dict[str, Any]


class RewardModel:
    """A trained reward model: `score` for PPO, GRPO and the engine, `scores` for raw numbers.

    Subclass it and override `scores`, or wrap it in a function, and name that with `--reward your.module.name`.
    """

    def __init__(
        self, model: torch.nn.Module, encoder: Encoder, facts: ScoreFacts, hardware: Hardware
    ) -> None:
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
        model.to(dtype_of(facts["architecture"], hardware)).eval()
        head_of(model.get_base_model()).float()
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

    def row_scores(self, rows: Sequence[Row], max_completion_length: int = 512) -> list[list[float]]:
        """The head's number for each response of each row: of pairs the chosen one's and the rejected one's, of single
        responses the one. Raises ValueError for rows of another shape."""
        columns = [self._column_scores(rows, side, max_completion_length) for side in row_sides(rows)]
        return [list(found) for found in zip(*columns, strict=True)]

    def _column_scores(self, rows: Sequence[Row], side: str, max_completion_length: int) -> list[float]:
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

    def __init__(self, policy: LinearPolicy, facts: ScoreFacts, hardware: Hardware) -> None:
        self.facts, self.hardware, self.policy = facts, hardware, policy

    def scores(self, items: Sequence[tuple[Sequence[Message], str]], batch_size: int = 16) -> list[float]:
        """Log-odds that each (prompt, response) is liked; for regression the score itself, in (0, 1)."""
        intercept = float(self.policy.facts.get("intercept", 0.0))
        found = [self.policy.scores(messages, [text])[0] + intercept for messages, text in items]
        return [sigmoid(value) for value in found] if self.facts["objective"] == "regression" else found

    def _column_scores(self, rows: Sequence[Row], side: str, max_completion_length: int) -> list[float]:
        return self.scores([(row["prompt"], single_text(row[side]) or "") for row in rows])


def row_sides(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns of the responses of preference pairs, or of single responses."""
    return ("chosen", "rejected") if rows and "chosen" in rows[0] else ("completion",)


def dtype_of(architecture: str, hardware: Hardware) -> torch.dtype:
    return torch.float32 if architecture == "encoder" else getattr(torch, hardware.dtype)


def backbone_load(base_model: str, architecture: str, hardware: Hardware) -> tuple[torch.nn.Module, Encoder]:
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


def head_of(model: torch.nn.Module) -> torch.nn.Module:
    """The score head. It works in float32 whatever the backbone does: in bfloat16 1 and 1.003 are one number."""
    return getattr(model, next(name for name in HEADS if hasattr(model, name)))


def _as_head(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
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


@dataclass(frozen=True)
class HeldOutMetrics:
    """Agreement of predicted and given feedback on held-out rows."""

    accuracy: float
    """Share of pairs ranked as people did, or of responses on the right side of neutral."""
    brier: float
    """Mean squared error of the stated probability (of the score, for regression); 0.25 is a coin."""
    calibration_error: float
    """Expected calibration error over ten bins."""
    curve: list[dict[str, float]]
    """Per bin that holds any: predicted and observed share, count."""


def held_out_metrics(
    scores: Sequence[tuple[float, float]], targets: Sequence[float], objective: str
) -> HeldOutMetrics:
    """Metrics from the head's numbers for each response and the other of its pair, and from what people said.

    `targets` are the scores (regression) or thumbs (binary), in [0, 1]; of pairs (pairwise) people's choice is the
    first and they are not looked at.
    """
    if objective == "pairwise":
        chances = [sigmoid(first - other) for first, other in scores]
        # people's choice is always the first: the model is asked how sure it is of its own choice, and whether it is
        # right
        sure = [max(p, 1 - p) for p in chances]
        right = [float(p > 0.5) for p in chances]
        brier = statistics.fmean((1 - p) ** 2 for p in chances)
        curve = calibration_curve(sure, right)
        return HeldOutMetrics(statistics.fmean(right), brier, expected_calibration_error(sure, right), curve)
    alone = [first for first, _ in scores]
    chances = [sigmoid(s) if objective == "binary" else min(1.0, max(0.0, s)) for s in alone]
    decided = [(p, t) for p, t in zip(chances, targets, strict=True) if t != 0.5]
    accuracy = statistics.fmean((p > 0.5) == (t > 0.5) for p, t in decided) if decided else math.nan
    brier = statistics.fmean((p - t) ** 2 for p, t in zip(chances, targets, strict=True))
    return HeldOutMetrics(
        accuracy, brier, expected_calibration_error(chances, targets), calibration_curve(chances, targets)
    )


def ranked_share(
    scores: Sequence[Sequence[float]], targets: Sequence[float], prompts: Sequence[str]
) -> float | None:
    """Share of feedback ranked as people did: of pairs (two scores a row, people's choice first), else of any two
    responses that people valued differently, a tie counted half (concordance). None where nothing compares."""
    if not scores:
        return None
    if len(scores[0]) == 2:
        return statistics.fmean(first > other for first, other in scores)
    return concordance(targets, [score for (score,) in scores], prompts).share.value


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


LIBRARIES = ("scikit-learn", "numpy", "scipy")


def linear_reward_train(
    context: RunContext[RewardModelRecipe],
    rows: Sequence[Row],
    targets: Sequence[float],
    held_out: Sequence[Row],
    held_out_targets: Sequence[float],
) -> TrainResult:
    """Fit a linear reward model into the run's folder; the checkpoint opens with `RewardModel.load`.

    targets, held_out_targets: what people said of each row, in [0, 1]; 1 of pairs. Raises TrainingRefused.
    """
    began = time.monotonic()
    _, notes = folder_prepare(context)
    context.note_all(notes)
    context.listener.on_start(1)
    context.phase("fitting")
    try:
        linear_fit = fit(
            _rows_with_targets(rows, targets), context.definition, seed=context.recipe.seed, judge=True
        )
    except LinearRefused as refusal:
        raise TrainingRefused(str(refusal)) from refusal
    model = LinearRewardModel(linear_fit.policy, _facts(context), context.hardware)
    own = [score for row in model.row_scores(rows) for score in row]
    model.facts |= {"mean": statistics.fmean(own), "std": statistics.pstdev(own)}
    metrics = dict(linear_fit.metrics)
    if held_out:
        scores = [(row[0], row[-1]) for row in model.row_scores(held_out)]
        held = held_out_metrics(scores, held_out_targets, context.recipe.objective)
        model.facts["held_out"] = dataclasses.asdict(held)
        metrics |= {name: value for name, value in model.facts["held_out"].items() if name != "curve"}
    folder = context.output_dir / "reward_model"
    linear_fit.policy.save(folder)
    half = folder / f".{FACTS}.{os.getpid()}"  # each process of a launch writes the same
    half.write_text(json.dumps(model.facts, indent=2) + "\n", "utf-8")
    half.replace(folder / FACTS)
    context.detail(f"{len(linear_fit.policy.rows):,} features of a response, {linear_fit.words}")
    context.listener.on_step(1, 1)  # no row of metrics: one fit draws no curve
    return TrainResult(
        method="reward_model",
        status="succeeded",
        checkpoint=str(folder),
        base_model=context.base_model,
        base_model_hash="",
        steps=1,
        total_steps=1,
        seconds=round(time.monotonic() - began, 2),
        samples={"train": len(rows), "eval": len(held_out)},
        left_out=linear_fit.left_out,
        metrics=metrics,
        recipe=context.recipe.as_dict(),
        hardware=dataclasses.asdict(context.hardware),
        libraries=versions(LIBRARIES),
        notes=context.notes,
        details=context.details,
    )


def _rows_with_targets(rows: Sequence[Row], targets: Sequence[float]) -> list[Row]:
    """Rows with what people said where the fit looks for it, whatever else they hold."""
    return [
        row if "chosen" in row else {**row, "score": target}
        for row, target in zip(rows, targets, strict=True)
    ]


def _facts(context: RunContext[RewardModelRecipe]) -> ScoreFacts:
    """Facts of the model's file but the scale of its scores, which is read off them."""
    recipe = context.recipe
    return {
        "objective": recipe.objective,
        "architecture": recipe.architecture,
        "base_model": "",
        "agent": context.agent,
    }


def pad_batch(rows: Sequence[Sequence[int]], pad: int) -> dict[str, torch.Tensor]:
    """Right-padded ids and mask: the head reads each row's last real token (or an encoder's first)."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}
