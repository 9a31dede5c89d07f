"""Results of evaluations: promptfoo, DeepEval test runs, OpenAI eval output items.

Scores under names have no stated scale and are outcomes. In promptfoo a person's verdict is the component whose
assertion is of type `human`; `select-best` and `max-score` choose among the outputs of one test: the chosen one is
compared with the others that answered the same prompt, and none is called bad. In DeepEval a metric's direction is its
own (of toxicity less is better): its `success` is the thumb. Its expected output is a demonstration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from feedback.messages import Message
from feedback.transfer.formats.base import TaughtPrompt, each_item, holds, key_of, row_format, rows_in_page
from feedback.transfer.formats.calls import (
    NO_PROMPT,
    answer_of,
    chat_of,
    json_value,
    prompt_of,
    text_or_empty,
)
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import (
    Call,
    NamedScore,
    at,
    facts_at,
    metadata_at,
    notes_of,
    outcome_name,
    outcomes_at,
)
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowLeftOut,
    RowSkipped,
    compared,
    completion_of,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    objects_of,
    text_of,
    time_of,
)

# --- promptfoo ---------------------------------------------------------------------------------------------------

CHOOSING = ("select-best", "max-score")
"""Types of assertions that choose one of several outputs."""

ERROR = 2
"""failureReason of a call that failed: nothing was answered."""

PROMPTFOO_FIELDS = {
    "id": "id",
    "run_id": "id",
    "policy": "type(provider) == 'object' && (provider.label || provider.id) || provider",
    "tokens_in": "response.tokenUsage.prompt",
    "tokens_out": "response.tokenUsage.completion",
    "latency_ms": "latencyMs",
    "created_at": "timestamp",
}


def _is_promptfoo(row: JsonObject) -> bool:
    results = row.get("results")
    if isinstance(results, Mapping) and isinstance(results.get("results"), list):
        return "evalId" in row or "version" in results or "stats" in results
    return _is_promptfoo_result(row)


_is_promptfoo_result = holds("promptIdx testIdx", "gradingResult provider vars")


def _promptfoo(row: JsonObject, line: int) -> Iterator[Record]:
    results = row.get("results")
    if not isinstance(results, Mapping):
        yield from _promptfoo_result(row, line)
        return
    shared = {"evalId": row.get("evalId"), "timestamp": results.get("timestamp")}
    chosen: dict[tuple[str, str], list[tuple[bool, ImportedDecision]]] = {}
    for index, item in enumerate(list_of(results.get("results"), "results.results")):
        one = {**shared, **item} if isinstance(item, Mapping) else item
        for record in each_item(line, [one], f"results.results[{index}]", _promptfoo_result):
            yield record
            if isinstance(record, ImportedDecision):
                for rater, passed in _choices(one.get("gradingResult")):
                    chosen.setdefault((str(one.get("testIdx")), rater), []).append((passed, record))
    for (_, rater), outputs in chosen.items():
        yield from _chosen_over_others(rater, outputs)


def _promptfoo_result(row: JsonObject, line: int) -> Iterator[Record]:
    output = at(row, "response.output")
    if row.get("failureReason") == ERROR or output in (None, ""):
        raise RowLeftOut("no response (error)" if row.get("error") else "no response")
    raw = at(row, "type(prompt) == 'object' && prompt.raw || prompt")
    if not raw or isinstance(raw, Mapping):
        raise RowLeftOut(NO_PROMPT)
    prompt = json_value(raw)
    is_text = isinstance(output, str) and bool(text_of(output, "response.output"))
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        messages=prompt_of(raw if isinstance(prompt, (str, int, float)) else prompt, "prompt.raw"),
        response=output if is_text else answer_of(output, "response.output"),
        **facts_at(row, PROMPTFOO_FIELDS),
        metadata=metadata_at(row, {"eval_id": "evalId", "test": "testIdx", "vars": "vars"}),
        ratings=tuple(_promptfoo_ratings(row.get("gradingResult"))),
        outcomes=tuple(outcomes_at(row, "namedScores")),
    )


def _choices(grading: object) -> Iterator[tuple[str, bool]]:
    """(rater, whether this output was chosen) of each assertion that chooses among the outputs of a test."""
    for part in at(grading, "componentResults[?assertion]") or []:
        kind, value = (text_or_empty(at(part, f"assertion.{name}")) for name in ("type", "value"))
        if kind in CHOOSING and isinstance(part.get("pass"), bool):
            yield (f"{kind}: {value}" if value else kind)[:200], part["pass"]


def _chosen_over_others(rater: str, outputs: list[tuple[bool, ImportedDecision]]) -> Iterator[Record]:
    """The output that was chosen beside each other one to the same prompt."""
    best = [decision for passed, decision in outputs if passed]
    if len(best) != 1:
        return
    for passed, other in outputs:
        if not passed and other.messages == best[0].messages and other.response != best[0].response:
            yield compared(best[0], other, "left", simulated=True, ordered=False, rater=rater)


def _promptfoo_ratings(grading: object) -> Iterator[ImportedRating]:
    """A rating for each component; where there are none, one for the whole."""
    if not isinstance(grading, Mapping):
        return
    components = list_of(grading.get("componentResults") or [], "componentResults")
    names: Counter[str] = Counter()
    for index, item in enumerate(components or [grading]):
        part = mapping_of(item, f"componentResults[{index}]")
        kind = text_or_empty(at(part, "assertion.type")) or "assertions"
        value = text_or_empty(at(part, "assertion.metric")) or text_or_empty(at(part, "assertion.value"))
        human = kind == "human"
        name = kind if human or not value else f"{kind}: {value}"
        names[name] += 1
        if not isinstance(part.get("pass"), bool) or kind in CHOOSING:
            continue
        yield ImportedRating(
            rater=(name if names[name] == 1 else f"{name[:190]} #{names[name]}")[:200],
            rater_kind="human" if human else "simulated",
            thumb="up" if part["pass"] else "down",
            tags=(kind[:100],),
            notes=notes_of(part.get("comment" if human else "reason"), "reason"),
        )


PROMPTFOO = row_format("promptfoo", "promptfoo results", _is_promptfoo, _promptfoo, verdicts=())

# --- DeepEval ----------------------------------------------------------------------------------------------------

CASES = ("testCases", "conversationalTestCases")
DEEPEVAL_METADATA = {"context": "context", "retrieval_context": "retrievalContext", "scenario": "scenario"}
_is_deepeval_case = holds("input actualOutput", "turns metricsData")


def _run(row: JsonObject) -> JsonObject:
    """The test run; the latest one that deepeval keeps stands in an object of its own."""
    inside = row.get("testRunData")
    return inside if isinstance(inside, Mapping) else row


def _is_deepeval(row: JsonObject) -> bool:
    return any(isinstance(_run(row).get(name), list) for name in CASES) or _is_deepeval_case(row)


def _deepeval(row: JsonObject, line: int) -> Iterator[Record]:
    row = _run(row)
    cases = [name for name in CASES if name in row]
    for name in cases:
        yield from each_item(line, row[name] or [], name, _case)
    if not cases:
        yield from _case(row, line)


def _case(case: JsonObject, line: int) -> Iterator[Record]:
    key = text_or_empty(case.get("name")) or key_of(case)
    metadata = metadata_at(case, DEEPEVAL_METADATA)
    messages, response = _exchange(case)
    if response:
        metrics = objects_of(case.get("metricsData") or [], "metricsData")
        said = [_metric(metric, f"metricsData[{index}]") for index, metric in enumerate(metrics)]
        yield ImportedDecision(
            line=line,
            key=key,
            messages=messages,
            response=response,
            metadata=metadata,
            ratings=tuple(rating for rating, _ in said if rating is not None),
            outcomes=tuple(outcome for _, outcome in said if outcome is not None),
        )
    else:
        yield RowSkipped(line, key, "no response")
    expected = case.get("expectedOutput")
    if messages and isinstance(expected, str) and expected.strip() and expected != response:
        yield TaughtPrompt(line, key, messages, metadata).demonstration(text_of(expected, "expectedOutput"))


def _exchange(case: JsonObject) -> tuple[list[Message], Any]:
    """Prompt and response: of a conversation its last answer, which the metrics are about."""
    if "turns" not in case:
        output = case.get("actualOutput", case.get("actual_output"))
        messages = messages_of(text_of(case.get("input"), "input"), "input")
        return messages, "" if output is None else text_of(output, "actualOutput")
    turns = case["turns"]
    if isinstance(turns, list) and all(isinstance(at(turn, "order"), int) for turn in turns):
        turns = sorted(turns, key=lambda turn: turn["order"])
    spoken = chat_of(turns, "turns")
    last = max((place for place, turn in enumerate(spoken) if turn["role"] == "assistant"), default=0)
    return spoken[:last], completion_of([spoken[last]], "turns", required=True) if last else ""


def _metric(metric: JsonObject, what: str) -> tuple[ImportedRating | None, ImportedOutcome | None]:
    name = text_of(metric.get("name"), f"{what}.name", required=True)
    success, score = metric.get("success"), metric.get("score")
    judge = text_or_empty(metric.get("evaluationModel"))
    rating = None
    if isinstance(success, bool) and not metric.get("error"):
        rating = ImportedRating(
            rater=(f"{judge}: {name}" if judge else name)[:200],
            rater_kind="simulated",
            thumb="up" if success else "down",
            tags=(name[:100],),
            notes=notes_of(metric.get("reason"), f"{what}.reason"),
        )
    if score is None:
        return rating, None
    return rating, ImportedOutcome(outcome_name(name), number_of(score, f"{what}.score"))


DEEPEVAL = row_format(
    "deepeval",
    "DeepEval test runs",
    _is_deepeval,
    _deepeval,
    verdicts=("evaluationCost", "metricsScores"),
)

# --- OpenAI evals: a sampled response to an item of a data source, and what each grader said of it ---------------

ITEM = "eval.run.output_item"

_sample = Call(
    request="{messages: sample.input}",
    answer="sample.output",
    own="id",
    fields={
        "policy": "sample.model",
        "tokens_in": "sample.usage.prompt_tokens",
        "tokens_out": "sample.usage.completion_tokens",
        "created_at": "created_at",
    },
    metadata={"eval_id": "eval_id", "eval_run_id": "run_id", "datasource_item": "datasource_item"},
    left_out={
        "!(sample.output) && sample.error": "no response (error)",
        "sample && !(sample.output)": "no response",
    },
)


def _openai_evals(row: JsonObject, line: int) -> Iterator[Record]:
    mapping_of(row.get("sample"), "sample")
    results = objects_of(row.get("results") or [], "results")
    grades = [_grade(result, f"results[{index}]") for index, result in enumerate(results)]
    given = time_of(row.get("created_at"), "created_at")
    ratings = tuple(replace(rating, created_at=given) for rating, _ in grades if rating is not None)
    outcomes = tuple(replace(outcome, at=given) for _, outcome in grades if outcome is not None)
    yield _sample.decision(row, line, ratings=ratings, outcomes=outcomes)


def _grade(result: JsonObject, what: str) -> tuple[ImportedRating | None, ImportedOutcome | None]:
    """A grader's verdict; its score beside it where it is in [0, 1], else as an outcome: each grader has its range."""
    name = text_of(at(result, "name || type || 'grader'"), f"{what}.name", required=True)
    score, passed = result.get("score"), result.get("passed")
    rating, outcome = NamedScore(name, passed if passed is not None else score, simulated=True).facts()
    if passed is None or isinstance(score, bool) or not isinstance(score, (int, float)):
        return rating, outcome
    if rating is not None and rating.thumb and 0 <= score <= 1:
        return replace(rating, score=float(score)), outcome
    _, outcome = NamedScore(name, score, binary=False).facts()
    return rating, outcome or ImportedOutcome(outcome_name(name), float(score))


OPENAI_EVALS = row_format(
    "openai_evals",
    "OpenAI eval output items",
    lambda row: any(item.get("object") == ITEM for item in rows_in_page(row)),
    _openai_evals,
    verdicts=(),
    pages=True,
)
