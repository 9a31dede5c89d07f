"""Agent `prioritizer`: in which order are tasks to be done?"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import OutcomeWorth, RewardFacts, Scenario
from rl.agents.lists import ListAgent

TASKS = (
    "answer the auditor", "mend the login", "write the newsletter", "order paper", "call the landlord",
    "review the contract", "back up the server", "book the room", "pay the invoice", "plan the offsite",
    "update the price list", "reply to the complaint",
)  # fmt: skip
GOALS = (
    "clear the desk by tonight",
    "keep customers happy",
    "nothing may be late",
    "get ready for the audit",
)
DUE = ("overdue", "due today", "due tomorrow", "due this week", "due next month")
"""Most pressing first."""
SCENARIOS = 120


@dataclass(frozen=True)
class Prioritizer(ListAgent):
    """Puts all listed tasks in order, most pressing first.

    State: "goal": text; "tasks": names, in the order shown; "descriptions": name -> when it is due, what depends on it;
    "context" as in ListAgent; "done_in_order" (never shown): the order in which they were done well, where known.
    Response: {"order": ["<name>", ...]}, every task once. A prompt may take 1,024 tokens, an answer 256.
    """

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


def _state(random: Random, right: list[str], dues: list[int]) -> dict[str, Any]:
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


AGENT = Prioritizer(
    slug="prioritizer",
    title="Prioritizer",
    description="Puts tasks in the order in which they are to be done.",
    system_prompt="Put all listed tasks in order, most pressing first. Answer in JSON.",
    suggested_tags=("too late", "can wait", "depends on another", "good first step"),
    max_new_tokens=256,
    preview="list",
    asked_key="goal",
    options_key="tasks",
    answer_key="order",
    truth_key="done_in_order",
    ordered=True,
    rewarded=RewardFacts(
        outcomes={
            "deadline_missed": OutcomeWorth(good=0, bad=1),
            "order_changed": OutcomeWorth(good=0, bad=1),
            "goal_reached": OutcomeWorth(good=1, bad=0, horizon="strategic"),
        }
    ),
)
