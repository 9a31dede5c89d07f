"""SIGKILL at random moments of child, worker, web, clock and database connection during retrains. Prints JSON.

Kills fall from the first rating of a retrain to the end of what follows it. A run that died several times is given
up by design, so what trains is spared once its run has few attempts left; what serves and clocks never is.
The same ratings are learnt from once with kills and once without them: the champion must be the same. What else must
hold is in tests/support/crash_loop.py.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psycopg  # noqa: E402

from tests.support.crash_loop import QUICK, Loop, faults  # noqa: E402
from tests.support.postgres import cluster  # noqa: E402
from tests.support.server import query  # noqa: E402
from tests.support.tiny_models import tiny_model  # noqa: E402

RATINGS = 60
PATIENCE_S = 1800.0
"""Longest wait for one retrain: on a machine that does other work too, some take ten minutes."""
MAX_ATTEMPTS, MAX_FOLLOW_UPS = 5, 3
"""As in `rl.jobs.lifecycle` and `rl.online.learner`, which need Django."""
DEADLY = ("child", "worker", "connection")
"""Kinds of kills that may cost a run one of its attempts."""
SPARED = {"attempts": MAX_ATTEMPTS - 2, "follow_ups": MAX_FOLLOW_UPS - 2}
"""Beyond these what trains is spared: one may begin between the look and the kill."""


def cut(database_url: str) -> bool:
    """End every connection to the database but this one."""
    with psycopg.connect(database_url.replace("postgres://", "postgresql://")) as connection:
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND usename IS NOT NULL"
        )
        return len(ended.fetchall()) > 0


class Killer(threading.Thread):
    """Kills at random moments while the loop is fed and learns, until it is stopped or has killed enough."""

    def __init__(self, loop: Loop, kills: int, choose: random.Random, url: str) -> None:
        super().__init__()
        self.loop, self.kills, self.choose, self.url = loop, kills, choose, url
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()

    def spared(self) -> bool:
        """True where the newest run has few attempts left."""
        sql = f"SELECT {', '.join(SPARED)} FROM rl_trainingrun WHERE follow_up <> 'done' ORDER BY id DESC LIMIT 1"
        return any(
            count > most
            for row in query(self.loop.server, sql)
            for count, most in zip(row, SPARED.values(), strict=True)
        )

    def run(self) -> None:
        while self.counts.total() < self.kills and not self.stop.wait(self.choose.uniform(0.2, 2.0)):
            if not self.loop.victims("child") and self.counts.total() > self.kills / 2:
                continue  # the other half is for the training
            kinds = ("web", "clock") if self.choose.random() < 0.5 or self.spared() else DEADLY
            kind = self.choose.choice([kind for kind in kinds if kind != "connection" or self.url])
            if cut(self.url) if kind == "connection" else self.loop.kill(kind, self.choose):
                self.counts[kind] += 1


def generation(loop: Loop, kills: int, choose: random.Random, url: str) -> Counter[str]:
    """Rate, and kill while the loop is fed and learns from it. Returns the kills that met something."""
    killer = Killer(loop, kills, choose, url)
    killer.start()
    try:
        loop.rate(RATINGS)
        loop.wait(loop.learnt, PATIENCE_S)
    finally:
        killer.stop.set()
        killer.join()
    return killer.counts


def calmly(home: Path, base: Path, generations: int) -> dict[str, Any]:
    """The same ratings, learnt from in peace."""
    # what dtype is quick is measured once: measured twice on a busy machine it may come out otherwise, and so do bits
    (home / "cache").mkdir(parents=True)
    for measured in (home.parent / "cache").glob("hardware-*.json"):
        shutil.copy(measured, home / "cache")
    with Loop(home, base, config=QUICK) as loop:
        for _ in range(generations):
            loop.rate(RATINGS)
            loop.wait(loop.learnt, PATIENCE_S)
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
    parser.add_argument("--per-run", type=int, default=50, help="At most in one retrain (default 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=["postgres", "sqlite"], default="postgres")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no generation after so long")
    options = parser.parse_args()
    choose, counts = random.Random(options.seed), Counter[str]()
    started = time.monotonic()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-crash-")))
        url = stack.enter_context(cluster()) if options.database == "postgres" else ""
        base = tiny_model(home / "base")
        generations = 0
        with Loop(home, base, url, config=QUICK, pause_s=0.5) as loop:
            while counts.total() < options.kills and time.monotonic() - started < options.seconds:
                left = options.kills - counts.total()
                counts += generation(loop, min(options.per_run, left), choose, url)
                generations += 1
                done = f"{counts.total()} kills in {generations} retrains, {time.monotonic() - started:.0f} s"
                print(done, file=sys.stderr, flush=True)
            killed_s = time.monotonic() - started
            facts: dict[str, Any] = loop.facts()
        found = faults(loop, facts)
        calm = calmly(home / "calm", base, generations)
        if calm["champion"] != facts["champion"]:
            found.append(f"the champion is {facts['champion']}, without kills it is {calm['champion']}")
        other = differences(facts, calm)
        found += [
            f"{name}: {', '.join(what)} differs from the run without kills" for name, what in other.items()
        ]
    print(
        json.dumps(
            {
                "kills": counts,
                "generations": generations,
                "seconds": round(time.monotonic() - started),
                "seconds_per_kill": round(killed_s / max(counts.total(), 1), 2),
                "database": options.database,
                "ratings": len(loop.sent),
                "runs": facts["runs"],
                "policies": facts["policies"],
                "champion": facts["champion"],
                "champion_without_kills": calm["champion"],
                "same_weights": len(facts["made"]) - len(other),
                "attempts": facts["attempts"],
                "faults": found,
            },
            indent=2,
        )
    )
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
