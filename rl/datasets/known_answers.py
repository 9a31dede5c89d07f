"""Known answers of held-out prompts: right and wrong answers, from all human feedback. Pure.

If the agent itself knows a prompt's right answer, only that one is right. Otherwise people vote on answers that do the
same: a rating votes for or against its answer; a correction or demonstration votes for the written answer, and a
correction also against the replaced one. An answer is right with more votes for than against, else wrong. Comparisons
decide only on answers without ratings and demonstrations: right if every comparison preferred them, else wrong. An
answer on neither list is unknown and counts as not right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import Agent
from rl.agents.fields import answer_action
from rl.datasets.feedback_types import NEUTRAL, Row
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, PAIRS

RIGHT, WRONG = "right", "wrong"
"""Columns of a row of the kind `known`: lists of responses."""

OF_PEOPLE = ("comparison", "correction", "ratings")
"""Sources of pairs with human judgements on both answers."""

JUDGED_FIELDS = ("chosen", "rejected", "completion", "score", "label", "margin", "source", "votes")
"""Columns that a row loses when it represents its prompt."""


@dataclass
class _Answer:
    """Votes on one answer."""

    text: str
    liked: float = 0.0
    disliked: float = 0.0
    written: int = 0
    replaced: int = 0
    rated: bool = False
    """True with any thumb, stars or score, even a neutral one."""
    preferred: int = 0
    beaten: int = 0

    @property
    def is_right(self) -> bool | None:
        """None if undecided."""
        if self.liked or self.disliked or self.written or self.replaced:
            # A thumb down with a correction is one vote against, hence max.
            return self.liked + self.written > max(self.disliked, self.replaced)
        if self.rated or not (self.preferred or self.beaten):
            return None
        return not self.beaten


@dataclass
class _Prompt:
    row: Row
    answers: dict[Any, _Answer] = field(default_factory=dict)
    truths: list[str] = field(default_factory=list)
    simulated: bool = False


def known_rows(rows: Mapping[str, Sequence[Row]], agent: Agent) -> list[Row]:
    """One row per prompt with a known answer, with lists `right` and `wrong`; rows: kind -> held-out rows.

    For agents that answer in free text, only answers that the agent itself knows count: two wordings of one answer
    cannot be told from two answers.
    """
    prompts: dict[str, _Prompt] = {}
    kinds = (KNOWN, PAIRS, LABELS, CORRECTIONS) if agent.discrete else (KNOWN,)
    for kind in kinds:
        for row in rows.get(kind, ()):
            name = row.get("prompt_hash") or json.dumps(row["prompt"], sort_keys=True)
            prompt = prompts.setdefault(name, _Prompt(row))
            if kind == KNOWN:
                prompt.truths = agent.truths(row.get("state"))
            else:
                _count(prompt, kind, row, agent)
    found = []
    for prompt in prompts.values():
        right = prompt.truths or [one.text for one in prompt.answers.values() if one.is_right]
        wrong = [one.text for one in prompt.answers.values() if one.is_right is False]
        if wrong and not right:
            right = _left_over(prompt, agent)
        if right or wrong:
            facts = {name: value for name, value in prompt.row.items() if name not in JUDGED_FIELDS}
            simulated = prompt.simulated and not prompt.truths
            found.append(
                {**facts, "simulated": simulated, RIGHT: right, WRONG: [] if prompt.truths else wrong}
            )
    return found


def _left_over(prompt: _Prompt, agent: Agent) -> list[str]:
    """The only answer of a closed set that is not known to be wrong, or []."""
    wrong = {action for action, answer in prompt.answers.items() if answer.is_right is False}
    left = [one for one in agent.choices(prompt.row.get("state")) if answer_action(agent, one) not in wrong]
    return left if len(left) == 1 else []


def known_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the lists; changes with any further feedback."""
    lists = sorted([str(row.get("prompt_hash", "")), sorted(row[RIGHT]), sorted(row[WRONG])] for row in rows)
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()


def _count(prompt: _Prompt, kind: str, row: Row, agent: Agent) -> None:
    if kind == PAIRS and row.get("source", "comparison") not in OF_PEOPLE:
        return
    prompt.simulated |= bool(row.get("simulated"))
    votes = max(int(row.get("votes", 1)), 1)
    if kind == LABELS:
        answer = _answer(prompt, row["completion"], agent)
        answer.rated = True
        share = float(row["score"])
        if share != NEUTRAL:
            answer.liked += votes * share
            answer.disliked += votes * (1 - share)
    elif kind == CORRECTIONS:
        _answer(prompt, row["completion"], agent).written += votes
    else:
        chosen, rejected = (_answer(prompt, row[side], agent) for side in ("chosen", "rejected"))
        if chosen is not rejected:  # Two spellings of one answer are no preference.
            chosen.preferred += 1
            if row.get("source") == "correction":
                rejected.replaced += votes
            else:
                rejected.beaten += 1


def _answer(prompt: _Prompt, completion: Any, agent: Agent) -> _Answer:
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return prompt.answers.setdefault(answer_action(agent, text), _Answer(text))
