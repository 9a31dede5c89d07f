"""Grammars of answers: JSON schemas and closed sets, as llguidance reads them. Pure.

llama.cpp's own conversion of a schema knows no ranges of numbers and forgets what stands beside a list of types,
`anyOf` or `allOf`: answers under it did not always fit the schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

BLANKS = r"( |\n[ \t]{0,20})"
"""Pattern of what may stand between two signs of JSON, beside nothing: a blank, or a new line and the next one's
indent. A model that is unsure would write blanks without end."""


_GUIDANCE = {"whitespace_pattern": BLANKS, "lenient": True, "coerce_one_of": True}


class SchemaRefused(ValueError):
    """A JSON schema that cannot constrain decoding, or not with this model's vocabulary."""


def answers_grammar(answers: Sequence[str]) -> str:
    """llguidance's grammar of a closed set of answers, at least one."""
    from llguidance import LLMatcher

    listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in answers)
    return LLMatcher.grammar_from_lark(f"start: {listed}")


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON schema as llguidance's grammar; {} is any JSON object. Raises SchemaRefused.

    Objects hold no other properties than those named, unless `additionalProperties` says so: by a schema that leaves it
    out, any were allowed. Keywords that no grammar can follow (`not`, `if`, `contains`, ...) constrain nothing.
    """
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema_part(schema))
    except RecursionError as error:
        raise refusal_of("it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise refusal_of(str(error)) from error
    return grammar_checked(grammar)


def schema_part(schema: Mapping[str, Any]) -> Any:
    """A schema as it stands within a grammar (`%json`), with what `schema_grammar` reads into it."""
    read = json.loads(json.dumps(schema or {"type": "object"}))
    closed: dict[str, Any] = _properties_closed(read, set(_part_references(read)))
    return {**closed, "x-guidance": _GUIDANCE}


def lark_grammar(text: str) -> str:
    """A grammar in llguidance's own words. Raises SchemaRefused."""
    from llguidance import LLMatcher

    return grammar_checked(LLMatcher.grammar_from_lark(text))


def grammar_checked(grammar: str) -> str:
    """The grammar. Raises SchemaRefused where it cannot be followed."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise refusal_of(messages[0])
    return grammar


def refusal_of(message: str) -> SchemaRefused:
    """Refusal of a schema, with what llguidance says of it."""
    # of a pattern that cannot be read the last line says why; the lines between draw it
    lines = message.strip().splitlines() or ["it is not one"]
    return SchemaRefused(
        f"this JSON schema cannot constrain decoding: {' '.join(dict.fromkeys((lines[0], lines[-1])))}"
    )


def _properties_closed(schema: Any, parts: Collection[str] = (), *, is_part: bool = False) -> Any:
    """The schema with `additionalProperties: false` where it names properties and says nothing of others.

    is_part: it describes an object beside other schemas (`allOf`), whose properties it must not forbid; parts: the
    references of such.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(inner := schema.get(key), dict):
            result[key] = {
                name: _properties_closed(one, parts, is_part=f"#/{key}/{name}" in parts)
                for name, one in inner.items()
            }
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(inner := schema.get(key), list):
            part = key != "prefixItems" and (is_part or _is_combined(schema))
            result[key] = [_properties_closed(one, parts, is_part=part) for one in inner]
    for key in ("items", "additionalProperties"):
        if key in schema:
            result[key] = _properties_closed(schema[key], parts)
    open_keys = ("additionalProperties", "unevaluatedProperties", "patternProperties")
    if "properties" in schema and not (
        is_part or _is_combined(schema) or any(key in schema for key in open_keys)
    ):
        result["additionalProperties"] = False
    return result


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """True where several of its schemas describe one object together."""
    descriptions = sum(key in schema for key in ("properties", "$ref", "anyOf", "oneOf"))
    return descriptions + len(schema.get("allOf") or ()) > 1


def _part_references(schema: Any) -> Iterator[str]:
    """References to schemas that describe an object together with others."""
    if isinstance(schema, list):
        for one in schema:
            yield from _part_references(one)
    if not isinstance(schema, dict):
        return
    if _is_combined(schema):
        beside = [schema, *(one for key in ("allOf", "anyOf", "oneOf") for one in schema.get(key) or ())]
        yield from (str(one["$ref"]) for one in beside if isinstance(one, dict) and "$ref" in one)
    for inner in schema.values():
        yield from _part_references(inner)
