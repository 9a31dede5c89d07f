"""Exporting: every format is written so that our reader finds in it what was written; our own loses nothing."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.recording.traces import trace_record
from feedback.services import (
    comparison_submit,
    comparison_withdraw,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from feedback.transfer import export, formats
from feedback.transfer.export import ExportReport, FeedbackExportRefused, export_stream, file_export
from feedback.transfer.export_views import Selection
from feedback.transfer.formats.records import RowRefused
from feedback.transfer.formats.writers import REASONS
from feedback.transfer.import_ import file_import
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.django_db

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
]


def decided(response: str, messages: Any = "Where is my order?", **facts: Any) -> Decision:
    row: Decision = decision_record(agent="helper", messages=messages, response=response, **facts).row
    return row


@pytest.fixture
def world() -> None:
    """Six decisions, six ratings by three raters, four comparisons, an outcome, a trace."""
    listed = {"candidates": ["It is on its way.", "No idea."], "propensity": 0.6, "policy": "helper-v1"}
    good = decided("It is on its way.", **listed)
    bad, so_so = decided("No idea."), decided("Perhaps it is.")
    talk = decided("Nothing new.", TALK, unit="user-1", run_id="run-1")
    called = json.dumps([{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    tool = decided(called, "Weather?", metadata={"response_is": "messages", "tools": TOOLS}, reserved=True)
    trace_record(
        agent="helper",
        steps=[{"kind": "decision", "messages": "Unrated?", "response": "Yes.", "name": "answer"}],
    )
    rating_submit(decision=good, rater="ann", thumb="up", tags=["clear"], notes="fine")
    rating_submit(decision=good, rater="bob", stars=4)
    rating_submit(decision=bad, rater="ann", thumb="down", correction="It arrives today.")
    rating_submit(decision=so_so, rater="cy", stars=3)
    rating_submit(decision=talk, rater="ann", score=0.9, notes="good")
    rating_submit(decision=tool, rater="ann", thumb="up")
    comparison_submit(left=good, right=bad, preference="left", rater="ann")
    comparison_submit(left=good, right=bad, preference="tie", rater="bob")
    comparison_submit(left=bad, right=so_so, preference="right", rater="ann")
    comparison_submit(left=bad, right=so_so, preference="both_bad", rater="bob")
    outcome_record(decision=good, name="reward", value=0.5)


def forget_everything() -> None:
    Outcome.objects.all().delete()
    for model in (Comparison, Rating):
        while model._default_manager.exists():  # the newest of a chain first
            model._default_manager.filter(superseded_by__isnull=True).delete()
    Decision.objects.all().delete()
    Trace.objects.all().delete()


PAIRS = 4
"""Two comparisons with a preference, a correction, and the best over the worst response to the first prompt."""
UNSAID = {"tie": 1, "both_bad": 1}
WRITTEN: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    # shape: (rows, what reading them brings, what was left out)
    "ratchet": (6, {"decisions": 6, "ratings": 6, "comparisons": 4, "outcomes": 1, "traces": 1}, {}),
    "trl": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-implicit": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-standard": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-standard-implicit": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-unpaired": (5, {"ratings": 5}, {"neutral": 1}),
    "trl-prompt-completion": (4, {"decisions": 4}, {"not_good": 2}),
    "trl-prompt-only": (4, {}, {}),
    "openai": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "openai-sft": (4, {"decisions": 4}, {"not_good": 2}),
    "hh": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "llamafactory": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "llamafactory-alpaca": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "llamafactory-kto": (4, {"ratings": 4}, {"neutral": 1, "not_text": 1}),
    "llamafactory-sft": (3, {"decisions": 3}, {"not_good": 2, "not_text": 1}),
    "simulation": (5, {"decisions": 5, "ratings": 4}, {"neutral": 1, "not_text": 1}),
    "feedback_collector": (5, {"ratings": 5, "corrections": 1}, {"not_text": 1}),
    "pandalm": (2, {"comparisons": 3}, {"both_bad": 1}),
    "oasst": (PAIRS + 1, {"comparisons": PAIRS + 1}, {"both_bad": 1}),
    "vw": (1, {"decisions": 1, "outcomes": 1}, {"no_candidates": 5}),
    "tensorzero": (6, {"decisions": 6}, {}),
    "label_studio": (2, {"comparisons": 2}, UNSAID),
    "label_studio-rating": (4, {"ratings": 5, "corrections": 1}, {"not_text": 1}),
    "label_studio-json_min": (5, {"ratings": 5}, {"not_text": 1}),
    "label_studio-chat": (5, {"ratings": 5, "corrections": 1}, {"not_text": 1}),
    "argilla": (6, {"ratings": 5, "comparisons": 2, "corrections": 1}, {**UNSAID, "not_text": 1}),
    "argilla-flat": (6, {"ratings": 5, "comparisons": 2, "corrections": 1}, {**UNSAID, "not_text": 1}),
    "librechat": (4, {"ratings": 2}, {"another_rater": 1, "neutral": 1, "roles": 1, "not_text": 1}),
    "open_webui": (4, {"ratings": 4}, {"neutral": 1, "not_text": 1}),
}
OF_DECISIONS_ELSEWHERE = {
    "langfuse": {"ratings": 8, "corrections": 1},
    "tensorzero-boolean": {"ratings": 3},
    "tensorzero-float": {"ratings": 3},
    "tensorzero-comment": {"ratings": 2},
    "tensorzero-demonstration": {"ratings": 1, "corrections": 1},
}


def test_every_shape_is_tested() -> None:
    assert {*WRITTEN, *OF_DECISIONS_ELSEWHERE, "simulation-ratings"} == set(formats.SHAPES)
    # a format without shapes is read and not written
    assert all(format.shapes[0].name == name for name, format in formats.FORMATS.items() if format.shapes)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_with_the_same_counts(name: str, world: None, tmp_path: Path) -> None:
    rows, brought, left_out = WRITTEN[name]
    path = tmp_path / "out.json"
    report = file_export(path, name, Selection("helper"))
    assert report.samples == rows
    assert {reason: count for reason, count in report.left_out.items() if count} == left_out
    assert set(report.left_out) <= set(REASONS)
    assert formats.format_by_name(formats.detect(path)).name == formats.format_by_name(name).name
    assert not any(isinstance(record, RowRefused) for record in formats.read(path))
    forget_everything()
    ratings = tmp_path / "out-ratings.json"
    found = file_import(path, ratings_path=ratings if ratings.exists() else None).as_dict()
    assert found["refused"] == []
    assert {kind: found[kind] for kind in brought} == brought


@pytest.mark.parametrize("name", OF_DECISIONS_ELSEWHERE)
def test_verdicts_alone_find_the_decisions_they_are_of(name: str, world: None, tmp_path: Path) -> None:
    report = file_export(tmp_path / "out.json", name, Selection("helper"))
    brought = OF_DECISIONS_ELSEWHERE[name]
    assert report.samples == brought["ratings"]
    found = file_import(tmp_path / "out.json").as_dict()
    assert {kind: found[kind] for kind in brought} == brought
    assert found["refused"] == []


def test_tensorzero_tables_stand_beside_each_other_and_are_read_together(world: None, tmp_path: Path) -> None:
    report = file_export(tmp_path / "t.jsonl", "tensorzero", Selection("helper"))
    assert [(Path(file["path"]).name, file["samples"]) for file in report.files] == [
        ("t.jsonl", 6),
        ("t-boolean.jsonl", 3),
        ("t-float.jsonl", 3),
        ("t-comment.jsonl", 2),
        ("t-demonstration.jsonl", 1),
    ]
    forget_everything()
    for name in ("t", "t-boolean", "t-float", "t-comment", "t-demonstration"):
        file_import(tmp_path / f"{name}.jsonl")
    assert (Decision.objects.count(), Rating.objects.count()) == (6, 9)
    tool = Decision.objects.get(metadata__response_is="messages")
    (message,) = json.loads(tool.response)
    assert message["tool_calls"][0]["function"] == CALL["function"]


def test_hugging_face_datasets_load_what_is_written_for_trl(
    world: None, tmp_path: Path, monkeypatch: Any
) -> None:
    datasets = pytest.importorskip("datasets")
    for name, columns in (
        ("trl", {"prompt", "chosen", "rejected"}),
        ("trl-implicit", {"chosen", "rejected"}),
        ("trl-unpaired", {"prompt", "completion", "label", "tools"}),
        ("trl-prompt-completion", {"prompt", "completion", "tools"}),
        ("trl-prompt-only", {"prompt", "tools"}),
        ("hh", {"chosen", "rejected"}),
    ):
        path = tmp_path / f"{name}.jsonl"
        report = file_export(path, name, Selection("helper"))
        loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))[
            "train"
        ]
        assert set(loaded.column_names) == columns
        assert len(loaded) == report.samples


# --- Our own: nothing is lost ------------------------------------------------------------------------------


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


def exported(name: str = "ratchet", selection: Selection | None = None) -> bytes:
    return b"".join(export_stream(name, selection or Selection(), ExportReport(name)))


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


# --- The command -------------------------------------------------------------------------------------------


def command(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    call_command("export_training_data", *arguments, "--json", stdout=out, stderr=io.StringIO())
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_the_command_writes_a_file_and_says_what_is_in_it(world: None, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    found = command("--agent-type", "helper", "--format", "trl", "--output", str(path))
    assert (found["format"], found["path"], found["samples"]) == ("trl", str(path), PAIRS)
    assert found["left_out"] == UNSAID
    assert len(path.read_text().splitlines()) == PAIRS
    same = command("--agent", "helper", "--format", "trl", "--output", str(tmp_path / "again.jsonl"))
    assert same["samples"] == PAIRS


def test_without_a_format_it_is_our_own_and_gz_zips_it(world: None, tmp_path: Path) -> None:
    found = command("--limit", "0", "--output", str(tmp_path / "all.jsonl.gz"))
    assert (found["format"], found["samples"]) == ("ratchet", 6)
    assert gzip.decompress((tmp_path / "all.jsonl.gz").read_bytes()) == exported()


def test_a_limit_takes_the_newest_decisions_with_what_belongs_to_them(tmp_path: Path) -> None:
    for number in range(5):
        row = decided(str(number), created_at=datetime(2026, 1, 1 + number, tzinfo=UTC))
        rating_submit(decision=row, rater="ann", thumb="up")
    comparison_submit(left=Decision.objects.get(response="0"), right=Decision.objects.get(response="4"),
                      preference="left", rater="ann")  # fmt: skip
    comparison_submit(left=Decision.objects.get(response="3"), right=Decision.objects.get(response="4"),
                      preference="left", rater="ann")  # fmt: skip
    found = command("--limit", "2", "--output", str(tmp_path / "two.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [line.get("response") for line in lines] == ["4", "3", None]
    assert (found["samples"], found["truncated"]) == (2, True)
    assert command("--limit", "0", "--output", str(tmp_path / "all.jsonl"))["truncated"] is False
    assert command("--limit", "5", "--output", str(tmp_path / "all.jsonl"))["truncated"] is False


def test_what_stands_beside_a_limited_file_is_of_the_same_decisions(world: None, tmp_path: Path) -> None:
    command("--format", "simulation", "--limit", "4", "--output", str(tmp_path / "e.json"))
    read = list(formats.read(tmp_path / "e.json", ratings_path=tmp_path / "e-ratings.json"))
    assert not any(isinstance(record, RowRefused) for record in read)


def test_decisions_nobody_said_anything_of_can_be_left_out(world: None, tmp_path: Path) -> None:
    found = command("--require-feedback", "--output", str(tmp_path / "x.jsonl"))
    assert (found["samples"], found["left_out"]) == (5, {"no_feedback": 1})


def test_the_least_reward_is_that_of_what_raters_say(world: None, tmp_path: Path) -> None:
    # 0.875 is raw 1.5, 0.9 is 1.6, thumbs up are 2, three stars 0, a thumb down -2
    found = command("--min-reward", "1.55", "--output", str(tmp_path / "x.jsonl"))
    assert (found["samples"], found["left_out"]) == (2, {"below_min_reward": 4})
    pairs = command("--min-reward", "1.5", "--format", "trl", "--output", str(tmp_path / "p.jsonl"))
    assert pairs["samples"] == 3, "a preference for the good one, its rating, and the correction"


def test_a_calculated_reward_comes_before_what_raters_say(world: None, tmp_path: Path, settings: Any) -> None:
    settings.FEEDBACK_REWARDS = "tests.test_exporting.two_for_the_unrated"
    command("--min-reward", "2", "--output", str(tmp_path / "x.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert "Yes." in [line.get("response") for line in lines]


def two_for_the_unrated(ids: list[uuid.UUID]) -> dict[uuid.UUID, float]:
    return {row.pk: 2.0 for row in Decision.objects.filter(pk__in=ids, response="Yes.")}


def test_nothing_to_write_is_refused_in_one_line_and_leaves_the_old_file(world: None, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("before")
    with pytest.raises(CommandError, match="left out: 5 below_min_reward, 1 no_candidates") as refused:
        command("--min-reward", "2", "--agent", "helper", "--format", "vw", "--output", str(path))
    assert "\n" not in str(refused.value)
    assert path.read_text() == "before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "x.jsonl"]


def test_an_agent_nobody_knows_is_refused_with_those_there_are(world: None, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="known are helper"):
        command("--agent", "nobody")


def test_a_file_that_cannot_be_written_is_refused(world: None, tmp_path: Path) -> None:
    with pytest.raises(FeedbackExportRefused, match="cannot be written: No such file or directory"):
        file_export(tmp_path / "none" / "x.jsonl", "ratchet", Selection())


# --- PostgreSQL --------------------------------------------------------------------------------------------

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
from feedback.transfer.import_ import file_import
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
        env=server.environment, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
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


def test_a_file_that_cannot_be_written_ends_the_reading_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to whenever memory is cleared up, the transaction it holds would end as a trace on a user's screen."""
    ended: list[bool] = []

    def stream(*_: Any, **__: Any) -> Any:
        try:
            yield b"a"
            yield b"b"
        finally:
            ended.append(True)

    def full(file: Any, path: Path, pieces: Any) -> None:
        next(pieces)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "export_stream", stream)
    monkeypatch.setattr(export, "_write", full)
    with pytest.raises(FeedbackExportRefused, match="No space left on device") as refused:
        file_export(tmp_path / "x.jsonl", "ratchet", Selection())
    assert ended == [True], refused
    assert list(tmp_path.glob("*.jsonl")) == []
