"""Importing: a file comes in whole or not at all, never twice, and what goes out comes back as it was."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError

from feedback import selectors
from feedback.models import Comparison, Decision, Outcome, Rating
from feedback.services import decision_record, rating_withdraw
from feedback.storage.sql import rows_insert
from feedback.transfer import formats, import_batch
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import ImportRefused
from rl.datasets import prepare_training_dataset
from rl.datasets.rows import FeedbackFile
from tests.support import said
from tests.support.formats import written
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db

command = partial(said.command, "import_feedback")

HERE = Path(__file__).parent / "formats"


def everything() -> tuple[int, int, int, int]:
    return (
        Decision.objects.count(),
        Rating.objects.count(),
        Comparison.objects.count(),
        Outcome.objects.count(),
    )


PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


def test_a_preference_becomes_a_comparison_and_a_label_a_thumb(tmp_path: Path) -> None:
    labels = [{"prompt": "q", "completion": text, "label": text == "a"} for text in "ab"]
    report = file_import(written(tmp_path / "x.jsonl", [PAIR]), agent="helper")
    assert (report.format, report.decisions, report.comparisons, report.ratings) == ("trl", 2, 1, 0)
    comparison = Comparison.objects.get()
    better = {"left": comparison.left, "right": comparison.right}[comparison.preference]
    assert (better.response, better.agent, better.source) == ("good", "helper", "trl")
    assert better.messages == [{"role": "user", "content": "q"}]
    assert (comparison.rater, comparison.rater_kind) == ("trl", "human")
    report = file_import(written(tmp_path / "y.jsonl", labels), agent="helper", simulated=True)
    assert (report.decisions, report.ratings) == (2, 2)
    assert {r.decision.response: r.thumb for r in Rating.objects.all()} == {"a": "up", "b": "down"}
    # verdicts of machines are marked where that is said
    assert {r.rater_kind for r in Rating.objects.all()} == {"simulated"}
    assert selectors.feedback_counts("helper").simulated == 2


def test_the_agent_is_the_option_else_the_files_else_the_assistant(tmp_path: Path) -> None:
    file_import(written(tmp_path / "x.jsonl", [PAIR]))
    assert selectors.agent_slugs() == ["assistant"]
    file_import(HERE / "tensorzero_chat_inference.jsonl", agent="helper")
    assert selectors.agent_slugs() == ["assistant", "helper"]
    before = everything()
    for agent, path in (("other", HERE / "ratchet.jsonl"), ("Not A Slug", tmp_path / "x.jsonl")):
        with pytest.raises(ImportRefused, match="agent"):
            file_import(path, agent=agent)
    assert everything() == before


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
    assert set(Comparison.objects.values_list("preference", flat=True)) == {"left", "right"}


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
    assert file_import(HERE / "tensorzero_boolean_feedback.jsonl").ratings == 1
    assert file_import(HERE / "tensorzero_demonstration.jsonl").corrections == 1
    assert Rating.objects.filter(decision__agent="answer").count() == 2


def test_scores_find_decisions_by_the_apps_own_run_id() -> None:
    decision = decision_record(agent="helper", messages="q", response="a", run_id="t1").row
    assert file_import(HERE / "langfuse_scores.json").ratings == 3
    assert Rating.objects.filter(decision=decision).count() == 3
    decision_record(agent="helper", messages="q", response="b", run_id="t1")
    with pytest.raises(ImportRefused, match="several decisions"):
        file_import(HERE / "langfuse_scores.json")


def test_tool_calls_survive_the_database(tmp_path: Path) -> None:
    file_import(HERE / "trl_preference_tools.jsonl", agent="helper")
    from rl.datasets import get_training_stats

    (row,) = json.loads("[" + (HERE / "trl_preference_tools.jsonl").read_text() + "]")
    assert sum(get_training_stats("helper")["pairs"].values()) == 1
    decision = next(d for d in Decision.objects.all() if d.metadata.get("response_is") == "messages")
    assert [m["role"] for m in json.loads(decision.response)] == ["assistant", "tool", "assistant"]
    assert decision.metadata["tools"] == row["tools"]


def test_a_dataset_from_the_database_is_that_from_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    path = written(tmp_path / "x.jsonl", rows)
    direct = prepare_training_dataset("helper", source=FeedbackFile(path))
    file_import(path, agent="helper")
    assert list(prepare_training_dataset("helper").rows()) == list(direct.rows())


def test_one_bad_row_refuses_the_file_unless_bad_rows_are_left_out(tmp_path: Path) -> None:
    empty = {"prompt": "q", "chosen": "", "rejected": "b"}
    long = {"prompt": "q2", "chosen": "x" * 1_000_001, "rejected": "b"}  # only the database refuses it
    for row in (empty, long):
        with pytest.raises(ImportRefused) as error:
            file_import(written(tmp_path / "x.jsonl", [PAIR, row, PAIR]), agent="helper")
        report = error.value.report
        assert [refused.line for refused in report.refused] == [2]
        assert (report.decisions, report.comparisons, everything()) == (0, 0, (0, 0, 0, 0))
    path = written(tmp_path / "x.jsonl", [PAIR, empty, long])
    report = file_import(path, agent="helper", skip_bad=True)
    assert (report.comparisons, [row.line for row in report.refused]) == (1, [2, 3])
    assert Comparison.objects.count() == 1


def test_a_broken_file_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"prompt": "q", "chosen": "a", "rejected": "b"},\n {"prompt": oops}]')
    with pytest.raises(FormatRefused, match=r"x\.json line 2 column 13"):
        file_import(tmp_path / "x.json")
    assert everything() == (0, 0, 0, 0)


def test_the_same_rows_in_another_file_and_order_add_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": "a", "label": True} for i in range(5)]
    file_import(written(tmp_path / "one.jsonl", rows), agent="helper")
    rating_withdraw(Rating.objects.all()[0])
    before = everything()
    (tmp_path / "two.json").write_text(json.dumps(rows[::-1]))
    report = file_import(tmp_path / "two.json", agent="helper")
    assert (report.already_here, report.skipped, everything()) == (5, 0, before)
    # what was changed since stays so
    assert selectors.ratings_standing("helper").count() == 4


def test_a_changed_mind_in_a_newer_export_supersedes_the_old_one(tmp_path: Path) -> None:
    row = {"query": "q", "response": "a", "feedback_type": "rating", "metadata": {"user_id": "u"}}
    for stars in (1, 5):
        file_import(written(tmp_path / f"{stars}.jsonl", [{**row, "rating": stars}]), agent="helper")
    assert [r.stars for r in selectors.ratings_standing("helper")] == [5]
    assert Rating.objects.count() == 2


def test_rows_written_meanwhile_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    rating = {"id": "22222222-2222-4222-8222-222222222222", "rater": "ann", "thumb": "up"}
    row = {"type": "decision", "agent": "helper", "messages": [{"role": "user", "content": "q"}]}
    row |= {"response": "a"}
    report = file_import(written(tmp_path / "x.jsonl", [{**row, "ratings": [rating, rating]}]))
    assert (report.ratings, Rating.objects.count()) == (1, 1)
    clash = {**row, "ratings": [rating, {**rating, "thumb": "down"}]}
    with pytest.raises(ImportRefused, match="recorded before with a different body"):
        file_import(written(tmp_path / "y.jsonl", [clash]))


def test_nothing_of_a_refused_row_comes_in(tmp_path: Path) -> None:
    row = {"type": "decision", "agent": "helper", "messages": [{"role": "user", "content": "q"}]}
    row |= {"response": "a"}
    row |= {"ratings": [{"rater": "ann", "thumb": "up"}, {"rater": "bob", "withdrawn": True}]}
    report = file_import(written(tmp_path / "x.jsonl", [row]), format="ratchet", skip_bad=True)
    assert "withdraws a rating that does not exist" in report.refused[0].reason
    assert (report.decisions, report.ratings, everything()) == (0, 0, (0, 0, 0, 0))


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


def test_the_commands_dry_run_changes_nothing_and_a_file_that_is_not_there_is_one_line() -> None:
    found = command(str(HERE / "hh_rlhf.jsonl"), "--dry-run")
    assert (found["dry_run"], found["comparisons"], everything()) == (True, 1, (0, 0, 0, 0))
    for name in ("auto", *formats.FORMATS):
        with pytest.raises(CommandError, match=r"^[^\n]*No such file[^\n]*$"):
            command("/nowhere/none.json", "--format", name)


def test_a_column_of_what_it_should_be_is_a_correction(tmp_path: Path) -> None:
    file = tmp_path / "berths.csv"
    file.write_text(
        "question,answer,verdict,should_be\nWhere to?,Ramp 2,wrong,Cold store\nAnd she?,Ramp 2,ok,\n"
    )
    file_import(file, agent="harbour-desk")
    found = Rating.objects.order_by("thumb").values_list("thumb", "correction")
    assert list(found) == [("down", "Cold store"), ("up", None)]
