"""Agent `fixtures`: which prepared fixture (a described, ready-made content block) suits a scenario?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import ChoiceAgent, Message, Scenario, State, state_text

# Per situation: the ways to say it, and the fixtures that suit it with their descriptions: (brief, guided).
Described = dict[str, str]
SITUATIONS: dict[str, tuple[tuple[str, ...], Described, Described]] = {
    "empty": (
        ("the {thing} list is empty", "there are no {thing}s yet", "nobody has added a {thing}"),
        {"hint_line": "one line of help", "add_button": "a single button", "blank_note": "a short note"},
        {"starter_tour": "steps with pictures", "sample_data": "a filled example", "video_card": "a short film"},
    ),
    "failed": (
        ("saving the {thing} failed", "the {thing} could not be sent", "an error stopped the {thing}"),
        {"retry_bar": "try again at once", "toast": "a message that fades", "red_label": "marks the field"},
        {"repair_guide": "how to fix it", "error_page": "what went wrong", "support_form": "write to a person"},
    ),
    "waiting": (
        ("the {thing} takes a while to load", "the {thing} is still on its way", "the {thing} is being made"),
        {"spinner": "a small circle", "thin_bar": "progress in a line", "dots": "three moving dots"},
        {"step_list": "each stage by name", "preview_frame": "grey shapes of it", "tips_panel": "reading meanwhile"},
    ),
    "news": (
        ("there is a new way to share a {thing}", "the {thing} page was improved", "a {thing} can now be copied"),
        {"blue_dot": "a quiet marker", "ribbon": "one word on top", "menu_badge": "a number in the menu"},
        {"walkthrough": "a guided look", "release_card": "text and picture", "demo_box": "try it right here"},
    ),
    "limit": (
        ("the free {thing} plan is used up", "no more {thing}s fit the plan", "the {thing} limit is near"),
        {"meter": "used and left", "lock_icon": "shows what is closed", "plan_line": "one line on plans"},
        {"plan_table": "all plans side by side", "advice_panel": "what others do", "cost_helper": "works out a price"},
    ),
    "not_found": (
        ("the search found no {thing}", "no {thing} matches these words", "the {thing} link leads nowhere"),
        {"reset_link": "clear the search", "spell_hint": "a likely word", "home_button": "back to start"},
        {"search_guide": "how to search well", "similar_grid": "close matches", "ask_panel": "describe what you need"},
    ),
}  # fmt: skip
THINGS = (
    "report", "invoice", "project", "photo", "contact", "order", "message", "booking", "course", "recipe",
)  # fmt: skip
READERS = ("first visit", "new member", "daily user", "team lead")
MOODS = ("calm", "curious", "in a hurry", "on the move")

# The taste of one made-up team: per situation, the kind of fixture it wants.
TASTE: dict[str, str] = {
    "empty": "brief",
    "failed": "guided",
    "waiting": "brief",
    "news": "brief",
    "limit": "guided",
    "not_found": "guided",
}

PER_SITUATION = 60


@dataclass(frozen=True)
class Fixtures(ChoiceAgent):
    """Chooses a fixture for a scenario of an app.

    State: "scenario": text; "fixtures": names to choose from, in the order shown; "descriptions": name -> what the
    fixture is, for any of them; "context": what else is known, name -> text, one prompt line each (built in:
    "reader", "mood"); "situation" (only for the simulated rater, never shown): a key of SITUATIONS; "wanted"
    (likewise): the kind that is wanted, where the situation does not say.
    Response: {"fixture": "<name>"}.
    """

    def render(self, state: State) -> list[Message]:
        context, descriptions = state.get("context") or {}, state.get("descriptions") or {}
        for key, value in (("context", context), ("descriptions", descriptions)):
            if not isinstance(value, Mapping):
                raise ValueError(f"fixtures: {key!r} must map a name to a text, found {value!r}")
        lines = [f"scenario: {state_text(state, 'scenario', self.slug)}"]
        lines += [f"{name}: {value}" for name, value in context.items()]
        lines.append("fixtures:")
        for name in self.options(state):
            lines.append(f"{name}: {descriptions[name]}" if name in descriptions else name)
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": "\n".join(lines)},
        ]

    def scenarios(self) -> list[Scenario]:
        made: list[Scenario] = []
        for situation in SITUATIONS:
            random = Random(f"fixtures/{situation}")
            seen: set[tuple[str, str, str]] = set()
            while len(seen) < PER_SITUATION:
                state = state_random(random, situation)
                shown = (state["scenario"], state["context"]["reader"], state["context"]["mood"])
                if shown in seen:
                    continue
                seen.add(shown)
                made.append(Scenario(f"{situation}-{len(seen):03d}", state, tags=(situation,)))
        return made

    def hidden_preference(self, state: State, response: str) -> float:
        """1, 0.9, 0.8 for the wanted kind of fixture, 0.2, 0.1, 0 for the other kind; 0 for anything else."""
        fixture = self.option_chosen(state, response)
        situation = state_text(state, "situation", self.slug)
        if situation not in SITUATIONS:
            known = ", ".join(SITUATIONS)
            raise ValueError(f"fixtures: 'situation' must be one of {known}; found {situation!r}")
        _, brief, guided = SITUATIONS[situation]
        kind = state.get("wanted", TASTE[situation])
        wanted, unwanted = (brief, guided) if kind == "brief" else (guided, brief)
        if fixture in wanted:
            return (1.0, 0.9, 0.8)[list(wanted).index(fixture)]
        if fixture in unwanted:
            return (0.2, 0.1, 0.0)[list(unwanted).index(fixture)]
        return 0.0


def state_random(random: Random, situation: str) -> dict[str, Any]:
    """A made-up state: two brief and two guided fixtures, all suitable, in random order."""
    sayings, brief, guided = SITUATIONS[situation]
    listed = random.sample(tuple(brief), 2) + random.sample(tuple(guided), 2)
    random.shuffle(listed)
    known = brief | guided
    return {
        "scenario": random.choice(sayings).format(thing=random.choice(THINGS)),
        "situation": situation,
        "context": {
            "reader": random.choice(READERS),
            "mood": random.choice(MOODS),
        },
        "fixtures": listed,
        "descriptions": {name: known[name] for name in listed},
    }


def build_fixture_dpo_pairs(
    entries: Iterable[Mapping[str, Any]], fixture_descriptions: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Preference pairs from rated fixtures: up over down within a scenario, see `ChoiceAgent.dpo_pairs`.

    entries: {"entry_id", "scenario", "fixture", "rating": "up" | "down", "tags"?, "notes"?}, where "scenario" is
    the key of a built-in scenario, or else the scenario's own text, for which every fixture in
    fixture_descriptions (name -> description, in that order) can be chosen.
    """
    built_in = {scenario.key: scenario.state for scenario in AGENT.scenarios()}

    def state_of(scenario: str) -> State:
        if scenario in built_in:
            return built_in[scenario]
        if not fixture_descriptions:
            raise ValueError(
                f"scenario {scenario!r}: expected fixture descriptions to choose from, found none"
            )
        return {
            "scenario": scenario,
            "fixtures": list(fixture_descriptions),
            "descriptions": dict(fixture_descriptions),
        }

    return AGENT.dpo_pairs(entries, state_of)


AGENT = Fixtures(
    slug="fixtures",
    title="Fixtures",
    description="Chooses the ready-made content block to show in a scenario of an app.",
    system_prompt="Pick one listed fixture for the scenario. Answer in JSON.",
    suggested_tags=("too long", "too short", "confusing", "wrong moment"),
    max_new_tokens=24,
    preview="fixture",
    answer_key="fixture",
    options_key="fixtures",
)
