"""OpenAI fine-tuning files: chat SFT (`messages`) and DPO (`input`, `preferred_output`, `non_preferred_output`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import Message
from feedback.transfer.formats.base import (
    UNLEARNT,
    demonstration,
    has,
    key_of,
    learnt_taken,
    part_of,
    preference,
    request_options,
    row_format,
    text_only,
    tools_of,
    verdicts_read,
)
from feedback.transfer.formats.columns import REJECTED, normal, verdicts_in
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowSkipped,
    completion_of,
    messages_of,
    system_in,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    better_worse,
    plain,
    some_turns,
    turns_of,
    writer_by_record,
)

ANSWERS = {"response", "completion", "answer", "output", "chosen", "rejected"}


def recognises(row: Mapping[str, Any]) -> bool:
    if has(row, "input", "preferred_output", "non_preferred_output"):
        return True
    # an answer beside the messages makes them its prompt, and what looks like a verdict must not be passed over
    return isinstance(row.get("messages") or row.get("contents"), list) and not (
        ANSWERS & set(row)
        or REJECTED & {normal(str(name)) for name in row}
        or verdicts_in(row, used=("messages", "contents"))
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    if "preferred_output" in row:
        request_body = part_of(row, "input")
        yield from preference(
            line,
            key,
            with_system(system_in(row), messages_of(request_body, "input"), "input"),
            completion_of(row["preferred_output"], "preferred_output", required=True),
            completion_of(row.get("non_preferred_output"), "non_preferred_output"),
            metadata={**tools_of(request_body, "input.tools"), **request_options(request_body)},
        )
        return
    text_only(row)
    verdicts_read(row)
    name = "messages" if "messages" in row else "contents"
    messages = with_system(system_in(row), messages_of(row.get(name), name), name)
    metadata = {**tools_of(row), **request_options(row)}
    learnt = [learnt_taken(message) for message in messages]
    found = False
    for index, message in enumerate(messages):
        # every assistant turn that counts is a response of its own to what stands before it; a weight of 0 means
        # that it is only there to be read
        if message["role"] == "assistant" and learnt[index] and index and _says(message):
            found = True
            response = completion_of([message], f"{name}[{index}]", required=True)
            yield demonstration(line, key, messages[:index], response, metadata=metadata)
    if not found:
        yield RowSkipped(line, key, UNLEARNT)


def _says(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("refusal"))


# --- Writing -----------------------------------------------------------------------------------------------


def _pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    input_line: Line = {"messages": plain(better.messages), "tools": better.metadata.get("tools") or []}
    yield {
        "input": input_line | {"parallel_tool_calls": True},
        "preferred_output": some_turns(better.response),
        "non_preferred_output": turns_of(worse.response),
    }


def _chat(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """The whole conversation, of which the response alone is to be learnt."""
    response = some_turns(record.response)
    if len(response) > 1:
        raise NotSaid("not_text")  # read again, several turns would be as many responses
    before = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in plain(record.messages)]
    tools = record.metadata.get("tools")
    yield {
        "messages": [*before, {**response[0], "weight": 1}],
        **({"tools": tools} if tools else {}),
    }


SHAPES = (
    RowShape(
        "openai", "DPO: preferred and non-preferred output", (View.PREFERENCES,), writer_by_record(_pair)
    ),
    RowShape(
        "openai-sft",
        "SFT: chats whose last answer is learnt",
        (View.DEMONSTRATIONS,),
        writer_by_record(_chat),
    ),
)

OPENAI = row_format(
    "openai",
    "OpenAI chat SFT and DPO",
    recognises,
    records,
    SHAPES,
    verdicts=("preferred_output", "non_preferred_output"),
)
