"""Comparison of what a thumb on one of several listed answers teaches: as itself, or as a pair with an unrated answer.

    python benchmarks/implied_pairs.py [--prompts 200,600] [--seeds 3] [--json]

A made-up desk of ten answers, of which each rater likes about a third on any ticket. One answer to each ticket gets a
thumb, one in twenty flipped; nobody rates the other nine. The same classifier learns from the scores alone, from pairs
and scores as `auto` has them, and from pairs that the thumbs imply with the scores that stand in none of them. The
figure: liked answers to 400 other tickets in %, over the seeds. Needs no base model. Prints a markdown table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from rl.agents.template import TemplateAgent  # noqa: E402
from rl.datasets.examples import examples_from_evidence, judgements_from_evidence  # noqa: E402
from rl.datasets.feedback_types import CandidatesEvidence, Evidence, RatingEvidence  # noqa: E402
from rl.datasets.pairs import Pair, pairs_from_evidence  # noqa: E402
from rl.linear.fit import fit  # noqa: E402

FLIPPED, TESTED = 0.05, 400
ANSWERS = tuple(
    f"Send it to {name}."
    for name in "billing sales support repairs legal press stores travel returns payroll".split()
)
FIELDS = {
    "customer": ("new", "regular", "partner", "staff"),
    "matter": ("invoice", "delivery", "contract", "broken part", "refund", "interview"),
    "country": ("DE", "FR", "PL", "ES"),
}
LEARNERS = ("scores alone", "pairs and scores", "implied pairs and other scores")


class Desk:
    """Tickets and the taste of those who rate them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.liked = {
            (name, value): {answer for answer in ANSWERS if self.random.random() < 0.3}
            for name in ("customer", "matter")
            for value in FIELDS[name]
        }

    def ticket(self, number: int) -> dict[str, str]:
        drawn = {name: self.random.choice(values) for name, values in FIELDS.items()}
        return {"number": str(10_000 + number), **drawn}

    def likes(self, ticket: dict[str, str], answer: str) -> bool:
        """True of about a third of the answers: each is liked for the matter, or for customer and matter together."""
        of_matter = answer in self.liked["matter", ticket["matter"]]
        return of_matter or (answer in self.liked["customer", ticket["customer"]] and answer < "Send it to q")


def prompt_of(ticket: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n".join(f"{name}: {value}" for name, value in ticket.items())}]


def rows_of(learner: str, evidence: Sequence[Evidence], prompts: dict[str, Any]) -> list[dict[str, Any]]:
    scores = examples_from_evidence(evidence, "scores", lambda _: "train").rows
    found: Sequence[Any] = scores
    if learner == LEARNERS[1]:
        found = judgements_from_evidence(evidence, lambda _: "train").rows
    elif learner == LEARNERS[2]:
        pairs = pairs_from_evidence(evidence, lambda _: "train", implied=True).rows
        paired = {(pair.prompt_hash, side) for pair in pairs for side in (pair.chosen, pair.rejected)}
        singles = [row for row in scores if (row.prompt_hash, row.content["completion"]) not in paired]
        found = [*pairs, *singles]
    return [
        {"prompt": prompts[row.prompt_hash], "prompt_hash": row.prompt_hash}
        | ({"chosen": row.chosen, "rejected": row.rejected} if isinstance(row, Pair) else dict(row.content))
        for row in found
    ]


def measure(count: int, seed: int) -> dict[str, Any]:
    desk, evidence, prompts = Desk(seed), [], {}
    rejected: list[bool] = []
    for number in range(count):
        ticket = desk.ticket(number)
        name = f"{number:064x}"
        prompts[name], answer = prompt_of(ticket), desk.random.choice(ANSWERS)
        likes = desk.likes(ticket, answer) != (desk.random.random() < FLIPPED)
        evidence.append(CandidatesEvidence(name, answer, tuple((one, None) for one in ANSWERS)))
        evidence.append(RatingEvidence(name, answer, float(likes)))
        rejected += [
            desk.likes(ticket, str(pair.rejected))
            for pair in pairs_from_evidence(evidence[-2:], lambda _: "train", implied=True).rows
        ]
    tested = [desk.ticket(count + number) for number in range(TESTED)]
    agent = TemplateAgent("desk", "Desk", "", answers=ANSWERS)
    found: dict[str, Any] = {"prompts": count, "seed": seed, "rejected_but_liked": statistics.fmean(rejected)}
    for learner in LEARNERS:
        policy = fit(rows_of(learner, evidence, prompts), agent, seed=seed).policy
        right = []
        for ticket in tested:
            scores = policy.scores(prompt_of(ticket), ANSWERS)
            right.append(desk.likes(ticket, ANSWERS[max(range(len(ANSWERS)), key=scores.__getitem__)]))
        found[learner] = statistics.fmean(right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", default="200,600")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.json:
        print(f"| tickets | unrated answers held for rejected that are liked | {' | '.join(LEARNERS)} |")
        print("| --: | --: | --: | --: | --: |")
    for count in map(int, given.prompts.split(",")):
        runs = [measure(count, seed) for seed in range(given.seeds)]
        means = {
            name: statistics.fmean(run[name] for run in runs) for name in ("rejected_but_liked", *LEARNERS)
        }
        if given.json:
            print(json.dumps({"prompts": count, "seeds": given.seeds, **means}))
        else:
            print(
                f"| {count:,} | {' | '.join(f'{100 * value:.0f} %' for value in means.values())} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
