"""Embeddings: a request is passed on to an upstream, and nothing is recorded."""

from __future__ import annotations

from collections.abc import Mapping

from backend.database import connection_release
from feedback.cache import TTLCache
from rl.models import Upstream
from rl.serving import metrics
from rl.serving.base import BackendFailed, Endpoint
from rl.serving.dialects.chat import Object
from rl.serving.fallback import Fallback, NobodyAnswers, upstream_backend
from rl.serving.files import endpoint_of
from rl.serving.routing import ModelUnknown

_endpoints: TTLCache[dict[str, tuple[Endpoint, str]]] = TTLCache(size=1)


def embeddings(request: Mapping[str, object]) -> Object:
    """The answer of the upstream that `model` names (see `_model_of`).

    Raises ModelUnknown, ServingRefused, NobodyAnswers.
    """
    endpoint, model = _model_of(str(request["model"]))
    body = {**request, "model": model}
    if not endpoint.forward_fields:
        body.pop("user", None)
    connection_release()  # an upstream takes seconds
    assert endpoint.timeout_s is not None
    try:
        return upstream_backend(endpoint).embeddings(body, endpoint.timeout_s)
    except BackendFailed as failure:
        metrics.FALLBACKS.labels(endpoint.name, failure.kind).inc()
        failed = Fallback(model, endpoint.name, failure.kind, str(failure))
        raise NobodyAnswers([failed], failure.retry_after_s) from failure


def _model_of(name: str) -> tuple[Endpoint, str]:
    """Endpoint and model of `UPSTREAM:MODEL`, of `UPSTREAM` with its own model, or of `MODEL` where one upstream alone
    has embeddings. Raises ModelUnknown."""
    endpoints = _endpoints.get("all", _read)
    able = [found for found, _ in endpoints.values() if found.dialect != Upstream.Dialect.ANTHROPIC]
    upstream, _, model = name.partition(":")
    if upstream in endpoints:
        endpoint, own = endpoints[upstream]
        if endpoint not in able:
            raise ModelUnknown(f"{upstream} speaks Anthropic's dialect, which has no embeddings")
        return endpoint, model or own
    if len(able) == 1:
        return able[0], name
    there = ", ".join(found.name for found in able[:10]) or "there is none: add one on /upstreams/"
    raise ModelUnknown(
        "expected UPSTREAM:MODEL, such as openai:text-embedding-3-small, with an upstream of one of OpenAI's "
        f"dialects ({there}); found {name[:80]!r}"
    )


def _read() -> dict[str, tuple[Endpoint, str]]:
    """Name of an upstream -> its endpoint and its own model."""
    return {row.name: (endpoint_of(row), row.model) for row in Upstream.objects.all()}
