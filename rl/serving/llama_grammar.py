"""JSON schemas and closed sets of answers as llama.cpp's grammars."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from backend import limits
from rl.serving.base import Ask, ServingRefused

MAX_SCHEMA = limits.SCHEMA_CHARACTERS
"""Characters of a JSON schema: a grammar grows with it."""


def grammar_of(ask: Ask) -> str | None:
    """The schema that constrains decoding, else the closed set of answers, as llama.cpp's grammar; None: free text."""
    if ask.response_schema is not None:
        return schema_grammar(ask.response_schema)
    if ask.answers:
        return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in ask.answers)
    return None


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON schema as llama.cpp's grammar; {} is any JSON object. Raises ServingRefused."""
    text = json.dumps(schema or {"type": "object"})
    if len(text) > MAX_SCHEMA:
        raise ServingRefused(
            f"expected a JSON schema of at most {MAX_SCHEMA:,} characters, found {len(text):,}",
            param="response_format",
        )
    try:
        gbnf = _convert_schema(json.loads(text))
        gbnf.encode()  # half of a surrogate pair is no text that a token could write
        return gbnf
    except Exception as error:
        # the converter asserts, looks up and recurses; whatever it stumbles on is in the schema
        raise ServingRefused(
            f"this JSON schema cannot constrain decoding: {error or type(error).__name__}",
            param="response_format",
        ) from error


def _convert_schema(schema: Any) -> str:
    """llama.cpp's own conversion, but for constants: it ends them at a quotation mark within, and cannot read the
    halves of characters beyond the basic plane."""
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):
        def _format_literal(self, literal: str) -> str:
            with contextlib.suppress(ValueError):
                literal = json.dumps(json.loads(literal), ensure_ascii=False)
            return '"' + literal.replace("\\", "\\\\").replace('"', '\\"') + '"'

    converter = Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    converter.visit(converter.resolve_refs(schema, "stdin"), "")
    return str(converter.format_grammar())
