"""Real small models on tasks whose right answers are known: what the loop makes of 100, 300 or 1,000 ratings.

    python benchmarks/real_models.py [--model smollm2] [--tasks news,spam,groups,shop,replies] [--rows 300]
                                     [--minutes 20] [--fresh 100] [--data DIR] [--home DIR] [--seed 0]
                                     [--learners base,examples,auto,linear,scikit-learn] [--json]

An app answers the known items and is wrong in 4 of 10. People rate each answer once: a correction (where it is wrong),
a thumb, or a choice between a right and a wrong answer. In an empty installation these are imported and
`run_pipeline --method auto` trains within the minutes. Five learners answer the same fresh items, and items in other
words: the base model as it is, the base with five right answers in its prompt, the policy, the linear policy and
scikit-learn (TF-IDF and logistic regression) on the same rows. Models answer as they are served: within the agent's
form where it has one. Prints the share of right answers in %, the minutes and the largest process's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real_tasks import TASKS, Item, Task  # noqa: E402

WRONG, CORRECTED, THUMBED = 0.4, 0.5, 0.3
"""Share of the app's answers that are wrong; shares of the rows with a correction (a thumb where the answer is right)
and with a thumb. The rest are choices between two answers."""

SHOWN = 5
"""Right answers in the prompt of the base model with examples."""


@dataclass(frozen=True)
class Feedback:
    """Rows for the importer, and the right answers they tell of, which the baselines learn from."""

    decisions: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    right: list[Item]


def rated(items: Sequence[Item], random: Random, free_text: bool) -> Feedback:
    """One rating of each item."""
    found = Feedback([], [], [])
    for number, item in enumerate(items):
        wrong, kind = random.random() < WRONG, random.random()
        row = {"id": f"d{number}", "prompt": item.prompt, "response": item.wrong if wrong else item.right}
        if kind > CORRECTED + THUMBED:
            right_first = random.random() < 0.5
            first, second = (item.right, item.wrong) if right_first else (item.wrong, item.right)
            found.pairs.append(
                {
                    "id": f"p{number}",
                    "prompt": item.prompt,
                    "response_a": first,
                    "response_b": second,
                    "preferred": "a" if right_first else "b",
                }
            )
            found.right.append(item)
            continue
        if wrong and kind < CORRECTED:
            found.decisions.append({**row, "thumb": "down", "correction": item.right})
        else:
            found.decisions.append({**row, "thumb": "down" if wrong else "up"})
        if not wrong or kind < CORRECTED:
            found.right.append(item)
    return found


class Installation:
    """An empty installation in a folder, used through its commands."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "RATCHET_HOME": str(home),
            "DATABASE_URL": f"sqlite:///{home}/db.sqlite3",
            "HF_HUB_OFFLINE": "1",
        }

    def manage(self, *words: str) -> str:
        """Standard output of a command; what it says beside goes to standard error as it comes."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(words)}: exit status {done.returncode}")
        return done.stdout

    def answers(self, policy: str, base_model: str, prompts: Sequence[Any]) -> list[str]:
        """Answers of a policy (`base` for the base model alone, `linear` for a linear one trained now)."""
        (self.home / "asked.json").write_text(
            json.dumps({"policy": policy, "base_model": base_model, "prompts": list(prompts), "agent": AGENT})
        )
        found: list[str] = json.loads(self.manage("shell", "--no-imports", "-c", ANSWERED).splitlines()[-1])
        return found


AGENT = "real"

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

asked = json.loads(Path(settings.RATCHET_HOME, "asked.json").read_text())
agent = agent_served(asked["agent"])
if asked["policy"] == "base":
    side = load_policy(asked["base_model"])
else:
    policy = Policy.objects.get(name=asked["policy"])
    if policy.kind == Policy.Kind.LINEAR:
        side = LinearSide(LinearPolicy.load(adapter_folder(policy)), agent)
    else:
        side = load_policy(policy.base_model, adapter_folder(policy))
print(json.dumps([answer.text for answer in generate_answers(side, asked["prompts"], agent)]))
"""
"""Script that prints the answers to the prompts of `asked.json`, as they are served."""


def with_examples(items: Sequence[Item], examples: Sequence[Item]) -> list[list[dict[str, str]]]:
    """Prompts with right answers to other prompts before the last turn."""
    shown = [
        turn
        for one in examples[:SHOWN]
        for turn in (one.prompt[-1], {"role": "assistant", "content": one.right})
    ]
    return [[item.prompt[0], *shown, item.prompt[-1]] for item in items]


def scikit(learnt: Sequence[Item], asked: Sequence[Item]) -> list[str]:
    """Answers of a logistic regression on a bag of words and word pairs."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=10, max_iter=1_000))
    model.fit([item.prompt[-1]["content"] for item in learnt], [item.right for item in learnt])
    return [str(answer) for answer in model.predict([item.prompt[-1]["content"] for item in asked])]


def measured(task: Task, given: argparse.Namespace, home: Path, model: str) -> dict[str, Any]:
    """The table of one task: learner -> share of right answers, fresh and in other words."""
    random = Random(given.seed + 1)
    feedback = rated(task.known[: given.rows], random, task.free_text)
    here = Installation(home)
    here.manage("migrate", "-v", "0")
    for name, rows in (("decisions", feedback.decisions), ("pairs", feedback.pairs)):
        file = home / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        here.manage("import_feedback", str(file), "--agent", AGENT)
    asked = {"fresh": task.fresh[: given.fresh], "other words": task.reworded[: given.fresh]}

    def shares(answers: Sequence[str]) -> dict[str, float]:
        items = [item for items in asked.values() for item in items]
        right = [task.is_right(item, answer) for item, answer in zip(items, answers, strict=True)]
        first = len(asked["fresh"])
        return {"fresh": statistics.fmean(right[:first]), "other words": statistics.fmean(right[first:])}

    items = [item for group in asked.values() for item in group]
    prompts = [item.prompt for item in items]
    found: dict[str, Any] = {}
    if "base" in given.learners:
        found["base"] = shares(here.answers("base", model, prompts))
    if "examples" in given.learners:
        found["examples"] = shares(here.answers("base", model, with_examples(items, feedback.right)))
    if "scikit-learn" in given.learners and not task.free_text:
        found["scikit-learn"] = shares(scikit(feedback.right, items))
    if "auto" in given.learners:
        began = time.monotonic()
        out = here.manage(
            "run_pipeline",
            "--agent",
            AGENT,
            "--model",
            model,
            "--method",
            "auto",
            "--minutes",
            f"{given.minutes:g}",
            "--json",
        )
        found["minutes"] = (time.monotonic() - began) / 60
        found["gigabytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        found["report"] = report = json.loads(out) if out.strip() else {}
        trained = report.get("policy") or (report.get("training") or {}).get("policy")
        if trained:
            found["auto"] = shares(here.answers(trained, model, prompts))
    if "linear" in given.learners and not task.free_text:
        line = here.manage("train_linear", "--agent", AGENT, "--json")
        linear = json.loads(line).get("policy") if line.strip() else None
        if linear:
            found["linear"] = shares(here.answers(linear, model, prompts))
    return found


LEARNERS = ("base", "examples", "auto", "linear", "scikit-learn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="As --model of the training commands")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--fresh", type=int, default=100, help="Fresh items, and as many in other words")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "ratchet-data")
    parser.add_argument(
        "--home", type=Path, help="Folder of the installations, which are kept; else a temporary one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learners", default=",".join(LEARNERS), help="Columns of the table to measure")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.learners = given.learners.split(",")
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = given.home or Path(folder)
        model = added(given.model, home)
        for name in given.tasks.split(","):
            task = TASKS[name](given.data, Random(given.seed))
            (home / name).mkdir(parents=True, exist_ok=True)
            tables[name] = measured(task, given, home / name, model)
            print(json.dumps({name: tables[name]}), file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(tables))
        return
    print("| task | asked | " + " | ".join(LEARNERS) + " | method | minutes | memory, GB |")
    print("| --- | --- |" + " --: |" * len(LEARNERS) + " --- | --: | --: |")
    for name, table in tables.items():
        for kind in ("fresh", "other words"):
            cells = [f"{100 * table[one][kind]:.0f}" if one in table else "" for one in LEARNERS]
            method = (table.get("report", {}).get("training") or {}).get("method", "")
            cost = f"{table['minutes']:.1f} | {table['gigabytes']:.1f}" if "minutes" in table else " | "
            print(f"| {name} | {kind} | {' | '.join(cells)} | {method} | {cost} |")


def added(model: str, home: Path) -> str:
    """The folder of a base model; a source such as `smollm2` is added once, beside the installations."""
    if Path(model).is_dir():
        return str(Path(model).resolve())
    home.mkdir(parents=True, exist_ok=True)
    here = Installation(home)
    here.manage("migrate", "-v", "0")
    here.manage("model", "add", model)
    models = json.loads(here.manage("model", "list", "--json"))["models"]
    return next(row["path"] for row in models if model in (row["name"], row["source"]))


if __name__ == "__main__":
    main()
