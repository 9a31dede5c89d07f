"""Exports of other tools and data sets: each recognised by itself, its counts exact, a second import without effect."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Comparison, Decision, ImportBatch, Outcome, Rating
from feedback.transfer import formats
from feedback.transfer.formats.files import Row, rows
from feedback.transfer.formats.records import ImportedDecision, RowRefused
from feedback.transfer.import_undo import import_undo
from tests.support.formats import HERE, ODD, places, put, written
from tests.support.imports import file_import

TOOLS = HERE / "tools"


@dataclass(frozen=True)
class Expected:
    """Counts of an import, worked out by hand from the file."""

    format: str
    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    corrections: int = 0
    outcomes: int = 0
    already_here: int = 0
    skipped: int = 0
    refused_count: int = 0
    after: str = ""
    """The file its verdicts are on, imported before it."""
    beside: str = ""
    """The second file, where neither says anything alone."""


FILES = {
    # two annotations name a preference (one of them 1.0000387), one has twice the same output, one is unreadable
    "alpacaeval_annotations.json": Expected("alpacaeval", decisions=4, comparisons=2, skipped=2),
    "alpacaeval_outputs.json": Expected("alpacaeval", decisions=2),
    "arena_conversations.json": Expected("arena", decisions=8, comparisons=4),
    "arena_preference_140k.jsonl": Expected("arena", decisions=6, comparisons=3),
    "arena_preference_55k.csv": Expected("arena", decisions=6, comparisons=3),
    # the second pair holds one text twice
    "capybara_dpo.jsonl": Expected("capybara", decisions=2, ratings=2, comparisons=1, skipped=1),
    "capybara_kto.jsonl": Expected("capybara", decisions=2, ratings=2),
    # three answers and one golden answer; 1 + 2 + 1 metrics, each a thumb and a score of its own direction
    "deepeval_test_run.json": Expected("deepeval", decisions=4, ratings=4, outcomes=4),
    "flywheel_logs.jsonl": Expected("flywheel", decisions=2),
    # one without bodies, one overloaded; helpfulness 90 has no scale
    "helicone_requests.jsonl": Expected("helicone", decisions=2, ratings=2, outcomes=1, skipped=2),
    # 3 + 2 raters; four attributes beside helpfulness for each response
    "helpsteer2_disagreements.jsonl": Expected("helpsteer", decisions=2, ratings=5, outcomes=8),
    "helpsteer2_preference.jsonl": Expected("helpsteer", decisions=4, comparisons=8),
    "helpsteer3_preference.jsonl": Expected("helpsteer", decisions=4, comparisons=4),
    "helpsteer_ratings.jsonl": Expected("helpsteer", decisions=3, ratings=3, outcomes=12),
    "langfuse_blob_observations.jsonl": Expected("langfuse_traces", decisions=1),
    "langfuse_blob_scores.jsonl": Expected("langfuse", ratings=4, after="langfuse_blob_observations.jsonl"),
    "langfuse_blob_traces.jsonl": Expected("langfuse_traces", decisions=1),
    "langfuse_ui_observations.jsonl": Expected("langfuse_traces", decisions=1, ratings=1),
    "langfuse_ui_scores.jsonl": Expected("langfuse", ratings=2, after="langfuse_ui_observations.jsonl"),
    # a thumb, two numbers, a word and a comment on the first trace
    "langfuse_ui_traces.json": Expected("langfuse_traces", decisions=2, ratings=5),
    "langsmith_annotation_queue.json": Expected("langsmith", refused_count=1),
    "langsmith_feedback.jsonl": Expected("langsmith", ratings=5, corrections=1, after="langsmith_runs.jsonl"),
    # the first group compares answers to two questions, in the second one run has no answer
    "langsmith_feedback_pairwise.jsonl": Expected("langsmith", refused_count=2, after="langsmith_runs.jsonl"),
    "langsmith_runs.jsonl": Expected("langsmith", decisions=3, skipped=1),
    # not stored, failed, cut
    "litellm_spend_logs.json": Expected("litellm", decisions=2, skipped=3),
    "litellm_standard_logging.jsonl": Expected("litellm", decisions=1),
    # a thumb and a correction; relevance 4 has no scale; one assessment was overridden
    "mlflow_search_traces.jsonl": Expected(
        "mlflow", decisions=1, ratings=2, corrections=1, outcomes=1, skipped=1
    ),
    "mlflow_traces.json": Expected("mlflow", decisions=1, ratings=2, corrections=1, outcomes=1, skipped=1),
    "mtbench_human.jsonl": Expected("arena", decisions=4, comparisons=3),
    "mtbench_judgment_pair.jsonl": Expected("mtbench", refused_count=1),
    "mtbench_judgment_single.jsonl": Expected("mtbench", refused_count=2),
    # three pairs of three answers and one of two
    "nectar_rankings.jsonl": Expected("nectar", decisions=5, comparisons=4),
    "open_webui_chats.json": Expected("open_webui_chats", decisions=2, ratings=2, skipped=1),
    # 6 of a model's score is outside [0, 1]
    "openai_eval_output_items.json": Expected("openai_evals", decisions=2, ratings=3, outcomes=1),
    # the messages of the second completion are not in the other file
    "openai_stored_completions.json": Expected(
        "openai_stored", decisions=1, skipped=1, beside="openai_stored_messages.json"
    ),
    "openai_stored_messages.json": Expected(
        "openai_stored", decisions=1, skipped=1, beside="openai_stored_completions.json"
    ),
    # satisfied, quality by two people, why it was called a hallucination, a comment; that score's direction is not said
    "opik_trace.json": Expected("opik", decisions=1, ratings=5, outcomes=1),
    # the span's event says the same as the log record
    "otlp_genai_evaluation_log.json": Expected("otlp", already_here=1, after="otlp_genai_trace.json"),
    "otlp_genai_trace.json": Expected("otlp", decisions=1, ratings=1),
    "phoenix_annotations_dataframe.csv": Expected("phoenix", ratings=4, after="phoenix_spans.json"),
    "phoenix_span_annotations.json": Expected("phoenix", ratings=4, after="phoenix_spans.json"),
    "phoenix_spans.json": Expected("phoenix", decisions=2),
    "portkey_logs.jsonl": Expected("portkey", decisions=1),
    # one assertion of the first result; of the second one assertion and a person
    "promptfoo_results.json": Expected("promptfoo", decisions=2, ratings=3, skipped=1),
    "shp_pairs.jsonl": Expected("shp", decisions=2, comparisons=2),
    # five and four numbers beside the fine-grained score (honesty of the second answer is N/A)
    "ultrafeedback_raw.jsonl": Expected("ultrafeedback", decisions=2, ratings=2, outcomes=9, skipped=1),
    "weave_calls.jsonl": Expected("weave", decisions=2, skipped=1),
    # a reaction, a note, two parts of a scorer's output, a correction; the annotation 4 has no scale
    "weave_feedback.jsonl": Expected(
        "weave", ratings=5, corrections=1, outcomes=1, after="weave_calls.jsonl"
    ),
}
STORED = ("decisions", "ratings", "comparisons", "corrections", "outcomes")
COUNTS = (*STORED, "already_here", "skipped", "refused_count")


def everything() -> tuple[int, ...]:
    return tuple(model.objects.count() for model in (Decision, Rating, Comparison, Outcome))


def imported(name: str, **how: Any) -> Any:
    expected = FILES[name]
    if expected.after:
        file_import(TOOLS / expected.after, skip_bad=True)
    beside = TOOLS / expected.beside if expected.beside else None
    return file_import(TOOLS / name, ratings_path=beside, skip_bad=True, **how)


def test_there_is_a_count_for_every_example() -> None:
    assert {path.name for path in TOOLS.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_an_export_is_recognised_by_itself(name: str) -> None:
    assert formats.detect(TOOLS / name) == FILES[name].format


@pytest.mark.django_db
@pytest.mark.parametrize("name", FILES)
def test_an_export_brings_exactly_what_is_in_it_only_once_and_is_taken_back_whole(name: str) -> None:
    expected = FILES[name]
    report = imported(name)
    assert {count: getattr(report, count) for count in COUNTS} == {
        count: getattr(expected, count) for count in COUNTS
    }
    before = everything()
    again = imported(name)
    assert everything() == before
    assert {getattr(again, count) for count in STORED} == {0}
    assert again.refused_count == expected.refused_count
    for batch in ImportBatch.objects.order_by("-pk"):
        import_undo(batch.pk, actor="test")
    assert everything() == (0, 0, 0, 0)


@pytest.mark.parametrize("name", FILES)
def test_rows_with_their_keys_in_another_order_and_keys_nobody_knows_say_the_same(
    name: str, tmp_path: Path
) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in reversed(value)}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    items = [row.value for row in rows(TOOLS / name) if isinstance(row, Row)]
    odd = [{"a_new_column": {"of": "a later version"}, **shuffled(item)} for item in items]
    path = written(tmp_path / "odd.jsonl", odd)
    assert formats.detect(path) == FILES[name].format
    beside = TOOLS / FILES[name].beside if FILES[name].beside else None

    def said(path: Path) -> list[str]:
        found = formats.read(path, FILES[name].format, beside)
        responses = (json.dumps(getattr(record, "response", None), sort_keys=True) for record in found)
        return sorted(responses)

    assert said(path) == said(TOOLS / name)


@pytest.mark.parametrize("name", FILES)
def test_no_odd_value_in_any_place_gets_past_as_a_crash(name: str, tmp_path: Path) -> None:
    items = [row.value for row in rows(TOOLS / name) if isinstance(row, Row)]
    mutants = [put(item, place, odd) for item in items for place in places(item)[1:] for odd in ODD]
    chosen = random.Random(7).sample(mutants, min(len(mutants), 150))
    lines = 0
    for record in formats.read(written(tmp_path / "odd.jsonl", chosen), FILES[name].format):
        lines = max(lines, record.line)
        assert not isinstance(record, RowRefused) or record.reason
        if isinstance(record, ImportedDecision):
            assert record.messages
            assert isinstance(record.response, (str, list))
    assert lines > len(chosen) * 0.9, "reading went on to the end"


@pytest.mark.django_db
@pytest.mark.parametrize("name", FILES)
def test_odd_values_are_refused_row_by_row_and_the_rest_comes_in(name: str, tmp_path: Path) -> None:
    items = [row.value for row in rows(TOOLS / name) if isinstance(row, Row)]
    mutants = [put(item, place, odd) for item in items for place in places(item)[1:] for odd in ODD]
    chosen = random.Random(3).sample(mutants, min(len(mutants), 30))
    if FILES[name].after:
        file_import(TOOLS / FILES[name].after, skip_bad=True)
    before = everything()
    report = file_import(written(tmp_path / "odd.jsonl", chosen), format=FILES[name].format, skip_bad=True)
    new = tuple(after - earlier for earlier, after in zip(before, everything(), strict=True))
    assert new == (report.decisions, report.ratings, report.comparisons, report.outcomes)
