"""Importing: a file comes in whole or not at all, never twice, and what goes out comes back as it was."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError

from feedback import selectors
from feedback.models import Comparison, Decision, Outcome, Rating
from feedback.services import (
    decision_record,
    rating_withdraw,
)
from feedback.storage.sql import rows_insert
from feedback.transfer import formats, import_batch
from feedback.transfer.formats.files import Row, rows
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import ImportRefused
from rl.datasets import prepare_training_dataset
from rl.datasets.rows import FeedbackFile
from tests.support.formats import ODD, places, put
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db

HERE = Path(__file__).parent / "formats"
SHARED = Path(__file__).parents[2] / "shared" / "data"
TWO_FILES = {"simulation_ratings.json", "tensorzero_boolean_feedback.jsonl", "tensorzero_demonstration.jsonl"}
EXAMPLES = sorted(
    path.name
    for path in HERE.iterdir()
    if path.is_file() and path.name not in TWO_FILES and "dataset_info" not in path.name
)


def written(path: Path, items: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    return path


def everything() -> tuple[int, int, int, int]:
    return (
        Decision.objects.count(),
        Rating.objects.count(),
        Comparison.objects.count(),
        Outcome.objects.count(),
    )


def command(*arguments: str, **options: Any) -> dict[str, Any]:
    out = io.StringIO()
    call_command("import_feedback", *arguments, "--json", stdout=out, **options)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


# --- What comes in ----------------------------------------------------------------------------------------


def test_a_preference_becomes_two_decisions_and_a_comparison(tmp_path: Path) -> None:
    report = file_import(written(tmp_path / "x.jsonl", [PAIR]), agent="helper")
    assert (report.format, report.decisions, report.comparisons, report.ratings) == ("trl", 2, 1, 0)
    comparison = Comparison.objects.get()
    better = {"left": comparison.left, "right": comparison.right}[comparison.preference]
    assert better.response == "good"
    assert better.agent == "helper"
    assert better.messages == [{"role": "user", "content": "q"}]
    assert better.source == "trl"
    assert comparison.rater == "trl"
    assert comparison.rater_kind == "human"


def test_a_label_becomes_a_thumb(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": "q", "completion": "b", "label": False},
    ]
    report = file_import(written(tmp_path / "x.jsonl", rows), agent="helper")
    assert (report.decisions, report.ratings) == (2, 2)
    assert {r.decision.response: r.thumb for r in Rating.objects.all()} == {"a": "up", "b": "down"}


def test_corrections_and_outcomes_are_counted() -> None:
    report = file_import(HERE / "ratchet.jsonl")
    assert (report.decisions, report.ratings, report.comparisons) == (2, 2, 1)
    assert (report.corrections, report.outcomes) == (1, 1)
    assert selectors.feedback_counts("helper").ratings == 1


def test_without_an_agent_it_is_the_assistants(tmp_path: Path) -> None:
    file_import(written(tmp_path / "x.jsonl", [PAIR]))
    assert selectors.agent_slugs() == ["assistant"]


def test_what_the_file_says_of_the_agent_gives_way_to_the_option() -> None:
    file_import(HERE / "tensorzero_chat_inference.jsonl", agent="helper")
    assert selectors.agent_slugs() == ["helper"]


def test_a_history_of_another_agent_is_refused() -> None:
    with pytest.raises(ImportRefused, match="agent 'helper', but --agent says 'other'"):
        file_import(HERE / "ratchet.jsonl", agent="other")
    assert everything() == (0, 0, 0, 0)


def test_anonymous_verdicts_on_one_response_are_as_many_raters(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (True, True, False)]
    file_import(written(tmp_path / "x.jsonl", rows), agent="helper")
    assert sorted((r.rater, r.thumb) for r in selectors.ratings_standing("helper")) == [
        ("trl", "up"),
        ("trl #2", "up"),
        ("trl #3", "down"),
    ]


def test_the_better_response_is_not_always_on_the_left(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": "bad"} for i in range(40)]
    file_import(written(tmp_path / "x.jsonl", rows), agent="helper")
    sides = set(Comparison.objects.values_list("preference", flat=True))
    assert sides == {"left", "right"}


def test_verdicts_of_machines_are_marked_when_told(tmp_path: Path) -> None:
    rows = [PAIR, {"prompt": "q", "completion": "a", "label": True}]
    file_import(written(tmp_path / "x.jsonl", rows), agent="helper", format="trl", simulated=True)
    assert Rating.objects.get().rater_kind == "simulated"
    assert Comparison.objects.get().rater_kind == "simulated"
    assert selectors.feedback_counts("helper").simulated == 2


def test_ratings_in_a_second_file_find_their_decisions() -> None:
    report = file_import(
        HERE / "simulation_entries.json", ratings_path=HERE / "simulation_ratings.json", skip_bad=True
    )
    assert (report.decisions, report.ratings) == (2, 2)
    # the third entry names a scenario, which only an agent can turn into a prompt
    assert [(r.line, r.key) for r in report.refused] == [(4, "e3")]
    assert "--source file" in report.refused[0].reason


def test_feedback_tables_are_placed_after_the_inferences() -> None:
    with pytest.raises(ImportRefused, match="import the decisions first"):
        file_import(HERE / "tensorzero_boolean_feedback.jsonl")
    file_import(HERE / "tensorzero_chat_inference.jsonl")
    report = file_import(HERE / "tensorzero_boolean_feedback.jsonl")
    assert report.ratings == 1
    demonstrated = file_import(HERE / "tensorzero_demonstration.jsonl")
    assert demonstrated.corrections == 1
    assert Rating.objects.filter(decision__agent="answer").count() == 2


def test_scores_find_decisions_by_the_apps_own_run_id() -> None:
    decision = decision_record(agent="helper", messages="q", response="a", run_id="t1").row
    report = file_import(HERE / "langfuse_scores.json")
    assert report.ratings == 3
    assert Rating.objects.filter(decision=decision).count() == 3
    decision_record(agent="helper", messages="q", response="b", run_id="t1")
    with pytest.raises(ImportRefused, match="several decisions"):
        file_import(HERE / "langfuse_scores.json")


def test_tool_calls_survive_the_database(tmp_path: Path) -> None:
    file_import(HERE / "trl_preference_tools.jsonl", agent="helper")
    from rl.datasets import get_training_stats

    (row,) = json.loads("[" + (HERE / "trl_preference_tools.jsonl").read_text() + "]")
    stats = get_training_stats("helper")
    assert sum(stats["pairs"].values()) == 1
    decision = next(d for d in Decision.objects.all() if d.metadata.get("response_is") == "messages")
    assert [m["role"] for m in json.loads(decision.response)] == ["assistant", "tool", "assistant"]
    assert decision.metadata["tools"] == row["tools"]


def test_a_dataset_from_the_database_is_that_from_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    path = written(tmp_path / "x.jsonl", rows)
    direct = prepare_training_dataset("helper", source=FeedbackFile(path))
    file_import(path, agent="helper")
    imported = prepare_training_dataset("helper")
    assert list(imported.rows()) == list(direct.rows())


# --- Whole or not at all ----------------------------------------------------------------------------------


def test_one_bad_row_refuses_the_file_and_nothing_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [PAIR, {"prompt": "q", "chosen": "", "rejected": "b"}, PAIR])
    with pytest.raises(
        ImportRefused, match="1 of 3 rows refused, nothing was imported; line 2: chosen: is empty"
    ) as e:
        file_import(path, agent="helper")
    assert [(r.line, r.reason) for r in e.value.report.refused] == [(2, "chosen: is empty")]
    assert e.value.report.decisions == 0
    assert everything() == (0, 0, 0, 0)


def test_a_row_only_the_database_refuses_takes_the_whole_file_back(tmp_path: Path) -> None:
    long = {"prompt": "q2", "chosen": "x" * 1_000_001, "rejected": "b"}
    with pytest.raises(ImportRefused, match=r"line 2: .*1,000,000 characters") as error:
        file_import(written(tmp_path / "x.jsonl", [PAIR, long]), agent="helper")
    assert everything() == (0, 0, 0, 0)
    assert (error.value.report.decisions, error.value.report.comparisons) == (0, 0)


def test_bad_rows_are_left_out_when_asked(tmp_path: Path) -> None:
    rows = [
        PAIR,
        {"prompt": "q", "chosen": "", "rejected": "b"},
        {"prompt": "q2", "chosen": "x" * 1_000_001, "rejected": "b"},
    ]
    report = file_import(written(tmp_path / "x.jsonl", rows), agent="helper", skip_bad=True)
    assert report.comparisons == 1
    assert [row.line for row in report.refused] == [2, 3]
    assert Comparison.objects.count() == 1


def test_an_agent_that_is_no_slug_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="agent: expected a slug"):
        file_import(written(tmp_path / "x.jsonl", [PAIR]), agent="Not A Slug")


def test_a_broken_file_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"prompt": "q", "chosen": "a", "rejected": "b"},\n {"prompt": oops}]')
    with pytest.raises(FormatRefused, match=r"x\.json line 2 column 13"):
        file_import(tmp_path / "x.json")
    assert everything() == (0, 0, 0, 0)


def test_a_dry_run_counts_and_keeps_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [PAIR])
    dry = file_import(path, agent="helper", dry_run=True)
    assert (dry.decisions, dry.comparisons) == (2, 1)
    assert everything() == (0, 0, 0, 0)
    assert file_import(path, agent="helper").counts == dry.counts


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith("table_")])
def test_odd_values_are_refused_row_by_row_and_the_rest_comes_in(name: str, tmp_path: Path) -> None:
    items = [row.value for row in rows(HERE / name) if isinstance(row, Row)]
    mutants = [put(item, place, odd) for item in items for place in places(item) for odd in ODD]
    chosen = random.Random(3).sample(mutants, min(len(mutants), 100))
    report = file_import(
        written(tmp_path / "odd.jsonl", chosen), format=formats.detect(HERE / name), skip_bad=True
    )
    assert report.refused
    assert report.decisions == Decision.objects.count()
    assert report.comparisons == Comparison.objects.count()


# --- Never twice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_importing_an_example_again_adds_nothing(name: str) -> None:
    if name == "langfuse_scores.json":
        decision_record(agent="assistant", messages="q", response="a", run_id="t1")
    first = file_import(HERE / name, skip_bad=True)
    before = everything()
    assert sum(before) > 0 or name == "trl_prompt_only.jsonl"
    again = file_import(HERE / name, skip_bad=True)
    assert everything() == before
    assert (again.decisions, again.ratings, again.comparisons, again.outcomes) == (0, 0, 0, 0)
    assert again.refused == first.refused


def test_the_same_rows_in_another_file_and_order_add_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(5)]
    file_import(written(tmp_path / "one.jsonl", rows), agent="helper")
    before = everything()
    (tmp_path / "two.json").write_text(json.dumps(rows[::-1]))
    report = file_import(tmp_path / "two.json", agent="helper")
    assert everything() == before
    assert (report.already_here, report.skipped) == (5, 0)


def test_an_import_does_not_bring_back_what_was_changed_since(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"prompt": "q", "completion": "a", "label": True}])
    file_import(path, agent="helper")
    rating_withdraw(Rating.objects.get())
    file_import(path, agent="helper")
    assert not selectors.ratings_standing("helper").exists()


def test_a_changed_mind_in_a_newer_export_supersedes_the_old_one(tmp_path: Path) -> None:
    row = {
        "query": "q",
        "response": "a",
        "feedback_type": "rating",
        "rating": 1,
        "metadata": {"user_id": "u"},
    }
    file_import(written(tmp_path / "old.jsonl", [row]), agent="helper")
    file_import(written(tmp_path / "new.jsonl", [{**row, "rating": 5}]), agent="helper")
    assert [r.stars for r in selectors.ratings_standing("helper")] == [5]
    assert Rating.objects.count() == 2


def test_rows_that_somebody_else_wrote_at_the_same_moment_are_found_at_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(
        tmp_path / "x.jsonl", [{"prompt": f"q{n}", "completion": "a", "label": True} for n in range(3)]
    )
    attempts = []

    def insert(rows: list[Any]) -> None:
        attempts.append(len(rows))
        if len(attempts) == 3:
            raise IntegrityError("somebody was faster")
        rows_insert(rows)

    monkeypatch.setattr(import_batch, "rows_insert", insert)
    report = file_import(path, agent="helper")
    assert len(attempts) == 3 + 5
    assert (report.decisions, report.ratings, report.skipped) == (3, 3, 0)
    assert everything() == (3, 3, 0, 0)
    assert {rating.rater for rating in Rating.objects.all()} == {"trl"}


def test_what_one_record_repeats_is_kept_once(tmp_path: Path) -> None:
    own = "22222222-2222-4222-8222-222222222222"
    rating = {"id": own, "rater": "ann", "thumb": "up"}
    row = {
        "type": "decision",
        "agent": "helper",
        "messages": [{"role": "user", "content": "q"}],
        "response": "a",
    }
    report = file_import(written(tmp_path / "x.jsonl", [{**row, "ratings": [rating, rating]}]))
    assert (report.ratings, Rating.objects.count()) == (1, 1)
    clash = {**row, "ratings": [rating, {**rating, "thumb": "down"}]}
    with pytest.raises(ImportRefused, match="recorded before with a different body"):
        file_import(written(tmp_path / "y.jsonl", [clash]))


def test_nothing_of_a_refused_row_comes_in(tmp_path: Path) -> None:
    row = {
        "type": "decision",
        "agent": "helper",
        "messages": [{"role": "user", "content": "q"}],
        "response": "a",
        "ratings": [{"rater": "ann", "thumb": "up"}, {"rater": "bob", "withdrawn": True}],
    }
    report = file_import(written(tmp_path / "x.jsonl", [row]), format="ratchet", skip_bad=True)
    assert "withdraws a rating that does not exist" in report.refused[0].reason
    assert (report.decisions, report.ratings, everything()) == (0, 0, (0, 0, 0, 0))


# --- The command ------------------------------------------------------------------------------------------


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    found = command(str(written(tmp_path / "x.jsonl", [PAIR])), "--agent", "helper")
    expected = {
        "format": "trl",
        "decisions": 2,
        "ratings": 0,
        "comparisons": 1,
        "corrections": 0,
        "skipped": 0,
        "refused": [],
        "dry_run": False,
    }
    assert {name: found[name] for name in expected} == expected


def test_the_command_lists_every_refused_row_and_fails_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [PAIR, {**PAIR, "chosen": ""}, {**PAIR, "chosen": 3, "id": "row-3"}])
    out = io.StringIO()
    with pytest.raises(CommandError) as error:
        call_command("import_feedback", str(path), "--json", stdout=out)
    assert "\n" not in str(error.value)
    assert error.value.returncode == 1
    assert "2 of 3 rows refused" in str(error.value)
    assert [(r["line"], r["key"]) for r in json.loads(out.getvalue())["refused"]] == [(2, ""), (3, "row-3")]
    words = io.StringIO()
    with pytest.raises(CommandError):
        call_command("import_feedback", str(path), stdout=words)
    assert "refused line 3 row-3" in words.getvalue()


def test_files_are_imported_one_by_one(tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", [PAIR])
    bad = written(tmp_path / "bad.jsonl", [{**PAIR, "chosen": ""}])
    with pytest.raises(CommandError, match=r"bad\.jsonl"):
        command(str(good), str(bad))
    assert Comparison.objects.count() == 1, "the first file was whole and stays"


def test_the_command_adds_up_several_files(tmp_path: Path) -> None:
    found = command(str(HERE / "hh_rlhf.jsonl"), str(HERE / "openai_sft.jsonl"), "--agent", "helper")
    assert found["format"] == "several"
    # the demonstration has a system turn, so that it is another prompt
    assert (found["decisions"], found["comparisons"]) == (3, 1)
    assert [file["format"] for file in found["files"]] == ["hh", "openai"]


def test_the_commands_dry_run_changes_nothing() -> None:
    found = command(str(HERE / "hh_rlhf.jsonl"), "--dry-run")
    assert found["dry_run"] is True
    assert found["comparisons"] == 1
    assert everything() == (0, 0, 0, 0)


def test_every_format_can_be_asked_for_by_name() -> None:
    for name in ("auto", *formats.FORMATS):
        with pytest.raises(CommandError, match="No such file"):
            command("/nowhere/none.json", "--format", name)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file") as error:
        command(str(tmp_path / "none.json"))
    assert "\n" not in str(error.value)


# --- Real files of others ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "tensorzero-haiku").exists(),
    reason="outside data ../shared/data/tensorzero-haiku is not here",
)
def test_the_tensorzero_tables_come_in_one_after_the_other() -> None:
    folder = SHARED / "tensorzero-haiku"
    found = command(
        str(folder / "ChatInference.jsonl"), str(folder / "BooleanMetricFeedback.jsonl"), "--simulated"
    )
    assert (found["decisions"], found["ratings"], found["refused"]) == (997, 500, [])
    counts = selectors.feedback_counts("write_haiku")
    assert (counts.decisions, counts.ratings, counts.simulated) == (997, 500, 500)


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "llamafactory").exists(), reason="outside data ../shared/data/llamafactory is not here"
)
def test_the_300_pairs_of_llamafactory_come_in() -> None:
    found = command(str(SHARED / "llamafactory" / "dpo_en_demo.json"))
    assert (found["format"], found["comparisons"], found["refused"]) == ("llamafactory", 300, [])


def test_a_column_of_what_it_should_be_is_a_correction(tmp_path: Path) -> None:
    file = tmp_path / "berths.csv"
    file.write_text(
        "question,answer,verdict,should_be\nWhere to?,Ramp 2,wrong,Cold store\nAnd she?,Ramp 2,ok,\n"
    )
    file_import(file, agent="harbour-desk")
    found = Rating.objects.order_by("thumb").values_list("thumb", "correction")
    assert list(found) == [("down", "Cold store"), ("up", None)]
