"""Enforces `uniqueItems` of JSON schemas while an answer is written token by token. Pure.

A grammar of all orders of n items has 2^n rules, so llama.cpp's converter and other servers ignore the keyword. Here
the JSON written so far is followed byte by byte beside the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Self, TypeAlias

Json: TypeAlias = Any
"""Any JSON value."""

Node = Mapping[str, Json]

MAX_ORDERS, MAX_ORDERS_CHARS = 720, 32_000
"""Limits of the arrangements listed for servers without `uniqueItems`: all orders of six names."""

MAX_DEPTH = 32
"""Most nested references and alternatives of a schema that are followed."""

WHITE = b" \t\r\n"


class ItemRepeated(ValueError):
    """An array with `uniqueItems` repeats an item, or can only continue by repeating one."""


@dataclass(frozen=True)
class _Level:
    """An open array or object."""

    nodes: tuple[Node, ...]
    """The schemas that describe it."""
    array: bool
    start: int = 0
    """Offset of the item being written."""
    index: int = 0
    key: str | None = None
    """Key of the value that comes next in an object; None before a key."""
    unique: bool = False
    literals: tuple[bytes, ...] | None = None
    """Remaining items of an array with `uniqueItems` and listed items."""
    items: frozenset[str] = frozenset()


@dataclass(frozen=True)
class UniqueItems:
    """State of a partly written answer and its open arrays. Immutable."""

    root: Node
    text: bytes = b""
    levels: tuple[_Level, ...] = ()
    string: int = -1
    """Offset of the string being written; -1 outside strings."""
    escaped: bool = False

    @classmethod
    def of(cls, schema: Node | None) -> Self | None:
        """The state at the beginning of an answer; None if the schema has no `uniqueItems`."""
        return cls(schema) if schema is not None and _requires_unique(schema) else None

    @property
    def free(self) -> bool:
        """True within a string of any content: only a token with a quotation mark can repeat an item."""
        return self.string >= 0 and all(level.literals is None for level in self.levels)

    def allows(self, piece: bytes) -> bool:
        """True if the answer can continue with these bytes."""
        try:
            self.write(piece)
        except ItemRepeated:
            return False
        return True

    def write(self, piece: bytes) -> Self:
        """The state after these bytes. Raises ItemRepeated."""
        state = self
        for byte in piece:
            state = state._byte(byte)
        return state

    def _byte(self, byte: int) -> Self:
        text, char = self.text + bytes([byte]), chr(byte)
        state = replace(self, text=text)
        if self.string >= 0:
            if self.escaped or char == "\\":
                state = replace(state, escaped=not self.escaped)
            elif char == '"':
                state = replace(state, string=-1)._string_end(text[self.string :])
        elif char == '"':
            state = replace(state, string=len(text) - 1)
        elif char in "{[":
            state = replace(state, levels=(*self.levels, self._open_level(char == "[", len(text))))
        elif char in "}]" and self.levels:
            state = replace(state._item_end(len(text) - 1), levels=state.levels[:-1])
        elif char == "," and self.levels:
            state = state._item_end(len(text) - 1)._next_item()
        state._check_listed()
        return state

    def _open_level(self, array: bool, at: int) -> _Level:
        nodes = tuple(self._node_candidates())
        level = _Level(nodes, array, at)
        asking = [node for node in nodes if node.get("uniqueItems") is True] if array else []
        if not asking:
            return level
        values = _enumeration(asking[0].get("items"), self.root) if "prefixItems" not in asking[0] else None
        literals = None if values is None else tuple(dict.fromkeys(_text(value) for value in values))
        return replace(level, unique=True, literals=literals)

    def _node_candidates(self) -> Iterator[Node]:
        """The schemas of the value that begins here."""
        if not self.levels:
            yield from _flat(self.root, self.root)
            return
        level = self.levels[-1]
        for node in level.nodes:
            if level.array:
                first = node.get("prefixItems") or ()
                child = first[level.index] if level.index < len(first) else node.get("items")
            else:
                named = node.get("properties") or {}
                child = named.get(level.key, node.get("additionalProperties"))
            yield from _flat(child, self.root)

    def _string_end(self, raw: bytes) -> Self:
        if not self.levels:
            return self
        level = self.levels[-1]
        if not level.array and level.key is None:
            return self._top(replace(level, key=str(_value(raw))))
        if level.unique and _canonical_form(raw) in level.items:
            raise ItemRepeated(f"{raw.decode('utf-8', 'replace')} is in the array already")
        return self

    def _item_end(self, end: int) -> Self:
        """Counts the item that ends before a comma or bracket. Raises ItemRepeated if the array has it already."""
        level = self.levels[-1]
        raw = self.text[level.start : end].strip(WHITE)
        if not level.unique or not raw:
            return self
        same = _canonical_form(raw)
        if same in level.items:
            raise ItemRepeated(f"{raw.decode('utf-8', 'replace')} is in the array already")
        left = level.literals
        if left is not None:
            left = tuple(literal for literal in left if _canonical_form(literal) != same)
        return self._top(replace(level, items=level.items | {same}, literals=left))

    def _next_item(self) -> Self:
        level = self.levels[-1]
        if level.literals == ():
            raise ItemRepeated("every listed item is in the array already")
        return self._top(replace(level, key=None, start=len(self.text), index=level.index + 1))

    def _top(self, level: _Level) -> Self:
        return replace(self, levels=(*self.levels[:-1], level))

    def _check_listed(self) -> None:
        """Raises ItemRepeated if the text begun can only become an item the array has already."""
        for level in self.levels:
            if level.literals is None:
                continue
            raw = self.text[level.start :].lstrip(WHITE)
            begun = raw if self.string >= 0 else raw.rstrip(WHITE)
            if begun and not any(literal.startswith(begun) for literal in level.literals):
                raise ItemRepeated(f"no item that is left begins with {begun.decode('utf-8', 'replace')}")


def items_repeated(schema: Node | None, answer: str) -> str:
    """Why an answer violates a schema's `uniqueItems`; empty if it does not."""
    state = UniqueItems.of(schema)
    try:
        if state is not None:
            # other violations of the schema are not checked here
            bare = replace(state, root=_without_lists(state.root))
            bare.write(answer.encode("utf-8", "replace"))
    except ItemRepeated as repeated:
        return str(repeated)
    return ""


def portable(schema: Node) -> dict[str, Json]:
    """A schema without `uniqueItems`, for servers that refuse or ignore it.

    An array of listed items with few arrangements becomes an enumeration. For others the keyword is left out, and the
    answer must be checked.
    """
    return {key: _portable(value) for key, value in _order_by_schema(schema).items()}


def _portable(value: Json) -> Json:
    if isinstance(value, Mapping):
        return portable(value)
    return [_portable(one) for one in value] if isinstance(value, list) else value


def _order_by_schema(schema: Node) -> dict[str, Json]:
    if schema.get("uniqueItems") is not True:
        return dict(schema)
    plain = {key: value for key, value in schema.items() if key != "uniqueItems"}
    items = schema.get("items")
    listed = items.get("enum") if isinstance(items, Mapping) else None
    orders = _orders(listed, schema.get("minItems", 0), schema.get("maxItems")) if listed else None
    return {"type": "array", "enum": orders} if orders else plain


def _orders(values: Sequence[Json], least: int, most: int | None) -> list[list[Json]] | None:
    """Every array of different values, shortest first; None if there are too many, or none."""
    found: list[list[Json]] = []
    characters = 0
    for length in range(least, min(len(values), len(values) if most is None else most) + 1):
        for order in permutations(values, length):
            found.append(list(order))
            characters += len(json.dumps(order))
            if len(found) > MAX_ORDERS or characters > MAX_ORDERS_CHARS:
                return None
    return found or None


def _requires_unique(value: Json) -> bool:
    if isinstance(value, Mapping):
        return value.get("uniqueItems") is True or any(_requires_unique(one) for one in value.values())
    return isinstance(value, list) and any(_requires_unique(one) for one in value)


def _without_lists(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _without_lists(one) for key, one in value.items() if key not in ("enum", "const")}
    return [_without_lists(one) for one in value] if isinstance(value, list) else value


def _flat(node: Json, root: Node, depth: int = 0) -> Iterator[Node]:
    """A schema with its references and alternatives; requirements of one alternative hold for all."""
    if not isinstance(node, Mapping) or depth > MAX_DEPTH:
        return
    yield node
    if isinstance(reference := node.get("$ref"), str):
        yield from _flat(_resolve_reference(reference, root), root, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = node.get(name)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            yield from _flat(alternative, root, depth + 1)


def _resolve_reference(reference: str, root: Node) -> Json:
    found: Json = root if reference.startswith("#") else None
    for name in reference.lstrip("#").strip("/").split("/"):
        if name and isinstance(found, Mapping):
            found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found


def _enumeration(node: Json, root: Node, depth: int = 0) -> list[Json] | None:
    """Every value that a schema lists; None if it does not list them."""
    if not isinstance(node, Mapping) or depth > MAX_DEPTH:
        return None
    if "const" in node:
        return [node["const"]]
    if isinstance(node.get("enum"), list):
        return list(node["enum"])
    if isinstance(reference := node.get("$ref"), str):
        return _enumeration(_resolve_reference(reference, root), root, depth + 1)
    if node.get("type") == "boolean":
        return [True, False]
    alternatives = node.get("anyOf") or node.get("oneOf")
    if not isinstance(alternatives, list):
        return None
    found = [_enumeration(alternative, root, depth + 1) for alternative in alternatives]
    return None if None in found else [value for values in found for value in values or ()]


def _text(value: Json) -> bytes:
    """A value as a grammar writes it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _value(raw: bytes) -> Json:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")  # not JSON, which is not for here to say


def _canonical_form(raw: bytes) -> str:
    """Canonical text of a value: equal for equal JSON values."""
    return json.dumps(_numbers(_value(raw)), sort_keys=True)


def _numbers(value: Json) -> Json:
    """The value with 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value
