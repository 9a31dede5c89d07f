"""What a hosted model's answer cost: its tokens at the upstream's own prices, else at the bundled table's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl.serving.base import Answer, Endpoint, Model
from rl.serving.dialects.chat import count_of

MILLION = 1e6


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


def _details(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
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
