"""Masking before storage: what an agent's patterns match is replaced by placeholders such as `<EMAIL_1>`.

A request's model sees the placeholders too; only the answer on its way back to the caller has the words again, by a
table that lives as long as the request. Nothing masked is stored, exported or trained on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from feedback.cache import TTLCache
from feedback.models import AgentSettings, masks_read
from feedback.storage.sampling import agent_settings

T = TypeVar("T")

PLACEHOLDER = re.compile(r"<([A-Z][A-Z0-9_]*)_(\d+)>")
PARTIAL = re.compile(r"<[A-Z0-9_]{0,40}$")
"""A text's end that may be the beginning of a placeholder."""
SERVING_TEXTS = ("message", "choice", "completion", "other_choices")
"""Parts of `metadata.serving` that quote an answer; its other values are hashes, ids and figures."""


class Masker:
    """Masks the values of one request or row, and gives the words back in its answer."""

    def __init__(self, masks: Sequence[tuple[str, re.Pattern[str]]]) -> None:
        self._masks = masks
        self._known: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def masked(self, value: T) -> T:
        """The value with placeholders in every text; equal words get the same one."""
        if not self._masks:
            return value
        for text in _texts(value):
            for name, number in PLACEHOLDER.findall(text):  # of an earlier masking, or somebody's own
                self._counts[name] = max(self._counts[name], int(number))
        found: Any = _changed(value, self._mask)
        return found

    def _mask(self, text: str) -> str:
        for name, pattern in self._masks:
            text = pattern.sub(lambda match, name=name: self._placeholder(name, match[0]), text)  # type: ignore[misc]
        return text

    def _placeholder(self, name: str, words: str) -> str:
        if words not in self._known:
            self._counts[name.upper()] += 1
            self._known[words] = f"<{name.upper()}_{self._counts[name.upper()]}>"
        return self._known[words]

    def restored(self, value: T) -> T:
        """The value with the words that this masker replaced."""
        if not self._known:
            return value
        words = {placeholder: text for text, placeholder in self._known.items()}
        found: Any = _changed(
            value, lambda text: PLACEHOLDER.sub(lambda match: words.get(match[0], match[0]), text)
        )
        return found

    @property
    def has_masks(self) -> bool:
        return bool(self._masks)

    @property
    def has_masked(self) -> bool:
        return bool(self._known)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _changed(value: object, change: Any) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(item, change) for item in value)
    return value


_in_use: TTLCache[bool] = TTLCache()


def masks_in_use() -> bool:
    """True if any agent has masks; seen within FEEDBACK_REMEMBER_S seconds."""
    return _in_use.get("any", lambda: AgentSettings.objects.exclude(masks=[]).exists())


def masker_of(agent: object) -> Masker:
    """A masker of an agent's patterns; one without patterns changes nothing."""
    if not isinstance(agent, str) or not masks_in_use():
        return Masker(())
    return Masker(masks_read(agent_settings(agent).masks))


def masks_of_all() -> list[tuple[str, re.Pattern[str]]]:
    """The patterns of all agents, for what is stored before its agent is known."""
    rows = AgentSettings.objects.exclude(masks=[]).order_by("agent").values_list("masks", flat=True)
    return [mask for masks in rows for mask in masks_read(masks)] if masks_in_use() else []


def facts_masked(facts: Mapping[str, Any], *names: str, agent: object = None) -> dict[str, Any]:
    """Facts of a row with masked values of these names. agent: where the facts do not have it."""
    masker = masker_of(facts.get("agent") if agent is None else agent)
    found = dict(facts)
    if not masker.has_masks:
        return found
    found |= masker.masked({name: facts[name] for name in names if name in facts})
    metadata = facts.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(serving := metadata.get("serving"), Mapping):
        texts = masker.masked({name: serving[name] for name in SERVING_TEXTS if name in serving})
        rest = masker.masked({name: value for name, value in metadata.items() if name != "serving"})
        found["metadata"] = {**rest, "serving": {**serving, **texts}}
    elif metadata is not None:
        found["metadata"] = masker.masked(metadata)
    return found


DECISION_TEXTS = ("messages", "response", "reasoning", "state", "candidates", "tags")
RATING_TEXTS = ("correction", "notes", "tags")
TRACE_TEXTS = ("steps",)
