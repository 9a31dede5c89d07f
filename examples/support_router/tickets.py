"""Tickets of a web shop with the team that solved each in the end: what a help desk's export would hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

TEAMS = ("billing", "delivery", "returns", "technical")

PROBLEMS = {
    "billing": (
        "you charged my card twice",
        "the invoice shows the wrong VAT",
        "my voucher was not deducted",
    ),
    "delivery": (
        "the parcel has not arrived",
        "tracking stopped three days ago",
        "it went to my old address",
    ),
    "returns": (
        "it does not fit, I want to send it back",
        "where do I print the return label",
        "the lamp came broken and I want another",
    ),
    "technical": ("the app crashes at checkout", "I cannot log in any more", "the reset mail never comes"),
}
OPENINGS = ("Hello,", "Hi,", "Good morning,", "Urgent:", "Second mail about this:")
THINGS = ("the blue lamp", "a standing desk", "two chairs", "the reading light", "a shelf")


@dataclass(frozen=True)
class Ticket:
    """One customer's message, and who solved it."""

    customer: str
    text: str
    solved_by: str


def tickets(count: int, seed: int = 0) -> list[Ticket]:
    """So many tickets, no text twice, in an order drawn by the seed; another seed draws others."""
    drawn = [
        Ticket(f"customer-{number % 40}", f"{opening} {problem}. It is about {thing}, order {number}.", team)
        for number, (team, opening, thing, n) in enumerate(
            itertools.product(TEAMS, OPENINGS, THINGS, range(3)), start=1000 * (seed + 1)
        )
        for problem in [PROBLEMS[team][n]]
    ]
    return Random(seed).sample(drawn, count)
