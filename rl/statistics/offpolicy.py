"""Estimates of the reward a policy would have earned on decisions that another took. Pure: numpy.

A decision's weight is the policy's probability of the logged choice over the probability with which it was logged. All
estimators take rewards in [0, 1]; `parts` are their influence values, one per decision, whose mean is the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rl.statistics import Difference
from rl.statistics.skewed_means import mean_bounds

Array = npt.NDArray[np.float64]

MIN_DECISIONS = 30
MIN_ESS = 20.0
"""Effective decisions below which a log is refused."""
SMALL_ESS = 100.0
"""Effective decisions below which an estimate carries a warning."""
MAX_UNSUPPORTED = 0.05
"""Share of the policy's choices that the log can never have made, above which it is refused."""
RARE = 20
"""Decisions whose reward is not the most common one, below which an estimate carries a warning."""
HEAVY_SHARE = 0.1
"""Share of all weight on one decision that earns a warning."""
MEAN_ERRORS = 4.0
"""Standard errors between the mean weight and 1 from which a log is refused: chance does that to 1 in 16,000."""
CLIP = 10.0
"""Weights above this are cut by the clipped estimator."""


class OffPolicyRefused(ValueError):
    """A log that cannot answer; the message says what is missing."""


@dataclass(frozen=True)
class Log:
    """Logged decisions, all arrays of shape (n,)."""

    reward: Array
    """In [0, 1]."""
    propensity: Array
    """Probability with which the logged choice was made, in (0, 1]."""
    target: Array
    """The judged policy's probability of the logged choice, in [0, 1]."""
    support_deficiency: float = 0.0
    """Mean probability that the judged policy gives to choices the log could not have made, where that is known."""

    def __post_init__(self) -> None:
        if not len(self.reward) == len(self.propensity) == len(self.target):
            raise ValueError("expected as many rewards as propensities and target probabilities")
        if len(self.reward) and not (
            np.isfinite(self.reward).all()
            and ((self.propensity > 0) & (self.propensity <= 1)).all()
            and ((self.target >= 0) & (self.target <= 1 + 1e-9)).all()
        ):
            raise ValueError(
                "expected finite rewards, propensities in (0, 1], target probabilities in [0, 1]"
            )

    @property
    def weights(self) -> Array:
        return self.target / self.propensity


@dataclass(frozen=True)
class Overlap:
    """Overlap of a log with a policy: whether the log says anything of it."""

    n: int
    ess: float
    """Effective sample size (sum w)^2 / sum w^2: so many decisions of the policy's own would say as much."""
    max_weight: float
    mean_weight: float
    """1 in expectation where the log covers the policy."""
    support_deficiency: float
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "ess": self.ess,
            "max_weight": self.max_weight,
            "mean_weight": self.mean_weight,
            "unsupported": self.support_deficiency,
            "warnings": list(self.warnings),
        }


def overlap_of(log: Log) -> Overlap:
    """Effective sample size (Kish 1965), largest and mean weight, and what they warn of."""
    weights = log.weights
    n, total, squares = len(weights), float(weights.sum()), float((weights**2).sum())
    ess = total**2 / squares if squares else 0.0
    heaviest = float(weights.max(initial=0.0))
    warnings = []
    if ess < SMALL_ESS:
        warnings.append(f"only {ess:.0f} effective decisions of {n}")
    if n and (rare := unlike_most(log.reward)) < RARE:
        warnings.append(f"only {rare} of {n} rewards differ from the most common one")
    if total and heaviest / total > HEAVY_SHARE:
        warnings.append(f"one decision carries {100 * heaviest / total:.0f} % of all weight")
    return Overlap(n, ess, heaviest, total / n if n else math.nan, log.support_deficiency, tuple(warnings))


def unlike_most(rewards: Array) -> int:
    """Number of rewards that are not the most common one: what a log of rare rewards really tells by."""
    return len(rewards) - int(np.unique(rewards, return_counts=True)[1].max(initial=0))


def overlap_check(log: Log) -> Overlap:
    """The overlap of a log that can answer. Raises OffPolicyRefused for one that cannot."""
    overlap = overlap_of(log)
    if overlap.n < MIN_DECISIONS:
        raise OffPolicyRefused(
            f"{overlap.n} decisions with propensity and reward, {MIN_DECISIONS} are needed to estimate from"
        )
    if overlap.support_deficiency > MAX_UNSUPPORTED:
        raise OffPolicyRefused(
            f"the log does not cover the policy: {100 * overlap.support_deficiency:.0f} % of its choices "
            "were never possible when it was logged; record decisions with exploration (epsilon or "
            "temperature above 0)"
        )
    if overlap.ess < MIN_ESS:
        raise OffPolicyRefused(
            f"the log does not cover the policy: {overlap.n} decisions have an effective sample size of "
            f"{overlap.ess:.1f}, {MIN_ESS:g} are needed; log more, or with more exploration"
        )
    spread = float(log.weights.std(ddof=1)) / math.sqrt(overlap.n)
    if abs(overlap.mean_weight - 1) > max(MAX_UNSUPPORTED, MEAN_ERRORS * spread):
        raise OffPolicyRefused(
            f"the log does not cover the policy: weights average {overlap.mean_weight:.2f} where 1 is "
            "expected, so either some of its choices were never possible when logged, or the recorded "
            "propensities are wrong"
        )
    return overlap


@dataclass(frozen=True)
class OffPolicyEstimate:
    """An estimate of the mean reward with its interval."""

    method: str
    value: float
    error: float
    """Standard error."""
    low: float
    high: float
    parts: Array = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "error": self.error, "low": self.low, "high": self.high}


def _estimate(method: str, value: float, parts: Array, bounds: tuple[float, float]) -> OffPolicyEstimate:
    """parts average to value; the interval is `bounds`, cut to [0, 1], and holds the value."""
    n = len(parts)
    error = float(parts.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    low, high = min(bounds[0], value), max(bounds[1], value)
    return OffPolicyEstimate(method, value, error, max(low, 0.0), min(high, 1.0), parts)


def _weighted_bounds(weights: Array, reward: Array, confidence: float) -> tuple[float, float]:
    """Bounds of the mean reward from rewards in [0, 1] and weights whose expectation is 1, or less.

    Weights have no upper bound that a sample could tell, but none is below 0: the mean of w r is bounded from below,
    and that of w (1 - r), which is what is left to the weights' expectation (Karampatziakis, Mineiro & Ramdas, ICML
    2021, section 3). What was cut from a weight counts for the upper bound as if it had earned 1: a clipped estimate is
    biased, its interval is not.
    """
    earned, _ = mean_bounds(weights * reward, 0.0, math.inf, confidence)
    missed, _ = mean_bounds(weights * (1 - reward), 0.0, math.inf, confidence)
    return earned, 1 - missed


def _bounds_about(parts: Array, confidence: float) -> tuple[float, float]:
    """Bounds of the mean of influence values, as if one of either sign as large as the largest might still come."""
    centre = float(parts.mean())
    most = float(np.abs(parts - centre).max(initial=0.0))
    return (
        mean_bounds(parts, centre - most, centre + most, confidence)
        if len(parts) > 1
        else (-math.inf, math.inf)
    )


def ips(log: Log, confidence: float = 0.95) -> OffPolicyEstimate:
    """Inverse propensity scoring, unbiased: mean of w r (Horvitz & Thompson 1952)."""
    parts = log.weights * log.reward
    return _estimate("ips", float(parts.mean()), parts, _weighted_bounds(log.weights, log.reward, confidence))


def snips(log: Log, confidence: float = 0.95) -> OffPolicyEstimate:
    """Self-normalised: sum w r / sum w (Swaminathan & Joachims, NIPS 2015); influence value v + w (r - v) / mean w."""
    weights = log.weights
    value = float((weights * log.reward).sum() / weights.sum())
    parts = value + weights * (log.reward - value) / weights.mean()
    return _estimate("snips", value, parts, _weighted_bounds(weights, log.reward, confidence))


def clipped_ips(log: Log, bound: float = CLIP, confidence: float = 0.95) -> OffPolicyEstimate:
    """IPS with weights cut at `bound`: less variance, biased low for rewards of at least 0 (Ionides 2008).

    Its interval holds the bias: what the cut weights may have earned reaches from nothing to all.
    """
    weights = np.minimum(log.weights, bound)
    parts = weights * log.reward
    return _estimate(
        "clipped_ips", float(parts.mean()), parts, _weighted_bounds(weights, log.reward, confidence)
    )


def doubly_robust(
    log: Log, modelled: Array, modelled_target: Array, confidence: float = 0.95
) -> OffPolicyEstimate:
    """Mean of m(target) + w (r - m(logged)) (Dudik, Langford & Li, ICML 2011, eq. 2.2): unbiased whatever the model.

    modelled (n,): the model's reward of the logged choice; modelled_target (n,): its expectation over the policy's
    choices. The model must not have seen the decision (see `cross_fitted`), or the interval is too narrow. Where fewer
    than RARE rewards differ from the most common one, the interval reaches as far as that of `ips` at least: so few
    say nothing of how influence values spread.
    """
    parts = modelled_target + log.weights * (log.reward - modelled)
    low, high = _bounds_about(parts, confidence)
    if unlike_most(log.reward) < RARE:
        others = _weighted_bounds(log.weights, log.reward, confidence)
        low, high = min(low, others[0]), max(high, others[1])
    return _estimate("doubly_robust", float(parts.mean()), parts, (low, high))


def gain(policy: OffPolicyEstimate, other: OffPolicyEstimate, confidence: float = 0.95) -> Difference:
    """policy minus other, on the same decisions: paired by decision, with the bounds of `doubly_robust`."""
    parts = policy.parts - other.parts
    low, high = _bounds_about(parts, confidence)
    value = policy.value - other.value
    return Difference(value, min(low, value), max(high, value))


# --- The model of doubly robust estimation ------------------------------------------------------------------


@dataclass(frozen=True)
class LoggedChoice:
    """One logged decision among listed candidates; k candidates with d features each."""

    features: Array
    """(k, d)"""
    chosen: int
    reward: float
    propensity: float
    target: Array
    """(k,): the judged policy's probabilities, summing to 1."""
    logging_probabilities: Array | None = None
    """(k,): the probabilities it was drawn by, where the whole distribution was recorded."""
    group: str = ""
    """Decisions of one group (the same prompt) are never on two sides of a fold."""


def log_of(choices: Sequence[LoggedChoice]) -> Log:
    """The choices as a log; what no logged distribution supports is counted where it is known."""
    known = [choice for choice in choices if choice.logging_probabilities is not None]
    missed = [float(choice.target[choice.logging_probabilities <= 0].sum()) for choice in known]  # type: ignore[operator]
    return Log(
        np.array([choice.reward for choice in choices], float),
        np.array([choice.propensity for choice in choices], float),
        np.array([choice.target[choice.chosen] for choice in choices], float),
        support_deficiency=float(np.mean(missed)) if missed else 0.0,
    )


def cross_fitted(
    choices: Sequence[LoggedChoice], folds: int = 5, penalty: float = 1.0
) -> tuple[Array, Array]:
    """(modelled, modelled_target) for `doubly_robust`: ridge regression of the reward on a choice's features.

    Each decision is predicted by a model fitted on the other folds alone (Chernozhukov et al. 2018, section 3); groups
    are dealt to folds in the order of their first appearance. penalty: ridge weight per standardised feature.
    """
    order: dict[str, int] = {}
    fold = np.array([order.setdefault(c.group or str(i), len(order)) % folds for i, c in enumerate(choices)])
    logged = np.stack([choice.features[choice.chosen] for choice in choices])
    reward = np.array([choice.reward for choice in choices], float)
    predictions, expected = np.zeros(len(choices)), np.zeros(len(choices))
    for number in range(folds):
        held = np.flatnonzero(fold == number)
        fitted = fold != number
        if not len(held):
            continue
        predict = _ridge(logged[fitted], reward[fitted], penalty)
        predictions[held] = predict(logged[held])
        # every candidate of the held-out decisions in one product
        stacked = predict(np.concatenate([choices[i].features for i in held.tolist()]))
        start = 0
        for i in held.tolist():
            k = len(choices[i].target)
            expected[i] = float(stacked[start : start + k] @ choices[i].target)
            start += k
    return predictions, expected


def _ridge(x: Array, y: Array, penalty: float) -> Any:
    """The fitted function from (n, d) features to (n,) rewards in [0, 1]; a constant where there is nothing to fit."""
    if not len(y):
        return lambda features: np.full(len(features), 0.5)
    centre, mean = x.mean(axis=0), float(y.mean())
    scale = x.std(axis=0)
    scale[scale == 0] = 1.0
    z = (x - centre) / scale
    weights = np.linalg.solve(z.T @ z + penalty * np.eye(x.shape[1]), z.T @ (y - mean))
    return lambda features: np.clip(mean + (features - centre) / scale @ weights, 0.0, 1.0)


@dataclass(frozen=True)
class Report:
    """All estimators on one log, with its overlap. `doubly_robust` is what the gate asks."""

    overlap: Overlap
    mean_reward: float
    """Mean reward that was earned."""
    estimates: dict[str, OffPolicyEstimate]

    @property
    def best(self) -> OffPolicyEstimate:
        return self.estimates.get("doubly_robust", self.estimates["snips"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "logged": self.mean_reward,
            "overlap": self.overlap.as_dict(),
            **{name: estimate.as_dict() for name, estimate in self.estimates.items()},
        }


def report(choices: Sequence[LoggedChoice], confidence: float = 0.95) -> Report:
    """Every estimator on choices that were logged. Raises OffPolicyRefused where the log cannot answer."""
    if not choices:
        raise OffPolicyRefused(
            "no decision has candidates, a propensity and a reward: take decisions with POST /api/decide/, which "
            "records them, and rate those"
        )
    log = log_of(choices)
    overlap = overlap_check(log)
    modelled, expected = cross_fitted(choices)
    found = (
        ips(log, confidence),
        snips(log, confidence),
        clipped_ips(log, confidence=confidence),
        doubly_robust(log, modelled, expected, confidence),
    )
    return Report(overlap, float(log.reward.mean()), {estimate.method: estimate for estimate in found})
