"""How far an agent's raters agree on each question."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from feedback.agreement.statistics import (
    AgreementEstimate,
    Alpha,
    Floats,
    Ints,
    Metric,
    cohen_kappa,
    kappa_of_scores,
    krippendorff_alpha,
    rated_by_both,
)
from feedback.cache import CostAwareCache
from feedback.models import Preference, RaterKind, Thumb
from feedback.selectors import CHUNK, comparisons_standing, ratings_standing

LOW_ALPHA = 0.4
"""Raters below this alpha are flagged: less than moderate agreement (Landis & Koch, Biometrics 33 (1977) 159-174)."""
TENTATIVE_ALPHA = 0.667
"""Least alpha that is good enough for tentative conclusions."""
ENOUGH = 20
"""Fewest ratings shared with others before a rater's figures are shown."""
MAX_PAIRS = 200
"""Most pairs of raters in a report; those with most shared decisions come first."""


class AgreementQuestion(NamedTuple):
    """A question to raters and the scale of its answers."""

    name: str
    title: str
    metric: Metric
    answers: tuple[str, ...]
    """Labels of the values 0, 1, ...; empty on a continuous scale."""


QUESTIONS = (
    AgreementQuestion("thumb", "Good or bad", "nominal", tuple(Thumb.values)),
    AgreementQuestion("stars", "Stars", "ordinal", ("1", "2", "3", "4", "5")),
    AgreementQuestion("score", "Score", "interval", ()),
    AgreementQuestion("preference", "Which of two", "nominal", tuple(Preference.values)),
)
_THUMBS = {name: number for number, name in enumerate(Thumb.values)}
_PREFERENCES = {name: number for number, name in enumerate(Preference.values)}


@dataclass(frozen=True)
class RaterAgreement:
    """One rater's agreement with the others on one question."""

    rater: str
    ratings: int
    shared: int
    """Ratings of decisions that others rated too."""
    agreement: float | None
    """Mean share of the others with the same answer, 0 to 1; None for scores and without shared ratings."""
    alpha: float | None
    """Krippendorff's alpha of this rater with the others. Their mean, weighted by `shared`, is the question's alpha."""
    low: bool
    """True if alpha is below LOW_ALPHA with ENOUGH shared ratings. The rater still counts."""


@dataclass(frozen=True)
class PairAgreement:
    """Agreement of two raters on the decisions that both rated."""

    first: str
    second: str
    shared: int
    agreement: float | None
    """Share of equal answers, 0 to 1; None for scores."""
    kappa: AgreementEstimate
    """Cohen's kappa; quadratically weighted for stars and scores."""


@dataclass(frozen=True)
class QuestionAgreement:
    question: str
    title: str
    metric: Metric
    ratings: int
    decisions: int
    """Number of rated units: decisions, or pairs of decisions for preferences."""
    overlapping: int
    """Units with two or more raters."""
    alpha: AgreementEstimate
    meaning: str
    raters: list[RaterAgreement] = field(default_factory=list)
    """Lowest alpha first; raters who share nothing come last."""
    pairs: list[PairAgreement] = field(default_factory=list)
    pairs_left_out: int = 0


@dataclass(frozen=True)
class AgreementReport:
    """Agreement among an agent's human raters, or among its simulated raters."""

    agent: str
    rater_kind: str
    questions: list[QuestionAgreement]
    """Questions with answers, in the order of QUESTIONS."""

    @property
    def simulated(self) -> bool:
        return self.rater_kind == RaterKind.SIMULATED


@dataclass
class _AnswerColumns:
    units: list[int] = field(default_factory=list)
    raters: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, unit: int, rater: int, value: float) -> None:
        self.units.append(unit)
        self.raters.append(rater)
        self.values.append(value)

    def columns(self) -> tuple[Ints, Ints, Floats]:
        """(units renumbered without gaps, raters, values) as arrays (n,)."""
        units = np.unique(np.asarray(self.units, dtype=np.int64), return_inverse=True)[1]
        return units, np.asarray(self.raters, dtype=np.int64), np.asarray(self.values, dtype=np.float64)


K = TypeVar("K")


class _Numbers(dict[K, int]):
    """Numbers keys from 0 in order of first use."""

    def __missing__(self, key: K) -> int:
        self[key] = number = len(self)
        return number


def agreement_report(agent: str, rater_kind: str | None = None) -> AgreementReport:
    """Agreement among an agent's raters on each question, in two queries.

    rater_kind: human or simulated; None: human if any person rated, else simulated. The two are never mixed, because
    agreement among simulated raters says nothing about people. Raises ValueError for another kind.
    """
    if rater_kind not in (None, *RaterKind.values):
        raise ValueError(f"expected a rater kind of {' or '.join(RaterKind.values)}, found {rater_kind!r}")
    answers, raters = _answers(agent)
    spoken = {kind for kind, _ in answers}
    kind = rater_kind or next((k for k in RaterKind.values if k in spoken), RaterKind.HUMAN.value)
    return AgreementReport(
        agent=agent,
        rater_kind=kind,
        questions=[
            _question(question, answers[kind, question.name], raters)
            for question in QUESTIONS
            if (kind, question.name) in answers
        ],
    )


_OTHER_SIDE = {Preference.LEFT.value: Preference.RIGHT.value, Preference.RIGHT.value: Preference.LEFT.value}


def agreement_low(agent: str) -> bool:
    """True if ENOUGH ratings of an agent have two raters, and these agree too little to rely on. Cached."""
    return _low.get(agent, lambda: any(map(_is_low, agreement_report(agent).questions)))


def _is_low(found: QuestionAgreement) -> bool:
    return (
        found.overlapping >= ENOUGH and found.alpha.value is not None and found.alpha.value < TENTATIVE_ALPHA
    )


_low: CostAwareCache[bool] = CostAwareCache()


def _answers(agent: str) -> tuple[dict[tuple[str, str], _AnswerColumns], list[str]]:
    """({(rater kind, question): answers}, names of the raters by number)."""
    columns: defaultdict[tuple[str, str], _AnswerColumns] = defaultdict(_AnswerColumns)
    raters: _Numbers[str] = _Numbers()
    units: _Numbers[object] = _Numbers()
    rated = (
        ratings_standing(agent)
        .order_by()
        .values_list("decision_id", "rater", "rater_kind", "thumb", "stars", "score")
    )
    for decision, rater, kind, thumb, stars, score in rated.iterator(chunk_size=CHUNK):
        unit, who = units[decision], raters[rater]
        if thumb:
            columns[kind, "thumb"].add(unit, who, _THUMBS[thumb])
        if stars is not None:
            columns[kind, "stars"].add(unit, who, stars - 1)
        if score is not None:
            columns[kind, "score"].add(unit, who, score)
    # Oldest first: the sides of the first comparison of a pair hold for all its comparisons.
    compared = comparisons_standing(agent).values_list(
        "left_id", "right_id", "rater", "rater_kind", "preference"
    )
    for left, right, rater, kind, preference in compared.iterator(chunk_size=CHUNK):
        if (right, left) in units:
            left, right, preference = right, left, _OTHER_SIDE.get(preference, preference)
        columns[kind, "preference"].add(units[left, right], raters[rater], _PREFERENCES[preference])
    return dict(columns), list(raters)


def _question(question: AgreementQuestion, answers: _AnswerColumns, names: list[str]) -> QuestionAgreement:
    unit, rater, value = answers.columns()
    size = np.bincount(unit)[unit]
    alpha = krippendorff_alpha(unit, value, question.metric)
    pairs, left_out = _pairs(question, unit, rater, value, names)
    return QuestionAgreement(
        question=question.name,
        title=question.title,
        metric=question.metric,
        ratings=len(unit),
        decisions=int(unit.max()) + 1,
        overlapping=len(np.unique(unit[size > 1])),
        alpha=alpha.estimate,
        meaning=alpha_meaning(alpha.estimate),
        raters=_raters(question, (unit, rater, value), size, alpha, names),
        pairs=pairs,
        pairs_left_out=left_out,
    )


def alpha_meaning(alpha: AgreementEstimate) -> str:
    """Reading of an alpha (Krippendorff, Content Analysis (2004), page 241)."""
    if alpha.n < 2:
        return "no decision has two raters yet"
    if alpha.value is None:
        return "all raters gave the same answer, so alpha is not defined"
    if alpha.value >= 0.8:
        return "reliable"
    if alpha.value >= TENTATIVE_ALPHA:
        return "good enough for tentative conclusions"
    if alpha.value > 0:
        return "agreement is too low to rely on"
    return "no better than chance"


def _raters(
    question: AgreementQuestion,
    columns: tuple[Ints, Ints, Floats],
    size: Ints,
    alpha: Alpha,
    names: list[str],
) -> list[RaterAgreement]:
    unit, rater, value = columns
    total, shared = np.bincount(rater), np.bincount(rater[size > 1], minlength=int(rater.max()) + 1)
    disagreement = _mean_by(rater, alpha.disagreement)
    same_share = _mean_by(rater, _same_share(unit, value, size)) if question.answers else None
    rows = []
    for number in np.flatnonzero(total).tolist():
        own = None if np.isnan(disagreement[number]) else 1 - float(disagreement[number])
        rows.append(
            RaterAgreement(
                rater=names[number],
                ratings=int(total[number]),
                shared=int(shared[number]),
                agreement=None if same_share is None or not shared[number] else float(same_share[number]),
                alpha=own,
                low=own is not None and own < LOW_ALPHA and int(shared[number]) >= ENOUGH,
            )
        )
    return sorted(rows, key=lambda r: (r.alpha is None, r.alpha or 0.0, -r.ratings, r.rater))


def _mean_by(group: Ints, values: Floats) -> Floats:
    """Mean per group without NaN values; NaN for a group without any."""
    known = ~np.isnan(values)
    many = np.bincount(group[known], minlength=int(group.max()) + 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(group[known], values[known], minlength=int(group.max()) + 1) / many)


def _same_share(unit: Ints, value: Floats, size: Ints) -> Floats:
    """Per rating: share of its unit's other ratings with the same value; NaN without others."""
    _, cell = np.unique(np.stack([unit, value.astype(np.int64)]), axis=1, return_inverse=True)
    cell = cell.ravel()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(size > 1, (np.bincount(cell)[cell] - 1) / (size - 1), np.nan))


def _pairs(
    question: AgreementQuestion, unit: Ints, rater: Ints, value: Floats, names: list[str]
) -> tuple[list[PairAgreement], int]:
    both = sorted(rated_by_both(unit, rater, value), key=lambda row: (-len(row[2]), row[0], row[1]))
    pairs = []
    for one, other, x, y in both[:MAX_PAIRS]:
        if not question.answers:
            agreement, kappa = None, kappa_of_scores(x, y)
        else:
            table = np.zeros((len(question.answers),) * 2)
            np.add.at(table, (x.astype(np.int64), y.astype(np.int64)), 1)
            agreement = float((x == y).mean())
            kappa = cohen_kappa(table, "quadratic" if question.metric == "ordinal" else None)
        pairs.append(PairAgreement(names[one], names[other], len(x), agreement, kappa))
    return pairs, max(len(both) - MAX_PAIRS, 0)
