"""The REST endpoints of upstreams: list, add, change, test, remove. API keys go in and never come out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Sent
from backend.rest.pages import PageQuery, page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe, of_path
from backend.rest.views import ApiView
from feedback.storage.fields import WHOLE, OneOf, Storable
from rl.models import Upstream as UpstreamRow
from rl.serving.upstream_test import UpstreamTest, upstream_test
from rl.upstreams import (
    RANGES,
    upstream_add,
    upstream_change,
    upstream_get,
    upstream_remove,
    upstream_represent,
)

OF_NAME = of_path("name", {"type": "string"}, "The upstream's name")


def _range(name: str) -> object:
    low, high = RANGES[name]
    return Field(ge=low, le=high)


Key = Annotated[Storable, Field(max_length=1000, json_schema_extra={"writeOnly": True})]
Url = Annotated[Storable, Field(max_length=500)]
ModelId = Annotated[Storable, Field(max_length=200)]
Price = Annotated[float, _range("price_in")]


class UpstreamSettings(Sent):
    """Fields that are left out keep their value, or have their default."""

    dialect: Annotated[str, OneOf(UpstreamRow.Dialect.values)] | None = None
    schemas: Annotated[str, OneOf(UpstreamRow.Schemas.values)] | None = None
    """How the endpoint is told the form of an answer."""
    key_env: Annotated[Storable, Field(max_length=100)] | None = None
    """Environment variable that holds the API key."""
    timeout_s: Annotated[float, _range("timeout_s")] | None = None
    """Seconds an answer may take."""
    connect_timeout_s: Annotated[float, _range("connect_timeout_s")] | None = None
    """Seconds a connection may take."""
    concurrency: Annotated[int, _range("concurrency"), WHOLE] | None = None
    """Requests at once, at most, per process."""
    context_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Prompt and answer together, in tokens."""
    forward_fields: bool | None = None
    """Send the request's `metadata` and `user` to the endpoint."""
    price_in: Price | None = None
    """US dollars per million prompt tokens; left out: the bundled price table."""
    price_cached: Price | None = None
    """US dollars per million prompt tokens that the provider had cached."""
    price_out: Price | None = None
    """US dollars per million tokens answered."""
    key: Key = ""
    """The API key. It is stored encrypted and never shown."""

    @property
    def values(self) -> dict[str, object]:
        """The settings that were sent, without the key."""
        return {name: getattr(self, name) for name in self.model_fields_set if name != "key"}


class UpstreamChanged(UpstreamSettings):
    url: Url | None = None
    """Base URL, such as https://api.openai.com/v1."""
    model: ModelId | None = None
    """The provider's model id, such as gpt-5-mini."""


class UpstreamSent(UpstreamSettings):
    name: Annotated[Storable, Field(max_length=64)]
    url: Url
    """Base URL, such as https://api.openai.com/v1."""
    model: ModelId
    """The provider's model id, such as gpt-5-mini."""


class Upstream(Answer):
    name: str
    url: str
    model: str
    dialect: str
    schemas: str
    key_env: str
    timeout_s: float
    connect_timeout_s: float
    concurrency: int
    context_tokens: int | None
    forward_fields: bool
    price_in: float | None
    price_cached: float | None
    price_out: float | None
    key: Literal["environment", "stored", "none"]
    """Where its API key is."""
    policies: list[str]
    """Policies it answers for."""
    warning: str
    """What is unsafe about its address; empty where nothing is."""


class Upstreams(ApiView):
    scopes = {"GET": "operate", "POST": "operate"}

    @describe(
        "List upstreams",
        {200: ("A page of them", Page[Upstream])},
        query=PageQuery,
        tag="upstreams",
        operation="upstreams_list",
    )
    def get(self, request: Request) -> Response:
        page = query_read(PageQuery, request)
        return Response(page_of(UpstreamRow.objects.order_by("-pk"), request, page, upstream_represent))

    @describe(
        "Add an upstream",
        {201: ("The upstream, without its key", Upstream)},
        body=UpstreamSent,
        refusals=(409,),
        tag="upstreams",
        operation="upstream_add",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(UpstreamSent, request.data)
        return Response(upstream_represent(upstream_add(sent.values, sent.key)), status=201)


class UpstreamOne(ApiView):
    scopes = {"GET": "operate", "PATCH": "operate", "DELETE": "operate"}

    @describe(
        "Read an upstream",
        {200: ("The upstream, without its key", Upstream)},
        parameters=(OF_NAME,),
        refusals=(404,),
        tag="upstreams",
        operation="upstream_read",
    )
    def get(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        return Response(upstream_represent(upstream_get(name)))

    @describe(
        "Change an upstream",
        {200: ("The upstream, without its key", Upstream)},
        body=UpstreamChanged,
        parameters=(OF_NAME,),
        refusals=(404,),
        tag="upstreams",
        operation="upstream_change",
        description="Fields that are left out stay. A new address needs the API key again.",
    )
    def patch(self, request: Request, name: str) -> Response:
        sent = body_read(UpstreamChanged, request.data)
        changed = upstream_change(upstream_get(name), sent.values, sent.key)
        return Response(upstream_represent(changed))

    @describe(
        "Remove an upstream with its API key",
        {204: ("It was removed", {})},
        parameters=(OF_NAME,),
        refusals=(404, 409),
        tag="upstreams",
        operation="upstream_remove",
    )
    def delete(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        upstream_remove(upstream_get(name))
        return Response(status=204)


class UpstreamTested(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Ask an upstream one short question",
        {200: ("The answer, and what it took", UpstreamTest)},
        parameters=(OF_NAME,),
        refusals=(404, 409),
        tag="upstreams",
        operation="upstream_test",
        description="Stores which form of JSON answers works as `schemas`.",
    )
    def post(self, request: Request, name: str) -> Response:
        body_read(Sent, request.data)
        return Response(UpstreamTest.of(upstream_test(upstream_get(name))))
