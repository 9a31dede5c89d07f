"""SIGKILL at random moments of child, worker, web, clock and database connection during retrains. Prints JSON.

The same ratings are learnt from once with kills and once without them: the champion must be the same. What else must
hold is in tests/crashing.py.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psycopg  # noqa: E402

from tests.crashing import QUICK, VICTIMS, Loop, faults  # noqa: E402
from tests.postgres import cluster  # noqa: E402
from tests.tiny import tiny_model  # noqa: E402

RATINGS = 60


def cut(database_url: str) -> bool:
    """End every connection to the database but this one."""
    with psycopg.connect(database_url.replace("postgres://", "postgresql://")) as connection:
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND usename IS NOT NULL"
        )
        return len(ended.fetchall()) > 0


def generation(loop: Loop, kills: int, choose: random.Random, url: str, counts: dict[str, int]) -> int:
    """Rate, and kill while the loop learns from it. Returns the kills that met something."""
    loop.rate(RATINGS)
    done = 0
    while done < kills and not loop.learnt():
        time.sleep(choose.uniform(0.5, 4.0))
        kind = choose.choice([*VICTIMS, "connection"] if url else VICTIMS)
        met = cut(url) if kind == "connection" else loop.kill(kind, choose)
        if met:
            done += 1
            counts[kind] = counts.get(kind, 0) + 1
            print(f"kill {sum(counts.values())}: {kind}", file=sys.stderr, flush=True)
    loop.wait(loop.learnt, 300)
    return done


def calmly(home: Path, base: Path, generations: int) -> dict[str, Any]:
    """The same ratings, learnt from in peace."""
    # what dtype is quick is measured once: measured twice on a busy machine it may come out otherwise, and so do bits
    (home / "cache").mkdir(parents=True)
    for measured in (home.parent / "cache").glob("hardware-*.json"):
        shutil.copy(measured, home / "cache")
    with Loop(home, base, config=QUICK) as loop:
        for _ in range(generations):
            loop.rate(RATINGS)
            loop.wait(loop.learnt, 300)
        return loop.facts()


def differences(facts: dict[str, Any], calm: dict[str, Any]) -> dict[str, list[str]]:
    """Policy -> what it was made of or became that is another without kills."""
    made, other = facts["made"], calm["made"]
    found = {
        name: [what for what in made[name] if made[name][what] != other.get(name, {}).get(what)]
        for name in made
    }
    return {name: what for name, what in found.items() if what}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="In all (default 50)")
    parser.add_argument("--per-run", type=int, default=5, help="At most in one retrain (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=["postgres", "sqlite"], default="postgres")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no generation after so long")
    options = parser.parse_args()
    choose, counts = random.Random(options.seed), {}
    started = time.monotonic()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-crash-")))
        url = stack.enter_context(cluster()) if options.database == "postgres" else ""
        base = tiny_model(home / "base")
        generations = 0
        with Loop(home, base, url, config=QUICK) as loop:
            while sum(counts.values()) < options.kills and time.monotonic() - started < options.seconds:
                left = options.kills - sum(counts.values())
                generation(loop, min(options.per_run, left), choose, url, counts)
                generations += 1
            facts: dict[str, Any] = loop.facts()
        found = faults(loop, facts)
        calm = calmly(home / "calm", base, generations)
        if calm["champion"] != facts["champion"]:
            found.append(f"the champion is {facts['champion']}, without kills it is {calm['champion']}")
    print(
        json.dumps(
            {
                "kills": counts, "generations": generations, "seconds": round(time.monotonic() - started),
                "database": options.database, "ratings": len(loop.sent), "runs": facts["runs"],
                "policies": facts["policies"], "champion": facts["champion"],
                "champion_without_kills": calm["champion"],
                "same_weights": facts["champion_sha256"] == calm["champion_sha256"], "attempts": facts["attempts"],
                "differences": differences(facts, calm),
                "faults": found,
            },
            indent=2,
        )
    )  # fmt: skip
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
