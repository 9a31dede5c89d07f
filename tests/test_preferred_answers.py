"""The preferred answers as demonstrations: what is shown, when `auto` does so, the run that learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feedback.services import decision_record, rating_submit
from rl.datasets import DatasetRefused, snapshot_rows
from rl.datasets.demonstrations import preferred_rows
from rl.evaluation.service import _preferred_rows
from rl.gates.evidence_kinds import LABELS, PAIRS
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import MethodChoice, _of_preferred, method_chosen
from rl.models import TrainingRun
from tests.support.tiny_models import tiny_model


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


@pytest.mark.parametrize(
    ("recipe", "imitated"),
    [
        ({"teacher": "preferred", "feedback": "scores"}, 3),
        ({"teacher": "preferred", "feedback": "corrections"}, 0),
        ({"teacher": "form", "feedback": "scores"}, 0),
        ({}, 0),
    ],
)
def test_the_gate_counts_the_way_to_preferred_answers_for_a_policy_that_was_shown_them(
    recipe: dict[str, str], imitated: int
) -> None:
    policy: Any = SimpleNamespace(run=SimpleNamespace(recipe=recipe))
    liked = {"prompt": [], "prompt_hash": "liked", "completion": "{}", "score": 1.0}
    thumbs = [liked, {**liked, "prompt_hash": "no", "score": 0.0}]
    held_out: Any = SimpleNamespace(rows={PAIRS: _object_pairs(2), LABELS: thumbs})
    assert len(_preferred_rows(held_out, policy)) == imitated


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
    with pytest.raises(DatasetRefused, match="preferred or liked: rate at"):
        train.train(order)
