"""Training of a linear policy: scikit-learn's L2-regularised logistic regression on features of prompt and answer.

One objective per kind of feedback, each a penalised maximum likelihood:

  - pairs: log sigma(score(x, chosen) - score(x, rejected)): Bradley and Terry 1952 with features, as in DPO;
  - scores: log sigma(c + score(x, a)) with weight v, the value of the answer, and of its opposite with 1 - v;
  - pairs and scores: the sum of both with one score(x, a); c is a weight of the scores' rows alone;
  - corrections: log-softmax of the right answer over the closed set (multinomial logit); if each prompt lists its
    answers, log sigma(score(x, right) - score(x, other)) over the others, each with weight 1 / (k - 1).

Where cross-validation of what people said finds it better, an answer of a closed set that they preferred or liked is
also compared with the answers that they did not judge, in the same way.

Where cross-validation finds it better, each prompt feature is weighted by its inverse document frequency, ln((1 + n) /
(1 + n_f)) + 1 for n prompts of which n_f have it (Spärck Jones 1972). The stored weights include this factor.

Cross-validated log-loss over prompts picks features and penalty; rows of one prompt are never on two sides. Boosting
and kernels are left out: their propensities and files are less plain.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.agents.base import Agent, Row, answer_plain
from rl.agents.fields import json_read, leaves, plain
from rl.linear.features import FAMILIES, ORDER, VALUES, is_composed
from rl.linear.model import CLOSED, FIELDS, LISTED, FieldPlace, LinearPolicy
from rl.linear.rows import (
    ANY_ANSWER,
    CORRECTIONS,
    LEAST_COUNT,
    MOST_WEIGHTS,
    PAIRS,
    PAIRS_AND_SCORES,
    Answers,
    Choices,
    Design,
    LinearRefused,
    answer_rows,
    answers_of,
    choices_of,
    columns_of,
    design_of,
    entries_of,
)

PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Inverse strengths of the penalty (scikit-learn's C) to try."""

FOLDS = 4

SECONDS_PER_ROW, MEMORY_GB = 4e-3, 0.3
"""Estimate for a fit: measured 2 to 6 ms per row on a busy core."""

MOST_ENTRIES = 40_000_000
"""Most entries of the fitted matrix, 12 bytes each; larger families of features are not tried."""

TOO_MANY = (
    "expected answers and prompts of fewer words: {:,} rows make {:,} pairs of a prompt's and an answer's features, "
    "and at most {:,} are held in memory; train_sft, train_dpo and train_kto learn from texts, a reward model by "
    "--architecture causal"
)


@dataclass(frozen=True)
class FittedPolicy:
    """A trained policy with the figures of its training."""

    policy: LinearPolicy
    metrics: dict[str, float]
    """`loss`: cross-validated, nats per row. `cv_accuracy`: share of held-out rows predicted."""
    left_out: dict[str, int]
    seconds: float

    @property
    def words(self) -> str:
        """The fit in words, for a run's record."""
        policy, facts = self.policy, self.policy.facts
        if policy.mode == FIELDS:
            return f"a classifier for each of {len(policy.parts)} fields, from {facts['prompts']:,} prompts"
        return (
            f"{len(policy.columns):,} features of a prompt ({' and '.join(policy.families)}), penalty C = "
            f"{facts['penalty']:g}, by cross-validation over {facts['prompts']:,} prompts"
        )


def fit(
    rows: Iterable[Row],
    agent: Agent,
    *,
    penalties: Sequence[float] = PENALTIES,
    families: Sequence[tuple[str, ...]] = FAMILIES,
    seed: int = 42,
    judge: bool = False,
) -> FittedPolicy:
    """Learns from the training rows of a snapshot. Raises LinearRefused.

    penalties, families: candidates of the cross-validation; with fewer than two prompts per fold the first family and
    the middle penalty are used. judge: score any answers instead of choosing; `facts["intercept"]` added to a score is
    then the log-odds that the answer is liked.
    """
    from threadpoolctl import threadpool_limits

    began = time.perf_counter()
    choices = choices_of(rows, agent)
    answers = ANY_ANSWER if judge else answers_of(choices.rows, agent)
    # many short vector products: threads that spin while they wait take up to ten times as long
    with threadpool_limits(1, user_api="blas"):
        make = _fields_fit if answers.mode == FIELDS else _policy_fit
        policy, metrics = make(choices, answers, agent, penalties, families, seed)
    return FittedPolicy(policy, metrics, dict(choices.left_out), time.perf_counter() - began)


@dataclass(frozen=True)
class _Candidate:
    """Features and penalty that cross-validation tried."""

    families: tuple[str, ...]
    rarity: bool
    """True if features are weighted by inverse document frequency."""
    rest: bool
    """True if liked answers are compared with the rest of the closed set."""
    penalty: float
    loss: float
    """Nats per row."""
    accuracy: float


def _policy_fit(
    choices: Choices,
    answers: Answers,
    agent: Agent,
    penalties: Sequence[float],
    families: Sequence[tuple[str, ...]],
    seed: int,
    most_weights: int = MOST_WEIGHTS,
) -> tuple[LinearPolicy, dict[str, float]]:
    """The policy with the features and penalty of least cross-validated loss, and its figures."""
    best: _Candidate | None = None

    def compare(
        names: tuple[str, ...], *, rarity: bool, rest: bool, near: Sequence[float]
    ) -> _Candidate | None:
        """The best so far, or these features if they are better and not too many."""
        winner = best
        shared = answer_rows(choices.rows, answers, names)
        columns, read = columns_of(choices.rows, names, len(shared), most_weights, rarity=rarity)
        entries = entries_of(choices, answers, shared, read, names, rest=rest)
        if entries > MOST_ENTRIES and winner is None:
            raise LinearRefused(TOO_MANY.format(len(choices.rows), entries, MOST_ENTRIES))
        if entries > MOST_ENTRIES:
            return winner
        matrix = design_of(choices, answers, shared, columns, read, names, rest=rest)
        for penalty, loss, accuracy in _cross_validated(matrix, choices.feedback, near, seed):
            if winner is None or loss < winner.loss:
                winner = _Candidate(names, rarity, rest, penalty, loss, accuracy)
        return winner

    for rarity in (False, True):
        best = compare(families[0], rarity=rarity, rest=False, near=penalties)
    assert best is not None  # the first family is the best so far or was refused
    if answers.mode == CLOSED and choices.feedback != CORRECTIONS and len(answers.vocabulary) > 2:
        best = compare(families[0], rarity=best.rarity, rest=True, near=penalties)
        assert best is not None
    for names in families[1:]:
        best = compare(
            names, rarity=best.rarity, rest=best.rest, near=_penalty_neighbours(best.penalty, penalties)
        )
        assert best is not None
    of_prompt, before = best.families, answer_rows(choices.rows, answers, best.families)
    for more in _answer_families(choices, answers):
        names = (*of_prompt, *more)
        features = answer_rows(choices.rows, answers, names)
        if features != before:
            near = _penalty_neighbours(best.penalty, penalties)
            best, before = compare(names, rarity=best.rarity, rest=best.rest, near=near), features
            assert best is not None
    loss, accuracy, names, penalty = best.loss, best.accuracy, best.families, best.penalty
    shared = answer_rows(choices.rows, answers, names)
    columns, read = columns_of(choices.rows, names, len(shared), most_weights, rarity=best.rarity)
    matrix = design_of(choices, answers, shared, columns, read, names, rest=best.rest)
    weights, bias, intercept = _weights(matrix, choices.feedback, answers, penalty, len(shared), len(columns))
    weights = weights * np.fromiter(columns.values(), np.float64, len(columns))
    policy = LinearPolicy(
        agent=agent.slug,
        mode=answers.mode,
        families=names,
        answers=answers.vocabulary,
        quoted=answers.quoted,
        rows=tuple(shared),
        columns=tuple(columns),
        weights=weights,
        bias=bias,
        facts={
            "feedback": choices.feedback,
            "penalty": penalty,
            "rows": len(choices.rows),
            "prompts": len({row.group for row in choices.rows}),
            "folds": FOLDS,
            "intercept": intercept,
        },
    )
    metrics = {
        name: value for name, value in (("loss", loss), ("cv_accuracy", accuracy)) if np.isfinite(value)
    }
    return policy, metrics


MOST_PARTS, MOST_VALUES = 64, 64
"""Most fields and list items that are fitted, the first ones; most values per field, the most frequent. The rest gets
its most frequent value."""

FEW_PARTS = 16
"""Up to this many fields each picks its own features; with more all use the first family and fewer penalties."""


def _fields_fit(
    choices: Choices,
    answers: Answers,
    agent: Agent,
    penalties: Sequence[float],
    families: Sequence[tuple[str, ...]],
    seed: int,
) -> tuple[LinearPolicy, dict[str, float]]:
    """One policy per field of the objects and per item of their lists, independent given the prompt; accuracy is the
    mean over fields."""
    read = [(row, json_read(row.answer)) for row in choices.rows]
    objects = [(row, dict(leaves(value))) for row, value in read if isinstance(value, dict) and value]
    parts: list[tuple[FieldPlace, LinearPolicy]] = []
    figures: list[dict[str, float]] = []
    places = _object_places([found for _, found in objects])
    room = MOST_WEIGHTS // max(min(len(places), MOST_PARTS), 1)
    if len(places) > FEW_PARTS:
        families, penalties = families[:1], penalties[1::2] or penalties
    for place in places:
        values = [place.value_in(found) for _, found in objects]
        counts = Counter(values)
        vocabulary = tuple(value for value, _ in counts.most_common(MOST_VALUES))
        if len(vocabulary) == 1 or len(parts) >= MOST_PARTS:
            parts.append((place, _constant(agent, vocabulary[0])))
            continue
        rows = [
            replace(row, answer=value, options=())
            for (row, _), value in zip(objects, values, strict=True)
            if value in vocabulary
        ]
        part, found = _policy_fit(
            Choices(CORRECTIONS, rows), Answers(CLOSED, vocabulary), agent, penalties, families, seed, room
        )
        parts.append((place, part))
        figures.append(found)
    policy = LinearPolicy(
        agent=agent.slug,
        mode=FIELDS,
        families=families[0],
        answers=(),
        quoted=False,
        rows=(),
        columns=(),
        weights=np.zeros((0, 0)),
        bias=np.zeros(0),
        facts={
            "feedback": choices.feedback,
            "penalty": 0.0,
            "rows": len(choices.rows),
            "fields": len(parts),
            "prompts": len({row.group for row in choices.rows}),
            "folds": FOLDS,
            "intercept": 0.0,
        },
        parts=tuple(parts),
    )
    known = [one["cv_accuracy"] for one in figures if "cv_accuracy" in one]
    return policy, {"cv_accuracy": float(np.mean(known))} if known else {}


def _object_places(objects: Sequence[Mapping[tuple[str, ...], Any]]) -> list[FieldPlace]:
    """Fields of some objects, in their order. A list of recurring items is read item by item, unless whole lists recur;
    fields of a single object are left out."""
    counts = Counter(path for found in objects for path in found)
    places: list[FieldPlace] = []
    for path in sorted(counts, key=_order_of(objects)):
        if counts[path] < LEAST_COUNT:
            continue
        lists = [found[path] for found in objects if isinstance(found.get(path), list)]
        items = Counter(plain(item) for value in lists for item in value)
        is_set = len(lists) == len(objects) and all(
            len({*map(plain, value)}) == len(value) for value in lists
        )
        items_known = [item for item, count in items.most_common(MOST_VALUES) if count >= LEAST_COUNT]
        if is_set and items_known and len(set(map(plain, lists))) > len(items_known):
            where: dict[str, list[int]] = {}
            for value in lists:
                for number, item in enumerate(map(plain, value)):
                    where.setdefault(item, []).append(number)
            items_known.sort(key=lambda item: float(np.mean(where[item])))
            places += [FieldPlace(path, item) for item in items_known]
        else:
            places.append(FieldPlace(path))
    return places


def _order_of(objects: Sequence[Mapping[tuple[str, ...], object]]) -> Any:
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    for number, found in enumerate(sorted(objects, key=len, reverse=True)):
        for at, path in enumerate(found):
            first.setdefault(path, (number, at))
    return first.__getitem__


def _constant(agent: Agent, value: str) -> LinearPolicy:
    """A policy with one answer."""
    return LinearPolicy(
        agent=agent.slug,
        mode=CLOSED,
        families=FAMILIES[0],
        answers=(value,),
        quoted=False,
        rows=(f"is {value}",),
        columns=(),
        weights=np.zeros((1, 0)),
        bias=np.zeros(1),
    )


def _answer_families(choices: Choices, answers: Answers) -> list[tuple[str, ...]]:
    """Families of answer features to try in turn; none for demonstrations of a closed set, which are classes."""
    if answers.mode == LISTED:
        return [(ORDER,)]
    if choices.feedback == CORRECTIONS or not any(map(is_composed, map(answer_plain, answers.vocabulary))):
        return []
    return [(VALUES,), (VALUES, ORDER)]


def _penalty_neighbours(penalty: float, penalties: Sequence[float]) -> Sequence[float]:
    """The best penalty of the last features and the next stronger one: more features need no weaker one."""
    place = list(penalties).index(penalty)
    return penalties[max(place - 1, 0) : place + 1]


def _estimator(feedback: str, penalty: float) -> object:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(
        C=penalty, max_iter=300, tol=1e-3, fit_intercept=feedback not in (PAIRS, PAIRS_AND_SCORES)
    )


def _cross_validated(
    matrix: Design, feedback: str, penalties: Sequence[float], seed: int
) -> list[tuple[float, float, float]]:
    """(penalty, mean log-loss in nats, accuracy) per penalty; the middle penalty without figures if prompts are too
    few."""
    if not _folds(matrix, seed):
        return [(penalties[len(penalties) // 2], np.inf, np.nan)]
    fold_losses: list[tuple[float, float, float]] = []
    for penalty in penalties:
        if len(fold_losses) > 1 and fold_losses[-1][1] > fold_losses[-2][1]:
            break  # from the strongest on the loss falls, then rises
        losses, right = _held_out_losses(matrix, feedback, penalty, seed)
        fold_losses.append(
            (
                penalty,
                float(np.average(losses, weights=matrix.said)),
                float(np.average(right, weights=matrix.said)),
            )
        )
    return fold_losses


def _folds(matrix: Design, seed: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """(rows to fit, rows to test) per fold; none if prompts are too few or a fold would fit one class."""
    from sklearn.model_selection import GroupKFold

    folds = min(FOLDS, len(np.unique(matrix.groups)) // 2)
    if folds < 2:
        return []
    splitter = GroupKFold(folds, shuffle=True, random_state=seed)
    divided = list(splitter.split(matrix.x, matrix.y, matrix.groups))
    return divided if all(len(np.unique(matrix.y[train])) > 1 for train, _ in divided) else []


def _held_out_losses(
    matrix: Design, feedback: str, penalty: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-loss of each row in nats, and whether it is predicted, by a fit on the other folds' prompts."""
    losses, right = np.zeros(len(matrix.y)), np.zeros(len(matrix.y))
    for train, test in _folds(matrix, seed):
        model = _fit_weights(_estimator(feedback, penalty), matrix, train)
        predictions = model.predict_proba(matrix.x[test])
        place = {int(name): column for column, name in enumerate(model.classes_)}
        own = [
            predictions[i, place[int(y)]] if int(y) in place else 0.0 for i, y in enumerate(matrix.y[test])
        ]
        losses[test] = -np.log(np.maximum(own, 1e-4))
        right[test] = model.classes_[predictions.argmax(1)] == matrix.y[test]
    return losses, right


def _fit_weights(model: Any, matrix: Design, places: Any = slice(None)) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged to the last digit, which is not wanted
        return model.fit(matrix.x[places], matrix.y[places], sample_weight=matrix.weights[places])


def _weights(
    matrix: Design, feedback: str, answers: Answers, penalty: float, height: int, width: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Weights [answer features, prompt features], biases of the answers, and the common intercept."""
    if len(np.unique(matrix.y)) < 2:
        raise LinearRefused(
            "expected liked and disliked answers, found only one of the two: a classifier needs both"
        )
    model = _fit_weights(_estimator(feedback, penalty), matrix)
    if feedback == CORRECTIONS and answers.mode == CLOSED:
        weights, bias = np.zeros((height, width)), np.full(height, float(np.min(model.intercept_)))
        if len(model.classes_) == 2:  # scikit-learn keeps one row of weights for two classes
            half = model.coef_[0] / 2
            rows, intercepts = np.array([-half, half]), np.array([-1.0, 1.0]) * model.intercept_[0] / 2
        else:
            rows, intercepts = model.coef_, model.intercept_
        weights[model.classes_], bias[model.classes_] = rows[:, :width], intercepts
        return weights, bias, 0.0
    whole = model.coef_[0][: height * (width + 1)].reshape(height, width + 1)
    return whole[:, :width].copy(), whole[:, width].copy(), float(np.ravel(model.intercept_)[0])
