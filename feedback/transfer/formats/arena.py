"""LMSYS and LMArena battles: two conversations with one user, and which of the two models was better.

Files: chatbot_arena_conversations and mt_bench_human_judgments (`conversation_a`, `winner`, `judge`), the 140k human
preferences (contents as parts), and the 55k competition table (`winner_model_a` and its siblings, 0 or 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import Completion, Message, value_excerpt
from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.calls import chat_of, json_value, metadata_retained, text_or_empty
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    completion_of,
    list_of,
    text_of,
    time_of,
)

WINNERS = {
    "model_a": "left",
    "model_b": "right",
    "tie": "tie",
    "both_bad": "both_bad",
    "bothbad": "both_bad",
    "tie (bothbad)": "both_bad",
    "tie(bothbad)": "both_bad",
}

MODEL_JUDGE = re.compile(r"^(gpt|claude|gemini|llama|mistral|llm)", re.I)
"""Name of a judge that is a model, as in the gpt4_pair split of the MT-bench judgments."""


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "conversation_a", "conversation_b", "winner") or has(
        row, "winner_model_a", "winner_model_b", "prompt", "response_a", "response_b"
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    if "winner_model_a" in row and "conversation_a" not in row:
        sides = [_cells(row, side) for side in "ab"]
        preference = _one_hot(row)
    else:
        sides = [chat_of(row.get(f"conversation_{side}"), f"conversation_{side}") for side in "ab"]
        preference = _winner(row.get("winner"))
        turn = row.get("turn")
        if isinstance(turn, int) and not isinstance(turn, bool) and turn > 0:
            sides = [first_turns(side, turn) for side in sides]
    judge = row.get("judge")
    name = " ".join(str(part) for part in judge) if isinstance(judge, list) else text_or_empty(judge)
    created_at = time_of(row.get("tstamp") or row.get("timestamp"), "tstamp")
    prompt, responses = split_turns(*sides)
    if responses[0] == responses[1]:
        yield RowSkipped(line, key, "both responses are the same: no preference")
        return
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=prompt,
            response=response,
            policy=text_or_empty(row.get(f"model_{side}")),
            unit=text_or_empty(row.get("evaluation_session_id")),
            metadata=metadata_retained(language=row.get("language")),
            created_at=created_at,
        )
        for side, response in zip("ab", responses, strict=True)
    )
    yield ImportedComparison(
        line=line,
        key=key,
        left=left,
        right=right,
        preference=preference,
        rater=name,
        rater_kind="simulated" if isinstance(judge, list) or MODEL_JUDGE.match(name) else "human",
        created_at=created_at,
    )


def _winner(value: Any) -> str:
    winner = WINNERS.get(value.strip().lower()) if isinstance(value, str) else None
    if winner is None:
        raise RowError(f"winner: expected one of {', '.join(WINNERS)}; found {value_excerpt(value)}")
    return winner


def _one_hot(row: Mapping[str, Any]) -> str:
    columns = {"winner_model_a": "left", "winner_model_b": "right", "winner_tie": "tie"}
    won = [
        side
        for column, side in columns.items()
        if str(row.get(column)).strip().lower() in ("1", "1.0", "true")
    ]
    if len(won) != 1:
        raise RowError(
            f"winner_model_a, winner_model_b and winner_tie: expected exactly one 1, found {len(won)}"
        )
    return won[0]


def _cells(row: Mapping[str, Any], side: str) -> list[Message]:
    """The turns of one side of the 55k table, whose cells are JSON lists; null is an empty reply."""
    prompts, replies = (list_of(json_value(row.get(name)), name) for name in ("prompt", f"response_{side}"))
    if len(prompts) != len(replies):
        raise RowError(
            f"response_{side}: expected {len(prompts)} replies, one per prompt, found {len(replies)}"
        )
    turns: list[Message] = []
    for index, (question, reply) in enumerate(zip(prompts, replies, strict=True)):
        turns.append({"role": "user", "content": _storable(question, f"prompt[{index}]")})
        turns.append({"role": "assistant", "content": _storable(reply, f"response_{side}[{index}]")})
    return turns


def _storable(value: Any, what: str) -> str:
    """A text whose lone halves of surrogate pairs, which the published table has, are replaced."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{what}: expected a text, found {value_excerpt(value)}")
    return text_of(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), what)


def first_turns(conversation: list[Message], replies: int) -> list[Message]:
    """A conversation up to and with so many replies."""
    count = 0
    for index, message in enumerate(conversation):
        count += message["role"] == "assistant"
        if count == replies:
            return conversation[: index + 1]
    return conversation


def split_turns(
    left: list[Message], right: list[Message]
) -> tuple[list[Message], tuple[Completion, Completion]]:
    """(the turns both conversations begin with, what is left of each)."""
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    if shared == min(len(left), len(right)) and shared:
        # the replies are the same too: the last one is what was judged
        shared = max((i for i, turn in enumerate(left[:shared]) if turn["role"] == "assistant"), default=0)
    if not shared:
        raise RowError("the two conversations do not begin with the same prompt")
    if left[shared]["role"] != "assistant" or right[shared]["role"] != "assistant":
        raise RowError(
            f"the two conversations differ before the response, in turn {shared + 1}: not the same prompt"
        )
    return left[:shared], (
        completion_of(left[shared:], "conversation_a"),
        completion_of(right[shared:], "conversation_b"),
    )


VERDICTS = (
    "winner", "winner_model_a", "winner_model_b", "winner_tie", "evaluation_order", "evaluation_session_id",
)  # fmt: skip
"""Columns of the format that look like a verdict."""

FORMAT = row_format(
    "arena", "LMSYS and LMArena battles, MT-bench human judgments", recognises, records, (), verdicts=VERDICTS
)
