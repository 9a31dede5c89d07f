"""promptfoo results: a rendered prompt, a provider's output, and what each assertion said of it.

A person's verdict is the component whose assertion is of type `human`; all other components are graded by a program
or a model. Scores under names have no stated scale and are outcomes. `select-best` and `max-score` choose among the
outputs of one test: the chosen one is compared with the others that answered the same prompt, and none is called bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import each_item, has, key_of, row_format
from feedback.transfer.formats.calls import (
    NO_PROMPT,
    answer_of,
    json_value,
    metadata_retained,
    object_or_empty,
    prompt_of,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowSkipped,
    list_of,
    mapping_of,
    number_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.verdicts import outcome_name

CHOOSING = ("select-best", "max-score")
"""Types of assertions that choose one of several outputs."""

ERROR = 2
"""failureReason of a call that failed: nothing was answered."""


def recognises(row: Mapping[str, Any]) -> bool:
    results = row.get("results")
    if isinstance(results, Mapping) and isinstance(results.get("results"), list):
        return "evalId" in row or has(results, "version") or has(results, "stats")
    return has(row, "promptIdx", "testIdx") or has(row, "gradingResult", "provider", "vars")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    results = row.get("results")
    if isinstance(results, Mapping):
        timestamp = results.get("timestamp")
        chosen: dict[tuple[str, str], list[tuple[bool, ImportedDecision]]] = {}
        for index, item in enumerate(list_of(results.get("results"), "results.results")):
            shared = {"evalId": row.get("evalId"), "timestamp": timestamp}
            one = {**shared, **item} if isinstance(item, Mapping) else item
            for record in each_item(line, [one], f"results.results[{index}]", _result):
                yield record
                if isinstance(record, ImportedDecision):
                    for rater, passed in _choices(one.get("gradingResult")):
                        choice = chosen.setdefault((str(one.get("testIdx")), rater), [])
                        choice.append((passed, record))
        for (_, rater), outputs in chosen.items():
            yield from _comparison_records(line, rater, outputs)
    else:
        yield from _result(row, line)


def _result(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    answered = object_or_empty(row.get("response"))
    output = answered.get("output")
    if row.get("failureReason") == ERROR or output in (None, ""):
        yield RowSkipped(line, key, "no response (error)" if row.get("error") else "no response")
        return
    prompt, provider = row.get("prompt"), row.get("provider")
    raw = prompt.get("raw") if isinstance(prompt, Mapping) else prompt
    name = (provider.get("label") or provider.get("id")) if isinstance(provider, Mapping) else provider
    usage = object_or_empty(answered.get("tokenUsage"))
    latency = row.get("latencyMs")
    if not raw:
        yield RowSkipped(line, key, NO_PROMPT)
        return
    prompt_value = json_value(raw)
    yield ImportedDecision(
        line=line,
        key=key,
        id=uuid_of(row.get("id")),
        messages=prompt_of(
            raw if isinstance(prompt_value, (str, int, float)) else prompt_value, "prompt.raw"
        ),
        response=output
        if isinstance(output, str) and text_of(output, "response.output")
        else answer_of(output, "response.output"),
        policy=text_or_empty(name),
        run_id=text_or_empty(row.get("id")),
        tokens_in=whole_of(usage.get("prompt")),
        tokens_out=whole_of(usage.get("completion")),
        latency_ms=None if latency is None else number_of(latency, "latencyMs"),
        created_at=time_of(row.get("timestamp"), "timestamp"),
        metadata=metadata_retained(eval_id=row.get("evalId"), test=row.get("testIdx"), vars=row.get("vars")),
        ratings=tuple(_ratings(row.get("gradingResult"))),
        outcomes=tuple(
            ImportedOutcome(outcome_name(str(score)), number_of(value, f"namedScores.{score}"))
            for score, value in mapping_of(row.get("namedScores") or {}, "namedScores").items()
        ),
    )


def _choices(grading: Any) -> Iterator[tuple[str, bool]]:
    """(rater, whether this output was chosen) of each assertion that chooses among the outputs of a test."""
    listed = grading.get("componentResults") if isinstance(grading, Mapping) else None
    for part in listed if isinstance(listed, list) else []:
        assertion = object_or_empty(object_or_empty(part).get("assertion"))
        kind = text_or_empty(assertion.get("type"))
        if kind in CHOOSING and isinstance(part.get("pass"), bool):
            value = text_or_empty(assertion.get("value"))
            yield (f"{kind}: {value}" if value else kind)[:200], part["pass"]


def _comparison_records(
    line: int, rater: str, outputs: list[tuple[bool, ImportedDecision]]
) -> Iterator[Record]:
    """The output that was chosen beside each other one to the same prompt."""
    best = [decision for passed, decision in outputs if passed]
    for passed, other in outputs:
        if (
            len(best) != 1
            or passed
            or other.messages != best[0].messages
            or other.response == best[0].response
        ):
            continue
        yield ImportedComparison(
            line=line, key=best[0].key, left=best[0], right=other, preference="left", ordered=False, rater=rater,
            rater_kind="simulated",
        )  # fmt: skip


def _ratings(grading: Any) -> Iterator[ImportedRating]:
    """A rating for each component; where there are none, one for the whole."""
    if not isinstance(grading, Mapping):
        return
    components = list_of(grading.get("componentResults") or [], "componentResults")
    names: Counter[str] = Counter()
    for index, item in enumerate(components or [grading]):
        part = mapping_of(item, f"componentResults[{index}]")
        assertion = object_or_empty(part.get("assertion"))
        kind = text_or_empty(assertion.get("type")) or "assertions"
        human = kind == "human"
        value = text_or_empty(assertion.get("metric")) or text_or_empty(assertion.get("value"))
        name = kind if human or not value else f"{kind}: {value}"
        names[name] += 1
        if not isinstance(part.get("pass"), bool) or kind in CHOOSING:
            continue
        notes = part.get("comment") if human else part.get("reason")
        yield ImportedRating(
            rater=(name if names[name] == 1 else f"{name[:190]} #{names[name]}")[:200],
            rater_kind="human" if human else "simulated",
            thumb="up" if part["pass"] else "down",
            tags=(kind[:100],),
            notes=text_of(notes or "", "reason")[:20_000],
        )


FORMAT = row_format("promptfoo", "promptfoo results", recognises, records, (), verdicts=())
