"""Does an agent that nobody rates learn, from traces or from outcomes, through the documented commands alone?

    python benchmarks/without_raters.py [--flow traces,outcomes] [--traces 210] [--decisions 360] [--set KNOB=VALUE]

The agent `desk` is not one of the built-in ones: it is asked which tool serves a goal, and answers {"tool": "..."}. The
app answers by itself, right half of the time. `traces`: each run is sent by the collector to a real server, with the
tool calls (a wrong tool raises, a right one times out now and then and is tried again) and whether the task was
completed; then `calculate_rewards`, `train_kto`, `evaluate_model` on the holdout and on goals that were in no run,
`export_model --format gguf`, the gate, and the policy is asked through the gateway, where the exported file answers,
beside the weights that were trained (both greedy; a guess among four tools is right in a quarter). `outcomes`: each
decision and one outcome, `solved`, one in ten of them wrong; then `calculate_rewards --outcome solved=1:0` and
`train_kto`. Judged is which of two tools, the right one and a wrong one, is the likelier answer to an unseen goal,
beside the base model. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from operator import eq
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "clients" / "python" / "src")]

from ratchet_client import TraceCollector  # noqa: E402
from rl.statistics import wilson_interval  # noqa: E402
from rl.training.policy import generate, load_policy  # noqa: E402
from tests.support.server import Server  # noqa: E402

AGENT = "desk"
GOALS = {
    "refund": (
        "give {who} {n} euros back",
        "{who} wants the money for order {n} back",
        "pay {n} euros back to {who}",
    ),
    "track": (
        "find the parcel {n} of {who}",
        "where is the parcel {n} of {who}",
        "{who} waits for parcel {n}",
    ),
    "mail": (
        "write {who} about case {n}",
        "tell {who} how case {n} stands",
        "{who} wants a letter about case {n}",
    ),
    "call": ("ring {who} at extension {n}", "{who} wants to be phoned at {n}", "phone {who}, extension {n}"),
}
"""Tool -> goals that it serves."""
WHO = ("ines", "jonas", "priya", "tom", "aiko", "lena", "omar", "rosa")
UNSEEN = 200


def goal(random: Random) -> tuple[list[dict[str, str]], str, list[str]]:
    """A prompt, the tool that serves it, and the tools it lists."""
    right = random.choice(list(GOALS))
    said = random.choice(GOALS[right]).format(who=random.choice(WHO), n=random.randint(1, 9999))
    tools = random.sample(list(GOALS), len(GOALS))
    content = f"goal: {said}\ntools: {', '.join(tools)}"
    return [{"role": "user", "content": content}], right, tools


def answer(tool: str) -> str:
    return json.dumps({"tool": tool})


def run_once(collector: TraceCollector, random: Random) -> None:
    """One run of the small tool agent: it picks a tool, right half of the time, and calls it, twice where it fails."""
    prompt, right, tools = goal(random)
    tool = right if random.random() < 0.5 else random.choice([name for name in tools if name != right])
    with collector.trace() as trace:
        trace.decision(prompt, answer(tool))
        done = False
        for _ in range(2):
            call = trace.tool_call(tool, {"goal": prompt[0]["content"]})
            if tool != right:
                call.error("this tool cannot do that")
            elif random.random() < 0.1:
                call.error("timeout")
            else:
                call.result("done")
                done = True
                break
        if done:
            trace.task_completed("serve the goal")
        else:
            trace.task_failed("serve the goal")


class World(Server):
    """A server with a database and a data folder of its own."""

    def __init__(self, home: Path) -> None:
        super().__init__(f"sqlite:///{home / 'db.sqlite3'}", home)
        self.environment |= {
            "RATCHET_BASE_MODEL": "bundled",
            "HF_HUB_OFFLINE": "1",
            "RATE_LIMIT_API": "1000000/m",
            **{name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ},
        }
        self.seconds: dict[str, float] = {}

    def say(self, *arguments: str) -> dict[str, Any]:
        """What a command prints with --json; its time is noted."""
        started = time.monotonic()
        found: dict[str, Any] = json.loads(self.manage(*arguments, "--json"))
        self.seconds[arguments[0]] = round(time.monotonic() - started, 1)
        return found

    def call(self, key: str, path: str, body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        text = json.loads(reply.read())
        assert reply.status < 300, (path, reply.status, text)
        return text


def clean(home: Path, seed: int) -> Path:
    """Pairs of the right and a wrong tool on goals that were in no run, as a file to evaluate on."""
    random, file = Random(f"unseen {seed}"), home / "clean.jsonl"
    rows = []
    for _ in range(UNSEEN):
        prompt, right, tools = goal(random)
        wrong = random.choice([name for name in tools if name != right])
        sides = {"chosen": answer(right), "rejected": answer(wrong)}
        rows.append(
            {"prompt": prompt, **{k: [{"role": "assistant", "content": v}] for k, v in sides.items()}}
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def trained(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """The policy of the documented commands, and how it orders right and wrong tools beside the base."""
    plan = world.say(f"train_{options.method}", "--agent", AGENT, "--dry-run")
    knobs = [part for knob in options.set for part in ("--set", knob)]
    result = world.say(f"train_{options.method}", "--agent", AGENT, *knobs)
    found = world.say(
        "evaluate_model",
        "--policy",
        result["policy"],
        "--compare-base",
        "--test-data",
        str(clean(world.home, options.seed)),
    )
    return {
        "policy": result["policy"],
        "steps": result["steps"],
        "notes": result["notes"],
        "checkpoint": result["checkpoint"],
        "preflight": result["preflight"],
        "labels": plan["balance"],
        "sources": plan["sources"],
        "unseen": {
            "base": found["comparison"]["preference_accuracy"]["value"],
            "policy": found["preference_accuracy"],
            "difference": found["comparison"]["difference"],
        },
    }


def gated(world: World, policy: str) -> dict[str, Any]:
    """The evidence of the holdout, and what the gate says of it."""
    judged = world.say("evaluate_model", "--policy", policy, "--compare-base")
    figures = {name: judged.get(name) for name in ("carried_by", "kl", "valid_rate")}
    figures["comparison"] = judged["comparison"]["gate"]
    try:
        figures["stage"] = world.say("policy", "promote", policy)["stage"]
    except AssertionError as refusal:
        figures["refused"] = str(refusal).strip().splitlines()[-1]
    return figures


def flow_traces(world: World, options: argparse.Namespace) -> dict[str, Any]:
    random, key = Random(options.seed), world.key("ingest")
    with TraceCollector(AGENT, world.address, key, world.home / "spool", fsync=False) as collector:
        for _ in range(options.traces):
            run_once(collector, random)
        assert collector.flush(120), collector.status()
        sent = collector.status()
    rewards = world.say("calculate_rewards", "--agent", AGENT)
    figures = {
        "sent": sent.sent,
        "refused": sent.refused,
        "rewards": rewards["labels"],
        **trained(world, options),
    }
    exported = world.say("export_model", "--policy", figures["policy"], "--format", "gguf")
    figures["gguf"] = [Path(file["path"]).name for file in exported["files"]]
    figures["gate"] = gated(world, figures["policy"])
    figures["gateway"] = gateway_answers(world, key, figures["policy"], figures.pop("checkpoint"), options)
    return figures


def gateway_answers(
    world: World, key: str, policy: str, checkpoint: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Share of unseen goals whose answer through the gateway names the right tool, and is the one that the trained
    weights give."""
    random = Random(f"asked {options.seed}")
    goals = [goal(random) for _ in range(options.asked)]
    answers: list[str] = []
    for prompt, _, _ in goals:
        body = {"model": policy, "messages": prompt, "temperature": 0, "max_tokens": 16}
        answers.append(world.call(key, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
    loaded = load_policy("bundled", checkpoint)
    weights = generate(loaded, [prompt for prompt, _, _ in goals], max_new_tokens=16)
    right = [answer(tool) for _, tool, _ in goals]
    return {
        "right": wilson_interval(sum(map(eq, answers, right)), len(right)).as_dict(),
        "weights_right": sum(one.text == wanted for one, wanted in zip(weights, right, strict=True)),
        "as_the_weights": sum(one.text == said for one, said in zip(weights, answers, strict=True)),
        "in_the_form": sum(said in set(map(answer, GOALS)) for said in answers),
        "first": answers[:3],
    }


def flow_outcomes(world: World, options: argparse.Namespace) -> dict[str, Any]:
    random, key = Random(options.seed), world.key("ingest")
    for _ in range(options.decisions):
        prompt, right, tools = goal(random)
        tool = right if random.random() < 0.5 else random.choice([name for name in tools if name != right])
        sent = world.call(
            key, "/api/decisions/", {"agent": AGENT, "messages": prompt, "response": answer(tool)}
        )
        solved = (tool == right) != (random.random() < 0.1)
        world.call(key, f"/api/decisions/{sent['id']}/outcomes/", {"name": "solved", "value": int(solved)})
    unsaid = world.say("calculate_rewards", "--agent", AGENT)
    rewards = world.say("calculate_rewards", "--agent", AGENT, "--outcome", "solved=1:0")
    return {
        "named": unsaid["outcomes_without_worth"],
        "rewards": rewards["labels"],
        **trained(world, options),
    }


FLOWS = {"traces": flow_traces, "outcomes": flow_outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flow", default="traces,outcomes", help="Which, with commas between (default both)")
    parser.add_argument("--traces", type=int, default=210)
    parser.add_argument("--decisions", type=int, default=360)
    parser.add_argument("--method", choices=["kto", "sft"], default="kto")
    parser.add_argument(
        "--set", action="append", default=[], help="A knob of the recipe, NAME=VALUE; repeatable"
    )
    parser.add_argument(
        "--asked", type=int, default=100, help="Goals asked through the gateway (default 100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for flow in options.flow.split(","):
        with tempfile.TemporaryDirectory(prefix="ratchet-unrated-") as folder:
            world = World(Path(folder))
            world.migrate()
            with world:
                figures[flow] = FLOWS[flow](world, options)
            figures[flow]["seconds"] = world.seconds
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
