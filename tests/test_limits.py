"""Work per request is bounded: each limit is tried at its number and one above it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from django.conf import settings as django_settings
from jsonschema import Draft202012Validator
from pyarrow import parquet

from backend import limits
from backend.bodies import Sent
from backend.limits import LIMITS
from backend.rest import reading
from backend.rest.errors import BodyTooLarge, RequestRefused
from backend.rest.reading import StrictJSONParser, body_read, fields_in
from feedback.transfer import formats
from feedback.transfer.formats import files
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.formats.layouts import _survey
from feedback.transfer.formats.records import FormatRefused, Row, RowRefused
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
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    rows = [f"| {limit.subject} | {limit.text} | {limit.consequence} |" for limit in LIMITS]
    assert [row for row in rows if row not in page] == []
    assert template.MAX_SCHEMA == limits.SCHEMA_CHARACTERS
    assert django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE == limits.BODY_BYTES


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
def test_values_are_counted_without_parsing(text: bytes, count: int) -> None:
    assert limits.values_in(text, 0) == count


def test_escaped_quotes_without_an_end_are_counted_in_one_pass() -> None:
    # a pattern that backtracks would look at each of the quotes from there to the end: 10^12 steps
    most = limits.BODY_VALUES
    assert limits.values_in(b"[" * (most + 1) + b'"' + b'\\"' * 1_000_000, most) == most + 1


class Body:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, most: int) -> bytes:
        return self.data[:most]


def parsed(data: bytes) -> Any:
    return StrictJSONParser().parse(Body(data))  # type: ignore[arg-type]


def test_a_body_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_VALUES", 1000)
    assert len(parsed(b"[" + b"0," * 999 + b"0]")) == 1000
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


def test_null_is_nothing_and_an_unknown_field_stays_unknown() -> None:
    assert body_read(AgentSent, {"agent": None}) == AgentSent()
    with pytest.raises(RequestRefused) as refused:
        body_read(AgentSent, {"agnet": None})
    assert refused.value.fields == {"agnet": "unknown field"}


POSTS = (
    "/v1/chat/completions /api/decide/ /api/decisions/ /api/comparisons/ /api/traces/ /api/imports/ "
    "/api/policies/train_policy/support-bot /api/policies/feedback/support-bot "
    "/api/decisions/7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a002/ratings/ "
    "/api/decisions/7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a002/outcomes/"
).split()


@pytest.mark.django_db
def test_every_endpoint_that_takes_a_body_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ApiClient("ingest", "rate", "read", "operate")
    monkeypatch.setattr(limits, "BODY_VALUES", 50)
    body = json.dumps({f"field{n}": 0 for n in range(60)})
    assert {path: api.post(path, body).status_code for path in POSTS} == dict.fromkeys(POSTS, 413)


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

    check = Draft202012Validator.check_schema

    def counted(schema: Any) -> None:
        checks.append(schema)
        check(schema)

    monkeypatch.setattr(Draft202012Validator, "check_schema", counted)
    assert read_format(schema_of(limits.SCHEMA_CHARACTERS)) is not None
    assert len(checks) == 1
    with pytest.raises(ServingRefused, match="at most 32,768 characters, found 32,769"):
        read_format(schema_of(limits.SCHEMA_CHARACTERS + 1))
    assert len(checks) == 1
    with pytest.raises(ValueError, match="at most 32,768 characters"):
        template.schema_check(schema_of(limits.SCHEMA_CHARACTERS + 1)["json_schema"]["schema"])


CHAIN = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {
    "d30": {"type": "string"}
}
LONG = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(500)} | {"d500": {"type": "string"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/x"}]}}},
        {"items": {"not": {"if": True, "else": {"$ref": "#/items"}}}},
        {"$ref": "#/$defs/d0", "$defs": CHAIN},
        {"$ref": "#/$defs/d0", "$defs": LONG},
        {"$ref": "#/$defs/missing"},
        {"$ref": "other.json"},
    ],
)
def test_a_schema_whose_references_never_end_or_lead_nowhere_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        template.schema_check(schema)
    with pytest.raises(ServingRefused):
        read_format({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})


def test_a_schema_may_refer_to_itself_for_a_smaller_value() -> None:
    leaf, again = {"$ref": "#/$defs/leaf~1"}, {"$ref": "#/items/anyOf/1"}
    tree = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#"}, leaf, again]},
        "$defs": {"leaf/": {"type": "integer"}},
    }
    template.schema_check(tree)
    assert template.schema_fault([[1], 2], tree) == ""
    assert template.schema_fault([["x"]], tree)


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


def test_bad_lines_are_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_row_of_too_many_values(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 20 million empty lists took 3 GB."""
    monkeypatch.setattr(limits, "ROW_VALUES", 1_000)
    monkeypatch.setattr(files, "CHUNK", 200)
    bomb = b'{"prompt": "q", "response": [' + b"[]," * 1_000 + b"0]}"
    many_commas = b'{"prompt": "' + b"," * 2_000 + b'", "response": "a"}'
    path = tmp_path / f"x.{ending}"
    if ending == "jsonl":
        path.write_bytes(b"\n".join([GOOD, bomb, many_commas]))
        assert [type(row) for row in list(files.rows(path))] == [Row, RowRefused, Row]
    else:
        path.write_bytes(b"[" + many_commas + b"," + bomb + b"]")
        with pytest.raises(FormatRefused, match="more than 1,000 values in one row"):
            list(files.rows(path))
        path.write_bytes(bomb.replace(b", ", b",\n"))
        with pytest.raises(FormatRefused, match="more than 1,000 values in one row"):
            list(files.rows(path))


@pytest.mark.parametrize("nested", [False, True])
def test_repeated_parquet_text_is_refused_undecoded(nested: bool, tmp_path: Path) -> None:
    """2 kB became 2.4 GB."""
    text = "x" * (8 << 20)
    values = [[{"role": "user", "content": text}]] * 64 if nested else [text] * 64
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"prompt": pa.array(values)}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    own, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(FormatRefused, match="no feedback"):
            list(files.rows(path))
    finally:
        pa.set_memory_pool(own)
    assert 0 < pool.max_memory() < 64 << 20


def test_a_parquet_list_of_millions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"prompt": ["q"], "scores": [[1] * 5_000]}), path)
    assert len(list(files.rows(path))) == 1
    monkeypatch.setattr(limits, "ROW_VALUES", 4_000)
    with pytest.raises(FormatRefused, match="more than 4,000 values"):
        list(files.rows(path))
    monkeypatch.setattr(limits, "PARQUET_VALUES", 4_000)
    with pytest.raises(FormatRefused, match="has 5,000 values in one row group"):
        list(files.rows(path))


def test_repeated_texts_of_a_parquet_file_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = [{"prompt": "q", "turns": [{"role": "user", "content": f"c{n % 2}"}]} for n in range(200)]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert [row.value for row in files.rows(path) if isinstance(row, Row)] == rows
