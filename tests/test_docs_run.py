"""The commands of docs/ are run, page by page, in a home that has what the pages speak of.

Of trainings the first of each method is a dry run; every method has tests of its own that train.
"""

import contextlib
import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from feedback.models import Decision, ImportBatch
from rl.models import Policy, RewardModelVersion
from rl.registry import service as registry
from tests.support.evaluations import judged
from tests.test_readme import PAGES, SHELLS, blocks, shell_lines

POLICIES = ("widgets-v280", "widgets-v312", "widgets-v480", "widgets-v980", "widgets-v4800")
"""Names of policies on the pages: one policy of the test under as many names."""

ELSEWHERE = {
    "--method preferred": "needs the example package, which tests/test_extending.py installs",
    "serve --only": "runs for ever; tests/test_workers.py starts it",
    "import_mlflow": "needs an MLflow server; tests/test_mlflow_in.py has one",
    "--register-ollama": "needs an Ollama server; tests/test_ollama.py has one",
    "--deploy-ollama": "needs an Ollama server; tests/test_ollama.py has one",
    "--format gguf --register": "needs an Ollama server; tests/test_ollama.py has one",
    "Qwen/": "needs a hub",
    "/models/my-llama": "is somebody's own folder",
    "--agent router": "is of an app that is not here; tests/test_agents.py registers an agent by its path",
    "manage.py backup": "writes where the page says; tests/test_backup.py writes elsewhere",
    "manage.py restore": "needs an empty home; tests/test_backup.py restores into one",
    "manage.py doctor": "looks at the machine; tests/test_doctor.py makes it well and ill",
    "--restore 3": "names a withdrawal; tests/test_forget.py makes one",
    "login_link": "tests/test_keys.py opens the link",
    "--resume 17": "goes on with a run that was stopped; tests/test_training_commands.py stops one",
    "run_pipeline": "trains; tests/test_pipeline.py runs it",
    "--key < key.txt": "reads a key from a file of the reader's; tests/test_upstreams.py sends one",
    "upstream test": "asks a provider; tests/test_upstreams.py asks a stub",
    "judging_round create": "asks a policy and its opponent; tests/test_judging.py begins rounds",
    "benchmark_model": "names a folder of tasks; tests/test_benchmarks.py runs it",
    "docker compose": "is not installed here; tests/test_container.py runs what the images run",
    "sudo": "changes the machine; the commands stand on other pages",
    "accelerate": "starts several processes; tests/test_launch.py runs it",
    "judging_round judge": "asks a judge; tests/test_judge_model.py asks one",
    "--step": "needs a hosted model with answers; tests/test_flywheel.py takes the steps",
    "--shadow": "needs a policy of the agent; tests/test_shadow.py starts one",
    "--order margin": "needs pairs with margins; tests/test_recipe_steps.py makes some",
}
"""Part of a command -> why it is not run here, and what runs it."""

LINES = [
    (block, line)
    for page in PAGES
    if page.name not in ("README.md", "start.md", "api.md")  # these have tests that run them word by word
    for block in blocks(page)
    if block.language in SHELLS
    for line in shell_lines(block)
    if "manage.py" in line and not any(part in line for part in ELSEWHERE)
]


def _rows(count: int) -> Iterator[dict[str, Any]]:
    """Single answers to different questions, liked every other time."""
    for i in range(count):
        answer = "It is at the depot." if i % 2 else "I do not know."
        yield {
            "question": f"Where is parcel {i}?",
            "answer": answer,
            "stars": 5 if i % 2 else 1,
            "who": "ann",
        }


def _files(folder: Path) -> None:
    """The files that pages name."""
    rows = list(_rows(44))
    tables: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "t.csv": lambda row: {"annotator": row["who"]},
        "points.csv": lambda row: {"points": 20 * row["stars"]},
        "verdict.csv": lambda row: {"verdict": "ok" if row["stars"] == 5 else "faulty"},
        "winner.csv": lambda row: {
            "answer_a": row["answer"],
            "answer_b": "No idea.",
            "winner": int(row["stars"] < 5),
        },
        "export.csv": lambda row: {"reviewer": row["who"]},
        "tickets.csv": lambda row: {
            "customer message": row["question"],
            "routed to": row["answer"],
            "ok?": "yes" if row["stars"] == 5 else "no",
        },
    }
    for name, more in tables.items():
        left_out: tuple[str, ...] = () if name in ("t.csv", "export.csv") else ("stars", "who")
        left_out += ("answer",) if name == "winner.csv" else ()
        left_out += ("question", "answer") if name == "tickets.csv" else ()
        table = [
            {key: value for key, value in row.items() if key not in left_out} | more(row) for row in rows
        ]
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    lines = {
        "prompts.jsonl": [
            {"prompt": f"Write add{i}.", "tests": f"assert add{i}(1, 2) == 3"} for i in range(12)
        ],
        "questions.jsonl": [{"prompt": f"{i} and {i}?", "answer": str(2 * i)} for i in range(12)],
        "ratings.jsonl": [
            {"prompt": row["question"], "completion": row["answer"], "label": row["stars"] == 5}
            for row in rows
        ],
        "t.jsonl": [
            {
                "request": {"messages": messages},
                "answer": {"choices": [{"message": {"content": row["answer"]}}]},
            }
            for messages, row in zip(asked, rows, strict=True)
        ],
    }
    for name, found in lines.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in found))
    pairs = [{"prompt": row["question"], "chosen": "It is here.", "rejected": row["answer"]} for row in rows]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    rated = [
        {"messages": messages, "response": row["answer"], "stars": row["stars"], "correction": "It is here."}
        for messages, row in zip(asked, rows, strict=True)
    ]
    (folder / "export.json").write_text(json.dumps(rated))


def ran(line: str) -> str:
    """Run one command in this process; what it printed. Raises where it ends with another code than 0."""
    words = shlex.split(line, comments=True)
    words = words[words.index("manage.py") + 1 :]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):  # what `shell` runs prints there
        call_command(words[0], *words[1:], stdout=out, stderr=io.StringIO())
    return out.getvalue()


def _world() -> RewardModelVersion:
    """Agents, policies and runs that pages speak of; the reward model."""
    for agent, scenarios in (("widgets", 10), ("filer", 4)):
        ran(f"manage.py simulate {agent} --scenarios {scenarios} --rate simulated --raters 2")
    for agent in ("support-bot", "desk", "support"):
        ran(f"manage.py import_feedback export.json --agent {agent}")
    one = Decision.objects.filter(agent="filer").values("pk")[:1]
    Decision.objects.filter(pk__in=list(one.values_list("pk", flat=True))).update(unit="user-17")
    ran("manage.py train_dpo --agent widgets --max-steps 1 --min-samples 1")
    ran("manage.py train_reward_model --agent widgets --max-steps 1 --min-samples 1")
    policy = Policy.objects.get(agent="widgets")
    for name in POLICIES:
        policy.pk, policy.run, policy.name = None, None, name
        policy.save()
    registry.policy_promote(
        Policy.objects.get(name="widgets-v280"), actor="test", force=True, reason="the first"
    )
    return RewardModelVersion.objects.get(agent="widgets")


def _better() -> None:
    """The policies that pages promote were judged, and are better than the champion."""
    for name in ("widgets-v480", "widgets-v980"):
        judged(Policy.objects.get(name=name), "widgets-v280", both=20, wins=25, neither=5)


def _not_added() -> None:
    """The page of the gateway exported this model's file, which added it."""
    ran("manage.py model remove smollm2")


BEFORE = {"experiments.md": _better, "registry.md": _better, "models.md": _not_added}
"""Page -> what happened before what it says."""


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_commands_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.chdir(tmp_path)
    settings.ENABLE_CODE_EXECUTION = True
    _files(tmp_path)
    judge = _world()
    failed: list[str] = []
    trained: set[str] = set()
    page = ""
    for block, line in LINES:
        if block.page != page:
            page = block.page
            BEFORE.get(page, lambda: None)()
        for name, real in (
            ("model:17", f"model:{judge.run_id}"),
            ("model:widgets-rm-v480", f"model:{judge.name}"),
        ):
            line = line.replace(name, real)
        for column in ("points", "verdict", "winner"):
            line = line.replace("t.csv", f"{column}.csv") if f"={column}:" in line else line
        if "undo_import" in line:
            line = line.replace(" 7", f" {ImportBatch.objects.latest('pk').pk}")
        if method := re.search(r"manage.py train_\w+", line):
            if method[0] in trained:
                continue  # test_readme.py parses every line
            trained.add(method[0])
            line = line if "--dry-run" in line else f"{line.split(' #')[0]} --dry-run"
        try:
            said = ran(line)
        except (CommandError, SystemExit) as error:
            failed.append(f"{block}: {line}: {error}")
        else:
            assert said.strip(), f"{block}: {line} said nothing"
    assert not failed, "\n".join(failed)
