"""Properties of undoing: any import, taken back, leaves every table as it was, on PostgreSQL too."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer.import_undo import import_undo
from tests.support.import_files import tables, written
from tests.support.imports import file_import
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import Server

pytestmark = pytest.mark.django_db


# --- Any import, taken back, leaves everything as it was --------------------------------------------------


AGENT, RATERS = "helper", ("ann", "bob", "cem")


IDS = [str(uuid.UUID(int=n)) for n in range(1, 7)]


WORDS: list[dict[str, Any]] = [
    {"thumb": "up"},
    {"thumb": "down"},
    {"stars": 2},
    {"score": 0.9},
    {"withdrawn": True},
]


@st.composite
def histories(draw: Any) -> list[dict[str, Any]]:
    """Rows of Ratchet's own format: decisions on two prompts with ratings, outcomes and traces, and comparisons."""
    ids = draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True))
    rows: list[dict[str, Any]] = []
    traced = draw(st.booleans())
    if traced:
        steps = [{"kind": "step", "name": "x"}]
        rows.append(
            {
                "type": "trace",
                "id": str(uuid.UUID(int=99)),
                "agent": AGENT,
                "steps": steps,
                "created_at": "2026-01-01T00:00:00Z",
            }
        )
    for id in ids:
        words = [
            {
                "rater": draw(st.sampled_from(RATERS)),
                "rater_kind": draw(st.sampled_from(["human", "simulated"])),
                **draw(st.sampled_from(WORDS)),
            }
            for _ in range(draw(st.integers(0, 3)))
        ]
        outcomes = [{"name": "clicked", "value": draw(st.integers(0, 3)), "at": "2026-01-02T00:00:00Z"}]
        rows.append(
            {
                **row_of(id),
                "ratings": words,
                "outcomes": outcomes if draw(st.booleans()) else [],
                "trace": str(uuid.UUID(int=99)) if traced and draw(st.booleans()) else None,
            }
        )
    for left in ids:
        for right in ids:
            if left < right and IDS.index(left) % 2 == IDS.index(right) % 2 and draw(st.booleans()):
                said = draw(st.sampled_from(["left", "right", "tie"]))
                rows.append(
                    {
                        "type": "comparison",
                        "left": left,
                        "right": right,
                        "preference": said,
                        "rater": draw(st.sampled_from(RATERS)),
                    }
                )
    return rows


def row_of(id: str) -> dict[str, Any]:
    prompt = f"prompt {IDS.index(id) % 2}"
    return {
        "type": "decision",
        "id": id,
        "agent": AGENT,
        "messages": [{"role": "user", "content": prompt}],
        "response": f"response {id[-1]}",
        "source": "app",
        "created_at": "2026-01-01T00:00:00Z",
    }


def people_act(seed: int) -> None:
    """What people and the app do here meanwhile: rate, change their minds, take back, compare, measure."""
    draw = random.Random(seed)
    for _ in range(draw.randrange(6)):
        rows = list(Decision.objects.order_by("pk"))
        if not rows or draw.random() < 0.2:
            facts = {name: value for name, value in row_of(draw.choice(IDS)).items() if name != "type"}
            decision_record(**facts)
            continue
        row, rater = draw.choice(rows), draw.choice(RATERS)
        standing = Rating.objects.filter(
            decision=row, rater=rater, superseded_by=None, withdrawn=False
        ).first()
        if standing is not None and draw.random() < 0.4:
            rating_withdraw(standing)
        elif draw.random() < 0.6:
            rating_submit(decision=row, rater=rater, thumb=draw.choice(["up", "down"]))
        elif draw.random() < 0.5:
            outcome_record(decision=row, name="opened", value=draw.random())
        else:
            others = [other for other in rows if other.prompt_hash == row.prompt_hash and other.pk != row.pk]
            if others:
                comparison_submit(left=row, right=draw.choice(others), preference="tie", rater=rater)


def in_a_world_of_its_own(work: Callable[[], None]) -> None:
    with transaction.atomic():
        work()
        transaction.set_rollback(True)


def consistent() -> None:
    """What holds of the database at any time."""
    for row in Decision.objects.all():
        standing = Rating.objects.filter(
            decision=row, superseded_by=None, withdrawn=False, rater_kind="human"
        )
        assert row.ratings_human == standing.count()
    for model, chain in ((Rating, ("decision_id", "rater")), (Comparison, ("left_id", "right_id", "rater"))):
        rows: Any = model._default_manager
        for key in set(rows.order_by().values_list(*chain)):
            words = list(rows.filter(**dict(zip(chain, key, strict=True))))
            assert sum(word.supersedes_id is None for word in words) == 1
            assert {word.supersedes_id for word in words} - {None} <= {word.pk for word in words}
            assert not any(word.withdrawn and word.supersedes_id is None for word in words)
    assert not Outcome.objects.exclude(decision__in=Decision.objects.values("pk")).exists()


PROPERTY = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # an example takes a tenth of a second: shrinking one would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@PROPERTY
@given(rows=histories(), seed=st.integers(0, 10**6))
def test_any_import_taken_back_leaves_every_table_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], seed: int
) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any.jsonl", rows)

    def work() -> None:
        people_act(seed)
        before = tables()
        report = file_import(path, skip_bad=True)
        if report.batch is None:
            return
        consistent()
        import_undo(report.batch, actor="x")
        assert tables() == before

    in_a_world_of_its_own(work)


@pytest.mark.campaign
@PROPERTY
@given(one=histories(), other=histories(), seed=st.integers(0, 10**6))
def test_two_imports_and_people_between_them_are_taken_back_in_either_order(
    tmp_path_factory: pytest.TempPathFactory, one: list[Any], other: list[Any], seed: int
) -> None:
    files = [
        written(tmp_path_factory.getbasetemp() / f"{name}.jsonl", rows)
        for name, rows in (("one", one), ("other", other))
    ]
    ends = []

    def work(order: int) -> None:
        people_act(seed)
        batches = []
        for n, file in enumerate(files):
            batches.append(file_import(file, skip_bad=True).batch)
            people_act(seed + n + 1)
        for number in batches[::order]:
            if number is not None:
                import_undo(number, actor="x")
                consistent()
        assert not Rating.objects.exclude(import_batch=None).exists()
        assert not Outcome.objects.exclude(import_batch=None).exists()
        said = {name: Decision.objects.filter(ratings_human__gt=0).count() for name in ("rated",)}
        ends.append(
            (sorted(map(str, Decision.objects.values_list("pk", flat=True))), said, Trace.objects.count())
        )

    for order in (1, -1):
        in_a_world_of_its_own(lambda order=order: work(order))  # type: ignore[misc]
    assert ends[0] == ends[1]


# --- PostgreSQL -------------------------------------------------------------------------------------------


ROUND = """
import json, sys
import django
django.setup()
from django.core.management import call_command
from feedback.agents.changes import agent_delete, agent_rename
from tests.support.imports import file_import
from feedback.transfer.import_undo import import_undo
from tests.support.import_files import tables
from tests.test_import_undo_properties import consistent, people_act
call_command("migrate", verbosity=0)
same = []
for seed in range(4):
    people_act(seed)
    before = tables()
    numbers = [file_import(path, skip_bad=True).batch for path in sys.argv[1:]]
    consistent()
    for number in numbers[::-1] if seed % 2 else numbers:
        import_undo(number, actor="x")
        consistent()
    same.append(tables() == before)
people_act(4)
file_import(sys.argv[1])
call_command("calculate_rewards", "--all", stdout=sys.stderr)
agent_rename("helper", "desk")
moved = {row["agent"] for rows in tables().values() for row in rows if "agent" in row}
agent_delete("desk", actor="x")
left = {name: len(rows) for name, rows in tables().items() if rows}
print(json.dumps([same, sorted(moved), left]))
"""


@pytest.mark.campaign
@pytest.mark.postgres
def test_postgresql_takes_imports_back_and_renames_and_deletes_agents(
    tmp_path: Path, postgres_url: str
) -> None:
    """Rows that came through COPY; chains, traces and foreign keys that are checked at the end of a transaction."""
    trace = str(uuid.UUID(int=99))
    words = [{"rater": rater, **said} for rater, said in zip(RATERS, WORDS, strict=False)]
    line = {"type": "trace", "id": trace, "agent": AGENT, "steps": [{"kind": "step", "name": "x"}]}
    outcome = {"name": "clicked", "value": 1, "at": "2026-01-02T00:00:00Z"}
    rows = [line, *({**row_of(id), "ratings": words, "outcomes": [outcome], "trace": trace} for id in IDS)]
    compared = {"type": "comparison", "left": IDS[0], "right": IDS[2], "preference": "left", "rater": "ann"}
    one = written(tmp_path / "one.jsonl", [*rows, compared])
    changed = [{**row_of(id), "ratings": [{"rater": "ann", "thumb": "down"}]} for id in IDS]
    other = written(tmp_path / "other.jsonl", [*changed, {**compared, "preference": "tie"}])
    server = Server(fresh_database(postgres_url), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(one), str(other)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env=server.environment,
    )
    assert done.returncode == 0, done.stderr
    same, moved, left = json.loads(done.stdout)
    assert same == [True] * 4
    # the name that was left stays hashed apart, also when the agent is gone
    assert (moved, left) == (["desk", "helper"], {"AgentName": 1})
