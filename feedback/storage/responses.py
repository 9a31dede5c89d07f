"""Responses that are no plain text: chat messages stored as JSON in a text column, and the reserved metadata keys.

Reserved keys say how a stored response is read back, so only Ratchet writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from feedback.messages import Completion, Message

RESERVED_KEYS = ("response_is", "serving")
"""Keys of a decision's metadata that only Ratchet writes: how the response is to be read, and how it was served."""


def value_excerpt(value: object) -> str:
    """A value as it is shown in an error: short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def completion_stored(response: Completion, metadata: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """A response as it is stored, and the metadata that says how to read it: messages become JSON."""
    if isinstance(response, str):
        return response, dict(metadata)
    return json.dumps(response, ensure_ascii=False), {**metadata, "response_is": "messages"}


def completion_read(response: str, metadata: Mapping[str, object]) -> Completion:
    """A stored response as it was given: its text, or the chat messages that were kept as JSON. Raises ValueError."""
    if metadata.get("response_is") != "messages":
        return response
    messages: list[Message] = json.loads(response)
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"expected a response of chat messages as JSON, found {value_excerpt(response)}")
    return messages


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), (str, list, type(None)))
    )


def metadata_fault(response: object, metadata: Mapping[str, object]) -> str:
    """Fault in the reserved keys of a decision's metadata, as they would be read back; else nothing."""
    if not isinstance(metadata.get("serving", {}), Mapping):
        return f"serving: expected an object, found {value_excerpt(metadata['serving'])}"
    if metadata.get("response_is", "messages") != "messages":
        return f"response_is: expected 'messages' or nothing, found {value_excerpt(metadata['response_is'])}"
    if "response_is" in metadata:
        try:
            completion_read(response if isinstance(response, str) else "", metadata)
        except (ValueError, RecursionError) as error:
            return f"response_is: {error}"
    return ""
