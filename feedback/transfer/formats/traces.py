"""Traces of LangSmith, Weave and Opik with what was said of them.

Of a trace the model's calls are decisions, or its root where none of them answered. What is said of the root is then
said of the last decision of the trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    Format,
    attempt,
    decisions_first,
    holds,
    key_of,
    objects_in,
    row_format,
)
from feedback.transfer.formats.calls import answer_of, object_or_empty, plain_text, text_or_empty
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.declared import Call, NamedScore, Scores, at, word_thumb
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    ImportedComparison,
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    list_of,
    mapping_of,
    number_of,
    text_of,
    time_of,
    uuid_of,
)

# --- LangSmith: runs, feedback on them, pairwise feedback ------------------------------------------------------

_run = Call(
    request="inputs",
    answer="outputs",
    own="id",
    own_id=True,
    fields={
        "policy": "extra.metadata.ls_model_name || outputs.model || inputs.model",
        "tokens_in": "prompt_tokens",
        "tokens_out": "completion_tokens",
        "created_at": "start_time",
        "ended_at": "end_time",
        "tags": "tags",
    },
    metadata={"trace_id": "trace_id", "name": "name", "reference_example_id": "reference_example_id"},
)
_LANGSMITH_SOURCE = "feedback_source.type == 'model' || feedback_source.type == 'auto_eval'"
_langsmith_score = Scores(
    name="key",
    author="feedback_source.user_name || feedback_source.user_id || feedback_source.type || 'api'",
    notes="comment",
    scored_at="created_at",
    simulated=_LANGSMITH_SOURCE,
)
_langsmith_group_score = replace(_langsmith_score, name="key || 'preference'")
LANGSMITH_VERDICTS = listed(
    "correction feedback_group_id feedback_source feedback_stats feedback_thread_id score"
)
"""Columns of the format that look like a verdict."""
GROUP_KEYS = ("id", "run_id", "score")
"""Of feedback in a group: what must be remembered until the rest of the group is read."""


def _is_queue(row: JsonObject) -> bool:
    return isinstance(row.get("queue"), Mapping) and "queue_type" in row["queue"] and "runs" in row


_is_langsmith = holds(
    "run_type inputs dotted_order", "run_type inputs trace_id", "run_id key feedback_source"
)


def _read_langsmith(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    model_traces, groups = DiskMultimap(), DiskMultimap()
    for row, line in objects_in(path, ratings_path):
        if row.get("run_type") == "llm" and row.get("outputs"):
            model_traces.add(str(row.get("trace_id")))
        elif "feedback_source" in row and row.get("feedback_group_id") is not None:
            groups.add(
                str(row["feedback_group_id"]), {"line": line} | {name: row.get(name) for name in GROUP_KEYS}
            )

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        if _is_queue(row):
            keys = ", ".join(str(key) for key in at(row, "queue.rubric_items[].feedback_key") or [])
            raise RowError(
                "an annotation queue holds runs and questions, no verdicts: export the runs (list_runs) and their "
                f"feedback (list_feedback{f', keys {keys}' if keys else ''}) and import those two files"
            )
        if "run_type" in row:
            return _langsmith_run(row, line, model_traces)
        if row.get("feedback_group_id") is not None:
            return _langsmith_group(row, line, groups.all(str(row["feedback_group_id"])))
        return _langsmith_feedback(row, line)

    return decisions_first(path, ratings_path, records, LANGSMITH_VERDICTS)


def _langsmith_run(row: JsonObject, line: int, answered: DiskMultimap) -> Iterator[Record]:
    kind, trace = row.get("run_type"), text_or_empty(row.get("trace_id"))
    if not row.get("outputs"):
        raise RowLeftOut(f"no response{' (error)' if row.get('error') else ''}")
    if kind != "llm" and (row.get("parent_run_id") is not None or trace in answered):
        raise RowLeftOut(f"a run of type {value_excerpt(kind)} in a trace whose decisions are its llm runs")
    return _run(row, line)


def _langsmith_feedback(row: JsonObject, line: int) -> Iterator[Record]:
    if row.get("run_id") is None:
        raise RowLeftOut("feedback on a project, not on a run")
    number, value, correction = row.get("score"), row.get("value"), row.get("correction")
    # beside a category's name its number says nothing: the scale stands in a configuration that is not exported
    verdict = number if number is not None and not isinstance(value, str) else value
    if isinstance(verdict, Mapping):
        verdict = plain_text(answer_of(verdict, "value"))
    score = replace(_langsmith_score.one(row), value=verdict)
    if correction:
        score = replace(score, correction=plain_text(answer_of(correction, "correction")))
    target = text_of(row["run_id"], "run_id")
    return score.references(line, key_of(row), target, text_or_empty(row.get("trace_id")))


def _langsmith_group(row: JsonObject, line: int, group: list[dict[str, object]]) -> Iterator[Record]:
    """Each two runs of a group compared, said in the row that comes first."""
    first = group[0] if group else {}
    if (first.get("id") or first.get("line")) != (row.get("id") or line):
        return
    if len(group) < 2:
        raise RowLeftOut("pairwise feedback on one run: the other half is not in the file")
    said = _langsmith_group_score.one(row)
    scores = [int(one["score"]) if isinstance(one["score"], bool) else one["score"] for one in group]
    runs = [
        (uuid_of(one["run_id"]), number_of(score, "score")) for one, score in zip(group, scores, strict=True)
    ]
    for index, (left, better) in enumerate(runs):
        for right, worse in runs[index + 1 :]:
            if left is None or right is None:
                raise RowError(
                    f"run_id: expected a UUID, found {value_excerpt([one['run_id'] for one in group])}"
                )
            yield ImportedComparison(
                line=line,
                key=key_of(row),
                left=left,
                right=right,
                preference="tie" if better == worse else "left" if better > worse else "right",
                ordered=False,
                rater=said.author,
                rater_kind="simulated" if said.simulated else "human",
                tags=(said.name[:100],),
                notes=said.notes,
                created_at=said.scored_at,
            )


LANGSMITH = Format(
    "langsmith",
    "LangSmith runs and feedback",
    lambda row: _is_langsmith(row) or _is_queue(row),
    _read_langsmith,
    two_files=True,
)

# --- W&B Weave: calls, and reactions, notes, annotations, scorers' outputs and payloads of one's own -----------

MODEL_OP = re.compile(
    r"completions?\.create|messages\.create|responses\.create|generate_content|litellm\.", re.I
)
"""In the name of an operation that calls a model."""

EMOJI = {
    "+1": "up",
    "thumbsup": "up",
    "thumbs_up": "up",
    "-1": "down",
    "thumbsdown": "down",
    "thumbs_down": "down",
}
"""Alias of an emoji, without colons -> the thumb it is."""

_weave_call = Call(
    request="inputs",
    answer="output",
    own="id",
    own_id=True,
    fields={
        "policy": "type(inputs) == 'object' && type(inputs.model) == 'string' && inputs.model || model",
        "tokens_in": "usage.prompt_tokens || usage.input_tokens",
        "tokens_out": "usage.completion_tokens || usage.output_tokens",
        "latency_ms": "summary.weave.latency_ms",
        "created_at": "started_at",
    },
    metadata={"trace_id": "trace_id", "root_id": "root_id", "op": "op_name"},
)


def _read_weave(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    model_traces, roots = DiskMultimap(), DiskMultimap()
    for row, _ in objects_in(path, ratings_path):
        if "op_name" in row and row.get("parent_id") is None:
            roots.add(str(row.get("trace_id")), str(row.get("id")))
        if "op_name" in row and _is_model_call(row) and row.get("output") not in (None, ""):
            model_traces.add(str(row.get("trace_id")))

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        if "weave_ref" in row:
            return _weave_feedback(row, line)
        return _weave_call_records(row, line, model_traces, roots)

    return decisions_first(path, ratings_path, records, ("feedback_type", "annotation_ref"))


def _is_model_call(row: JsonObject) -> bool:
    kind = object_or_empty(object_or_empty(row.get("attributes")).get("weave")).get("kind")
    return kind == "llm" or MODEL_OP.search(str(row.get("op_name"))) is not None


def _weave_call_records(
    row: JsonObject, line: int, answered: DiskMultimap, roots: DiskMultimap
) -> Iterator[Record]:
    key, trace = key_of(row), str(row.get("trace_id"))
    if not _is_model_call(row) and (row.get("parent_id") is not None or trace in answered):
        raise RowLeftOut("a call inside a trace whose decisions are its model calls")
    output, failed = row.get("output"), row.get("exception")
    summary = object_or_empty(row.get("summary"))
    if failed or output in (None, ""):
        yield RowSkipped(line, key, f"no response{' (error)' if failed else ''}")
    elif isinstance(output, str) and output.startswith("weave:///"):
        yield RowSkipped(line, key, "its output is a reference, not the text")
    else:
        by_model = object_or_empty(summary.get("usage"))
        model, usage = next(iter(by_model.items())) if len(by_model) == 1 else ("", {})
        names = ("id", "inputs", "started_at", "trace_id", "op_name")
        seen = {
            "summary": summary,
            "model": model,
            "usage": object_or_empty(usage),
            "root_id": roots.last(trace),
        }
        call = {**{name: row.get(name) for name in names}, **seen, "output": output}
        request = _without_references(row.get("inputs"))
        yield from attempt(line, key, lambda: [_weave_call.decision(call, line, request=request)])
    # feedback may stand inside its call, too
    inside = at(summary, "weave.feedback")
    for item in inside if isinstance(inside, list) else []:
        if isinstance(item, Mapping):
            record = {"weave_ref": f"weave:///call/{row.get('id')}", **item}
            yield from attempt(line, key_of(record), partial(_weave_feedback, record, line))


def _without_references(inputs: object) -> object:
    """Inputs of which the references to objects elsewhere, which are no words, are left out."""
    if not isinstance(inputs, Mapping):
        return inputs
    words = {
        key: value
        for key, value in inputs.items()
        if not (isinstance(value, str) and value.startswith("weave:///"))
    }
    others = any(isinstance(value, str) for key, value in words.items() if key != "model")
    if others and isinstance(words.get("model"), str):
        del words["model"]
    return words


def _weave_feedback(row: JsonObject, line: int) -> Iterator[Record]:
    kind = text_of(row.get("feedback_type"), "feedback_type", required=True)
    reference = text_of(row.get("weave_ref"), "weave_ref", required=True)
    if "/call/" not in reference:
        raise RowLeftOut("feedback on an object, not on a call")
    payload = mapping_of(row.get("payload"), "payload")
    author = text_or_empty(row.get("creator")) or text_or_empty(row.get("wb_user_id")) or "weave"
    scored_at = time_of(row.get("created_at"), "created_at")
    for score in _weave_scores(kind, payload, author):
        yield from score.at_time(scored_at).references(line, key_of(row), reference.rsplit("/", 1)[1])


def _weave_scores(kind: str, payload: JsonObject, author: str) -> Iterator[NamedScore]:
    name = kind.rsplit(".", 1)[-1]
    output, value = payload.get("output"), payload.get("value")
    if kind.startswith("wandb.reaction."):
        alias = text_of(at(payload, "detoned_alias || alias || ''"), "alias").strip(":")
        emoji = text_of(at(payload, "detoned || emoji") or alias, "emoji", required=True)
        thumb = EMOJI.get(alias) or word_thumb(emoji)
        yield NamedScore("reaction", thumb == "up" if thumb else alias or emoji, author)
    elif kind.startswith("wandb.note."):
        yield NamedScore("note", None, author, notes=text_of(payload.get("note"), "note", required=True))
    elif kind.startswith("wandb.annotation."):
        # an annotation's scale stands in an object that is not exported
        listed = isinstance(value, (list, Mapping))
        value = json.dumps(value, ensure_ascii=False) if listed else value
        yield NamedScore(name, value, author, binary=False)
    elif kind.startswith("wandb.runnable.") and isinstance(output, Mapping):
        for part, value in output.items():
            if isinstance(value, (bool, int, float)):
                yield NamedScore(f"{name}.{part}", value, simulated=True, binary=False)
    elif kind.startswith("wandb.runnable."):
        yield NamedScore(name, output, simulated=True, binary=False)
    elif not payload:
        raise RowError("payload: expected a value, found none")
    else:
        yield from _weave_custom_scores(name, payload, author)


def _weave_custom_scores(name: str, payload: JsonObject, author: str) -> Iterator[NamedScore]:
    """A payload of one's own: a key called correction is one, other plain values are named scores."""
    for part, value in payload.items():
        if part == "correction" and isinstance(value, str):
            yield NamedScore(f"{name}.{part}", None, author, correction=value)
        elif part in ("note", "comment") and isinstance(value, str) and value.strip():
            yield NamedScore(f"{name}.{part}", None, author, notes=value)
        elif isinstance(value, (bool, int, float, str)):
            yield NamedScore(f"{name}.{part}", value, author, binary=False)


WEAVE = Format(
    "weave",
    "Weave calls and feedback",
    holds("weave_ref feedback_type", "op_name project_id inputs"),
    _read_weave,
    two_files=True,
    untested_parts="keys from the program's own types; no file that Weave wrote was seen",
)

# --- Comet Opik: a file per trace; the last llm span is the decision, else the trace ----------------------------

_opik_call = Call(
    request="call.input",
    answer="call.output",
    own="trace.id",
    own_id=True,
    fields={
        "agent": "project_name",
        "unit": "trace.thread_id",
        "policy": "call.model",
        "tokens_in": "call.usage.prompt_tokens",
        "tokens_out": "call.usage.completion_tokens",
        "created_at": "call.start_time",
        "ended_at": "call.end_time",
        "tags": "trace.tags",
    },
    metadata={"trace_id": "trace.id", "span_id": "span_id"},
    left_out={
        "!(call.output) && trace.error_info": "no response (error)",
        "!(call.output)": "no response",
    },
    scores=(
        Scores(
            items="scores",
            name="name",
            value="value",
            label="category_name",
            author="author",
            notes="reason",
            scored_at="last_updated_at || created_at",
            simulated="source == 'online_scoring'",
            binary=False,
        ),
        Scores(
            items="trace.comments",
            name="'comment'",
            notes="text",
            author="created_by",
            scored_at="created_at",
            comments=True,
        ),
    ),
)


def _is_opik(row: JsonObject) -> bool:
    trace = row.get("trace")
    return "spans" in row and isinstance(trace, Mapping) and "id" in trace and "start_time" in trace


def _opik(row: JsonObject, line: int) -> Iterator[Record]:
    trace = mapping_of(row.get("trace"), "trace")
    spans = [span for span in list_of(row.get("spans") or [], "spans") if isinstance(span, Mapping)]
    models = [span for span in spans if span.get("type") == "llm" and span.get("output")]
    # the last one by its start, whatever their order in the file
    call = max(models, key=lambda span: str(span.get("start_time"))) if models else trace
    scores = [*_opik_scores(trace), *(_opik_scores(call) if models else ())]
    seen = {"trace": trace, "call": call, "scores": scores, "span_id": call.get("id") if models else None}
    yield _opik_call.decision({**seen, "project_name": row.get("project_name")}, line)


def _opik_scores(owner: JsonObject) -> Iterator[object]:
    """Scores with their authors: where several people gave one, its value is their mean, and each is read instead."""
    for score in list_of(owner.get("feedback_scores") or [], "feedback_scores"):
        by_author = object_or_empty(object_or_empty(score).get("value_by_author"))
        for author, entry in by_author.items():
            yield {**mapping_of(entry, f"value_by_author.{author}"), "name": score["name"], "author": author}
        if not by_author:
            yield {**mapping_of(score, "feedback_scores"), "author": score.get("created_by")}


OPIK = row_format(
    "opik",
    "Opik traces with feedback scores",
    _is_opik,
    _opik,
    verdicts=("feedback_scores", "span_feedback_scores", "comments"),
    untested_parts="keys from the program's own types; no file that Opik wrote was seen",
)
