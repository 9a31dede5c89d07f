"""Fields of JSON answers: split an object into leaves, join them again, count the right ones. Pure.

A leaf is any value but a non-empty object; a list is one leaf. A path is the keys that lead to a leaf.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rl.agents.base import (
    Agent,
    InvalidResponse,
    JsonObject,
    answer_plain,
)

Path = tuple[str, ...]

DEEPEST = 12
"""Levels of objects that are split; a deeper object is one leaf."""

LONGEST = 100_000
"""Longest answer in characters that is parsed as JSON; a longer one is free text."""


def json_read(text: str) -> object:
    """The value of a JSON text; None if it is not JSON, too long or too deeply nested."""
    if len(text) > LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """(path, value) of each leaf, in order."""
    if isinstance(value, Mapping) and value and len(path) < DEEPEST:
        for name, inner in value.items():
            yield from leaves(inner, (*path, str(name)))
    else:
        yield path, value


def composed(found: Sequence[tuple[Path, object]]) -> object:
    """The object made of these leaves. If one path is the beginning of another, the first of the two is kept."""
    whole: JsonObject = {}
    taken: set[Path] = set()
    for path, value in found:
        if not path:
            return value
        if any(path[:length] in taken for length in range(1, len(path) + 1)):
            continue
        at = whole
        for name in path[:-1]:
            at = at.setdefault(name, {})
        if path[-1] not in at:
            at[path[-1]] = value
            taken.add(path)
    return whole


def plain(value: object) -> str:
    """Canonical text of a value: equal for 1 and 1.0, different for 1 and true."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, Mapping):
        inner = sorted((json.dumps(str(name)), plain(one)) for name, one in value.items())
        return f"{{{', '.join(f'{name}: {one}' for name, one in inner)}}}"
    return json.dumps(value, ensure_ascii=False)


def answer_action(agent: Agent, response: str) -> str:
    """Canonical text of a response's action: two responses are the same answer if it is equal."""
    if agent.structured:
        try:
            return plain(agent.deed(response))
        except InvalidResponse:
            pass  # compared as text: it can only equal itself
    return answer_plain(response)


def fields_right(answer: object, right: object) -> tuple[float, int]:
    """(points, count): fields of `answer` that equal those of `right`, and the fields of either.

    A list of values is one field, worth the F1 of its items in any order. A list of objects is worth the mean of its
    items' shares, compared index by index.
    """
    if isinstance(right, Mapping) and right:
        known = answer if isinstance(answer, Mapping) else {}
        points, count = 0.0, 0
        for name, inner in right.items():
            own, of = fields_right(known.get(name, _MISSING), inner)
            points, count = points + own, count + of
        return points, count + sum(name not in right for name in known)
    if isinstance(right, list) and isinstance(answer, list):
        return _list_right(answer, right), 1
    return float(answer is not _MISSING and plain(answer) == plain(right)), 1


class _Missing:
    """Stands for a field that an answer does not have."""


_MISSING = _Missing()


def _list_right(answer: Sequence[object], right: Sequence[object]) -> float:
    if not answer and not right:
        return 1.0
    if any(isinstance(item, Mapping) for item in right):
        shares = [fields_right(one, other) for one, other in zip(answer, right, strict=False)]
        return sum(points / of for points, of in shares) / max(len(answer), len(right))
    both = Counter(map(plain, answer)) & Counter(map(plain, right))
    return 2 * both.total() / (len(answer) + len(right))
