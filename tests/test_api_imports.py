"""REST: files imported, listed and taken back; and the export of everything as a stream."""

import base64
import gzip
import json
import logging
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.http import StreamingHttpResponse

from backend.rest import errors
from feedback.models import Comparison, Decision, ImportBatch, Outcome, Rating, Trace
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
from feedback.transfer.formats import SHAPES
from tests.support.api_client import ApiClient, error_of
from tests.support.export_world import decided, exported, forget_everything
from tests.support.export_world import world as world
from tests.support.imports import file_import
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.django_db


TABLE = "question,answer,mark,who\nWhere?,Here.,5,ann\nWhen?,Now.,1,bob\n"
MAP = {"map": "prompt=question,response=answer,stars=mark", "rater": "who"}


@pytest.fixture
def operator() -> ApiClient:
    return ApiClient("operate", "read")


def send(client: ApiClient, **body: Any) -> Any:
    return client.post("/api/imports/", {"name": "marks.csv", "agent": "helper", **body})


def test_a_file_is_imported_listed_read_and_taken_back(operator: ApiClient, ratchet_home: Path) -> None:
    tried = send(operator, content=TABLE, licence="CC0", dry_run=True, **MAP)
    assert (tried.status_code, tried.json()["batch"], Rating.objects.count()) == (200, None, 0)
    made = send(operator, content=TABLE, licence="CC0", **MAP)
    assert made.status_code == 201
    report = made.json()
    assert {name: report[name] for name in ("decisions", "ratings", "rows", "rows_stored", "problem")} == {
        "decisions": 2,
        "ratings": 2,
        "rows": 2,
        "rows_stored": 2,
        "problem": "",
    }
    assert "train_kto --agent helper" in report["next"][-1]
    assert sorted(Rating.objects.values_list("rater", "stars")) == [("ann", 5), ("bob", 1)]
    assert list((ratchet_home / "uploads").iterdir()) == []
    again = send(operator, content=TABLE, **MAP)
    expected = (200, 2, report["batch"])
    assert (again.status_code, again.json()["already_here"], again.json()["earlier_import"]) == expected
    listed = operator.get("/api/imports/", agent="helper").json()["results"]
    assert [(row["file"], row["licence"], row["counts"]["ratings"]) for row in listed] == [
        ("marks.csv", "CC0", 2)
    ]
    assert operator.get("/api/imports/", agent="other").json()["results"] == []
    assert len(operator.get("/api/decisions/", batch=report["batch"]).json()["results"]) == 2
    one = operator.get(f"/api/imports/{report['batch']}/").json()
    assert one["options"]["columns"]["stars"] == "mark"
    undo = f"/api/imports/{report['batch']}/undo/"
    assert operator.post(undo, {"dry_run": True}).json()["decisions"] == 2
    done = operator.post(undo, {})
    assert (done.status_code, done.json()["ratings"], Decision.objects.count()) == (200, 2, 0)
    twice = operator.post(undo, {})
    assert (twice.status_code, error_of(twice)["code"]) == (409, "conflict")
    assert ImportBatch.objects.get().undone_by.startswith("key-")


def test_bytes_come_in_base64(operator: ApiClient) -> None:
    row = json.dumps({"prompt": "q", "chosen": "good", "rejected": "bad"}).encode()
    body = {"name": "pairs.jsonl.gz", "base64": base64.b64encode(gzip.compress(row)).decode()}
    assert send(operator, **body).json()["comparisons"] == 1


def test_refusals_name_what_was_wrong(operator: ApiClient, ratchet_home: Path) -> None:
    for body, code, words in (
        ({}, 400, "expected either content (text) or base64 (bytes)"),
        ({"content": "x", "base64": "eA=="}, 400, "expected either"),
        ({"base64": "???"}, 400, "expected base64"),
        ({"content": TABLE, "agent": "Not A Slug"}, 400, "expected a slug"),
        ({"content": TABLE, "format": "none"}, 400, "expected one of auto"),
        ({"content": TABLE, "map": "colour=mark"}, 400, "no field 'colour'"),
        ({"content": TABLE, "skip_bad": "yes"}, 400, "expected true or false"),
        ({"content": "a,b\n1,2\n"}, 400, "marks.csv"),
        (
            {"name": "x.jsonl", "content": '{"prompt": "only a prompt"}'},
            400,
            "nothing could be stored of 1 row",
        ),
    ):
        refused = send(operator, **body)
        error = error_of(refused)
        assert refused.status_code == code, body
        assert words in error["message"] + json.dumps(error["fields"]), error
        assert str(ratchet_home) not in refused.content.decode()
    bad = '{"prompt": "q", "chosen": "a", "rejected": "b"}\n{"prompt": "q", "chosen": "", "rejected": "b"}'
    refused = send(operator, name="x.jsonl", content=bad)
    assert error_of(refused)["fields"] == {"line 2": "chosen: is empty"}
    assert send(operator, name="x.jsonl", content=bad, skip_bad=True).status_code == 201
    assert error_of(operator.get("/api/imports/999/"))["code"] == "not_found"
    assert operator.post("/api/imports/999/undo/", {}).status_code == 404


@pytest.fixture
def reader() -> ApiClient:
    return ApiClient("read")


def some_feedback(agent: str = "a") -> None:
    left, right = (decision_record(agent=agent, messages="q", response=f"{agent} {n}").row for n in (1, 2))
    rating_submit(decision=left, rater="ada", thumb="up")
    rating_submit(decision=left, rater="ada", thumb="down", notes="Grüße")
    outcome_record(decision=right, name="clicked", value=1)
    comparison_submit(left=left, right=right, preference="left", rater="ada")


def lines(reader: ApiClient, **query: Any) -> list[dict[str, Any]]:
    response = reader.get("/api/ratings/export/", **query)
    assert response.status_code == 200
    assert response["Content-Type"] == "application/x-ndjson"
    assert isinstance(response, StreamingHttpResponse)
    return [json.loads(line) for line in b"".join(response).splitlines()]  # type: ignore[arg-type]


def test_decisions_come_with_what_was_said_and_comparisons_after_them(reader: ApiClient) -> None:
    some_feedback()
    found = lines(reader, format="ratchet")
    assert [line["type"] for line in found] == ["decision", "decision", "comparison"]
    assert [rating["thumb"] for rating in found[0]["ratings"]] == ["up", "down"]
    assert found[0]["ratings"][1]["notes"] == "Grüße"
    assert found[1]["outcomes"][0]["name"] == "clicked"
    assert found[2]["preference"] == "left"


def test_one_agent_alone_can_be_asked_for(reader: ApiClient) -> None:
    some_feedback("a")
    some_feedback("b")
    assert len(lines(reader)) == 6
    assert {line.get("agent", "a") for line in lines(reader, agent="a")} == {"a"}
    assert lines(reader, agent="nobody") == []


def test_a_long_export_comes_in_pieces(reader: ApiClient) -> None:
    for n in range(8):
        decision_record(agent="a", messages="q", response=str(n) + "x" * 25_000)
    pieces = list(reader.get("/api/ratings/export/"))  # type: ignore[call-overload]
    assert [len(piece.splitlines()) for piece in pieces] == [3, 3, 2]


@pytest.mark.parametrize("name", SHAPES)
def test_every_format_is_streamed(reader: ApiClient, name: str) -> None:
    some_feedback()
    response = reader.get("/api/ratings/export/", format=name, agent="a")
    assert response.status_code == 200
    body = b"".join(response)  # type: ignore[arg-type]
    array = response["Content-Type"] == "application/json"
    ending = "json" if array else "jsonl"
    assert response["Content-Disposition"] == f'attachment; filename="a.{name}.{ending}"'
    found = json.loads(body) if array else [json.loads(line) for line in body.splitlines()]
    silent = {
        *("vw", "tensorzero-float", "tensorzero-demonstration"),  # no listed responses, stars and corrections
        *("openai-sft", "llamafactory-sft", "trl-prompt-completion"),  # nothing to imitate
        "trl-standard-implicit",  # the two responses begin alike
    }
    assert bool(found) == (name not in silent), "an empty file here, where the command refuses"


@pytest.mark.parametrize("query", [{"format": "xml"}, {"agent": "Not A Slug"}, {"formt": "ratchet"}], ids=str)
def test_a_bad_parameter_is_refused_by_name(reader: ApiClient, query: dict[str, str]) -> None:
    response = reader.get("/api/ratings/export/", **query)
    assert response.status_code == 400
    assert set(error_of(response)["fields"]) == set(query)


def test_a_database_that_is_away_is_said_before_the_file_begins(
    reader: ApiClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """503 and JSON, as from every endpoint; a thousand requests write one line, not a thousand."""

    def away(*_: Any) -> Any:
        raise OperationalError("connection refused to 10.0.0.7")

    monkeypatch.setattr("feedback.transfer.export.records", away)
    errors.outage.reset()
    loggers = [logging.getLogger("backend"), logging.getLogger("django.request")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    try:
        for _ in range(5):
            response = reader.get("/api/ratings/export/")
            assert response.status_code == 503
            assert error_of(response)["code"] == "unavailable"
            assert int(response["Retry-After"]) > 0
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records]
    assert len(set(lines)) == 1, lines
    assert "the database cannot be reached: OperationalError: connection refused" in lines[0]


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
    expected = [("trace", None), ("decision", str(mine.trace.pk))]
    assert [(line["type"], line.get("trace")) for line in lines] == expected


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
