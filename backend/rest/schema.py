"""Description of the endpoints: their pydantic models in OpenAPI, the refusals they share, and the pages of it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe
from drf_spectacular.extensions import OpenApiSerializerExtension
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.renderers import OpenApiJsonRenderer2, OpenApiYamlRenderer
from drf_spectacular.utils import Direction, OpenApiParameter, OpenApiResponse, extend_schema
from drf_spectacular.views import SpectacularAPIView
from pydantic import BaseModel, Field
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import JSONRenderer

from backend.bodies import Answer, Query, Sent

Schema = dict[str, Any]
T = TypeVar("T")


class ErrorDetails(Answer):
    code: str
    """For programs: invalid, not_found, conflict, throttled, ..."""
    message: str
    """What went wrong, as a sentence for people."""
    fields: dict[str, str]
    """Field or parameter -> what is wrong with it."""


class Error(Answer):
    """Why a request was refused, in the same shape everywhere."""

    error: ErrorDetails


class Page(Answer, Generic[T]):
    """A page of a list, as backend.rest.pages answers."""

    next: str | None = Field(json_schema_extra={"format": "uri"})
    previous: str | None = Field(json_schema_extra={"format": "uri"})
    results: list[T]

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        return f"{params[0].__name__}Page"


REFUSALS = {
    400: "The request cannot be read, or a field is wrong",
    401: "No key and no signed-in session, or a key that is unknown or revoked",
    403: "The key or role lacks the scope",
    404: "Nothing is at this address",
    405: "Another method is expected; see Allow",
    409: "The id was used for another write",
    413: "The body is larger than 10 MiB",
    415: "The body is not application/json in UTF-8",
    429: "Too many requests; see Retry-After",
    503: "The database cannot be reached; see Retry-After",
}


def of_path(name: str, schema: Schema, description: str) -> OpenApiParameter:
    return OpenApiParameter(name, schema, "path", description=description, required=True)


class BodySchema(GenerateJsonSchema):
    """JSON schema of bodies, without titles. Null is as good as nothing in a request, an empty text in a query."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        return _described(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        model = schema["cls"]
        found = _described(super().model_schema(schema), model)
        if issubclass(model, Query):
            found["properties"] = {name: _or(one, EMPTY) for name, one in found["properties"].items()}
        elif issubclass(model, Sent):
            required = found.get("required", [])
            found["properties"] = {
                name: one if name in required else _or(one, NULL)
                for name, one in found.get("properties", {}).items()
            }
        return found


def _described(schema: Schema, model: type) -> Schema:
    """A schema whose properties have the docstrings of the model's fields."""
    schema.pop("title", None)
    for one in (*model.__mro__, getattr(model, "described_by", None)):
        if one not in (None, object, BaseModel):
            for name, text in _field_docs(one).items():
                for key in {name, to_camel(name)} & schema.get("properties", {}).keys():
                    schema["properties"][key].setdefault("description", text)
    return schema


@cache
def _field_docs(model: type) -> dict[str, str]:
    """Fields of a class -> the docstrings under them."""
    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):  # made by create_model
        return {}
    (found,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(found, ast.ClassDef)
    return {
        one.target.id: " ".join(said.value.value.split())
        for one, said in pairwise(found.body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(said, ast.Expr)
        and isinstance(said.value, ast.Constant)
        and isinstance(said.value.value, str)
    }


NULL = {"type": "null"}
EMPTY = {"type": "string", "maxLength": 0}


def _or(schema: Schema, other: Schema) -> Schema:
    """A schema or another one; its description stays outside."""
    outside: Schema = {name: schema.pop(name) for name in ("description", "default") if name in schema}
    if outside.get("default") in (None, "", [], {}):
        outside.pop("default", None)
    alternatives = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return {"anyOf": [*(one for one in alternatives if one not in (other, NULL)), other], **outside}


class BodyExtension(OpenApiSerializerExtension):
    """Lets drf-spectacular read pydantic models: a request as it is validated, an answer as it is written."""

    target_class = "pydantic.BaseModel"
    match_subclasses = True
    priority = 1  # before the extension of drf-spectacular, which describes every model as it is written

    def get_name(self, auto_schema: object, direction: Direction) -> str:
        return str(self.target.__name__)

    def get_identity(self, auto_schema: object, direction: Direction) -> str:
        return str(self.target.__name__)

    def map_serializer(self, auto_schema: Any, direction: Direction) -> Schema:
        schema: Schema = self.target.model_json_schema(
            mode="validation" if direction == "request" else "serialization",
            ref_template="#/components/schemas/{model}",
            schema_generator=BodySchema,
        )
        for name, part in schema.pop("$defs", {}).items():
            component = ResolvedComponent(name, ResolvedComponent.SCHEMA, schema=part, object=name)
            auto_schema.registry.register_on_missing(component)
        return schema


def describe(
    summary: str,
    answers: Mapping[int, tuple[str, type[BaseModel] | Schema]],
    *,
    body: type[BaseModel] | None = None,
    query: type[Query] | None = None,
    parameters: tuple[OpenApiParameter, ...] = (),
    refusals: tuple[int, ...] = (),
    tag: str,
    operation: str,
    description: str = "",
    media_type: str = "application/json",
    also: Mapping[str, Schema] | None = None,
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
        parameters=[*parameters, *([query] if query else [])],  # type: ignore[list-item]
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
            **{status: OpenApiResponse(Error, REFUSALS[status]) for status in expected},
        },
    )


class SchemaView(SpectacularAPIView):
    """The OpenAPI schema, open to everyone: JSON, or YAML where a client accepts application/vnd.oai.openapi alone."""

    renderer_classes = [JSONRenderer, OpenApiJsonRenderer2, OpenApiYamlRenderer]
    content_negotiation_class = DefaultContentNegotiation


@require_safe
def api_docs(request: HttpRequest) -> HttpResponse:
    """Swagger UI on /api/schema/, open to everyone as the schema is; who is signed in tries calls as themselves."""
    server = request.build_absolute_uri("/").rstrip("/")
    quick = {"server": server, "slug": "support-bot", "question": "Where is my parcel?"}
    return render(request, "api_docs.html", quick)
