"""Responses of an agent, as they were recorded or written by people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from feedback.selectors import decisions_of, ratings_standing

NOT_TEXT = "messages"
"""`metadata.response_is` of a response that is a list of chat messages, such as calls of tools."""


def responses_recorded(agent: str, newest: int, *, not_by: str = "") -> list[tuple[str, str]]:
    """(prompt, response) texts of the newest decisions and of the newest corrections, so many of each at most.

    Decisions that the serving backend `not_by` answered do not count, nor do responses that are no text.
    """
    facts = ("messages", "response", "metadata__response_is", "metadata__serving__backend")
    decisions = decisions_of(agent).order_by("-created_at").values_list(*facts)[:newest]
    rows = [
        (messages, response)
        for messages, response, form, backend in decisions
        if form != NOT_TEXT and not (not_by and backend == not_by)
    ]
    return [(_text(messages), response) for messages, response in rows] + corrections_recorded(agent, newest)


def corrections_recorded(agent: str, newest: int) -> list[tuple[str, str]]:
    """(prompt, correction) texts of the newest corrections."""
    corrections = ratings_standing(agent).filter(correction__isnull=False).order_by("-created_at")
    rows = corrections.values_list("decision__messages", "correction")[:newest]
    return [(_text(messages), str(response)) for messages, response in rows]


def _text(messages: Iterable[Mapping[str, Any]]) -> str:
    """The texts of a chat, one below the other."""
    return "\n".join(str(turn.get("content") or "") for turn in messages)
