"""A stop request in each phase of a training: it interrupts at once, keeps what was done, and is resumed from there."""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backend.command import Pace
from rl.jobs.progress import StopRequest, stop_signals
from rl.recipes import GRPORecipe, KTORecipe, PPORecipe, SFTRecipe
from rl.training import ppo
from rl.training.dpo import PairTrainer
from rl.training.grpo import GroupTrainer, GRPOTrainer
from rl.training.kto import KTOTrainer
from rl.training.ppo import PPOTrainer
from rl.training.preference import PHASE as WARM_UP
from rl.training.result import Silent, TrainResult
from rl.training.sft import SFTTrainer
from rl.training.trl_trainer import EVALUATING, TRAINING
from tests.support.dpo_runs import HARDWARE, QUICK, a_trainer, some_pairs
from tests.test_ppo import ROWS, Length

SHORT: dict[str, Any] = {"batch_size": 4, "lora_r": 4, "lora_alpha": 8, "max_length": 96, "warmup_ratio": 0.0}
SHORT |= {"max_steps": 4}


class Interrupting(Silent):
    """Sends this process Ctrl-C in a phase (once it is `done` far), or after a step."""

    def __init__(self, stop: StopRequest, phase: str = "", done: int = 0, step: int = 0) -> None:
        self.stop, self.phase, self.done, self.step = stop, phase, done, step
        self.phases: list[tuple[str, int, int]] = []
        self.steps: list[int] = []

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self.phases.append((name, done, total))
        if name == self.phase and done >= self.done and not self.stop.asked:
            signal.raise_signal(signal.SIGINT)

    def on_step(self, step: int, total: int) -> None:
        self.steps.append(step)
        if step == self.step:
            signal.raise_signal(signal.SIGINT)

    def should_stop(self) -> bool:
        return self.stop.asked

    def hold(self) -> None:
        self.stop.hold()

    def release(self) -> None:
        self.stop.release()


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with stop_signals() as request:
        yield request


def same_weights(one: TrainResult, other: TrainResult) -> None:
    first, second = (load_file(Path(r.checkpoint) / "adapter_model.safetensors") for r in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-4)


def test_a_stop_waits_only_while_a_step_is_written(stop: StopRequest) -> None:
    stop.hold()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)  # a launcher repeats it
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the second Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        stop.release()


def test_a_stop_from_another_thread_interrupts_the_main_one(stop: StopRequest) -> None:
    def wait() -> None:
        stop.ask()
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert stop.asked


@pytest.mark.campaign
@pytest.mark.training
def test_dpo_stops_in_each_phase_without_trace(base: str, tmp_path: Path, stop: StopRequest) -> None:
    rows, recipe = some_pairs(12), dataclasses.replace(QUICK, warm_up_steps=4, max_steps=3, epochs=1.0)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(rows)
    for resume, (phase, done) in enumerate(
        [
            ("loading the model", 0),
            (WARM_UP, 2),
            ("reference pass", 1),
            ("testing the fast path", 0),
            (TRAINING, 0),
        ]
    ):
        stop.asked = stop.held = False
        listener = Interrupting(stop, phase, done)
        with pytest.raises(KeyboardInterrupt):
            a_trainer(base, tmp_path / "run", recipe, listener=listener, resume=resume > 0).train(rows)
        assert listener.phases[-1][0] == phase
        if phase == "reference pass":  # the warm-up went on from its second step of four
            assert [done for name, done, total in listener.phases if name == WARM_UP and total] == [3, 4]
    stop.asked = stop.held = False
    listener = Interrupting(stop)
    resumed = a_trainer(base, tmp_path / "run", recipe, listener=listener, resume=True).train(rows)
    assert listener.steps == [1, 2, 3]
    assert not [name for name, _, _ in listener.phases if name.startswith(WARM_UP)]
    same_weights(whole, resumed)


@pytest.mark.training
def test_mid_step(base: str, tmp_path: Path, stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_pairs(12)
    recipe = dataclasses.replace(QUICK, max_steps=4, gradient_accumulation=2, lora_dropout=0.1)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(rows)
    compute, calls = PairTrainer._compute_loss, []

    def interrupted(self: PairTrainer, *args: Any) -> Any:
        loss = compute(self, *args)
        calls.append(self.state.global_step)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(PairTrainer, "_compute_loss", interrupted)
    listener = Interrupting(stop)
    result = a_trainer(base, tmp_path / "run", recipe, listener=listener).train(rows)
    assert (result.status, result.steps, calls[-1]) == ("cancelled", 2, 2)
    stop.asked = stop.held = False
    resumed = a_trainer(base, tmp_path / "run", recipe, listener=listener, resume=True).train(rows)
    assert listener.steps == [1, 2, 3, 4]
    same_weights(whole, resumed)


@pytest.mark.training
def test_mid_eval(base: str, tmp_path: Path, stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, recipe = some_pairs(12), dataclasses.replace(QUICK, max_steps=4, eval_steps=2)
    loop = PairTrainer.evaluation_loop

    def interrupted(self: PairTrainer, *args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return loop(self, *args, **kwargs)

    listener = Interrupting(stop)
    with monkeypatch.context() as patch:
        patch.setattr(PairTrainer, "evaluation_loop", interrupted)
        result = a_trainer(base, tmp_path / "run", recipe, listener=listener).train(rows, rows[:4])
    assert (result.status, result.steps) == ("cancelled", 2)
    stop.asked = stop.held = False
    resumed = a_trainer(base, tmp_path / "run", recipe, listener=listener, resume=True).train(rows, rows[:4])
    assert resumed.history["eval_step"] == [2, 4]


def _sft(base: str, folder: Path, **options: Any) -> tuple[Any, list[Any]]:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in some_pairs(12)]
    return SFTTrainer(SFTRecipe(**SHORT), base, output_dir=folder, hardware=HARDWARE, **options), rows


def _kto(base: str, folder: Path, **options: Any) -> tuple[Any, list[Any]]:
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in some_pairs(8)
        for side in ("chosen", "rejected")
    ]
    return KTOTrainer(
        KTORecipe(**SHORT, warm_up_steps=0), base, output_dir=folder, hardware=HARDWARE, **options
    ), rows


SAMPLED = SHORT | {"batch_size": 8, "max_new_tokens": 8, "max_steps": 3, "learning_rate": 5e-3}


def _grpo(base: str, folder: Path, **options: Any) -> tuple[Any, list[Any]]:
    recipe = GRPORecipe(**SAMPLED, num_generations=4)
    return GRPOTrainer(
        recipe, base, output_dir=folder, hardware=HARDWARE, agent="assistant", rewards=[Length()], **options
    ), ROWS


def _ppo(base: str, folder: Path, **options: Any) -> tuple[Any, list[Any]]:
    recipe = PPORecipe(**SAMPLED, mini_batch_size=4)
    return PPOTrainer(
        recipe, base, output_dir=folder, hardware=HARDWARE, agent="assistant", rewards=[Length()], **options
    ), ROWS


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.parametrize("method", [_sft, _kto, _grpo, _ppo])
def test_a_stop_after_a_step_ends_with_the_same_weights(
    base: str, tmp_path: Path, stop: StopRequest, method: Callable[..., tuple[Any, list[Any]]]
) -> None:
    trainer, rows = method(base, tmp_path / "whole")
    whole = trainer.train(rows)
    trainer, rows = method(base, tmp_path / "run", listener=Interrupting(stop, step=2))
    stopped = trainer.train(rows)
    assert (stopped.status, stopped.steps) == ("cancelled", 2)
    stop.asked = stop.held = False
    listener = Interrupting(stop)
    trainer, rows = method(base, tmp_path / "run", listener=listener, resume=True)
    same_weights(whole, trainer.train(rows))
    assert listener.steps[0] == 3


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.parametrize("method", [_grpo, _ppo])
def test_a_stop_while_answers_are_sampled_goes_back_to_the_last_step(
    base: str,
    tmp_path: Path,
    stop: StopRequest,
    monkeypatch: pytest.MonkeyPatch,
    method: Callable[..., tuple[Any, list[Any]]],
) -> None:
    trainer, rows = method(base, tmp_path / "whole")
    whole = trainer.train(rows)
    owner, name = (GroupTrainer, "_generate_single_turn") if method is _grpo else (ppo, "update")
    original, listener = getattr(owner, name), Interrupting(stop)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if listener.steps == [1]:
            signal.raise_signal(signal.SIGINT)  # of PPO after its weights were changed
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        trainer, rows = method(base, tmp_path / "run", listener=listener)
        stopped = trainer.train(rows)
    assert (stopped.status, stopped.steps) == ("cancelled", 1)
    stop.asked = stop.held = False
    trainer, rows = method(base, tmp_path / "run", resume=True)
    same_weights(whole, trainer.train(rows))


@pytest.mark.training
def test_a_stop_in_the_last_evaluation_is_no_success(base: str, tmp_path: Path, stop: StopRequest) -> None:
    rows, recipe = some_pairs(12), dataclasses.replace(QUICK, max_steps=2)
    listener = Interrupting(stop, EVALUATING)
    with pytest.raises(KeyboardInterrupt):
        a_trainer(base, tmp_path / "run", recipe, listener=listener).train(rows, rows[:4])
    assert listener.steps == [1, 2]
    stop.asked = stop.held = False
    resumed = a_trainer(base, tmp_path / "run", recipe, listener=Interrupting(stop), resume=True)
    assert resumed.train(rows, rows[:4]).status == "succeeded"


def test_counted_work_tells_its_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("backend.command.time.monotonic", lambda: clock[0])
    pace, said = Pace(), []
    for done in (1, 2, 5, 100):
        said.append(pace.words(done, 100))
        clock[0] += 4.0
    assert said == ["", "4.0 s each, 7 min left", "2.0 s each, 3 min left", ""]
    assert pace.words(1, 50) == ""  # other work
