"""Pages that bring files in and give them out: tried first, then imported; operators alone; limits that hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from feedback.models import Comparison, Decision, ImportBatch, Rating
from feedback.services import decision_record, rating_submit
from feedback.transfer import uploads
from feedback.transfer.formats import SHAPES
from tests.support.api_client import signed_in

pytestmark = pytest.mark.django_db

PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
BAD = {"prompt": "q", "chosen": "", "rejected": "bad", "id": "row-2"}


def upload(client: Client, *rows: Any, name: str = "x.jsonl", **more: Any) -> Any:
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return client.post("/import/", {"file": SimpleUploadedFile(name, body), **more})


def go_on(client: Client, tried: Any, **more: Any) -> Any:
    return client.post("/import/do/", {"token": tried.context["upload"].token, **more}, follow=True)


def test_who_chooses_another_file_finds_what_was_typed(operator: Client) -> None:
    upload(operator, PAIR, agent="support-bot", licence="CC-BY-4.0")
    page = operator.get("/import/").content.decode()
    assert 'value="support-bot"' in page
    assert 'value="CC-BY-4.0"' in page


def test_an_upload_is_tried_and_then_imported(operator: Client, ratchet_home: Path) -> None:
    tried = upload(operator, PAIR, agent="helper")
    page = tried.content.decode()
    assert tried.status_code == 200
    assert tried.context["counts"] == [("decisions", 2), ("comparisons", 1)]
    assert "Nothing is stored yet" in page
    assert Decision.objects.count() == 0
    done = go_on(operator, tried)
    batch = ImportBatch.objects.get()
    assert f"x.jsonl: 2 decisions, 1 comparison imported (import {batch.pk})." in done.content.decode()
    assert done.redirect_chain == [(f"/imports/{batch.pk}/", 302)]
    assert (batch.file, batch.actor, batch.agent) == ("x.jsonl", "olga", "helper")
    assert Comparison.objects.get().left.agent == "helper"
    assert list((ratchet_home / "uploads").iterdir()) == []


def test_rows_that_cannot_be_read_are_shown_and_only_left_out_when_that_was_chosen(operator: Client) -> None:
    tried = upload(operator, PAIR, BAD)
    page = tried.content.decode()
    assert "1 row cannot be read" in page
    assert "chosen: is empty" in page
    assert "row-2" in page
    assert "Import without this row" in page
    assert "1 of 2 rows refused, nothing was imported" in go_on(operator, tried).content.decode()
    assert Decision.objects.count() == 0
    done = go_on(operator, upload(operator, PAIR, BAD), skip_bad="on")
    assert "1 row left out" in done.content.decode()
    assert Comparison.objects.count() == 1


def test_a_file_of_no_known_format_is_refused_without_our_paths(operator: Client, ratchet_home: Path) -> None:
    tried = upload(operator, {"colour": "<red>"}, name="../../<b>.jsonl")
    page = tried.content.decode()
    assert tried.status_code == 400
    assert "&lt;b&gt;.jsonl: of no known format" in page
    assert "colour" in page
    assert str(ratchet_home) not in page
    assert "<b>" not in page
    assert "<red>" not in page
    # its columns may be named, and another upload takes its place
    assert tried.context["columns"][0][0].name == "colour"
    upload(operator, "no object")
    assert len(list((ratchet_home / "uploads").iterdir())) <= 1


def test_rows_can_be_pasted_and_their_columns_are_guessed(operator: Client) -> None:
    rows = "customer message,routed to,ok?,should have been\r\nLate!,billing,no,delivery\r\nHot!,technical,yes,\r\n"
    tried = operator.post("/import/", {"text": rows, "agent": "tickets"})
    assert tried.status_code == 200
    assert dict(tried.context["counts"]) == {"decisions": 2, "ratings": 2, "corrections": 1}
    assert {column.name: field for column, field in tried.context["columns"]} == {
        "customer message": "prompt",
        "routed to": "response",
        "ok?": "rating",
        "should have been": "correction",
    }
    go_on(operator, tried)
    assert Rating.objects.get(correction="delivery").thumb == "down"


def test_a_table_pasted_twice_brings_nothing_new(operator: Client) -> None:
    rows = "customer message,routed to,ok?\nLate!,billing,no\nHot!,technical,yes\n"
    go_on(operator, operator.post("/import/", {"text": rows, "agent": "tickets"}))
    again = operator.post("/import/", {"text": rows, "agent": "tickets"})
    assert (again.context["fault"], again.context["already_here"]) == ("", 2)
    assert "Nothing new: all 2 rows were here already" in again.text


def test_columns_of_unknown_names_are_guessed_by_their_texts(operator: Client) -> None:
    rows = "id,ticket,queue,points\n17,My lamp is broken,technical,3\n18,Where is my parcel?,delivery,5\n"
    tried = operator.post("/import/", {"text": rows, "agent": "tickets"})
    assert {column.name: field for column, field in tried.context["columns"]}["ticket"] == "prompt"
    assert {column.name: field for column, field in tried.context["columns"]}["queue"] == "response"
    page = tried.content.decode()
    # the fields that most files have come first, and no words of a command line
    first = re.findall(r'<option value="(\w*)"', page)[:5]
    assert first == ["prompt", "response", "rating", "correction", "ignore"]
    assert "--map" not in page


def test_the_trial_names_the_agent(operator: Client) -> None:
    tried = operator.post("/import/", {"text": "prompt,response\na,b\n", "agent": "tickets"})
    assert "What would be imported for tickets" in tried.content.decode()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "found 1; say the scale, as in --map rating=ok?:0..100, or --map ignore=ok?",
            "found 1; say the scale, as in “rating” for ok?, scale 0..100, or “not read” for ok?",
        ),
        (
            "a thumb or stars? Say --map thumb=was it good or --map stars=was it good",
            "a thumb or stars? Say “thumb” for was it good or “stars” for was it good",
        ),
        ("or leave it out with --map ignore=a+b", "or leave it out with “not read” for a, b"),
        ("no prompt. Say which it is, as in --map prompt=COLUMN,response=COLUMN", "no prompt."),
    ],
)
def test_options_of_the_command_are_choices_of_the_page(said: str, shown: str) -> None:
    assert uploads.Upload("t", "/tmp/x/file.csv", "mine.csv").for_page(said) == shown


def test_ratings_may_be_a_second_file(operator: Client) -> None:
    ratings = SimpleUploadedFile("r.json", json.dumps([{"entry_id": "1", "rating": "up"}]).encode())
    tried = upload(operator, {"entry_id": "1", "prompt": "q", "response": "a"}, ratings=ratings)
    assert tried.context["counts"] == [("decisions", 1), ("ratings", 1)]
    go_on(operator, tried)
    assert Rating.objects.get().thumb == "up"


def test_an_upload_belongs_to_who_made_it_and_is_used_once(operator: Client) -> None:
    tried = upload(operator, PAIR)
    other = signed_in("ed", "admin")
    assert other.post("/import/do/", {"token": tried.context["upload"].token}).status_code == 400
    assert operator.post("/import/do/", {"token": "another"}).status_code == 400
    go_on(operator, upload(operator, PAIR))
    assert operator.post("/import/do/", {"token": tried.context["upload"].token}).status_code == 400


def test_a_file_that_is_too_large_is_refused_before_it_is_read(operator: Client, settings: Any) -> None:
    settings.FEEDBACK_UPLOAD_MAX_BYTES = 1 << 20
    answer = upload(operator, {"prompt": "q" * (1 << 20), "chosen": "a", "rejected": "b"})
    assert answer.status_code == 413
    assert "larger than 1 MB" in answer.content.decode()
    assert "import_feedback" in answer.content.decode()


@pytest.mark.parametrize(
    ("address", "megabytes", "status"),
    [
        ("/accounts/login/", 400, 413),
        ("/rate/", 400, 413),
        ("/import/", 400, 413),
        ("/import/", 40, 302),  # to the sign-in form
        ("/start/bring/", 40, 302),
    ],
)
def test_what_a_stranger_uploads_is_not_read(address: str, megabytes: int, status: int) -> None:
    """400 MB were written to the disk before their 403. The body is empty here: reading it would be an error."""
    stated = {"CONTENT_TYPE": "multipart/form-data; boundary=x", "CONTENT_LENGTH": str(megabytes << 20)}
    answer = Client(enforce_csrf_checks=True).generic("POST", address, b"", **stated)
    assert answer.status_code == status


def test_without_a_file_the_page_says_so(operator: Client) -> None:
    assert "Expected a file or rows, found neither" in operator.post("/import/", {}).content.decode()
    assert operator.put("/import/").status_code == 405
    assert upload(operator, PAIR, agent="Not A Slug").status_code == 400


def test_what_nobody_came_back_for_is_removed(operator: Client, ratchet_home: Path, monkeypatch: Any) -> None:
    upload(operator, PAIR)
    monkeypatch.setattr(uploads, "KEPT_S", -1)
    upload(operator, PAIR)
    assert len(list((ratchet_home / "uploads").iterdir())) == 1


TABLE = {"subject": "What is late?", "text": "The parcel.", "mark": "4", "who": "ann"}


def again(client: Client, tried: Any, **columns: str) -> Any:
    """Press "Try it with these columns": the selects as they stand, but for those given by the column's name."""
    chosen = {
        f"column-{number}": columns.get(column.name, field or "")
        for number, (column, field) in enumerate(tried.context["columns"])
    }
    scale = columns.get("scale", "")
    return client.post("/import/", {"token": tried.context["upload"].token, "scale": scale, **chosen})


def test_a_file_whose_columns_nobody_knows_is_read_by_the_map_of_the_form(operator: Client) -> None:
    rows = [{**TABLE, "mark": mark} for mark in ("4", "5", "1")]
    tried = upload(operator, *rows, agent="helper", licence="CC0")
    assert tried.status_code == 200
    assert "Its columns were guessed by their names and values: check them below." in tried.context["notes"]
    assert [column.name for column, _ in tried.context["columns"]] == list(TABLE)
    assert tried.context["first_rows"][0] == list(TABLE.values())
    mapped = again(operator, tried, subject="prompt", text="response", mark="stars", who="rater")
    assert mapped.status_code == 200
    assert dict(mapped.context["counts"])["ratings"] == 3
    assert [field for _, field in mapped.context["columns"]] == ["prompt", "response", "stars", "rater"]
    go_on(operator, mapped)
    # one rater of one decision: the last word stands
    assert list(Rating.objects.filter(superseded_by=None).values_list("rater", "stars")) == [("ann", 1)]
    batch = ImportBatch.objects.get()
    assert batch.licence == "CC0"
    expected = {"prompt": "subject", "response": "text", "stars": "mark", "rater": "who"}
    assert batch.options["columns"] == expected


def test_one_field_for_two_columns_is_refused_with_both(operator: Client) -> None:
    tried = upload(operator, TABLE)
    twice = again(operator, tried, subject="prompt", text="prompt")
    assert twice.status_code == 400
    assert "prompt: chosen for the columns subject and text; choose one" in twice.content.decode()
    assert "expected one of" in again(operator, tried, subject="__class__").content.decode()
    assert again(Client(), tried).status_code == 302
    assert (
        signed_in("ed", "admin").post("/import/", {"token": tried.context["upload"].token}).status_code == 400
    )


def test_columns_beside_another_tools_rows_are_left_out_by_the_form(operator: Client) -> None:
    turns = "\n\nHuman: a\n\nAssistant: "
    row = {"chosen": f"{turns}b", "rejected": f"{turns}c", "score": 3, "user_thumb": "down"}
    tried = upload(operator, row)
    assert "score, user_thumb: looks like what somebody said" in tried.content.decode()
    ignoring = again(operator, tried, score="ignore", user_thumb="ignore")
    assert dict(ignoring.context["counts"])["comparisons"] == 1
    assert [field for _, field in ignoring.context["columns"]] == [None, None, "ignore", "ignore"]
    assert "left out: score, user_thumb" in ignoring.context["notes"]
    go_on(operator, ignoring)
    assert ImportBatch.objects.get().format == "hh"


def test_nothing_stored_is_told_from_here_already(operator: Client) -> None:
    go_on(operator, upload(operator, PAIR))
    here = upload(operator, PAIR).content.decode()
    assert f"import {ImportBatch.objects.get().pk}</a>" in here
    assert "all 1 row was here already" in here
    nothing = upload(operator, {"prompt": "only a prompt"}, format="trl").content.decode()
    assert "Nothing could be stored of 1 row" in nothing
    assert "here already" not in nothing


def test_imports_are_listed_and_shown_with_their_report(operator: Client) -> None:
    assert "No imports yet" in operator.get("/imports/").content.decode()
    go_on(operator, upload(operator, PAIR, BAD, agent="helper", licence="MIT"), skip_bad="on")
    batch = ImportBatch.objects.get()
    page = operator.get("/imports/?agent=helper").content.decode()
    assert "x.jsonl" in page
    assert "MIT" in page
    assert "2 decisions, 1 comparison" in page
    assert "x.jsonl" not in operator.get("/imports/?agent=other").content.decode()
    one = operator.get(f"/imports/{batch.pk}/").content.decode()
    assert "chosen: is empty" in one
    assert batch.sha256[:16] in one
    assert f"/decisions/?batch={batch.pk}" in one
    assert operator.get("/imports/999/").status_code == 404
    assert len(operator.get(f"/decisions/?batch={batch.pk}").context["rows"]) == 2
    assert operator.get("/decisions/?batch=999").context["rows"] == []
    assert operator.get("/decisions/?batch=x").status_code == 400
    assert operator.get(f"/rate/?batch={batch.pk}").status_code == 200


def test_an_import_is_taken_back_after_it_was_asked(operator: Client) -> None:
    go_on(operator, upload(operator, PAIR, agent="helper"))
    number = ImportBatch.objects.get().pk
    asked = operator.post(f"/imports/{number}/undo/")
    assert asked.context["removed"] == [("decisions", 2), ("comparisons", 1)]
    assert Decision.objects.count() == 2
    done = operator.post(f"/imports/{number}/undo/", {"confirm": "on"}, follow=True)
    assert f"Import {number} was undone: 2 decisions, 1 comparison removed." in done.content.decode()
    assert Decision.objects.count() == 0
    assert ImportBatch.objects.get().undone_by == "olga"
    again = operator.post(f"/imports/{number}/undo/", {"confirm": "on"})
    assert again.status_code == 409
    assert "was undone on" in again.content.decode()
    assert operator.get(f"/imports/{number}/undo/").status_code == 405
    assert "undone" in operator.get("/imports/").content.decode()


def test_every_format_can_be_downloaded(operator: Client) -> None:
    row = decision_record(agent="helper", messages="q", response="a").row
    rating_submit(decision=row, rater="ann", thumb="up")
    page = operator.get("/export/").content.decode()
    assert all(f'value="{name}">' in page for name in SHAPES)
    answer = operator.get("/export/file/", {"format": "trl-unpaired", "agent": "helper"})
    assert answer["Content-Disposition"] == 'attachment; filename="helper.trl-unpaired.jsonl"'
    (line,) = b"".join(answer).splitlines()  # type: ignore[arg-type]
    assert json.loads(line)["label"] is True
    assert operator.get("/export/file/", {"format": "none"}).status_code == 302
