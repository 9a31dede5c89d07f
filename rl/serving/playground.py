"""Playground: one question put to several policies of an agent, each answer a recorded decision."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from feedback.explorer.previews import glimpse_of
from feedback.models import Decision
from feedback.recording.recorder import Storage
from feedback.selectors import decisions_of
from feedback.services import comparison_submit, rating_submit
from rl.models import Policy
from rl.models.agent_definitions import agent_served
from rl.serving.base import BASE, ServingRefused
from rl.serving.decide import DecideOrder, decide
from rl.serving.fallback import NobodyAnswers
from rl.serving.gateway import RecordingImpossible

MARK = "playground"
"""Key of a decision's metadata with the user who asked on the playground."""
MAX_POLICIES = 6
"""Policies asked at once."""
POLICIES_OFFERED = 12
EXAMPLES = 6
"""Recent prompts offered."""
LOOK = 200
"""Newest decisions among which examples are looked for."""
SYSTEM_LOOK = 50
"""Newest decisions whose system prompts are compared."""


@dataclass(frozen=True)
class Question:
    """A question as it was typed: a text, a conversation or a state, among listed responses or in free words."""

    text: str
    candidates: tuple[str, ...] = ()

    @classmethod
    def of_decision(cls, decision: Decision, system: str, candidates: tuple[str, ...] = ()) -> Question:
        """The prompt of a recorded decision, as it may be typed again."""
        return cls(question_text(decision.messages, decision.state, system), candidates)

    def order(self, agent: str, policy: str, actor: str) -> DecideOrder:
        """The order of a decision by one policy. Raises ServingRefused for an empty question."""
        if not self.text.strip():
            raise ServingRefused("expected a question, found nothing", param="question")
        read = question_read(self.text)
        if isinstance(read, str) and (system := system_prompt_recorded(agent)):
            read = [{"role": "system", "content": system}, {"role": "user", "content": read}]
        return DecideOrder(
            agent=f"{agent}:{policy}",
            candidates=list(self.candidates) or None,
            metadata={MARK: actor},
            **({"state": read} if isinstance(read, dict) else {"messages": read}),
        )


@dataclass(frozen=True)
class PlaygroundAnswer:
    """Answer of one policy: the id of its decision, or the reason why there is none."""

    policy: str
    decision: uuid.UUID | None = None
    refusal: str = ""


@dataclass(frozen=True)
class PromptExample:
    """A prompt that was asked before, as it may be typed again."""

    decision: uuid.UUID
    line: str


def question_read(text: str) -> str | dict[str, object] | list[object]:
    """Prompt as typed: a JSON object is the agent's state, a JSON list of messages a conversation, else a text."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            read = json.loads(text)
        except ValueError:
            return text
        if isinstance(read, dict) or (isinstance(read, list) and read and isinstance(read[0], dict)):
            return read
    return text


def system_prompt_recorded(agent: str) -> str:
    """System prompt that most of the newest decisions of an agent's app begin with; empty where they share none.

    A question that is typed as a text is asked with it: a policy learnt from prompts that had it, and answers others
    as badly as it was never taught to.
    """
    rows = (
        decisions_of(agent).order_by("-created_at", "-id").values_list("messages", "metadata")[:SYSTEM_LOOK]
    )
    recorded = [messages for messages, metadata in rows if MARK not in (metadata or {})]
    found = Counter(
        str(messages[0].get("content", ""))
        for messages in recorded
        if isinstance(messages, list) and messages and messages[0].get("role") == "system"
    )
    (system, count), *_ = found.most_common(1) or [("", 0)]
    return system if 2 * count > len(recorded) else ""


def question_text(messages: Any, state: object, system: str = "") -> str:
    """A recorded prompt as it may be typed into the playground: its state, its only message, or the conversation.
    `system` is the system prompt that a text is asked with; a message beside it alone is that text."""
    if isinstance(state, Mapping) and state:
        return json.dumps(state, ensure_ascii=False, indent=2)
    if isinstance(messages, str):
        return messages
    if len(messages) == 2 and messages[0] == {"role": "system", "content": system}:
        messages = messages[1:]
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return str(messages[0]["content"])
    return json.dumps(messages, ensure_ascii=False, indent=2)


def playground_ask(
    agent: str, question: Question, policies: Sequence[str], actor: str
) -> list[PlaygroundAnswer]:
    """Ask every policy, one after another. A refusal of one is its answer and stops no other.

    Raises ServingRefused where nothing or too much is asked.
    """
    if not 1 <= len(policies) <= MAX_POLICIES:
        raise ServingRefused(
            f"expected 1 to {MAX_POLICIES} policies to ask, found {len(policies)}", param="policy"
        )
    return [_ask(agent, question, policy, actor) for policy in dict.fromkeys(policies)]


def _ask(agent: str, question: Question, policy: str, actor: str) -> PlaygroundAnswer:
    try:
        made = decide(question.order(agent, policy, actor))
    except (ServingRefused, NobodyAnswers, RecordingImpossible) as refusal:
        return PlaygroundAnswer(policy, refusal=str(refusal))
    if made.storage is not Storage.DATABASE:
        return PlaygroundAnswer(
            policy,
            refusal=f"it answered {made.facts['response'][:400]!r}; the database cannot be reached, so the "
            "decision is stored later",
        )
    return PlaygroundAnswer(policy, uuid.UUID(made.facts["id"]))


def answers_recorded(agent: str, ids: Sequence[uuid.UUID]) -> list[Decision]:
    """The agent's decisions with these ids, in their order; those that are not stored are left out."""
    rows = {row.pk: row for row in decisions_of(agent).filter(pk__in=ids)}
    return [rows[pk] for pk in ids if pk in rows]


def answer_before(asked: Decision) -> Decision | None:
    """The newest answer to the same prompt that was not asked for on a playground: the app's own."""
    same = decisions_of(asked.agent).filter(prompt_hash=asked.prompt_hash).order_by("-created_at", "-id")
    return next((row for row in same[:LOOK] if MARK not in (row.metadata or {})), None)


def answer_rate(answer: Decision, others: Sequence[Decision], verdict: str, rater: str) -> None:
    """Rate an answer (`up`, `down`), or prefer it to all others of its question (`best`). Raises FeedbackRefused."""
    if verdict == "best":
        for other in others:
            comparison_submit(left=answer, right=other, preference="left", rater=rater)
    else:
        rating_submit(decision=answer, thumb=verdict, rater=rater)


def policies_offered(agent: str, named: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Names and stages that may be asked: the base, the champion, then those named and the newest; none rejected, and
    none that is known by its recorded answers alone."""
    able = Policy.objects.filter(agent=agent).exclude(stage=Policy.Stage.REJECTED).order_by("-pk")
    able = able.exclude(kind=Policy.Kind.RECORDED)
    wanted = able.filter(Q(stage=Policy.Stage.CHAMPION) | Q(name__in=named)).values_list("name", "stage")
    found = dict([*wanted, *able.values_list("name", "stage")[:POLICIES_OFFERED]])
    champion_first = sorted(found.items(), key=lambda row: row[1] != Policy.Stage.CHAMPION)
    return [(BASE, ""), *champion_first]


def policies_default(offered: Sequence[tuple[str, str]]) -> list[str]:
    """The base beside the champion, or beside the newest policy where there is no champion."""
    return [name for name, _ in offered[:2]]


def examples_recent(agent: str) -> list[PromptExample]:
    """The newest prompts of an agent that differ, a line each."""
    examples: dict[str, PromptExample] = {}
    rows = (
        decisions_of(agent)
        .order_by("-created_at", "-id")
        .only("id", "prompt_hash", "messages", "state", "response")
    )
    for row in rows[:LOOK]:
        if row.prompt_hash not in examples:
            examples[row.prompt_hash] = PromptExample(row.pk, glimpse_of(row)[0])
        if len(examples) == EXAMPLES:
            break
    return list(examples.values())


def writes_text(agent: str) -> bool:
    """True if the agent answers in free words, which may be streamed: no schema and no closed set of answers."""
    found = agent_served(agent)
    return not found.structured and not found.answers
