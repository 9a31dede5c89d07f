"""Constrained decoding of a request: its schema or its closed set of answers, with refusals as the API tells them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from backend import limits
from rl.decoding.constraint import (
    Constraint,
    DecodingFailed,
    GrammarVocabulary,
    SchemaRefused,
    lark_grammar,
    refusal_of,
)
from rl.serving.base import Ask, BackendFailed, ServingRefused
from rl.serving.tool_calls import CallSyntax, Tools

MAX_SCHEMA = limits.SCHEMA_CHARACTERS
"""Characters of a JSON schema: a grammar grows with it."""


def constraint_of(ask: Ask, vocabulary: GrammarVocabulary) -> Constraint | None:
    """The schema that constrains an answer, else the closed set of answers; None: free text. Raises ServingRefused."""
    with decoding_errors():
        if ask.response_schema is not None:
            schema_size_check(ask.response_schema)
            return Constraint.of_schema(vocabulary, ask.response_schema)
        return Constraint.of_answers(vocabulary, ask.answers) if ask.answers else None


def tools_constraint(
    ask: Ask, tools: Tools, syntax: CallSyntax, vocabulary: GrammarVocabulary
) -> Constraint | None:
    """Constraint of an answer beside tools: words, or calls that fit the schemas. Raises ServingRefused."""
    try:
        for function in tools.callable:
            schema_size_check(function)
        if ask.response_schema is not None:
            schema_size_check(ask.response_schema)
        grammar = syntax.grammar(tools, ask.response_schema)
        return Constraint(vocabulary, lark_grammar(grammar)) if grammar else None
    except (SchemaRefused, RecursionError) as error:
        raise ServingRefused(f"tools: {error}", param="tools") from error


def schema_size_check(schema: Mapping[str, Any]) -> None:
    """Raises SchemaRefused for a schema of more than MAX_SCHEMA characters, or one nested too deeply to be read."""
    try:
        length = len(json.dumps(schema))
    except RecursionError as error:
        raise refusal_of("it is nested too deeply") from error
    if length > MAX_SCHEMA:
        raise SchemaRefused(f"expected a JSON schema of at most {MAX_SCHEMA:,} characters, found {length:,}")


@contextlib.contextmanager
def decoding_errors() -> Iterator[None]:
    """Inside, what goes wrong in constrained decoding is raised as ServingRefused or BackendFailed."""
    try:
        yield
    except SchemaRefused as error:
        raise ServingRefused(str(error), param="response_format") from error
    except DecodingFailed as error:
        raise BackendFailed(str(error)) from error
