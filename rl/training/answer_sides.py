"""Sides of an evaluation that give answers and no log-probabilities, and how many answers of each side are right.

What an app's own model answered is recorded; a hosted model can be asked. Neither tells how likely it finds a text. So
they are compared on answers alone: right or wrong, tests, rewards, validity. Pairs, single ratings and free texts that
people wrote need log-probabilities of both sides, and do not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rl.agents.base import Agent
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, OUTCOMES, PAIRS, TESTS
from rl.statistics import wilson_interval
from rl.training.evaluate_answers import HeldOutPrompt, Rows, generate_answers, held_out_prompts
from rl.training.evaluate_evidence import Check, agreement_check
from rl.training.evaluate_sides import EvaluationInput, Side
from rl.training.linear_side import LinearSide
from rl.training.policy import Generation, LoadedPolicy


@runtime_checkable
class AnswersOnly(Protocol):
    """A side that gives answers and no log-probabilities."""

    @property
    def name(self) -> str:
        """The policy's name."""
        ...

    @property
    def title(self) -> str:
        """Its name in sentences."""
        ...

    def answers(self, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        """The answer to each prompt; None where there is none."""
        ...


@dataclass(frozen=True)
class RecordedSide:
    """A policy known by its recorded answers."""

    name: str
    title: str
    recorded: Mapping[str, str]
    """Hash of a prompt -> the newest answer recorded to it."""

    def answers(self, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        found = (self.recorded.get(prompt.row.get("prompt_hash", "")) for prompt in prompts)
        return [None if text is None else Generation(text, 0, "stop") for text in found]


def kinds_scored(agent: Agent) -> tuple[str, ...]:
    """Kinds of evidence that need log-probabilities of both sides."""
    return (PAIRS, LABELS, OUTCOMES, *([] if agent.discrete else [CORRECTIONS]))


def not_scored_words(title: str) -> str:
    """Reason that such a kind does not apply to a comparison."""
    return f"{title} gives answers and no log-probabilities"


AGAINST = "against"
"""In place of a side: the one that the policy is compared with."""

Beside = Callable[[], LoadedPolicy | LinearSide]
"""Loads a base model. Called only where its answers can be judged."""


def known_kind(rows: Rows, agent: Agent) -> str:
    """The kind of evidence that tells right answers from wrong ones; empty where none does."""
    kinds = (KNOWN, *([CORRECTIONS] if agent.discrete else []), TESTS)
    return next((kind for kind in kinds if rows.get(kind)), "")


def known_unasked(
    prompts: Sequence[HeldOutPrompt], rows: Rows, agent: Agent, asked: Sequence[HeldOutPrompt]
) -> int:
    """Prompts with a known right answer that no side is asked, because there are more than MAX_CHECKS."""
    kind = known_kind(rows, agent)
    if not kind or not asked:
        return 0
    keys = {prompt.key for prompt in held_out_prompts({kind: rows[kind]})} & {one.key for one in prompts}
    return len(keys - {prompt.key for prompt in asked})


def right_of_sides(
    work: EvaluationInput,
    rows: Rows,
    checks: Mapping[str, Check],
    policy: LoadedPolicy | LinearSide,
    own: Side,
    other: Side | None,
    incumbent: AnswersOnly | str | None,
    base: Beside | str | None,
) -> dict[str, dict[str, Any]]:
    """`policy`, `incumbent`, `base` -> share of the held-out prompts that it answered right; empty where no right
    answer is known. A side that cannot be asked is left out.

    other: the side compared with; `incumbent` and `base` are AGAINST where it is theirs. base: None for the policy's
    own model without its adapter.
    """
    agent, judge = work.judge.agent, work.judge
    if not (kind := known_kind(rows, agent)):
        return {}
    numbers = {prompt.key: i for i, prompt in enumerate(work.prompts)}
    wanted = [one for one in held_out_prompts({kind: rows[kind]}) if one.key in numbers]
    places = [numbers[prompt.key] for prompt in wanted]
    check = agreement_check(wanted, judge) if kind == CORRECTIONS else checks[kind]

    def of(side: Side) -> list[Generation | None]:
        return [side.answers[place] for place in places]

    sides = {"policy": of(own)}
    if incumbent == AGAINST and other is not None:
        sides["incumbent"] = of(other)
    elif isinstance(incumbent, AnswersOnly):
        sides["incumbent"] = incumbent.answers(wanted)
    if base == AGAINST and other is not None:
        sides["base"] = of(other)
    elif callable(base):
        sides["base"] = _asked(base(), wanted, agent, work.batch_size)
    elif isinstance(policy, LoadedPolicy) and policy.adapter is not None:
        with policy.without_adapter():
            sides["base"] = _asked(policy, wanted, agent, work.batch_size)
    shares = {}
    for name, answers in sides.items():
        answered = [
            (prompt.row, one.text) for prompt, one in zip(wanted, answers, strict=True) if one is not None
        ]
        values = check([row for row, _ in answered], [text for _, text in answered]) if answered else ()
        known = [value for value in values if value is not None]
        if known:
            shares[name] = wilson_interval(sum(value >= 1 for value in known), len(known)).as_dict()
    return shares


def _asked(
    side: LoadedPolicy | LinearSide, prompts: Sequence[HeldOutPrompt], agent: Agent, batch_size: int
) -> list[Generation | None]:
    states = [prompt.row.get("state") for prompt in prompts]
    messages = [prompt.messages for prompt in prompts]
    return list(generate_answers(side, messages, agent, states=states))
