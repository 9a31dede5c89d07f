"""Answers that are objects of several values, taught by corrections, pairs and thumbs on the bundled base.

    python benchmarks/objects.py [--kinds corrections,pairs,thumbs,noisy_pairs,noisy_thumbs] [--notices 260]
                                 [--unseen 100] [--seed 5]

The world is made here and belongs to no built-in agent: notices of a block of flats, in Spanish, are answered with a
list of tags, a severity and whether somebody must be told at once; what is right depends on two troubles that a notice
names. In `pairs` and `thumbs` people saw the right answer and a random one; in the `noisy` kinds every answer is the
right one with values changed by chance, they prefer what is nearer and like what is near, and one verdict in ten is
flipped. Each kind goes by `run_pipeline --method auto` from a file to a policy and its gate; beside it DPO or KTO by
their own commands, on the same feedback. Judged are greedy answers to notices nobody rated. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PLACES = (
    "el portal",
    "la escalera",
    "el ascensor",
    "el garaje",
    "la azotea",
    "el patio",
    "el trastero",
    "la fachada",
)
TROUBLES = {
    "huele a gas": ("gas", 5),
    "hay una fuga de agua": ("agua", 4),
    "no hay luz": ("luz", 3),
    "la puerta no cierra": ("cerrajería", 2),
    "hay una gotera": ("agua", 3),
    "hay cables sueltos": ("luz", 5),
    "falta una bombilla": ("luz", 1),
    "hay basura acumulada": ("limpieza", 2),
    "hay grafitis": ("limpieza", 1),
    "el interfono no suena": ("cerrajería", 1),
}
PEOPLE = ("una vecina mayor", "el presidente", "un inquilino", "la portera", "un repartidor")
TAGS = ("gas", "agua", "luz", "cerrajería", "limpieza")
SYSTEM = (
    f"Clasifica el aviso de la comunidad. Responde en JSON con etiquetas ({', '.join(TAGS)}), gravedad (1 a 5) y "
    "avisar_ya."
)
CHANGED = 0.45
"""Probability that a value of a noisy answer was drawn anew."""
FLIPPED = 0.1
NEAR = 2.7
"""Agreement, of 3, from which on a noisy answer is liked."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Notice:
    """A notice and the right answer to it."""

    messages: list[dict[str, str]]
    right: dict[str, Any]


def notices(random: Random) -> list[Notice]:
    """All places, troubles and people, each with a second trouble drawn, in a random order."""
    made = []
    for place, trouble, who in product(PLACES, TROUBLES, PEOPLE):
        other = random.choice(list(TROUBLES))
        text = f"aviso de {who}: en {place} {trouble}; además {other}."
        severity = max(TROUBLES[trouble][1], TROUBLES[other][1])
        tags = sorted({TROUBLES[trouble][0], TROUBLES[other][0]})
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        made.append(Notice(messages, {"etiquetas": tags, "gravedad": severity, "avisar_ya": severity >= 4}))
    random.shuffle(made)
    return made


def text_of(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False)


def random_answer(random: Random) -> dict[str, Any]:
    tags = sorted(random.sample(TAGS, random.choice((1, 2))))
    return {"etiquetas": tags, "gravedad": random.randint(1, 5), "avisar_ya": random.random() < 0.5}


def noisy_answer(right: Mapping[str, Any], random: Random) -> dict[str, Any]:
    drawn = random_answer(random)
    return {key: drawn[key] if random.random() < CHANGED else value for key, value in right.items()}


def agreement(answer: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """From 0 to 3, one for each value that is right; a severity near the right one counts in part."""
    near = 1 - abs(answer["gravedad"] - right["gravedad"]) / 4
    return near + sum(answer[key] == right[key] for key in ("etiquetas", "avisar_ya"))


# --- Feedback ----------------------------------------------------------------------------------------------


def corrections(notice: Notice, number: int, random: Random) -> Row | None:
    said = {"response": text_of(random_answer(random)), "thumb": "down", "correction": text_of(notice.right)}
    return {"messages": notice.messages, **said}


def pairs(notice: Notice, number: int, random: Random) -> Row | None:
    sides = {"chosen": text_of(notice.right), "rejected": text_of(random_answer(random))}
    return {"prompt": notice.messages, **sides}


def thumbs(notice: Notice, number: int, random: Random) -> Row | None:
    answer = notice.right if number % 2 else random_answer(random)
    return _thumb(notice, answer, liked=number % 2 == 1)


def noisy_pairs(notice: Notice, number: int, random: Random) -> Row | None:
    sides = [noisy_answer(notice.right, random) for _ in range(2)]
    if sides[0] == sides[1]:
        return None
    sides.sort(key=lambda answer: (agreement(answer, notice.right), random.random()), reverse=True)
    if random.random() < FLIPPED:
        sides.reverse()
    return {"prompt": notice.messages, "chosen": text_of(sides[0]), "rejected": text_of(sides[1])}


def noisy_thumbs(notice: Notice, number: int, random: Random) -> Row | None:
    answer = noisy_answer(notice.right, random)
    liked = agreement(answer, notice.right) >= NEAR
    return _thumb(notice, answer, liked=liked != (random.random() < FLIPPED))


def _thumb(notice: Notice, answer: Mapping[str, Any], *, liked: bool) -> Row:
    return {"messages": notice.messages, "response": text_of(answer), "thumb": "up" if liked else "down"}


KINDS: dict[str, tuple[Callable[[Notice, int, Random], Row | None], str]] = {
    "corrections": (corrections, ""),
    "pairs": (pairs, "dpo"),
    "thumbs": (thumbs, "kto"),
    "noisy_pairs": (noisy_pairs, "dpo"),
    "noisy_thumbs": (noisy_thumbs, "kto"),
}
"""Kind of feedback -> maker of its rows, and the preference method beside `auto`."""


# --- Commands ----------------------------------------------------------------------------------------------


class Project:
    """A data folder of its own, in which commands are run."""

    def __init__(self, home: Path) -> None:
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "RATCHET_CONFIG"},
            "DATABASE_URL": f"sqlite:///{home / 'db.sqlite3'}",
            "RATCHET_HOME": str(home),
            "RATCHET_BASE_MODEL": "bundled",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.home = home

    def manage(self, *arguments: str) -> dict[str, Any]:
        """Output of a command with --json, read. Exits with the command's error where it fails."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
        printed: dict[str, Any] = json.loads(done.stdout) if "--json" in arguments else {}
        return printed

    def shares_right(self, policy: str, unseen: Sequence[Notice]) -> str:
        """Shares of a policy's greedy answers that are right, as a whole and value by value: cells of the table."""
        from rl.training.policy import generate, load_policy

        loaded = load_policy("bundled", self.home / "policies" / AGENT / policy)
        answers = generate(
            loaded, [notice.messages for notice in unseen], max_new_tokens=96, temperature=0.0, batch_size=50
        )
        right = dict.fromkeys(("whole", "etiquetas", "gravedad", "avisar_ya"), 0)
        for notice, answer in zip(unseen, answers, strict=True):
            try:
                read = json.loads(answer.text)
            except ValueError:
                continue
            if not isinstance(read, dict):
                continue
            right["whole"] += read == notice.right
            for key, value in notice.right.items():
                right[key] += read.get(key) == value
        return " | ".join(f"{count / len(unseen):.0%}" for count in right.values())


AGENT = "avisos"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--notices", type=int, default=260, help="Rated (default 260)")
    parser.add_argument("--unseen", type=int, default=100, help="Asked about in the end (default 100)")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    print(
        "| feedback | by | right as a whole | tags | severity | tell at once | gate |\n| --- | --- "
        + "| --- " * 5
        + "|"
    )
    for kind in options.kinds.split(","):
        make, preference_method = KINDS[kind]
        random = Random(options.seed)
        every = notices(random)
        rated, unseen = every[: options.notices], every[options.notices :][: options.unseen]
        rows = [row for number, notice in enumerate(rated) if (row := make(notice, number, random))]
        with tempfile.TemporaryDirectory(prefix="ratchet-objects-") as folder:
            home = Path(folder)
            project = Project(home)
            file = home / "notices.jsonl"
            file.write_text("".join(f"{text_of({**row, 'rater': 'marta'})}\n" for row in rows))
            project.manage("migrate", "--verbosity", "0")
            project.manage("import_feedback", str(file), "--agent", AGENT)
            made = project.manage("run_pipeline", "--agent", AGENT, "--method", "auto", "--json")
            figures = project.shares_right(made["policy"], unseen)
            print(
                f"| {kind} | auto: {made['training']['method']} | {figures} | {made['stage']} |", flush=True
            )
            if preference_method:
                other = project.manage(f"train_{preference_method}", "--agent", AGENT, "--json")
                figures = project.shares_right(other["policy"], unseen)
                print(f"| | {preference_method} | {figures} | - |", flush=True)


if __name__ == "__main__":
    main()
