"""Constrained decoding: JSON schemas and closed sets of answers, enforced token by token by llguidance.

llama.cpp's own conversion of a schema knows no ranges of numbers and forgets what stands beside a list of types,
`anyOf` or `allOf`: answers under it did not always fit the schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from backend import limits
from rl.serving.base import Ask, BackendFailed, ServingRefused

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_SCHEMA = limits.SCHEMA_CHARACTERS
"""Characters of a JSON schema: a grammar grows with it."""

BLANKS = r"( |\n[ \t]{0,20})"
"""Pattern of what may stand between two signs of JSON, beside nothing: a blank, or a new line and the next one's
indent. A model that is unsure would write blanks without end."""

MAX_DIGITS = 20
"""Digits of a JSON number in a row, where fewer fit the schema too: enough for 64 bits. A model that is unsure writes
them without end."""


def grammar_of(ask: Ask) -> str | None:
    """llguidance's grammar of the schema that constrains decoding, else of the closed set of answers; None: free text.

    Raises ServingRefused.
    """
    from llguidance import LLMatcher

    if ask.response_schema is not None:
        return schema_grammar(ask.response_schema)
    if ask.answers:
        listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in ask.answers)
        return LLMatcher.grammar_from_lark(f"start: {listed}")
    return None


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON schema as llguidance's grammar; {} is any JSON object. Raises ServingRefused.

    Objects hold no other properties than those named, unless `additionalProperties` says so: by a schema that leaves it
    out, any were allowed. Keywords that no grammar can follow (`not`, `if`, `contains`, ...) constrain nothing.
    """
    from llguidance import LLMatcher

    try:
        text = json.dumps(schema or {"type": "object"})
        if len(text) > MAX_SCHEMA:
            raise ServingRefused(
                f"expected a JSON schema of at most {MAX_SCHEMA:,} characters, found {len(text):,}",
                param="response_format",
            )
        read = json.loads(text)
        grammar = LLMatcher.grammar_from_json_schema(
            _properties_closed(read, set(_part_references(read))),
            overrides={"whitespace_pattern": BLANKS, "lenient": True, "coerce_one_of": True},
        )
    except RecursionError as error:
        raise _refusal("it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise _refusal(str(error)) from error
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise _refusal(messages[0])
    return grammar


def _refusal(message: str) -> ServingRefused:
    # of a pattern that cannot be read the last line says why; the lines between draw it
    lines = message.strip().splitlines() or ["it is not one"]
    return ServingRefused(
        f"this JSON schema cannot constrain decoding: {' '.join(dict.fromkeys((lines[0], lines[-1])))}",
        param="response_format",
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


class Constraint:
    """A grammar at a place in an answer: which tokens may come next."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, *, is_json: bool = True) -> None:
        """Start at the beginning of an answer; is_json: it is JSON, whose numbers are kept short.

        Raises ServingRefused for a grammar that cannot be followed.
        """
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())
        self._number = _NumberLength() if is_json else None

    def token_mask(self, digit_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mask over the vocabulary, True for a token that may come next; `digit_tokens` begin with a digit.

        Raises BackendFailed where the grammar is too complex to go on.
        """
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        if self._matcher.is_error():
            raise BackendFailed(f"constrained decoding failed: {self._matcher.get_error().splitlines()[0]}")
        if self._number is not None and self._number.digits >= MAX_DIGITS:
            shorter = mask.copy()
            shorter[digit_tokens] = False
            mask = shorter if shorter.any() else mask
        return mask

    def accept(self, token: int, piece: bytes) -> None:
        """Go on by a token that was allowed, which writes `piece`."""
        self._matcher.consume_token(token)
        if self._number is not None:
            self._number.write(piece)


class _NumberLength:
    """Digits in a row at the end of the JSON written so far, outside of strings."""

    def __init__(self) -> None:
        self.digits = 0
        self._in_string = self._escaped = False

    def write(self, piece: bytes) -> None:
        for sign in piece:
            if self._escaped:
                self._escaped = False
            elif self._in_string and sign == ord("\\"):
                self._escaped = True
            elif sign == ord('"'):
                self._in_string = not self._in_string
            is_digit = ord("0") <= sign <= ord("9") and not self._in_string
            self.digits = self.digits + 1 if is_digit else 0
