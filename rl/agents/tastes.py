"""Tastes of simulated raters, and scenarios by the thousand in which what the prompt says decides. Pure.

Three tastes an agent. Each scenario carries what is wanted in keys of its state that no prompt shows, so that
`Agent.hidden_preference` and `Agent.ground_truth` speak of it as of any other. The prompts are the same for all three.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents import assistant, filer, fixtures, tool_agent, widgets
from rl.agents.base import Agent, ChoiceAgent, Scenario
from rl.agents.lists import ListAgent

TEAM, SITUATION, DRIFTING = "team", "situation", "drifting"

TASTES: dict[str, str] = {
    TEAM: "by the question alone, whatever else the prompt says",
    SITUATION: "by what the prompt says beside the question: screen, amount of data, deadline, who reads",
    DRIFTING: "as `team` in the first half of the scenarios, as `situation` in the second",
}

MOST = 5_000
"""Scenarios that are made at most; the smallest agent has prompts enough for as many."""

State = dict[str, Any]


@dataclass(frozen=True)
class World:
    """Generator of an agent's states, and the answer that the situation they show asks for."""

    draw: Callable[[Random], State]
    """A state that shows a situation, with what `team` wants."""
    want: Callable[[State], None]
    """Change what is wanted to what the situation asks for."""


def scenarios_of(agent: Agent, taste: str, count: int, seed: int = 0) -> list[Scenario]:
    """Draw `count` scenarios with different prompts; the same for the same arguments, and the prompts for
    every taste.

    Raises ValueError for an unknown taste, an agent without a world or a count outside [1, MOST].
    """
    if taste not in TASTES:
        raise ValueError(f"expected a taste of {', '.join(TASTES)}; found {taste!r}")
    if agent.slug not in WORLDS:
        raise ValueError(
            f"agent {agent.slug!r} has no scenarios; there are some for {', '.join(sorted(WORLDS))}"
        )
    if not 1 <= count <= MOST:
        raise ValueError(
            f"agent {agent.slug} has {MOST:,} scenarios; expected 1 to {MOST:,}, found {count:,}"
        )
    world, random = WORLDS[agent.slug], Random(f"tastes/{agent.slug}/{seed}")
    made: list[Scenario] = []
    seen: set[str] = set()
    while len(made) < count:
        state = _listed_anew(agent, world.draw(random), random)
        shown = json.dumps(agent.render(state))
        if shown in seen:
            continue
        seen.add(shown)
        if taste == SITUATION or (taste == DRIFTING and 2 * len(made) >= count):
            world.want(state)
        made.append(Scenario(f"{taste}-{seed}-{len(made) + 1:04d}", state))
    return made


def _listed_anew(agent: Agent, state: State, random: Random) -> State:
    """The options in another order: it says nothing, and makes further prompts."""
    if isinstance(agent, (ChoiceAgent, ListAgent)):
        options = list(state[agent.options_key])
        random.shuffle(options)
        state[agent.options_key] = options
    return state


def _of_scenarios(slug: str, show: Callable[[Random, State], None]) -> Callable[[Random], State]:
    """States drawn from an agent's own scenarios, each shown in a situation."""

    def draw(random: Random) -> State:
        # imported late: the registry of agents is complete once this module is
        from rl.agents import AGENTS

        state: State = copy.deepcopy(dict(random.choice(_states(AGENTS[slug]))))
        show(random, state)
        return state

    return draw


_made: dict[str, list[State]] = {}


def _states(agent: Agent) -> list[State]:
    if agent.slug not in _made:
        _made[agent.slug] = [dict(scenario.state) for scenario in agent.scenarios()]
    return _made[agent.slug]


def _context(exact: bool = False, **choices: tuple[Any, ...]) -> Callable[[Random, State], None]:
    """Prompt lines whose values are drawn. exact: no name too many and none too few is liked."""

    def show(random: Random, state: State) -> None:
        drawn = {name.replace("_", " "): random.choice(values) for name, values in choices.items()}
        state["context"] = {**(state.get("context") or {}), **drawn}
        if exact:
            state["wanted"] = "exact"

    return show


# --- One world an agent ---------------------------------------------------------------------------------------


def _widgets_drawn(random: Random) -> State:
    return widgets.state_random(random, random.choice(tuple(widgets.WIDGETS)))


def _widgets_wanted(state: State) -> None:
    """Compact on a phone, rich on a wall screen; between them rich from 240 readings on."""
    screen, points = state["context"]["on"], state["context"]["points"]
    rich = screen == "wall screen" or (screen != "phone" and points >= 240)
    state["wanted"] = "rich" if rich else "compact"


def _fixtures_drawn(random: Random) -> State:
    return fixtures.state_random(random, random.choice(tuple(fixtures.SITUATIONS)))


def _fixtures_wanted(state: State) -> None:
    """Brief for who is in a hurry or on the move, and for team leads; guided for the others."""
    hurried = state["context"]["mood"] in ("in a hurry", "on the move")
    state["wanted"] = "brief" if hurried or state["context"]["reader"] == "team lead" else "guided"


def _filer_drawn(random: Random) -> State:
    state = filer.state_random(random, random.choice(tuple(filer.TASTE)))
    return state | {"filed_in": filer.best_folder(state)}


def _filer_wanted(state: State) -> None:
    """With the partner while something is open, by kind once it is done with."""
    state["wanted"] = "by partner" if state["context"]["status"] in ("open", "disputed") else "by kind"
    state["filed_in"] = filer.best_folder(state)


LEADS = {
    "I am in a hurry: ": assistant.PLAIN_TONE,
    "On my way out, ": assistant.PLAIN_TONE,
    "For the minutes: ": assistant.PLAIN_TONE,
    "I am new here: ": assistant.FRIENDLY_TONE,
    "A bit lost, ": assistant.FRIENDLY_TONE,
    "Sorry to ask again: ": assistant.FRIENDLY_TONE,
}
"""Beginning of a question -> the tone that goes with it."""


def _assistant_drawn(random: Random) -> State:
    state = assistant.state_random(random, random.choice(tuple(assistant.TOPICS)))
    lead, case = random.choice(tuple(LEADS)), random.randint(100, 999)
    return state | {"question": f"{lead}{state['question']} (case {case})", "lead": lead}


def _assistant_wanted(state: State) -> None:
    state["wanted"] = LEADS[state["lead"]]


def _storer_wanted(state: State) -> None:
    """Facts known from hearsay alone, which are not to be stored: None."""
    if state["context"]["source"] == "hearsay":
        state["kept_in"] = "nowhere"


def _librarian_wanted(state: State) -> None:
    """First subject alone, where a catalogue is narrow."""
    if state["context"]["catalogue"] == "narrow":
        state["catalogued_under"] = state["catalogued_under"][:1]


def _retriever_wanted(state: State) -> None:
    """On a phone the first passage that helps, and no second one."""
    if state["context"]["reader"] == "on a phone":
        state["helped"] = state["helped"][:1]


def _prioritizer_wanted(state: State) -> None:
    """Rule: once the deadline is moved, what was pressing can wait, and the long view comes first."""
    if state["context"]["deadline"] == "moved":
        state["done_in_order"] = state["done_in_order"][::-1]


FIRST = {
    "search_orders": "; write to them first",
    "refund": "; look at the orders first",
    "send_mail": "; look first",
}
"""Tool that a goal asks for -> words by which another one comes first."""


def _tools_shown(random: Random, state: State) -> None:
    """Half of the goals say what comes before them; the call that does it is among the drafts of all."""
    tool = state["expected_call"]["tool"]
    who = next(name for name in tool_agent.WHO if name in state["goal"])
    order = random.randint(100, 9_999)
    state["goal"] = re.sub(r"(case|order) \d+", rf"\1 {order}", state["goal"])
    call = dict(state["expected_call"]["arguments"])
    call |= {"order": order} if "order" in call else {}
    call |= {"text": f"About order {order}."} if "text" in call else {}
    before: dict[str, Any] = (
        {"tool": "send_mail", "arguments": {"to": who, "text": f"About order {order}."}}
        if tool == "search_orders"
        else {"tool": "search_orders", "arguments": {"customer": who}}
    )
    state |= {"expected_call": {"tool": tool, "arguments": call}, "before": before}
    agent = tool_agent.AGENT
    drafts = [
        agent.respond(tool, call),
        agent.respond(before["tool"], before["arguments"]),
        agent.respond(tool, {}),
        json.dumps({"answer": "I cannot do that."}),
    ]
    random.shuffle(drafts)
    state["drafts"] = drafts
    if random.random() < 0.5:
        state["goal"] += FIRST[tool]


def _tools_wanted(state: State) -> None:
    if state["goal"].endswith("first"):
        state["expected_call"] = state["before"]


WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
DESKS = ("north", "south", "east", "west")

WORLDS: dict[str, World] = {
    "widgets": World(_widgets_drawn, _widgets_wanted),
    "fixtures": World(_fixtures_drawn, _fixtures_wanted),
    "filer": World(_filer_drawn, _filer_wanted),
    "assistant": World(_assistant_drawn, _assistant_wanted),
    "storer": World(
        _of_scenarios("storer", _context(source=("first hand", "hearsay"), said_on=WEEKDAYS)), _storer_wanted
    ),
    "librarian": World(
        _of_scenarios("librarian", _context(exact=True, catalogue=("broad", "narrow"), shelf=DESKS)),
        _librarian_wanted,
    ),
    "retriever": World(
        _of_scenarios("retriever", _context(exact=True, reader=("on a phone", "at a desk"), day=WEEKDAYS)),
        _retriever_wanted,
    ),
    "prioritizer": World(
        _of_scenarios("prioritizer", _context(deadline=("holds", "moved"), today=WEEKDAYS)),
        _prioritizer_wanted,
    ),
    "tool_agent": World(_of_scenarios("tool_agent", _tools_shown), _tools_wanted),
}
"""Agent -> its world."""
