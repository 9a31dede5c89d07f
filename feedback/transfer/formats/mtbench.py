"""MT-bench judgments by a model, of pairs and of single answers. They hold no texts: the second file does.

The second file holds the model answers and the questions of FastChat (`model_id`, `choices`; `question_id`, `turns`),
one after the other. FastChat's own rule: a pair is judged in both orders, and where the two disagree it is a tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.arena import split_turns
from feedback.transfer.formats.base import Format, each_row, has, key_of
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowRefused,
    RowSkipped,
    completion_of,
    number_of,
    text_of,
    time_of,
)

WINNERS = {"model_1": "left", "model_2": "right", "tie": "tie"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "g1_winner", "g2_winner") or has(row, "question_id", "judge", "model", "score", "turn")


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    texts = DiskMultimap()
    for item in rows(ratings_path) if ratings_path else ():
        row = {} if isinstance(item, RowRefused) or not isinstance(item.value, Mapping) else item.value
        if "model_id" in row and isinstance(row.get("choices"), list) and row["choices"]:
            choice = row["choices"][0]
            texts.add(
                f"{row.get('question_id')} {row['model_id']}",
                choice.get("turns") if isinstance(choice, Mapping) else None,
            )
        elif "turns" in row:
            texts.add(f"{row.get('question_id')}", row["turns"])

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        if ratings_path is None:
            raise RowError(
                "a judgment without the texts it is about: bring the model answers and the questions (question.jsonl "
                "and model_answer/*.jsonl one after the other in one file) as --ratings-file"
            )
        return _pair(row, line, texts) if "g1_winner" in row else _single(row, line, texts)

    return each_row(path, records)


def _conversation(row: Mapping[str, Any], model: Any, texts: DiskMultimap) -> list[Message]:
    """Questions and answers up to the turn that was judged."""
    number, turn = row.get("question_id"), row.get("turn")
    if isinstance(turn, bool) or not isinstance(turn, int) or turn < 1:
        raise RowError(f"turn: expected 1 or 2, found {value_excerpt(turn)}")
    question, answers = texts.last(f"{number}"), texts.last(f"{number} {model}")
    for what, value in (
        (f"question {number}", question),
        (f"the answer of {model} to question {number}", answers),
    ):
        if not isinstance(value, list) or len(value) < turn:
            raise RowError(f"{what}, turn {turn}: not in the file of answers")
    turns: list[Message] = []
    for index in range(turn):
        turns.append({"role": "user", "content": text_of(question[index], f"question {number}")})
        turns.append({"role": "assistant", "content": text_of(answers[index], f"answer {number}")})
    return turns


def _judge(row: Mapping[str, Any]) -> str:
    judge = row.get("judge")
    return (
        ": ".join(str(part) for part in judge)[:200] if isinstance(judge, list) else text_of(judge, "judge")
    )


def _pair(row: Mapping[str, Any], line: int, texts: DiskMultimap) -> Iterator[Record]:
    key = key_of(row)
    winners = [row.get(name) for name in ("g1_winner", "g2_winner")]
    if any(winner not in WINNERS for winner in winners):
        yield RowSkipped(line, key, "the judge's words could not be read")
        return
    models = [text_of(row.get(name), name, required=True) for name in ("model_1", "model_2")]
    prompt, responses = split_turns(*(_conversation(row, model, texts) for model in models))
    if responses[0] == responses[1]:
        yield RowSkipped(line, key, "both responses are the same: no preference")
        return
    created_at = time_of(row.get("tstamp"), "tstamp")
    left, right = (
        ImportedDecision(
            line=line, key=key, messages=prompt, response=response, policy=model[:200], created_at=created_at
        )
        for model, response in zip(models, responses, strict=True)
    )
    yield ImportedComparison(
        line=line,
        key=key,
        left=left,
        right=right,
        preference=WINNERS[str(winners[0])] if winners[0] == winners[1] else "tie",
        rater=_judge(row),
        rater_kind="simulated",
        notes=text_of(row.get("g1_judgment") or "", "g1_judgment")[:20_000],
        created_at=created_at,
    )


def _single(row: Mapping[str, Any], line: int, texts: DiskMultimap) -> Iterator[Record]:
    key, score = key_of(row), number_of(row.get("score"), "score")
    if score == -1:
        yield RowSkipped(line, key, "the judge's words could not be read")
        return
    if not 1 <= score <= 10:
        raise RowError(f"score: expected 1 to 10, found {value_excerpt(row.get('score'))}")
    model = text_of(row.get("model"), "model", required=True)
    *prompt, answer = _conversation(row, model, texts)
    created_at = time_of(row.get("tstamp"), "tstamp")
    rating = ImportedRating(
        rater=_judge(row),
        rater_kind="simulated",
        score=(score - 1) / 9,
        notes=text_of(row.get("judgment") or "", "judgment")[:20_000],
        created_at=created_at,
    )
    yield ImportedDecision(
        line=line,
        key=key,
        messages=prompt,
        response=completion_of([answer], "answer", required=True),
        policy=model[:200],
        created_at=created_at,
        ratings=(rating,),
    )


FORMAT = Format("mtbench", "MT-bench judgments with their answers", recognises, read, (), two_files=True)
