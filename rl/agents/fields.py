"""Fields of answers that are JSON: their leaves, an object put together from them, the share that is right. Pure.

A leaf is a value that is no object with members; a list is one leaf. A path is the keys that lead to it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.agents.base import (
    Agent,
    InvalidResponse,
    JsonObject,
    answer_plain,
)

Path = tuple[str, ...]

DEEPEST = 12
"""Levels of objects that are told apart by their fields; what lies deeper is one leaf."""

LONGEST = 100_000
"""Characters of an answer that is read; a longer one is free text."""


def json_read(text: str) -> Any:
    """The value of a JSON text; None of any other, and of one that is too long, too deep or has too long a number."""
    if len(text) > LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of each leaf, in order."""
    if isinstance(value, Mapping) and value and len(path) < DEEPEST:
        for name, inner in value.items():
            yield from leaves(inner, (*path, str(name)))
    else:
        yield path, value


def composed(found: Sequence[tuple[Path, Any]]) -> Any:
    """The object of these leaves. Where one stands at the beginning of another's path, the first of both is kept."""
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


def plain(value: Any) -> str:
    """A value as text that is equal for equal values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, Mapping):
        inner = sorted((json.dumps(str(name)), plain(one)) for name, one in value.items())
        return f"{{{', '.join(f'{name}: {one}' for name, one in inner)}}}"
    return json.dumps(value, ensure_ascii=False)


def answer_action(agent: Agent, response: str) -> str:
    """What a response does, as text: two responses of equal text are the same answer."""
    if agent.structured:
        try:
            return plain(agent.deed(response))
        except InvalidResponse:
            pass  # compared as text: it can only equal itself
    return answer_plain(response)


def fields_right(answer: Any, right: Any) -> tuple[float, int]:
    """Fields of `answer` that are as in `right`, and how many there are: all leaves of `right`, and those of `answer`
    that it does not have.

    A list of values is one field that is right by the F1 of its items, whatever their order; of a list of objects by
    the mean of its items' shares, place by place.
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


def _list_right(answer: Sequence[Any], right: Sequence[Any]) -> float:
    if not answer and not right:
        return 1.0
    if any(isinstance(item, Mapping) for item in right):
        shares = [fields_right(one, other) for one, other in zip(answer, right, strict=False)]
        return sum(points / of for points, of in shares) / max(len(answer), len(right))
    both = Counter(map(plain, answer)) & Counter(map(plain, right))
    return 2 * both.total() / (len(answer) + len(right))


def share_right(answer: str, right: str) -> float | None:
    """Share of the fields of a right answer that an answer has as well; None where the right one is no JSON object or
    list."""
    wanted = json_read(right)
    if not isinstance(wanted, (dict, list)):
        return None
    points, count = fields_right(json_read(answer), wanted)
    return points / count
