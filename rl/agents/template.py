"""Agents without code: a system prompt, a template for the prompt, and a JSON schema for the answer. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Placeholder for a value of the state: {name}."""


def schema_fault(value: Any, schema: Mapping[str, Any]) -> str:
    """Why a value does not fit a JSON schema, in one line; empty if it fits."""
    import jsonschema  # here, because most agents have no schema of their own

    validator = jsonschema.validators.validator_for(schema)(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is None:
        return ""
    where = ".".join(str(part) for part in error.absolute_path)
    return f"{f'{where}: ' if where else ''}{error.message}"[:300]


def arguments_fault(arguments: Mapping[str, Any], schema: Any) -> str:
    """`schema_fault` for a schema that an app sent. A schema that cannot be used is the fault.

    Patterns are ignored: an app could send one whose matching never ends.
    """
    plain = _without_patterns(schema)
    try:
        schema_check(plain)
    except ValueError as error:
        return f"their schema cannot be used: {error}"
    return schema_fault(arguments, plain)


def _without_patterns(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_patterns(inner)
            for key, inner in value.items()
            if key not in ("pattern", "patternProperties", "format")
        }
    return [_without_patterns(inner) for inner in value] if isinstance(value, list) else value


def schema_check(schema: Any) -> None:
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
    if any(not ref.startswith("#") for ref in _references(schema)):
        raise ValueError("expected a JSON schema whose $ref stay within it (#/...)")


def _references(value: object) -> list[str]:
    if isinstance(value, Mapping):
        own = [str(value["$ref"])] if "$ref" in value else []
        return own + [found for inner in value.values() for found in _references(inner)]
    return [found for inner in value for found in _references(inner)] if isinstance(value, list) else []


def answer_of_schema(response: str, schema: Mapping[str, Any]) -> JsonObject:
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
    schema: Mapping[str, Any] | None = field(default=None, hash=False)

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
