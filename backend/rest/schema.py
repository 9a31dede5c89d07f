"""OpenAPI description of endpoints: components by name, the same errors everywhere, and the page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe
from drf_spectacular.renderers import OpenApiJsonRenderer2, OpenApiYamlRenderer
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from drf_spectacular.views import SpectacularAPIView
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import JSONRenderer

Schema = dict[str, Any]

ERROR: Schema = {
    "type": "object",
    "description": "Why a request was refused, in the same shape everywhere.",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "fields"],
            "additionalProperties": False,
            "properties": {
                "code": {
                    "type": "string",
                    "description": "For programs: invalid, not_found, conflict, throttled, ...",
                },
                "message": {
                    "type": "string",
                    "description": "For people: what was expected and what was found",
                },
                "fields": {
                    "type": "object",
                    "description": "Field or parameter -> what is wrong with it",
                    "additionalProperties": {"type": "string"},
                },
            },
        }
    },
}

REFUSALS = {
    400: "The request cannot be read, or a field is wrong",
    401: "No key and no signed-in session, or a key that is unknown or revoked",
    403: "The key or role lacks the scope",
    404: "Nothing is at this address",
    405: "Another method is expected; see Allow",
    409: "The id was used for another write",
    413: "The body is larger than 10 MB",
    415: "The body is not application/json in UTF-8",
    429: "Too many requests; see Retry-After",
    503: "The database cannot be reached; see Retry-After",
}


BODY_OPTIONAL = "x-body-optional"
"""Marks an operation that may be sent without a body, until the schema is finished."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def list_schema(schema: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": schema, **more}


def page_schema(schema: Schema) -> Schema:
    """A page of a list, as backend.rest.pages answers."""
    link = {"type": ["string", "null"], "format": "uri"}
    return {
        "type": "object",
        "required": ["next", "previous", "results"],
        "properties": {"next": link, "previous": link, "results": list_schema(schema)},
    }


def parameter(
    name: str, schema: Schema, description: str, *, where: Literal["query", "path"] = "query"
) -> OpenApiParameter:
    """A parameter; one of a query may be empty, which is as if it were not there (`?agent=&policy=`)."""
    if where == "query":
        schema = {"anyOf": [schema, {"type": "string", "maxLength": 0}]}
    return OpenApiParameter(name, schema, where, description=description, required=where == "path")


def describe(
    summary: str,
    answers: Mapping[int, tuple[str, Schema]],
    *,
    body: Schema | None = None,
    parameters: tuple[OpenApiParameter, ...] = (),
    refusals: tuple[int, ...] = (),
    tag: str,
    operation: str,
    description: str = "",
    media_type: str = "application/json",
    also: Mapping[str, Schema] | None = None,
    body_required: bool = True,
) -> Callable[[Any], Any]:
    """Describe one method of a view: its answers, and the refusals it shares with all others beside its own.

    also: other media types that a 200 may come in -> what is in them then.
    """
    expected = sorted({400, 401, 403, 429, 503, *((415, 413) if body else ()), *refusals})
    return extend_schema(
        operation_id=operation,
        summary=summary,
        description=description,
        tags=[tag],
        parameters=list(parameters),
        extensions={} if body_required else {BODY_OPTIONAL: True},
        request={"application/json": body} if body else None,
        responses={
            **{
                (status, media_type): OpenApiResponse(schema, text)
                for status, (text, schema) in answers.items()
            },
            **{
                (200, other): OpenApiResponse(schema, answers[200][0])
                for other, schema in (also or {}).items()
            },
            **{status: OpenApiResponse(ref("Error"), REFUSALS[status]) for status in expected},
        },
    )


def add_components(schemas: Mapping[str, Schema]) -> Callable[..., Schema]:
    """A drf-spectacular hook that adds named components to the schema, and says which bodies are required."""

    def hook(result: Schema, generator: Any, request: Any, public: bool) -> Schema:
        components = result.setdefault("components", {}).setdefault("schemas", {})
        components.update({"Error": ERROR, **schemas})
        for methods in result["paths"].values():
            for operation in methods.values():
                # drf-spectacular takes a body that is given as a schema for optional
                if "requestBody" in operation and not operation.get(BODY_OPTIONAL):
                    operation["requestBody"]["required"] = True
        return result

    return hook


class SchemaView(SpectacularAPIView):
    """The OpenAPI schema, open to everyone: JSON, or YAML where a client accepts application/vnd.oai.openapi alone."""

    renderer_classes = [JSONRenderer, OpenApiJsonRenderer2, OpenApiYamlRenderer]
    content_negotiation_class = DefaultContentNegotiation


@require_safe
def api_docs(request: HttpRequest) -> HttpResponse:
    """Swagger UI on /api/schema/, open to everyone as the schema is; who is signed in tries calls as themselves."""
    return render(request, "api_docs.html")
