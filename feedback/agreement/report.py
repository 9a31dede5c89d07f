"""Agreement report of an agent: how far its raters agree on each question, and their consensus on each decision."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from feedback.agreement.statistics import (
    AgreementEstimate,
    Alpha,
    Floats,
    Ints,
    Metric,
    cohen_kappa,
    dawid_skene,
    kappa_of_scores,
    krippendorff_alpha,
    rated_by_both,
)
from feedback.models import Aggregation, Preference, RaterKind, Thumb
from feedback.selectors import CHUNK, comparisons_standing, ratings_standing
from feedback.storage.sampling import agent_settings

LOW_ALPHA = 0.4
"""A rater below it is pointed out: less than moderate agreement (Landis & Koch, Biometrics 33 (1977) 159-174)."""
ENOUGH = 20
"""Fewest ratings shared with others for which figures of a rater are shown."""
MAX_PAIRS = 200
"""Pairs of raters in a report: those who share most."""
STRENGTH = 2.0
"""Pseudo-count of ratings by the average rater added to each rater's own. In simulations of 300 decisions with 30
raters, a quarter of them guessing, 86 % of labels came out right, 85 % without it and 82 % by majority
(docs/agreement.md)."""
TOLERANCE = 1e-3
"""Change of a probability at which the search for reliabilities ends; a finer one costs many times the time."""
NEUTRAL = 0.5


class AgreementQuestion(NamedTuple):
    """Something raters are asked, and the scale their answers are on."""

    name: str
    title: str
    metric: Metric
    answers: tuple[str, ...]
    """Labels of the values 0, 1, ...; empty for a continuous scale."""


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
    """Ratings of what others rated too."""
    agreement: float | None
    """Mean share of the others who said the same, 0 to 1; None for scores, and where nothing is shared."""
    alpha: float | None
    """Krippendorff's alpha of this rater with the others. The question's own is the mean of these, by `shared`."""
    reliability: float | None
    """Probability of being right, by Dawid-Skene; None for stars and scores, where being near is not being wrong."""
    low: bool
    """Enough is shared, and alpha is below LOW_ALPHA. Pointed out, never left out."""


@dataclass(frozen=True)
class PairAgreement:
    """Two raters on what both rated."""

    first: str
    second: str
    shared: int
    agreement: float | None
    """Share on which both said the same, 0 to 1; None for scores."""
    kappa: AgreementEstimate
    """Cohen's kappa; quadratically weighted for stars and scores."""


@dataclass(frozen=True)
class QuestionAgreement:
    """Agreement of raters on one question."""

    question: str
    title: str
    metric: Metric
    ratings: int
    decisions: int
    """Number of rated units: decisions, or pairs of decisions for preferences."""
    overlapping: int
    """Of these, by two raters or more."""
    alpha: AgreementEstimate
    meaning: str
    raters: list[RaterAgreement] = field(default_factory=list)
    """Lowest alpha first; those who share nothing last."""
    pairs: list[PairAgreement] = field(default_factory=list)
    """Pairs of raters, those with most shared decisions first, at most MAX_PAIRS."""
    pairs_left_out: int = 0


@dataclass(frozen=True)
class AgreementReport:
    """Agreement among the raters of one agent, of one kind: people, or simulated raters."""

    agent: str
    rater_kind: str
    aggregation: str
    """Method that makes labels of several ratings: majority or dawid_skene."""
    questions: list[QuestionAgreement]
    """Questions with any answer, in the order of QUESTIONS."""

    @property
    def simulated(self) -> bool:
        return self.rater_kind == RaterKind.SIMULATED

    def as_dict(self) -> dict[str, Any]:
        """Report as JSON."""
        return {**asdict(self), "low_alpha": LOW_ALPHA, "enough": ENOUGH}


@dataclass
class _AnswerColumns:
    """Answers to one question, as columns of numbers."""

    units: list[int] = field(default_factory=list)
    raters: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, unit: int, rater: int, value: float) -> None:
        self.units.append(unit)
        self.raters.append(rater)
        self.values.append(value)

    def columns(self) -> tuple[Ints, Ints, Floats]:
        """Units (numbered anew, without gaps), raters and values, as arrays."""
        units = np.unique(np.asarray(self.units, dtype=np.int64), return_inverse=True)[1]
        return units, np.asarray(self.raters, dtype=np.int64), np.asarray(self.values, dtype=np.float64)


class _Numbers(dict[Any, int]):
    """Numbers things from 0, as they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def agreement_report(agent: str, rater_kind: str | None = None) -> AgreementReport:
    """Agreement among an agent's raters on each question. One query each for ratings and comparisons.

    rater_kind: human or simulated; left out, people where any person rated, else simulated raters. The two are never
    mixed: what a simulation agrees with itself says nothing of people. Raises ValueError for another kind.
    """
    if rater_kind not in (None, *RaterKind.values):
        raise ValueError(f"expected a rater kind of {' or '.join(RaterKind.values)}, found {rater_kind!r}")
    answers, raters = _answers(agent)
    spoken = {kind for kind, _ in answers}
    kind = rater_kind or next((k for k in RaterKind.values if k in spoken), RaterKind.HUMAN.value)
    return AgreementReport(
        agent=agent,
        rater_kind=kind,
        aggregation=agent_settings(agent).aggregation,
        questions=[
            _question(question, answers[kind, question.name], raters)
            for question in QUESTIONS
            if (kind, question.name) in answers
        ],
    )


_OTHER_SIDE = {Preference.LEFT.value: Preference.RIGHT.value, Preference.RIGHT.value: Preference.LEFT.value}


def _answers(agent: str) -> tuple[dict[tuple[str, str], _AnswerColumns], list[str]]:
    """(Rater kind, question) -> answers, where there are any; and the raters' names by number."""
    columns: defaultdict[tuple[str, str], _AnswerColumns] = defaultdict(_AnswerColumns)
    raters, units = _Numbers(), _Numbers()
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
    # oldest first: two decisions stand as the first who compared them saw them, whichever sides others saw
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
    """Interpretation of an alpha by Krippendorff, Content Analysis (2004), page 241."""
    if alpha.n < 2:
        return "no decision has two raters yet"
    if alpha.value is None:
        return "all raters gave the same answer, so alpha is not defined"
    if alpha.value >= 0.8:
        return "reliable"
    if alpha.value >= 0.667:
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
    right = None
    if question.metric == "nominal" and size.max() > 1:
        right = dawid_skene(
            unit, rater, value.astype(np.int64), len(question.answers), strength=STRENGTH, tolerance=TOLERANCE
        )
    reliability = None if right is None else right.reliability()
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
                reliability=None if reliability is None else float(reliability[number]),
                low=own is not None and own < LOW_ALPHA and int(shared[number]) >= ENOUGH,
            )
        )
    return sorted(rows, key=lambda r: (r.alpha is None, r.alpha or 0.0, -r.ratings, r.rater))


def _mean_by(group: Ints, values: Floats) -> Floats:
    """Mean of each group's values that are not NaN; NaN for a group without any."""
    known = ~np.isnan(values)
    many = np.bincount(group[known], minlength=int(group.max()) + 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(group[known], values[known], minlength=int(group.max()) + 1) / many)


def _same_share(unit: Ints, value: Floats, size: Ints) -> Floats:
    """Per rating: share of the others of its unit with the same value; NaN where there is no other."""
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


# --- Labels -------------------------------------------------------------------------------------------------


class LabelAggregated(NamedTuple):
    """Aggregated label of one decision by an agent's raters: good or bad."""

    decision: uuid.UUID
    value: float
    """1 good, 0 bad, 0.5 where it cannot be said: a tie."""
    confidence: float
    """0.5 to 1: share of the raters who say so (majority), or the probability that it is so (Dawid-Skene)."""
    raters: int
    simulated: bool
    """No person rated it."""

    @property
    def probability_good(self) -> float:
        """0 to 1; by majority the share of the raters who call it good."""
        return (
            self.confidence
            if self.value > NEUTRAL
            else 1 - self.confidence
            if self.value < NEUTRAL
            else NEUTRAL
        )


def verdict(thumb: str, stars: int | None, score: float | None) -> float | None:
    """Verdict of a rating on its decision: good (1), bad (0) or neither (0.5); None where it holds none.

    The finest signal speaks: a score, above or below 0.5; else stars, above or below 3; else the thumb.
    """
    if score is not None:
        return NEUTRAL if score == NEUTRAL else float(score > NEUTRAL)
    if stars is not None:
        return NEUTRAL if stars == 3 else float(stars > 3)
    return float(thumb == Thumb.UP) if thumb else None


def labels_aggregated(agent: str, aggregation: str | None = None) -> Iterator[LabelAggregated]:
    """One label per decision with a verdict, by the agent's setting, or by the `aggregation` given.

    Where a person rated a decision, simulated ratings of it do not count. Ratings that call it neither good nor bad
    take no side: a decision with no others is 0.5. Needs memory for every rating's three numbers, not for prompts.
    Raises ValueError for an unknown aggregation.
    """
    method = aggregation or agent_settings(agent).aggregation
    if method not in Aggregation.values:
        raise ValueError(f"expected an aggregation of {' or '.join(Aggregation.values)}, found {method!r}")
    decisions, raters, answers = _Numbers(), _Numbers(), _AnswerColumns()
    by_person: list[bool] = []
    rated = (
        ratings_standing(agent)
        .order_by()
        .values_list("decision_id", "rater", "rater_kind", "thumb", "stars", "score")
    )
    for decision, rater, kind, thumb, stars, score in rated.iterator(chunk_size=CHUNK):
        rating_value = verdict(thumb, stars, score)
        if rating_value is not None:
            answers.add(decisions[decision], raters[kind, rater], rating_value)
            by_person.append(kind == RaterKind.HUMAN)
    if not answers.units:
        return
    unit, rater_of, value = answers.columns()
    person = np.asarray(by_person)
    rated_by_person = np.bincount(unit[person], minlength=len(decisions)) > 0
    counts = person | ~rated_by_person[unit]
    unit, rater_of, value = unit[counts], rater_of[counts], value[counts]
    good = _share_good(unit, rater_of, value, len(decisions), method)
    many = np.bincount(unit, minlength=len(decisions))
    for decision, number in decisions.items():
        share = float(good[number])
        side = NEUTRAL if abs(share - NEUTRAL) < 1e-9 else float(share > NEUTRAL)
        yield LabelAggregated(
            decision, side, max(share, 1 - share), int(many[number]), not bool(rated_by_person[number])
        )


def _share_good(unit: Ints, rater: Ints, value: Floats, decisions: int, method: str) -> Floats:
    """Per decision: share of its raters who call it good, or the probability that it is; 0.5 where none takes sides."""
    sided = value != NEUTRAL
    unit, rater, label = unit[sided], rater[sided], value[sided].astype(np.int64)
    votes = np.bincount(unit, minlength=decisions)
    good = np.full(decisions, NEUTRAL)
    if method == Aggregation.DAWID_SKENE and unit.size:
        found, number = np.unique(unit, return_inverse=True)
        good[found] = dawid_skene(number, rater, label, 2, strength=STRENGTH, tolerance=TOLERANCE).posterior[
            :, 1
        ]
    else:
        np.divide(np.bincount(unit, label, minlength=decisions), votes, out=good, where=votes > 0)
    return good
