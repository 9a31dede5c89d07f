"""TensorZero tables: inferences (decisions), and boolean, float, comment and demonstration feedback on them.

Inferences and feedback are two files. Feedback names an inference or an episode; where an episode holds several
inferences it cannot be told which one is meant. Ids are UUIDv7 and carry their time.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, each_row, has, key_of, objects_in, second_file
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import slug
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    Record,
    RowError,
    check_json,
    mapping_of,
    number_of,
    objects_of,
    text_of,
    text_or_json,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    Writer,
    iso,
    plain,
    shape,
    share_of,
    turns_of,
    writer_by_record,
)


def recognises(row: JsonObject) -> bool:
    if has(row, "function_name", "variant_name", "input", "output"):
        return True
    return has(row, "target_id", "value") or has(row, "inference_id", "value", "id")


def ratings_row(row: JsonObject) -> bool:
    return "function_name" not in row


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    if ratings_path is None:
        yield from each_row(path, _records, verdicts=())
        return
    # what is said of an inference may stand under its episode: only where that holds no other
    inferences, known, feedback = DiskMultimap(), DiskMultimap(), DiskMultimap()
    for row, _ in objects_in(path):
        inferences.add(str(row.get("episode_id")))
        known.add(str(row.get("id")))

    def keep(row: JsonObject, line: int) -> None:
        target = _feedback(row, line).reference
        if target in known or inferences.count(target) == 1:
            feedback.add(target, row)
            return
        several = inferences.count(target) > 1
        raise RowError(
            f"{target}: {'an episode of several inferences' if several else 'not in the other file'}"
        )

    yield from second_file(ratings_path, keep)

    def decisions(row: JsonObject, line: int) -> Iterator[Record]:
        targets = (str(row.get("id")), str(row.get("episode_id")))
        ratings = (_feedback(said_of, line).rating for target in targets for said_of in feedback.all(target))
        yield _inference(row, line, tuple(ratings))

    yield from each_row(path, decisions, verdicts=())


def _records(row: JsonObject, line: int) -> Iterator[Record]:
    if "function_name" in row:
        yield _inference(row, line)
    else:
        yield _feedback(row, line)


def _inference(row: JsonObject, line: int, ratings: tuple[ImportedRating, ...] = ()) -> ImportedDecision:
    model_input = mapping_of(_decode_json(row.get("input"), "input"), "input")
    messages: list[Message] = []
    if (system := model_input.get("system")) is not None:
        messages.append({"role": "system", "content": text_or_json(system, "input.system")})
    for index, turn in enumerate(objects_of(model_input.get("messages"), "input.messages")):
        messages += _turn(turn, f"input.messages[{index}]")
    if not messages:
        raise RowError("input: expected at least one message, found none")
    name = text_of(row.get("function_name"), "function_name", required=True)
    inference_id = uuid_of(row.get("id"))
    latency = row.get("processing_time_ms")
    metadata = {
        key: check_json(row[key], key)
        for key in ("function_name", "tags", "inference_params")
        if row.get(key)
    }
    return ImportedDecision(
        line=line,
        key=key_of(row),
        id=inference_id,
        agent=slug(name),
        messages=messages,
        response=_output(_decode_json(row.get("output"), "output")),
        policy=text_of(row.get("variant_name"), "variant_name"),
        run_id=str(row.get("episode_id") or ""),
        latency_ms=None if latency is None else number_of(latency, "processing_time_ms"),
        metadata=metadata,
        created_at=time_of(row.get("timestamp"), "timestamp") or _time_in(inference_id),
        ratings=ratings,
    )


def _feedback(row: JsonObject, line: int) -> ImportedReference:
    target = row.get("target_id", row.get("inference_id"))
    name, value = row.get("metric_name"), row.get("value")
    own = uuid_of(row.get("id"))
    tags = row.get("tags") if isinstance(row.get("tags"), Mapping) else {}
    author = tags.get("author")  # type: ignore[union-attr]
    what = "demonstration" if "inference_id" in row else name or "comment"
    rating: dict[str, Any] = {
        # of one metric on one target the latest value counts, whoever gave it: a metric is a rater
        "rater": text_of(f"{author} ({what})" if author else what, "metric_name"),
        "tags": (name[:100],) if isinstance(name, str) else (),
        "created_at": time_of(row.get("timestamp"), "timestamp") or _time_in(own),
        "id": own,
    }
    if "inference_id" in row:
        correction = _output(_decode_json(value, "value"))
        if not isinstance(correction, str):
            raise RowError("value: only a demonstration in words can be read, found a tool call")
        rating["correction"] = correction
    elif isinstance(value, bool):
        rating["thumb"] = "up" if value else "down"
    elif isinstance(value, (int, float)):
        if not 0 <= value <= 1:
            raise RowError(
                f"value: expected a float metric in [0, 1], found {value_excerpt(value)} of unknown scale"
            )
        rating["score"] = float(value)
    else:
        rating["notes"] = text_of(value, "value", required=True)
    return ImportedReference(
        line, key_of(row), text_of(target, "target_id", required=True), ImportedRating(**rating)
    )


def _decode_json(value: object, what: str) -> object:
    """Columns of JSON come as JSON or as its text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(f"{what}: expected JSON, found {value_excerpt(value)}: {error}") from None


def _turn(turn: JsonObject, what: str) -> list[Message]:
    """One turn as messages of ours: results of tools are messages of their own there, parts of a turn here."""
    role, content = text_of(turn.get("role"), f"{what}.role"), turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": text_of(content, f"{what}.content")}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    results: list[Message] = []
    for index, part in enumerate(objects_of(content, f"{what}.content")):
        where = f"{what}.content[{index}]"
        if part.get("type") == "tool_call":
            calls.append(_call(part, where))
        elif part.get("type") == "thought":
            thoughts.append(text_of(part.get("text") or "", f"{where}.text"))
        elif part.get("type") == "tool_result":
            name, result = (text_of(part.get(key), f"{where}.{key}") for key in ("name", "result"))
            results.append({"role": "tool", "name": name, "content": result})
        else:
            texts.append(_block_text(part, where))
    spoken: list[Message] = []
    if texts or calls or thoughts or not results:
        more = {"reasoning": "\n\n".join(filter(None, thoughts)), "tool_calls": calls}
        kept = {name: item for name, item in more.items() if item}
        spoken = [{"role": role, "content": "\n".join(texts), **kept}]
    return [*results, *spoken]


def _block_text(part: JsonObject, where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "raw_text", "template"):
        raise RowError(f"{where}: only text and tools can be read, found {value_excerpt(kind)}")
    for key in ("text", "value", "arguments"):
        if part.get(key) is not None:
            return text_or_json(part[key], f"{where}.{key}")
    raise RowError(f"{where}: expected text, value or arguments, found {value_excerpt(part)}")


def _call(part: JsonObject, where: str) -> dict[str, object]:
    name = part.get("name") or part.get("raw_name")
    arguments = part.get("arguments") if part.get("arguments") is not None else part.get("raw_arguments")
    return {
        "type": "function",
        "function": {
            "name": text_of(name, f"{where}.name"),
            "arguments": check_json(_decode_json(arguments, f"{where}.arguments"), f"{where}.arguments"),
        },
    }


def _output(value: object) -> Completion:
    """A chat function's blocks, or a json function's {"raw"}: a text where there are only words."""
    if isinstance(value, Mapping):
        return text_of(value.get("raw"), "output.raw")
    messages = _turn({"role": "assistant", "content": value}, "output")
    if len(messages) == 1 and set(messages[0]) == {"role", "content"}:
        return str(messages[0]["content"])
    return messages


def _time_in(own: uuid.UUID | None) -> datetime | None:
    """The time a UUIDv7 was made: its first 48 bits are milliseconds since 1970 (RFC 9562, 5.7)."""
    if own is None or own.version != 7:
        return None
    return datetime.fromtimestamp((own.int >> 80) / 1000, tz=UTC)


# --- Writing -----------------------------------------------------------------------------------------------


def _inference_row(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    messages = plain(record.messages)
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    output = [block for turn in turns_of(record.response) for block in _blocks(turn)]
    if any(block["type"] == "tool_result" for block in output):
        raise NotSaid("not_text")  # an output of theirs is one turn of the model
    model_input: Line = {"messages": [_their_turn(message) for message in messages]}
    if system is not None:
        model_input["system"] = system
    yield {
        "id": str(record.id),
        "function_name": record.agent,
        "variant_name": record.policy,
        "episode_id": record.run_id or str(record.id),
        "input": json.dumps(model_input, ensure_ascii=False),
        "output": json.dumps(output, ensure_ascii=False),
        "processing_time_ms": record.latency_ms,
        "tags": {"user_id": record.unit} if record.unit else {},
        "timestamp": iso(record.created_at),
    }


def _their_turn(message: Message) -> Line:
    """A turn of theirs: the model's or the user's, who also brings what tools say."""
    role = {"assistant": "assistant", "user": "user", "tool": "user"}.get(message["role"])
    if role is None:
        raise NotSaid("roles")
    return {"role": role, "content": _blocks(message)}


def _blocks(message: Message) -> list[Line]:
    if message["role"] == "tool":
        name = str(message.get("name") or message.get("tool_call_id") or "tool")
        return [{"type": "tool_result", "id": name, "name": name, "result": message["content"]}]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise NotSaid("not_text")
    blocks: list[Line] = []
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        try:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
        except (KeyError, TypeError):
            raise NotSaid("not_text") from None
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        blocks.append(
            {
                "type": "tool_call",
                "id": name,
                "name": name,
                "raw_name": name,
                "arguments": _object(raw),
                "raw_arguments": raw,
            }
        )
    return blocks


def _object(raw: str) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _feedback_rows(kind: str) -> Writer:
    """Rows of one of the four feedback tables."""

    def write(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
        _ = list(_inference_row(record, left_out))  # what has no inference has no feedback either
        for rating in record.ratings:
            for name, value in _values(rating):
                if name != kind:
                    continue
                target = "inference_id" if kind == "demonstration" else "target_id"
                yield {
                    "id": str(uuid.uuid5(rating.id or uuid.NAMESPACE_OID, kind)),
                    target: str(record.id),
                    **({"metric_name": METRICS[kind]} if kind in METRICS else {}),
                    **({"target_type": "inference"} if kind == "comment" else {}),
                    "value": value,
                    "tags": {"author": rating.rater},
                    "timestamp": iso(rating.created_at),
                }

    return writer_by_record(write)


METRICS = {"boolean": "thumb", "float": "score"}


def _values(rating: ImportedRating) -> Iterator[tuple[str, object]]:
    """Values of a rating, table by table; stars are a score from 0 to 1 there."""
    if rating.thumb:
        yield "boolean", rating.thumb == "up"
    if (share := share_of(replace(rating, thumb=""))) is not None:
        yield "float", share
    if rating.correction is not None:
        yield "demonstration", json.dumps([{"type": "text", "text": rating.correction}], ensure_ascii=False)
    if rating.notes.strip():
        yield "comment", rating.notes


TABLES = {
    "boolean": "BooleanMetricFeedback: thumbs",
    "float": "FloatMetricFeedback: stars and scores",
    "comment": "CommentFeedback: notes",
    "demonstration": "DemonstrationFeedback: corrections",
}
SHAPES = (
    shape(
        "tensorzero",
        "ChatInference, and beside it the feedback tables",
        View.DECISIONS,
        _inference_row,
        beside=tuple(f"tensorzero-{kind}" for kind in TABLES),
    ),
    *(
        RowShape(f"tensorzero-{kind}", title, (View.RATED,), _feedback_rows(kind))
        for kind, title in TABLES.items()
    ),
)

TENSORZERO = Format(
    "tensorzero",
    "TensorZero inferences and feedback",
    recognises,
    read,
    SHAPES,
    two_files=True,
    ratings_row=ratings_row,
)
