"""Agent `prioritizer`: in which order are tasks to be done?"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rl.agents.base import (
    JsonObject,
    Message,
    OutcomeScale,
    RewardFacts,
    Scenario,
    State,
)
from rl.agents.lists import ListAgent
from rl.agents.worlds import WEEKDAYS, draw_lines, scenarios_world

TASKS = (
    "answer the auditor",
    "mend the login",
    "write the newsletter",
    "order paper",
    "call the landlord",
    "review the contract",
    "back up the server",
    "book the room",
    "pay the invoice",
    "plan the offsite",
    "update the price list",
    "reply to the complaint",
)
GOALS = (
    "clear the desk by tonight",
    "keep customers happy",
    "nothing may be late",
    "get ready for the audit",
)
DUE = ("overdue", "due today", "due tomorrow", "due this week", "due next month")
"""Most pressing first."""
SCENARIOS = 120
CHARACTERS_PER_TOKEN = 3
"""Estimate for names and dates; an agent has no tokenizer."""


@dataclass(frozen=True)
class Prioritizer(ListAgent):
    """Puts all listed tasks in order, most pressing first.

    State: "goal": text; "tasks": names; "descriptions": name -> when it is due, what depends on it; "context".
    "done_in_order" (never shown): the right order, if known. Response: {"order": ["<name>", ...]}, every task once. A
    prompt holds 1,024 tokens, an answer 256. Descriptions are cut to one length if the prompt would be longer; names
    are never cut, and too many of them are refused.
    """

    def render(self, state: State) -> list[Message]:
        """The prompt. Raises ValueError also for more tasks than a prompt or an answer holds."""
        messages = super().render(state)
        names = list(self.options(state))
        answer = len(self.respond(names))
        if answer > CHARACTERS_PER_TOKEN * self.max_new_tokens:
            raise ValueError(
                f"{self.slug}: expected tasks whose names fit an answer of about "
                f"{CHARACTERS_PER_TOKEN * self.max_new_tokens} characters, found {len(names)} tasks of {answer}; put "
                "them in order in parts"
            )
        excess = _length(messages) - CHARACTERS_PER_TOKEN * (self.max_prompt_tokens or 0)
        if excess <= 0:
            return messages
        facts = {
            name: str(text) for name, text in (state.get("descriptions") or {}).items() if name in set(names)
        }
        for width in range(max(map(len, facts.values()), default=0) - 1, 0, -1):
            short = {
                name: text if len(text) <= width else text[: width - 1] + "…" for name, text in facts.items()
            }
            if sum(len(facts[name]) - len(short[name]) for name in facts) >= excess:
                return super().render({**state, "descriptions": short})
        raise ValueError(
            f"{self.slug}: {len(names)} tasks make a prompt {excess} characters longer than it may be, whatever their "
            "descriptions are cut to; put them in order in parts, or shorten the context"
        )

    def scenarios(self) -> list[Scenario]:
        random = Random("prioritizer")
        made: list[Scenario] = []
        seen: set[tuple[str, ...]] = set()
        while len(made) < SCENARIOS:
            right = random.sample(TASKS, 4)
            dues = sorted(random.sample(range(len(DUE)), 4))
            if tuple(right) in seen:
                continue
            seen.add(tuple(right))
            state = _state(random, right, dues)
            made.append(Scenario(f"day-{len(made) + 1:03d}", state))
        return made


def _length(messages: list[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def _state(random: Random, right: list[str], dues: list[int]) -> JsonObject:
    near, backwards = [*right[:2], right[3], right[2]], right[::-1]
    drafts = [right, near, backwards, [backwards[1], backwards[0], *backwards[2:]]]
    random.shuffle(drafts)
    return {
        "goal": random.choice(GOALS),
        "tasks": random.sample(right, 4),
        "descriptions": {task: DUE[due] for task, due in zip(right, dues, strict=True)},
        "done_in_order": right,
        "drafts": drafts,
    }


def _situation_answer(state: JsonObject) -> None:
    """Reverses the order once the deadline has moved."""
    if state["context"]["deadline"] == "moved":
        state["done_in_order"] = state["done_in_order"][::-1]


AGENT = Prioritizer(
    slug="prioritizer",
    title="Prioritizer",
    description="Puts tasks in the order in which they are to be done.",
    system_prompt="Put all listed tasks in order, most pressing first. Answer in JSON.",
    suggested_tags=("too late", "can wait", "depends on another", "good first step"),
    max_new_tokens=256,
    max_prompt_tokens=1024,
    preview="list",
    asked_key="goal",
    options_key="tasks",
    answer_key="order",
    truth_key="done_in_order",
    ordered=True,
    reward_facts=RewardFacts(
        outcomes={
            "deadline_missed": OutcomeScale(good=0, bad=1),
            "order_changed": OutcomeScale(good=0, bad=1),
            "goal_reached": OutcomeScale(good=1, bad=0, horizon="strategic"),
        }
    ),
    world=scenarios_world(draw_lines(deadline=("holds", "moved"), today=WEEKDAYS), _situation_answer),
)
