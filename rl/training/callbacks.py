"""Callbacks of every TRL trainer here: the run is reported to its listener, and stops when the listener asks for it.

A stop request interrupts a run anywhere except between the optimizer's step and the start of the next one. The weights
are then those of the last whole step, and `train_stoppable` keeps them as a checkpoint.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback

from rl.training.progress import TrainListener

TRAINING = "training"
"""Name of the phase in which optimiser steps are made."""

EVALUATING = "measuring on the eval split"
"""Name of the phase in which the eval split is measured."""

SHOWN_AFTER_S = 3.0
"""Seconds after which an evaluation between two steps is shown as a phase of its own."""


class ListenerCallback(TrainerCallback):
    """Reports a run to its listener, and passes the listener's request to stop to the run. Rank 0 decides for all."""

    def __init__(self, trainer: Trainer, listener: TrainListener) -> None:
        self.trainer, self.listener = trainer, listener
        self.evaluated = 0
        """Batches of the present evaluation; 0 outside one."""
        self.evaluation_start = 0.0
        self.evaluation_shown = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.listener.on_start(state.max_steps)
            self.listener.on_phase(TRAINING)
        if args.world_size > 1:
            self.listener.hold()  # one process alone must not leave a step: all stop together, after one
        elif _evaluation_missing(args, state):
            self.trainer._determine_best_metric(self.trainer._evaluate(None, None), None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1:
            self.listener.release()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.listener.hold()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.evaluated:
            self.evaluation_start = time.monotonic()
        self.evaluated += 1
        loader = kwargs.get("eval_dataloader")
        late = self.evaluation_shown or time.monotonic() - self.evaluation_start > SHOWN_AFTER_S
        if state.is_world_process_zero and loader is not None and late:
            self.evaluation_shown = True
            self.listener.on_phase(EVALUATING, self.evaluated, max(self.evaluated, len(loader)))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.evaluation_shown and state.global_step < state.max_steps:
            self.listener.on_phase(TRAINING)
        self.evaluated, self.evaluation_shown = 0, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.step_randomness = randomness()
        stop = [False]
        if state.is_world_process_zero:
            self.listener.on_step(state.global_step, state.max_steps)
            stop = [self.listener.should_stop()]
        if args.world_size > 1:
            broadcast_object_list(stop)
        if state.global_step >= state.max_steps or stop[0]:
            control.should_log = True
            control.should_save = True
        if stop[0]:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        row = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if state.is_world_process_zero and {"loss", "eval_loss", "eval_reward"} & set(row):
            self.listener.on_metrics(state.global_step, row)


def _evaluation_missing(args: Any, state: Any) -> bool:
    """True if a resumed run was stopped in the evaluation that its newest step was to have."""
    due = args.eval_strategy == "steps" and state.global_step and state.global_step % args.eval_steps == 0
    return bool(due) and not any(
        "eval_loss" in row and row["step"] == state.global_step for row in state.log_history
    )


Randomness = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]
"""States of the generators of Python, numpy, torch and each CUDA device."""


def randomness() -> Randomness:
    """The states that a step leaves behind."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def randomness_restore(states: Randomness) -> None:
    """Put the generators where the last whole step left them: an interrupted one has drawn from them."""
    python, of_numpy, of_torch, cuda = states
    random.setstate(python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


class TimeLimit(TrainerCallback):
    """Ends a run before the step that would pass its deadline, with the weights it has. Rank 0 decides for all."""

    def __init__(self, deadline: float, minutes: float) -> None:
        self.deadline, self.minutes = deadline, minutes
        self.step_began = time.monotonic()
        self.reason = ""
        """Reason why the run was ended; empty while it was not."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        over = [is_over(self.deadline, self.step_began)]
        if args.world_size > 1:
            broadcast_object_list(over)
        if over[0] and state.global_step < state.max_steps and not control.should_training_stop:
            self.reason = limit_reason(state.global_step, state.max_steps, self.minutes)
            control.should_log = control.should_save = control.should_training_stop = True
            control.should_evaluate = args.eval_strategy != "no"


def is_over(deadline: float | None, step_began: float) -> bool:
    """True if another step as long as the present one would pass the deadline."""
    now = time.monotonic()
    return deadline is not None and 2 * now - step_began > deadline


def limit_reason(step: int, steps: int, minutes: float) -> str:
    """Words for a run that its minutes ended."""
    return f"at step {step} of {steps}: its {minutes:g} minutes were over"


def history_columns(rows: list[dict[str, Any]], evaluated: str = "eval_loss") -> dict[str, list[float]]:
    """Columns of transformers' log: training rows against `step`, evaluation rows against `eval_step`.

    A training row has a `loss`, an evaluation row has what `evaluated` names; one row may be both.
    """
    history: dict[str, list[float]] = {}
    for prefix, step, mark in (("", "step", "loss"), ("eval_", "eval_step", evaluated)):
        rows_by_step = {row["step"]: row for row in rows if mark in row}  # a repeated step counts once
        if not rows_by_step:
            continue
        history[step] = [float(at) for at in rows_by_step]
        names = sorted({name for row in rows_by_step.values() for name in row} - {"step"})
        for name in names:
            if name.startswith("eval_") == bool(prefix):
                history[name] = [float(row.get(name, math.nan)) for row in rows_by_step.values()]
    return history
