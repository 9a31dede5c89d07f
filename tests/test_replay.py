"""A retrain that goes on from what is there: the champion's weights, and a share of the older feedback."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from safetensors.torch import load_file

from feedback.models import Rating, prompt_hash
from feedback.selectors import prompts_of_feedback
from rl.datasets import prepare_training_dataset, snapshot_rows
from rl.datasets.buffer import feedback_take
from rl.datasets.examples import Replay
from rl.datasets.pairs import Pair, RowSet
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.plan import dataset_prepare, feedback_unlearnt
from rl.jobs.run_recipe import recipe_for
from rl.models import LearnerSettings, Learnt, Policy, TrainingRun
from rl.models.runs import RunRefused
from rl.online.learner import OnlineLearner
from rl.recipes import RECIPES, DPORecipe, GRPORecipe, PPORecipe, RecipeError
from rl.registry import service as registry
from rl.training.encoding import EncodedResponse
from rl.training.grpo import GRPOTrainer
from rl.training.kto import KTOTrainer
from rl.training.policy import load_policy
from rl.training.ppo import PPOTrainer
from rl.training.result import TrainingRefused
from rl.training.rewarding import Judge
from rl.training.rollout import Rollout
from rl.training.scoring import score_encoded
from rl.training.sft import SFTTrainer
from tests.support.dataset_feedback import feed, prompts_in, rate
from tests.support.dpo_runs import HARDWARE, a_trainer, some_pairs
from tests.support.registry_rows import make_run, registered
from tests.support.rollout_runs import ROWS, Length
from tests.support.tiny_models import tiny_model
from tests.test_kto_sft import KTO, SFT, demonstrations, labels

pytestmark = pytest.mark.django_db


def rows(count: int, split: Any = "train") -> RowSet[Pair]:
    pairs = [
        Pair(f"{number:064x}", "yes", "no", "ratings", 1.0, 1, split, (), False) for number in range(count)
    ]
    return RowSet(tuple(pairs), {})


def test_what_is_replayed() -> None:
    # every prompt with new feedback is trained on
    new = frozenset(f"{number:064x}" for number in range(7))
    assert [row.prompt_hash for row in Replay(0.0, new).draw(rows(50), "1").rows] == sorted(new)
    # a share of the others is drawn and the rest counted
    drawn = Replay(0.25, frozenset()).draw(rows(4000), "1")
    # binomial with 4,000 and 1/4: 1,000 with a standard deviation of 27
    assert 860 < len(drawn.rows) < 1140
    assert drawn.left_out == {"not_replayed": 4000 - len(drawn.rows)}
    # another retrain draws others and the same one the same
    replay = Replay(0.25, frozenset())
    first, again, other = (replay.draw(rows(400), salt).rows for salt in ("480", "480", "580"))
    assert first == again
    assert set(first) != set(other)
    # held out rows always stay
    assert len(Replay(0.0, frozenset()).draw(rows(20, "holdout"), "1").rows) == 20


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_0_to_1_is_no_recipe(share: float) -> None:
    with pytest.raises(RecipeError, match="replay_share"):
        DPORecipe(replay_share=share)


def learnt() -> TrainingRun:
    """A successful run that learnt from all feedback there is."""
    run = TrainingRun.objects.create(agent="helper", method="dpo", status="queued", base_model="bundled")
    feedback_take(run)
    run.learnt.update(use=Learnt.Use.TRAINED)
    TrainingRun.objects.filter(pk=run.pk).update(status="succeeded", finished_at=timezone.now())
    return run


def test_a_snapshot_says_what_was_replayed() -> None:
    feed()
    learnt()
    old = set(prompts_in("train", 12))
    fresh = [prompt for prompt in prompts_in("train", 15) if prompt not in old]
    for prompt in fresh:
        rate(prompt, "yes", "up")
        rate(prompt, "no", "down")
    order = TrainOrder("helper", knobs={"replay_share": 0.5})
    prepared = dataset_prepare(order, DPORecipe(replay_share=0.5), feedback_unlearnt(order))
    assert prepared.snapshot is not None
    prompts = [row["prompt"][0]["content"] for row in snapshot_rows(prepared.snapshot, "train")]
    assert set(fresh) < set(prompts)
    replayed = set(prompts) - set(fresh)
    assert replayed < old
    assert prepared.snapshot.query["replay"] == {
        "share": 0.5,
        "salt": "40",
        "new_prompts": 3,
        "train_rows_new": 3,
        "train_rows_replayed": len(replayed),
    }
    assert prepared.left_out["not_replayed"] == 12 - len(replayed)
    assert prepared.counts["holdout"] == 3


def test_all_feedback_is_the_dataset_of_a_whole_share() -> None:
    feed()
    order = TrainOrder("helper")
    whole = dataset_prepare(order, DPORecipe(), feedback_unlearnt(order))
    assert whole.snapshot == prepare_training_dataset("helper").snapshot
    assert "replay" not in whole.query


def test_beyond_the_buffers_size_feedback_counts_as_older() -> None:
    feed(train=3, eval=0, holdout=0)
    ids = list(Rating.objects.values_list("pk", flat=True))
    newest = prompts_in("train", 3)[-1]
    assert prompts_of_feedback(ids, newest=2) == {
        prompt_hash("helper", [{"role": "user", "content": newest}])
    }
    assert len(prompts_of_feedback(ids)) == 3


def test_a_file_is_not_replayed(tmp_path: Path) -> None:
    order = TrainOrder("helper", source="file", data_file=tmp_path / "x.jsonl")
    with pytest.raises(RunRefused, match="a file is trained on completely"):
        dataset_prepare(order, DPORecipe(replay_share=0.5), [])


@pytest.fixture(scope="module")
def adapter(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = dataclasses.replace(KTO, max_steps=3)
    folder = tmp_path_factory.mktemp("begun")
    return Path(KTOTrainer(recipe, base, output_dir=folder, hardware=HARDWARE).train(labels(16)).checkpoint)


def still(recipe: Any, folder: Path) -> Any:
    """The recipe from this adapter, with steps too small to move float32 weights, and another rank."""
    return dataclasses.replace(
        recipe, start_from=str(folder), learning_rate=1e-30, max_steps=1, lora_r=2, lora_alpha=2
    )


@pytest.mark.training
@pytest.mark.parametrize("method", ["dpo", "kto", "sft"])
def test_training_begins_with_its_start(base: str, adapter: Path, tmp_path: Path, method: str) -> None:
    more: dict[str, Any] = {"output_dir": tmp_path, "hardware": HARDWARE}
    if method == "dpo":
        recipe = still(DPORecipe(batch_size=4, max_length=96), adapter)
        result = a_trainer(base, tmp_path, recipe).train(some_pairs(8))
        # the base model stays the reference: what the adapter already prefers shows in the first margin
        assert abs(result.history["rewards/margins"][0]) > 1e-3
    elif method == "kto":
        result = KTOTrainer(still(KTO, adapter), base, **more).train(labels(8))
    else:
        result = SFTTrainer(still(SFT, adapter), base, **more).train(demonstrations(8))
    before, after = (
        load_file(Path(folder) / "adapter_model.safetensors") for folder in (adapter, result.checkpoint)
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert any("starts from the weights of" in note for note in result.notes)


SAMPLED: dict[str, Any] = {"batch_size": 4, "max_length": 96, "max_new_tokens": 8}
STARTS = {
    "ppo": (PPOTrainer, PPORecipe(mini_batch_size=4, ppo_epochs=1, **SAMPLED), ROWS),
    "grpo": (GRPOTrainer, GRPORecipe(num_generations=2, **SAMPLED), ROWS),
    "grpo held to the base": (GRPOTrainer, GRPORecipe(num_generations=2, reference="base", **SAMPLED), ROWS),
}


def prefixes(item: EncodedResponse) -> list[list[EncodedResponse]]:
    """Each token of a response as a response of its own, so that its log-probability stands alone."""
    return [
        [EncodedResponse([*item.prompt_ids, *item.response_ids[:at]], [token])]
        for at, token in enumerate(item.response_ids)
    ]


@pytest.mark.training
@pytest.mark.parametrize("method", STARTS)
def test_sampling_begins_with_the_policy_it_starts_from_and_is_held_to_it(
    base: str, adapter: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, recipe, rows = STARTS[method]
    answered: list[list[Rollout]] = []
    judge = Judge.judge

    def noted(self: Judge, rows: Any, rollouts: Any) -> Any:
        answered.append(list(rollouts))
        return judge(self, rows, rollouts)

    monkeypatch.setattr(Judge, "judge", noted)
    begun_with = still(recipe, adapter).with_knobs(
        allow_constant_reward=True
    )  # no probe before the first answers
    result = trainer(begun_with, base, output_dir=tmp_path, hardware=HARDWARE, rewards=[Length()]).train(
        rows, rows[:3]
    )
    before, after = (
        load_file(Path(folder) / "adapter_model.safetensors") for folder in (adapter, result.checkpoint)
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert any("starts from the weights of" in note for note in result.notes)
    # what is priced is the distance from where it began, unless the base is asked for
    assert (result.history["kl"][0] > 1e-3) == (recipe.reference == "base")
    # the first answers, to held-out prompts, as two models loaded on their own have them
    items = [rollout.item for rollout in answered[0]]
    begun, bare = (
        [score_encoded(model, cut)[0] for item in items for cut in prefixes(item)]
        for model in (load_policy(base, path, hardware=HARDWARE) for path in (adapter, None))
    )
    away = sum(math.expm1(theirs - mine) - (theirs - mine) for mine, theirs in zip(begun, bare, strict=True))
    away /= len(items)
    assert away > 1e-3
    assert result.history["eval_kl"][0] == pytest.approx(away, abs=1e-4)


@pytest.mark.slow
def test_an_adapter_of_another_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = str(tiny_model(tmp_path / "other", "llama", seed=1))
    with pytest.raises(TrainingRefused, match="was trained on"):
        SFTTrainer(still(SFT, adapter), other, output_dir=tmp_path / "run", hardware=HARDWARE).train(
            demonstrations(4)
        )


def champion(home: Path, base_model: str = "bundled") -> Policy:
    folder = home / "policies" / "helper" / "helper-v1"
    folder.mkdir(parents=True)
    policy = registered(make_run("helper", base_model=base_model), "helper-v1", folder)
    return registry.policy_promote(policy, actor="test", reason="the first", force=True)


def settled(wanted: str, **facts: Any) -> Any:
    order = TrainOrder("helper", config="cpu", knobs={"start_from": wanted}, **facts)
    return recipe_for(order, HARDWARE)[1].as_dict()["start_from"]


@pytest.mark.parametrize("method", ["dpo", "ppo", "grpo"])
def test_champion_stands_for_the_one_there_is(ratchet_home: Path, method: str) -> None:
    assert settled("champion", method=method) == "base"
    champion(ratchet_home)
    assert settled("champion", method=method) == "helper-v1"
    assert settled("champion", method=method, base_model="another") == "base"


def test_a_policy_that_cannot_be_started_from_is_refused(ratchet_home: Path) -> None:
    policy = champion(ratchet_home)
    with pytest.raises(RunRefused, match="is an adapter for bundled"):
        settled("helper-v1", base_model="another")
    shutil.rmtree(ratchet_home / policy.adapter_path)
    with pytest.raises(RunRefused, match="its files were deleted"):
        settled("helper-v1")
    with pytest.raises(registry.RegistryRefused, match="no policy is named"):
        settled("helper-v99")


def test_the_one_started_from_is_the_parent(ratchet_home: Path) -> None:
    begun = champion(ratchet_home)
    registry.policy_retire(begun, actor="test")
    run = make_run("helper", recipe={"start_from": begun.name})
    assert registered(run, "helper-v2", ratchet_home, adapter_sha256="b" * 64).parent == begun


def test_the_learner_asks_for_what_its_settings_say(settings: Any) -> None:
    settings.ENABLE_ONLINE_LEARNING = True
    feed()
    LearnerSettings.objects.create(
        agent="helper", min_samples_to_retrain=5, start_from="champion", replay_share=0.25
    )
    run = OnlineLearner("helper").trigger_retrain()
    assert run.recipe == {"start_from": "champion", "replay_share": 0.25}


def test_the_knob_is_of_the_methods_that_train_an_adapter_alone() -> None:
    assert {method for method, presets in RECIPES.items() if hasattr(presets["default"], "start_from")} == {
        "dpo",
        "kto",
        "sft",
        "ppo",
        "grpo",
    }
    with pytest.raises(RecipeError, match="base, champion or the name"):
        DPORecipe(start_from="")
