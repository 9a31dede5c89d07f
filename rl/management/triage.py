"""A synthetic task for a real language model: a shop's triage of messages, with an app's errors and corrections."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

QUEUES = ("billing", "shipping", "returns", "technical", "account")
ITEMS = (
    "espresso machine",
    "rain jacket",
    "desk lamp",
    "road bike",
    "blender",
    "headphones",
    "kettle",
    "tent",
)
ANGER = ("This is the third time I write! ", "I am really angry. ", "Urgent: ", "I need an answer today. ")
GREETINGS = ("Hello, ", "Hi, this is Hana. ", "Good morning. ", "Dear team, ", "", "")
SYSTEM = (
    'You sort messages of customers of a shop. Answer with JSON: {"queue": one of billing, shipping, returns, '
    'technical, account, "urgent": true or false}. Urgent: anger or a loss of money.'
)
ERRORS = 0.41
"""Share of the app's answers that are wrong and corrected."""

Wordings = Mapping[str, tuple[str, ...]]

TAUGHT: Wordings = {
    "billing": (
        "I was charged twice for my {item}.",
        "The invoice for the {item} shows the wrong amount.",
        "Why is there a fee of {n} euros on my card?",
        "My credit card was declined when I paid for the {item}.",
        "The discount code was not taken off the price of the {item}.",
    ),
    "shipping": (
        "Where is my {item}? It should have arrived {n} days ago.",
        "The tracking number for the {item} does not work.",
        "Can you deliver the {item} to another address?",
        "My parcel with the {item} has been stuck for {n} days.",
        "How long does delivery of the {item} take?",
    ),
    "returns": (
        "I want to send the {item} back.",
        "The {item} is the wrong colour, can I exchange it?",
        "How do I return the {item} after {n} days?",
        "I would like my money back for the {item}, I do not like it.",
        "You sent me the wrong size of {item}, please swap it.",
    ),
    "technical": (
        "The {item} does not switch on.",
        "My {item} makes a strange noise after {n} minutes.",
        "The {item} broke after {n} weeks.",
        "How do I clean the filter of the {item}?",
        "There is an error E{n} on the display of the {item}.",
    ),
    "account": (
        "I cannot log in to the shop.",
        "Please change my email address.",
        "I forgot my password and the mail never comes.",
        "Delete all data you have about me.",
        "How do I unsubscribe from the newsletter?",
    ),
}
"""Wordings in the training data."""

NEW: Wordings = {
    "billing": ("Money for the {item} left my bank twice.", "You took {n} euros too much from me."),
    "shipping": ("Still waiting for the {item}, nothing came so far.", "My {item} seems lost on its way."),
    "returns": (
        "I changed my mind about the {item}, take it back.",
        "The {item} does not fit, I need a bigger one.",
    ),
    "technical": ("My {item} is dead, no light at all.", "Which button resets the {item}?"),
    "account": (
        "The site says my user does not exist.",
        "I have a new phone number, put it in my profile.",
    ),
}
"""Wordings that are not in the training data."""


@dataclass(frozen=True)
class Ticket:
    """A customer's message and the right answer to it."""

    text: str
    queue: str
    urgent: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]

    @property
    def answer(self) -> str:
        return json.dumps({"queue": self.queue, "urgent": self.urgent})

    def is_right(self, response: str) -> bool:
        """True for the right answer, with any white space."""
        try:
            return bool(json.loads(response) == json.loads(self.answer))
        except ValueError:
            return False


def tickets(wordings: Wordings, *, seed: int) -> Iterator[Ticket]:
    """Endless tickets without repeated texts."""
    drawn, known = random.Random(seed), set()
    while True:
        queue = drawn.choice(QUEUES)
        text = drawn.choice(wordings[queue]).format(item=drawn.choice(ITEMS), n=drawn.randint(2, 60))
        urgent = drawn.random() < 0.35
        text = drawn.choice(GREETINGS) + (drawn.choice(ANGER) if urgent else "") + text
        if text not in known:
            known.add(text)
            yield Ticket(text, queue, urgent)


def decision_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Decisions of an app whose model errs, with thumbs and corrections, as rows for `import_feedback`."""
    drawn, rows = random.Random(seed), []
    for number, ticket in zip(range(count), tickets(TAUGHT, seed=seed), strict=False):
        given = ticket
        if drawn.random() < ERRORS:
            other = [queue for queue in QUEUES if queue != ticket.queue]
            given = Ticket(ticket.text, drawn.choice(other), ticket.urgent)
        row: dict[str, Any] = {
            "id": f"triage-{number}",
            "agent": "triage",
            "prompt": ticket.messages,
            "response": given.answer,
            "thumb": "up" if given == ticket else "down",
        }
        if given != ticket:
            row["correction"] = ticket.answer
        rows.append(row)
    return rows
