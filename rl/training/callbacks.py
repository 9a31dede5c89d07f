"""Callbacks of every TRL trainer here: the run is reported to its listener, and stops when the listener asks for it."""

from __future__ import annotations

import math
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback

from rl.training.progress import TrainListener

TRAINING = "training"
"""Name of the phase in which optimiser steps are made."""


class ListenerCallback(TrainerCallback):
    """Reports a run to its listener, and passes the listener's request to stop to the run. Rank 0 decides for all."""

    def __init__(self, trainer: Trainer, listener: TrainListener) -> None:
        self.trainer, self.listener = trainer, listener

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.listener.on_start(state.max_steps)
            self.listener.on_phase(TRAINING)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
