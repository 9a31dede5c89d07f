"""Nine shapes of feedback, each taken from a file or the API to a judged, gated policy that answers.

    python benchmarks/shapes.py [--shapes pairs,thumbs,...] [--prompts 300] [--unseen 60] [--noise 0.1] [--seed 0]
                                [--home DIR]

The world is made here and belongs to no built-in agent: a courier's help desk that answers a customer with one of six
replies. Which reply people like depends on topic, tone and customer, with vetoes, and one verdict in ten is flipped.
Each shape has a database of its own and is driven by the commands of the README and the REST API alone: data in,
training, evaluation against the base model, promotion through the gate, and answers over `/api/decide/`, whose share of
liked replies to prompts nobody rated is measured before and after. Prints a table on stderr and one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AGENT = "courier-desk"

TOPICS = {
    "late": (
        "My parcel {n} is late.",
        "Parcel {n} was due on Monday and is not here.",
        "Where is shipment {n}?",
    ),
    "broken": ("The vase in parcel {n} is broken.", "Parcel {n} arrived crushed.", "Order {n} came damaged."),
    "wrong": ("Parcel {n} holds somebody else's shoes.", "I got the wrong item in order {n}."),
    "invoice": ("I need the invoice for order {n}.", "Please send the bill of {n} again."),
    "address": ("Can parcel {n} go to my office instead?", "I moved; please change the address of {n}."),
    "refund": ("I want my money back for order {n}.", "When is the refund for {n} coming?"),
}
TONES = {
    "calm": "",
    "angry": " This is the second time, I am furious!",
    "confused": " I do not know what to do now.",
}
CUSTOMERS = {"new": "", "regular": " I order from you every week."}
REPLIES = {
    "trace": "We are tracing it and write to you today.",
    "replace": "A replacement leaves our depot tonight.",
    "refund": "Your refund is on its way.",
    "call": "A colleague calls you within the hour.",
    "send": "You find the document in your mail.",
    "form": "Please fill in the form on our site.",
}
SHOWN = 0.5
"""Share of the prompts with tests to which somebody wrote an answer, too."""
USUAL = {
    "late": "trace",
    "broken": "replace",
    "wrong": "replace",
    "invoice": "send",
    "address": "form",
    "refund": "refund",
}


@dataclass(frozen=True)
class Case:
    """One customer's message and what is known of it."""

    topic: str
    tone: str
    customer: str
    text: str

    @property
    def liked(self) -> str:
        """The reply people like best here."""
        if self.tone == "angry" and self.topic in ("late", "broken", "wrong"):
            return REPLIES["call"]
        if self.customer == "regular" and self.topic == "broken":
            return REPLIES["refund"]
        return REPLIES[USUAL[self.topic]]


def cases(count: int, seed: int) -> list[Case]:
    """Cases with different texts, drawn evenly over what they can be about."""
    random = Random(seed)
    kinds = list(itertools.product(TOPICS, TONES, CUSTOMERS))
    found: dict[str, Case] = {}
    while len(found) < count:
        topic, tone, customer = kinds[len(found) % len(kinds)]
        text = random.choice(TOPICS[topic]).format(n=random.randrange(1000, 10_000))
        text += TONES[tone] + CUSTOMERS[customer]
        found.setdefault(text, Case(topic, tone, customer, text))
    return random.sample(list(found.values()), count)


@dataclass
class World:
    """Verdicts of simulated people on random replies."""

    options: argparse.Namespace
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.options.seed + 1)

    def judged(self) -> Iterator[tuple[Case, str, bool]]:
        """A case, a reply (the liked one in two of five), and whether somebody said it was good."""
        for case in cases(self.options.prompts, self.options.seed):
            reply = case.liked if self.random.random() < 0.4 else self.random.choice(list(REPLIES.values()))
            yield case, reply, (reply == case.liked) != (self.random.random() < self.options.noise)

    def other(self, reply: str) -> str:
        return self.random.choice([text for text in REPLIES.values() if text != reply])


# --- Files -------------------------------------------------------------------------------------------------


def pairs(world: World) -> str:
    rows = []
    for case in cases(world.options.prompts, world.options.seed):
        sides = [case.liked, world.other(case.liked)]
        if world.random.random() < world.options.noise:
            sides.reverse()
        rows.append({"prompt": case.text, "chosen": sides[0], "rejected": sides[1]})
    return lines(rows)


def thumbs(world: World) -> str:
    return lines(
        {"prompt": case.text, "response": reply, "thumb": "up" if good else "down", "rater": "desk-lead"}
        for case, reply, good in world.judged()
    )


def stars(world: World) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["question", "answer", "stars", "annotator"])
    for case, reply, good in world.judged():
        writer.writerow([case.text, reply, world.random.choice((4, 5) if good else (1, 2)), "ana"])
    return file.getvalue()


def corrections(world: World) -> str:
    rows = []
    for case in cases(world.options.prompts, world.options.seed):
        right = case.liked if world.random.random() >= world.options.noise else world.other(case.liked)
        rows.append({"prompt": case.text, "response": world.other(right), "correction": right})
    return lines(rows)


def demonstrations(world: World) -> str:
    return lines(
        {"messages": [{"role": "user", "content": case.text}, {"role": "assistant", "content": case.liked}]}
        for case in cases(world.options.prompts, world.options.seed)
    )


def tests(world: World) -> str:
    """Prompts whose answer can be checked."""
    return checkable(cases(world.options.prompts, world.options.seed))


def checkable(asked: Sequence[Case]) -> str:
    return lines({"prompt": case.text, "answer": case.liked} for case in asked)


def answers(world: World) -> str:
    """Demonstrations for the first of those prompts: they show the form, which sampling alone does not find."""
    asked = cases(world.options.prompts, world.options.seed)[: round(SHOWN * world.options.prompts)]
    return lines({"prompt": case.text, "response": case.liked} for case in asked)


def lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# --- The API -----------------------------------------------------------------------------------------------


class Desk:
    """A data folder, the commands run in it, and its server."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = os.environ | {"RATCHET_HOME": str(home), "GATEWAY_NEW_AGENTS": AGENT}
        home.mkdir(parents=True, exist_ok=True)
        self.base = ""
        self.key = ""

    def command(self, *words: str, check: bool = True) -> dict[str, Any]:
        """The JSON of a command; {"refused": its last line} where it ended with 1 and `check` is False."""
        done = subprocess.run(
            [sys.executable, "manage.py", *words, "--json"],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            if check:
                raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {last}")
            return {"refused": last} | (
                json.loads(done.stdout) if done.stdout.strip().startswith("{") else {}
            )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def migrate(self) -> None:
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "-v0"], cwd=ROOT, env=self.environment, check=True
        )

    def shell(self, code: str) -> None:
        subprocess.run(
            [sys.executable, "manage.py", "shell", "-c", code],
            cwd=ROOT,
            env=self.environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    @contextmanager
    def served(self) -> Iterator[None]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        with (self.home / "server.log").open("ab") as log:
            server = subprocess.Popen(
                [sys.executable, "manage.py", "runserver", "--noreload", f"127.0.0.1:{port}"],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        try:
            for _ in range(1200):
                try:
                    urllib.request.urlopen(f"{self.base}/healthz")
                    break
                except urllib.error.URLError:
                    time.sleep(0.2)
            yield
        finally:
            server.terminate()
            server.wait()

    def call(self, path: str, body: Any, *, patience: int = 40) -> Any:
        """POST; asks again while files for serving are being made (503)."""
        data = json.dumps(body).encode()
        for _ in range(patience):
            request = urllib.request.Request(
                f"{self.base}{path}",
                data,
                {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503):
                    raise SystemExit(f"{path}: {error.code} {error.read()[:400]!r}") from error
                time.sleep(min(float(error.headers.get("Retry-After", "2")), 5.0))
        raise SystemExit(f"{path}: still 503")

    def liked(self, unseen: Sequence[Case]) -> tuple[float, set[str]]:
        """Share of liked replies to prompts nobody rated, and who answered."""
        good, who = 0, set()
        for case in unseen:
            made = self.call(
                "/api/decide/",
                {
                    "agent": AGENT,
                    "messages": [{"role": "user", "content": case.text}],
                    "candidates": list(REPLIES.values()),
                },
            )
            good += made["response"] == case.liked
            who.add(made["policy"])
        return good / len(unseen), who


def scores_sent(desk: Desk, world: World) -> dict[str, Any]:
    for case, reply, good in world.judged():
        score = round(world.random.uniform(0.65, 1.0) if good else world.random.uniform(0.0, 0.35), 2)
        desk.call(
            f"/api/policies/feedback/{AGENT}",
            {"prompt": case.text, "response": reply, "score": score, "runId": "", "notes": ""},
        )
    return {"decisions": world.options.prompts}


def outcomes_sent(desk: Desk, world: World) -> dict[str, Any]:
    """One measured fact a decision: whether the customer wrote again."""
    judged = list(world.judged())
    sent = [
        {"agent": AGENT, "messages": [{"role": "user", "content": case.text}], "response": reply}
        for case, reply, _ in judged
    ]
    made = desk.call("/api/decisions/", sent)
    for answer, (_, _, good) in zip(made["results"] if isinstance(made, dict) else made, judged, strict=True):
        pk = answer.get("id") or answer["decision"]["id"]
        desk.call(f"/api/decisions/{pk}/outcomes/", {"name": "wrote_again", "value": 0 if good else 1})
    return {"decisions": len(sent)}


def traces_sent(desk: Desk, world: World) -> dict[str, Any]:
    """An agent that looks the order up, answers, and says whether its task was done."""
    for number, (case, reply, good) in enumerate(world.judged()):
        lookup: dict[str, Any] = {
            "kind": "tool_call",
            "name": "orders.find",
            "arguments": {"text": case.text},
            "n": 0,
        }
        lookup |= (
            {"result": {"state": "shipped"}} if good or number % 3 else {"error": "TimeoutError: no answer"}
        )
        steps = [
            lookup,
            {
                "kind": "decision",
                "name": "answer",
                "messages": [{"role": "user", "content": case.text}],
                "response": reply,
                "n": 1,
            },
            {
                "kind": "task",
                "name": "help the customer",
                "status": "completed" if good else "failed",
                "n": 2,
            },
        ]
        desk.call("/api/traces/", {"agent": AGENT, "run_id": f"run-{number}", "steps": steps})
    return {"traces": world.options.prompts}


OUTCOMES_WORTH = (
    "from rl.models import RewardSettings; "
    f"RewardSettings.objects.update_or_create(agent={AGENT!r}, "
    "defaults={'outcomes': {'wrote_again': {'good': 0, 'bad': 1}}})"
)


@dataclass(frozen=True)
class Shape:
    """How one shape comes in, and by which method it is learnt."""

    method: str
    file: Any = None
    name: str = ""
    send: Any = None
    before: tuple[tuple[str, ...], ...] = ()
    train: tuple[str, ...] = ()
    shown: Any = None
    """Writes the file that `train_sft` learns from first; the shape's own file is trained on as it stands, by whom that
    made."""
    worth: bool = False
    """Whether what outcomes are worth is set first, as in the admin."""


SHAPES = {
    "pairs": Shape("dpo", pairs, "pairs.jsonl"),
    "thumbs": Shape("kto", thumbs, "thumbs.jsonl"),
    "stars": Shape("kto", stars, "stars.csv"),
    "scores": Shape("auto", send=scores_sent),
    "corrections": Shape("sft", corrections, "corrections.jsonl"),
    "outcomes": Shape(
        "kto", send=outcomes_sent, before=(("calculate_rewards", "--agent-type", AGENT),), worth=True
    ),
    "traces": Shape("kto", send=traces_sent, before=(("calculate_rewards", "--agent-type", AGENT),)),
    "demonstrations": Shape("sft", demonstrations, "demonstrations.jsonl"),
    "tests": Shape("grpo", tests, "tests.jsonl", train=("--reward", "answer"), shown=answers),
}


def turn(name: str, shape: Shape, options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Take one shape round the loop; what each step said."""
    desk, world, began = Desk(home), World(options), time.perf_counter()
    desk.migrate()
    key = desk.command("api_key", "create", "desk", "--scopes", "ingest,rate,rate_as,read,operate")
    desk.key = key["key"]
    rated = {case.text for case in cases(options.prompts, options.seed)}
    unseen = [case for case in cases(2 * options.unseen, options.seed + 7) if case.text not in rated]
    unseen = unseen[: options.unseen]
    found: dict[str, Any] = {"shape": name, "method": shape.method}
    with desk.served():
        found["liked_before"], _ = desk.liked(unseen)
        if shape.worth:
            desk.shell(OUTCOMES_WORTH)
        file = home / shape.name
        if shape.file is not None:
            file.write_text(shape.file(world), "utf-8")
        if shape.file is not None and shape.shown is None:
            report = desk.command("import_feedback", str(file), "--agent", AGENT)
            keys = ("format", "decisions", "ratings", "comparisons", "corrections", "skipped")
            found["imported"] = {k: report[k] for k in keys if report.get(k)}
        elif shape.send is not None:
            found["imported"] = shape.send(desk, world)
        for words in shape.before:
            desk.command(*words)
        source: tuple[str, ...] = ()
        if shape.shown is not None:
            written = home / "answers.jsonl"
            written.write_text(shape.shown(world), "utf-8")
            found["shown"] = desk.command("train_sft", "--agent", AGENT, "--data-file", str(written))[
                "policy"
            ]
            source = ("--data-file", str(file), "--set", f"start_from={found['shown']}")
        if shape.method == "auto":
            trained = trained_over_rest(desk)
        else:
            trained = desk.command(
                f"train_{shape.method}", "--agent", AGENT, *source, *shape.train, check=False
            )
        found["trained"] = {
            k: trained.get(k) for k in ("refused", "method", "policy", "samples", "steps", "seconds")
        }
        if policy := trained.get("policy"):
            judged = desk.command("evaluate_model", "--policy", policy, "--compare-base", check=False)
            found["judged"] = {
                k: judged.get(k) for k in ("refused", "carried_by", "evidence", "kl", "written_gain")
            }
            found["comparison"] = judged.get("comparison")
            if shape.shown is not None:  # what the tests taught beyond what was shown
                fresh = home / "unseen.jsonl"
                fresh.write_text(checkable(unseen), "utf-8")
                words = ("--policy", policy, "--compare", found["shown"], "--test-data", str(fresh))
                found["beyond_shown"] = desk.command("evaluate_model", *words)["comparison"]
            moved = desk.command("policy", "promote", policy, check=False)
            found["gate"] = moved.get("stage") or moved.get("refused")
            time.sleep(6)  # a change in the registry is seen within five seconds
            found["liked_after"], who = desk.liked(unseen)
            found["answered_by"] = sorted(who)
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found


def trained_over_rest(desk: Desk) -> dict[str, Any]:
    """Ask for a training, let a worker do it, and read the policy it made."""
    plan = desk.call(f"/api/policies/train_policy/{AGENT}", {"dryRun": True})
    queued = desk.call(f"/api/policies/train_policy/{AGENT}", {})
    run = str(queued.get("run") or queued.get("runId") or queued.get("id"))
    done = desk.command(f"train_{plan['method']}", "--queued", run, check=False)  # as a worker does
    return {
        "method": plan.get("method"),
        "policy": done.get("policy"),
        "refused": done.get("refused"),
        **done,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    out = [f"{'shape':<15}{'method':<7}{'liked before':>13}{'after':>8}  gate, answered by"]
    for row in rows:
        after = f"{100 * row['liked_after']:.0f} %" if "liked_after" in row else "-"
        gate = f"{row.get('gate') or row['trained'].get('refused')}, {', '.join(row.get('answered_by', []))}"
        out.append(
            f"{row['shape']:<15}{row['method']:<7}{100 * row['liked_before']:>11.0f} %{after:>8}  {gate[:110]}"
        )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--unseen", type=int, default=60)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, help="keep the data folders here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ratchet-shapes-") as temporary:
        for name in options.shapes.split(","):
            home = (options.home or Path(temporary)) / name
            rows.append(turn(name, SHAPES[name], options, home))
            print(table(rows[-1:]), file=sys.stderr, flush=True)
    print(table(rows), file=sys.stderr)
    print(
        json.dumps({"benchmark": "shapes", "prompts": options.prompts, "noise": options.noise, "rows": rows})
    )


if __name__ == "__main__":
    main()
