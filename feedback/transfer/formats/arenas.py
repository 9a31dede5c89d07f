"""LMSYS and LMArena battles, and MT-bench judgments: two conversations with one user, and which model was better.

Files: chatbot_arena_conversations and mt_bench_human_judgments (`conversation_a`, `winner`, `judge`), the 140k human
preferences (contents as parts), the 55k competition table (`winner_model_a` and its siblings, 0 or 1), and FastChat's
judgments by a model, of pairs and of single answers, whose texts stand in a second file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, each_row, holds, key_of, objects_in, row_format
from feedback.transfer.formats.calls import chat_of, json_value, text_or_empty
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import at, metadata_at, notes_of, sides_of
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowLeftOut,
    compared,
    completion_of,
    list_of,
    number_of,
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
ONE_HOT = {"winner_model_a": "left", "winner_model_b": "right", "winner_tie": "tie"}

MODEL_JUDGE = re.compile(r"^(gpt|claude|gemini|llama|mistral|llm)", re.I)
"""Name of a judge that is a model, as in the gpt4_pair split of the MT-bench judgments."""


def _arena(row: JsonObject, line: int) -> Iterator[Record]:
    if "winner_model_a" in row and "conversation_a" not in row:
        conversations, preference = [_cells(row, side) for side in "ab"], _one_hot(row)
    else:
        names = ("conversation_a", "conversation_b")
        conversations, preference = (
            [chat_of(row.get(name), name) for name in names],
            _winner(row.get("winner")),
        )
        turn = row.get("turn")
        if isinstance(turn, int) and not isinstance(turn, bool) and turn > 0:
            conversations = [_first_turns(conversation, turn) for conversation in conversations]
    judge = row.get("judge")
    name = " ".join(str(part) for part in judge) if isinstance(judge, list) else text_or_empty(judge)
    created_at = time_of(at(row, "tstamp || timestamp"), "tstamp")
    prompt, responses = split_turns(*conversations)
    sides = sides_of(
        row,
        line,
        prompt,
        responses,
        [text_or_empty(row.get(f"model_{side}")) for side in "ab"],
        unit=text_or_empty(row.get("evaluation_session_id")),
        metadata=metadata_at(row, {"language": "language"}),
        created_at=created_at,
    )
    by_model = isinstance(judge, list) or MODEL_JUDGE.match(name) is not None
    yield compared(*sides, preference, simulated=by_model, rater=name, created_at=created_at)


def _winner(value: object) -> str:
    winner = WINNERS.get(value.strip().lower()) if isinstance(value, str) else None
    if winner is None:
        raise RowError(f"winner: expected one of {', '.join(WINNERS)}; found {value_excerpt(value)}")
    return winner


def _one_hot(row: JsonObject) -> str:
    yes = ("1", "1.0", "true")
    won = [side for name, side in ONE_HOT.items() if str(row.get(name)).strip().lower() in yes]
    if len(won) != 1:
        raise RowError(f"{', '.join(ONE_HOT)}: expected exactly one 1, found {len(won)}")
    return won[0]


def _cells(row: JsonObject, side: str) -> list[Message]:
    """The turns of one side of the 55k table, whose cells are JSON lists; null is an empty reply."""
    prompts, replies = (list_of(json_value(row.get(name)), name) for name in ("prompt", f"response_{side}"))
    if len(prompts) != len(replies):
        raise RowError(
            f"response_{side}: expected {len(prompts)} replies, one per prompt, found {len(replies)}"
        )
    return [
        {"role": role, "content": _storable(text, f"{role}[{index}]")}
        for index, exchange in enumerate(zip(prompts, replies, strict=True))
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]


def _storable(value: object, what: str) -> str:
    """A text whose lone halves of surrogate pairs, which the published table has, are replaced."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{what}: expected a text, found {value_excerpt(value)}")
    return text_of(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), what)


def _first_turns(conversation: list[Message], replies: int) -> list[Message]:
    """A conversation up to and with so many replies."""
    spoken = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    return conversation[: spoken[replies - 1] + 1] if len(spoken) >= replies else conversation


def split_turns(
    left: list[Message], right: list[Message]
) -> tuple[list[Message], tuple[Completion, Completion]]:
    """(the turns both conversations begin with, what is left of each)."""
    shorter = min(len(left), len(right))
    shared = next((n for n in range(shorter) if left[n] != right[n]), shorter)
    if shared == shorter and shared:
        # the replies are the same too: the last one is what was judged
        shared = max((i for i, turn in enumerate(left[:shared]) if turn["role"] == "assistant"), default=0)
    if not shared:
        raise RowError("the two conversations do not begin with the same prompt")
    if left[shared]["role"] != "assistant" or right[shared]["role"] != "assistant":
        raise RowError(
            f"the two conversations differ before the response, in turn {shared + 1}: not the same prompt"
        )
    answers = completion_of(left[shared:], "conversation_a"), completion_of(right[shared:], "conversation_b")
    return left[:shared], answers


ARENA = row_format(
    "arena",
    "LMSYS and LMArena battles, MT-bench human judgments",
    holds(
        "conversation_a conversation_b winner", "winner_model_a winner_model_b prompt response_a response_b"
    ),
    _arena,
    verdicts=("winner", *ONE_HOT, "evaluation_order", "evaluation_session_id"),
)

# --- MT-bench judgments ------------------------------------------------------------------------------------------

JUDGED = {"model_1": "left", "model_2": "right", "tie": "tie"}
UNREADABLE = "the judge's words could not be read"


def _read_mtbench(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    """The second file holds the model answers and the questions of FastChat (`model_id`, `choices`; `question_id`,
    `turns`), one after the other."""
    texts = DiskMultimap()
    for row, _ in objects_in(ratings_path):
        if "model_id" in row and at(row, "choices[0]"):
            texts.add(f"{row.get('question_id')} {row['model_id']}", at(row, "choices[0].turns"))
        elif "turns" in row:
            texts.add(f"{row.get('question_id')}", row["turns"])

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        if ratings_path is None:
            raise RowError(
                "a judgment without the texts it is about: bring the model answers and the questions (question.jsonl "
                "and model_answer/*.jsonl one after the other in one file) as --ratings-file"
            )
        return _mtbench_pair(row, line, texts) if "g1_winner" in row else _mtbench_single(row, line, texts)

    return each_row(path, records)


def _conversation(row: JsonObject, model: object, texts: DiskMultimap) -> list[Message]:
    """Questions and answers up to the turn that was judged."""
    number, turn = row.get("question_id"), row.get("turn")
    if isinstance(turn, bool) or not isinstance(turn, int) or turn < 1:
        raise RowError(f"turn: expected 1 or 2, found {value_excerpt(turn)}")
    named = {"user": f"question {number}", "assistant": f"the answer of {model} to question {number}"}
    said = {"user": texts.last(f"{number}"), "assistant": texts.last(f"{number} {model}")}
    for role, value in said.items():
        if not isinstance(value, list) or len(value) < turn:
            raise RowError(f"{named[role]}, turn {turn}: not in the file of answers")
    return [
        {"role": role, "content": text_of(said[role][index], named[role])}
        for index in range(turn)
        for role in said
    ]


def _judge(row: JsonObject) -> str:
    judge = row.get("judge")
    parts = judge if isinstance(judge, list) else [text_of(judge, "judge")]
    return ": ".join(str(part) for part in parts)[:200]


def _mtbench_pair(row: JsonObject, line: int, texts: DiskMultimap) -> Iterator[Record]:
    """FastChat's own rule: a pair is judged in both orders, and where the two disagree it is a tie."""
    winners = [row.get(name) for name in ("g1_winner", "g2_winner")]
    if any(winner not in JUDGED for winner in winners):
        raise RowLeftOut(UNREADABLE)
    models = [text_of(row.get(name), name, required=True) for name in ("model_1", "model_2")]
    prompt, responses = split_turns(*(_conversation(row, model, texts) for model in models))
    created_at = time_of(row.get("tstamp"), "tstamp")
    policies = [model[:200] for model in models]
    sides = sides_of(row, line, prompt, responses, policies, created_at=created_at)
    preference = JUDGED[str(winners[0])] if winners[0] == winners[1] else "tie"
    notes = notes_of(row.get("g1_judgment"), "g1_judgment")
    yield compared(*sides, preference, simulated=True, rater=_judge(row), notes=notes, created_at=created_at)


def _mtbench_single(row: JsonObject, line: int, texts: DiskMultimap) -> Iterator[Record]:
    score = number_of(row.get("score"), "score")
    if score == -1:
        raise RowLeftOut(UNREADABLE)
    if not 1 <= score <= 10:
        raise RowError(f"score: expected 1 to 10, found {value_excerpt(row.get('score'))}")
    model = text_of(row.get("model"), "model", required=True)
    *prompt, answer = _conversation(row, model, texts)
    created_at = time_of(row.get("tstamp"), "tstamp")
    rating = ImportedRating(
        rater=_judge(row),
        rater_kind="simulated",
        score=(score - 1) / 9,
        notes=notes_of(row.get("judgment"), "judgment"),
        created_at=created_at,
    )
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        messages=prompt,
        response=completion_of([answer], "answer", required=True),
        policy=model[:200],
        created_at=created_at,
        ratings=(rating,),
    )


MTBENCH = Format(
    "mtbench",
    "MT-bench judgments with their answers",
    holds("g1_winner g2_winner", "question_id judge model score turn"),
    _read_mtbench,
    two_files=True,
)
