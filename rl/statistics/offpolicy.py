"""Off-policy estimates: the reward a policy would have earned on decisions that another policy took. Pure.

A decision's weight w is the judged policy's probability of the logged choice over its propensity. Estimators take
rewards r in [0, 1]; `parts` are their influence values, one per decision, whose mean is the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import scipy

from rl.statistics import Difference
from rl.statistics.permutation import mean_bounds

Array = npt.NDArray[np.float64]

MIN_DECISIONS = 30
MIN_ESS = 20.0
"""Fewest effective decisions; logs with fewer are refused."""
SMALL_ESS = 100.0
"""Estimates with fewer effective decisions carry a warning."""
MAX_UNSUPPORTED = 0.05
"""A log is refused if a larger share of the policy's choices was impossible when it was logged."""
RARE = 20
"""Fewer decisions than this with another reward than the most common one cause a warning."""
HEAVY_SHARE = 0.1
"""A larger share of all weight on one decision causes a warning."""
MEAN_ERRORS = 4.0
"""A log is refused if the mean weight is this many standard errors from 1: by chance 1 in 16,000."""
CLIP = 10.0
"""The clipped estimator cuts weights at this."""


class OffPolicyRefused(ValueError):
    """The log does not support an estimate; the message says what is missing."""


@dataclass(frozen=True)
class Log:
    """Logged decisions, all arrays of shape (n,)."""

    reward: Array
    """In [0, 1]."""
    propensity: Array
    """Logged probability of the choice, in (0, 1]."""
    target: Array
    """The judged policy's probability of the logged choice, in [0, 1]."""
    support_deficiency: float = 0.0
    """Mean probability of the judged policy on choices that were impossible when logged, if known."""

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
    """Overlap of a log with a policy."""

    n: int
    ess: float
    """Effective sample size (sum w)^2 / sum w^2, in decisions."""
    max_weight: float
    mean_weight: float
    """1 in expectation if the log covers the policy."""
    support_deficiency: float
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return {
            "n": self.n,
            "ess": self.ess,
            "max_weight": self.max_weight,
            "mean_weight": self.mean_weight,
            "unsupported": self.support_deficiency,
            "warnings": list(self.warnings),
        }


def overlap_of(log: Log) -> Overlap:
    """Effective sample size (Kish 1965), largest and mean weight, and warnings."""
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
    """Number of rewards other than the most common one."""
    return len(rewards) - int(np.unique(rewards, return_counts=True)[1].max(initial=0))


def overlap_check(log: Log) -> Overlap:
    """The overlap of a log. Raises OffPolicyRefused if the log cannot support an estimate."""
    overlap = overlap_of(log)
    if overlap.n < MIN_DECISIONS:
        raise OffPolicyRefused(
            f"expected at least {MIN_DECISIONS} decisions with propensity and reward, found {overlap.n}; record more"
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

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "error": self.error, "low": self.low, "high": self.high}


def _estimate(method: str, value: float, parts: Array, bounds: tuple[float, float]) -> OffPolicyEstimate:
    """The estimate whose parts average to `value`; its interval is `bounds`, cut to [0, 1] and holding the value."""
    n = len(parts)
    error = float(parts.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    low, high = min(bounds[0], value), max(bounds[1], value)
    return OffPolicyEstimate(method, value, error, max(low, 0.0), min(high, 1.0), parts)


def _weighted_bounds(weights: Array, reward: Array, confidence: float) -> tuple[float, float]:
    """Bounds of the mean reward from rewards in [0, 1] and weights of expectation at most 1.

    Weights are at least 0 and have no known upper bound, so only lower bounds exist: that of the mean of w r is the
    lower end, 1 minus that of w (1 - r) the upper one (Karampatziakis, Mineiro & Ramdas, ICML 2021, section 3). For
    clipped weights the upper end counts what was cut as if it had earned 1, so the interval covers their bias.
    """
    earned, _ = mean_bounds(weights * reward, 0.0, math.inf, confidence)
    missed, _ = mean_bounds(weights * (1 - reward), 0.0, math.inf, confidence)
    return earned, 1 - missed


def _bounds_about(parts: Array, confidence: float) -> tuple[float, float]:
    """Bounds of the mean of influence values, assuming none is further from the mean than the furthest seen."""
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
    """Self-normalised IPS, sum w r / sum w (Swaminathan & Joachims, NIPS 2015); influence v + w (r - v) / mean w."""
    weights = log.weights
    value = float((weights * log.reward).sum() / weights.sum())
    parts = value + weights * (log.reward - value) / weights.mean()
    return _estimate("snips", value, parts, _weighted_bounds(weights, log.reward, confidence))


def clipped_ips(log: Log, bound: float = CLIP, confidence: float = 0.95) -> OffPolicyEstimate:
    """IPS with weights cut at `bound` (Ionides 2008): less variance, biased low. Its interval covers the bias."""
    weights = np.minimum(log.weights, bound)
    parts = weights * log.reward
    return _estimate(
        "clipped_ips", float(parts.mean()), parts, _weighted_bounds(weights, log.reward, confidence)
    )


def doubly_robust(
    log: Log, modelled: Array, modelled_target: Array, confidence: float = 0.95
) -> OffPolicyEstimate:
    """Mean of m(target) + w (r - m(logged)) (Dudik, Langford & Li, ICML 2011, eq. 2.2): unbiased for every model m.

    modelled (n,): the model's reward of the logged choice; modelled_target (n,): its expectation over the policy's
    choices. The model must not have seen the decision (`cross_fitted`), or the interval is too narrow. If fewer than
    RARE rewards differ from the most common one, the interval is at least as wide as that of `ips`.
    """
    parts = modelled_target + log.weights * (log.reward - modelled)
    low, high = _bounds_about(parts, confidence)
    if unlike_most(log.reward) < RARE:
        others = _weighted_bounds(log.weights, log.reward, confidence)
        low, high = min(low, others[0]), max(high, others[1])
    return _estimate("doubly_robust", float(parts.mean()), parts, (low, high))


def gain(policy: OffPolicyEstimate, other: OffPolicyEstimate, confidence: float = 0.95) -> Difference:
    """policy minus other, paired by decision, with bounds as in `doubly_robust`."""
    parts = policy.parts - other.parts
    low, high = _bounds_about(parts, confidence)
    value = policy.value - other.value
    return Difference(value, min(low, value), max(high, value))


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
    """(k,): the logged probabilities of all candidates, if they were recorded."""
    group: str = ""
    """Decisions of one group (one prompt) are in one fold."""


def log_of(choices: Sequence[LoggedChoice]) -> Log:
    """The choices as a log, with its support deficiency if logged distributions are known."""
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
    """(modelled, modelled_target) for `doubly_robust`, each (n,), by ridge regression of the reward on the features.

    Each decision is predicted by a model fitted on the other folds (Chernozhukov et al. 2018, section 3). Groups go to
    folds in the order of their first appearance. penalty: ridge weight per standardised feature.
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


def _ridge(x: Array, y: Array, penalty: float) -> Callable[[Array], Array]:
    """The fitted function from (n, d) features to (n,) rewards in [0, 1]; constant 0.5 without data."""
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
    """All estimators on one log, with its overlap. The gate reads `doubly_robust`."""

    overlap: Overlap
    mean_reward: float
    """Mean logged reward."""
    estimates: dict[str, OffPolicyEstimate]

    @property
    def best(self) -> OffPolicyEstimate:
        return self.estimates.get("doubly_robust", self.estimates["snips"])

    def as_dict(self) -> dict[str, object]:
        return {
            "logged": self.mean_reward,
            "overlap": self.overlap.as_dict(),
            **{name: estimate.as_dict() for name, estimate in self.estimates.items()},
        }


def report(choices: Sequence[LoggedChoice], confidence: float = 0.95) -> Report:
    """Every estimator on logged choices. Raises OffPolicyRefused if the log cannot support an estimate."""
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


# --- Checks of recorded propensities ---


LEVEL = 0.001
"""Chance that any test finds fault with a log of right propensities (Bonferroni)."""
BINS = 10
"""Number of groups of candidates by their probability, of equal variance."""
LEAST_VARIANCE = 5.0
"""Groups whose count has a smaller variance are not tested: the normal approximation is too poor."""
MOST_ARMS = 50
"""Most responses tested one by one, the most frequent first."""


@dataclass(frozen=True)
class Draw:
    """One recorded choice among k listed candidates."""

    arms: Sequence[str]
    """(k,) The candidates' responses."""
    chosen: int
    propensity: float
    """Recorded probability of the chosen one, in (0, 1]."""
    probabilities: Sequence[float] | None = None
    """(k,) Recorded probabilities of all candidates, summing to 1, if known."""


@dataclass(frozen=True)
class _Group:
    """Candidates that should be chosen `expected` times in all."""

    name: str
    expected: float
    variance: float
    observed: float

    @property
    def errors(self) -> float:
        """Standard errors between observed and expected."""
        return (self.observed - self.expected) / math.sqrt(self.variance)


def propensity_fault(draws: Sequence[Draw]) -> str:
    """Fault of recorded propensities in words; empty if none is found.

    With all candidates' probabilities: tests how often candidates of equal probability (calibration), of one place in
    the list and of one response were chosen, against the sum of their probabilities. Without: tests the mean of
    1 / (k p) of the chosen, which is 1 in expectation if all k candidates were possible. All tests together err in at
    most LEVEL of logs, as far as counts and means are normal (1 % of logs of 200 decisions).
    """
    draws = _uniform(draws)
    groups = [group for group in _groups(draws) if group.variance >= LEAST_VARIANCE]
    inverse = _inverse([draw for draw in draws if draw.probabilities is None])
    tests = len(groups) + (inverse is not None)
    if not tests:
        return ""
    limit = float(scipy.stats.norm.isf(LEVEL / tests / 2))
    worst = max(groups, key=lambda group: abs(group.errors), default=None)
    if worst is not None and abs(worst.errors) > limit:
        return (
            f"the recorded probabilities are not those used for sampling: {worst.name} should have been "
            f"chosen {worst.expected:.0f} times and were chosen {worst.observed:.0f} times"
        )
    if inverse is not None and abs(inverse[0] - 1) > limit * inverse[1]:
        size = "too large, or some candidates were never possible" if inverse[0] < 1 else "too small"
        return (
            f"the recorded propensities are {size}: 1 / (propensity x candidates) averages {inverse[0]:.2f} "
            "where 1 is expected"
        )
    return ""


def _uniform(draws: Sequence[Draw]) -> Sequence[Draw]:
    """The draws, with uniform probabilities filled in if every recorded propensity is 1 / k."""
    if any(d.probabilities is not None or abs(d.propensity * len(d.arms) - 1) > 1e-6 for d in draws):
        return draws
    return [replace(draw, probabilities=[1 / len(draw.arms)] * len(draw.arms)) for draw in draws]


def _groups(draws: Sequence[Draw]) -> Iterator[_Group]:
    """Candidates grouped by probability, by place and by response, of draws with known probabilities."""
    recorded_shares = [
        (draw, np.asarray(draw.probabilities, float)) for draw in draws if draw.probabilities is not None
    ]
    if not recorded_shares:
        return
    sizes = [len(shares) for _, shares in recorded_shares]
    row = np.repeat(np.arange(len(recorded_shares)), sizes)
    share = np.concatenate([shares for _, shares in recorded_shares])
    place = np.concatenate([np.arange(size) for size in sizes])
    chosen = np.zeros(len(share))
    chosen[np.cumsum([0, *sizes[:-1]]) + [draw.chosen for draw, _ in recorded_shares]] = 1.0
    names, arm, times = np.unique(
        [text for draw, _ in recorded_shares for text in draw.arms], return_inverse=True, return_counts=True
    )

    def group(name: str, index: npt.NDArray[np.bool_]) -> _Group:
        # candidates of one decision exclude each other, so the variance is that of "any of them is chosen"
        sums = np.bincount(row[index], share[index], len(recorded_shares)).clip(0.0, 1.0)
        return _Group(name, float(sums.sum()), float((sums * (1 - sums)).sum()), float(chosen[index].sum()))

    order = np.argsort(share, kind="stable")
    spread = np.cumsum((share * (1 - share))[order])
    if spread[-1] > 0:
        edges = np.searchsorted(spread, np.linspace(0, spread[-1], BINS + 1)[1:-1])
        for part in np.split(order, edges):
            if len(part):
                index = np.zeros(len(share), bool)
                index[part] = True
                low, high = share[part].min(), share[part].max()
                yield group(f"candidates of probability {low:.3g} to {high:.3g}", index)
    for number in range(max(sizes)):
        yield group(f"candidates at place {number + 1}", place == number)
    for number in np.argsort(-times, kind="stable")[:MOST_ARMS]:
        yield group(f"candidates that say {str(names[number])[:60]!r}", arm == number)


def _inverse(draws: Sequence[Draw]) -> tuple[float, float] | None:
    """Mean of 1 / (k p) and its standard error; None for fewer than two draws."""
    values = np.array([1 / (len(draw.arms) * draw.propensity) for draw in draws], float)
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    # equal propensities have no spread: a floor on the error keeps rounding from looking like a fault
    return float(values.mean()), max(error, 0.01 / math.sqrt(len(values)))
