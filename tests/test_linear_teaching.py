"""A classifier's answers as demonstrations: what it shows, when `auto` has it teach, the run that learns from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feedback.services import decision_record, rating_submit
from rl.agents import get_agent
from rl.datasets import snapshot_rows
from rl.datasets.demonstrations import preferred_rows
from rl.evaluation.service import _preferred_rows
from rl.gates.evidence_kinds import LABELS, PAIRS
from rl.jobs import train
from rl.jobs.estimates import order_automatic
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import FEWEST_TAUGHT, MethodChoice, _of_preferred, method_chosen
from rl.linear.distillation import SHOWN_PROMPTS, rows_recombined, rows_taught
from rl.linear.model import CLOSED, LISTED
from rl.linear.rows import LinearRefused
from rl.models import TrainingRun
from rl.recipes import RecipeError, SFTRecipe
from rl.training.result import TrainingRefused
from tests.support.linear import BOT, QUEUES, rows_of, tickets
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(("kind", "least"), [("pairs", 0.9), ("scores", 0.8)])
def test_what_was_judged_becomes_the_answer_to_each_prompt(kind: str, least: float) -> None:
    rows = rows_of(kind, 60)
    right = dict(tickets(200))
    taught = rows_taught(rows[:40], rows[40:], BOT)
    for side, asked in ((taught.train, rows[:40]), (taught.held_out, rows[40:])):
        prompts = list(dict.fromkeys(str(row["prompt_hash"]) for row in asked))
        recorded = [row for row in side if not row["prompt_hash"].startswith("recombined-")]
        assert [
            row["prompt_hash"] for row in recorded
        ] == prompts  # once each, however many answers were judged
        shown = [row["completion"] == right[row["prompt"][0]["content"]] for row in recorded]
        assert sum(shown) >= least * len(shown)  # a third of it would be luck
        assert all(set(row) <= {"prompt", "prompt_hash", "state", "facts", "completion"} for row in side)
    assert "its answer to each of" in taught.note


def test_the_classifier_learns_from_the_eval_split_too() -> None:
    """Watched is how well its answers are learnt, so it need not be kept from those prompts."""
    rows = rows_of("pairs", 60)
    assert f"learnt from {len(rows)} pairs" in rows_taught(rows[:40], rows[40:], BOT).note


def test_wordings_are_no_choice_to_teach() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "chosen": f"good {n}", "rejected": f"bad {n}"}
        for n in range(40)
    ]
    with pytest.raises(LinearRefused, match="answers that are a choice"):
        rows_taught(rows, [], BOT)


def rated(count: int, *, wordings: bool = False) -> None:
    """One thumb each on an answer to different tickets."""
    for place, (text, queue) in enumerate(tickets(count)):
        answer = queue if place % 2 else QUEUES[(QUEUES.index(queue) + 1) % 3]
        said = f"{answer}, ticket {place}" if wordings else answer
        decision = decision_record(agent="tickets", messages=text, response=said).row
        rating_submit(decision=decision, rater="ada", thumb="up" if answer == queue else "down")


@pytest.mark.slow
@pytest.mark.django_db
def test_auto_has_a_classifier_teach_the_bundled_base_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.jobs.method_selection.FEWEST_TAUGHT", {CLOSED: 30, LISTED: 30})
    rated(60)
    chosen = method_chosen("tickets", base_model="bundled")
    assert (chosen.method, chosen.knobs) == ("sft", {"feedback": "scores"})
    assert "answers are a choice" in chosen.reason
    # a model that knows what tickets say hears the thumbs by itself
    assert method_chosen("tickets", base_model="Qwen/Qwen2.5-0.5B-Instruct").method == "kto"
    assert method_chosen("tickets").method == "kto"
    assert order_automatic("tickets").method == "sft"
    assert order_automatic("tickets", base_model="/models/own").method == "kto"


@pytest.mark.slow
@pytest.mark.django_db
def test_auto_leaves_wordings_and_few_prompts_to_the_language_model() -> None:
    rated(60)
    assert FEWEST_TAUGHT[CLOSED] > 40
    assert method_chosen("tickets", base_model="bundled", min_samples=4).method == "kto"
    rated(60, wordings=True)
    assert method_chosen("tickets", base_model="bundled").method == "kto"


@pytest.mark.training
@pytest.mark.django_db
def test_a_run_learns_what_the_classifier_shows(tmp_path: Path) -> None:
    rated(60)
    knobs: dict[str, Any] = {
        "feedback": "scores", "max_steps": 2, "min_steps": 0, "batch_size": 4, "lora_r": 2, "lora_alpha": 4,
    }  # fmt: skip
    order = TrainOrder("tickets", "sft", "cpu", str(tiny_model(tmp_path / "base")), knobs)
    report = train.train(order)
    run = TrainingRun.objects.get()
    assert run.snapshot is not None
    prompts = {row["prompt_hash"] for row in snapshot_rows(run.snapshot, "train")}
    assert (run.snapshot.kind, report["status"], report["samples"]["train"]) == (
        "scores",
        "succeeded",
        len(prompts),
    )
    assert any(note.startswith("taught by a linear classifier that learnt from") for note in report["notes"])


def form_rows(count: int) -> list[dict[str, Any]]:
    """Pairs on prompts with fields; the queue follows the topic."""
    topics = dict(zip(("bill", "login", "van"), QUEUES, strict=True))
    return [
        {
            "prompt": [{"role": "user", "content": f"topic: {topic}\ntone: {tone}\nplace: {place}"}],
            "prompt_hash": f"{topic}-{tone}-{place}", "chosen": topics[topic],
            "rejected": QUEUES[(QUEUES.index(topics[topic]) + 1 + place % 2) % 3],
        }
        for place in range(count)
        for topic, tone in [(list(topics)[place % 3], ("calm", "angry", "short", "long")[place // 3 % 4])]
    ]  # fmt: skip


def test_few_prompts_are_shown_among_others_made_of_their_parts() -> None:
    rows = form_rows(40)
    taught = rows_taught(rows, [], BOT)
    made = [row for row in taught.train if row["prompt_hash"].startswith("recombined-")]
    prompts = {json.dumps(row["prompt"]) for row in taught.train}
    assert len(taught.train) == len(prompts) == len(rows) + len(made) <= SHOWN_PROMPTS
    assert len(made) > 2 * len(rows)
    assert f"({len(made)} of them recombined)" in taught.note
    topics = dict(zip(("bill", "login", "van"), QUEUES, strict=True))
    right = [row["completion"] == topics[row["prompt"][0]["content"].split()[1]] for row in made]
    assert sum(right) > 0.9 * len(right)


def test_few_corrections_are_shown_as_they_are_with_recombined_prompts_beside_them() -> None:
    rows = [{**row, "completion": row["chosen"], "source": "correction"} for row in form_rows(40)]
    rows[3]["completion"] = QUEUES[1]  # what a person wrote stays, whatever the classifier says
    taught = rows_recombined(rows[:30], rows[30:], BOT)
    assert taught.train[:30] == rows[:30]
    assert taught.held_out == rows[30:]
    made = taught.train[30:]
    assert 2 * len(rows) < len(made) <= SHOWN_PROMPTS - 30
    assert f"answered {len(made)} recombined prompts" in taught.note
    topics = dict(zip(("bill", "login", "van"), QUEUES, strict=True))
    right = [row["completion"] == topics[row["prompt"][0]["content"].split()[1]] for row in made]
    assert sum(right) > 0.9 * len(right)


def test_only_corrections_have_prompts_recombined_beside_them() -> None:
    with pytest.raises(RecipeError, match="expected feedback corrections, found pairs"):
        SFTRecipe(feedback="pairs", recombine=True)


def corrected(count: int, *, wordings: bool = False) -> None:
    """A correction of each answer to different tickets."""
    for place, (text, queue) in enumerate(tickets(count)):
        wrong = QUEUES[(QUEUES.index(queue) + 1) % 3]
        decision = decision_record(agent="tickets", messages=text, response=wrong).row
        rating_submit(
            decision=decision, rater="ada", correction=f"{queue}, ticket {place}" if wordings else queue
        )


@pytest.mark.slow
@pytest.mark.django_db
def test_auto_recombines_few_corrections_of_choices_for_the_bundled_base_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl.jobs.method_selection.FEWEST_TAUGHT", {CLOSED: 30, LISTED: 30})
    corrected(60)
    chosen = method_chosen("tickets", base_model="bundled")
    assert (chosen.method, chosen.knobs) == ("sft", {"recombine": True})
    assert "prompts are few" in chosen.reason
    assert method_chosen("tickets", base_model="Qwen/Qwen2.5-0.5B-Instruct").knobs == {}
    monkeypatch.setattr("rl.jobs.method_selection.SHOWN_PROMPTS", 20)
    assert method_chosen("tickets", base_model="bundled").knobs == {}


@pytest.mark.slow
@pytest.mark.django_db
def test_auto_leaves_corrected_wordings_as_they_are() -> None:
    corrected(80, wordings=True)
    chosen = method_chosen("tickets", base_model="bundled")
    assert (chosen.method, chosen.knobs) == ("sft", {})


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_a_run_learns_corrections_and_what_the_classifier_says_of_others(tmp_path: Path) -> None:
    corrected(60)
    knobs: dict[str, Any] = {
        "recombine": True, "max_steps": 2, "min_steps": 0, "batch_size": 4, "lora_r": 2, "lora_alpha": 4,
    }  # fmt: skip
    report = train.train(TrainOrder("tickets", "sft", "cpu", str(tiny_model(tmp_path / "base")), knobs))
    assert report["status"] == "succeeded"
    assert any("recombined prompts" in note for note in report["notes"])


def test_prompts_whose_state_lists_the_answers_are_not_recombined() -> None:
    rows = [{**row, "state": {"options": list(QUEUES)}} for row in form_rows(40)]
    assert len(rows_taught(rows, [], BOT).train) == len(rows)


@pytest.mark.slow
@pytest.mark.django_db
def test_a_run_on_wordings_is_refused_with_what_to_train(tmp_path: Path) -> None:
    rated(60, wordings=True)
    order = TrainOrder("tickets", "sft", "cpu", str(tiny_model(tmp_path / "base")), {"feedback": "scores"})
    with pytest.raises(TrainingRefused, match="train_sft, train_dpo and train_kto learn to write"):
        train.train(order)
    assert TrainingRun.objects.get().status == "refused"


def test_the_best_answer_to_a_prompt_is_the_one_that_won_or_is_liked() -> None:
    def row(prompt: str, **columns: Any) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": prompt}], "prompt_hash": prompt, **columns}

    def pair(chosen: str, rejected: str, prompt: str = "p") -> dict[str, Any]:
        return row(prompt, chosen=chosen, rejected=rejected)

    def scored(completion: str, score: float, prompt: str) -> dict[str, Any]:
        return row(prompt, completion=completion, score=score)

    rows = [
        pair("a", "b"), pair("b", "c"), pair("a", "c"),
        pair("x", "y", "tied"), pair("y", "x", "tied"),
        scored("fine", 0.7, "s"), scored("best", 1.0, "s"), scored("bad", 0.0, "disliked"),
    ]  # fmt: skip
    assert [(one["prompt_hash"], one["completion"]) for one in preferred_rows(rows)] == [
        ("p", "a"),
        ("s", "best"),
    ]
    assert all(
        set(row) <= {"prompt", "prompt_hash", "state", "facts", "completion"} for row in preferred_rows(rows)
    )


def orders_rated(count: int) -> None:
    """One thumb each on objects of three values, of which hardly two are the same."""
    for place in range(count):
        answer = {"dish": f"dish {place % 9}", "seats": place % 7, "notes": [f"n{place % 5}"]}
        decision = decision_record(agent="tables", messages=f"guest {place}", response=json.dumps(answer)).row
        rating_submit(decision=decision, rater="ada", thumb="up" if place % 2 else "down")


@pytest.mark.slow
@pytest.mark.django_db
def test_auto_shows_the_bundled_base_liked_objects() -> None:
    orders_rated(160)
    chosen = method_chosen("tables", base_model="bundled")
    assert (chosen.method, chosen.knobs) == ("sft", {"feedback": "scores", "teacher": "preferred"})
    assert "answers that people preferred or liked are the demonstrations" in chosen.reason
    assert method_chosen("tables", base_model="Qwen/Qwen2.5-0.5B-Instruct").method == "kto"


@pytest.mark.django_db
def test_thumbs_on_a_built_in_agent_are_left_to_kto_and_pairs_are_not() -> None:
    prepared = SimpleNamespace(rows=lambda split: _object_pairs(40))
    pairs, thumbs = (
        MethodChoice("dpo", "auto took dpo: 40 pairs"),
        MethodChoice("kto", "auto took kto: 40 good"),
    )
    found = [_of_preferred("librarian", like, "pairs", prepared) for like in (pairs, thumbs)]  # type: ignore[arg-type]
    assert [choice and choice.method for choice in found] == ["sft", None]


def _object_pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"text {place}"}],
            "prompt_hash": str(place),
            "chosen": json.dumps({"subjects": [f"s{place}"]}),
            "rejected": json.dumps({"subjects": [f"t{place}"]}),
        }
        for place in range(count)
    ]


@pytest.mark.parametrize(("teacher", "imitated"), [("preferred", 3), ("classifier", 0)])
def test_the_gate_counts_the_way_to_preferred_answers_for_a_policy_that_was_shown_them(
    teacher: str, imitated: int
) -> None:
    policy: Any = SimpleNamespace(run=SimpleNamespace(recipe={"teacher": teacher}))
    liked = {"prompt": [], "prompt_hash": "liked", "completion": "{}", "score": 1.0}
    thumbs = [liked, {**liked, "prompt_hash": "no", "score": 0.0}]
    held_out: Any = SimpleNamespace(rows={PAIRS: _object_pairs(2), LABELS: thumbs})
    assert len(_preferred_rows(held_out, policy, get_agent("filer"))) == imitated


@pytest.mark.slow
@pytest.mark.django_db
def test_few_liked_objects_are_left_to_kto() -> None:
    orders_rated(50)
    assert method_chosen("tables", base_model="bundled").method == "kto"


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_a_run_learns_the_preferred_answers(tmp_path: Path) -> None:
    orders_rated(100)
    knobs: dict[str, Any] = {
        "feedback": "scores", "teacher": "preferred",
        "max_steps": 2, "min_steps": 0, "batch_size": 4, "lora_r": 2, "lora_alpha": 4,
    }  # fmt: skip
    train.train(TrainOrder("tables", "sft", "cpu", str(tiny_model(tmp_path / "base")), knobs))
    run = TrainingRun.objects.get()
    assert run.status == "succeeded"
    assert run.snapshot is not None
    liked = sum(row["score"] > 0.5 for row in snapshot_rows(run.snapshot, "train"))
    assert f"preferred or liked are the demonstrations, of {liked} prompts" in str(run.result["notes"])


@pytest.mark.slow
@pytest.mark.django_db
def test_a_run_without_a_liked_answer_is_refused(tmp_path: Path) -> None:
    for place in range(60):
        decision = decision_record(agent="tables", messages=f"guest {place}", response=f"no {place}").row
        rating_submit(decision=decision, rater="ada", thumb="down")
    knobs = {"feedback": "scores", "teacher": "preferred"}
    order = TrainOrder("tables", "sft", "cpu", str(tiny_model(tmp_path / "base")), knobs)
    with pytest.raises(TrainingRefused, match="preferred or liked: rate at"):
        train.train(order)


def taught_policy(**recipe: str) -> Any:
    return SimpleNamespace(run=SimpleNamespace(recipe=recipe))


def test_the_way_to_liked_answers_counts_for_a_policy_that_a_classifier_taught_to_write() -> None:
    # of an agent that writes within a schema; one that chooses what its state lists has no way to go
    rows = [{"prompt": [{"role": "user", "content": "q"}], "completion": '{"folder": "a"}', "score": 1.0}]
    listed = [{**rows[0], "state": {"document": "q", "folders": ["a", "b"]}}]
    held_out: Any = SimpleNamespace(rows={LABELS: rows})
    chosen: Any = SimpleNamespace(rows={LABELS: listed})
    filer = get_agent("filer")
    taught = taught_policy(teacher="classifier", feedback="scores")
    assert len(_preferred_rows(held_out, taught, filer)) == 1
    assert _preferred_rows(chosen, taught, filer) == []
    assert len(_preferred_rows(chosen, taught_policy(teacher="preferred", feedback="scores"), filer)) == 1
    for other in (
        {"teacher": "classifier", "feedback": "corrections"},
        {"teacher": "form", "feedback": "scores"},
        {},
    ):
        assert _preferred_rows(held_out, taught_policy(**other), filer) == []
