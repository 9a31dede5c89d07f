"""Rows of a training dataset as a linear policy learns from them: prompt, answers, a preference or a value. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import UNREADABLE, Agent, answer_plain
from rl.agents.fields import Path, json_read, leaves, plain
from rl.agents.inference import are_labels
from rl.linear.model import CLOSED, FIELDS, LISTED, answer_parts

PAIRS, SCORES, CORRECTIONS = "pairs", "scores", "corrections"
"""Feedback it can learn from: one of two answers preferred; a value of one answer; the answer to give."""

PAIRS_AND_SCORES = "pairs_and_scores"
"""Feedback of both kinds: preferences, and values of answers that stand in none."""

MOST_ANSWERS = 256
"""Distinct answers up to which they can be a closed set."""

UNSEEN_MASS = 0.05
"""Largest estimated probability that the next answer is a text not met before, for the set to be closed."""

LISTED_SHARE = 0.95
"""Share of rows whose state lists their answers, or whose answers stand in their prompt, for that to be how the agent
works."""


class LinearRefused(ValueError):
    """Feedback that a linear policy cannot learn from; the message says what was expected and what to train instead."""


@dataclass(frozen=True)
class LinearChoice:
    """One row: a prompt and what was said of answers to it."""

    messages: Sequence[Mapping[str, Any]]
    answer: str
    """The preferred one, the one that was valued, or the one to give."""
    rejected: str = ""
    """Of a pair, the one that was not preferred."""
    value: float = 1.0
    """Value of the answer to people, in [0, 1]; 1 of preferred answers and of those to give."""
    options: tuple[str, ...] = ()
    """Answers the prompt's state lists; empty where it lists none."""
    group: str = ""
    """Names the prompt: rows of one prompt are never divided in cross-validation."""


@dataclass(frozen=True)
class Answers:
    """Source of an agent's possible answers: a closed set, what each prompt lists, or values of fields."""

    mode: str
    vocabulary: tuple[str, ...]
    """Distinct answers of the rows, the most frequent first, in the agent's own writing."""
    quoted: bool = False
    """Answers stand in their prompts."""


ANY_ANSWER = Answers(LISTED, ())
"""Answers of a judge, which reads what any answer is made of and gives none."""


@dataclass
class Choices:
    """Rows that could be read, of one kind of feedback or of pairs and scores together, and counts of those that could
    not."""

    feedback: str
    rows: list[LinearChoice] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def choices_of(rows: Iterable[Mapping[str, Any]], agent: Agent) -> Choices:
    """Rows of a snapshot of pairs, labels, scores, corrections or groups. Raises LinearRefused for another kind, and
    for none that can be read."""
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
"""Feedback -> kinds of rows it is made of."""


def _feedback_joined(known: str, kind: str) -> str:
    """The feedback of rows so far and of one more; corrections stay alone, as do the rows they would join."""
    if {known, kind} == {PAIRS, SCORES}:
        return PAIRS_AND_SCORES
    return known or kind


def _choices(row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """(feedback, fields of a Choice or None) of a row; one of groups makes several."""
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


def _value_row(completion: Any, value: float) -> dict[str, Any] | None:
    text = single_text(completion)
    return None if text is None else {"answer": text, "value": min(max(value, 0.0), 1.0)}


def single_text(completion: Any) -> str | None:
    """A response as one text; None where it is several messages."""
    if isinstance(completion, str):
        return completion
    if (
        isinstance(completion, list)
        and len(completion) == 1
        and isinstance(completion[0].get("content"), str)
    ):
        return str(completion[0]["content"])
    return None


def _listed_options(row: Mapping[str, Any], agent: Agent) -> tuple[str, ...]:
    state = row.get("state")
    if agent.answers or not agent.discrete or not isinstance(state, Mapping):
        return ()
    try:
        return tuple(agent.candidates(state))
    except UNREADABLE:
        return ()


def answers_of(rows: Sequence[LinearChoice], agent: Agent) -> Answers:
    """Source of the agent's possible answers, by its definition and by the rows. Raises LinearRefused for free text."""
    written: dict[str, str] = {}
    prompts: dict[str, set[str]] = {}
    for row in rows:
        for text in filter(None, (row.answer, row.rejected)):
            prompts.setdefault(answer_plain(text), set()).add(row.group)
            written.setdefault(answer_plain(text), text.strip())
    # by prompts: wordings that stand in many pairs of one prompt are met once
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
"""Share of answers that must be JSON objects for them to be learnt field by field."""


def _are_objects(rows: Sequence[LinearChoice]) -> bool:
    """True of answers to give that are objects: a few that are none do not undo it. Of pairs and values nobody knows
    which field they are about."""
    if any(row.rejected or row.value < 1 for row in rows):
        return False
    found = [json_read(row.answer) for row in rows]
    return sum(isinstance(one, dict) and bool(one) for one in found) >= OBJECT_SHARE * len(rows)


def _fields_vary(rows: Sequence[LinearChoice]) -> bool:
    """True of objects of two fields or more whose values differ: a combination that nobody wrote may be right."""
    values: dict[Path, set[str]] = {}
    for row in rows:
        found = json_read(row.answer)
        if isinstance(found, dict):
            for path, value in leaves(found):
                values.setdefault(path, set()).add(plain(value))
    return sum(len(known) > 1 for known in values.values()) > 1


def prompts_teachable(rows: Iterable[Mapping[str, Any]], agent: Agent) -> tuple[int, str]:
    """Number of prompts that `auto` may have a linear policy answer after these rows, and CLOSED, LISTED or FIELDS.

    Raises LinearRefused where it cannot learn, and for replies that are no labels: `train_linear` picks one of them,
    and a language model can write another.
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
