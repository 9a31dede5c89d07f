"""Traces and assessments of a real MLflow server become decisions and ratings, by cursor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import mlflow
import pytest
from django.core.management import CommandError, call_command
from mlflow.entities import AssessmentSource, AssessmentSourceType, Feedback
from mlflow.tracking import MlflowClient

from feedback.models import Decision, ImportBatch, Outcome, Rating, Trace
from feedback.transfer import import_undo
from feedback.transfer import mlflow as mlflow_in
from feedback.transfer.formats.records import Record
from feedback.transfer.telemetry import export_store
from tests.support.mlflow_server import server  # noqa: F401
from tests.support.server import free_port
from tests.support.stub_openai import ModelServer
from tests.support.stub_server import StubHandler, StubServer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(900)]

APP = """
import os
import mlflow, mlflow.openai
from openai import OpenAI

mlflow.set_tracking_uri(os.environ["SERVER"])
mlflow.set_experiment(os.environ["EXPERIMENT"])
mlflow.openai.autolog()
client = OpenAI(base_url=os.environ["STUB"], api_key="not-used")

def ask(messages, **more):
    return client.chat.completions.create(model="shop-a", messages=messages, **more)

@mlflow.trace(span_type="AGENT")
def answer(question):
    with mlflow.start_span("track", span_type="TOOL") as span:
        span.set_inputs({"parcel": "7"})
        span.set_outputs("in Kassel")
    ask([{"role": "user", "content": "Plan: " + question}])
    said = ask([{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}], temperature=0.5)
    mlflow.update_current_trace(metadata={"mlflow.trace.session": "chat-1"})
    return said.choices[0].message.content

@mlflow.trace
def rules(question):
    return "We open at nine."

answer("Where is my parcel?")
ask([{"role": "user", "content": "Say it in words."}])
list(ask([{"role": "user", "content": "Streamed."}], stream=True, stream_options={"include_usage": True}))
rules("When do you open?")
mlflow.flush_trace_async_logging()
"""


def app_run(server: str, experiment: str) -> ModelServer:  # noqa: F811
    """The stub that the app's model calls went to."""
    with ModelServer() as stub:
        stub.more = {
            "object": "chat.completion.chunk",
            "model": "shop-a",
            "created": 1_735_787_045,
            "id": "c1",
        }
        done = subprocess.run(
            [sys.executable, "-"],
            input=APP,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "SERVER": server, "STUB": stub.url, "EXPERIMENT": experiment},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return stub


def imported(capsys: pytest.CaptureFixture[str], experiment: str) -> dict[str, Any]:
    call_command("import_mlflow", experiment, agent="support-bot", json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["refused"] == []
    return found


def counts(found: dict[str, Any]) -> tuple[int, ...]:
    return tuple(found[name] for name in ("decisions", "ratings", "corrections", "outcomes"))


def traces_of(server: str, experiment: str) -> dict[str, Any]:  # noqa: F811
    """Name -> trace; of several of one name the last."""
    client = MlflowClient(server)
    place = client.get_experiment_by_name(experiment)
    assert place is not None
    found = client.search_traces(locations=[place.experiment_id], order_by=["timestamp_ms ASC"])
    return {str(trace.info.tags["mlflow.traceName"]): trace for trace in found}


def source(kind: str, name: str) -> AssessmentSource:
    return AssessmentSource(getattr(AssessmentSourceType, kind), name)


@pytest.fixture
def set_up(server: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """Address of the server, set as operators set it: MLflow reads its variable itself."""
    settings.MLFLOW_TRACKING_URI = server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    return server


@pytest.mark.campaign
def test_model_calls_and_what_was_said_of_them_come_once(
    set_up: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = app_run(set_up, "shop")
    agent = traces_of(set_up, "shop")["answer"]
    ann, judge = source("HUMAN", "ann"), source("LLM_JUDGE", "judge-1")
    first = agent.info.trace_id
    mlflow.log_feedback(trace_id=first, name="helpful", value=False, source=ann, rationale="too short")
    mlflow.log_expectation(trace_id=first, name="expected_response", value="At the depot.", source=ann)
    mlflow.log_expectation(trace_id=first, name="expected_facts", value=["depot"], source=ann)
    mlflow.log_feedback(trace_id=first, name="relevance", value=4.0, source=judge)
    plan = next(span for span in agent.data.spans if span.span_type == "CHAT_MODEL")
    mlflow.log_feedback(trace_id=first, name="plan", value=0.8, source=judge, span_id=plan.span_id)

    assert counts(imported(capsys, "shop")) == (5, 4, 1, 1)
    rows = list(Decision.objects.filter(agent="support-bot").order_by("created_at"))
    assert [row.messages for row in rows[:4]] == [body["messages"] for body in stub.bodies]
    assert [row.response.strip() for row in rows] == ["hello there"] * 4 + ["We open at nine."]
    assert [row.policy for row in rows] == ["shop-a"] * 4 + [""]
    assert [row.unit for row in rows] == ["chat-1"] * 2 + [""] * 3
    assert [(row.tokens_in, row.tokens_out) for row in rows[:4]] == [(7, 3)] * 4
    assert all(row.latency_ms is not None for row in rows)
    (trace,) = Trace.objects.all()
    assert [step["kind"] for step in trace.steps] == ["task", "tool_call", "decision", "decision"]
    assert [row.trace_id for row in rows] == [trace.pk] * 2 + [None] * 3

    on_plan, on_answer = rows[0].ratings.all(), rows[1].ratings.all()
    assert [(row.rater, row.score, row.rater_kind) for row in on_plan] == [
        ("judge-1: plan", 0.8, "simulated")
    ]
    by_name = {row.tags[0]: row for row in on_answer}
    assert (by_name["helpful"].thumb, by_name["helpful"].notes) == ("down", "too short")
    assert by_name["expected_response"].correction == "At the depot."
    assert by_name["expected_facts"].notes == '["depot"]'
    assert {row.rater_kind for row in on_answer} == {"human"}
    assert [(row.name, row.value) for row in Outcome.objects.all()] == [("relevance", 4.0)]

    assert counts(imported(capsys, "shop")) == (0, 0, 0, 0)
    assert ImportBatch.objects.count() == 1
    # of old traces only the assessments are asked for
    monkeypatch.setattr(mlflow_in, "LATE", timedelta(0))
    feedback = next(
        one for one in traces_of(set_up, "shop")["answer"].info.assessments if one.name == "helpful"
    )
    mlflow.update_assessment(first, feedback.assessment_id, Feedback("helpful", True, source=ann))
    mlflow.log_feedback(trace_id=first, name="tone", value="yes", source=ann)
    assert counts(imported(capsys, "shop")) == (0, 2, 0, 0)
    standing = {row.tags[0]: row for row in rows[1].ratings.filter(superseded_by=None)}
    assert (standing["helpful"].thumb, standing["tone"].thumb) == ("up", "up")
    assert counts(imported(capsys, "shop")) == (0, 0, 0, 0)


@pytest.mark.campaign
def test_an_interrupted_import_goes_on_and_an_undone_one_comes_again(
    set_up: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app_run(set_up, "stopped")
    monkeypatch.setattr(mlflow_in, "PAGE", 2)
    written: list[int] = []
    write = mlflow_in.records_write

    def fails_at_the_second(records: list[Record], *rest: Any) -> Any:
        written.append(len(records))
        if len(written) == 2:
            raise RuntimeError("killed")
        return write(records, *rest)

    monkeypatch.setattr(mlflow_in, "records_write", fails_at_the_second)
    with pytest.raises(CommandError, match="killed"):
        call_command("import_mlflow", "stopped")
    assert (Decision.objects.count(), ImportBatch.objects.count()) == (3, 1)
    assert counts(imported(capsys, "stopped")) == (2, 0, 0, 0)
    assert Decision.objects.count() == 5
    newest = ImportBatch.objects.latest("pk")
    import_undo.import_undo(newest.pk, actor="test")
    assert Decision.objects.count() == 3
    assert counts(imported(capsys, "stopped")) == (2, 0, 0, 0)


@pytest.mark.campaign
def test_a_trace_that_ended_late_is_found(
    set_up: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app_run(set_up, "late")
    assert counts(imported(capsys, "late"))[0] == 5
    client = MlflowClient(set_up)
    place = client.get_experiment_by_name("late")
    assert place is not None
    newest = traces_of(set_up, "late")["rules"].info.request_time
    began = (newest - 3_600_000) * 1_000_000
    root = client.start_trace("slow", inputs="Why?", experiment_id=place.experiment_id, start_time_ns=began)
    client.end_trace(root.trace_id, outputs="Because.")
    mlflow.flush_trace_async_logging()
    assert counts(imported(capsys, "late")) == (1, 0, 0, 0)
    assert Decision.objects.order_by("created_at")[0].response == "Because."


@pytest.mark.campaign
def test_a_trace_that_was_sent_to_v1_traces_as_well_is_one_decision(
    set_up: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app_run(set_up, "both")
    sent = traces_of(set_up, "both")["Completions"]
    spans = [
        {
            "traceId": sent.info.trace_id.removeprefix("tr-"),
            "spanId": span.span_id,
            "startTimeUnixNano": span.start_time_ns,
            "endTimeUnixNano": span.end_time_ns,
            "attributes": span.to_dict()["attributes"],
        }
        for span in sent.data.spans
    ]
    assert export_store({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).decisions == 1
    mlflow.log_feedback(
        trace_id=sent.info.trace_id, name="helpful", value=True, source=source("HUMAN", "ann")
    )
    assert counts(imported(capsys, "both")) == (4, 1, 0, 0)
    (rating,) = Rating.objects.all()
    assert (rating.decision.source, rating.decision.response.strip()) == ("otlp", "hello there")


@contextmanager
def answering(status: int, body: str = "") -> Iterator[str]:
    """Address of a server that answers every request with this status."""

    class Handler(StubHandler):
        def do_GET(self) -> None:
            self.answer(status, body)

        do_POST = do_GET

    with StubServer(Handler) as stub:
        yield stub.address


MISSING = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"})


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, "You are not authenticated", "MLFLOW_TRACKING_TOKEN"),
        (403, "Permission denied", "MLFLOW_TRACKING_TOKEN"),
        (404, "<html>Not found</html>", "expected MLflow 3"),
        (200, "<html>a login page</html>", "valid JSON"),
        (500, "oops", "did not answer"),
    ],
)
def test_a_server_that_refuses_is_said_so(status: int, body: str, says: str, settings: Any) -> None:
    with answering(status, body) as address:
        settings.MLFLOW_TRACKING_URI = address
        with pytest.raises(CommandError, match=says) as refused:
            call_command("import_mlflow", "shop")
    assert address in str(refused.value)
    assert "\n" not in str(refused.value)
    assert ImportBatch.objects.count() == 0


def test_a_server_that_is_away_or_not_set(settings: Any) -> None:
    settings.MLFLOW_TRACKING_URI = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CommandError, match="did not answer"):
        call_command("import_mlflow", "shop")
    settings.MLFLOW_TRACKING_URI = ""
    with pytest.raises(CommandError, match="MLFLOW_TRACKING_URI is not set"):
        call_command("import_mlflow", "shop")


@pytest.mark.campaign
def test_an_unknown_experiment_is_answered_with_those_there_are(set_up: str) -> None:
    MlflowClient(set_up).create_experiment("there")
    with pytest.raises(CommandError, match=r"no experiment 'shopp'; it has: .*there"):
        call_command("import_mlflow", "shopp")
