"""Agent `librarian`: under which subjects is a text to be found again?"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rl.agents.base import (
    JsonObject,
    OutcomeScale,
    RewardFacts,
    Scenario,
)
from rl.agents.lists import ListAgent, drafts_of
from rl.agents.worlds import DESKS, draw_lines, scenarios_world

# Subject -> how a text betrays it.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "travel": ("the train to Porto", "two nights in a small hotel", "the late ferry"),
    "money": ("what it cost in the end", "the yearly fee", "a refund of 40 euros"),
    "health": ("the check-up in spring", "how the knee feels", "sleep and coffee"),
    "garden": ("when to sow peas", "the apple tree", "slugs in the salad"),
    "cooking": ("the soup with fennel", "bread without kneading", "how long to rest the dough"),
    "repairs": ("the dripping tap", "a loose hinge", "which screws to take"),
    "music": ("the second movement", "tuning the old guitar", "a choir on Tuesday"),
    "school": ("the parents' evening", "a test on fractions", "the lost gym bag"),
}
TEXTS = ("notes on {one} and {two}", "{one}, and then {two}", "a letter about {one}; also {two}")
SCENARIOS = 120


@dataclass(frozen=True)
class Librarian(ListAgent):
    """Picks the subjects a text belongs under.

    State: "text": what is to be catalogued; "subjects": names; "descriptions"; "context". "catalogued_under" (never
    shown): the right subjects, if known. Response: {"subjects": ["<name>", ...]}, one to five of them, in any order.
    """

    def scenarios(self) -> list[Scenario]:
        random = Random("librarian")
        scenario_list: list[Scenario] = []
        seen: set[str] = set()
        while len(scenario_list) < SCENARIOS:
            chosen = random.sample(tuple(SUBJECTS), 5)
            right = chosen[:2]
            one, two = (random.choice(SUBJECTS[name]) for name in right)
            text = random.choice(TEXTS).format(one=one, two=two)
            if text in seen:
                continue
            seen.add(text)
            state = {
                "text": text,
                "subjects": random.sample(chosen, 5),
                "catalogued_under": right,
                "drafts": drafts_of(random, right, chosen[2:]),
            }
            scenario_list.append(Scenario(f"text-{len(scenario_list) + 1:03d}", state, tags=tuple(right)))
        return scenario_list


def _situation_answer(state: JsonObject) -> None:
    """A narrow catalogue keeps only the first subject."""
    if state["context"]["catalogue"] == "narrow":
        state["catalogued_under"] = state["catalogued_under"][:1]


AGENT = Librarian(
    slug="librarian",
    title="Librarian",
    description="Picks the subjects under which a text is found again.",
    system_prompt="Pick the listed subjects the text belongs under. Answer in JSON.",
    suggested_tags=("a subject is missing", "one too many", "too general", "wrong subject"),
    max_new_tokens=64,
    preview="list",
    asked_key="text",
    options_key="subjects",
    answer_key="subjects",
    truth_key="catalogued_under",
    max_items=5,
    reward_facts=RewardFacts(
        outcomes={
            "subject_changed": OutcomeScale(good=0, bad=1),
            "found_by_subject": OutcomeScale(good=1, bad=0, horizon="strategic"),
        }
    ),
    world=scenarios_world(
        draw_lines(exact=True, catalogue=("broad", "narrow"), shelf=DESKS), _situation_answer
    ),
)
