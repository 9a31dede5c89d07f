"""Agent `filer`: which folder does a document belong in?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rl.agents.base import (
    Agent,
    ChoiceAgent,
    JsonObject,
    OutcomeScale,
    RewardFacts,
    Scenario,
    State,
    World,
    distinct_scenarios,
    state_text,
    taste_of,
)

# Two sensible ways to file anything: by what it is and when, or by whom it is from. Liked most first.
BY_KIND = ("{Kind}s/{year}", "Archive {year}", "Office/{Kind}s")
BY_PARTNER = ("Partners/{partner}", "{partner}/{Kind}s", "Mail {partner}")

SAYINGS = (
    "{kind} {number} from {partner}, {year}",
    "{partner}: {kind} {number} of {month} {year}",
    "scan of a {kind} by {partner}, {month} {year}, no. {number}",
    "{month} {year} {kind} no. {number}, sender {partner}",
)
PARTNERS = (
    "Hartmann",
    "Oakwood",
    "Nordlicht",
    "Silva",
    "Meridian",
    "Kestrel",
    "Tanaka",
    "Bluewater",
    "Lindgren",
    "Orchard",
)
MONTHS = ("January", "March", "April", "June", "September", "November")
YEARS = (2022, 2023, 2024, 2025)
STATES = ("open", "disputed", "paid", "closed")
SIZES = (1, 2, 3, 40, 60, 90)

# The taste of one made-up team: per kind of document, whether it is filed by kind and year or by partner.
TASTE: dict[str, str] = {
    "invoice": "by kind",
    "receipt": "by kind",
    "contract": "by partner",
    "letter": "by partner",
    "report": "by kind",
    "offer": "by partner",
}

PER_KIND = 60


@dataclass(frozen=True)
class Filer(ChoiceAgent):
    """Chooses the folder for a document.

    State: "document": text; "folders": names; "context": "status", "pages". Never shown: "filed_in", the folder or
    list of folders where the document ended up, which is the ground truth. For the simulated rater alone: "kind",
    "partner", "year", "wanted".
    Response: {"folder": "<name>"}.
    """

    def ground_truth(self, state: State) -> list[str] | None:
        filed_in = state.get("filed_in")
        if not filed_in:
            return None
        return [self.respond(folder) for folder in ([filed_in] if isinstance(filed_in, str) else filed_in)]

    def scenarios(self) -> list[Scenario]:
        made = distinct_scenarios(self.slug, TASTE, PER_KIND, state_random, lambda state: state["document"])
        return [replace(one, state={**one.state, "filed_in": best_folder(one.state)}) for one in made]

    def hidden_preference(self, state: State, response: str) -> float:
        """1, 0.9, 0.8 for the wanted way of filing, 0.2, 0.1, 0 for the other way; 0 for anything else."""
        if state_text(state, "kind", self.slug) not in TASTE:
            raise ValueError(f"filer: 'kind' must be one of {', '.join(TASTE)}; found {state['kind']!r}")
        state_text(state, "partner", self.slug)
        folder = self.option_chosen(state, response)
        return 0.0 if folder is None else folder_value(state, folder)


def folder_value(state: Mapping[str, Any], folder: str) -> float:
    """Value of a folder for the simulated team, in [0, 1]."""
    by_kind, by_partner = _folders(state)
    wants_kind = state.get("wanted", TASTE[state["kind"]]) == "by kind"
    wanted, unwanted = (by_kind, by_partner) if wants_kind else (by_partner, by_kind)
    return taste_of(folder, wanted, unwanted)


def best_folder(state: Mapping[str, Any]) -> str:
    """The listed folder that the made-up team likes best."""
    return max(state["folders"], key=lambda folder: folder_value(state, folder))


def _folders(state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Every folder by kind, and every folder by partner, liked most first."""
    names = {"Kind": state["kind"].capitalize(), "partner": state["partner"], "year": state.get("year")}
    return [name.format(**names) for name in BY_KIND], [name.format(**names) for name in BY_PARTNER]


def state_random(random: Random, kind: str) -> JsonObject:
    """A made-up state: two folders by kind and two by partner, all sensible, in random order."""
    partner, year = random.choice(PARTNERS), random.choice(YEARS)
    state: JsonObject = {
        "document": random.choice(SAYINGS).format(
            kind=kind,
            partner=partner,
            year=year,
            month=random.choice(MONTHS),
            number=random.randint(100, 999),
        ),
        "kind": kind,
        "partner": partner,
        "year": year,
        "context": {
            "status": random.choice(STATES),
            "pages": random.choice(SIZES),
        },
    }
    by_kind, by_partner = _folders(state)
    listed = random.sample(by_kind, 2) + random.sample(by_partner, 2)
    random.shuffle(listed)
    return {**state, "folders": listed}


def _draw_state(agent: Agent, random: Random) -> JsonObject:
    state = state_random(random, random.choice(tuple(TASTE)))
    return state | {"filed_in": best_folder(state)}


def _situation_answer(state: JsonObject) -> None:
    """By partner while the matter is open, by kind once it is closed."""
    state["wanted"] = "by partner" if state["context"]["status"] in ("open", "disputed") else "by kind"
    state["filed_in"] = best_folder(state)


AGENT = Filer(
    slug="filer",
    title="Filer",
    description="Chooses the folder a document belongs in.",
    system_prompt="Pick one listed folder for the document. Answer in JSON.",
    suggested_tags=("wrong partner", "wrong year", "too general", "hard to find again"),
    max_new_tokens=24,
    preview="folder",
    reward_facts=RewardFacts(
        outcomes={
            "file_moved_back": OutcomeScale(good=0, bad=1),
            "file_found_again": OutcomeScale(good=1, bad=0, horizon="strategic"),
        }
    ),
    asked_key="document",
    answer_key="folder",
    options_key="folders",
    world=World(_draw_state, _situation_answer),
)
