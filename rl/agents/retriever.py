"""Agent `retriever`: which passages help to answer a question?"""

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
from rl.agents.worlds import WEEKDAYS, draw_lines, scenarios_world

# Topic -> (how people ask, what a passage that helps says).
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "refunds": (
        ("how long does a refund take", "when do I get my money back"),
        ("Refunds reach the card within five days.", "A refund is started on the day the parcel is back."),
    ),
    "passwords": (
        ("how do I set a new password", "I cannot sign in any more"),
        (
            "A new password is set under Settings, Security.",
            "After five wrong tries an account rests an hour.",
        ),
    ),
    "delivery": (
        ("where is my parcel", "how long does delivery take"),
        ("Parcels leave the depot at noon.", "Delivery takes two working days, islands four."),
    ),
    "invoices": (
        ("where do I find my invoice", "can the invoice name my company"),
        ("Invoices lie under Billing for ten years.", "A company's name is added before the order is sent."),
    ),
    "data": (
        ("how do I export my data", "who can see my data"),
        ("Export writes all your data to one file.", "Your data is seen by you and by whom you invite."),
    ),
    "plans": (
        ("how do I change my plan", "what does the small plan hold"),
        ("A plan is changed at once and charged by the day.", "The small plan holds three projects."),
    ),
}
SAYINGS = ("{question}?", "a customer asks: {question}", "{question}, please", "quick one: {question}")
PER_TOPIC = 16


@dataclass(frozen=True)
class Retriever(ListAgent):
    """Picks the passages that help to answer.

    State: "question": text; "passages": their names; "descriptions": name -> the passage itself; "context". "helped"
    (never shown): the passages that helped, if known. Response: {"passages": ["<name>", ...]}, one to eight of them, in
    any order.
    """

    def scenarios(self) -> list[Scenario]:
        scenario_list = []
        for topic, (questions, helping) in TOPICS.items():
            random = Random(f"retriever/{topic}")
            keys: set[tuple[str, tuple[str, ...]]] = set()
            while len(keys) < PER_TOPIC:
                texts = list(helping)
                texts += [
                    random.choice(TOPICS[other][1])
                    for other in random.sample(sorted(set(TOPICS) - {topic}), 3)
                ]
                names = [f"p{number}" for number in random.sample(range(1, 10), 5)]
                question = random.choice(SAYINGS).format(question=random.choice(questions))
                order = random.sample(range(5), 5)
                if (question, tuple(names)) in keys:
                    continue
                keys.add((question, tuple(names)))
                state = {
                    "question": question,
                    "passages": [names[i] for i in order],
                    "descriptions": {names[i]: texts[i] for i in order},
                    "helped": names[:2],
                    "drafts": drafts_of(random, names[:2], names[2:]),
                }
                scenario_list.append(Scenario(f"{topic}-{len(keys):03d}", state, tags=(topic,)))
        return scenario_list


def _situation_answer(state: JsonObject) -> None:
    """On a phone only the first passage that helps."""
    if state["context"]["reader"] == "on a phone":
        state["helped"] = state["helped"][:1]


AGENT = Retriever(
    slug="retriever",
    title="Retriever",
    description="Picks the passages that help to answer a question.",
    system_prompt="Pick the listed passages that help to answer. Answer in JSON.",
    suggested_tags=("a passage is missing", "does not help", "says the same twice"),
    max_new_tokens=64,
    preview="list",
    asked_key="question",
    options_key="passages",
    answer_key="passages",
    truth_key="helped",
    max_items=8,
    reward_facts=RewardFacts(
        outcomes={
            "passage_cited": OutcomeScale(good=1, bad=0),
            "question_asked_again": OutcomeScale(good=0, bad=1, horizon="strategic"),
        }
    ),
    world=scenarios_world(
        draw_lines(exact=True, reader=("on a phone", "at a desk"), day=WEEKDAYS), _situation_answer
    ),
)
