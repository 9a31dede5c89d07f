"""Constrained decoding: which tokens may come next under a JSON schema or a closed set of answers. Pure.

Serving and evaluation use the same constraint, so that a policy is judged by the answers it would be served with.
llguidance reads the grammars: llama.cpp's own conversion of schemas ignores number ranges and the keywords beside a
list of types, `anyOf` or `allOf`.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from rl.decoding.unique_items import Json, Node, UniqueItems

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_DIGITS = 20
"""Most digits of a JSON number in a row, if fewer fit the schema too; an unsure model writes them without end."""


class DecodingFailed(RuntimeError):
    """A grammar became too complex while an answer was written."""


class GrammarVocabulary:
    """Tokens of a model, as grammars read them."""

    def __init__(self, tokenizer: LLTokenizer, size: int, piece: Callable[[int], bytes]) -> None:
        """size: number of tokens with logits; piece: the bytes of a token, empty for a control token."""
        self.tokenizer, self.size, self.piece = tokenizer, size, piece

    @functools.cached_property
    def quote_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens with a quotation mark: only they can end a string."""
        return np.array([token for token in range(self.size) if b'"' in self.piece(token)], np.int64)

    @functools.cached_property
    def digit_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that begin with a digit."""
        return np.array([token for token in range(self.size) if self.piece(token)[:1].isdigit()], np.int64)


class Constraint:
    """A grammar at a position in an answer."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        grammar: str,
        *,
        unique: UniqueItems | None = None,
        is_json: bool = True,
    ) -> None:
        """At the beginning of an answer. unique: `uniqueItems`, which the grammar cannot express; is_json: limit
        digits.

        Raises SchemaRefused for an unusable grammar.
        """
        from llguidance import LLMatcher

        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
        if self._matcher.is_error():
            raise refusal_of(self._matcher.get_error())
        self._unique = unique
        self._number = _NumberLength() if is_json else None

    @classmethod
    def of_schema(cls, vocabulary: GrammarVocabulary, schema: Node) -> Self:
        """Constraint to answers that fit a JSON schema; {} is any JSON object. Raises SchemaRefused."""
        return cls(vocabulary, schema_grammar(schema), unique=UniqueItems.of(schema))

    @classmethod
    def of_answers(cls, vocabulary: GrammarVocabulary, answers: Sequence[str]) -> Self:
        """Constraint to a closed set of answers."""
        return cls(vocabulary, answers_grammar(answers), is_json=False)

    def copy(self) -> Self:
        """A constraint at the same position: much faster than reading a long grammar again."""
        copied = copy.copy(self)
        copied._matcher, copied._number = self._matcher.deep_copy(), copy.copy(self._number)
        return copied

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Mask over the vocabulary: True for every token that may come next, at least one.

        Raises DecodingFailed if the grammar is too complex, and SchemaRefused if no token is left.
        """
        mask = self.token_mask()
        if self._unique is not None:
            mask = mask.copy()
            tokens = self._vocabulary.quote_tokens if self._unique.free else np.arange(len(mask))
            for token in tokens[mask[tokens]]:
                mask[token] = self._unique.allows(self._vocabulary.piece(int(token)))
        if not mask.any():
            raise SchemaRefused("this model's vocabulary cannot express the JSON schema")
        return mask

    def token_mask(self) -> npt.NDArray[np.bool_]:
        """Mask over the vocabulary: True for tokens the grammar takes next, ignoring `uniqueItems`.

        Raises DecodingFailed if the grammar is too complex.
        """
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        if self._matcher.is_error():
            raise DecodingFailed(f"constrained decoding failed: {self._matcher.get_error().splitlines()[0]}")
        if self._number is not None and self._number.digits >= MAX_DIGITS:
            shorter = mask.copy()
            shorter[self._vocabulary.digit_tokens] = False
            mask = shorter if shorter.any() else mask
        return mask

    def accept(self, token: int) -> None:
        """Advances by an allowed token."""
        piece = self._vocabulary.piece(token)
        self._matcher.consume_token(token)
        self._unique = self._unique and self._unique.write(piece)
        if self._number is not None:
            self._number.write(piece)


class _NumberLength:
    """Digits in a row at the end of the JSON written so far, outside strings."""

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


# --- Grammars ---


BLANKS = r"( |\n[ \t]{0,20})"
"""Pattern of whitespace between JSON tokens: a blank, or a newline and its indent. An unsure model writes blanks
without end."""


_GUIDANCE = {"whitespace_pattern": BLANKS, "lenient": True, "coerce_one_of": True}


class SchemaRefused(ValueError):
    """A JSON schema that cannot constrain decoding, at all or with this model's vocabulary."""


def answers_grammar(answers: Sequence[str]) -> str:
    """llguidance's grammar of a closed set of at least one answer."""
    from llguidance import LLMatcher

    listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in answers)
    return LLMatcher.grammar_from_lark(f"start: {listed}")


def schema_grammar(schema: Node) -> str:
    """A JSON schema as llguidance's grammar; {} is any JSON object. Raises SchemaRefused.

    Objects have no properties beyond the named ones unless `additionalProperties` allows them. Keywords that no grammar
    can express (`not`, `if`, `contains`, ...) are ignored.
    """
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema_part(schema))
    except RecursionError as error:
        raise refusal_of("it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise refusal_of(str(error)) from error
    return grammar_checked(grammar)


def schema_part(schema: Node) -> Json:
    """A schema as it is written within a grammar (`%json`), prepared as in `schema_grammar`."""
    read = json.loads(json.dumps(schema or {"type": "object"}))
    closed: dict[str, Json] = _properties_closed(read, set(_part_references(read)))
    return {**closed, "x-guidance": _GUIDANCE}


def lark_grammar(text: str) -> str:
    """A grammar in llguidance's own syntax. Raises SchemaRefused."""
    from llguidance import LLMatcher

    return grammar_checked(LLMatcher.grammar_from_lark(text))


def grammar_checked(grammar: str) -> str:
    """The grammar. Raises SchemaRefused if it cannot be used."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise refusal_of(messages[0])
    return grammar


def refusal_of(message: str) -> SchemaRefused:
    """Refusal of a schema, with llguidance's message."""
    # the last line of the error says why a pattern cannot be read; the lines between draw it
    lines = message.strip().splitlines() or ["it is not one"]
    return SchemaRefused(
        f"this JSON schema cannot constrain decoding: {' '.join(dict.fromkeys((lines[0], lines[-1])))}"
    )


def _properties_closed(schema: Json, parts: Collection[str] = (), *, is_part: bool = False) -> Json:
    """The schema with `additionalProperties: false` where it names properties and does not mention others.

    is_part: another schema describes the same object (`allOf`), whose properties must stay allowed; parts: references
    to such schemas.
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


def _is_combined(schema: Node) -> bool:
    """True if several of its schemas describe one object together."""
    descriptions = sum(key in schema for key in ("properties", "$ref", "anyOf", "oneOf"))
    return descriptions + len(schema.get("allOf") or ()) > 1


def _part_references(schema: Json) -> Iterator[str]:
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
