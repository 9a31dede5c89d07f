"""The REST endpoints of upstreams: list, add, change, test, remove. API keys go in and never come out."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.db import models
from jsonschema import Draft202012Validator
from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.pages import page_of
from backend.rest.reading import object_in, parameters
from backend.rest.schema import Schema, describe, list_schema, page_schema, parameter, ref
from backend.rest.views import ApiView
from rl.api.loop import PAGE_PARAMETERS, PAGING
from rl.models import Upstream
from rl.serving.upstream_test import UpstreamTest, upstream_test
from rl.upstreams.service import (
    RANGES,
    SETTINGS,
    upstream_add,
    upstream_change,
    upstream_get,
    upstream_remove,
    upstream_represent,
)

TYPES: dict[str, tuple[str, str]] = {
    "CharField": ("string", "text"),
    "FloatField": ("number", "a number"),
    "PositiveIntegerField": ("integer", "a whole number"),
    "BooleanField": ("boolean", "true or false"),
}
"""Class of a field -> its JSON type, and the type in words."""


def _schema(field: models.Field[Any, Any]) -> Schema:
    kind, _ = TYPES[field.get_internal_type()]
    found: Schema = {"type": [kind, "null"] if field.null else kind}
    if field.choices:
        found["enum"] = [value for value, _ in field.flatchoices]
    if field.max_length:
        found["maxLength"] = field.max_length
    if field.name in RANGES:
        found["minimum"], found["maximum"] = RANGES[field.name]
    elif kind == "integer":
        found["minimum"] = 0
    return found | ({"description": str(field.help_text)} if field.help_text else {})


FIELDS: dict[str, models.Field[Any, Any]] = {name: Upstream._meta.get_field(name) for name in SETTINGS}  # type: ignore[misc]
SCHEMAS = {name: _schema(field) for name, field in FIELDS.items()}
KEY: Schema = {
    "type": "string",
    "maxLength": 1000,
    "writeOnly": True,
    "description": "The API key. It is stored encrypted and never shown.",
}
TEXT: Schema = {"type": "string"}
UPSTREAM_COMPONENTS: dict[str, Schema] = {
    "UpstreamSent": {
        "type": "object",
        "required": ["name", "url", "model"],
        "properties": {**SCHEMAS, "key": KEY},
        "additionalProperties": False,
    },
    "UpstreamChanged": {
        "type": "object",
        "properties": {
            **{name: schema for name, schema in SCHEMAS.items() if name != "name"},
            "key": KEY,
        },
        "additionalProperties": False,
    },
    "Upstream": {
        "type": "object",
        "required": [*SCHEMAS, "key", "policies", "warning"],
        "properties": {
            **SCHEMAS,
            "key": {**TEXT, "enum": ["environment", "stored", "none"], "description": "Where its API key is"},
            "policies": {**list_schema(TEXT), "description": "Policies it answers for"},
            "warning": {**TEXT, "description": "What is unsafe about its address; empty where nothing is"},
        },
        "additionalProperties": False,
    },
    "UpstreamTest": {
        "type": "object",
        "required": list(UpstreamTest.__dataclass_fields__),
        "properties": {
            "name": TEXT,
            "answer": TEXT,
            "latency_ms": {"type": "number"},
            "model": {**TEXT, "description": "Model and version as the provider names them"},
            "schemas": {**TEXT, "enum": Upstream.Schemas.values},
        },
        "additionalProperties": False,
    },
}
OF_NAME = parameter("name", {"type": "string"}, "The upstream's name", where="path")


class Upstreams(ApiView):
    scopes = {"GET": "operate", "POST": "operate"}

    @describe(
        "List upstreams",
        {200: ("A page of them", page_schema(ref("Upstream")))},
        parameters=PAGING,
        tag="upstreams",
        operation="upstreams_list",
    )
    def get(self, request: Request) -> Response:
        parameters(request, PAGE_PARAMETERS)
        return Response(page_of(Upstream.objects.order_by("-pk"), request, upstream_represent))

    @describe(
        "Add an upstream",
        {201: ("The upstream, without its key", ref("Upstream"))},
        body=ref("UpstreamSent"),
        refusals=(409,),
        tag="upstreams",
        operation="upstream_add",
    )
    def post(self, request: Request) -> Response:
        values, key = _read(request.data, required=("name", "url", "model"))
        return Response(upstream_represent(upstream_add(values, key)), status=201)


class UpstreamOne(ApiView):
    scopes = {"GET": "operate", "PATCH": "operate", "DELETE": "operate"}

    @describe(
        "Read an upstream",
        {200: ("The upstream, without its key", ref("Upstream"))},
        parameters=(OF_NAME,),
        refusals=(404,),
        tag="upstreams",
        operation="upstream_read",
    )
    def get(self, request: Request, name: str) -> Response:
        parameters(request, ())
        return Response(upstream_represent(upstream_get(name)))

    @describe(
        "Change an upstream",
        {200: ("The upstream, without its key", ref("Upstream"))},
        body=ref("UpstreamChanged"),
        parameters=(OF_NAME,),
        refusals=(404,),
        tag="upstreams",
        operation="upstream_change",
        description="Fields that are left out stay. A new address needs the API key again.",
    )
    def patch(self, request: Request, name: str) -> Response:
        values, key = _read(request.data, required=(), left_out=("name",))
        return Response(upstream_represent(upstream_change(upstream_get(name), values, key)))

    @describe(
        "Remove an upstream with its API key",
        {204: ("It was removed", {})},
        parameters=(OF_NAME,),
        refusals=(404, 409),
        tag="upstreams",
        operation="upstream_remove",
    )
    def delete(self, request: Request, name: str) -> Response:
        parameters(request, ())
        upstream_remove(upstream_get(name))
        return Response(status=204)


class UpstreamTested(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Ask an upstream one short question",
        {200: ("The answer, and what it took", ref("UpstreamTest"))},
        parameters=(OF_NAME,),
        refusals=(404, 409),
        tag="upstreams",
        operation="upstream_test",
        description="Stores which form of JSON answers works as `schemas`.",
    )
    def post(self, request: Request, name: str) -> Response:
        object_in(request.data, required=(), optional=())
        return Response(asdict(upstream_test(upstream_get(name))))


def _read(
    data: Any, *, required: tuple[str, ...], left_out: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """The fields of a body and the key. Refuses (400) values of another type."""
    known = [name for name in (*SCHEMAS, "key") if name not in left_out]
    sent = object_in(data, required=required, optional=[name for name in known if name not in required])
    faults = {
        name: f"expected {_words(name)}"
        for name, value in sent.items()
        if not Draft202012Validator({**SCHEMAS, "key": KEY}[name]).is_valid(value)
        or (isinstance(value, str) and "\x00" in value)
    }
    if faults:
        raise RequestRefused("; ".join(f"{name}: {fault}" for name, fault in faults.items()), fields=faults)
    return {name: value for name, value in sent.items() if name != "key"}, sent.get("key", "")


def _words(name: str) -> str:
    if name == "key":
        return "text of at most 1,000 characters"
    schema = SCHEMAS[name]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    limit = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    if "maximum" in schema:
        limit = f" from {schema['minimum']:g} to {schema['maximum']:,.0f}"
    return TYPES[FIELDS[name].get_internal_type()][1] + limit
