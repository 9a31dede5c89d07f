"""Comparison of a structured agent's policy with scikit-learn's baseline per field, on the same corrections.

    python benchmarks/structured.py [--corrections 250] [--fresh 300] [--seed 0] [--method auto] [--without-training]
                                    [--json]

A made-up repair desk answers each request with an object of three levels: enums, a whole number in a range, a truth
value, a field that may be null, a list. People correct every answer of an app that knows nothing. In one run: the
baseline (a TF-IDF bag of words and a logistic regression per field, lists by one classifier an item, on the training
split), Ratchet's linear policy on the same rows, and `run_pipeline --method auto` on the bundled model in an empty
installation, whose policy answers as it is served. Prints for each the share of fresh prompts answered exactly and the
mean share of fields that are right, in %, and what the gate said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rl.agents.fields import composed, fields_right, leaves, plain  # noqa: E402
from rl.agents.template import TemplateAgent  # noqa: E402
from rl.linear.fit import fit  # noqa: E402

DEVICES = ("boiler", "lift", "door", "printer", "router", "window", "heating", "lamp")
FAULTS = ("leaks", "makes noise", "is stuck", "smells of smoke", "is dead", "flickers")
PLACES = ("cellar", "lobby", "office", "kitchen", "roof")
TRADES = {
    "boiler": "plumbing",
    "heating": "plumbing",
    "lift": "mechanics",
    "door": "mechanics",
    "printer": "it",
    "router": "it",
    "window": "mechanics",
    "lamp": "electrics",
}
URGENT = {
    "smells of smoke": 9,
    "leaks": 7,
    "is stuck": 5,
    "is dead": 4,
    "makes noise": 2,
    "flickers": 2,
}
TOOLS = {
    "plumbing": ["wrench", "pump"],
    "mechanics": ["wrench", "ladder"],
    "it": ["laptop"],
    "electrics": ["meter"],
}


class RepairDesk:
    """Requests, and the object that is the right answer to each."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def request(self, number: int) -> dict[str, Any]:
        draw = self.random.choice
        device, fault, place = draw(DEVICES), draw(FAULTS), draw(PLACES)
        since, name = self.random.randint(1, 9), draw(("Ada", "Ben", "Cleo", "Dov", "Eva"))
        texts = (
            "{name} writes: the {device} in the {place} {fault} since {since} days.",
            "Request {number} from {name}: in the {place}, {since} days already, the {device} {fault}.",
            "Hello, our {device} ({place}) {fault}. It has been {since} days. {name}",
        )
        text = draw(texts).format(**locals())
        return {"text": text, "right": self.right(device, fault, place)}

    @staticmethod
    def right(device: str, fault: str, place: str) -> dict[str, Any]:
        trade = TRADES[device]
        priority = min(10, URGENT[fault] + (device in ("lift", "boiler")))
        danger = fault == "smells of smoke" or (fault == "leaks" and trade == "electrics")
        tools = (
            TOOLS[trade]
            + (["mask"] if fault == "smells of smoke" else [])
            + (["ladder"] if place == "roof" else [])
        )
        return {
            "routing": {
                "trade": trade,
                "visit": {
                    "priority": priority,
                    "floor": None if place == "roof" else place,
                    "two_people": danger,
                },
            },
            "safety": {
                "danger": danger,
                "level": "high" if priority > 7 else "medium" if priority > 3 else "low",
            },
            "tools": sorted(set(tools)),
        }


def prompt_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


Answers = Callable[[Sequence[str]], list[str]]


def baseline(texts: Sequence[str], rights: Sequence[Any]) -> Answers:
    """A classifier per field on a bag of words and word pairs, and per item of each list."""
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    read = [dict(leaves(right)) for right in rights]
    paths = list(dict.fromkeys(path for found in read for path in found))
    models: list[tuple[tuple[str, ...], str, Any]] = []

    def learn(path: tuple[str, ...], item: str, values: Sequence[str]) -> None:
        kind = LogisticRegression(C=10, max_iter=1_000) if len(set(values)) > 1 else DummyClassifier()
        models.append(
            (path, item, make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), kind).fit(texts, values))
        )

    for path in paths:
        values = [found.get(path) for found in read]
        if all(isinstance(value, list) for value in values):
            for item in sorted({plain(one) for value in values for one in value or ()}):
                learn(path, item, [str(item in map(plain, value or ())) for value in values])
        else:
            learn(path, "", [plain(value) for value in values])

    def answer(asked: Sequence[str]) -> list[str]:
        found: list[dict[tuple[str, ...], Any]] = [{} for _ in asked]
        for path, item, model in models:
            for one, value in zip(found, model.predict(list(asked)), strict=True):
                if not item:
                    one[path] = json.loads(value)
                elif value == "True":
                    one.setdefault(path, []).append(json.loads(item))
                else:
                    one.setdefault(path, [])
        return [json.dumps(composed(list(one.items()))) for one in found]

    return answer


def linear(texts: Sequence[str], rights: Sequence[Any]) -> Answers:
    rows = [
        {"prompt": prompt_of(text), "prompt_hash": str(number), "completion": json.dumps(right)}
        for number, (text, right) in enumerate(zip(texts, rights, strict=True))
    ]
    agent = TemplateAgent("repairs", "Repairs", "", schema={"type": "object"})
    policy = fit(rows, agent).policy
    return lambda asked: [policy.options(prompt_of(text))[0] for text in asked]


def measure(answers: Sequence[str], fresh: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = [fields_right(_read(answer), one["right"]) for answer, one in zip(answers, fresh, strict=True)]
    exact = [plain(_read(answer)) == plain(one["right"]) for answer, one in zip(answers, fresh, strict=True)]
    return {"exact": statistics.fmean(exact), "fields": statistics.fmean(points / of for points, of in found)}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def pipeline(home: Path, desk: dict[str, Any], method: str) -> dict[str, Any]:
    """Import the corrections, run the pipeline, answer the fresh prompts with the policy; in processes of their own."""
    file = home / "corrections.jsonl"
    blank = {
        "routing": {"trade": "it", "visit": {"priority": 1, "floor": None, "two_people": False}},
        "safety": {"danger": False, "level": "low"},
        "tools": [],
    }
    file.write_text(
        "".join(
            json.dumps(
                {"prompt": one["text"], "response": json.dumps(blank), "correction": json.dumps(one["right"])}
            )
            + "\n"
            for one in desk["corrections"]
        ),
        "utf-8",
    )
    (home / "fresh.json").write_text(json.dumps([one["text"] for one in desk["fresh"]]), "utf-8")
    settings = {**os.environ, "RATCHET_HOME": str(home), "DATABASE_URL": f"sqlite:///{home}/db.sqlite3"}

    def manage(*words: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *words], env=settings, capture_output=True, text=True
        )
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr[-500:]}")
        return done.stdout

    manage("migrate", "-v", "0")
    manage("import_feedback", str(file), "--agent", "repairs")
    out = manage("run_pipeline", "--agent", "repairs", "--method", method, "--json", check=False)
    answers = json.loads(manage("shell", "--no-imports", "-c", ANSWERED).splitlines()[-1])
    return {"answers": answers, "report": json.loads(out) if out.strip() else {}}


ANSWERED = """
import json
from pathlib import Path
from django.conf import settings
from rl.linear.model import LinearPolicy
from rl.models import Policy
from rl.models.agent_definitions import agent_served
from rl.registry.integrity import adapter_folder
from rl.training.sides import generate_answers
from rl.training.sides import LinearSide
from rl.training.policy import load_policy

asked = json.loads(Path(settings.RATCHET_HOME, "fresh.json").read_text())
policy = Policy.objects.order_by("-pk").first()
agent = agent_served(policy.agent)
if policy.kind == Policy.Kind.LINEAR:
    side = LinearSide(LinearPolicy.load(adapter_folder(policy)), agent)
else:
    side = load_policy(policy.base_model, adapter_folder(policy))
prompts = [[{"role": "user", "content": text}] for text in asked]
print(json.dumps([answer.text for answer in generate_answers(side, prompts, agent)]))
"""
"""Script that prints the newest policy's answers, as it is served."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corrections", type=int, default=250)
    parser.add_argument("--fresh", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--without-training", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    desk = RepairDesk(given.seed)
    world = {
        "corrections": [desk.request(number) for number in range(given.corrections)],
        "fresh": [desk.request(given.corrections + number) for number in range(given.fresh)],
    }
    share = round(0.6 * given.corrections)  # as much as the split leaves to train on
    texts, rights = zip(*((one["text"], one["right"]) for one in world["corrections"][:share]), strict=True)
    asked = [one["text"] for one in world["fresh"]]
    found: dict[str, Any] = {
        "scikit-learn per field": measure(baseline(texts, rights)(asked), world["fresh"]),
        "linear policy": measure(linear(texts, rights)(asked), world["fresh"]),
    }
    if not given.without_training:
        with tempfile.TemporaryDirectory() as home:
            done = pipeline(Path(home), world, given.method)
        found[f"run_pipeline --method {given.method}"] = measure(done["answers"], world["fresh"])
        found["report"] = done["report"]
    if given.json:
        print(json.dumps(found))
        return
    print("| learner | exact | fields right |\n| --- | --: | --: |")
    for name, figures in found.items():
        if name != "report":
            print(f"| {name} | {100 * figures['exact']:.1f} % | {100 * figures['fields']:.1f} % |")
    if "report" in found:
        report = found["report"]
        print(f"method: {report.get('training', {}).get('method')}; stage: {report.get('stage')}")
        for verdict in (report.get("sheet") or {}).get("verdicts", ()):
            print(f"{verdict['rule']}: {verdict['outcome']}: {verdict['words']}")


if __name__ == "__main__":
    main()
