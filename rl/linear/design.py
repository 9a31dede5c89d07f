"""Design matrix of a linear policy: a column for each pair of a feature of the prompt and one of the answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from rl.agents.base import answer_plain
from rl.linear.features import VALUES, Features, prompt_features
from rl.linear.model import CLOSED, features_read
from rl.linear.rows import CORRECTIONS, PAIRS_AND_SCORES, SCORES, Answers, Choices, LinearChoice

Sparse: TypeAlias = Any
"""A scipy CSR matrix; scipy has no types for it."""

LEAST_COUNT = 2
"""Fewest prompts that have a feature; one in a single prompt only identifies that prompt."""

MOST_FEATURES = 20_000
"""Most prompt features, the most frequent ones."""

CONSTANT = 10.0
"""Value of the column for the scores' constant beside pairs: large, so that the penalty hardly affects it."""

MOST_WEIGHTS = 2_000_000
"""Most weights of a policy, so that its file stays below 30 MB; many answers leave fewer features."""


@dataclass(frozen=True)
class Design:
    """Rows as scikit-learn takes them."""

    x: Sparse
    """Sparse [rows, weights]."""
    y: NDArray[np.int64]
    weights: NDArray[np.float64]
    groups: NDArray[np.int64]


def answer_rows(
    rows: Sequence[LinearChoice], answers: Answers, families: tuple[str, ...] = ()
) -> dict[str, int]:
    """Answer feature -> its row of weights; parts of answers must occur at least twice."""
    if answers.mode == CLOSED and VALUES not in families:
        return {f"is {answer_plain(answer)}": place for place, answer in enumerate(answers.vocabulary)}
    counts: Counter[str] = Counter()
    for row in rows:
        for answer in filter(None, (row.answer, row.rejected)):
            counts.update(features_read(answer_plain(answer), answers.mode, families))
    names = [name for name, count in counts.most_common(1000) if count >= LEAST_COUNT]
    return {name: place for place, name in enumerate(names)}


def columns_of(
    rows: Sequence[LinearChoice],
    families: Sequence[str],
    answer_count: int,
    most_weights: int = MOST_WEIGHTS,
    *,
    rarity: bool = False,
) -> tuple[dict[str, float], list[Features]]:
    """Prompt feature -> its weight (1, or with `rarity` its inverse document frequency), in the order of the columns;
    and the features of each row's prompt. Features of all prompts, or of one, are left out."""
    by_group: dict[str, Features] = {}
    for row in rows:
        if row.group not in by_group:
            by_group[row.group] = prompt_features(row.messages, families)
    counts = Counter(name for features in by_group.values() for name in features)
    most = min(MOST_FEATURES, most_weights // max(answer_count, 1))
    names = [(name, n) for name, n in counts.items() if LEAST_COUNT <= n < len(by_group)]
    names.sort(key=lambda one: (-one[1], one[0]))
    prompts = len(by_group)
    columns = {
        name: math.log((1 + prompts) / (1 + count)) + 1 if rarity else 1.0 for name, count in names[:most]
    }
    return columns, [by_group[row.group] for row in rows]


def entries_of(
    choices: Choices,
    answers: Answers,
    shared: Mapping[str, int],
    read: Sequence[Features],
    families: tuple[str, ...],
) -> int:
    """Upper bound of the matrix entries: pairs of a prompt feature and an answer feature."""
    if choices.feedback == CORRECTIONS and answers.mode == CLOSED:
        return sum(map(len, read))
    return sum(
        (len(features) + 1)
        * sum(
            len(_places(text, answers, shared, families))
            for text in filter(None, (row.answer, row.rejected, *row.options))
        )
        for row, features in zip(choices.rows, read, strict=True)
    )


def design_of(
    choices: Choices,
    answers: Answers,
    shared: Mapping[str, int],
    columns: Mapping[str, float],
    read: Sequence[Features],
    families: tuple[str, ...],
) -> Design:
    """The rows as scikit-learn takes them. A weight's place is answer feature x (columns + 1) + column; the last column
    is the answer's bias."""
    width = len(columns) + 1
    place_of = {name: place for place, name in enumerate(columns)}
    numbers = {group: number for number, group in enumerate(dict.fromkeys(row.group for row in choices.rows))}
    groups = np.array([numbers[row.group] for row in choices.rows])
    prompts = _sparse(
        [
            [(place_of[name], value * columns[name]) for name, value in features.items() if name in columns]
            for features in read
        ],
        width,
    )
    if choices.feedback == CORRECTIONS and answers.mode == CLOSED:
        y = np.array([shared[f"is {answer_plain(row.answer)}"] for row in choices.rows])
        return Design(prompts[:, : max(width - 1, 1)], y, np.ones(len(y)), groups)
    examples: list[tuple[int, list[tuple[int, float]], int, float]] = []
    for i, row in enumerate(choices.rows):
        places = _places(row.answer, answers, shared, families)
        if choices.feedback in (SCORES, PAIRS_AND_SCORES) and not row.rejected:
            examples.append((i, [(place, 1.0) for place in places], 1, row.value))
            examples.append((i, [(place, 1.0) for place in places], 0, 1 - row.value))
            continue
        plain = answer_plain(row.answer)
        others = (
            [row.rejected] if row.rejected else [one for one in row.options if answer_plain(one) != plain]
        )
        for other in others:
            apart = _difference(places, _places(other, answers, shared, families))
            # both orders of a difference are equivalent; alternating them gives the two classes that scikit-learn needs
            sign = 1 if len(examples) % 2 == 0 else -1
            examples.append(
                (i, [(place, sign * value) for place, value in apart], int(sign > 0), 1 / len(others))
            )
    examples = [one for one in examples if one[3] > 0]
    row_numbers = np.array([i for i, *_ in examples], dtype=np.intp)
    with_bias = prompts + scipy.sparse.csr_matrix(
        (np.ones(len(read)), (np.arange(len(read)), np.full(len(read), width - 1))), shape=prompts.shape
    )
    x = rows_crossed(_sparse([signed for _, signed, *_ in examples], len(shared)), with_bias[row_numbers])
    if choices.feedback == PAIRS_AND_SCORES:
        constant = [[] if choices.rows[i].rejected else [(0, CONSTANT)] for i in row_numbers]
        x = scipy.sparse.hstack([x, _sparse(constant, 1)], format="csr")
    return Design(
        x,
        np.array([y for _, _, y, _ in examples]),
        np.array([weight for *_, weight in examples]),
        groups[row_numbers],
    )


def rows_crossed(left: Sparse, right: Sparse) -> Sparse:
    """Row-wise product [rows, left columns x right columns] of two sparse matrices (transposed Khatri-Rao), in array
    operations."""
    per_entry = np.repeat(np.diff(right.indptr), np.diff(left.indptr))
    entries = np.repeat(np.arange(left.nnz), per_entry)
    within = np.arange(len(entries)) - np.repeat(np.cumsum(per_entry) - per_entry, per_entry)
    others = np.repeat(np.repeat(right.indptr[:-1], np.diff(left.indptr)), per_entry) + within
    indptr = np.concatenate([[0], np.cumsum(np.diff(left.indptr) * np.diff(right.indptr))])
    return scipy.sparse.csr_matrix(
        (
            left.data[entries] * right.data[others],
            left.indices[entries] * right.shape[1] + right.indices[others],
            indptr,
        ),
        shape=(left.shape[0], left.shape[1] * right.shape[1]),
    )


def _places(answer: str, answers: Answers, shared: Mapping[str, int], families: tuple[str, ...]) -> list[int]:
    names = features_read(answer_plain(answer), answers.mode, families)
    return [shared[name] for name in names if name in shared]


def _difference(own: Sequence[int], other: Sequence[int]) -> list[tuple[int, float]]:
    return [
        *((place, 1.0) for place in own if place not in other),
        *((place, -1.0) for place in other if place not in own),
    ]


def _sparse(rows: Sequence[Sequence[tuple[int, float]]], width: int) -> Sparse:
    """Rows of (column, value) as a sparse matrix [rows, width], width at least 1."""
    indptr = np.cumsum([0, *map(len, rows)])
    entries = [entry for row in rows for entry in row]
    columns = np.array([column for column, _ in entries], dtype=np.int64)
    values = np.array([value for _, value in entries], dtype=np.float64)
    matrix = scipy.sparse.csr_matrix((values, columns, indptr), shape=(len(rows), max(width, 1)))
    matrix.sort_indices()
    return matrix
