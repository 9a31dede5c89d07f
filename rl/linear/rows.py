"""Rows of a training dataset for a linear policy (prompt, answers, a preference or value) and their design matrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from rl.agents.base import UNREADABLE, Agent, Row, answer_plain
from rl.agents.fields import Path, json_read, leaves, plain
from rl.agents.inference import are_labels
from rl.linear.features import VALUES, Features, Message, prompt_features
from rl.linear.model import CLOSED, FIELDS, LISTED, answer_parts, features_read

PAIRS, SCORES, CORRECTIONS = "pairs", "scores", "corrections"
"""Kinds of feedback: one of two answers preferred; a value of one answer; the right answer."""

PAIRS_AND_SCORES = "pairs_and_scores"
"""Preferences, and values of answers that are in no pair."""

MOST_ANSWERS = 256
"""Most distinct answers of a closed set."""

UNSEEN_MASS = 0.05
"""A set is closed only if the estimated probability of a new answer next is at most this."""

LISTED_SHARE = 0.95
"""Least share of rows whose state lists their answers, or whose prompt contains the answer, for that to be how the
agent works."""


class LinearRefused(ValueError):
    """A linear policy cannot learn from this feedback; the message says what was expected and what to train instead."""


@dataclass(frozen=True)
class LinearChoice:
    """One row: a prompt and the feedback on answers to it."""

    messages: Sequence[Message]
    answer: str
    """The preferred, valued or right answer."""
    rejected: str = ""
    """The other answer of a pair."""
    value: float = 1.0
    """Value of the answer in [0, 1]; 1 for preferred and right answers."""
    options: tuple[str, ...] = ()
    """Answers that the prompt's state lists; empty without a list."""
    group: str = ""
    """Name of the prompt: cross-validation keeps its rows together."""


@dataclass(frozen=True)
class Answers:
    """Where an agent's possible answers come from: a closed set, each prompt's list, or values of fields."""

    mode: str
    vocabulary: tuple[str, ...]
    """Distinct answers of the rows as the agent writes them, most frequent first."""
    quoted: bool = False
    """True if answers occur in their prompts."""


ANY_ANSWER = Answers(LISTED, ())
"""Answers of a judge, which scores any answer by its parts."""


@dataclass
class Choices:
    """Readable rows of one kind of feedback (or pairs and scores together), and counts of the rest by reason."""

    feedback: str
    rows: list[LinearChoice] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def choices_of(rows: Iterable[Row], agent: Agent) -> Choices:
    """Rows of a snapshot of pairs, labels, scores, corrections or groups. Raises LinearRefused for other kinds, and
    without a readable row."""
    choices = Choices("")
    for row in rows:
        listed = _listed_options(row, agent)
        for feedback, made in _choices(row):
            choices.feedback = _feedback_joined(choices.feedback, feedback)
            if made is None or feedback not in KINDS_WITHIN[choices.feedback]:
                choices.left_out["not_text"] += 1
                continue
            choices.rows.append(
                LinearChoice(
                    row["prompt"], **made, options=listed, group=str(row.get("prompt_hash") or row["prompt"])
                )
            )
    if not choices.rows:
        raise LinearRefused(
            "expected pairs, scored or labelled answers, or demonstrations to learn from, found none whose answers are "
            "single texts"
        )
    return choices


KINDS_WITHIN = {kind: (kind,) for kind in (PAIRS, SCORES, CORRECTIONS)} | {PAIRS_AND_SCORES: (PAIRS, SCORES)}
"""Feedback -> kinds of its rows."""


def _feedback_joined(known: str, kind: str) -> str:
    """Feedback of the rows so far and one more kind: pairs and scores join, other kinds keep the first."""
    if {known, kind} == {PAIRS, SCORES}:
        return PAIRS_AND_SCORES
    return known or kind


def _choices(row: Row) -> list[tuple[str, dict[str, Any] | None]]:
    """(feedback, fields of a LinearChoice or None) of a row; a row of groups makes several."""
    if "chosen" in row:
        texts = [single_text(row[side]) for side in ("chosen", "rejected")]
        return [(PAIRS, None if None in texts else {"answer": texts[0], "rejected": texts[1]})]
    if "completions" in row:
        valued = zip(row["completions"], row["rewards"], strict=True)
        return [(SCORES, _value_row(completion, float(value))) for completion, value in valued]
    if "completion" not in row:
        raise LinearRefused(
            "expected answers that people judged or wrote, found prompts alone; a linear policy learns from feedback: "
            "rate answers, or train with train_grpo"
        )
    for name in ("score", "label"):
        if name in row:
            return [(SCORES, _value_row(row["completion"], float(row[name])))]
    return [(CORRECTIONS, _value_row(row["completion"], 1.0))]


def _value_row(completion: object, value: float) -> dict[str, object] | None:
    text = single_text(completion)
    return None if text is None else {"answer": text, "value": min(max(value, 0.0), 1.0)}


def single_text(completion: object) -> str | None:
    """A response as one text; None if it is several messages."""
    if isinstance(completion, str):
        return completion
    if (
        isinstance(completion, list)
        and len(completion) == 1
        and isinstance(completion[0].get("content"), str)
    ):
        return str(completion[0]["content"])
    return None


def _listed_options(row: Row, agent: Agent) -> tuple[str, ...]:
    state = row.get("state")
    if agent.answers or not agent.discrete or not isinstance(state, Mapping):
        return ()
    try:
        return tuple(agent.candidates(state))
    except UNREADABLE:
        return ()


def answers_of(rows: Sequence[LinearChoice], agent: Agent) -> Answers:
    """Where the agent's answers come from, by its definition and by the rows. Raises LinearRefused for free text."""
    written: dict[str, str] = {}
    prompts: dict[str, set[str]] = {}
    for row in rows:
        for text in filter(None, (row.answer, row.rejected)):
            prompts.setdefault(answer_plain(text), set()).add(row.group)
            written.setdefault(answer_plain(text), text.strip())
    # by prompts: a wording in many pairs of one prompt counts once
    counts = Counter({name: len(groups) for name, groups in prompts.items()})
    texts = tuple(written[name] for name, _ in counts.most_common())
    is_quoted = sum(_is_quote(row) for row in rows) >= LISTED_SHARE * len(rows)
    if sum(bool(row.options) for row in rows) >= LISTED_SHARE * len(rows):
        return Answers(LISTED, texts, is_quoted)
    once = sum(count == 1 for count in counts.values())
    closed = len(counts) <= MOST_ANSWERS and once <= UNSEEN_MASS * counts.total()
    if not agent.answers and _are_objects(rows) and (not closed or _fields_vary(rows)):
        return Answers(FIELDS, texts)
    if not agent.answers and not closed:
        raise LinearRefused(
            f"expected answers that are a choice, found {len(counts):,} different texts among {counts.total():,} "
            f"answers of {agent.slug}, {once:,} of them once: a linear policy picks an answer and writes none; "
            "train_sft, train_dpo and train_kto learn to write"
        )
    if len(texts) < 2:
        raise LinearRefused(
            f"expected at least two different answers of {agent.slug}, found {len(texts)}: there is nothing to choose"
        )
    return Answers(CLOSED, texts, is_quoted)


OBJECT_SHARE = 0.95
"""Least share of answers that are JSON objects for learning field by field."""


def _are_objects(rows: Sequence[LinearChoice]) -> bool:
    """True of right answers that are nearly all objects. Of pairs and values the field in question is unknown."""
    if any(row.rejected or row.value < 1 for row in rows):
        return False
    found = [json_read(row.answer) for row in rows]
    return sum(isinstance(one, dict) and bool(one) for one in found) >= OBJECT_SHARE * len(rows)


def _fields_vary(rows: Sequence[LinearChoice]) -> bool:
    """True of objects with at least two fields that vary, so that a new combination may be right."""
    values: dict[Path, set[str]] = {}
    for row in rows:
        found = json_read(row.answer)
        if isinstance(found, dict):
            for path, value in leaves(found):
                values.setdefault(path, set()).add(plain(value))
    return sum(len(known) > 1 for known in values.values()) > 1


def prompts_teachable(rows: Iterable[Row], agent: Agent) -> tuple[int, str]:
    """(number of prompts, CLOSED, LISTED or FIELDS) of these rows, if `auto` may train a linear policy on them.

    Raises LinearRefused if it cannot learn, and for replies that are no labels: a language model may write new ones.
    """
    choices = choices_of(rows, agent)
    answers = answers_of(choices.rows, agent)
    counts = Counter(
        text.strip() for row in choices.rows for text in filter(None, (row.answer, row.rejected))
    )
    if answers.mode == CLOSED and not agent.answers and not are_labels(counts):
        raise LinearRefused(
            f"expected answers that are a choice, found {len(counts):,} replies: list them in the agent's definition "
            "if it gives no others, or have train_linear pick one of them"
        )
    return len({row.group for row in choices.rows}), answers.mode


def _is_quote(row: LinearChoice) -> bool:
    text = "\n".join(str(message.get("content") or "") for message in row.messages)
    return all(part in text for part in answer_parts(row.answer))


Sparse: TypeAlias = "scipy.sparse.csr_matrix"
"""A scipy CSR matrix; scipy has no types for it."""

LEAST_COUNT = 2
"""Fewest prompts that have a feature; one in a single prompt only identifies that prompt."""

MOST_FEATURES = 20_000
"""Most prompt features, the most frequent ones."""

LIKED = 0.5
"""Value above which an answer is better than those that nobody judged."""

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
    """Of each row in the fit."""
    said: NDArray[np.float64]
    """Of each row in the cross-validated loss: 0 for comparisons that nobody made."""
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
    *,
    rest: bool = False,
) -> int:
    """Upper bound of the matrix entries: pairs of a prompt feature and an answer feature."""
    if choices.feedback == CORRECTIONS and answers.mode == CLOSED:
        return sum(map(len, read))
    sizes = {text: len(_places(text, answers, shared, families)) for text in answers.vocabulary}
    more = sum(sizes.values()) + len(sizes) * max(sizes.values(), default=0) if rest else 0
    return sum(
        (len(features) + 1)
        * (
            more
            + sum(
                len(_places(text, answers, shared, families))
                for text in filter(None, (row.answer, row.rejected, *row.options))
            )
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
    *,
    rest: bool = False,
) -> Design:
    """The rows as scikit-learn takes them. A weight's place is answer feature x (columns + 1) + column; the last column
    is the answer's bias.

    rest: an answer that people preferred or liked is also compared with the answers of a closed set that they did not
    judge.
    """
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
        y, ones = (
            np.array([shared[f"is {answer_plain(row.answer)}"] for row in choices.rows]),
            np.ones(len(read)),
        )
        return Design(prompts[:, : max(width - 1, 1)], y, ones, ones, groups)
    examples = [
        one
        for number, row in enumerate(choices.rows)
        for one in _examples(number, row, choices.feedback, answers, rest=rest)
    ]
    row_numbers = np.array([one.row for one in examples], dtype=np.intp)
    # both orders of a difference are equivalent; alternating them gives the two classes that scikit-learn needs
    signs = [-1 if one.other and place % 2 else 1 for place, one in enumerate(examples)]
    signed = [
        [
            (place, sign * value)
            for place, value in _difference(
                _places(one.answer, answers, shared, families),
                _places(one.other, answers, shared, families) if one.other else (),
            )
        ]
        for one, sign in zip(examples, signs, strict=True)
    ]
    with_bias = prompts + scipy.sparse.csr_matrix(
        (np.ones(len(read)), (np.arange(len(read)), np.full(len(read), width - 1))), shape=prompts.shape
    )
    x = rows_crossed(_sparse(signed, len(shared)), with_bias[row_numbers])
    if choices.feedback == PAIRS_AND_SCORES:
        constant = [[] if one.other else [(0, CONSTANT)] for one in examples]
        x = scipy.sparse.hstack([x, _sparse(constant, 1)], format="csr")
    return Design(
        x,
        np.array([int(one.liked and sign > 0) for one, sign in zip(examples, signs, strict=True)]),
        np.array([one.weight for one in examples]),
        np.array([one.weight * one.said for one in examples]),
        groups[row_numbers],
    )


@dataclass(frozen=True)
class _Example:
    """A verdict on one answer, or a comparison of two."""

    row: int
    answer: str
    other: str
    """The answer it is better than; empty for a verdict."""
    liked: bool
    weight: float
    said: bool = True
    """False if nobody compared the two."""


def _examples(
    number: int, row: LinearChoice, feedback: str, answers: Answers, *, rest: bool
) -> Iterator[_Example]:
    """What a row says, and with `rest` what follows from it in a closed set."""
    if feedback in (SCORES, PAIRS_AND_SCORES) and not row.rejected:
        if row.value > 0:
            yield _Example(number, row.answer, "", True, row.value)
        if row.value < 1:
            yield _Example(number, row.answer, "", False, 1 - row.value)
    elif row.rejected:
        yield _Example(number, row.answer, row.rejected, True, 1.0)
    else:
        others = [one for one in row.options if answer_plain(one) != answer_plain(row.answer)]
        yield from (_Example(number, row.answer, one, True, 1 / len(others)) for one in others)
    if rest and row.value > LIKED:
        judged = {answer_plain(row.answer), answer_plain(row.rejected)}
        others = [one for one in answers.vocabulary if answer_plain(one) not in judged]
        yield from (
            _Example(number, row.answer, one, True, row.value / len(others), said=False) for one in others
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
