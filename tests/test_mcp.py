"""The Model Context Protocol by the official client, with keys of every kind."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from feedback.accounts.authentication import key_create
from feedback.models import Rating
from feedback.services import decision_record
from rl.api.mcp import TOOLS
from tests.support.api_client import ApiClient

pytestmark = pytest.mark.django_db(transaction=True)


def called(address: str, key: str, calls: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], list[Any]]:
    """The tools as they are listed, and the results of calls."""

    async def session() -> tuple[list[Any], list[Any]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=60) as http,
            streamable_http_client(f"{address}/mcp", http_client=http) as streams,
            ClientSession(streams[0], streams[1]) as client,
        ):
            await client.initialize()
            listed = (await client.list_tools()).tools
            return listed, [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(session())


def test_the_official_client_finds_rates_and_asks_for_the_state_of_the_loop(live_server: Any) -> None:
    decision = decision_record(agent="desk", messages="Where is it?", response="In the mail.").row
    _, key = key_create("assistant", ["read", "rate", "operate"])
    listed, (found, rated, status, dry) = called(
        live_server.url,
        key,
        [
            ("find_decisions", {"agent": "desk", "rated": False}),
            ("rate_decision", {"id": str(decision.pk), "thumb": "down", "correction": "On your doorstep."}),
            ("loop_status", {"agent": "desk"}),
            ("train", {"agent": "desk", "dryRun": True}),
        ],
    )
    assert {tool.name for tool in listed} == set(TOOLS)
    rate = next(tool for tool in listed if tool.name == "rate_decision")
    assert {"id", "thumb", "correction"} <= set(rate.input_schema["properties"])
    assert rate.input_schema["required"] == ["id"]
    assert [row["id"] for row in found.structured_content["results"]] == [str(decision.pk)]
    assert not rated.is_error
    assert Rating.objects.get().correction == "On your doorstep."
    assert (status.is_error, status.structured_content["agent"]) == (False, "desk")
    assert dry.is_error, "one rating is too few"
    assert json.loads(dry.content[0].text)["error"]["code"]


def test_a_tool_asks_for_the_scope_of_its_endpoint(live_server: Any) -> None:
    decision = decision_record(agent="desk", messages="Where is it?", response="In the mail.").row
    _, key = key_create("reader", ["read"])
    _, (rated, promoted) = called(
        live_server.url,
        key,
        [("rate_decision", {"id": str(decision.pk), "thumb": "up"}), ("promote_policy", {"name": "desk-v1"})],
    )
    assert rated.is_error
    assert promoted.is_error
    assert json.loads(rated.content[0].text)["error"]["code"] == "forbidden"
    assert Rating.objects.count() == 0


@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [
        ("find_decisions", {"agents": "desk"}, "invalid"),
        ("find_decisions", {"agent": "\ud800"}, "invalid"),
        ("find_decisions", {"agent": "desk", "rated": None}, None),
        ("read_decision", {"id": "\ud800"}, "not_found"),
        ("read_decision", {"id": "../runs"}, "not_found"),
    ],
)
def test_arguments_are_the_endpoints(tool: str, arguments: dict[str, Any], code: str | None) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    found = ApiClient("read").post("/mcp", {**message, "params": {"name": tool, "arguments": arguments}})
    assert json.loads(found.json()["result"]["content"][0]["text"]).get("error", {}).get("code") == code


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ([], 400, -32600),
        ({"method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "method": "ping", "id": {}}, 400, -32600),
        ({"jsonrpc": "2.0", "method": "resources/list", "id": 1}, 200, -32601),
        ({"jsonrpc": "2.0", "method": "tools/call", "id": 1, "params": {"name": "drop"}}, 200, -32602),
        ({"jsonrpc": "2.0", "method": "tools/call", "id": 1, "params": {"name": "read_run"}}, 200, -32602),
    ],
)
def test_what_is_no_call_is_an_error_of_the_protocol(body: Any, status: int, code: int) -> None:
    answer = ApiClient("read").post("/mcp", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("id", ["../../admin/", "x/y", "7?agent=all", "%2e%2e", "{name}"])
def test_an_argument_stays_within_its_place_in_the_address(id: str) -> None:
    body = {"jsonrpc": "2.0", "method": "tools/call", "id": 1}
    body |= {"params": {"name": "read_run", "arguments": {"id": id}}}
    result = ApiClient("read").post("/mcp", body).json()["result"]
    assert result["isError"]
    assert json.loads(result["content"][0]["text"])["error"]["code"] == "not_found"


def test_nobody_and_a_key_that_only_ingests_are_refused_and_a_notification_has_no_answer() -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert ApiClient().post("/mcp", note).status_code == httpx.codes.UNAUTHORIZED
    assert ApiClient("ingest").post("/mcp", note).status_code == 403
    reader = ApiClient("read")
    answer = reader.post("/mcp", note)
    assert (answer.status_code, answer.content) == (202, b"")
    assert reader.get("/mcp").status_code == 405


def test_a_revision_of_the_protocol_that_is_unknown_is_refused() -> None:
    call = {"jsonrpc": "2.0", "method": "ping", "id": 1}
    reader = ApiClient("read")
    for revision, status in (("2025-03-26", 200), ("1999-01-01", 400), ("", 400)):
        answer = reader.post("/mcp", call, headers={"MCP-Protocol-Version": revision})
        assert answer.status_code == status
        assert ("error" in answer.json()) is (status == 400)


def test_a_message_over_the_limit_or_of_no_json_changes_nothing(settings: Any) -> None:
    decision = decision_record(agent="shop", messages="Where is it?", response="At the depot.").row
    rating = {"id": str(decision.pk), "thumb": "up", "rater": "ada", "comment": "x" * 2_000}
    call = {"name": "rate_decision", "arguments": rating}
    body = {"jsonrpc": "2.0", "method": "tools/call", "id": 1, "params": call}
    rater = ApiClient("read", "rate", "rate_as")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1_000
    refused = rater.post("/mcp", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
    broken = rater.post("/mcp", "{")
    assert broken.status_code == 400
    assert not Rating.objects.exists()
