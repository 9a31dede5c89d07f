"""Our own format loses nothing: out, in and out again is the same to the last byte, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.recording.ingest import trace_record
from feedback.services import (
    comparison_submit,
    comparison_withdraw,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer import formats
from feedback.transfer.export import ExportReport, export_stream
from feedback.transfer.export_views import Selection
from tests.support.export_world import decided, exported, forget_everything
from tests.support.export_world import world as world
from tests.support.imports import file_import
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.django_db

TEXTS = ["plain", " spaces ", "Grüße\n\u2028", '{"json": [1]}', '\\u0041 \\ "', "😀", "0"]


def some_json(dice: random.Random, depth: int = 0) -> Any:
    if depth > 2 or dice.random() < 0.5:
        return dice.choice([*TEXTS, None, True, 3, -0.25, 1e-300, 2**70])
    if dice.random() < 0.5:
        return [some_json(dice, depth + 1) for _ in range(dice.randrange(3))]
    return {dice.choice(TEXTS): some_json(dice, depth + 1) for _ in range(dice.randrange(3))}


def some_history(seed: int) -> None:
    """Anything the services take, in any order, with times of any order."""
    dice = random.Random(seed)

    def when() -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=dice.randrange(10**12))

    def text() -> str:
        return dice.choice(TEXTS)

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if dice.random() < 0.5 else otherwise

    prompts = [[{"role": "user", "content": text(), "extra": some_json(dice)}] for _ in range(2)]
    decisions: list[Decision] = []
    for _ in range(6):
        decisions.append(
            decision_record(
                agent=dice.choice(["a", "b"]),
                messages=dice.choice(prompts),
                response=text(),
                state=maybe(some_json(dice), None),
                candidates=maybe([text(), {"response": text(), "score": dice.random()}], None),
                policy=maybe("p", ""),
                unit=maybe(text(), ""),
                arm=maybe("A", ""),
                propensity=maybe(1 - dice.random(), None),
                run_id=maybe("r", ""),
                latency_ms=maybe(dice.random() * 1e6, None),
                tokens_in=maybe(dice.randrange(1000), None),
                tokens_out=maybe(0, None),
                tags=maybe(["t", text()], []),
                metadata=maybe({"k": some_json(dice)}, {}),
                created_at=when(),
            ).row
        )
    for _ in range(3):
        step = {"kind": "decision", "messages": text(), "response": text(), "at": when().isoformat()}
        trace = trace_record(
            agent=dice.choice(["a", "b"]),
            steps=[{"kind": "reasoning", "text": text(), "n": some_json(dice)}, step],
            run_id=maybe("r", ""),
            metadata=maybe({"unit": text()}, {}),
            started_at=maybe(when(), None),
            finished_at=maybe(when(), None),
        )
        decisions.append(Decision.objects.get(pk=trace.decisions[0]))
    for _ in range(14):
        said = rating_submit(
            decision=dice.choice(decisions),
            rater=dice.choice(["ann", "bob"]),
            thumb=dice.choice(["up", "down", ""]),
            stars=maybe(dice.randrange(1, 6), None),
            score=maybe(dice.random(), None),
            correction=maybe("better " + text(), None),
            tags=maybe([text()], []),
            notes="n" + text(),
            rater_kind=dice.choice(["human", "simulated"]),
            created_at=when(),
        ).row
        if dice.random() < 0.3:
            rating_withdraw(said, created_at=when())
        outcome_record(decision=dice.choice(decisions), name="o", value=dice.random(), at=maybe(when(), None))
    for _ in range(14):
        left, right = dice.sample(decisions, 2)
        if (left.agent, left.prompt_hash) != (right.agent, right.prompt_hash):
            continue
        preferred = dice.choice(["left", "right", "tie", "both_bad"])
        compared = comparison_submit(
            left=left, right=right, preference=preferred, rater="ann", notes=text(), created_at=when()
        ).row
        if dice.random() < 0.3:
            comparison_withdraw(compared)


def columns() -> list[dict[str, Any]]:
    """Every column of every row, but for the number of the import that brought it."""
    return [
        {name: value for name, value in row.items() if name != "import_batch_id"}
        for model in (Trace, Decision, Rating, Comparison, Outcome)
        for row in model._default_manager.order_by("pk").values()
    ]


@pytest.mark.parametrize("seed", range(12))
def test_out_and_in_and_out_again_is_the_same_to_the_last_byte(seed: int, tmp_path: Path) -> None:
    some_history(seed)
    before, rows = exported(), columns()
    (tmp_path / "all.jsonl").write_bytes(before)
    again = file_import(tmp_path / "all.jsonl")
    assert (again.refused, again.decisions + again.ratings + again.comparisons + again.traces) == ([], 0)
    forget_everything()
    assert file_import(tmp_path / "all.jsonl").refused == []
    assert exported() == before
    for found, expected in zip(columns(), rows, strict=True):
        if "value" in expected:
            del found["body_hash"], expected["body_hash"]  # an outcome sent without a time is given one
        assert found == expected


def test_a_chain_is_written_in_its_order_whatever_its_times() -> None:
    decision = decided("a")
    late, early = datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    rating_submit(decision=decision, rater="ann", thumb="up", created_at=late)
    rating_submit(decision=decision, rater="ann", thumb="down", created_at=early)
    (line,) = exported().splitlines()
    assert [said["thumb"] for said in json.loads(line)["ratings"]] == ["up", "down"]


def test_an_agents_export_brings_the_traces_its_decisions_name() -> None:
    mine = trace_record(agent="helper", steps=[{"kind": "decision", "messages": "q", "response": "a"}])
    trace_record(agent="other", steps=[{"kind": "decision", "messages": "q", "response": "a"}])
    lines = [json.loads(line) for line in exported(selection=Selection("helper")).splitlines()]
    assert [(line["type"], line.get("trace")) for line in lines] == [
        ("trace", None),
        ("decision", str(mine.trace.pk)),
    ]


def test_a_decision_of_a_trace_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    trace_record(agent="helper", steps=[{"kind": "decision", "messages": "q", "response": "a"}])
    lines = exported().splitlines(keepends=True)
    forget_everything()
    (tmp_path / "x.jsonl").write_bytes(lines[1])
    found = file_import(tmp_path / "x.jsonl", skip_bad=True)
    assert [row.reason[:15] for row in found.refused] == ["trace: no trace"]


ROUND = """
import json, sys
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from pathlib import Path
from feedback.transfer.export_views import Selection
from feedback.transfer.export import ExportReport, export_stream, file_export
from feedback.transfer.formats import SHAPES
from tests.support.imports import file_import
call_command("migrate", verbosity=0)
home = Path(sys.argv[1])
brought = [file_import(home / "first.jsonl").as_dict() for _ in range(2)]
file_export(home / "second.jsonl", "ratchet", Selection())
counts = {}
for name in SHAPES:
    report = ExportReport(name)
    for piece in export_stream(name, Selection(), report):
        pass
    counts[name] = [report.samples, dict(report.left_out)]
with connection.cursor() as cursor:
    cursor.execute("TRUNCATE feedback_decision, feedback_trace CASCADE")
file_import(home / "second.jsonl")
file_export(home / "third.jsonl", "ratchet", Selection())
print(json.dumps([brought, counts]))
"""


@pytest.mark.campaign
@pytest.mark.postgres
def test_postgresql_gives_back_what_it_was_given(world: None, tmp_path: Path, postgres_url: str) -> None:
    """Superseded and withdrawn words, traces, comparisons, through COPY; and what every format says of them."""
    for seed in range(3):
        some_history(seed)
    first, second, third = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "third"))
    first.write_bytes(exported())
    server = Server(fresh_database(postgres_url), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(tmp_path)],
        env=server.environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    (brought, again), counts = json.loads(done.stdout)
    assert brought["decisions"] == Decision.objects.count()
    assert brought["refused"] == again["refused"] == []
    assert [again[kind] for kind in ("decisions", "ratings", "comparisons", "outcomes", "traces")] == [0] * 5
    assert third.read_bytes() == second.read_bytes()
    assert [json.loads(line) for line in second.read_bytes().splitlines()] == [
        json.loads(line) for line in first.read_bytes().splitlines()
    ]
    for name in formats.SHAPES:
        here = ExportReport(name)
        for _ in export_stream(name, Selection(), here):
            pass
        assert counts[name] == [here.samples, dict(here.left_out)], name
