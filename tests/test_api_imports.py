"""REST: a file imported, listed, read and taken back; scopes; refusals in words."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Decision, ImportBatch, Rating
from tests.support.api_client import ApiClient, error_of

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
        "decisions": 2, "ratings": 2, "rows": 2, "rows_stored": 2, "problem": "",
    }  # fmt: skip
    assert "train_kto --agent helper" in report["next"][-1]
    assert sorted(Rating.objects.values_list("rater", "stars")) == [("ann", 5), ("bob", 1)]
    assert list((ratchet_home / "uploads").iterdir()) == []
    again = send(operator, content=TABLE, **MAP)
    assert (again.status_code, again.json()["already_here"], again.json()["earlier_import"]) == (
        200, 2, report["batch"],
    )  # fmt: skip
    listed = operator.get("/api/imports/", agent="helper").json()["results"]
    assert [(row["file"], row["licence"], row["counts"]["ratings"]) for row in listed] == [
        ("marks.csv", "CC0", 2)
    ]
    assert operator.get("/api/imports/", agent="other").json()["results"] == []
    found = operator.get("/api/decisions/", batch=report["batch"]).json()["results"]
    assert len(found) == 2
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


def test_each_call_needs_its_scope() -> None:
    number = ImportBatch.objects.create(file="x", sha256="0", bytes=1, format="trl", actor="t").pk
    for scope, get, post in (("ingest", 403, 403), ("read", 200, 403), ("operate", 403, 400)):
        client = ApiClient(scope)
        assert client.get("/api/imports/").status_code == get
        assert client.get(f"/api/imports/{number}/").status_code == get
        assert send(client).status_code == post
        undone = client.post(f"/api/imports/{number}/undo/", {"dry_run": True}).status_code
        assert undone == (200 if scope == "operate" else 403)
    assert ApiClient().get("/api/imports/").status_code == 401
