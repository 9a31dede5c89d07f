"""Linear reward models: what they rank that a small base cannot, their file, registry and round through RLHF."""

import itertools
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from django.core.management import call_command

from feedback.services import decision_record, rating_submit
from rl.jobs import train
from rl.jobs.estimates import order_automatic, order_estimate
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import method_chosen
from rl.linear.features import answer_features
from rl.linear.model import WEIGHTS
from rl.models import AgentDefinition, RewardModelVersion, TrainingRun
from rl.recipes import REWARD_MODEL_CONFIG, RecipeError, RewardModelRecipe
from rl.reward_models.service import fault_of
from rl.rewards.base import RewardSample
from rl.training.loading import PolicyLoadError
from rl.training.reward_model import RewardModelTrainer, train_reward_model
from rl.training.reward_scores import LinearRewardModel, RewardModel
from tests.support.dpo_runs import HARDWARE

pytestmark = pytest.mark.django_db

# A doorman of a block of flats: where it is, how urgent, whether somebody is to be told.
ROOMS = ("cocina", "salón", "baño")
SIGNS = {
    "huele a quemado": ("cocina", 5, True),
    "gotea el grifo": ("baño", 2, False),
    "parpadea la luz": ("salón", 3, False),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "zona": {"enum": list(ROOMS)},
        "prioridad": {"type": "integer", "minimum": 1, "maximum": 5},
        "avisar": {"type": "boolean"},
    },
    "required": ["zona", "prioridad", "avisar"],
    "additionalProperties": False,
}
LINEAR = RewardModelRecipe(architecture="linear", objective="binary")


def answers() -> list[dict[str, Any]]:
    return [
        {"zona": room, "prioridad": level, "avisar": told}
        for room, level, told in itertools.product(ROOMS, range(1, 6), (True, False))
    ]


def liked(answer: dict[str, Any], sign: str) -> bool:
    room, level, told = SIGNS[sign]
    return (answer["zona"] == room) + (abs(answer["prioridad"] - level) <= 1) + (
        answer["avisar"] == told
    ) >= 2


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    random = Random(seed)
    made = []
    for number in range(count):
        sign, answer = random.choice(sorted(SIGNS)), random.choice(answers())
        made.append(
            {
                "prompt": [{"role": "user", "content": f"piso {number % 9}, {seed}{number} h: {sign}"}],
                "completion": json.dumps(answer, ensure_ascii=False),
                "label": liked(answer, sign),
                "score": 0.8 if liked(answer, sign) else 0.1,
            }
        )
    return made


def ranked(model: RewardModel, unseen: list[dict[str, Any]]) -> float:
    """Share of (liked, not liked) pairs of answers whose liked one scores higher."""
    scores = [score for (score,) in model.row_scores(unseen)]
    up = [score for score, row in zip(scores, unseen, strict=True) if row["label"]]
    down = [score for score, row in zip(scores, unseen, strict=True) if not row["label"]]
    return sum(a > b for a, b in itertools.product(up, down)) / (len(up) * len(down))


def thumbs(count: int) -> None:
    AgentDefinition.objects.create(
        slug="portero", system_prompt="Contesta en JSON.", template="{message}", schema=SCHEMA
    )
    for row in rows(count):
        decision = decision_record(agent="portero", messages=row["prompt"], response=row["completion"]).row
        rating_submit(decision=decision, rater="ana", thumb="up" if row["label"] else "down")


def test_an_object_is_read_by_its_values_and_a_single_one_is_not() -> None:
    found = answer_features('{"zona": "baño", "prioridad": 4, "avisar": true}')
    assert {
        "has baño",
        "holds zona=baño",
        "holds prioridad=4",
        "holds prioridad>=4",
        "holds avisar=true",
    } <= set(found)
    ordered = answer_features('{"order": ["b", "a", "c"]}', ("words", "order"))
    assert {"first b", "b before a", "b before c", "a before c"} == set(ordered) - set(
        answer_features('{"order": ["b", "a", "c"]}')
    )
    for single in ('{"folder": "Inbox"}', "Inbox", '["a", "b"]', '{"broken": '):
        assert not any(name.startswith("holds ") for name in answer_features(single))


@pytest.mark.parametrize("objective", ["binary", "regression"])
def test_what_depends_on_prompt_and_value_together_is_ranked(objective: str, tmp_path: Path) -> None:
    recipe = RewardModelRecipe(architecture="linear", objective=objective)
    model, result = train_reward_model(
        rows(300), recipe, output_dir=tmp_path, eval_rows=rows(60, seed=1), hardware=HARDWARE
    )
    assert isinstance(model, LinearRewardModel)
    assert ranked(model, rows(200, seed=2)) > 0.9
    assert (result.steps, result.samples) == (1, {"train": 300, "eval": 60})
    assert {"accuracy", "brier", "calibration_error", "cv_accuracy"} <= set(result.metrics)
    assert result.metrics["brier"] < 0.2
    assert "features of a response" in result.details[-1]
    # its numbers are those of its objective: log-odds, or a score
    unseen = rows(200, seed=2)
    scores = [score for (score,) in model.row_scores(unseen)]
    stated = scores if objective == "regression" else [1 / (1 + math.exp(-score)) for score in scores]
    observed = [row["score" if objective == "regression" else "label"] for row in unseen]
    assert sum(stated) / 200 == pytest.approx(sum(observed) / 200, abs=0.1)
    samples = [RewardSample(row["prompt"], row["completion"], agent="portero") for row in unseen[:20]]
    assert [value.raw for value in model.score(samples)] == pytest.approx(
        [4 * share - 2 for share in stated[:20]]
    )


def test_pairs_are_ranked_and_their_scores_have_a_scale(tmp_path: Path) -> None:
    random, pairs = Random(3), []
    for row in rows(300):
        sign = row["prompt"][0]["content"].partition(": ")[2]
        good = [json.dumps(one) for one in answers() if liked(one, sign)]
        bad = [json.dumps(one) for one in answers() if not liked(one, sign)]
        pairs.append({"prompt": row["prompt"], "chosen": random.choice(good), "rejected": random.choice(bad)})
    recipe = RewardModelRecipe(architecture="linear")
    model, result = train_reward_model(
        pairs[:250], recipe, output_dir=tmp_path, eval_rows=pairs[250:], hardware=HARDWARE
    )
    assert result.metrics["accuracy"] > 0.9
    raw = [model.to_raw(score) for row in model.row_scores(pairs[250:]) for score in row]
    assert max(raw) > 0.5
    assert min(raw) < -0.5


def test_thumbs_of_one_kind_and_rows_of_another_are_refused(tmp_path: Path) -> None:
    trainer = RewardModelTrainer(LINEAR, output_dir=tmp_path, hardware=HARDWARE)
    with pytest.raises(ValueError, match="found only one of the two"):
        trainer.train([row | {"label": True} for row in rows(20)])
    with pytest.raises(ValueError, match="row 0: expected `label`, true or false; found 'yes'"):
        trainer.train([row | {"label": "yes"} for row in rows(20)])
    with pytest.raises(RecipeError, match="architecture must be one of causal, encoder, linear, auto"):
        RewardModelRecipe(architecture="tree")


@pytest.mark.campaign
def test_the_better_of_two_judges_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RewardModelRecipe(architecture="auto", objective="binary", max_steps=1, max_length=96)
    train_rows, watched = rows(60), rows(30, seed=1)
    for place, worse in enumerate((LinearRewardModel, RewardModel)):
        with monkeypatch.context() as patched:
            flat = lambda self, items, batch_size=16: [0.0] * len(items)  # noqa: E731
            if worse is LinearRewardModel:
                patched.setattr(LinearRewardModel, "scores", flat)
                patched.setattr(
                    RewardModel,
                    "scores_encoded",
                    lambda self, items, batch_size=16: [float(row["label"]) for row in watched],
                )
            folder = tmp_path / str(place)
            trainer = RewardModelTrainer(recipe, output_dir=folder, hardware=HARDWARE)
            result = trainer.train(train_rows, watched)
            kept = RewardModel.load(result.checkpoint, HARDWARE)
        assert isinstance(kept, LinearRewardModel) == (worse is RewardModel)
        assert (result.status, result.recipe["architecture"]) == ("succeeded", "auto")
        assert not (folder / "linear").exists()
        # the figures are those of the judge that is kept
        assert ("cv_accuracy" in result.metrics) == isinstance(kept, LinearRewardModel)
        assert (result.steps, result.best_step, result.stopped_early) == (1, 0, "")
        assert "of 30 eval rows as people did" in result.notes[-1]


def test_a_broken_file_is_no_reward_model(tmp_path: Path) -> None:
    train_reward_model(rows(60), LINEAR, output_dir=tmp_path, hardware=HARDWARE)
    (tmp_path / "reward_model" / WEIGHTS).write_text("{")
    with pytest.raises(PolicyLoadError, match="expected a linear policy at"):
        RewardModel.load(tmp_path / "reward_model", HARDWARE)


def test_the_bundled_base_gets_a_linear_judge_beside_its_head_and_others_a_head(settings: Any) -> None:
    thumbs(60)
    chosen = method_chosen("portero", "reward_model", base_model="bundled")
    assert chosen.knobs == {"objective": "binary", "architecture": "auto"}
    assert method_chosen("portero", "reward_model", base_model="Qwen/Qwen3-0.6B").knobs == {
        "objective": "binary"
    }
    stage = order_estimate(order_automatic("portero", "rlhf")).stages[0]
    assert (stage.method, stage.recipe["architecture"]) == ("reward_model", "auto")
    settings.RATCHET_CONFIG = {"reward_model": {"architecture": "linear"}}
    stage = order_estimate(order_automatic("portero", "rlhf")).stages[0]
    assert (stage.steps, stage.recipe["architecture"]) == (1, "linear")
    assert (stage.memory.gb < 1, stage.warning, stage.refusal) == (True, "", "")
    settings.RATCHET_CONFIG = {"reward_model": {"architecture": "causal"}}
    assert method_chosen("portero", "reward_model", base_model="bundled").knobs == {"objective": "binary"}


def test_json_with_texts_keeps_the_score_head_of_the_base() -> None:
    schema = {"type": "object", "properties": {"reply": {"type": "string"}, "urgent": {"type": "boolean"}}}
    AgentDefinition.objects.create(slug="writer", system_prompt="", template="{message}", schema=schema)
    for number in range(30):
        response = json.dumps({"reply": f"Dear {number}, thanks", "urgent": True})
        row = decision_record(agent="writer", messages=f"letter {number}", response=response).row
        rating_submit(decision=row, rater="ana", thumb="up" if number % 2 else "down")
    assert method_chosen("writer", "reward_model", base_model="bundled").knobs == {"objective": "binary"}


def test_free_text_keeps_the_score_head_of_the_base() -> None:
    for number in range(30):
        row = decision_record(
            agent="writer", messages=f"letter {number}", response=f"Dear {number}, thanks"
        ).row
        rating_submit(decision=row, rater="ana", thumb="up" if number % 2 else "down")
    assert method_chosen("writer", "reward_model", base_model="bundled").knobs == {"objective": "binary"}


@pytest.mark.campaign
def test_the_feedback_sets_the_objective(ratchet_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thumbs(200)
    call_command("train_reward_model", "--agent", "portero", "--dry-run", "--json")
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["objective"], recipe["architecture"]) == ("binary", "auto")
    call_command(
        "train_reward_model", "--agent", "portero", "--architecture", "linear", "--dry-run", "--json"
    )
    plan = json.loads(capsys.readouterr().out)
    assert (plan["estimated_steps"], plan["estimated_memory_gb"] < 1) == (1, True)
    call_command("train_reward_model", "--agent", "portero", "--max-steps", "2", "--json")
    report = json.loads(capsys.readouterr().out)
    judge = RewardModelVersion.objects.get()
    # a head of two steps ranks by lot: the linear one beside it is kept, and registered as what it is
    assert (judge.name, judge.architecture) == (report["reward_model"], "linear")
    assert "the linear one is kept;" in report["notes"][-1]
    assert judge.ranking["low"] > 0.5
    assert (ratchet_home / judge.path / WEIGHTS).is_file()
    assert fault_of(judge) == ""
    call_command(
        "train_reward_model",
        "--agent",
        "portero",
        "--objective",
        "regression",
        "--architecture",
        "causal",
        "--dry-run",
        "--json",
    )
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["objective"], recipe["architecture"]) == ("regression", "causal")


@pytest.mark.campaign
@pytest.mark.training
def test_thumbs_on_objects_make_a_policy_by_rlhf(ratchet_home: Path, settings: Any) -> None:
    thumbs(200)
    settings.RATCHET_CONFIG = {"reward_model": {"max_steps": 1}, "sft": {"max_steps": 2}}
    knobs = {"max_steps": 1, "batch_size": 4, "mini_batch_size": 4, "reward": "auto", "eval_prompts": 2}
    report = train.train(TrainOrder("portero", "ppo", "cpu", "bundled", knobs))
    run = TrainingRun.objects.get(pk=report["run"])
    judge = RewardModelVersion.objects.get()
    assert judge.architecture == "linear"
    assert (run.status, run.recipe["reward"]) == ("succeeded", f"model:{judge.name}")


def test_the_preset_says_how_it_is_chosen() -> None:
    assert {recipe.architecture for recipe in REWARD_MODEL_CONFIG.values()} == {"causal"}
    assert (LINEAR.steps(300), LINEAR.steps(0), LINEAR.fit_to_rows(300)) == (1, 0, LINEAR)
