"""Agents without code: a system prompt, a template for the prompt, and a JSON schema for the answer. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from rl.agents.base import (
    Agent,
    InvalidResponse,
    JsonObject,
    Message,
    State,
    unique_keys,
)

MAX_SCHEMA = 32_768
"""Longest JSON schema in characters, as `backend.limits.SCHEMA_CHARACTERS`, which this package does not import."""

MAX_APPLIED = (64, 10_000)
"""Most levels, and most parts, of a JSON schema that apply to one value."""

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Placeholder for a value of the state: {name}."""


def schema_fault(value: object, schema: Mapping[str, object]) -> str:
    """Why a value does not fit a JSON schema, in one line; empty if it fits."""
    import jsonschema  # here, because most agents have no schema of their own

    validator = jsonschema.validators.validator_for(schema)(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is None:
        return ""
    where = ".".join(str(part) for part in error.absolute_path)
    return f"{f'{where}: ' if where else ''}{error.message}"[:300]


def arguments_fault(arguments: Mapping[str, object], schema: object) -> str:
    """`schema_fault` for a schema that an app sent. A schema that cannot be used is the fault.

    Patterns are ignored: an app could send one whose matching never ends.
    """
    plain = _without_patterns(schema)
    try:
        schema_check(plain)
    except ValueError as error:
        return f"their schema cannot be used: {error}"
    return schema_fault(arguments, plain)


def _without_patterns(value: object) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_patterns(inner)
            for key, inner in value.items()
            if key not in ("pattern", "patternProperties", "format")
        }
    return [_without_patterns(inner) for inner in value] if isinstance(value, list) else value


def schema_check(schema: object) -> None:
    """Raises ValueError for anything but a JSON schema whose references stay within it; nothing is fetched."""
    import jsonschema

    if not isinstance(schema, Mapping):
        raise ValueError(f"expected a JSON schema, an object; found {schema!r:.80}")
    if (length := len(json.dumps(schema))) > MAX_SCHEMA:
        raise ValueError(f"expected a JSON schema of at most {MAX_SCHEMA:,} characters, found {length:,}")
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(f"expected a JSON schema; {error.message[:200]}") from error
    references_check(schema)


def references_check(schema: object) -> None:
    """Raises ValueError unless each $ref leads to a part of the schema, and each value is checked in few steps.

    A part may refer to itself for a smaller value, such as the items of a list. A part that applies itself to the same
    value would never end.
    """
    known: dict[int, tuple[int, int]] = {}

    def measure(part: object, depth: int) -> tuple[int, int]:
        """(levels, parts) that apply to the value of a part."""
        if depth > MAX_APPLIED[0]:
            raise ValueError(
                f"expected a JSON schema without a loop of $ref, and at most {depth - 1} in a row"
            )
        if id(part) not in known:
            inner = [measure(one, depth + 1) for one in _applied(part, schema)]
            known[id(part)] = (
                1 + max((levels for levels, _ in inner), default=0),
                1 + sum(n for _, n in inner),
            )
        levels, parts = known[id(part)]
        if depth + levels > MAX_APPLIED[0] or parts > MAX_APPLIED[1]:
            raise ValueError(f"expected at most {MAX_APPLIED[1]:,} parts of a JSON schema for one value")
        return known[id(part)]

    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            measure(part, 0)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _applied(part: object, schema: object) -> list[object]:
    """Parts of a schema that apply to the same value as this part."""
    if not isinstance(part, Mapping):
        return []
    found = [part[name] for name in ("not", "if", "then", "else") if name in part]
    for name in ("allOf", "anyOf", "oneOf"):
        found += part[name] if isinstance(part.get(name), list) else []
    if isinstance(part.get("dependentSchemas"), Mapping):
        found += part["dependentSchemas"].values()
    return found + [
        _part_at(part[name], schema) for name in ("$ref", "$dynamicRef") if isinstance(part.get(name), str)
    ]


def _part_at(reference: str, schema: object) -> object:
    """The part that a reference leads to: `#`, or a JSON pointer after it (RFC 6901). Raises ValueError."""
    found = schema
    try:
        if reference[:1] != "#" or reference[1:2] not in ("", "/"):
            raise KeyError(reference)
        for name in unquote(reference[1:]).split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]  # type: ignore[index]
    except (LookupError, TypeError, ValueError):
        raise ValueError(
            f"expected a JSON schema whose $ref stay within it (#/...); found {reference[:80]!r}"
        ) from None
    return found


def answer_of_schema(response: str, schema: Mapping[str, object]) -> JsonObject:
    """The JSON object of a response, checked by a schema; any other JSON value comes as {"value": ...}.

    Raises InvalidResponse.
    """
    try:
        answer = json.loads(response, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse(f"expected JSON, found {response[:80]!r} ({error})") from error
    fault = schema_fault(answer, schema)
    if fault:
        raise InvalidResponse(f"expected an answer that fits the schema; {fault}")
    return answer if isinstance(answer, dict) else {"value": answer}


def places_of(template: str) -> list[str]:
    return list(dict.fromkeys(PLACE.findall(template)))


@dataclass(frozen=True)
class TemplateAgent(Agent):
    """Renders `template` with the state's values. The answer is JSON that fits `schema`, or free text without one.

    State: a value for each {name} of the template; lists and objects are written as JSON. "right": the right answers,
    texts or JSON values, if known; shown only if the template names it.
    """

    template: str = "{question}"
    schema: Mapping[str, object] | None = field(default=None, hash=False)

    @property
    def structured(self) -> bool:
        return self.schema is not None

    def render(self, state: State) -> list[Message]:
        missing = [name for name in places_of(self.template) if state.get(name) in (None, "")]
        if missing:
            raise ValueError(
                f"{self.slug}: the state needs {', '.join(map(repr, missing))}; found {', '.join(state)}"
            )
        text = PLACE.sub(lambda found: _text(state[found.group(1)]), self.template)
        turns = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*turns, {"role": "user", "content": text}]

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        if not response.strip():
            raise InvalidResponse("expected an answer, found nothing but blanks")
        if self.schema is None:
            return {"text": response.strip()}
        return answer_of_schema(response, self.schema)

    def response_schema(self, state: State | None = None) -> JsonObject | None:
        return None if self.schema is None else dict(self.schema)

    def ground_truth(self, state: State) -> list[str] | None:
        right = state.get("right")
        if right in (None, [], ""):
            return None
        return [_text(answer) for answer in (right if isinstance(right, list) else [right])]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
