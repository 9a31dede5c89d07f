"""LLaMA-Factory: alpaca and sharegpt rows, ranked pairs, kto verdicts, demonstrations; and content parts (v1).

A `dataset_info.json` (or `*_dataset_info.json`) beside the file that names it says what its columns are called; without
one the names LLaMA-Factory defaults to are expected, and the one column of true and false is the kto verdict.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    Format,
    TaughtPrompt,
    each_row,
    has,
    key_of,
    reasoning_in,
    row_format,
    text_only,
    tools_of,
    verdicts_read,
)
from feedback.transfer.formats.cells import JsonObject, truth_of
from feedback.transfer.formats.columns import REJECTED, is_adverse, is_verdict, verdicts_in
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowLeftOut,
    check_json,
    completion_of,
    list_of,
    mapping_of,
    message_of,
    messages_of,
    number_of,
    system_in,
    text_of,
    with_system,
)
from feedback.transfer.formats.training_files import preference_parts
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    View,
    better_worse,
    each_rating,
    good,
    shape,
    some_words,
    tools_text,
    turns_by_role,
    words,
)

# --- Alpaca and sharegpt ------------------------------------------------------------------------------------

COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
}
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function",
    "system_tag": "system",
}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class Layout:
    """Names of one file's columns and tags, and whether its conversations are lists (sharegpt)."""

    columns: Mapping[str, str]
    tags: Mapping[str, str] = field(default_factory=lambda: TAGS)
    sharegpt: bool = False

    @property
    def roles(self) -> dict[str, str]:
        """The file's word for a speaker -> ours."""
        return {
            self.tags["user_tag"]: "user",
            self.tags["assistant_tag"]: "assistant",
            self.tags["observation_tag"]: "tool",
            self.tags["function_tag"]: "assistant",
            self.tags["system_tag"]: "system",
        }

    def get(self, row: JsonObject, column: str) -> Any:
        name = self.columns.get(column)
        return row.get(name) if name else None

    def said(self, row: JsonObject, taught: TaughtPrompt, response: Completion) -> Record:
        """A verdict where the file has a column of them, else a demonstration. Raises RowError, RowLeftOut."""
        if "kto_tag" in self.columns:
            return taught.judgement(response, self.get(row, "kto_tag"), self.columns["kto_tag"])
        return taught.demonstration(response)


def recognises(row: JsonObject) -> bool:
    verdict = _verdict_column(row)
    verdict = verdict if isinstance(row.get(verdict or ""), bool) else None
    if verdicts_in(row, used=("chosen", "rejected", verdict or "")) or (REJECTED - {"rejected"}) & set(row):
        return False
    if "rejected" in row and "chosen" not in row:
        return False  # the response, or the last turn, is the better one: a table
    if has(row, "conversations"):
        return True
    if isinstance(row.get("messages"), list) and verdict is not None:
        return not {"response", "completion", "output"} & set(row)
    return has(row, "instruction") and (has(row, "chosen", "rejected") or "output" in row)


def names_file(path: Path) -> bool:
    """True if a dataset_info.json beside the file names it."""
    try:
        return _entry(path) is not None
    except FormatRefused:
        return False


def _entry(path: Path) -> JsonObject | None:
    """The entry of a dataset_info.json beside the file that names it."""
    for info in sorted(path.parent.glob("*dataset_info.json")):
        if info == path:
            continue
        try:
            entries = json.loads(info.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise FormatRefused(f"{info}: beside the file to be read, but not JSON: {error}") from error
        for entry in entries.values() if isinstance(entries, dict) else ():
            if isinstance(entry, dict) and entry.get("file_name") == path.name:
                return entry
    return None


def _layout(path: Path) -> Layout | None:
    entry = _entry(path)
    if entry is None:
        return None
    sharegpt = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    tags = OPENAI_TAGS if entry.get("formatting") == "openai" else TAGS
    return Layout(
        # what an entry names is the whole list of its columns, unless it names none
        columns=entry.get("columns") or COLUMNS,
        tags={**tags, **(entry.get("tags") or {})},
        sharegpt=sharegpt,
    )


def _default_layout(row: JsonObject) -> Layout:
    """The default names, for a file nothing describes."""
    columns = dict(COLUMNS)
    if verdict := _verdict_column(row):
        columns["kto_tag"] = verdict
    if "messages" in row and "conversations" not in row:
        columns["messages"] = "messages"
    conversation = row.get(columns["messages"])
    first = conversation[0] if isinstance(conversation, list) and conversation else None
    tags = OPENAI_TAGS if isinstance(first, Mapping) and "role" in first else TAGS
    return Layout(columns, tags, sharegpt=columns["messages"] in row)


def _verdict_column(row: JsonObject) -> str | None:
    """The one column whose values are true and false, and whose name says that it is a verdict."""
    found = [
        key
        for key, value in row.items()
        if isinstance(value, bool) and is_verdict(key, value) and not is_adverse(key)
    ]
    # in a file of which other rows say true or false, 1 and 0 say the same
    found = found or [key for key in ("kto_tag", "label") if truth_of(row.get(key)) is not None]
    return found[0] if len(found) == 1 else None


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    described = _layout(path)

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        text_only(row)
        layout = described or _default_layout(row)
        if described is None:
            verdicts_read(row, used=("chosen", "rejected", layout.columns.get("kto_tag", "")))
        yield from _sharegpt(row, line, layout) if layout.sharegpt else _alpaca(row, line, layout)

    yield from each_row(path, records)


def _alpaca(row: JsonObject, line: int, layout: Layout) -> Iterator[Record]:
    prompt = text_of(layout.get(row, "prompt"), layout.columns.get("prompt", "prompt"))
    if query := layout.get(row, "query"):
        prompt += "\n" + text_of(query, layout.columns["query"])
    if not prompt.strip():
        raise RowError(f"{layout.columns.get('prompt', 'prompt')}: is empty")
    messages = _system(row, layout)
    history = layout.get(row, "history")
    for index, turn in enumerate(list_of(history if history is not None else [], "history")):
        if not isinstance(turn, list) or len(turn) != 2:
            raise RowError(f"history[{index}]: expected [question, answer], found {value_excerpt(turn)}")
        messages.append({"role": "user", "content": text_of(turn[0], f"history[{index}][0]")})
        messages.append({"role": "assistant", "content": text_of(turn[1], f"history[{index}][1]")})
    messages.append({"role": "user", "content": prompt})
    taught = TaughtPrompt(line, key_of(row), messages, tools_of({"tools": layout.get(row, "tools")}))
    chosen, rejected, response = (layout.get(row, name) for name in ("chosen", "rejected", "response"))
    if chosen is not None or rejected is not None:
        better = text_of(chosen, "chosen", required=True)
        yield taught.preference(better, text_of(rejected, "rejected"))
        return
    if response is None or response == "":
        raise RowLeftOut("a prompt without a response is no decision")
    text = text_of(response, layout.columns.get("response", "response"))
    yield layout.said(row, replace(taught, reasoning=reasoning_in(row)), text)


def _sharegpt(row: JsonObject, line: int, layout: Layout) -> Iterator[Record]:
    name = layout.columns.get("messages", "conversations")
    turns = [
        _turn(turn, f"{name}[{index}]", layout)
        for index, turn in enumerate(list_of(layout.get(row, "messages"), name))
    ]
    if not turns:
        raise RowError(f"{name}: expected at least one turn, found none")
    if turns[0]["role"] != "system":
        turns = [*_system(row, layout), *turns]
    taught = TaughtPrompt(line, key_of(row), turns, tools_of({"tools": layout.get(row, "tools")}))
    sides = [layout.get(row, side) for side in ("chosen", "rejected")]
    if any(side is not None for side in sides):
        chosen, rejected = (
            _turn(side, what, layout) for side, what in zip(sides, ("chosen", "rejected"), strict=True)
        )
        better = completion_of([chosen], "chosen", required=True)
        yield taught.preference(better, completion_of([rejected], "rejected"))
        return
    *prompt, last = turns
    if last["role"] != "assistant" or not prompt:
        raise RowLeftOut("the conversation does not end with a response")
    response = completion_of([last], f"{name}[{len(turns) - 1}]", required=True)
    yield layout.said(row, replace(taught, messages=prompt), response)


def _system(row: JsonObject, layout: Layout) -> list[Message]:
    system = layout.get(row, "system") or system_in(row)
    return with_system(system, [], "system")


def _turn(value: object, what: str, layout: Layout) -> Message:
    turn = mapping_of(value, what)
    speaker, content = layout.tags["role_tag"], layout.tags["content_tag"]
    role = turn.get(speaker)
    if not isinstance(role, str) or role not in layout.roles:
        known = ", ".join(layout.roles)
        raise RowError(f"{what}.{speaker}: expected one of {known}; found {value_excerpt(role)}")
    # a turn of the function tag holds the JSON of a call
    named = (
        "function_call" if role == layout.tags["function_tag"] and speaker == "from" else layout.roles[role]
    )
    rest = {key: value for key, value in turn.items() if key not in (speaker, content)}
    return message_of({**rest, "role": named, "content": turn.get(content)}, what)


# --- Writing -----------------------------------------------------------------------------------------------


SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def _conversation(messages: list[Message]) -> list[Line]:
    return [{"from": speaker, "value": text} for speaker, text in turns_by_role(messages, SPEAKERS)]


def _pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    yield {
        "conversations": _conversation(better.messages),
        "chosen": {"from": "gpt", "value": some_words(better.response)},
        "rejected": {"from": "gpt", "value": words(worse.response)},
        **tools_text(better),
    }


def _alpaca_prompt(messages: list[Message]) -> Line:
    """instruction and, where they are needed, system and history: question and answer by turns."""
    turns = turns_by_role(messages, {"system": "system", "user": "user", "assistant": "assistant"})
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    speakers = [speaker for speaker, _ in turns]
    if speakers != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        raise NotSaid("roles")
    texts = [text for _, text in turns]
    if not texts[-1].strip():
        raise NotSaid("empty")
    history = [list(pair) for pair in zip(texts[:-1:2], texts[1::2], strict=True)]
    return {
        "instruction": texts[-1],
        "input": "",
        **({"system": system} if system else {}),
        **({"history": history} if history else {}),
    }


def _alpaca_pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    chosen, rejected = some_words(better.response), words(worse.response)
    yield _alpaca_prompt(better.messages) | {"chosen": chosen, "rejected": rejected}


def _alpaca_answer(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    yield _alpaca_prompt(record.messages) | {"output": some_words(record.response)}


def _labels(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    answer = {"from": "gpt", "value": some_words(record.response)}
    turns = [*_conversation(record.messages), answer]
    tools = tools_text(record)
    return each_rating(
        record, left_out, lambda rating: {"conversations": turns, "kto_tag": good(rating), **tools}
    )


SHAPES = (
    shape("llamafactory", "sharegpt ranking", View.PREFERENCES, _pair, "array"),
    shape("llamafactory-alpaca", "alpaca ranking", View.PREFERENCES, _alpaca_pair, "array"),
    shape("llamafactory-kto", "sharegpt kto: a label for each rating", View.RATED, _labels, "array"),
    shape("llamafactory-sft", "alpaca SFT", View.DEMONSTRATIONS, _alpaca_answer, "array"),
)

LLAMAFACTORY = Format(
    "llamafactory", "LLaMA-Factory alpaca and sharegpt: ranking, kto, SFT", recognises, read, SHAPES
)


# --- Version 1: messages whose content is a list of {type, value} parts, with a loss weight each ------------


def _is_v1(row: JsonObject) -> bool:
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


def _v1(row: JsonObject, line: int) -> Iterator[Record]:
    key, metadata = key_of(row), tools_of(row)
    if (info := row.get("extra_info")) not in (None, ""):
        metadata["extra_info"] = check_json(info, "extra_info")
    if "chosen_messages" in row:
        sides = {side: _v1_messages(row, f"{side}_messages") for side in ("chosen", "rejected")}
        messages, chosen, rejected = preference_parts(sides)
        yield TaughtPrompt(line, key, messages, metadata).preference(chosen, rejected)
        return
    messages = _v1_messages(row, "messages")
    weights = [number_of(message.pop("loss_weight", 1.0), "loss_weight") for message in messages]
    learnt = [
        index
        for index, (message, weight) in enumerate(zip(messages, weights, strict=True))
        if index and weight > 0 and message["role"] == "assistant"
    ]
    if not learnt:
        raise RowLeftOut("no assistant turn of a loss weight above 0 after a prompt")
    last = learnt[-1]
    completion = completion_of([messages[last]], f"messages[{last}]", required=True)
    yield TaughtPrompt(line, key, messages[:last], metadata).demonstration(completion)


def _v1_messages(row: JsonObject, name: str) -> list[Message]:
    """Chat messages whose parts have their words, or the JSON of a call, under `value`. Raises RowError."""
    return messages_of(list_of(row.get(name), name), name)


LLAMAFACTORY_V1 = row_format(
    "llamafactory_v1",
    "LLaMA-Factory v1: pairs and SFT of content parts",
    _is_v1,
    _v1,
    (),
    verdicts=(),
)
