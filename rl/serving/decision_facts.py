"""What a decision records of an answer: its text, who gave it, its tokens, and what they cost at the upstream's own
prices, else at the bundled table's."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from django.utils import timezone

from backend import limits
from feedback.messages import response_of
from feedback.storage.fields import Json
from feedback.storage.responses import completion_read, completion_stored
from feedback.storage.validation import Check
from rl.serving.base import Answer, Ask, Endpoint, Extras, Model
from rl.serving.dialects.chat import count_of
from rl.serving.fallback import ServedAnswer
from rl.serving.routing import Target

MILLION = 1e6

UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""NUL, and the halves of surrogate pairs."""

KEPT_CHARACTERS = 50_000
"""Most of one field of a server's answer that is kept in a decision's metadata, as JSON."""

T = TypeVar("T")


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of one answer, as providers bill them."""

    read: int
    """Of the prompt, cached ones included."""
    written: int
    """Of the answer, reasoning included."""
    cached: int = 0
    """Of the prompt, read from the provider's cache."""
    stored: int = 0
    """Of the prompt, written to the provider's cache."""
    reasoning: int = 0


def usage_of_answer(answer: Answer) -> TokenUsage | None:
    """The tokens of an answer; None where the server did not count them."""
    if answer.tokens_in is None or answer.tokens_out is None:
        return None
    sent = answer.extras.usage or {}
    prompt, completion = _details(sent, "prompt", "input"), _details(sent, "completion", "output")
    cached = min(count_of(prompt, "cached_tokens") or 0, answer.tokens_in)
    return TokenUsage(
        answer.tokens_in,
        answer.tokens_out,
        cached=cached,
        stored=min(count_of(prompt, "cache_write_tokens") or 0, answer.tokens_in - cached),
        reasoning=count_of(completion, "reasoning_tokens") or 0,
    )


def _details(usage: Mapping[str, object], *names: str) -> Mapping[str, object]:
    found = (usage.get(f"{name}_tokens_details") for name in names)
    return next((details for details in found if isinstance(details, Mapping)), {})


def cost_usd(answer: Answer, model: Model) -> float | None:
    """US dollars that a provider takes for an answer: nothing for a local one; None where a hosted model's tokens or
    their price are not known."""
    if model.endpoint is None:
        return 0.0
    if (usage := usage_of_answer(answer)) is None:
        return None
    own = model.endpoint.prices
    read, written = own.read, own.written
    cost_cached = cost_in = cost_out = None
    if (cached := read if own.cached is None else own.cached) is not None:
        cost_cached = usage.cached * cached / MILLION
        # what is left for the table to price
        usage = replace(usage, read=usage.read - usage.cached, cached=0)
    if read is not None:
        cost_in = usage.read * read / MILLION
    if written is not None:
        cost_out = usage.written * written / MILLION
    if cost_in is None or cost_out is None:
        table = _table_costs(usage, model.endpoint, answer.served_model or model.base_model, model.base_model)
        if table is None:
            return None
        cost_in, cost_out = (
            (table[0] if cost_in is None else cost_in),
            (table[1] if cost_out is None else cost_out),
        )
    return round((cost_cached or 0.0) + cost_in + cost_out, 10)


def _table_costs(usage: TokenUsage, endpoint: Endpoint, *names: str) -> tuple[float, float] | None:
    """Costs of prompt and answer by the bundled table of the provider at this address; None where it has no price."""
    # half a second, once: only for a process that asks a provider
    from genai_prices import Usage, calc_price

    counts = Usage(
        input_tokens=usage.read,
        output_tokens=usage.written,
        cache_read_tokens=usage.cached,
        cache_write_tokens=usage.stored,
    )
    for name in names:
        try:
            found = calc_price(counts, model_ref=name, provider_api_url=endpoint.url)
        except LookupError:
            continue
        return float(found.input_price), float(found.output_price)
    return None


def facts_of(target: Target, served: ServedAnswer[T], answer: Answer) -> dict[str, Any]:
    """Serving facts that every served decision records. answer: as `answer_storable` returns it."""
    metadata: dict[str, Any] = {
        "serving": {
            "backend": served.backend,
            "meant": target.meant,
            "finish_reason": answer.finish_reason,
            "fallbacks": [dataclasses.asdict(attempt) for attempt in served.fallbacks],
        }
    }
    if served.route is not None:
        metadata["serving"]["route"] = dict(served.route)
    if answer.log_probability is not None:
        metadata["serving"]["log_probability"] = answer.log_probability
    if answer.confidence is not None:
        metadata["serving"]["confidence"] = answer.confidence
    if target.arm_propensity is not None:
        metadata["arm_propensity"] = target.arm_propensity
    if (cost := cost_usd(answer, served.model)) is not None:
        metadata["serving"]["cost_usd"] = cost
    response = response_of([answer.message])
    text, metadata = completion_stored(storable(response.value), metadata)
    if len(text) > limits.TEXT_CHARACTERS:
        text = text[: limits.TEXT_CHARACTERS]
        metadata.pop("response_is", None)
        metadata["serving"]["cut_at"] = limits.TEXT_CHARACTERS
    if response.is_refusal:
        metadata["refusal"] = True
    reasoning = storable(response.reasoning)
    if len(reasoning) > limits.TEXT_CHARACTERS:
        reasoning = reasoning[: limits.TEXT_CHARACTERS]
        metadata["serving"]["reasoning_cut_at"] = limits.TEXT_CHARACTERS
    metadata["serving"] |= _serving_extras(answer, text, reasoning, metadata)
    return {
        "agent": target.agent,
        "response": text,
        "reasoning": reasoning,
        "policy": served.model.name,
        "arm": target.arm,
        "latency_ms": round(answer.latency_ms, 3),
        "tokens_in": answer.tokens_in,
        "tokens_out": answer.tokens_out,
        "metadata": metadata,
        "created_at": timezone.now().isoformat(),
    }


def _serving_extras(
    answer: Answer, text: str, reasoning: str, metadata: Mapping[str, object]
) -> dict[str, object]:
    """What a server said beside the text, for the decision's metadata: each field up to KEPT_CHARACTERS."""
    extras = answer.extras
    facts = {
        "upstream": dict(extras.source),
        "usage": extras.usage,
        "choice": dict(extras.choice),
        "completion": dict(extras.body),
        "other_choices": list(extras.choices),
        "left_out_of_request": list(extras.left_out),
    }
    said = dict(answer.said)
    if said != message_again(text, reasoning, metadata):
        facts["message"] = said
    found: dict[str, object] = {}
    left_out: dict[str, str] = {}
    for name, value in facts.items():
        if not value:
            continue
        length = len(json.dumps(value))
        if length > KEPT_CHARACTERS or _is_deep(value):
            left_out[name] = f"{length:,} characters"
        else:
            found[name] = value
    return found | ({"left_out": left_out} if left_out else {})


def message_again(text: str, reasoning: str, metadata: Mapping[str, Any]) -> dict[str, object]:
    """The message of a recorded answer, where metadata.serving.message has none of its own."""
    serving = metadata.get("serving") or {}
    if isinstance(message := serving.get("message"), Mapping):
        return dict(message)
    more = {"reasoning_content": reasoning} if reasoning else {}
    try:
        response = completion_read(text, metadata)
    except ValueError:
        response = text
    if isinstance(response, list):
        first = response[0]
        return {**first, "content": first.get("content") or None, **more}
    if metadata.get("refusal") is True:
        return {"role": "assistant", "content": None, "refusal": response, **more}
    return {"role": "assistant", "content": response, **more}


def usage_of(answer: Answer) -> Mapping[str, object] | None:
    """Token counts as OpenAI has them: the server's own, else those of this process; None: unknown."""
    return answer.extras.usage or token_counts(answer.tokens_in, answer.tokens_out)


def token_counts(read: int | None, written: int | None) -> Mapping[str, object] | None:
    if read is None or written is None:
        return None
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def propensity_of(answer: Answer, ask: Ask) -> float | None:
    """Probability of a written answer within a schema or a closed set, where a choice is what it comes to.

    None where the backend does not tell, where it was cut, and of free words: the probability of a page of text says
    how long it is. (`metadata.serving.log_probability` has it nevertheless.)
    """
    free = ask.response_schema is None and answer.text not in ask.answers and not answer.chosen
    if answer.log_probability is None or answer.finish_reason != "stop" or free:
        return None
    return math.exp(answer.log_probability) or None


def storable(value: T) -> T:
    """A value without what no database keeps: NUL characters, halves of surrogate pairs, numbers that are none."""
    found: Any = value
    if isinstance(value, str):
        if not UNSTORABLE.search(value):
            return value
        # the halves of a pair may have come in two pieces
        whole = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        found = whole.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
    elif isinstance(value, Mapping):
        found = {storable(str(key)): storable(item) for key, item in value.items()}
    elif isinstance(value, list):
        found = [storable(item) for item in value]
    elif isinstance(value, float) and not math.isfinite(value):
        found = None
    return found


def answer_storable(answer: Answer) -> Answer:
    """An answer as a database keeps it and a client gets it."""
    extras = {one.name: storable(getattr(answer.extras, one.name)) for one in dataclasses.fields(Extras)}
    return dataclasses.replace(answer, said=storable(answer.said), extras=Extras(**extras))


def _is_deep(value: object) -> bool:
    """True for JSON too deep to be stored within a decision's metadata."""
    check = Check()
    check.value("", Json, [[[value]]])
    return bool(check.fields)
