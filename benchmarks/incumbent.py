"""Four agents whose app answers already: is the policy better than the app's own model?

    python benchmarks/incumbent.py [--agent bikes ...] [--messages 190] [--seed 0] [--json]

Made-up apps, in an empty installation of their own: a bike shop that routes messages to five queues and errs in 45 % of
them; the same shop with an app that errs in 10 %; a repair desk that answers with nested JSON and errs in half; and a
shop whose replies are free text. People rate each answer, and correct it where it is wrong. Ratchet trains (the linear
policy; SFT on the bundled model for free text) and evaluates against the app's recorded answers. Prints for each agent
how many held-out prompts the app, the base model, the policy and scikit-learn's baseline on the same training rows
answer right, and what the gate says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

MESSAGES = {
    "workshop": (
        "my {part} is broken",
        "the {part} makes a noise",
        "please repair the {part}",
        "the {part} slips",
        "the {part} is loose",
        "can you adjust the {part}",
        "the {part} fell off",
        "the {part} is bent",
        "the {part} squeaks",
        "fix the {part}",
    ),
    "orders": (
        "where is my {part}",
        "the {part} has not come yet",
        "when will you ship the {part}",
        "has the {part} left your store",
        "I still wait for the {part}",
        "is the {part} on its way",
        "track my {part}",
        "the parcel with the {part} is late",
    ),
    "returns": (
        "I want to send the {part} back",
        "the {part} does not fit me",
        "a refund for the {part} please",
        "I changed my mind on the {part}",
        "exchange the {part} for a larger one",
        "the {part} has the wrong colour",
        "take the {part} back",
        "I do not need the {part}",
    ),
    "invoices": (
        "you charged the {part} twice",
        "the bill for the {part} is wrong",
        "I need a receipt for the {part}",
        "my card was debited for a {part}",
        "the tax on the {part} is missing",
        "I paid the {part} already",
        "a voucher for the {part} was not counted",
    ),
    "rental": (
        "I would like to hire a bike with a {part}",
        "can I borrow a {part} on Sunday",
        "a {part} for a week",
        "do you lend a {part}",
        "what is the deposit for a {part}",
        "book a {part} for our tour",
        "two bikes and a {part} for Friday",
    ),
}
PARTS = "chain brake saddle helmet gear tyre basket lock bell pump lamp pedal".split()
OPENINGS = ("Hello, ", "Hi, this is Kim. ", "", "Good morning, ", "Dear shop, ")
CLOSINGS = (" Thanks!", " Regards, Lu", "", " I am in a hurry.", " Please call me.")


@dataclass(frozen=True)
class App:
    """An app: what it is asked, what is right, what its own model answers."""

    title: str
    method: str
    asked: Callable[[Random], tuple[str, str]]
    """(message, right answer)"""
    wrong: Callable[[Random, str], str]
    """A wrong answer in place of the right one."""
    errors: float
    """Share of the app's answers that are wrong."""


def bike_message(random: Random) -> tuple[str, str]:
    queue = random.choice(list(MESSAGES))
    text = random.choice(MESSAGES[queue]).format(part=random.choice(PARTS))
    if random.random() < 0.4:  # mention an earlier problem that is solved now
        before = random.choice(MESSAGES[bike_wrong(random, queue)]).format(part=random.choice(PARTS))
        text = f"{text}, not as last time: {before}"
    return f"{random.choice(OPENINGS)}{text}.{random.choice(CLOSINGS)} ({random.choice(NAMES)})", queue


NAMES = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nrstlx"]
"""Made-up names, so that no two messages are the same."""


def bike_wrong(random: Random, right: str) -> str:
    return random.choice([queue for queue in MESSAGES if queue != right])


def repair_message(random: Random) -> tuple[str, str]:
    from structured import RepairDesk

    desk = RepairDesk(random.randrange(10**9))
    request = desk.request(random.randrange(10**6))
    return request["text"], json.dumps(request["right"])


def repair_wrong(random: Random, right: str) -> str:
    answer = json.loads(right)
    trade = answer["routing"]["trade"]
    answer["routing"]["trade"] = random.choice(
        [one for one in ("plumbing", "it", "mechanics") if one != trade]
    )
    return json.dumps(answer)


def reply_message(random: Random) -> tuple[str, str]:
    part, name = random.choice(PARTS), random.choice(NAMES)
    text = f"When is my {part} ready? I am {name}."
    return text, f"Dear {name}, your {part} is ready on {random.choice(('Monday', 'Friday'))}. Thank you!"


def reply_wrong(random: Random, right: str) -> str:
    return random.choice(("No idea.", "Ask somebody else.", "It is ready when it is ready."))


APPS = {
    "bikes": App("bike shop, five queues", "linear", bike_message, bike_wrong, 0.45),
    "repairs": App("repair desk, nested JSON", "linear", repair_message, repair_wrong, 0.5),
    "bikes-90": App("bike shop, app right in 90 %", "linear", bike_message, bike_wrong, 0.1),
    "replies": App("replies in free text", "sft", reply_message, reply_wrong, 0.5),
}


def record(agent: str, app: App, messages: int, random: Random) -> dict[str, str]:
    """The app's decisions, rated and corrected; returns the right answer of each message."""
    from feedback.services import decision_record, rating_submit

    rights: dict[str, str] = {}
    while len(rights) < messages:
        text, right = app.asked(random)
        if text in rights:
            continue
        rights[text] = right
        answer = app.wrong(random, right) if random.random() < app.errors else right
        row = decision_record(agent=agent, messages=[{"role": "user", "content": text}], response=answer).row
        rating_submit(decision=row, rater="ann", thumb="up" if answer == right else "down")
        if answer != right:
            rating_submit(decision=row, rater="ann", correction=right)
    return rights


def measure(agent: str, app: App, messages: int, seed: int) -> dict[str, Any]:
    """Record, train, evaluate against the incumbent, ask the gate, and have scikit-learn answer the same prompts."""
    from django.conf import settings

    from feedback.models import Decision, Rating
    from rl.evaluation.service import EvaluationOrder, evaluate
    from rl.jobs import train
    from rl.jobs.lifecycle import TrainOrder
    from rl.models import Evaluation, Policy, PromptSplit
    from rl.registry.gate_evidence import policy_judge

    began = time.monotonic()
    rights = record(agent, app, messages, Random(f"{agent} {seed}"))
    knobs = {"max_steps": 60} if app.method == "sft" else {}
    report = train.train(TrainOrder(agent, app.method, knobs=knobs, actor="benchmark"))
    found = evaluate(EvaluationOrder(policy=report["policy"], compare="incumbent", actor="benchmark"))
    gate = policy_judge(Policy.objects.get(name=report["policy"]))
    assert gate is not None
    sides = dict(PromptSplit.objects.filter(agent=agent).values_list("prompt_hash", "split"))
    rows = Decision.objects.filter(agent=agent).order_by("created_at")
    texts = {row.prompt_hash: row.messages[-1]["content"] for row in rows}
    stored = Evaluation.objects.get(pk=found["evaluation"]).evidence["others"].get("known", ())
    held_out = [texts[one["prompt_hash"]] for one in stored]
    learnt = [texts[name] for name, side in sides.items() if side == "train" and name in texts]
    return {
        "agent": agent,
        "title": app.title,
        "ratings": Rating.objects.filter(decision__agent=agent).count(),
        "rated_prompts": len(rights),
        "held_out": len(held_out),
        "right": found["right"],
        "scikit-learn": sum(baseline_right(learnt, held_out, rights)) if held_out else None,
        "valid": found["valid_rate"]["value"],
        "gate": "open" if gate.passed else "closed",
        "reason": gate.reason,
        "seconds": round(time.monotonic() - began),
        "home": str(settings.RATCHET_HOME),
    }


def baseline_right(learnt: list[str], asked: list[str], rights: dict[str, str]) -> Iterator[bool]:
    from structured import baseline

    def wrapped(right: str) -> Any:
        return json.loads(right) if right.startswith("{") else {"answer": right}

    answers = baseline(learnt, [wrapped(rights[text]) for text in learnt])(asked)
    for text, answer in zip(asked, answers, strict=True):
        yield json.loads(answer) == wrapped(rights[text])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", nargs="+", choices=list(APPS), default=list(APPS))
    parser.add_argument("--messages", type=int, default=190)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {
            "RATCHET_HOME": home,
            "DATABASE_URL": "",
            "RATCHET_BASE_MODEL": "",
            "HF_HUB_OFFLINE": "1",
            "DJANGO_SETTINGS_MODULE": "backend.settings",
        }
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        found = []
        for agent in given.agent:
            found.append(measure(agent, APPS[agent], given.messages, given.seed))
            print(f"{agent}: {found[-1]['seconds']} s", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(found))
        return
    print("| agent | app | base | policy | scikit-learn | of | gate | ratings |\n|" + " --- |" * 8)
    for one in found:
        counts = [
            str(round(side["value"] * side["n"])) if (side := one["right"].get(name)) else "not known"
            for name in ("incumbent", "base", "policy")
        ]
        print(
            f"| {one['title']} | {' | '.join(counts)} | {one['scikit-learn']} | {one['held_out']} | {one['gate']} | "
            f"{one['ratings']} |"
        )
    for one in found:
        print(f"\n{one['title']}: {one['reason'] or 'every rule is met'}")


if __name__ == "__main__":
    main()
