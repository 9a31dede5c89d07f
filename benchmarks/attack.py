"""The campaign: everything that was tried against Ratchet, tried again. Prints tried and failed of each area.

    python benchmarks/attack.py            # all of it: 30,000 fuzz cases and more, 500 kills; hours on a laptop
    python benchmarks/attack.py --short    # every area, a few minutes each
    python benchmarks/attack.py --jobs 2       # two areas at a time
    python benchmarks/attack.py --only fuzz roles --fuzz 400

An attack is a test of `tests/` at a larger scale (`tests/support/campaign_scale.py`), or another benchmark that prints
JSON; nothing is written twice. What a machine cannot do (mounting a small disk, PostgreSQL) is counted as not
tried, with the reason. Exit code 1 where anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


SCALES = {
    "fuzz": (1000, 50, "Random requests per endpoint, beside those at the edges of its description"),
    "stateful": (300, 8, "Random orders of up to 50 requests"),
    "poison": (1000, 30, "Random sets of rows"),
    "kills": (500, 4, "Kills while it learns"),
    "per_run": (50, 2, "Kills in one retrain at most"),
    "flips": (200, 10, "Flipped bits per artefact"),
    "decisions": (20, 4, "Decisions that each of 50 raters rates twice"),
    "stops": (10, 2, "Stops of PostgreSQL"),
    "rounds": (10, 1, "Rounds of jumps of the clock"),
    "minutes": (15, 1, "Minutes of everything at once, on each database"),
    "slow_threads": (256, 16, "Threads of the web process that slow connections hold, but four"),
    "command_kills": (30, 2, "Kills of an import, and of an export"),
}
"""Option -> its number, its number with --short, and what it counts."""


@dataclass(frozen=True)
class Tests:
    """Tests that pytest runs, and the scale of them."""

    nodes: tuple[str, ...]
    scale: dict[str, int] = field(default_factory=dict)
    """Name -> number, as `tests.support.campaign_scale.scaled` reads it."""
    only: str = ""
    """pytest's -k."""


@dataclass(frozen=True)
class Script:
    """Another benchmark, its options, and where its JSON says what was tried and what failed."""

    name: str
    options: tuple[str, ...]


Step = Tests | Script


@dataclass
class Outcome:
    """Result of an area."""

    area: str
    tried: int = 0
    failed: int = 0
    not_tried: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    """Why something was not tried -> how often."""

    def failure(self, text: str) -> None:
        self.failed += 1
        self.failures.append(text)

    def skipped(self, reason: str, count: int = 1) -> None:
        self.not_tried += count
        self.reasons[reason] = self.reasons.get(reason, 0) + count

    def add(self, other: Outcome) -> None:
        self.tried += other.tried
        self.failed += other.failed
        self.seconds += other.seconds
        for reason, count in other.reasons.items():
            self.skipped(reason, count)


def areas(options: argparse.Namespace) -> dict[str, tuple[str, list[Step]]]:
    """Area -> its description and its steps at the scale that was asked for, the longest first."""
    fuzz, kills, poison = options.fuzz, options.kills, options.poison
    seed = {"SEED": options.seed}
    attacks = "tests/attacks"
    return {
        "kills": (
            "SIGKILL of child, worker, web, clock and database connection while it learns",
            [
                Script(
                    "crash.py", (f"--kills={kills}", f"--per-run={options.per_run}", f"--seed={options.seed}")
                )
            ],
        ),
        "soak": (
            "gateway, ratings, ingest, imports, undo, judging and retrains at once",
            [
                Script("soak.py", (f"--minutes={options.minutes}",)),
                Script("soak.py", (f"--minutes={options.minutes}", "--postgres")),
            ],
        ),
        "fuzz": (
            "random requests to every endpoint, valid and broken, against the API's own description",
            [Tests(("tests/test_api_schema.py",), {"FUZZ": fuzz})],
        ),
        "orders": (
            "requests in any order, held against a model of what must be stored",
            [Tests(("tests/test_api_stateful.py",), {"STATEFUL": options.stateful, "STATEFUL_STEPS": 50})],
        ),
        "roles": (
            "every address by everybody in every method, without CSRF tokens, with keys of every scope",
            [Tests(("tests/test_role_matrix.py", "tests/test_api_access.py", "tests/test_keys.py"))],
        ),
        "scripts": (
            "markup in every stored text on every page; Content-Security-Policy",
            [Tests(("tests/test_content_security.py",))],
        ),
        "accounts": (
            "guessing passwords and links, reused keys of idempotency, secrets in logs",
            [Tests(("tests/test_sign_in_brake.py", "tests/test_keys.py", "tests/test_production.py"))],
        ),
        "sandbox": (
            "escapes, system calls, memory and processes beyond the limits",
            [Tests(("tests/test_sandbox.py",))],
        ),
        "reward hacks": (
            "code that seems to pass its tests, each hack on each shape of tests",
            [Tests(("tests/test_reward_hacks.py",)), Script("reward_hacks.py", ("--json",))],
        ),
        "poison": (
            "any row that the API takes, read by every reader of many rows",
            [
                Tests(("tests/test_poison.py", "tests/test_forget.py")),
                Tests(("tests/test_poison.py",), {"POISON": poison}),
            ],
        ),
        "forgetting": (
            "a marker planted everywhere, forgotten, looked for, and sent again",
            [Tests(("tests/test_erasure.py", "tests/test_forget.py"))],
        ),
        "disk": (
            "full and read-only disks, with the database there, away, and on them",
            [
                Tests(("tests/test_disk.py", f"{attacks}/test_small_disk_commands.py")),
                Tests(
                    ("tests/test_export.py",), only="full_disk or too_little_space or failure or below_a_file"
                ),
            ],
        ),
        "budgets": ("each limit at its number and one above", [Tests(("tests/test_limits.py",))]),
        "bit flips": (
            "a bit of each kind of artefact, anywhere in it; damaged champions",
            [
                Tests((f"{attacks}/test_bit_flips.py",), {"FLIPS": options.flips, **seed}),
                Tests(("tests/test_integrity.py",)),
                Tests(("tests/test_serving.py",), only="damaged"),
            ],
        ),
        "raters": (
            "50 raters at once with double clicks and retries, through a kill and a restart",
            [
                Tests(
                    ("tests/test_concurrency.py",),
                    {"DECISIONS": options.decisions, "RATERS": 50},
                    only="many_raters_at_once",
                ),
                Tests(("tests/test_concurrency.py",), {"RATERS": 50}, only="not many_raters_at_once"),
            ],
        ),
        "outages": (
            "PostgreSQL stopped and started; what is served and logged while a database is away",
            [
                Tests((f"{attacks}/test_servers.py",), {"STOPS": options.stops}, only="stops"),
                Tests((f"{attacks}/test_outage_log.py",)),
                Tests(("tests/test_clock_outages.py", "tests/test_production.py")),
                Tests(("tests/test_gateway_live.py",), only="outage or killed"),
            ],
        ),
        "two servers": (
            "two servers on one folder and one database",
            [
                Tests((f"{attacks}/test_servers.py",), only="two_servers"),
                Tests(("clients/python/tests/test_sender.py",), only="share_a_spool or killed"),
            ],
        ),
        "clock": (
            "the clock set days and years forwards and back",
            [Tests((f"{attacks}/test_clock_jumps.py",), {"JUMPS": options.rounds})],
        ),
        "slow requests": (
            "connections that stop in a header, in a body, or before they begin",
            [Tests((f"{attacks}/test_slow_connections.py",), {"SLOW_THREADS": options.slow_threads})],
        ),
        "commands": (
            "imports and exports killed at any moment",
            [
                Tests(
                    (f"{attacks}/test_killed_commands.py",), {"COMMAND_KILLS": options.command_kills, **seed}
                )
            ],
        ),
        "backups": (
            "backups while others write, damaged ones, restoring, upgrading",
            [
                Tests(("tests/test_backup.py", "tests/test_upgrade.py", "tests/test_doctor.py")),
                Tests(("tests/test_commands.py",), only="newer_database"),
            ],
        ),
        "import files": (
            "bombs, damaged archives, hostile tables and files of other kinds",
            [Tests(("tests/test_archives.py", "tests/test_tables.py", "tests/test_import_batches.py"))],
        ),
        "model files": (
            "base models, templates and configurations that are damaged, hostile or without end",
            [Tests(("tests/test_base_models.py", "tests/test_chat_templates.py"))],
        ),
        "pending": (
            "ratings that arrive before their decision, here and at another server",
            [Tests(("tests/test_nothing_lost.py", "tests/test_recording.py", "tests/test_concurrency.py"))],
        ),
        "patterns": (
            "every regular expression of the product on hostile text of growing length",
            [Tests(("tests/test_patterns.py",))],
        ),
    }


def tests_run(step: Tests, outcome: Outcome) -> None:
    """Run pytest and count: a test is one attempt, or as many as it says itself (its property `tried`)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        scale = {f"RATCHET_ATTACK_{name}": str(number) for name, number in step.scale.items()}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-c",
                "pyproject.toml",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                "--timeout=7200",
                *(["-k", step.only] if step.only else []),
                *step.nodes,
            ],
            cwd=ROOT,
            env={**os.environ, "RATCHET_ATTACK": "1", **scale},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.is_file():
            outcome.failure(
                f"pytest {' '.join(step.nodes)} did not run: {done.stderr[-500:] or done.stdout[-500:]}"
            )
            return
        # written by the process above
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    if not cases:
        outcome.failure(f"pytest {' '.join(step.nodes)} -k {step.only!r} found no test")
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        if (skip := case.find("skipped")) is not None:
            outcome.skipped(str(skip.get("message"))[:200])
            continue
        counts = [p.get("value", "") for p in case.iter("property") if p.get("name") == "tried"]
        outcome.tried += sum(map(int, counts)) if counts else 1
        for kind in ("failure", "error"):
            if (fault := case.find(kind)) is not None:
                outcome.failure(f"{name}: {str(fault.get('message'))[:500]}")


def script_run(step: Script, outcome: Outcome) -> None:
    """Run another benchmark and count what its JSON says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / step.name), *step.options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        outcome.failure(f"{step.name} ended with {done.returncode}: {done.stderr[-500:]}")
        return
    if "paid_here" in found:
        outcome.tried += found["hacks"] * len(found["paid_here"])
        for shape, count in found["paid_here"].items():
            for _ in range(count):
                outcome.failure(f"a hack is paid where the tests are {shape}")
    else:
        tries = found["kills"] if "kills" in found else found["answers"]
        outcome.tried += sum(tries.values())
        for fault in found["faults"]:
            outcome.failure(fault)
        if not tries:
            outcome.failure("nothing was tried")


def attack(area: str, steps: Sequence[Step]) -> Outcome:
    """Try an area. Nothing stops the others."""
    outcome, began = Outcome(area), time.monotonic()
    for step in steps:
        if isinstance(step, Tests):
            tests_run(step, outcome)
        else:
            script_run(step, outcome)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def line(area: str, *numbers: object) -> str:
    return f"{area:14}" + "".join(
        f"{number:>12,}" if isinstance(number, int) else f"{number:>12}" for number in numbers
    )


def shown(outcome: Outcome) -> str:
    return line(outcome.area, outcome.tried, outcome.failed, outcome.not_tried, round(outcome.seconds))


def options_read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="Few of everything, for numbers that are not given"
    )
    parser.add_argument("--only", nargs="+", metavar="AREA", help="These areas alone")
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Areas at a time (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="Of what is random beside the fuzzer (default 0)")
    for name, (whole, short, text) in SCALES.items():
        help_text = f"{text} (default {whole:,}; with --short {short:,})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help_text)
    options = parser.parse_args()
    for name, (whole, short, _) in SCALES.items():
        if getattr(options, name) is None:
            setattr(options, name, short if options.short else whole)
    return options


def main() -> None:
    options = options_read()
    known = areas(options)
    if unknown := set(options.only or ()) - set(known):
        raise SystemExit(f"no area is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    outcomes = []
    if not options.json:
        print(line("area", "tried", "failed", "not tried", "seconds"), flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        attacks = [pool.submit(attack, area, known[area][1]) for area in options.only or known]
        for attacked in as_completed(attacks):
            outcomes.append(outcome := attacked.result())
            for failure in outcome.failures:
                print(f"{outcome.area}: {failure}", file=sys.stderr, flush=True)
            if not options.json:
                print(shown(outcome), flush=True)
    total = Outcome("all")
    for outcome in outcomes:
        total.add(outcome)
    if options.json:
        print(json.dumps({"areas": [asdict(outcome) for outcome in outcomes], "all": asdict(total)}))
    else:
        print(shown(total))
        for reason, count in sorted(total.reasons.items(), key=lambda item: -item[1]):
            print(f"not tried {count}: {reason}")
    sys.exit(1 if total.failed else 0)


if __name__ == "__main__":
    main()
