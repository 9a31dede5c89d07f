"""Tickets of a made-up help desk, whose queue is a choice: agent, prompts, and rows of each kind of feedback."""

import dataclasses
from random import Random
from typing import Any

import numpy as np

from rl.agents import AGENTS
from rl.linear.model import CLOSED, LinearPolicy

BOT = dataclasses.replace(AGENTS["assistant"], slug="tickets")
QUEUES = ("billing", "network", "accounts")
SAYINGS = {
    "billing": ("the invoice is wrong", "charged twice", "a refund please"),
    "network": ("the router blinks", "no signal here", "packets get lost"),
    "accounts": ("my password is gone", "locked out again", "a new username"),
}


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tickets(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """(text, the right queue), each text once."""
    random = Random(seed)
    found = []
    for number in range(count):
        queue = QUEUES[number % 3]
        name = "".join(
            "abcdefghij"[int(digit)] for digit in str(number)
        )  # a number would make them near-identical
        found.append((f"{random.choice(SAYINGS[queue])}, {random.choice('abcdefgh')} {name}", queue))
    return found


def rows_of(kind: str, count: int = 60) -> list[dict[str, Any]]:
    random, rows = Random(3), []
    for text, queue in tickets(count):
        other = random.choice([name for name in QUEUES if name != queue])
        row: dict[str, Any] = {"prompt": asked(text), "prompt_hash": text}
        if kind == "pairs":
            row |= {"chosen": queue, "rejected": other}
        elif kind == "corrections":
            row |= {"completion": queue}
        else:
            good = random.random() < 0.5
            row |= {"completion": queue if good else other, "score": 0.9 if good else 0.2}
        rows.append(row)
    return rows


def weighted(**changes: Any) -> LinearPolicy:
    facts: dict[str, Any] = {
        "agent": "tickets",
        "mode": CLOSED,
        "families": ("words",),
        "answers": ("a", "b"),
        "quoted": False,
        "rows": ("is a", "is b"),
        "columns": ("word hot", "word cold"),
        "weights": np.array([[2.0, 0.0], [0.5, 1.0]]),
        "bias": np.array([0.0, 0.25]),
    }
    return LinearPolicy(**{**facts, **changes})
