"""Hugging Face TRL: preference (explicit and implicit prompt), unpaired, prompt-completion and prompt-only rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.formats.base import (
    demonstration,
    has,
    judgement,
    key_of,
    preference,
    row_format,
    tools_of,
)
from feedback.formats.records import (
    Completion,
    Message,
    Record,
    RowError,
    RowSkipped,
    completion_of,
    messages_of,
    text_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    if has(row, "chosen", "rejected"):
        return not has(row, "conversations") and not isinstance(row["chosen"], Mapping)
    return "prompt" in row and ("completion" in row or set(row) <= {"prompt", "tools"})


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key, metadata = key_of(row), tools_of(row)
    if row.get("images") or row.get("image"):
        raise RowError("images: only text can be read")
    if has(row, "chosen", "rejected"):
        messages, chosen, rejected = _preference(row)
        yield from preference(line, key, messages, chosen, rejected, metadata=metadata)
        return
    messages = messages_of(row.get("prompt"), "prompt")
    if "completion" not in row:
        yield RowSkipped(line, key, "a prompt without a response is no decision")
        return
    completion = completion_of(row["completion"], "completion", required=True)
    if "label" in row:
        yield from judgement(line, key, messages, completion, row["label"], "label", metadata=metadata)
    else:
        yield demonstration(line, key, messages, completion, metadata=metadata)


def _preference(row: Mapping[str, Any]) -> tuple[list[Message], Completion, Completion]:
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise RowError("chosen and rejected: expected two texts or two lists of messages, found one of each")
    if prompt is not None and isinstance(prompt, list) >= isinstance(chosen, list):
        return (
            messages_of(prompt, "prompt"),
            completion_of(chosen, "chosen", required=True),
            completion_of(rejected, "rejected"),
        )
    # No prompt, or (as ultrafeedback_binarized has it) a text that repeats a turn of the two conversations
    if isinstance(chosen, list):
        return _shared_turns(messages_of(chosen, "chosen"), messages_of(rejected, "rejected"))
    return _shared_text(text_of(chosen, "chosen"), text_of(rejected, "rejected"))


def _shared_turns(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], Completion, Completion]:
    """The turns two conversations begin with are the prompt (trl.data_utils.extract_prompt)."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise RowError("chosen and rejected are the same conversation: no preference")
    if shared == 0:
        raise RowError("chosen and rejected share no turn: no prompt to answer")
    if not chosen[shared:] or not rejected[shared:]:
        raise RowError("one conversation is the beginning of the other: one response is empty")
    if chosen[shared]["role"] in ("user", "system") or rejected[shared]["role"] in ("user", "system"):
        raise RowError(
            f"the conversations differ before the response, in turn {shared + 1}: not the same prompt"
        )
    return (
        chosen[:shared],
        completion_of(chosen[shared:], "chosen", required=True),
        completion_of(rejected[shared:], "rejected"),
    )


def _shared_text(chosen: str, rejected: str) -> tuple[list[Message], Completion, Completion]:
    """The text two texts begin with is the prompt; a space before the difference belongs to the responses
    (trl.data_utils.extract_prompt)."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise RowError("chosen and rejected are the same text: no preference")
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    if not chosen[:shared].strip():
        raise RowError("chosen and rejected have no common beginning: no prompt to answer")
    return (
        messages_of(chosen[:shared], "prompt"),
        completion_of(chosen[shared:], "chosen", required=True),
        completion_of(rejected[shared:], "rejected"),
    )


FORMAT = row_format(
    "trl", "TRL preference, unpaired, prompt-completion and prompt-only rows", recognises, records
)
