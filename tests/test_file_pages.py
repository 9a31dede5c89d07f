"""Pages that bring files in and give them out: tried first, then imported; operators alone; limits that hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from feedback import file_views
from feedback.formats import SHAPES
from feedback.models import Comparison, Decision, Rating
from feedback.services import decision_record, rating_submit
from tests.api_client import person

pytestmark = pytest.mark.django_db

PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
BAD = {"prompt": "q", "chosen": "", "rejected": "bad", "id": "row-2"}


def client_of(role: str) -> Client:
    client = Client()
    client.force_login(person(f"the-{role}", role))
    return client


@pytest.fixture
def operator() -> Client:
    return client_of("operator")


def upload(client: Client, *rows: Any, name: str = "x.jsonl", **more: Any) -> Any:
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return client.post("/import/", {"file": SimpleUploadedFile(name, body), **more})


def go_on(client: Client, tried: Any, **more: Any) -> Any:
    return client.post("/import/do/", {"token": tried.context["upload"]["token"], **more}, follow=True)


def test_an_upload_is_tried_and_then_imported(operator: Client, ratchet_home: Path) -> None:
    tried = upload(operator, PAIR, agent="helper")
    page = tried.content.decode()
    assert tried.status_code == 200
    assert tried.context["counts"] == [("decisions", 2), ("comparisons", 1)]
    assert "Nothing is stored yet" in page
    assert Decision.objects.count() == 0
    done = go_on(operator, tried)
    assert "Imported 2 decisions, 1 comparisons." in done.content.decode()
    assert Comparison.objects.get().left.agent == "helper"
    assert list((ratchet_home / "uploads").iterdir()) == []


def test_rows_that_cannot_be_read_are_shown_and_only_left_out_when_that_was_chosen(operator: Client) -> None:
    tried = upload(operator, PAIR, BAD)
    page = tried.content.decode()
    assert "1 row cannot be read" in page
    assert "chosen: is empty" in page
    assert "row-2" in page
    assert "Import without this row" in page
    refused = go_on(operator, tried)
    assert "1 of 2 rows refused, nothing was imported" in refused.content.decode()
    assert Decision.objects.count() == 0
    done = go_on(operator, upload(operator, PAIR, BAD), skip_bad="on")
    assert "1 rows were left out" in done.content.decode()
    assert Comparison.objects.count() == 1


def test_a_file_of_no_known_format_is_refused_without_our_paths(operator: Client, ratchet_home: Path) -> None:
    tried = upload(operator, {"colour": "<red>"}, name="../../<b>.jsonl")
    page = tried.content.decode()
    assert tried.status_code == 400
    assert "file: of no known format: found rows with colour" in page
    assert str(ratchet_home) not in page
    assert "<b>" not in page
    assert list((ratchet_home / "uploads").iterdir()) == []


def test_ratings_may_be_a_second_file(operator: Client) -> None:
    ratings = SimpleUploadedFile("r.json", json.dumps([{"entry_id": "1", "rating": "up"}]).encode())
    tried = upload(operator, {"entry_id": "1", "prompt": "q", "response": "a"}, ratings=ratings)
    assert tried.context["counts"] == [("decisions", 1), ("ratings", 1)]
    go_on(operator, tried)
    assert Rating.objects.get().thumb == "up"


def test_an_upload_belongs_to_who_made_it_and_is_used_once(operator: Client) -> None:
    tried = upload(operator, PAIR)
    other = client_of("admin")
    assert other.post("/import/do/", {"token": tried.context["upload"]["token"]}).status_code == 400
    assert operator.post("/import/do/", {"token": "another"}).status_code == 400
    go_on(operator, upload(operator, PAIR))
    assert operator.post("/import/do/", {"token": tried.context["upload"]["token"]}).status_code == 400


def test_a_file_that_is_too_large_is_refused_before_it_is_read(operator: Client, settings: Any) -> None:
    settings.FEEDBACK_UPLOAD_MAX_BYTES = 1 << 20
    answer = upload(operator, {"prompt": "q" * (1 << 20), "chosen": "a", "rejected": "b"})
    assert answer.status_code == 413
    assert "larger than 1 MB" in answer.content.decode()
    assert "import_feedback" in answer.content.decode()


def test_without_a_file_the_page_says_so(operator: Client) -> None:
    assert "Expected a file, found none" in operator.post("/import/", {}).content.decode()
    assert operator.put("/import/").status_code == 405
    answer = upload(operator, PAIR, agent="Not A Slug")
    assert answer.status_code == 400


def test_uploads_need_the_forms_token() -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(person("op", "operator"))
    assert upload(strict, PAIR).status_code == 403


def test_what_nobody_came_back_for_is_removed(operator: Client, ratchet_home: Path, monkeypatch: Any) -> None:
    upload(operator, PAIR)
    monkeypatch.setattr(file_views, "KEPT_S", -1)
    upload(operator, PAIR)
    assert len(list((ratchet_home / "uploads").iterdir())) == 1


@pytest.mark.parametrize("path", ["/import/", "/import/do/", "/export/", "/export/file/"])
def test_only_operators_open_these_pages(path: str) -> None:
    ask = Client().post if path.endswith("do/") else Client().get
    assert ask(path).status_code == 302
    rater = client_of("rater")
    assert (rater.post(path) if path.endswith("do/") else rater.get(path)).status_code == 403


def test_every_format_can_be_downloaded(operator: Client) -> None:
    row = decision_record(agent="helper", messages="q", response="a").row
    rating_submit(decision=row, rater="ann", thumb="up")
    page = operator.get("/export/").content.decode()
    assert all(f'<option value="{name}">' in page for name in SHAPES)
    answer = operator.get("/export/file/", {"format": "trl-unpaired", "agent": "helper"})
    assert answer["Content-Disposition"] == 'attachment; filename="helper.trl-unpaired.jsonl"'
    (line,) = b"".join(answer).splitlines()  # type: ignore[arg-type]
    assert json.loads(line)["label"] is True
    assert operator.get("/export/file/", {"format": "none"}).status_code == 302
