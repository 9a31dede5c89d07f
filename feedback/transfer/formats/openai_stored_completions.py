"""OpenAI stored chat completions and the listing of their messages: two files, of which neither alone is a decision.

The messages of a completion are named after it (`<completion id>-<n>`). A completion that carries its own `messages` is
a decision by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.transfer.formats.base import Format, decisions_first, each_item, has, key_of
from feedback.transfer.formats.calls import (
    call_decision,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    Record,
    RowError,
    RowRefused,
    RowSkipped,
    mapping_of,
    text_of,
    time_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    if row.get("object") == "list" and isinstance(row.get("data"), list):
        return any(
            isinstance(item, Mapping) and (_is_completion(item) or _is_message(item)) for item in row["data"]
        )
    return _is_completion(row) or _is_message(row)


def _is_completion(row: Mapping[str, Any]) -> bool:
    return row.get("object") == "chat.completion"


def _is_message(row: Mapping[str, Any]) -> bool:
    return has(row, "id", "role", "content", "content_parts")


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    prompts = DiskMultimap()
    completions = False
    for file in filter(None, (path, ratings_path)):
        for item in rows(file):
            value = None if isinstance(item, RowRefused) else item.value
            listed = value.get("data") if isinstance(value, Mapping) and "data" in value else [value]
            for row in listed if isinstance(listed, list) else []:
                if isinstance(row, Mapping) and _is_completion(row):
                    completions = True
                elif isinstance(row, Mapping) and _is_message(row):
                    completion, number = _place(row)
                    prompts.add(completion, [number, row])
    alone = next(iter(prompts), None) is None

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        if isinstance(row.get("data"), list):
            yield from each_item(line, row["data"], "data", records)
        elif _is_completion(row):
            yield from _completion(row, line, prompts, alone)
        elif not completions:
            raise RowError(
                "a stored message without its completion is no decision: import the listing of the completions with "
                "this file as its --ratings-file"
            )
        else:
            mapping_of(row, "message")

    return decisions_first(path, ratings_path, records, ())


def _place(row: Mapping[str, Any]) -> tuple[str, int]:
    completion, _, number = str(row.get("id")).rpartition("-")
    return completion, int(number) if number.isdigit() else 0


def _completion(row: Mapping[str, Any], line: int, prompts: DiskMultimap, alone: bool) -> Iterator[Record]:
    key = key_of(row)
    completion_id = text_of(row.get("id"), "id", required=True)
    messages = row.get("messages") or [
        {**message, "content": message.get("content") or message.get("content_parts")}
        for _, message in sorted(prompts.all(completion_id), key=lambda item: item[0])
    ]
    if not messages and alone:
        raise RowError(
            "a stored completion without its prompt is no decision: bring the listing of its messages as --ratings-file"
        )
    if not messages:
        yield RowSkipped(line, key, "its prompt is not in the file of messages")
        return
    usage = object_or_empty(row.get("usage"))
    yield from call_decision(
        line,
        key,
        {"messages": messages, "tools": row.get("tools")},
        {
            key: row[key]
            for key in ("choices", "usage", "model", "system_fingerprint", "service_tier")
            if key in row
        },
        run_id=completion_id[:200],
        policy=text_or_empty(row.get("model")),
        unit=text_or_empty(row.get("input_user")),
        tokens_in=whole_of(usage.get("prompt_tokens")),
        tokens_out=whole_of(usage.get("completion_tokens")),
        created_at=time_of(row.get("created"), "created"),
        metadata=metadata_retained(request_id=row.get("request_id"), stored=row.get("metadata")),
    )


def _holds_messages(row: Mapping[str, Any]) -> bool:
    listed = row.get("data")
    return any(
        isinstance(item, Mapping) and _is_message(item)
        for item in (listed if isinstance(listed, list) else [row])
    )


FORMAT = Format(
    "openai_stored",
    "OpenAI stored completions and their messages",
    recognises,
    read,
    (),
    two_files=True,
    ratings_row=_holds_messages,
)
