"""Work per request is bounded: each limit is tried at its number and one above it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from jsonschema import Draft202012Validator

from backend import limits
from backend.bodies import Sent
from backend.limits import LIMITS
from backend.rest import reading
from backend.rest.errors import BodyTooLarge, RequestRefused
from backend.rest.reading import StrictJSONParser, fields_in, values_in
from feedback.transfer import formats
from feedback.transfer.formats import files
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.formats.layouts import _survey
from feedback.transfer.formats.records import FormatRefused
from rl.agents import template
from rl.serving import chat_request
from rl.serving.base import ServingRefused
from rl.serving.chat_request import read_format
from tests.support.api_client import ApiClient, error_of
from tests.support.figures import figures_of
from tests.support.imports import file_import
from tests.support.server import ROOT

GOOD = b'{"prompt": "q", "response": "r", "rating": "up"}\n'


def test_the_table_in_the_docs_has_every_limit_with_its_number() -> None:
    page = (ROOT / "docs" / "limits.md").read_text("utf-8")
    rows = [f"| {limit.subject} | {limit.text} | {limit.consequence} |" for limit in LIMITS]
    assert [row for row in rows if row not in page] == []
    assert template.MAX_SCHEMA == limits.SCHEMA_CHARACTERS
    assert django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE == limits.BODY_BYTES


# --- Bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"{}", 1),
        (b'{"a": 1, "b": [2, 3]}', 4),
        (b'["a, [b] {c}", "d\\", e,,,", "\\\\"]', 3),  # of strings nothing counts, escaped quotes or not
        (b'[1, "no end, , ,', 2),
        (b'[1, "no end, , \\', 2),
    ],
)
def test_values_are_counted_without_parsing(text: bytes, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_VALUES", 0)  # every text is looked at closely
    assert values_in(text) == count


def test_escaped_quotes_without_an_end_are_counted_in_one_pass() -> None:
    # a pattern that backtracks would look at each of the quotes from there to the end: 10^12 steps
    assert values_in(b"[" * (limits.BODY_VALUES + 1) + b'"' + b'\\"' * 1_000_000) == limits.BODY_VALUES + 1


class Body:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, most: int) -> bytes:
        return self.data[:most]


def parsed(data: bytes) -> Any:
    return StrictJSONParser().parse(Body(data))  # type: ignore[arg-type]


def test_a_body_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_VALUES", 1000)
    whole = b"[" + b"0," * 999 + b"0]"
    assert len(parsed(whole)) == 1000
    parses: list[str] = []
    monkeypatch.setattr(reading.json, "loads", lambda text, **_: parses.append(text))
    with pytest.raises(BodyTooLarge, match="at most 1,000 values in a body, found 1,001"):
        parsed(b"[" + b"0," * 1000 + b"0]")
    assert parses == []


def test_a_body_of_too_many_bytes_is_not_parsed(settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    assert parsed(b'"' + b"x" * 98 + b'"') == "x" * 98
    with pytest.raises(BodyTooLarge):
        parsed(b'"' + b"x" * 99 + b'"')


class AgentSent(Sent):
    agent: str = ""


def test_of_many_unknown_fields_twenty_are_named() -> None:
    sent = {f"field{n}": 0 for n in range(limits.FAULTS_NAMED)}
    with pytest.raises(RequestRefused) as at:
        fields_in(AgentSent, sent)
    assert len(at.value.fields) == 20
    with pytest.raises(RequestRefused) as above:
        fields_in(AgentSent, {**sent, **{f"more{n}": 0 for n in range(100_000)}})
    assert len(above.value.fields) == 21
    assert above.value.fields["..."] == "and 100,000 more unknown fields"


POSTS = (
    "/v1/chat/completions", "/api/decide/", "/api/decisions/", "/api/comparisons/", "/api/traces/", "/api/imports/",
    "/api/policies/train_policy/support-bot", "/api/policies/feedback/support-bot",
    "/api/decisions/7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a002/ratings/",
    "/api/decisions/7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a002/outcomes/",
)  # fmt: skip


@pytest.mark.django_db
def test_every_endpoint_that_takes_a_body_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ApiClient("ingest", "rate", "read", "operate")
    monkeypatch.setattr(limits, "BODY_VALUES", 50)
    body = json.dumps({f"field{n}": 0 for n in range(60)})
    statuses = {path: api.post(path, body).status_code for path in POSTS}
    assert statuses == dict.fromkeys(POSTS, 413)


# --- Decisions and the gateway --------------------------------------------------------------------------------


@pytest.mark.django_db
def test_candidates_are_counted_before_they_are_read() -> None:
    api = ApiClient("ingest")
    body = {"agent": "support-bot", "messages": "q", "response": "r"}
    at = api.post("/api/decisions/", {**body, "candidates": [str(n) for n in range(limits.CANDIDATES)]})
    assert at.status_code == 201
    above = api.post("/api/decisions/", {**body, "candidates": [5] * (limits.CANDIDATES + 1)})
    fields = error_of(above)["fields"]
    assert list(fields) == ["candidates"]
    assert figures_of(fields["candidates"]) == [1000, 1001]
    bad = api.post("/api/decisions/", {**body, "candidates": [""] + [{"response": "r", "score": 9}] * 900})
    assert len(error_of(bad)["fields"]) == limits.FAULTS_NAMED + 1  # the others are counted


def schema_of(length: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "description": ""}
    schema["description"] = "x" * (length - len(json.dumps(schema)))
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def test_a_schema_is_measured_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Any] = []

    class Validator:
        @staticmethod
        def check_schema(schema: Any) -> None:
            checks.append(schema)
            Draft202012Validator.check_schema(schema)

    monkeypatch.setattr(chat_request, "Draft202012Validator", Validator)
    assert read_format(schema_of(limits.SCHEMA_CHARACTERS)) is not None
    assert len(checks) == 1
    with pytest.raises(ServingRefused, match="at most 32,768 characters, found 32,769"):
        read_format(schema_of(limits.SCHEMA_CHARACTERS + 1))
    assert len(checks) == 1
    with pytest.raises(ValueError, match="at most 32,768 characters"):
        template.schema_check(schema_of(limits.SCHEMA_CHARACTERS + 1)["json_schema"]["schema"])


def test_tools_and_stop_texts_are_bounded() -> None:
    def request(**more: Any) -> Any:
        body = {"model": "a", "messages": [{"role": "user", "content": "q"}], **more}
        return chat_request.chat_request(body)

    tool = {"type": "function", "function": {"name": "f"}}
    assert request(tools=[tool] * limits.TOOLS, stop="x" * limits.STOP_CHARACTERS).has_format
    with pytest.raises(ServingRefused, match="at most 128 items, found 129"):
        request(tools=[tool] * (limits.TOOLS + 1))
    with pytest.raises(ServingRefused, match="stop: expected texts of at most 1,000"):
        request(stop=["x" * (limits.STOP_CHARACTERS + 1)])
    with pytest.raises(ServingRefused, match="tools: expected at most 1,000,000 characters"):
        # what could be answered and never recorded
        request(tools=[{**tool, "more": "x" * limits.TEXT_CHARACTERS}])


# --- Files ----------------------------------------------------------------------------------------------------


def test_a_file_of_bad_lines_is_given_up_while_its_columns_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_REFUSED", 100)
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 101 + b"oops\n" * 100 + GOOD))
    with formats.readings(path) as (file,):
        assert file.format.name == "table"
    path.write_bytes(gzip.compress(GOOD + b"oops\n" * 50_000))
    reads = 0

    def counted() -> Any:
        nonlocal reads
        for row in files.rows(path):
            reads += 1
            yield row

    with pytest.raises(FormatRefused, match="given up after 101 refused rows of 102, the last one line 102"):
        _survey(counted(), "bad.jsonl", ColumnMap())
    assert reads == 101
    with pytest.raises(FormatRefused, match="given up after 101"), formats.readings(path):
        pytest.fail("it was opened")


@pytest.mark.django_db
def test_rows_are_counted_on_the_first_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(GOOD.replace(b'"q"', f'"q{n}"'.encode()) for n in range(4)))
    assert file_import(path, agent="helper", max_rows=4, dry_run=True).ratings == 4
    seen = 0
    plain = files._rows

    def counted(*where: Any) -> Any:
        nonlocal seen
        for row in plain(*where):
            seen += 1
            yield row

    monkeypatch.setattr(files, "_rows", counted)
    with pytest.raises(FormatRefused, match="more than 3 rows; split the file"):
        file_import(path, agent="helper", max_rows=3, dry_run=True)
    assert seen <= 8, "recognised, and given up in the first pass over its columns"


def test_eight_kilobytes_do_not_become_eight_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + b" " * (limits.UNPACKED_FREE_BYTES - 2 * len(GOOD)) + b"\n"))
    assert len(list(files.rows(path))) == 1
    path.write_bytes(gzip.compress(GOOD + b" \n" * 4_000_000))
    assert path.stat().st_size < 10_000
    with pytest.raises(FormatRefused, match="unpacks to more than"):
        list(files.rows(path))
