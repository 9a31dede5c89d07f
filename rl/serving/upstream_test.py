"""Test of an upstream: one short answer, its latency and model, and the form of JSON answers that works."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from backend.bodies import Answer as ApiAnswer
from rl.models import Upstream
from rl.serving.base import Answer, Ask, BackendFailed, Endpoint, Model, ServingRefused
from rl.serving.endpoint import EndpointBackend
from rl.serving.files import endpoint_of
from rl.upstreams import UpstreamRefused

QUESTION = "Answer with the one word: ready"
FORM_QUESTION = 'Answer with a JSON object that has one field, "ready", which is true.'
FORM = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}},
    "required": ["ready"],
    "additionalProperties": False,
}
ANSWER_TOKENS = 500
"""Reasoning models think before they answer."""
TIMEOUT_S = 30.0
"""Longest wait for an answer: somebody waits for the page."""


class UpstreamTest(ApiAnswer):
    """What an upstream answered, and what it took."""

    name: str
    answer: str
    latency_ms: float
    model: str
    """Model and version as the provider names them."""
    schemas: str
    """Form of JSON answers that works."""


def upstream_test(upstream: Upstream, progress: Callable[[str], None] = lambda line: None) -> UpstreamTest:
    """Ask an upstream, and store the form of JSON answers that works on it. Raises UpstreamRefused."""
    endpoint = endpoint_of(upstream)
    if endpoint.fault:
        raise UpstreamRefused(endpoint.fault, {"key": endpoint.fault}, code="conflict")
    progress("one short answer")
    try:
        answer = _asked(endpoint, upstream.model, QUESTION)
    except (BackendFailed, ServingRefused) as fault:
        words = str(fault)  # most name the upstream first
        if not words.startswith(upstream.name):
            words = f"{upstream.name} did not answer: {words}"
        raise UpstreamRefused(words, code="conflict") from None
    progress("an answer in a form")
    upstream.schemas = _form_that_works(endpoint, upstream.model)
    Upstream.objects.filter(pk=upstream.pk).update(schemas=upstream.schemas)
    said = EndpointBackend(endpoint).key_hidden(answer.text.strip())
    model, took = answer.served_model or upstream.model, round(answer.latency_ms, 1)
    return UpstreamTest(
        name=upstream.name, answer=said[:200], latency_ms=took, model=model, schemas=upstream.schemas
    )


def _form_that_works(endpoint: Endpoint, model: str) -> str:
    """The strongest form of JSON answers in which the endpoint answers as it is told."""
    for form in (Upstream.Schemas.JSON_SCHEMA, Upstream.Schemas.JSON_OBJECT):
        try:
            answer = _asked(replace(endpoint, schemas=form), model, FORM_QUESTION, FORM)
            found = json.loads(answer.text)
        except (BackendFailed, ServingRefused, ValueError, RecursionError):
            continue
        # a server that does not know a schema was asked for an object instead: that is the weaker form
        if (
            isinstance(found, dict)
            and set(found) == {"ready"}
            and "json_schema" not in answer.extras.left_out
        ):
            return form
    return Upstream.Schemas.NONE


def _asked(
    endpoint: Endpoint, model: str, question: str, schema: Mapping[str, object] | None = None
) -> Answer:
    ask = Ask([{"role": "user", "content": question}], max_tokens=ANSWER_TOKENS, response_schema=schema)
    timeout_s = min(endpoint.timeout_s or TIMEOUT_S, TIMEOUT_S)
    return EndpointBackend(endpoint).answer(ask, Model(endpoint.name, model, endpoint=endpoint), timeout_s)
