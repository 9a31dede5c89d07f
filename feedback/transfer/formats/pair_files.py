"""Files of pairs that are read and written: Anthropic hh-rlhf, OpenAssistant trees, PandaLM's test set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, groupby

from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import TaughtPrompt, has, key_of, row_format
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    compared,
    list_of,
    mapping_of,
    system_in,
    text_of,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    better_worse,
    pair_ids,
    question,
    shape,
    sides,
    some_words,
    turns_by_role,
    words,
)

# --- Anthropic hh-rlhf: `chosen` and `rejected`, each one text of turns marked Human and Assistant ----------

TURN = re.compile(r"\n\n(Human|Assistant):")
LAST = "\n\nAssistant:"
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def _is_hh(row: JsonObject) -> bool:
    return has(row, "chosen", "rejected") and all(
        isinstance(row[key], str) and row[key].startswith("\n\nHuman:") and LAST in row[key]
        for key in ("chosen", "rejected")
    )


def _hh(row: JsonObject, line: int) -> Iterator[Record]:
    prompt, chosen = _split(row.get("chosen"), "chosen")
    other_prompt, rejected = _split(row.get("rejected"), "rejected")
    if not chosen:
        raise RowError("chosen: is empty after the last Assistant turn")
    if prompt != other_prompt:
        raise RowError(
            "the conversations differ before the last Assistant turn: not two responses to the same prompt"
        )
    messages = with_system(system_in(row), turns_of_text(prompt), "chosen")
    yield TaughtPrompt(line, key_of(row), messages).preference(chosen, rejected)


def _split(value: object, what: str) -> tuple[str, str]:
    """Everything up to the last Assistant turn, and what stands in it."""
    text = text_of(value, what)
    prompt, found, response = text.rpartition(LAST)
    if not found:
        raise RowError(f"{what}: expected a turn that starts with a blank line and 'Assistant:', found none")
    return prompt, response.strip()


def turns_of_text(prompt: str) -> list[Message]:
    """The turns of a text in which each starts with a blank line and Human: or Assistant:. Raises RowError."""
    before, *parts = TURN.split(prompt)
    if before.strip() or not parts:
        raise RowError("expected the conversation to start with a blank line and 'Human:'")
    turns: list[Message] = []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        role = SPEAKERS[speaker]
        if turns and turns[-1]["role"] == role:
            # many chat templates refuse two turns of one speaker
            turns[-1]["content"] += "\n\n" + text.strip()
        else:
            turns.append({"role": role, "content": text.strip()})
    return turns


# --- Writing -----------------------------------------------------------------------------------------------


def _hh_line(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    chosen, rejected = some_words(better.response).strip(), words(worse.response).strip()
    if chosen == rejected:
        raise NotSaid("same_response")
    turns = turns_by_role(better.messages, {role: speaker for speaker, role in SPEAKERS.items()})
    if not turns or turns[0][0] != "Human":
        raise NotSaid("roles")
    if any(TURN.search(f"\n\n{text}") for text in (chosen, rejected, *(text for _, text in turns))):
        raise NotSaid("marker")
    prompt = "".join(f"\n\n{speaker}: {text}" for speaker, text in turns)
    yield {"chosen": f"{prompt}{LAST} {chosen}", "rejected": f"{prompt}{LAST} {rejected}"}


HH_SHAPES = (shape("hh", "chosen and rejected conversations", View.PREFERENCES, _hh_line),)

HH = row_format("hh", "Anthropic hh-rlhf", _is_hh, _hh, HH_SHAPES, verdicts=("chosen", "rejected"))


# --- OpenAssistant: replies to one prompt, ranked; rank 0 is the best ---------------------------------------

PROMPTERS = {"prompter": "user", "assistant": "assistant"}


def _is_oasst(row: JsonObject) -> bool:
    return "message_tree_id" in row and isinstance(row.get("prompt"), Mapping)


def _oasst(row: JsonObject, line: int) -> Iterator[Record]:
    root = mapping_of(row.get("prompt"), "prompt")
    any_record = False
    # depth first with a stack of our own: a long conversation must not exhaust Python's
    waiting: list[tuple[JsonObject, list[Message]]] = [(root, [])]
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
    replies: list[JsonObject], messages: list[Message], line: int
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
        yield compared(better, worse, "tie" if best == rank else "left", ordered=False)


def _rank(node: JsonObject) -> int | None:
    rank = node.get("rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise RowError(f"rank: expected a whole number, found {value_excerpt(rank)}")
    return rank


def _message(node: JsonObject) -> Message:
    role = PROMPTERS.get(str(node.get("role")))
    if role is None:
        raise RowError(f"role: expected prompter or assistant, found {value_excerpt(node.get('role'))}")
    return {"role": role, "content": text_of(node.get("text"), "text")}


# --- Writing -----------------------------------------------------------------------------------------------


MAX_NESTED = 200
"""Most turns of a tree: JSON readers, Python's among them, refuse a few hundred levels more."""
_PROMPTER_OF = {role: speaker for speaker, role in PROMPTERS.items()}


def _tree(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    """A tree for each comparison: the prompt, turn below turn, and at its end the two replies with their ranks."""
    left, right = sides(record)
    if record.preference == "both_bad":
        raise NotSaid("both_bad")
    if left.response == right.response:
        raise NotSaid("same_response")
    own = record.id or record.key
    turns = turns_by_role(left.messages, _PROMPTER_OF)
    if not turns:
        raise NotSaid("empty")
    if len(turns) > MAX_NESTED:
        raise NotSaid("too_long")
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


OASST_SHAPES = (shape("oasst", "a tree for each comparison", View.PREFERENCES, _tree),)

OASST = row_format(
    "oasst", "OpenAssistant trees of ranked replies", _is_oasst, _oasst, OASST_SHAPES, verdicts=()
)


# --- PandaLM: two answers to an instruction, judged by three annotators -------------------------------------

ANNOTATED = {0: "tie", 1: "left", 2: "right"}


def _is_pandalm(row: JsonObject) -> bool:
    return has(row, "instruction", "response1", "response2", "annotator1")


def _pandalm(row: JsonObject, line: int) -> Iterator[Record]:
    parts = [text_of(row.get(name) or "", name) for name in ("instruction", "input")]
    prompt = "\n".join(part for part in parts if part)
    if not prompt.strip():
        raise RowError("instruction and input are empty: no prompt to answer")
    key = key_of(row)
    # two pairs of models may answer in the same words: whose answers they are keeps their votes apart
    pair = text_of(row.get("cmp_key") or "", "cmp_key")
    models = pair.split("_") if pair.count("_") == 1 else ["", ""]
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=with_system(system_in(row), [{"role": "user", "content": prompt}], "instruction"),
            response=text_of(row.get(side), side),
            policy=model,
            event=pair if pair and not any(models) else None,
        )
        for side, model in zip(("response1", "response2"), models, strict=True)
    )
    for annotator in (name for name in row if name.startswith("annotator")):
        verdict = row[annotator]
        if isinstance(verdict, bool) or not isinstance(verdict, int) or verdict not in ANNOTATED:
            raise RowError(f"{annotator}: expected 0, 1 or 2, found {value_excerpt(verdict)}")
        yield compared(left, right, ANNOTATED[verdict], rater=annotator)


# --- Writing -----------------------------------------------------------------------------------------------


NUMBERS = {verdict: number for number, verdict in ANNOTATED.items()}


def _pandalm_lines(records: Iterable[ImportedComparison], left_out: Counter[str]) -> Iterator[Line]:
    """A row for each pair, with an annotator for each of its comparisons."""

    number = 0
    for _, same in groupby(records, pair_ids):
        verdicts: list[int] = []
        for record in same:
            left, right = sides(record)
            if record.preference in NUMBERS:
                verdicts.append(NUMBERS[record.preference])
            else:
                left_out[record.preference] += 1
        try:
            row = {
                "idx": number,
                "cmp_key": f"{left.policy}_{right.policy}",
                "instruction": question(left.messages),
                "input": "",
                "response1": words(left.response),
                "response2": words(right.response),
            }
        except NotSaid as reason:
            left_out[str(reason)] += len(verdicts)
            continue
        if verdicts:
            yield row | {f"annotator{n}": verdict for n, verdict in enumerate(verdicts, start=1)}
            number += 1


PANDALM_SHAPES = (
    RowShape("pandalm", "pairs with their annotators", (View.COMPARISONS,), _pandalm_lines, "array"),
)

PANDALM = row_format(
    "pandalm", "PandaLM pairs with three annotators", _is_pandalm, _pandalm, PANDALM_SHAPES, verdicts=()
)
