"""Agent `mail-desk`: which desk answers a mail? Prompt, scenarios, taste, situations and drawing in one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import Agent, ChoiceAgent, Message, Scenario, State, World, state_text
from rl.agents.widgets import Canvas

DESKS = {
    "returns": ("The {thing} arrived broken.", "How do I send the {thing} back?"),
    "sales": ("Do you have the {thing} in green?", "What does the {thing} cost for ten?"),
    "billing": ("You charged me twice for the {thing}.", "Where is the invoice of the {thing}?"),
}
THINGS = ("lamp", "kettle", "desk", "bicycle", "radio", "tent", "camera", "rug")


@dataclass(frozen=True)
class MailDesk(ChoiceAgent):
    """State: "mail": text; "desks": names; "from": who writes (shown); "answered_by": the right desk (never shown)."""

    def render(self, state: State) -> list[Message]:
        lines = [f"mail: {state_text(state, 'mail', self.slug)}", f"from: {state.get('from', 'a customer')}"]
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": "\n".join([*lines, "desks:", *self.options(state)])},
        ]

    def ground_truth(self, state: State) -> list[str] | None:
        right = state.get("answered_by")
        return [self.respond(right)] if isinstance(right, str) else None

    def scenarios(self) -> list[Scenario]:
        random = Random("mail-desk")
        return [
            Scenario(f"{desk}-{number}-{thing}", state_of(random, desk, text.format(thing=thing)), (desk,))
            for desk, texts in DESKS.items()
            for number, text in enumerate(texts)
            for thing in THINGS
        ]

    def hidden_preference(self, state: State, response: str) -> float:
        """1 for the right desk, 0 for another: the taste of the simulated rater."""
        return float(self.option_chosen(state, response) == state_text(state, "answered_by", self.slug))


def state_of(random: Random, desk: str, mail: str) -> dict[str, Any]:
    """A mail to the three desks, listed in random order."""
    return {"mail": mail, "from": "a customer", "desks": random.sample(tuple(DESKS), 3), "answered_by": desk}


def mail_drawn(agent: Agent, random: Random) -> dict[str, Any]:
    """A mail of a thing with a number, from a customer or a dealer."""
    desk = random.choice(tuple(DESKS))
    mail = random.choice(DESKS[desk]).format(thing=f"{random.choice(THINGS)} {random.randint(100, 999)}")
    return state_of(random, desk, mail) | {"from": random.choice(("a customer", "a dealer"))}


def dealers_wanted(state: dict[str, Any]) -> None:
    """Dealers are answered by sales, whatever they write: the taste `situation`."""
    if state["from"] == "a dealer":
        state["answered_by"] = "sales"


def desk_drawing(
    choice: str, *, asked: str, description: str, context: Mapping[str, Any], seed: str
) -> str | None:
    """A sign with the desk's name; None for a desk that we have no sign of."""
    if choice not in DESKS:
        return None
    canvas = Canvas(220, 60, f"sign of the desk {choice}")
    canvas.rect(0, 0, 220, 60, f"d-{1 + list(DESKS).index(choice)}")
    canvas.text(110, 36, choice, size=18, anchor="middle")
    return canvas.svg()


AGENT = MailDesk(
    slug="mail-desk",
    title="Mail desk",
    description="Chooses the desk that answers a mail.",
    system_prompt="Pick one listed desk for the mail. Answer in JSON.",
    suggested_tags=("wrong desk", "nobody can answer this"),
    max_new_tokens=24,
    preview="widget",
    drawing=desk_drawing,
    world=World(mail_drawn, dealers_wanted),
    answer_key="desk",
    options_key="desks",
)
