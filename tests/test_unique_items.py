"""Arrays of different items, followed byte by byte while they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl.agents import AGENTS
from rl.decoding.unique_items import UniqueItems, items_repeated, portable

NAMES: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LISTED: dict[str, Any] = {**NAMES, "items": {"type": "string", "enum": ["c3", "c33", "d"]}}
PAIRED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": NAMES["items"]},
    "$defs": {"n": NAMES},
}


@pytest.mark.parametrize(
    ("schema", "written", "piece", "allowed"),
    [
        (NAMES, '["c3", "c3', '"', False),  # the second would be the first
        (NAMES, '["c3", "c3', '3"', True),
        (NAMES, '["c3", "c3', "3", True),  # a string goes on as it likes
        (NAMES, '["c3", "c3', '", "d"', False),  # one token over the border
        (NAMES, r'["a\"b", "a\"b', '"', False),  # an escaped mark ends no string
        (NAMES, r'["\u00e9", "é', '"', False),  # however it is spelt
        (LISTED, '["c3", "c3', '"', False),
        (LISTED, '["c3", "c33"', ', "c', False),  # nothing that is left begins so
        (LISTED, '["c3", "c33"', ', "', True),
        (LISTED, '["c3", "c33", "d"', ",", False),  # nothing is left
        (LISTED, '["c3", "c33", "d"', "]", True),
        (LISTED, "[", "]", True),
        ({**NAMES, "items": {"type": "number"}}, "[1, 1", ".5]", True),
        ({**NAMES, "items": {"type": "number"}}, "[1, 1", "]", False),
        ({**NAMES, "items": {"type": "number"}}, "[1, 1.0", "]", False),
        ({**NAMES, "items": {"type": "object"}}, '[{"x": 1, "y": 2}, {"y": 2, "x": 1', "}]", False),
        (PAIRED, '{"b": "x", "a": ["x", "y", "x', '"', False),  # by reference; a value beside it is none of its items
        (PAIRED, '{"b": "x", "a": ["y", "x', '"', True),
        ({**NAMES, "uniqueItems": True, "items": NAMES}, '[["a"], ["a"', "]]", False),
        ({**NAMES, "items": NAMES}, '[["a"], ["b", "a"', "]]", True),  # each array has items of its own
    ],
)  # fmt: skip
def test_an_answer_goes_on_without_repeating(schema: Any, written: str, piece: str, allowed: bool) -> None:
    begun = UniqueItems.of(schema)
    assert begun is not None
    assert begun.write(written.encode()).allows(piece.encode()) is allowed


def test_a_schema_that_asks_for_no_different_items_is_not_followed() -> None:
    assert UniqueItems.of({"type": "array", "items": {"type": "string"}}) is None
    assert UniqueItems.of(None) is None


def test_only_a_token_with_a_quotation_mark_ends_a_free_string() -> None:
    begun, listed = UniqueItems.of(NAMES), UniqueItems.of(LISTED)
    assert begun is not None
    assert listed is not None
    assert [begun.write(text).free for text in (b"[", b'["a', b'["a"')] == [False, True, False]
    assert not listed.write(b'["c').free


def test_what_repeats_is_named() -> None:
    schema = AGENTS["prioritizer"].response_schema({"tasks": ["c1", "c2", "c3"]})
    assert "c3" in items_repeated(schema, '{"order": ["c3", "c3", "c3"]}')
    assert not items_repeated(schema, '{"order": ["c3", "c1", "c2"]}')
    # another fault than a repeated item is not told here
    assert not items_repeated(schema, '{"order": ["c9"]}')
    assert not items_repeated(schema, "no JSON")


def test_few_arrangements_are_listed_for_a_server_that_knows_no_different_items() -> None:
    schema = AGENTS["prioritizer"].response_schema({"tasks": ["a", "b", "c"]})
    assert schema is not None
    orders = portable(schema)["properties"]["order"]["enum"]
    # 3! = 6 orders of three
    assert sorted(orders) == [list(order) for order in ("abc", "acb", "bac", "bca", "cab", "cba")]
    # one or two of three: 3 + 3 * 2
    some = portable({**NAMES, "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2})
    assert len(some["enum"]) == 9
    # 7! = 5,040 are too many to list
    many = AGENTS["prioritizer"].response_schema({"tasks": list("abcdefg")})
    assert many is not None
    assert "uniqueItems" not in json.dumps(portable(many))
    assert portable(many)["properties"]["order"]["minItems"] == 7
