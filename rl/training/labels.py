"""Label model: probability that a person finds a response good, by calibrated logistic regression on features.

Platt, J. 1999, "Probabilistic outputs for support vector machines": the classifier's number, by a sigmoid fitted on
folds it was not fitted on, becomes a calibrated probability. Folds never part the responses to one prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from packed_forward.logps import causal_model, collate
from rl.agents.base import Message
from rl.rewards.base import RewardSample, RewardValue
from rl.rewards.traces import share_to_raw
from rl.training.loading import base_check
from rl.training.policy import LoadedPolicy, load_policy, matmul
from rl.training.result import TrainingRefused

FACTS, WEIGHTS = "labels.json", "labels.safetensors"
FOLDS = 5
LEAST, LEAST_EACH = 40, 10
"""Fewest labels, and fewest of each kind, that a label model is trained on."""
STRENGTHS = (0.003, 0.03, 0.3)
"""Inverse strengths of the penalty tried, by the log loss of folds left out."""
BINS = 10

Item = tuple[Sequence[Message], str]
"""A prompt and the response to it."""


@dataclass(frozen=True)
class CalibrationFigures:
    """Quality of the probabilities, on labels of folds the model was not fitted on."""

    n: int
    good_share: float
    accuracy: float
    """Share on the right side of one half."""
    brier: float
    """Mean squared error of the probability; 0.25 is a coin."""
    brier_base: float
    """Brier score of the constant prediction `good_share`."""
    calibration_error: float
    """Mean distance between stated and observed share over ten bins, by how many are in each."""
    curve: list[dict[str, float]]
    """Per bin that holds any: mean `stated` probability, `observed` share of good ones, `n`."""


@dataclass(frozen=True)
class LabelModel:
    """sigmoid(slope * (weights . (x - mean) / scale + bias) + offset), all that is left of the fitted pipeline."""

    mean: np.ndarray
    scale: np.ndarray
    weights: np.ndarray
    bias: float
    slope: float
    offset: float

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """[n, features] -> [n], each in (0, 1)."""
        score = (x - self.mean) / self.scale @ self.weights + self.bias
        found: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(self.slope * score + self.offset, -60, 60)))
        return found

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the weights as safetensors and what they are for as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in vars(self).items()
        }
        save_file(tensors, folder / WEIGHTS)
        (folder / FACTS).write_text(json.dumps(facts, indent=2), "utf-8")

    @classmethod
    def load(cls, folder: Path) -> tuple[LabelModel, dict[str, Any]]:
        """The model of a folder and its facts. Raises TrainingRefused."""
        try:
            facts = json.loads((folder / FACTS).read_text("utf-8"))
            found = load_file(folder / WEIGHTS)
            numbers = {name: float(found[name][0]) for name in ("bias", "slope", "offset")}
            return cls(mean=found["mean"], scale=found["scale"], weights=found["weights"], **numbers), facts
        except (OSError, ValueError, KeyError) as error:
            raise TrainingRefused(
                f"expected a label model at {folder}, found {error}; make one with the command `auto_label`"
            ) from error


@dataclass(frozen=True)
class LabelModelFit:
    """A label model with out-of-fold probabilities of its own labels."""

    model: LabelModel
    figures: CalibrationFigures
    fold_probabilities: np.ndarray
    """[n], probabilities of nested folds."""


def label_fit(x: np.ndarray, good: np.ndarray, groups: Sequence[str], seed: int = 42) -> LabelModelFit:
    """Fit and calibrate on features [n, features] and labels [n] (bool); `groups` names the prompt of each.

    The figures are those of nested folds: strength, fit and calibration all without the fold that is judged. Raises
    TrainingRefused with too few labels.
    """
    good = as_labels(good)
    labels_enough(good, groups)
    numbers = np.unique(np.asarray(groups), return_inverse=True)[1]
    stated = np.zeros(len(good))
    for train, test in _folds(x, good, numbers, seed):
        stated[test] = _fit(x[train], good[train], numbers[train], seed).probabilities(x[test])
    return LabelModelFit(_fit(x, good, numbers, seed), figures_of(stated, good), stated)


def as_labels(good: Sequence[bool] | np.ndarray) -> np.ndarray:
    return np.asarray(good, dtype=bool)


def labels_enough(good: Sequence[bool] | np.ndarray, groups: Sequence[str]) -> None:
    """Raises TrainingRefused where there are too few labels, of one kind or in all, or on too few prompts."""
    total, right, prompts = len(good), sum(map(bool, good)), len(set(groups))
    if total < LEAST or min(right, total - right) < LEAST_EACH or prompts < 2 * FOLDS:
        raise TrainingRefused(
            f"expected at least {LEAST} ratings by people, {LEAST_EACH} good and {LEAST_EACH} bad, on {2 * FOLDS} "
            f"prompts; found {right} good and {total - right} bad on {prompts}: rate more"
        )


def figures_of(stated: np.ndarray, good: np.ndarray) -> CalibrationFigures:
    """Figures of probabilities [n] against what came out [n] (bool)."""
    share = float(good.mean())
    curve = []
    bins = np.minimum((stated * BINS).astype(int), BINS - 1)
    for number in range(BINS):
        there = bins == number
        if there.any():
            curve.append(
                {
                    "stated": round(float(stated[there].mean()), 4),
                    "observed": round(float(good[there].mean()), 4),
                    "n": int(there.sum()),
                }
            )
    return CalibrationFigures(
        n=len(good),
        good_share=round(share, 4),
        accuracy=round(float(((stated >= 0.5) == good).mean()), 4),
        brier=round(float(((stated - good) ** 2).mean()), 4),
        brier_base=round(share * (1 - share), 4),
        calibration_error=round(sum(b["n"] * abs(b["stated"] - b["observed"]) for b in curve) / len(good), 4),
        curve=curve,
    )


def _folds(
    x: np.ndarray, good: np.ndarray, groups: np.ndarray, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed).split(x, good, groups))


def _fit(x: np.ndarray, good: np.ndarray, groups: np.ndarray, seed: int) -> LabelModel:
    folds = _folds(x, good, groups, seed)
    scaled = StandardScaler().fit_transform(x)
    search = LogisticRegressionCV(
        Cs=list(STRENGTHS),
        cv=folds,
        scoring="neg_log_loss",
        max_iter=400,
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
    ).fit(scaled, good)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=float(search.C_), max_iter=400))
    calibrated = CalibratedClassifierCV(pipeline, method="sigmoid", cv=folds, ensemble=False).fit(x, good)
    (whole,) = calibrated.calibrated_classifiers_
    scaler, logistic = whole.estimator[0], whole.estimator[1]
    sigmoid = whole.calibrators[0]  # 1 / (1 + exp(a f + b))
    return LabelModel(
        mean=scaler.mean_,
        scale=scaler.scale_,
        weights=logistic.coef_[0],
        bias=float(logistic.intercept_[0]),
        slope=-float(sigmoid.a_),
        offset=-float(sigmoid.b_),
    )


def logits(probabilities: np.ndarray) -> np.ndarray:
    """Log odds of probabilities [n], as a feature [n, 1]; cut at one in a million."""
    p = np.clip(probabilities, 1e-6, 1 - 1e-6)
    return np.log(p / (1 - p))[:, None]


# --- Features -----------------------------------------------------------------------------------------------


def embeddings(
    policy: LoadedPolicy,
    items: Sequence[Item],
    *,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Mean last hidden state of the base model over each response's tokens, having read its prompt: [n, width]."""
    encoded = policy.encoder.responses(items)
    order = sorted(range(len(items)), key=lambda i: len(encoded[i].prompt_ids) + len(encoded[i].response_ids))
    rows: list[np.ndarray] = [np.zeros(0)] * len(items)
    model, pad = causal_model(policy.model), policy.tokenizer.pad_token_id
    with torch.inference_mode(), matmul(policy.hardware), policy.without_adapter():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = {k: v.to(policy.device) for k, v in collate([encoded[i] for i in chosen], pad).items()}
            hidden = model.base_model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
            ).last_hidden_state.float()
            mask = batch["completion_mask"][..., None]
            means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            for i, row in zip(chosen, means.cpu().double().numpy(), strict=True):
                rows[i] = row
            if progress is not None:
                progress(min(start + batch_size, len(order)), len(order))
    return np.stack(rows)


def margins(policy: LoadedPolicy, items: Sequence[Item]) -> np.ndarray:
    """Log-ratio of each response between the policy and its base, in nats per token: [n, 1]."""
    from rl.training.scoring import score_responses

    own, base = score_responses(policy, items), score_responses(policy, items, adapter=False)
    return np.array([[one.mean_logp - other.mean_logp] for one, other in zip(own, base, strict=True)])


def reward_scores(path: Path, items: Sequence[Item]) -> np.ndarray:
    """Raw rewards of a reward model: [n, 1]."""
    from rl.training.reward_model import RewardModel

    model = RewardModel.load(path)
    return np.array([[model.to_raw(score)] for score in model.scores(items)])


# --- As a reward --------------------------------------------------------------------------------------------


class LearnedReward:
    """Predicted rating of a response, as a reward: a label model trained on their ratings, from the text alone.

    -2 where they surely find it bad, 2 where they surely find it good, 0 where nobody can tell.
    """

    name = "learned"

    def __init__(self, model: LabelModel, policy: LoadedPolicy) -> None:
        self.model, self.policy = model, policy

    @classmethod
    def load(cls, folder: str | Path) -> LearnedReward:
        """Open the folder that `auto_label` left. Raises TrainingRefused, PolicyLoadError."""
        model, facts = LabelModel.load(Path(folder))
        policy = load_policy(str(facts["base_model"]))
        base_check(f"the label model {folder}", facts, policy.base_model, policy.base_model_hash)
        return cls(model, policy)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        items: list[Item] = [([dict(m) for m in sample.prompt], sample.response) for sample in samples]
        found = list(self.model.probabilities(embeddings(self.policy, items))) if items else []
        return [RewardValue(share_to_raw(float(p)), {"good": round(float(p), 4)}) for p in found]


def curve_draw(figures: dict[str, Any], path: Path, title: str) -> None:
    """The calibration curve as a PNG: stated probability against observed share, points by how many there were."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.6, 4.4), dpi=150)
    axes.plot([0, 1], [0, 1], color="#8d8a82", linewidth=1, linestyle="--", label="says what is")
    most = max(b["n"] for b in figures["curve"])
    for b in figures["curve"]:
        error = 1.96 * math.sqrt(max(b["stated"] * (1 - b["stated"]), 1e-4) / b["n"])
        axes.plot(
            [b["stated"]] * 2, [b["observed"] - error, b["observed"] + error], color="#0f6e66", alpha=0.35
        )
    axes.scatter(
        [b["stated"] for b in figures["curve"]],
        [b["observed"] for b in figures["curve"]],
        s=[20 + 130 * b["n"] / most for b in figures["curve"]],
        color="#0f6e66",
        zorder=3,
        label=f"{figures['n']} held-out ratings",
    )
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02), xlabel="stated probability of good", ylabel="share rated good")
    axes.set_title(
        f"{title}: error {figures['calibration_error']:.3f}, Brier {figures['brier']:.3f}", fontsize=9
    )
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
