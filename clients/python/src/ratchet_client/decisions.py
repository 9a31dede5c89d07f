"""Payload of a decision, validated as the server validates it. Nothing in it is truncated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from ratchet_client.json_values import safe_repr, to_json

AGENT_PATTERN = r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?"
MAX_DECISION = 900_000
"""Most characters of a decision as JSON. A server accepts 1,000,000 in one value."""
MAX_NAME = 200
MAX_TAGS = 50

_ROLES = {"human": "user", "ai": "assistant"}
_PROMPT_KEYS = ("input", "query", "prompt", "question", "message", "text", "task")
_RESPONSE_KEYS = ("output", "response", "answer", "content", "text", "result")


def validate_agent(agent: str) -> str:
    """The slug itself. Raises ValueError if the server would refuse it."""
    if not isinstance(agent, str) or not re.fullmatch(AGENT_PATTERN, agent):
        raise ValueError(f"expected an agent of 1 to 64 lower-case letters, digits, - and _, found {agent!r}")
    return agent


def decision_payload(
    *,
    id: str,
    messages: object,
    response: object,
    candidates: Any = None,
    propensity: float | None = None,
    latency_ms: float | None = None,
    tokens_in: int | None = None,
    tokens_out: int | None = None,
    tags: Sequence[str] = (),
    state: object = None,
    metadata: Mapping[str, Any] | None = None,
    **names: str,
) -> dict[str, Any]:
    """The decision's fields of a step, without those that are None or empty.

    names: unit, policy, arm and run_id, texts of at most 200 characters. Raises ValueError, with one line per fault,
    for values that the server would refuse. They are never truncated, because they become training examples.
    """
    facts: dict[str, object] = {
        "id": str(UUID(id)),
        "messages": normalize_messages(messages),
        "response": _response(response),
        "candidates": None if candidates is None else [_candidate(item) for item in candidates],
        "propensity": _number("propensity", propensity, above=0.0, up_to=1.0),
        "latency_ms": _number("latency_ms", latency_ms, above=-math.ulp(0.0)),
        "tokens_in": _count("tokens_in", tokens_in),
        "tokens_out": _count("tokens_out", tokens_out),
        "tags": _tags(tags),
        "state": complete_json(state),
        "metadata": complete_json(dict(metadata or {})),
    }
    facts |= {name: _bounded_text(name, value, MAX_NAME) for name, value in names.items()}
    facts = {
        name: value for name, value in facts.items() if value not in (None, "", [], {}) or name == "response"
    }
    size = len(json.dumps(facts))
    if size > MAX_DECISION:
        raise ValueError(
            f"expected a decision of at most {MAX_DECISION:,} characters of JSON, found {size:,}"
        )
    return facts


def normalize_messages(value: object) -> list[dict[str, object]]:
    """Chat messages from one text or from a list of {role, content}, of (role, content) or of objects with both."""
    if isinstance(value, str):
        return [{"role": "user", "content": complete_json(value)}]
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or not value:
        raise ValueError(
            f"expected messages as a text or a list of {{role, content}}, found {safe_repr(value)[:200]}"
        )
    return [_message(message) for message in value]


def _message(message: object) -> dict[str, object]:
    if isinstance(message, Mapping):
        fields = dict(message)
    elif isinstance(message, tuple) and len(message) == 2:
        fields = {"role": message[0], "content": message[1]}
    else:
        role = getattr(message, "role", None) or getattr(message, "type", None)
        fields = {"role": role, "content": getattr(message, "content", None)}
        if calls := getattr(message, "tool_calls", None):
            fields["tool_calls"] = calls
    role = fields.get("role")
    if not isinstance(role, str) or not isinstance(fields.get("content"), (str, list, type(None))):
        raise ValueError(f"expected a message with role and content, found {safe_repr(message)[:200]}")
    fields["role"] = _ROLES.get(role, role)
    fields.setdefault("content", None)
    complete: dict[str, object] = complete_json(fields)
    return complete


def _candidate(item: object) -> object:
    if isinstance(item, Mapping) and isinstance(item.get("response"), str):
        score = _number("score", item.get("score"), above=-math.ulp(0.0), up_to=1.0)
        return (
            complete_json(item["response"])
            if score is None
            else {"response": complete_json(item["response"]), "score": score}
        )
    return response_text(item)


def _response(value: object) -> object:
    """A response as it is sent: the assistant's messages (tool calls) as messages, other values as text."""
    if callable(dump := getattr(value, "model_dump", None)) and getattr(value, "role", None) == "assistant":
        value = dump(exclude_none=True)  # the message of an OpenAI client
    if _is_message(value):
        return _message(value)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return normalize_messages(value)
    return response_text(value)


def _is_message(value: object) -> bool:
    """True for a chat message. Other data with a `role` has neither content nor calls."""
    return (
        isinstance(value, Mapping)
        and value.get("role") in ("assistant", "tool")
        and ("content" in value or "tool_calls" in value)
    )


def response_text(value: object) -> str:
    """A response as text; data becomes JSON. Raises ValueError for other objects."""
    if isinstance(value, str):
        return str(complete_json(value))
    if isinstance(value, (Mapping, list, tuple, int, float)):
        return json.dumps(complete_json(value), ensure_ascii=False)
    content = getattr(value, "content", None)
    if isinstance(content, str):
        return str(complete_json(content))
    raise ValueError(f"expected a response of text or JSON data, found {safe_repr(value)[:200]}")


def complete_json(value: object) -> Any:
    """The value as JSON. Truncates only values so large that the decision is refused for its size."""
    return to_json(value, text=2 * MAX_DECISION, items=MAX_DECISION, depth=40, total=4 * MAX_DECISION)


def _number(name: str, value: Any, *, above: float, up_to: float = 1e12) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not above < number <= up_to:
        raise ValueError(f"expected {name} in {'(0' if above == 0 else '[0'}, {up_to:g}], found {value!r}")
    return number


def _count(name: str, value: object) -> int | None:
    number = _number(name, value, above=-math.ulp(0.0), up_to=2**31 - 1)
    if number is not None and number != int(number):
        raise ValueError(f"expected {name} as a whole number, found {value!r}")
    return None if number is None else int(number)


def _tags(tags: Sequence[str]) -> list[str]:
    if isinstance(tags, str) or len(tags) > MAX_TAGS:
        raise ValueError(f"expected a list of at most {MAX_TAGS} tags, found {safe_repr(tags)[:200]}")
    return [_bounded_text("tag", tag, 100) for tag in tags]


def _bounded_text(name: str, value: object, limit: int) -> str:
    text = to_json("" if value is None else str(value))
    if len(text) > limit:
        raise ValueError(f"expected a {name} of at most {limit} characters, found {len(text):,}")
    return str(text)


# --- Reading prompt and response from a call ---------------------------------------------------------------


def find_prompt(arguments: Mapping[str, object]) -> object:
    """The prompt in a run's arguments: the first text, list of messages, or input of a mapping (_PROMPT_KEYS)."""
    for value in arguments.values():
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, Mapping):
            if _is_messages(value.get("messages")):
                return value["messages"]
            texts = (value.get(key) for key in _PROMPT_KEYS)
            if text := next((t for t in texts if isinstance(t, str) and t.strip()), None):
                return text
        if _is_messages(value):
            return value
    return None


def find_response(result: object) -> str | None:
    """The response in a run's result: a text, or a mapping's output (_RESPONSE_KEYS), or the mapping as JSON."""
    if isinstance(result, str):
        return result
    if isinstance(result, Mapping):
        texts = (result.get(key) for key in _RESPONSE_KEYS)
        if text := next((t for t in texts if isinstance(t, str)), None):
            return text
        if _is_messages(result.get("messages")):
            content = normalize_messages(result["messages"])[-1]["content"]
            return content if isinstance(content, str) else None
        return response_text(result)
    content = getattr(result, "content", None)
    return content if isinstance(content, str) else None


def _is_messages(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    try:
        normalize_messages(value)
    except ValueError:
        return False
    return True
