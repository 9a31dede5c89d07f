"""Undoing an import: what it brought goes, what people did since stays, and what was trained on it refuses."""

import io
import json
import random
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from feedback.erasure.service import unit_forget
from feedback.models import Comparison, Decision, ImportBatch, Outcome, Rating, Trace
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer.import_undo import import_undo
from rl.datasets import prepare_training_dataset
from rl.models import RewardRecord, TrainingRun
from tests.support.import_files import PAIR, THUMB, failing, named, tables, written
from tests.support.imports import file_import
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.registry_rows import make_run, policy_of
from tests.support.said import command
from tests.support.server import Server

pytestmark = pytest.mark.django_db


def test_an_undone_import_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    decision_record(agent="helper", messages="q", response="here before")
    before = tables()
    number = file_import(written(tmp_path / "x.jsonl", [PAIR, THUMB]), agent="helper", format="trl").batch
    tried = command("undo_import", str(number), "--dry-run")
    assert tables() != before
    done = command("undo_import", str(number))
    assert tables() == before
    assert (done["decisions"], done["ratings"], done["comparisons"], done["undone"]) == (3, 1, 1, True)
    assert tried.pop("next") == f"python manage.py undo_import {number}"
    assert done.pop("next") == "python manage.py imports"
    assert {**tried, "dry_run": False, "undone": True} == done
    batch = ImportBatch.objects.get()
    assert batch.is_undone
    assert (batch.undone_by, batch.undone["decisions"]) == ("undo_import", 3)
    assert "was undone on" in failing("undo_import", str(number))[1]
    assert "there is no import 9999" in failing("undo_import", "9999")[1]
    # and in again, as a new one
    assert file_import(tmp_path / "x.jsonl", agent="helper", format="trl").batch != number
    assert Rating.objects.count() == 1


def test_a_decision_that_a_person_rated_here_stays_with_that_rating(tmp_path: Path) -> None:
    rows = [{**THUMB, "prompt": f"q{n}"} for n in range(3)]
    number = file_import(written(tmp_path / "x.jsonl", rows), agent="helper", format="trl").batch
    rated = Decision.objects.get(messages__0__content="q1")
    mine = rating_submit(decision=rated, rater="ada", thumb="down").row
    assert Decision.objects.get(pk=rated.pk).ratings_human == 2
    done = import_undo(number, actor="ada")
    assert (done.decisions, done.decisions_kept, done.ratings) == (2, 1, 3)
    assert Decision.objects.get().pk == rated.pk
    assert Decision.objects.get().ratings_human == 1
    assert Rating.objects.get().pk == mine.pk
    # imported again, the verdict of the file is back beside the person's
    again = file_import(tmp_path / "x.jsonl", agent="helper", format="trl")
    assert (again.decisions, again.ratings) == (2, 3)
    import_undo(again.batch or 0, actor="ada")
    assert Rating.objects.get().pk == mine.pk


def test_a_word_that_was_changed_here_stands_by_itself_afterwards(tmp_path: Path) -> None:
    number = file_import(written(tmp_path / "x.jsonl", [named("ann", thumb="up")])).batch
    changed = rating_submit(decision=Decision.objects.get(), rater="ann", thumb="down").row
    assert Rating.objects.get(pk=changed.pk).supersedes is not None
    done = import_undo(number or 0, actor="x")
    assert (done.ratings, done.decisions_kept) == (1, 1)
    row = Rating.objects.get()
    assert (row.pk, row.supersedes, row.thumb) == (changed.pk, None, "down")
    assert Decision.objects.get().ratings_human == 1


def test_a_word_that_was_taken_back_here_goes_with_its_withdrawal(tmp_path: Path) -> None:
    before = tables()
    number = file_import(written(tmp_path / "x.jsonl", [named("ann", thumb="up")])).batch
    rating_withdraw(Rating.objects.get())
    done = import_undo(number or 0, actor="x")
    assert (done.ratings, done.withdrawals, done.decisions, done.decisions_kept) == (1, 1, 1, 0)
    assert tables() == before


def test_what_an_import_superseded_stands_again(tmp_path: Path) -> None:
    id = "11111111-1111-4111-8111-111111111111"
    here = decision_record(agent="helper", messages="q", response="a", id=id, source="ratchet").row
    rating_submit(decision=here, rater="ann", thumb="down")
    rating_submit(decision=here, rater="bob", thumb="down")
    before = tables()
    row = named("ann", thumb="up")
    row["ratings"] += [{"rater": "bob", "withdrawn": True}, {"rater": "cem", "stars": 4}]
    number = file_import(written(tmp_path / "x.jsonl", [row])).batch
    assert Decision.objects.get().ratings_human == 2
    import_undo(number or 0, actor="x")
    assert tables() == before
    assert Decision.objects.get().ratings_human == 2


def test_a_decision_that_two_imports_spoke_of_goes_with_the_second(tmp_path: Path) -> None:
    before = tables()
    first = file_import(written(tmp_path / "x.jsonl", [named("ann", thumb="up")])).batch or 0
    second = file_import(written(tmp_path / "y.jsonl", [named("bob", thumb="down")])).batch or 0
    done = import_undo(first, actor="x")
    assert (done.decisions, done.decisions_kept, done.ratings) == (0, 1, 1)
    assert Rating.objects.get().rater == "bob"
    done = import_undo(second, actor="x")
    assert (done.decisions, done.ratings) == (1, 1)
    assert tables() == before


def test_later_imports_that_found_rows_here_are_named(tmp_path: Path) -> None:
    first = file_import(written(tmp_path / "x.jsonl", [THUMB]), agent="helper", format="trl").batch or 0
    both = written(tmp_path / "y.jsonl", [THUMB, {**THUMB, "prompt": "another"}])
    second = file_import(both, agent="helper", format="trl").batch
    assert import_undo(first, actor="x").imports_since == [second]


def test_outcomes_traces_and_rewards_go_with_their_decisions(tmp_path: Path) -> None:
    before = tables()
    trace, outcome = str(uuid.uuid4()), {"name": "clicked", "value": 1, "at": "2026-01-01T00:00:00Z"}
    rows = [
        {"type": "trace", "id": trace, "agent": "helper", "steps": [{"kind": "tool_call", "name": "find"}]},
        {**named("ann", thumb="up"), "trace": trace, "outcomes": [outcome]},
    ]
    number = file_import(written(tmp_path / "x.jsonl", rows)).batch or 0
    row = Decision.objects.get()
    call_command("calculate_rewards", "--all", stdout=io.StringIO())
    assert RewardRecord.objects.filter(decision=row.pk).exists()
    done = import_undo(number, actor="x")
    assert (done.outcomes, done.traces) == (1, 1)
    assert tables() == before


def test_a_trace_that_an_import_gave_to_an_earlier_decision_is_taken_from_it(tmp_path: Path) -> None:
    id, trace = "11111111-1111-4111-8111-111111111111", str(uuid.uuid4())
    decision_record(agent="helper", messages="q", response="a", id=id, source="ratchet")
    before = tables()
    rows = [
        {"type": "trace", "id": trace, "agent": "helper", "steps": [{"kind": "tool_call", "name": "find"}]},
        {**named("ann", thumb="up"), "trace": trace},
    ]
    number = file_import(written(tmp_path / "x.jsonl", rows)).batch or 0
    assert str(Decision.objects.get().trace_id) == trace
    import_undo(number, actor="x")
    assert tables() == before


def test_a_trace_of_an_undone_import_goes_with_the_last_that_needed_it(tmp_path: Path) -> None:
    id, trace = "11111111-1111-4111-8111-111111111111", str(uuid.uuid4())
    line = {"type": "trace", "id": trace, "agent": "helper", "steps": [{"kind": "tool_call", "name": "find"}]}
    decision_record(agent="helper", messages="q", response="a", id=id, source="ratchet")
    before = tables()
    first = file_import(written(tmp_path / "x.jsonl", [line])).batch or 0
    second = (
        file_import(written(tmp_path / "y.jsonl", [{**named("ann", thumb="up"), "trace": trace}])).batch or 0
    )
    assert (import_undo(first, actor="x").traces, Trace.objects.count()) == (0, 1)
    assert import_undo(second, actor="x").traces == 1
    assert tables() == before


def trained(agent: str = "helper") -> TrainingRun:
    run = make_run(agent, snapshot=prepare_training_dataset(agent).snapshot)
    policy_of(f"{agent}-v12", "candidate", agent, run=run)
    return run


def pairs(tmp_path: Path, name: str = "x") -> int:
    rows = [{"prompt": f"{name} asks {n}", "chosen": "good", "rejected": "bad"} for n in range(12)]
    return file_import(written(tmp_path / f"{name}.jsonl", rows), agent="helper").batch or 0


def test_what_was_trained_on_refuses_unless_forced(tmp_path: Path) -> None:
    number = pairs(tmp_path)
    run = trained()
    before = tables()
    out, line = failing("undo_import", str(number), "--json")
    assert f"run {run.pk}, policy helper-v12 were trained on it" in line
    assert "--force" in line
    assert json.loads(out)["trained_on"]["policies"] == ["helper-v12"]
    assert tables() == before
    assert command("undo_import", str(number), "--force")["trained_on"]["runs"] == [run.pk]
    assert not Decision.objects.exists()
    assert ImportBatch.objects.get().undone["forced"] is True


def test_what_was_trained_before_or_on_other_prompts_refuses_nothing(tmp_path: Path) -> None:
    pairs(tmp_path, "first")
    trained()
    assert import_undo(pairs(tmp_path, "second"), actor="x").trained_on == {}


def test_runs_that_came_to_nothing_refuse_nothing(tmp_path: Path) -> None:
    number = pairs(tmp_path)
    prepared = prepare_training_dataset("helper")
    for status in ("failed", "cancelled", "refused"):
        make_run("helper", snapshot=prepared.snapshot, status=status)
    assert import_undo(number, actor="x").trained_on == {"snapshots": [prepared.snapshot.pk]}


def test_feedback_alone_can_undo_where_nothing_knows_of_training(tmp_path: Path, settings: Any) -> None:
    number = pairs(tmp_path)
    trained()
    settings.FEEDBACK_TRAINED_ON = settings.FEEDBACK_FORGET = ""
    assert import_undo(number, actor="x").decisions == 24


def test_a_unit_that_was_forgotten_does_not_hinder_the_undo(tmp_path: Path) -> None:
    before = tables()
    rows = [
        {**named("ann", thumb="up"), "unit": "bob"},
        {**named("ann", thumb="up"), "id": str(uuid.uuid4())},
    ]
    number = file_import(written(tmp_path / "x.jsonl", rows)).batch or 0
    unit_forget("bob")
    assert import_undo(number, actor="x").decisions == 1
    assert tables() == before


def test_forgetting_a_unit_takes_it_out_of_the_report_of_refused_rows(tmp_path: Path) -> None:
    bad = {**named("ann", thumb="sideways by user-17"), "id": str(uuid.uuid4())}
    rows = [{**named("ann", thumb="up"), "unit": "user-17"}, bad]
    file_import(written(tmp_path / "x.jsonl", rows), skip_bad=True)
    assert "user-17" in json.dumps(ImportBatch.objects.get().refused)
    unit_forget("user-17")
    assert "user-17" not in json.dumps(ImportBatch.objects.get().refused)
    assert ImportBatch.objects.get().counts["refused"] == 1


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
def test_any_undo(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], seed: int) -> None:
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


ROUND = """
import json, sys
import django
django.setup()
from django.core.management import call_command
from feedback.agents import agent_delete
from tests.support.imports import file_import
from feedback.transfer.import_undo import import_undo
from tests.support.import_files import tables
from tests.test_import_undo import consistent, people_act
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
agent_delete("helper", actor="x")
left = {name: len(rows) for name, rows in tables().items() if rows}
print(json.dumps([same, left]))
"""


@pytest.mark.campaign
@pytest.mark.postgres
def test_postgresql_takes_imports_back(tmp_path: Path, postgres_url: str) -> None:
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
    same, left = json.loads(done.stdout)
    assert same == [True] * 4
    assert left == {}
