"""REST: the export of everything that was said, as a stream."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from django.db import OperationalError
from django.http import StreamingHttpResponse

from backend.rest import errors
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from feedback.transfer.formats import SHAPES
from tests.support.api_client import ApiClient, error_of

pytestmark = pytest.mark.django_db


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
