"""Constraint of one answer, token by token: which tokens may come next under a grammar. Pure.

One way for serving and for evaluation, so that a policy is judged by the answers that it would be served with.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rl.decoding.unique_items import UniqueItems

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_DIGITS = 20
"""Digits of a JSON number in a row, where fewer fit the schema too: enough for 64 bits. A model that is unsure writes
them without end."""


class DecodingFailed(RuntimeError):
    """A grammar that became too complex while an answer was written."""


class GrammarVocabulary:
    """Tokens of a model, as grammars read them."""

    def __init__(self, tokenizer: LLTokenizer, size: int, piece: Callable[[int], bytes]) -> None:
        """size: tokens that a model gives logits of; piece: the bytes that a token writes, none of a control token."""
        self.tokenizer, self.size, self.piece = tokenizer, size, piece

    @functools.cached_property
    def quote_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that write a quotation mark, with which alone a string can end."""
        return np.array([token for token in range(self.size) if b'"' in self.piece(token)], np.int64)

    @functools.cached_property
    def digit_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that begin with a digit."""
        return np.array([token for token in range(self.size) if self.piece(token)[:1].isdigit()], np.int64)


class Constraint:
    """A grammar at a place in an answer."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        grammar: str,
        *,
        unique: UniqueItems | None = None,
        is_json: bool = True,
    ) -> None:
        """Start at the beginning of an answer. unique: arrays of different items beside the grammar, which does not
        know of them; is_json: it is JSON, whose numbers are kept short.

        Raises SchemaRefused for a grammar that cannot be followed.
        """
        from llguidance import LLMatcher

        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
        if self._matcher.is_error():
            raise refusal_of(self._matcher.get_error())
        self._unique = unique
        self._number = _NumberLength() if is_json else None

    @classmethod
    def of_schema(cls, vocabulary: GrammarVocabulary, schema: Mapping[str, Any]) -> Self:
        """Constraint to answers that a JSON schema takes; {} is any JSON object. Raises SchemaRefused."""
        return cls(vocabulary, schema_grammar(schema), unique=UniqueItems.of(schema))

    @classmethod
    def of_answers(cls, vocabulary: GrammarVocabulary, answers: Sequence[str]) -> Self:
        """Constraint to a closed set of answers."""
        return cls(vocabulary, answers_grammar(answers), is_json=False)

    def copy(self) -> Self:
        """Another constraint at the same place, which is far quicker than to read a long grammar again."""
        copied = copy.copy(self)
        copied._matcher, copied._number = self._matcher.deep_copy(), copy.copy(self._number)
        return copied

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Mask over the vocabulary, True for every token that may come next, at least one.

        Raises DecodingFailed where the grammar is too complex to go on, and SchemaRefused where no token is left.
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
        """Mask over the vocabulary, True for a token that the grammar takes next; repeated items are not looked at.

        Raises DecodingFailed where the grammar is too complex to go on.
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
        """Go on by a token that was allowed."""
        piece = self._vocabulary.piece(token)
        self._matcher.consume_token(token)
        self._unique = self._unique and self._unique.write(piece)
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


# --- Grammars ---


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
