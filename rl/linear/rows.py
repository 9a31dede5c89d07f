"""Rows of a training dataset for a linear policy: prompt, answers, a preference or a value. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import UNREADABLE, Agent, Row, answer_plain
from rl.agents.fields import Path, json_read, leaves, plain
from rl.agents.inference import are_labels
from rl.linear.features import Message
from rl.linear.model import CLOSED, FIELDS, LISTED, answer_parts

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


def _value_row(completion: object, value: float) -> dict[str, Any] | None:
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
