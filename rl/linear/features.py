"""Features of a prompt for a linear policy: words, fields, sizes of numbers, crossings, parts of words. Pure.

Only the text of messages counts, so that apps may send a state or messages. Fields come from JSON, from JSON members
within a text, or from lines `name: value`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A chat message: role and content, with whatever else an app sent."""

WORDS, CROSSED, PARTS, PHRASES = "words", "crossed", "parts", "phrases"

FAMILIES: tuple[tuple[str, ...], ...] = ((WORDS,), (WORDS, CROSSED), (WORDS, PARTS), (WORDS, PHRASES))
"""Sets of prompt features that training tries; cross-validation picks one."""

VALUES, ORDER = "values", "order"
"""Families of answer features: the parts of a closed set's answers; the first item of a list and the order of its
items."""

OF_ANSWERS = (VALUES, ORDER)

MOST_CHARACTERS = 20_000
"""Characters of a message that are read, from its beginning."""

MOST_FIELDS = 24
"""Fields of a prompt that are crossed; crossings grow with the square."""

MOST_ITEMS = 12
"""Items of an answer's list whose order is read; pairs grow with the square."""

DEEPEST = 32
"""Levels of nested JSON that are read."""

LONGEST_VALUE = 60
"""Most characters of a value that is a category; longer ones are read as words."""

CROSSED_VALUE = 0.5
"""Value of a crossing (a word has 1): smaller, so that the same penalty shrinks it more."""

MAX_SPLIT_WORDS = 200
"""Distinct words of a message whose parts are read, from its beginning."""

PART_LENGTHS = (3, 4, 5)

PHRASE_LENGTHS = (2, 3)
"""Words in a row that make a phrase."""

MAX_PHRASE_WORDS = 400
"""Words of a message, the first, whose phrases are read."""

Features = dict[str, float]
"""Feature name -> its value."""

_WORD = re.compile(r"[^\W\d_]+")
_LINE = re.compile(r"^[ \t]*([^\W\d][\w .\-]{0,39}?)[ \t]*[:=][ \t]*(\S.*)$", re.MULTILINE)
_MEMBER = re.compile(r'"([^"\\]{1,40})"\s*:\s*(?:"([^"\\]{0,200})"|(-?\d+(?:\.\d+)?|true|false|null))')


def prompt_features(messages: Sequence[Message], families: Sequence[str] = (WORDS,)) -> Features:
    """Features of a prompt: name -> value. Those of messages before the last have the prefix `earlier `.

    families: WORDS (words, fields, sizes of numbers), CROSSED (pairs of fields), PARTS (runs of three to five
    characters within words, for unseen words), PHRASES (two or three words in a row). Values are 1; CROSSED_VALUE for a
    crossing; 1 / sqrt(number of parts) for parts.
    """
    found: Features = {}
    for place, message in enumerate(messages):
        text = message_text(message)
        if message.get("role") == "system":
            continue  # an agent's own, and the same in each of its prompts
        before = "" if place == len(messages) - 1 else "earlier "
        for name, value in _text_features(text, families):
            found.setdefault(before + name, value)
    return found


def message_text(message: Message) -> str:
    """The text of a message, cut to MOST_CHARACTERS; its content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")[:MOST_CHARACTERS]


def _text_features(text: str, families: Sequence[str]) -> Iterator[tuple[str, float]]:
    words = [word.lower() for word in _WORD.findall(text)]
    fields = list(dict.fromkeys(_field_features(text)))
    if WORDS in families:
        yield from ((f"word {word}", 1.0) for word in words)
        yield from ((name, 1.0) for name in fields)
    if CROSSED in families:
        single = [name for name in fields if "=" in name or ">=" in name][:MOST_FIELDS]
        # a text without fields is crossed by its words
        single = single or [f"word {word}" for word in dict.fromkeys(words)][:MOST_FIELDS]
        for one, other in itertools.combinations(sorted(single), 2):
            yield f"{one} & {other}", CROSSED_VALUE
    if PARTS in families:
        parts = list(
            dict.fromkeys(
                part for word in list(dict.fromkeys(words))[:MAX_SPLIT_WORDS] for part in _parts(word)
            )
        )
        yield from ((f"part {part}", 1 / math.sqrt(len(parts))) for part in parts)
    if PHRASES in families:
        first = words[:MAX_PHRASE_WORDS]
        for length in PHRASE_LENGTHS:
            for start in range(len(first) - length + 1):
                yield f"phrase {' '.join(first[start : start + length])}", 1.0


def _parts(word: str) -> Iterator[str]:
    edged = f"<{word}>"
    for length in PART_LENGTHS:
        for start in range(len(edged) - length + 1):
            yield edged[start : start + length]


def _field_features(text: str) -> Iterator[str]:
    for name, value in fields_of(text):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            value_text = str(value).strip().lower()
            number = _number(value_text)
            if number is None:
                if len(value_text) <= LONGEST_VALUE:
                    yield f"{name}={value_text}"
                else:
                    yield from (f"{name}/{word.lower()}" for word in _WORD.findall(value_text))
                continue
            value = number
        try:
            size = float(value)
        except OverflowError:
            continue  # a whole number of hundreds of digits is a name, and tells no size
        yield f"{name}={size:g}"
        yield from (f"{name}>={bound:g}" for bound in _bounds(size))


def fields_of(text: str) -> list[tuple[str, object]]:
    """(name, value) of a text's fields, nested ones by their path, each entry of a list. Values are texts, numbers or
    booleans."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, (dict, list)):
        return list(_flat(whole, "", DEEPEST))
    members = [(name.lower(), quoted or plain) for name, quoted, plain in _MEMBER.findall(text)]
    if members:
        return members
    return [(name.lower(), value.rstrip()) for name, value in _LINE.findall(text)]


def _flat(value: object, path: str, deeper: int) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items() if deeper else ():
            yield from _flat(inner, f"{path}.{name}".strip(".").lower(), deeper - 1)
    elif isinstance(value, list):
        for inner in value if deeper else ():
            yield from _flat(inner, path, deeper - 1)
    elif value is not None:
        yield path, value


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _bounds(value: float) -> list[float]:
    """Powers of two up to a number, and 0; none for a negative one. Steps for weights on sizes."""
    if value < 0:
        return []
    return [0.0] + [2.0**power for power in range(-4, 31) if 2.0**power <= value]


@functools.lru_cache(maxsize=1_000)
def answer_features(answer: str, families: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Features of an answer by its parts: itself, its words, values of JSON with several members, and with ORDER the
    order of its lists."""
    words = dict.fromkeys(word.lower() for word in _WORD.findall(answer))
    found = [f"is {answer}", *(f"has {word}" for word in words)]
    try:
        whole = json.loads(answer)
    except (ValueError, RecursionError):
        return tuple(found)
    if isinstance(whole, dict) and len(whole) > 1:  # one member alone says no more than the answer itself
        found += [f"holds {value}" for value in dict.fromkeys(_field_features(answer))]
    if ORDER in families:
        found += dict.fromkeys(_order_features(whole, DEEPEST))
    return tuple(found)


def is_composed(answer: str) -> bool:
    """True of JSON with several values, or with a list of several items."""
    return any(name.startswith(("holds ", "first ")) for name in answer_features(answer, (ORDER,)))


def _order_features(value: object, deeper: int) -> Iterator[str]:
    """The first item of each list of at least two texts or numbers, and its pairs in order."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if isinstance(value, list):
        items = [str(item).lower() for item in value[:MOST_ITEMS] if isinstance(item, (str, int, float))]
        if len(items) > 1:
            yield f"first {items[0]}"
            yield from (f"{one} before {other}" for one, other in itertools.combinations(items, 2))
    for one in inner if deeper else ():
        yield from _order_features(one, deeper - 1)
