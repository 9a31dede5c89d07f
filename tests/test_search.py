"""A search over recipes: which are tried, which is kept, and that what is left says so."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from rl.models import TrainingRun
from rl.recipes import DPORecipe, KTORecipe, RecipeError, SFTRecipe, recipe_named
from rl.training import search
from rl.training.result import Silent, TrainingFailed, TrainingRefused, TrainResult
from rl.training.search import SearchTrainer, tries_of
from tests.support.dataset_feedback import feed
from tests.support.dpo_runs import HARDWARE
from tests.support.tiny_models import tiny_model


def test_the_first_try_is_the_recipe_and_no_two_are_alike() -> None:
    recipe = DPORecipe(search=20, learning_rate=1e-3, epochs=2.0, batch_size=10, min_steps=40)
    tries = tries_of(recipe, 100)
    assert tries[0] == {}
    assert len({json.dumps(one, sort_keys=True) for one in tries}) == 20
    assert tries == tries_of(recipe, 100)
    # 100 rows in tens are 10 steps a pass, so that 40 steps are 4 passes, of which half and twice are tried
    assert {one["epochs"] for one in tries if "epochs" in one} == {2.0, 8.0}
    assert all(one["min_steps"] == 0 for one in tries if "epochs" in one)
    assert {one["learning_rate"] for one in tries if "learning_rate" in one} == {2.5e-4, 5e-4, 2e-3, 4e-3}
    assert {one["beta"] for one in tries if "beta" in one} == {0.03, 0.3}


def test_what_the_figure_depends_on_is_not_tried() -> None:
    for recipe in (KTORecipe(search=50), SFTRecipe(search=50)):
        tries = tries_of(recipe, 100)
        assert len(tries) == 15  # five learning rates by three passes, and no beta
        assert not any("beta" in one for one in tries)
    assert len(tries_of(KTORecipe(search=50, loss="logistic"), 100)) == 45
    assert len(tries_of(SFTRecipe(search=50, max_steps=7), 100)) == 5
    for method in ("ppo", "grpo"):
        with pytest.raises(RecipeError, match="samples its own"):
            recipe_named(method, "cpu", {"search": 4})


class Trained:
    """Stands in for a trainer: what comes out is a function of the learning rate."""

    def __init__(self, recipe: Any, base: str, *, output_dir: Path, **facts: Any) -> None:
        self.recipe, self.output_dir = recipe, output_dir

    def train(self, rows: Any, eval_rows: Any) -> TrainResult:
        rate = self.recipe.learning_rate
        (self.output_dir / "adapter").mkdir(parents=True)
        (self.output_dir / "adapter" / "weights").write_text(str(rate))
        if rate > 1:
            raise TrainingFailed("the loss became nan")
        return TrainResult(
            "sft", "succeeded", str(self.output_dir / "adapter"), "base", "hash", 3, 3, 1.0,
            metrics={"eval_loss": abs(rate - 0.5)}, history={"step": [1.0, 2.0], "loss": [2.0, rate]},
            recipe=self.recipe.as_dict(),
        )  # fmt: skip


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchTrainer:
    monkeypatch.setattr(search, "load_policy", lambda *_, **__: None)
    recipe = SFTRecipe(search=5, learning_rate=1.0, max_steps=3)
    return SearchTrainer(
        Trained, recipe, output_dir=tmp_path, listener=Silent(), hardware=HARDWARE, cache_dir=None
    )


def test_the_least_figure_is_kept_and_one_that_fails_is_shown(trainer: SearchTrainer) -> None:
    result = trainer.train([1], [1])
    found = {one["learning_rate"]: one for one in result.search["tries"]}
    assert {rate: one["value"] for rate, one in found.items()} == {
        1.0: 0.5, 0.5: 0.0, 0.25: 0.25, 2.0: None, 4.0: None,
    }  # fmt: skip
    assert found[4.0]["failed"] == "the loss became nan"
    assert [rate for rate, one in found.items() if one["kept"]] == [0.5]
    assert (Path(result.checkpoint) / "weights").read_text() == "0.5"
    assert not (trainer.output_dir / "search").exists()
    assert (result.recipe["learning_rate"], result.recipe["search"]) == (0.5, 5)
    assert "optimistic" in result.notes[0]


def test_a_search_that_was_stopped_keeps_the_tries_it_has(
    trainer: SearchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = Trained.train, []
    trainer.recipe = dataclasses.replace(trainer.recipe, learning_rate=0.2)  # none of its tries fails

    def stopped(self: Trained, rows: Any, eval_rows: Any) -> TrainResult:
        made.append(self.recipe.learning_rate)
        if len(made) == 2:
            return dataclasses.replace(whole(self, rows, eval_rows), status="cancelled", steps=1)
        return whole(self, rows, eval_rows)

    monkeypatch.setattr(Trained, "train", stopped)
    cancelled = trainer.train([1], [1])
    assert (cancelled.status, cancelled.steps, cancelled.total_steps) == ("cancelled", 4, 15)
    shutil.rmtree(trainer.output_dir / "search" / "try-2")  # what a trainer of its own goes on with
    trainer.resume = True
    assert trainer.train([1], [1]).status == "succeeded"
    assert len(made) == 6  # the first was not trained again
    assert made[1] == made[2]


def test_without_eval_rows_there_is_nothing_to_search_by(trainer: SearchTrainer) -> None:
    with pytest.raises(TrainingRefused, match="eval split"):
        trainer.train([1], [])


@pytest.mark.training
@pytest.mark.django_db
def test_every_try_stands_in_the_result_and_on_the_page(
    tmp_path: Path, admin_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    feed()
    base = tiny_model(tmp_path / "base")
    knobs = ["warm_up_steps=0", "lora_alpha=4", "min_steps=0"]
    call_command(
        "train_dpo", "--agent", "helper", "--model", str(base), "--search", "3", "--max-steps", "2", "--lora-r", "2",
        *[word for knob in knobs for word in ("--set", knob)], "--json",
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    tries = report["search"]["tries"]
    values = [one["value"] for one in tries]
    assert len(tries) == 3
    assert all(0 <= value <= 0.6932 for value in values)  # ln 2 is a coin's
    (kept,) = [one for one in tries if one["kept"]]
    assert kept["value"] == min(values) == report["metrics"]["eval_ranking_loss"]
    run = TrainingRun.objects.get()
    assert (run.recipe["learning_rate"], run.recipe["beta"]) == (kept["learning_rate"], kept["beta"])
    assert run.steps_done == 2
    page = admin_client.get(f"/runs/{run.pk}/").content.decode()
    assert page.count("<dt>Try ") == 3
    assert "the holdout was not looked at" in page
