"""Agent `filer`: which folder does a document belong in?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from rl.agents.base import JsonObject, OutcomeScale, RewardFacts, State, World, state_text
from rl.agents.worlds import TwoKinds, draw_any, two_of_each

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


@dataclass(frozen=True)
class Filer(TwoKinds):
    """Chooses the folder for a document.

    State: "document": text; "folders": names; "context": "status", "pages". Never shown: "filed_in", the folder or
    list of folders where the document ended up, which is the ground truth; "kind", a key of TASTE; "partner"; "year";
    "wanted", "by kind" or "by partner".
    Response: {"folder": "<name>"}.
    """

    def ground_truth(self, state: State) -> list[str] | None:
        filed_in = state.get("filed_in")
        if not filed_in:
            return None
        return [self.respond(folder) for folder in ([filed_in] if isinstance(filed_in, str) else filed_in)]

    def kinds(self, state: State) -> dict[str, Iterable[str]]:
        state_text(state, "partner", self.slug)
        names = {"Kind": state["kind"].capitalize(), "partner": state["partner"], "year": state.get("year")}
        return {
            "by kind": [name.format(**names) for name in BY_KIND],
            "by partner": [name.format(**names) for name in BY_PARTNER],
        }

    def best_folder(self, state: State) -> str:
        """The listed folder that the made-up team likes best."""
        return max(state["folders"], key=lambda folder: self.worth(state, folder))

    def draw(self, random: Random, kind: str) -> JsonObject:
        """Two folders by kind and two by partner, all sensible."""
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
            "context": {"status": random.choice(STATES), "pages": random.choice(SIZES)},
        }
        state["folders"] = two_of_each(random, *self.kinds(state).values())
        return {**state, "filed_in": self.best_folder(state)}


def _situation_answer(state: JsonObject) -> None:
    """By partner while the matter is open, by kind once it is closed."""
    state["wanted"] = "by partner" if state["context"]["status"] in ("open", "disputed") else "by kind"
    state["filed_in"] = AGENT.best_folder(state)


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
    group_key="kind",
    taste=TASTE,
    world=World(draw_any, _situation_answer),
)
