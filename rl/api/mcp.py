"""Model Context Protocol at /mcp: assistants find decisions, rate them and run the loop, with the keys of the REST API.

Each tool is an endpoint of the REST API, called as the same caller: its scopes, limits and errors hold. The transport
is "streamable HTTP" without sessions or streams: one JSON-RPC message in, one answer out.
Source: modelcontextprotocol.io, revision 2025-06-18.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.handlers.wsgi import WSGIRequest
from django.urls import resolve
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from pydantic import BaseModel, Field, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.views import ApiView

REVISIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Revisions of the protocol, the newest first."""
TOOLS = {
    "find_decisions": "decisions_find",
    "read_decision": "decisions_read",
    "rate_decision": "ratings_submit",
    "loop_status": "online_status",
    "policies": "policies_list",
    "train": "policies_train",
    "runs": "runs_list",
    "read_run": "runs_read",
    "evaluate_policy": "policies_evaluate",
    "promote_policy": "policies_promote",
}
"""Name of a tool -> the operation of the REST API that it is."""
INSTRUCTIONS = (
    "Ratchet records an app's decisions, people rate them, and policies are trained on the ratings. `policies` says in "
    "`why` what keeps a policy from being promoted. `train` with dryRun estimates a training. A promotion passes the "
    "gate or is refused with the reason."
)
INVALID_REQUEST, NO_METHOD, INVALID_PARAMS = -32600, -32601, -32602


class Message(BaseModel):
    """A JSON-RPC message; without `id` a notification."""

    jsonrpc: Literal["2.0"]
    method: Annotated[str, Field(max_length=100)]
    id: int | Annotated[str, Field(max_length=200)] | None = None
    params: dict[str, Any] = {}


class ToolCall(BaseModel):
    """Parameters of `tools/call`."""

    name: str
    arguments: dict[str, Any] = {}


@dataclass(frozen=True)
class Tool:
    """An endpoint as a tool."""

    name: str
    method: str
    path: str
    description: str
    schema: dict[str, Any]
    """JSON schema of its arguments: those of the path, of the query and of the body together."""
    in_path: frozenset[str]

    @property
    def listed(self) -> dict[str, Any]:
        hints = {"readOnlyHint": self.method == "GET"}
        return {
            "name": self.name,
            "description": self.description,
            "inputSchema": self.schema,
            "annotations": hints,
        }


class Mcp(ApiView):
    scopes = {"POST": "read"}

    @extend_schema(exclude=True)
    def post(self, request: Request) -> Response:
        try:
            message = Message.model_validate(request.data)
        except ValidationError as error:
            found = error.errors()[0]
            where = ".".join(map(str, found["loc"])) or "the message"
            return _error(
                None, INVALID_REQUEST, f"{where}: {found['msg']}; expected one JSON-RPC 2.0 message"
            )
        if (revision := request.headers.get("MCP-Protocol-Version", REVISIONS[0])) not in REVISIONS:
            text = f"MCP-Protocol-Version: expected one of {', '.join(REVISIONS)}, found {revision}"
            return _error(message.id, INVALID_REQUEST, text)
        if message.id is None:
            return Response(status=202)
        match message.method:
            case "initialize":
                return _result(message, _welcome(message.params))
            case "ping":
                return _result(message, {})
            case "tools/list":
                return _result(message, {"tools": [tool.listed for tool in tools().values()]})
            case "tools/call":
                return _called(request, message)
        return _error(
            message.id,
            NO_METHOD,
            f"expected initialize, ping, tools/list or tools/call, found {message.method}",
        )


def _welcome(params: dict[str, Any]) -> dict[str, Any]:
    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in REVISIONS else REVISIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "ratchet", "version": settings.RATCHET_VERSION},
        "instructions": INSTRUCTIONS,
    }


def _called(request: Request, message: Message) -> Response:
    try:
        call = ToolCall.model_validate(message.params)
        tool = tools()[call.name]
    except (ValidationError, KeyError):
        return _error(message.id, INVALID_PARAMS, f"expected a name of {', '.join(TOOLS)} with its arguments")
    missing = sorted(tool.in_path - set(call.arguments))
    if missing:
        return _error(message.id, INVALID_PARAMS, f"{call.name}: expected {', '.join(missing)}, found none")
    status, answer = _asked(request, tool, call.arguments)
    found: dict[str, Any] = {
        "content": [{"type": "text", "text": json.dumps(answer)}],
        "isError": status >= 400,
    }
    if status < 400 and isinstance(answer, dict):
        found["structuredContent"] = answer
    return _result(message, found)


def _asked(request: Request, tool: Tool, arguments: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of the endpoint's answer to the same caller."""
    places = {name: quote(str(arguments[name]), safe="", errors="replace") for name in tool.in_path}
    path = tool.path.format(**places)
    rest = {
        name: value for name, value in arguments.items() if name not in tool.in_path and value is not None
    }
    raw = json.dumps(rest).encode() if tool.method == "POST" else b""
    asked = WSGIRequest(
        {
            **request.META,
            "REQUEST_METHOD": tool.method,
            "PATH_INFO": path,
            "QUERY_STRING": "" if raw else urlencode(rest, errors="replace"),
            "CONTENT_TYPE": "application/json" if raw else "",
            "CONTENT_LENGTH": str(len(raw)),
            "HTTP_ACCEPT": "application/json",
            "wsgi.input": io.BytesIO(raw),
        }
    )
    asked.user, asked.session = request._request.user, request._request.session
    view = resolve(path)
    answer = view.func(asked, *view.args, **view.kwargs)
    if hasattr(answer, "render"):
        answer.render()
    return answer.status_code, json.loads(answer.content) if answer.content else None


@cache
def tools() -> dict[str, Tool]:
    """The tools, as the API's own description has their arguments."""
    document = SchemaGenerator().get_schema(request=None, public=True)
    schemas = json.loads(
        json.dumps(document["components"]["schemas"]).replace("#/components/schemas/", "#/$defs/")
    )
    operations = {
        operation["operationId"]: (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    found = {}
    for name, operation_id in TOOLS.items():
        method, path, operation = operations[operation_id]
        places = {one["name"]: one for one in operation.get("parameters", [])}
        properties = {
            key: {**one["schema"], "description": one.get("description", "")} for key, one in places.items()
        }
        required = [key for key, one in places.items() if one.get("required")]
        if sent := operation.get("requestBody"):
            body = schemas[sent["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
            properties = {**body.get("properties", {}), **properties}
            required += body.get("required", [])
        schema = {
            "type": "object",
            "properties": properties,
            "required": sorted(set(required)),
            **_defs(properties, schemas),
        }
        found[name] = Tool(
            name,
            method.upper(),
            path,
            f"{operation['summary']}. {operation.get('description', '')}".strip(),
            schema,
            frozenset(key for key, one in places.items() if one["in"] == "path"),
        )
    return found


def _defs(used: object, schemas: dict[str, Any]) -> dict[str, Any]:
    """`$defs` of the schemas that others refer to, if there are any."""
    found: dict[str, Any] = {}
    waiting = [used]
    while waiting:
        text = json.dumps(waiting.pop())
        for name in schemas:
            if name not in found and f'"#/$defs/{name}"' in text:
                found[name] = schemas[name]
                waiting.append(schemas[name])
    return {"$defs": found} if found else {}


def _result(message: Message, result: dict[str, Any]) -> Response:
    return Response({"jsonrpc": "2.0", "id": message.id, "result": result})


def _error(id: int | str | None, code: int, text: str) -> Response:
    status = 400 if code == INVALID_REQUEST else 200
    return Response({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}}, status=status)
