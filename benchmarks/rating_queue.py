"""How long the next card takes with many decisions, and the pages that find them: the queue alone, and whole pages.

    python benchmarks/rating_queue.py [--decisions 100000] [--samples 300] [--database-url URL] [--explain]

Starts a throwaway PostgreSQL cluster with its default settings (or takes an empty database of its own at URL), fills
it with decisions of three agents, a third of them rated, one in ten to be rated twice, on four responses per prompt,
and lets twenty raters take, rate and skip cards one after another. Prints one JSON object; times in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.support.postgres import cluster  # noqa: E402

RATERS = 20
FILL = """
INSERT INTO feedback_decision (id, agent, messages, prompt_hash, response, policy, unit, arm, propensity, run_id, tags,
  metadata, source, body_hash, created_at, ratings_human, ratings_wanted, annotation_priority)
SELECT gen_random_uuid(), agent,
  jsonb_build_array(jsonb_build_object('role', 'system', 'content', repeat('You answer customers of a shop. ', 4)),
    jsonb_build_object('role', 'user', 'content', 'Where is order ' || (n / 4) || '? ' || repeat('It is late. ', 20))),
  encode(sha256((agent || n / 4)::bytea), 'hex'),
  'Order ' || n || ' is on its way. ' || repeat('I am sorry that it takes so long. ', 8),
  agent || '-v' || ((n / 2) % 2 + 1), 'user-' || (n % 5000), '',
  CASE WHEN n % 3 = 0 THEN 0.5 + (n % 50) / 100.0 END, '',
  CASE WHEN n % 50 = 0 THEN '["billing"]'::jsonb ELSE '[]'::jsonb END, '{}', 'app', '',
  now() - (%(n)s - n) * interval '20 seconds',
  CASE WHEN n % 10 = 0 THEN n % 3 WHEN n % 3 = 0 THEN 1 ELSE 0 END, CASE WHEN n % 10 = 0 THEN 2 ELSE 1 END,
  CASE WHEN n % 3 = 0 THEN 0.5 - (n % 50) / 100.0 ELSE 0 END
FROM (SELECT n, (ARRAY['support-bot', 'widgets', 'filer'])[(n / 4) % 3 + 1] AS agent
      FROM generate_series(1, %(n)s) AS n) AS numbered;
"""
RATE = """
INSERT INTO feedback_rating (id, decision_id, rater, rater_kind, thumb, tags, notes, withdrawn, body_hash, created_at)
SELECT gen_random_uuid(), id, 'rater-' || abs(hashtext(id::text)) % 20 + k, 'human',
  CASE WHEN abs(hashtext(id::text)) % 3 = 0 THEN 'down' ELSE 'up' END, '[]', '', false, '',
  created_at + interval '1 hour'
FROM feedback_decision CROSS JOIN LATERAL generate_series(1, ratings_human) AS k;
"""


PAGES = {
    "start_page": "/",
    "pairs_page": "/rate/pairs/",
    "decisions_newest": "/decisions/",
    "decisions_of_agent_and_policy": "/decisions/?agent=filer&policy=filer-v2",
    "decisions_with_text_in_every_20th": "/decisions/?q=order+1024",
    "decisions_with_text_in_none": "/decisions/?q=nowhere+to+be+found",
    "decisions_rated_bad": "/decisions/?rated=bad",
    "decisions_with_tag": "/decisions/?tag=billing",
}


@contextmanager
def django_at(url: str) -> Iterator[None]:
    """Django set up in this process, migrated, on a data folder of its own."""
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(DATABASE_URL=url, RATCHET_HOME=home, DJANGO_SETTINGS_MODULE="backend.settings")
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        yield
        connections.close_all()


def fill(decisions: int) -> float:
    """Seconds it took."""
    from django.db import connection

    began = time.perf_counter()
    with connection.cursor() as cursor:
        cursor.execute(FILL.replace("%(n)s", str(decisions)))
        cursor.execute(RATE)
        cursor.execute("VACUUM ANALYZE")
    return time.perf_counter() - began


def cuts(found: list[float]) -> dict[str, float]:
    marks = statistics.quantiles(found, n=100)
    return {
        "p50": round(marks[49], 2),
        "p95": round(marks[94], 2),
        "max": round(max(found), 2),
        "n": len(found),
    }


def timed(work: Callable[[int], Any], samples: int) -> dict[str, float]:
    for number in range(10):
        work(number)
    found = []
    for number in range(samples):
        began = time.perf_counter()
        work(number + 10)
        found.append(1e3 * (time.perf_counter() - began))
    return cuts(found)


def measure(samples: int) -> dict[str, Any]:
    from django.contrib.auth.models import Group, User
    from django.test import Client
    from django.utils import timezone

    from feedback.explorer.search import DecisionFilter
    from feedback.rating.pair_views import pairs_waiting
    from feedback.rating.queue import decision_take, queue_progress
    from feedback.services import rating_submit

    dice = random.Random(1)
    day = timezone.localdate() - timedelta(days=5)
    narrowed = DecisionFilter(agent="support-bot")

    def take(within: DecisionFilter) -> Callable[[int], None]:
        def one(number: int) -> None:
            decision_take(f"rater-{number % RATERS}", within)

        return one

    def rate(number: int) -> None:
        rater = f"rater-{number % RATERS}"
        decision = decision_take(rater)
        assert decision is not None
        rating_submit(decision=decision, rater=rater, thumb=dice.choice(["up", "down"]))

    reader = Client(HTTP_HOST="localhost")
    reader.force_login(User.objects.create_superuser("reader"))
    clients = []
    for number in range(RATERS):
        user = User.objects.create_user(f"rater-{number}")
        user.groups.add(Group.objects.get(name="rater"))
        client = Client(HTTP_HOST="localhost")
        client.force_login(user)
        clients.append(client)

    def page(number: int) -> None:
        client = clients[number % RATERS]
        shown = client.get("/rate/", headers={"X-Ratchet-Card": "1"})
        assert shown.status_code == 200, shown.status_code
        found = re.search(rb'data-shown="([^"]+)"', shown.content)
        assert found is not None
        sent = {"id": str(uuid.uuid4()), "decision": found[1].decode(), "verdict": "up"}
        answer = client.post("/rate/", sent, headers={"X-Ratchet-Card": "1"})
        assert answer.status_code == 200, answer.status_code

    def opened(path: str) -> None:
        answer = reader.get(path)
        assert answer.status_code == 200, (path, answer.status_code)

    return {
        "next_card": timed(take(DecisionFilter()), samples),
        "next_card_of_one_agent": timed(take(narrowed), samples),
        "next_card_of_a_tag": timed(take(DecisionFilter(tag="billing")), samples),
        "next_card_of_a_policy": timed(take(DecisionFilter(policy="filer-v2")), samples),
        "next_card_of_a_day": timed(take(DecisionFilter(since=day, until=day)), samples),
        "next_card_since_a_day": timed(take(DecisionFilter(since=day)), samples),
        "next_card_of_an_agent_and_tag": timed(
            take(DecisionFilter(agent="support-bot", tag="billing")), samples
        ),
        "next_card_of_an_unknown_tag": timed(take(DecisionFilter(tag="unknown")), samples),
        "progress": timed(lambda n: queue_progress(f"rater-{n % RATERS}"), samples),
        "progress_of_a_tag": timed(
            lambda n: queue_progress(f"rater-{n % RATERS}", DecisionFilter(tag="billing")), samples
        ),
        "take_and_rate": timed(rate, samples),
        "page_get_and_rate": timed(page, samples),
        "next_pair": timed(lambda n: pairs_waiting(f"rater-{n % RATERS}"), samples // 3),
        **{name: timed(lambda _, path=path: opened(path), samples // 3) for name, path in PAGES.items()},
    }


def explained() -> None:
    """How the queue is walked, on stderr."""
    from feedback.explorer.search import DecisionFilter
    from feedback.rating.queue import queue_sort, stretches

    for within in (DecisionFilter(), DecisionFilter(policy="filer-v2"), DecisionFilter(tag="billing")):
        for stretch in stretches(within):
            for lane in stretch.lanes:
                sys.stderr.write(f"{within}\n{queue_sort(lane).values('pk')[:50].explain(analyze=True)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decisions", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--database-url", default="", help="An empty PostgreSQL database of its own")
    parser.add_argument("--explain", action="store_true", help="Print the plan of the next card too")
    options = parser.parse_args()

    def run(url: str) -> None:
        with django_at(url):
            seconds = fill(options.decisions)
            if options.explain:
                explained()
            figures = measure(options.samples)
        machine = {
            "cpus": psutil.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        sys.stdout.write(
            json.dumps(
                {
                    "benchmark": "queue",
                    "database": "postgresql",
                    "decisions": options.decisions,
                    "fill_seconds": round(seconds, 1),
                    "unit": "ms",
                    **figures,
                    "machine": machine,
                }
            )
            + "\n"
        )

    if options.database_url:
        run(options.database_url)
    else:
        with cluster([]) as url:
            run(url)


if __name__ == "__main__":
    main()
