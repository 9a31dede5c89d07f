"""LLaMA-Factory v1: messages whose content is a list of {type, value} parts, with a loss weight each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import demonstration, has, key_of, preference, row_format, tools_of
from feedback.transfer.formats.columns import verdicts_in
from feedback.transfer.formats.records import (
    Record,
    RowError,
    RowSkipped,
    check_json,
    completion_of,
    list_of,
    mapping_of,
    message_of,
    number_of,
    text_of,
)
from feedback.transfer.formats.trl import preference_parts


def recognises(row: Mapping[str, Any]) -> bool:
    paired = has(row, "chosen_messages", "rejected_messages")
    messages = row["chosen_messages"] if paired else row.get("messages")
    if not isinstance(messages, list) or not messages or (not paired and verdicts_in(row)):
        return False
    first = messages[0]
    content = first.get("content") if isinstance(first, Mapping) else None
    return (
        isinstance(content, list)
        and bool(content)
        and isinstance(content[0], Mapping)
        and has(content[0], "type", "value")
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key, metadata = key_of(row), tools_of(row)
    if (info := row.get("extra_info")) not in (None, ""):
        metadata["extra_info"] = check_json(info, "extra_info")
    if "chosen_messages" in row:
        sides = {
            side: _messages(row.get(f"{side}_messages"), f"{side}_messages")[0]
            for side in ("chosen", "rejected")
        }
        messages, chosen, rejected = preference_parts(sides)
        yield from preference(line, key, messages, chosen, rejected, metadata=metadata)
        return
    messages, weights = _messages(row.get("messages"), "messages")
    learnt = [
        index
        for index, (message, weight) in enumerate(zip(messages, weights, strict=True))
        if index and weight > 0 and message["role"] == "assistant"
    ]
    if not learnt:
        yield RowSkipped(line, key, "no assistant turn of a loss weight above 0 after a prompt")
        return
    last = learnt[-1]
    for message in messages:
        message.pop("loss_weight", None)
    response = messages[last]
    completion = completion_of([response], f"messages[{last}]", required=True)
    yield demonstration(line, key, messages[:last], completion, metadata=metadata)


def _messages(value: Any, what: str) -> tuple[list[Message], list[float]]:
    """Chat messages and their loss weights (1 where none is given). Raises RowError."""
    messages: list[Message] = []
    weights: list[float] = []
    for index, item in enumerate(list_of(value, what)):
        where = f"{what}[{index}]"
        message = mapping_of(item, where)
        messages.append(_message(message, where))
        weight = message.get("loss_weight")
        weights.append(1.0 if weight is None else number_of(weight, f"{where}.loss_weight"))
    if not messages:
        raise RowError(f"{what}: expected at least one message, found none")
    return messages, weights


def _message(message: Mapping[str, Any], where: str) -> Message:
    """A message whose parts have their words, or the JSON of a call, under `value`."""
    content = message.get("content")
    parts = content if isinstance(content, str) else list_of(content, f"{where}.content")
    read = (
        parts
        if isinstance(parts, str)
        else [_part(part, f"{where}.content[{n}]") for n, part in enumerate(parts)]
    )
    return message_of({**message, "content": read}, where)


def _part(value: Any, where: str) -> dict[str, Any]:
    part = mapping_of(value, where)
    text = text_of(part.get("value"), f"{where}.value")
    if part.get("type") != "tool_call":
        return {**part, "value": text}
    try:
        call = mapping_of(json.loads(text), f"{where}.value")
    except (ValueError, RecursionError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(f"{where}.value: expected a call as JSON, found {value_excerpt(text)}") from None
    return {"type": "tool_call", **call}


FORMAT = row_format(
    "llamafactory_v1",
    "LLaMA-Factory v1: pairs and SFT of content parts",
    recognises,
    records,
    (),
    verdicts=(),
)
