"""Rewards that cannot teach are refused before a model loads, or after a small probe; runs that diverge are stopped."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from rl.agents import get_agent
from rl.jobs.teachability import rate_sum, teachability_warning
from rl.management.simulation import simulate
from rl.models import Policy, TrainingRun
from rl.recipes import GRPO_CONFIG, PPO_CONFIG, DPORecipe
from rl.rewards.answers import rows_rewarded, teaching_fault
from rl.rewards.base import RewardSample, RewardValue
from rl.rewards.catalogue import rewards_named
from rl.training.encoding import EncodedResponse
from rl.training.grpo import GRPOTrainer
from rl.training.ppo import PPOTrainer
from rl.training.result import TrainingFailed, TrainingRefused, TrainResult
from rl.training.rewarding import Judge, RewardProbe, probe_fault
from rl.training.rollout import PATIENCE, Rollout, Watch, repetition_of
from tests.support.figures import figures_of
from tests.support.said import printed as run
from tests.support.tiny_models import HARDWARE


def fault_of(names: list[str], rows: list[dict[str, Any]], agent: str) -> tuple[str, bool]:
    return teaching_fault(rewards_named(names, code_execution=True), rows, agent)


ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize(
    ("rewards", "row", "said"),
    [
        (["agent"], {}, "agent is constant over valid answers: each earns 1, as the prompts have no state"),
        (["agent"], {"state": {"question": "q"}}, "agent assistant does not know which is right"),
        (["format", "syntax"], {}, "format is constant over valid answers"),
        (["answer"], {}, "answer applies to none of 3 prompts: the prompt has no right answer"),
        (["code_execution"], {"facts": {"answer": 1}}, "code_execution applies to none of 3 prompts"),
        (["tool_success", "task_completion"], {"facts": {"steps": [1]}}, "a sampled answer has none"),
        (["agent", "answer"], {}, "agent is constant"),
    ],
)
def test_the_unteachable_needs_no_model(rewards: list[str], row: dict[str, Any], said: str) -> None:
    fault, may_insist = fault_of(rewards, [ROW | row] * 3, "assistant")
    assert said in fault
    # form can be learnt on purpose; what never applies cannot
    assert may_insist == ("constant" in fault)


@pytest.mark.parametrize(
    ("rewards", "row", "agent"),
    [
        (["answer"], {"facts": {"answer": 1}}, "assistant"),
        (["format", "answer"], {"facts": {"answer": 1}}, "assistant"),
        (["agent"], {"state": {"filed_in": "a/b"}}, "filer"),
        (["efficiency"], {}, "assistant"),
        (["tests.test_teachability.nothing"], {}, "assistant"),
    ],
)
def test_what_may_teach_is_let_through(rewards: list[str], row: dict[str, Any], agent: str) -> None:
    assert fault_of(rewards, [ROW, ROW | row], agent) == ("", False)


def nothing(sample: RewardSample) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.parametrize("command", ["train_ppo", "train_grpo"])
def test_the_default_reward_is_refused_where_each_valid_answer_earns_the_same(command: str) -> None:
    simulate("widgets", scenarios=40, rated=True)
    with pytest.raises(
        CommandError, match=r"constant over valid answers.*Such a reward teaches the answer format only"
    ):
        run(command, "--agent", "widgets", "--config", "cpu")
    with pytest.raises(CommandError, match="Such a reward teaches the answer format only"):
        run(command, "--agent", "widgets", "--config", "cpu", "--dry-run")
    assert not TrainingRun.objects.exists()
    with pytest.raises(CommandError, match="no/such/model"):  # who insists comes to the model
        run(
            command,
            *"--agent widgets --model no/such/model --config cpu --set allow_constant_reward=true".split(),
        )


def probed(*groups: list[tuple[str, float, bool]]) -> list[RewardProbe]:
    return [RewardProbe(prompt, *one) for prompt, group in enumerate(groups) for one in group]


def test_probes() -> None:
    # a probe looks for one prompt with two scores
    alike = [("a", 1.0, True), ("b", 1.0, True)]
    assert "constant on a probe of 4 sampled answers to 2 prompts (all 1)" in probe_fault(
        probed(alike, alike)
    )
    other = [("a", 2.0, True), ("b", 2.0, True)]
    assert "1 to 2, the same within each prompt" in probe_fault(probed(alike, other))
    assert probe_fault(probed(alike, [("a", 1.0, True), ("b", 1.5, True)])) == ""
    # a probe knows form from content
    form = [("a", 1.0, True), ("b", 1.0, True), ("?", -2.0, False)]
    assert "only form can be learnt" in probe_fault(probed(*[form] * 4))
    assert probe_fault(probed(*[form] * 3)) == ""  # too few valid answers to say so
    assert probe_fault(probed(*[form] * 4, [("a", 1.0, True), ("b", 2.0, True)])) == ""
    # a policy that says one thing is told apart from a constant reward
    assert "same answer each time" in probe_fault(probed([("a", 1.0, True)] * 2, [("b", 2.0, True)] * 2))


class Constant:
    name = "constant"

    def __init__(self, value: float | None = 0.5) -> None:
        self.value = value

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(self.value, {"why": "a test"}) for _ in samples]


class Short:
    name = "short"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(max(-2.0, 2 - 0.2 * len(sample.response))) for sample in samples]


SMALL = {"max_steps": 4, "batch_size": 8, "max_new_tokens": 6, "max_length": 64, "lora_r": 2, "save_steps": 1}
SMALL |= {"epochs": 1.0}
TRAINERS: dict[str, Any] = {
    "ppo": (PPOTrainer, replace(PPO_CONFIG["cpu"], mini_batch_size=8, ppo_epochs=1, **SMALL)),
    "grpo": (GRPOTrainer, replace(GRPO_CONFIG["cpu"], num_generations=4, **SMALL)),
}
ROWS = [{"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(8)]


@pytest.mark.campaign
@pytest.mark.parametrize("method", TRAINERS)
def test_a_constant_reward_is_refused_after_the_probe(base: str, tmp_path: Path, method: str) -> None:
    trainer, recipe = TRAINERS[method]

    def train(folder: str, reward: Any, **knobs: Any) -> TrainResult:
        made = trainer(
            replace(recipe, **knobs), base, output_dir=tmp_path / folder, hardware=HARDWARE, rewards=[reward]
        )
        return made.train(ROWS)  # type: ignore[no-any-return]

    with pytest.raises(TrainingRefused, match="constant on a probe of 64 sampled answers to 8 prompts"):
        train("constant", Constant())
    with pytest.raises(TrainingRefused, match="no reward applies"):
        train("never", Constant(None))
    assert train("insisted", Constant(), allow_constant_reward=True, max_steps=1).status == "succeeded"


def test_an_answer_that_cannot_be_acted_on_earns_the_worst_whatever_a_judge_says() -> None:
    state = {"document": "a letter", "folders": ["Mail", "Office"]}
    row = {"prompt": [{"role": "user", "content": "where?"}], "state": state}
    answers = ['{"folder": "Mail"}', '{"folder": "Elsewhere"}', "Mail"]
    rewarded = rows_rewarded([Constant(1.5)], [row] * 3, answers, agent="filer")
    assert [one.raw for one in rewarded] == [1.5, -2.0, -2.0]
    rollouts = [Rollout(0, EncodedResponse([1], [2]), True, text) for text in answers]
    assert Judge([Constant(1.5)], get_agent("filer")).judge([row], rollouts).scores == [1.5, -2.0, -2.0]
    # free text has no form to leave
    assert Judge([Constant(1.5)], get_agent("assistant")).judge([row], rollouts).scores == [1.5] * 3


@pytest.mark.slow
def test_prompts_that_no_reward_can_judge_are_left_out(base: str, tmp_path: Path) -> None:
    trainer, recipe = TRAINERS["grpo"]
    rows = [row | ({"facts": {"answer": "x"}} if n < 5 else {}) for n, row in enumerate(ROWS)]
    result = trainer(
        replace(recipe, max_steps=1, allow_constant_reward=True),
        base,
        output_dir=tmp_path,
        hardware=HARDWARE,
        rewards=rewards_named(["answer"]),
    ).train(rows)
    assert result.samples["train"] == 5
    assert any("3 of 8 prompts left out, as no reward applies" in note for note in result.notes)


def seen(watch: Watch, *rows: dict[str, float]) -> list[bool]:
    return [bool(watch.see(step, row)) for step, row in enumerate(rows, 1)]


def test_a_kl_stops_a_run() -> None:
    # a kl that stays too far stops a run and a single one does not
    watch = Watch(30.0)
    assert seen(watch, {"kl": 1}, {"kl": 40}, {"kl": 5}, {"kl": 31}, {"kl": 32}) == [False] * 5
    assert watch.last_good == 3
    assert figures_of(watch.see(6, {"kl": 33})) == [6, 33, 30]
    assert (watch.bad, watch.last_good) == (PATIENCE, 3)
    # a kl far beyond or no number stops at once
    assert seen(Watch(30.0), {"kl": 228.0}) == [True]
    assert seen(Watch(30.0), {"kl": math.nan}) == [True]
    assert seen(Watch(0.0), {"kl": 1e9}) == [False]
    # a run that begins far from the base is measured from there
    watch = Watch(30.0, from_base=False)
    assert seen(watch, {"kl": 367}, {"kl": 390}, *[{"kl": 400}] * 3) == [False, False, False, False, True]
    assert "400 nats per response, 367 at first, 30 allowed" in watch.reason


@pytest.mark.parametrize(
    ("name", "first", "later", "said"),
    [
        ("ended", 0.9, 0.1, "10 % of answers end, 90 % did before"),
        ("valid", 0.5, 0.0, "0 % of answers are valid, 50 % were before"),
        ("valid", 0.98, 0.62, "62 % of answers are valid, 98 % were before"),
        ("tokens", 20.0, 61.0, "answers have 61 tokens, 20 at first"),
        ("repetition", 0.1, 0.9, "90 % of what answers say they said before"),
    ],
)
def test_endless_or_repeated_answers_stop_a_run(name: str, first: float, later: float, said: str) -> None:
    watch = Watch(30.0)
    assert seen(watch, {name: first}, *[{name: later}] * 3) == [False, False, False, True]
    assert said in watch.reason
    assert seen(Watch(30.0), *[{name: later}] * 4) == [False] * 4  # it began so: nothing was lost


def test_what_was_lost_again_or_shrinks_stops_a_run() -> None:
    # what was learnt and lost again stops a run too: 30 % at first, 90 % for three rows, then 60 %: below
    # three quarters of what was held.
    watch = Watch(30.0)
    rows = [{"valid": share} for share in (0.3, 0.9, 0.9, 0.9, 0.6, 0.6, 0.6)]
    assert seen(watch, *rows) == [False] * 6 + [True]
    assert watch.last_good == 4
    # one lucky row is not held
    assert seen(Watch(30.0), *[{"valid": share} for share in (0.5, 1.0, 0.5, 0.5, 0.5)]) == [False] * 5
    # answers that shrink to nothing stop a run where they ended before
    short = [{"tokens": 3.0, "ended": 1.0}] * 3
    assert seen(Watch(30.0), {"tokens": 20.0, "ended": 0.9}, *short)[-1]
    assert not seen(Watch(30.0), {"tokens": 48.0, "ended": 0.1}, *short)[-1]  # it rambled, and learnt to end
    # repetition is the share of four grams said before
    # 1 2 3 4 1 2 3 4: five 4-grams, 1234 twice; all different: none; shorter than four: not counted
    assert repetition_of([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert repetition_of([[1] * 8, [1, 2, 3, 4, 5], [1]]) == pytest.approx((4 / 5 + 0) / 2)
    assert repetition_of([[1, 2]]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("method", TRAINERS)
def test_divergence_ends_with_the_last_good_checkpoint(base: str, tmp_path: Path, method: str) -> None:
    trainer, recipe = TRAINERS[method]
    knobs: dict[str, Any] = {"learning_rate": 0.3, "max_kl": 1e-3, "max_steps": 30}
    result: TrainResult = trainer(
        replace(recipe, **knobs), base, output_dir=tmp_path, hardware=HARDWARE, rewards=[Short()]
    ).train(ROWS)
    assert result.status == "succeeded"
    assert result.stopped_early.startswith("diverged at step")
    assert result.steps < 30
    assert f"the policy is that of step {result.steps}" in result.stopped_early
    assert f"stopped early: {result.stopped_early}" in result.notes
    kept = (
        tmp_path / "checkpoints" / f"checkpoint-{result.steps}" / "adapter_model.safetensors"
    ).read_bytes()
    assert (Path(result.checkpoint) / "adapter_model.safetensors").read_bytes() == kept
    assert TrainResult.load(result.save(tmp_path / "result.json")).stopped_early == result.stopped_early


@pytest.mark.slow
def test_a_run_that_diverges_before_a_checkpoint_fails(base: str, tmp_path: Path) -> None:
    trainer, recipe = TRAINERS["ppo"]
    knobs = {"learning_rate": 0.3, "max_kl": 1e-3, "max_steps": 30, "save_steps": 30}
    rows = [
        {"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(300)
    ]  # an epoch is long
    with pytest.raises(TrainingFailed, match="before a checkpoint was written"):
        trainer(
            replace(recipe, **knobs), base, output_dir=tmp_path, hardware=HARDWARE, rewards=[Short()]
        ).train(rows)


@pytest.mark.campaign
@pytest.mark.django_db
def test_a_stopped_run_says_so_on_its_row(base: str) -> None:
    simulate("widgets", scenarios=40, rated=True)
    found = json.loads(
        run(
            "train_grpo", "--agent", "widgets", "--config", "cpu", "--model", base, "--reward",
            "tests.test_train_ppo.short", "--batch-size", "8", "--num-generations", "4", "--max-new-tokens", "6",
            "--max-length", "256", "--lora-r", "2", "--max-steps", "20", "--learning-rate", "0.3", "--set",
            "max_kl=0.001", "--set", "save_steps=1", "--set", "allow_constant_reward=true", "--set",
            "constrained_decoding=false", "--json",
        )
    )  # fmt: skip
    assert found["stopped_early"].startswith("diverged at step")
    entered = TrainingRun.objects.get(pk=found["run"])
    assert entered.status == TrainingRun.Status.SUCCEEDED
    assert entered.reason == f"stopped early: {found['stopped_early']}"
    assert Policy.objects.get(name=found["policy"]).run == entered


@pytest.mark.parametrize(
    ("scheduler", "warmup", "by_hand"),
    [
        ("constant", 0.5, 4.0),  # no warm-up: 1 + 1 + 1 + 1
        ("constant_with_warmup", 0.5, 0.5 + 2.0),  # 0, 1/2, then 1 and 1
        ("linear", 0.5, 0.5 + 1.5),  # 0, 1/2, then 1 and 1/2
        ("cosine", 0.5, 0.5 + 1.5),  # 0, 1/2, then 1 and 1/2
        ("cosine", 0.0, 2.5),  # 1, 0.854, 1/2, 0.146
    ],
)
def test_the_rates_of_four_steps_add_up(scheduler: str, warmup: float, by_hand: float) -> None:
    recipe = DPORecipe(lr_scheduler=scheduler, warmup_ratio=warmup, learning_rate=1.0)
    assert rate_sum(recipe, 4) == pytest.approx(by_hand)


def test_a_rate_that_no_number_of_steps_makes_up_for_is_answered_at_once() -> None:
    """It was counted up to without end, while a request to plan a training waited."""
    found = teachability_warning(DPORecipe(learning_rate=1e-300, max_steps=10**12), 100, "pairs")
    assert "give a higher --learning-rate" in found
