"""The examples in docs/api.md are run as they stand, in their order, against the API."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.urls import get_resolver

from backend.rest.errors import STATUSES
from tests.support.api_client import ApiClient
from tests.test_api_access import OPEN, api_views

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")


def examples() -> list[tuple[str, int]]:
    """(curl command, status promised behind it) of every block that has one."""
    blocks = re.findall(r"```sh\n(curl .*?)```", PAGE, re.DOTALL)
    found = [re.fullmatch(r"(.*?)\s+# (\d{3})\b.*", block.strip(), re.DOTALL) for block in blocks]
    assert all(found), [block for block, match in zip(blocks, found, strict=True) if not match]
    return [(match[1], int(match[2])) for match in found if match]


@pytest.mark.django_db
def test_every_example_runs_and_answers_as_promised() -> None:
    app = ApiClient("ingest", "rate", "rate_as", "read", "operate")
    shown = examples()
    assert len(shown) >= 12
    for command, status in shown:
        words = shlex.split(command)
        url = next(word for word in words if word.startswith("http"))
        address = urlsplit(url)
        assert "Authorization: Bearer $KEY" in words
        if "-d" in words:
            assert "Content-Type: application/json" in words
            response = app.post(address.path, words[words.index("-d") + 1])
        else:
            response = app.client.get(f"{address.path}?{address.query}")
        assert response.status_code == status, (command, getattr(response, "content", ""))


def test_every_endpoint_has_a_heading() -> None:
    missing = []
    for address, view in api_views(get_resolver().url_patterns):
        if address in OPEN:
            continue
        shown = re.sub(
            r"<(?:\w+:)?(\w+)>", lambda match: "{id}" if match[1] == "pk" else f"{{{match[1]}}}", address
        )
        missing += [f"{method} {shown}" for method in view.scopes if f"### {method} {shown}\n" not in PAGE]
    assert missing == []


def test_json_on_the_page_is_json() -> None:
    for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL):
        json.loads(block)


def test_the_codes_of_refusals_are_listed() -> None:
    assert all(f"`{code}`" in PAGE for code in STATUSES)
