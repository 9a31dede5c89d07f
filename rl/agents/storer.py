"""Agent `storer`: where is a piece of information to be kept, or is it not worth keeping?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

from rl.agents.base import (
    ChoiceAgent,
    JsonObject,
    OutcomeScale,
    RewardFacts,
    Scenario,
    State,
    state_text,
)
from rl.agents.worlds import WEEKDAYS, draw_lines, scenarios_world

# Place -> (what it is for, facts that belong there).
PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "profile": (
        "what stays true of a person",
        (
            "{who} writes left-handed",
            "{who} speaks Danish",
            "{who} cannot eat nuts",
            "{who} lives in {place}",
        ),
    ),
    "calendar": (
        "what happens at a time",
        ("{who} is away on {day}", "the review moves to {day}", "{who} visits {place} on {day}"),
    ),
    "project notes": (
        "what was decided in the work",
        ("the report drops chapter two", "{who} takes over the index", "we ship to {place} first"),
    ),
    "nowhere": (
        "small talk and what is known already",
        ("{who} says good morning", "it rains in {place}", "{who} laughs about {day}"),
    ),
}
PEOPLE = ("Ines", "Jonas", "Priya", "Tom", "Aiko", "Lena")
CITIES = ("Ghent", "Oslo", "Turin", "Cork")
DAYS = ("Monday", "Tuesday", "Thursday", "Friday")
PER_PLACE = 30


@dataclass(frozen=True)
class Storer(ChoiceAgent):
    """Chooses the place where a fact is kept.

    State: "fact": text; "places": names, one of which may mean "not kept"; "descriptions": name -> what it is for;
    "context". "kept_in" (never shown): the right place, where that is known.
    Response: {"place": "<name>"}.
    """

    def ground_truth(self, state: State) -> list[str] | None:
        kept_in = state.get("kept_in")
        return [self.respond(kept_in)] if isinstance(kept_in, str) and kept_in else None

    def scenarios(self) -> list[Scenario]:
        scenario_list = []
        for place, (_, sayings) in PLACES.items():
            random = Random(f"storer/{place}")
            every = sorted(
                {
                    saying.format(who=who, place=city, day=day)
                    for saying, who, city, day in product(sayings, PEOPLE, CITIES, DAYS)
                }
            )
            for number, fact in enumerate(random.sample(every, min(PER_PLACE, len(every))), start=1):
                state = {
                    "fact": fact,
                    "places": random.sample(tuple(PLACES), len(PLACES)),
                    "descriptions": {name: what for name, (what, _) in PLACES.items()},
                    "kept_in": place,
                }
                key = f"{place.replace(' ', '-')}-{number:03d}"
                scenario_list.append(Scenario(key, state, tags=(place,)))
        return scenario_list

    def hidden_preference(self, state: State, response: str) -> float:
        """1 for the right place, 0 for another, 0.3 for keeping what belongs nowhere."""
        place, right = self.option_chosen(state, response), state_text(state, "kept_in", self.slug)
        if place is None:
            return 0.0
        return 1.0 if place == right else 0.3 if right == "nowhere" else 0.0


def _situation_answer(state: JsonObject) -> None:
    """Facts from hearsay are not kept."""
    if state["context"]["source"] == "hearsay":
        state["kept_in"] = "nowhere"


AGENT = Storer(
    slug="storer",
    title="Storer",
    description="Chooses where a piece of information is kept, or that it is not.",
    system_prompt="Pick the listed place that keeps the fact. Answer in JSON.",
    suggested_tags=("not worth keeping", "should be kept", "wrong place", "known already"),
    max_new_tokens=24,
    preview="list",
    asked_key="fact",
    answer_key="place",
    options_key="places",
    reward_facts=RewardFacts(
        outcomes={
            "fact_moved": OutcomeScale(good=0, bad=1),
            "fact_used": OutcomeScale(good=1, bad=0, horizon="strategic"),
        }
    ),
    world=scenarios_world(draw_lines(source=("first hand", "hearsay"), said_on=WEEKDAYS), _situation_answer),
)
