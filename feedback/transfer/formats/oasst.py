"""OpenAssistant conversation trees: replies to one prompt, ranked; rank 0 is the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import key_of, row_format
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    list_of,
    mapping_of,
    text_of,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    sides,
    turns_by_role,
    words,
    writer_by_record,
)

ROLES = {"prompter": "user", "assistant": "assistant"}


def recognises(row: Mapping[str, Any]) -> bool:
    return "message_tree_id" in row and isinstance(row.get("prompt"), Mapping)


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    root = mapping_of(row.get("prompt"), "prompt")
    any_record = False
    # depth first with a stack of our own: a long conversation must not exhaust Python's
    waiting: list[tuple[Mapping[str, Any], list[Message]]] = [(root, [])]
    while waiting:
        node, before = waiting.pop()
        messages = [*before, _message(node)]
        replies = [mapping_of(reply, "replies") for reply in list_of(node.get("replies") or [], "replies")]
        replies = [reply for reply in replies if not reply.get("deleted")]
        for comparison in _comparisons_by_rank(replies, messages, line):
            any_record = True
            yield comparison
        waiting += [(reply, messages) for reply in reversed(replies)]
    if not any_record:
        yield RowSkipped(line, key_of(row), "no two ranked replies to one prompt")


def _comparisons_by_rank(
    replies: list[Mapping[str, Any]], messages: list[Message], line: int
) -> Iterator[ImportedComparison]:
    """The better over the worse of each two ranked replies."""
    replies_by_rank = sorted(
        (r for r in replies if _rank(r) is not None), key=lambda r: (_rank(r), str(r.get("message_id")))
    )
    decisions = [
        (
            ImportedDecision(
                line=line,
                key=str(reply.get("message_id") or ""),
                messages=messages,
                response=_message(reply)["content"],
                metadata={"message_id": str(reply.get("message_id") or "")},
            ),
            _rank(reply),
        )
        for reply in replies_by_rank
    ]
    for (better, best), (worse, rank) in combinations(decisions, 2):
        yield ImportedComparison(
            line=line,
            key=better.key,
            left=better,
            right=worse,
            preference="tie" if best == rank else "left",
            ordered=False,
        )


def _rank(node: Mapping[str, Any]) -> int | None:
    rank = node.get("rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise RowError(f"rank: expected a whole number, found {value_excerpt(rank)}")
    return rank


def _message(node: Mapping[str, Any]) -> Message:
    role = ROLES.get(str(node.get("role")))
    if role is None:
        raise RowError(f"role: expected prompter or assistant, found {value_excerpt(node.get('role'))}")
    return {"role": role, "content": text_of(node.get("text"), "text")}


# --- Writing -----------------------------------------------------------------------------------------------


SPEAKERS = {role: speaker for speaker, role in ROLES.items()}


def _tree(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    """A tree for each comparison: the prompt, turn below turn, and at its end the two replies with their ranks."""
    left, right = sides(record)
    if record.preference == "both_bad":
        raise NotSaid("both_bad")
    if left.response == right.response:
        raise NotSaid("same_response")
    own = record.id or record.key
    turns = turns_by_role(left.messages, SPEAKERS)
    if not turns:
        raise NotSaid("empty")
    ranks = {"left": (0, 1), "right": (1, 0), "tie": (0, 0)}[record.preference]
    replies = [
        _node(f"{own}-{side}", "assistant", words(message.response), rank=rank)
        for side, message, rank in zip(("left", "right"), (left, right), ranks, strict=True)
    ]
    for number in range(len(turns) - 1, -1, -1):
        replies = [_node(f"{own}-{number}", *turns[number], replies=replies)]
    yield {
        "message_tree_id": replies[0]["message_id"],
        "tree_state": "ready_for_export",
        "prompt": replies[0],
    }


def _node(
    own: str, role: str, text: str, *, rank: int | None = None, replies: list[Line] | None = None
) -> Line:
    ranked = {} if rank is None else {"rank": rank}
    return {
        "message_id": own,
        "text": text,
        "role": role,
        "deleted": False,
        **ranked,
        "replies": replies or [],
    }


SHAPES = (RowShape("oasst", "a tree for each comparison", (View.PREFERENCES,), writer_by_record(_tree)),)

FORMAT = row_format(
    "oasst", "OpenAssistant trees of ranked replies", recognises, records, SHAPES, verdicts=()
)
