"""TRL's trainers as ours extend them: callbacks, early stopping, checkpoints, stopping within a step."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, send_to_device
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from packed_forward.dpo_trainer import install_forward, is_sharded
from packed_forward.forward import graphs_release, graphs_use
from packed_forward.lazy_metrics import LazyMetrics, LazyScalar
from packed_forward.logps import causal_model
from packed_forward.packing import Strategy, StrategyChoice
from packed_forward.selection import strategy_select
from packed_forward.selftest import Head, install
from rl.recipes.base import AnswerRecipe
from rl.training.encoding import EncodedResponse
from rl.training.general import Rehearsal
from rl.training.policy import LoadedPolicy, adapter_describe, adapter_save
from rl.training.result import TrainingFailed, TrainListener, checkpoint_is_whole, checkpoint_seal
from rl.training.run import RecipeT, RunContext, failures_explained

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset

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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if state.is_world_process_zero:
            self.listener.on_start(state.max_steps)
            self.listener.on_phase(TRAINING)
        if args.world_size > 1:
            self.listener.hold()  # one process alone must not leave a step: all stop together, after one
        elif _evaluation_missing(args, state):
            self.trainer._determine_best_metric(self.trainer._evaluate(None, None), None)

    def on_step_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        if args.world_size == 1:
            self.listener.release()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self.listener.hold()

    def on_prediction_step(
        self,
        args: object,
        state: TrainerState,
        *_: object,
        eval_dataloader: torch.utils.data.DataLoader | None = None,
        **__: object,
    ) -> None:
        if not self.evaluated:
            self.evaluation_start = time.monotonic()
        self.evaluated += 1
        late = self.evaluation_shown or time.monotonic() - self.evaluation_start > SHOWN_AFTER_S
        if state.is_world_process_zero and eval_dataloader is not None and late:
            self.evaluation_shown = True
            self.listener.on_phase(EVALUATING, self.evaluated, max(self.evaluated, len(eval_dataloader)))

    def on_evaluate(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        if self.evaluation_shown and state.global_step < state.max_steps:
            self.listener.on_phase(TRAINING)
        self.evaluated, self.evaluation_shown = 0, False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
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

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        row = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if state.is_world_process_zero and {"loss", "eval_loss", "eval_reward"} & set(row):
            self.listener.on_metrics(state.global_step, row)


def _evaluation_missing(args: TrainingArguments, state: TrainerState) -> bool:
    """True if a resumed run was stopped in the evaluation that its newest step was to have."""
    due = args.eval_strategy == "steps" and state.global_step and state.global_step % args.eval_steps == 0
    return bool(due) and not any(
        "eval_loss" in row and row["step"] == state.global_step for row in state.log_history
    )


Randomness = tuple[tuple[Any, ...], Any, torch.Tensor, list[torch.Tensor]]
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

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.step_began = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
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


LOSS, RANKING_LOSS = "eval_loss", "eval_ranking_loss"
"""Metrics that are least in the best checkpoint: of DPO the ranking loss, of the others the loss itself.
DPO's loss adds the chosen responses' likelihood and is raised by overconfidence, and neither changes which
response comes first."""


def best_evaluation(log: Sequence[Mapping[str, float]], metric: str = LOSS) -> tuple[int, int]:
    """The step of the first of the best evaluations in a log, and how many evaluations followed it; (0, 0) without
    any. A later evaluation of the same step stands for it."""
    values = {int(row["step"]): float(row[metric]) for row in log if metric in row}
    if not values:
        return 0, 0
    steps = sorted(values)
    # a value that is not a number is never the best
    best = min(steps, key=lambda step: (math.isnan(values[step]), values[step], step))
    return best, len(steps) - 1 - steps.index(best)


class EarlyStopping(TrainerCallback):
    """Ends a run after `patience` evaluations without a better one, and evaluates its last step too."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.reason = ""
        """Reason why the run was ended early; empty while it was not."""

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        best, since = best_evaluation(state.log_history, args.metric_for_best_model)
        if since >= self.patience and state.global_step < state.max_steps:
            self.reason = (
                f"at step {state.global_step} of {state.max_steps}: {since} evaluations without an "
                f"improvement on the eval split, best at step {best}"
            )
            control.should_training_stop = True
            control.should_save = True


def head_compact(trainer: Trainer, policy: LoadedPolicy) -> bool:
    """True if the head is ours, over completion positions alone: TRL has its own on CUDA, and only TRL's
    gathers a sharded head or adds a router loss."""
    return policy.device.type != "cuda" and not trainer.aux_loss_enabled and not is_sharded(trainer)


def strategy_apply(
    trainer: Trainer,
    items: Sequence[EncodedResponse],
    head: Head | None = None,
) -> StrategyChoice:
    """Find how packed rows can be computed in a run, on its own `items`, prepare the model for it and note it."""
    policy: LoadedPolicy = trainer.policy
    if getattr(trainer, "aux_loss_enabled", False):
        install(policy, Strategy.STOCK)
        choice = StrategyChoice(Strategy.STOCK, "its router loss depends on every token fed", {})
    elif is_sharded(trainer):
        install(policy, Strategy.STOCK)
        choice = StrategyChoice(
            Strategy.STOCK, "its weights are sharded, and only its own forward gathers them", {}
        )
    else:
        choice = strategy_select(policy, items, gradients=True, head=head)
    if trainer.args.world_size == 1:
        graphs_use(causal_model(policy.model), trainer.context.note)
    policy.strategy = choice.strategy
    policy.strategy_max_tokens = max(len(item.prompt_ids) + len(item.response_ids) for item in items)
    return choice


def trainer_settle(trainer: Trainer, policy: LoadedPolicy, context: RunContext[RecipeT]) -> None:
    """Apply what TRL's constructors have no arguments for: float32 LoRA, its dropout, the listener; no printing."""
    context.phase("testing the fast path")
    trainer.policy, trainer.context = policy, context
    trainer.agent, trainer.method = context.agent, context.method
    policy.model = trainer.model
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL makes a 4-bit model's LoRA bfloat16, too coarse for small steps
            parameter.data = parameter.data.float()
    for name, module in trainer.model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" in name:  # TRL silences it with the others
            module.p = context.recipe.lora_dropout
    trainer.trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    if trainer.args.world_size == 1:  # sharding replaces the parameters
        model_walk_less(trainer.model, trainer.trained)
    trainer.remove_callback(PrinterCallback)  # it prints to stdout
    if trainer.args.load_best_model_at_end:
        trainer.early_stopping = EarlyStopping(context.recipe.patience)
        trainer.add_callback(trainer.early_stopping)
    if context.recipe.checkpoints == "epoch":
        trainer.add_callback(EpochCheckpoints(trainer, context))
    if isinstance(context.recipe, AnswerRecipe) and context.recipe.general_weight > 0:
        trainer.rehearsal = rehearsal_begin(trainer, policy, context, context.recipe)
    trainer.add_callback(ListenerCallback(trainer, context.listener))
    if context.deadline is not None:
        trainer.time_limit = TimeLimit(context.deadline, context.recipe.minutes)
        trainer.add_callback(trainer.time_limit)
    trainer.listener = context.listener if context.main_process else None


def model_walk_less(model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]) -> None:
    """Spare each step two walks over all modules, which take milliseconds: `train` changes nothing in a model that
    trains already, and only trained weights have gradients. On a GPU they would leave it without work."""
    train = model.train

    def train_if_needed(mode: bool = True) -> torch.nn.Module:
        return model if model.training == mode == causal_model(model).training else train(mode)

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in trained:
            parameter.grad = None

    model.train, model.zero_grad = train_if_needed, zero_grad


def rehearsal_begin(
    trainer: Trainer, policy: LoadedPolicy, context: RunContext[RecipeT], recipe: AnswerRecipe
) -> Rehearsal | None:
    """The rehearsal of general prompts that a recipe asks for; None, with a note, where weights are sharded."""
    if is_sharded(trainer):
        context.note("general prompts are not rehearsed: the model's weights are sharded over processes")
        return None
    context.phase("sampling the base model's answers to general prompts")
    return Rehearsal(policy, weight=recipe.general_weight, rows=recipe.rehearsed_rows, seed=recipe.seed)


EPOCHS = "epochs"
"""Folder beside a run's checkpoints that holds the adapter of each whole epoch, where they are kept."""


class EpochCheckpoints(TrainerCallback):
    """Saves the adapter after each whole epoch, complete as a finished one is; nothing removes it."""

    def __init__(self, trainer: Trainer, context: RunContext[RecipeT]) -> None:
        self.trainer, self.context = trainer, context

    def on_epoch_end(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        epoch = round(state.epoch or 0)
        if epoch < 1 or abs(state.epoch - epoch) > 1e-3:  # the part of one with which a run ends
            return
        trainer = self.trainer
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded(trainer) else None
        if state.is_world_process_zero:
            folder = Path(self.context.output_dir) / EPOCHS / f"epoch-{epoch}"
            adapter_save(
                trainer.policy, folder, agent=self.context.agent, method=self.context.method, weights=weights
            )


class TokenizedTrainerMixin:
    """Mixin for TRL's trainers whose rows are tokens already: checkpoints are sealed, no telemetry is sent.

    The underscored methods are TRL 1.16's and transformers 5.23's own; both are pinned.
    """

    policy: LoadedPolicy
    agent: str
    method: str
    model: torch.nn.Module
    args: TrainingArguments
    state: TrainerState
    accelerator: Accelerator
    train_dataset: Dataset
    eval_dataset: Dataset | None
    _metrics: dict[str, dict[str, list[float | LazyScalar]]]
    _total_train_tokens: torch.Tensor | int

    trained: list[torch.nn.Parameter]
    """The weights that have gradients."""
    listener: TrainListener | None = None
    """Listener of the phases outside the steps; None in further processes of a launch."""
    step_randomness: Randomness | None = None
    """States of the random generators after the last whole step; None before it."""
    early_stopping: EarlyStopping | None = None
    """Watcher of the eval split; None: the run makes every step."""
    time_limit: TimeLimit | None = None
    """Watcher of the run's minutes; None: it has no limit."""
    lazy_metrics: LazyMetrics | None = None
    """Metrics that wait on the device until they are logged; None: they are read at once."""
    rehearsal: Rehearsal | None = None
    """Rehearsal of general prompts beside the method's loss; None: there is none."""
    _rehearsed: int = -1
    """Last step in which general prompts were rehearsed."""
    _pending_losses: tuple[tuple[int, str, LazyScalar], ...] = ()
    """Losses not checked for divergence yet: step, advice, value."""

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would report each run to its makers."""

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write none: the adapter is not a model to publish."""

    def _prepare_dataset(self, dataset: Dataset, *args: object, **kwargs: object) -> Dataset:
        return dataset

    def token_rows(self, *columns: str) -> list[EncodedResponse]:
        """Every response of these columns, with its prompt, of both splits."""
        return [
            EncodedResponse(row["prompt_ids"], row[column])
            for data in (self.train_dataset, self.eval_dataset)
            for row in data or ()
            for column in columns
        ]

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """TRL's, which a stop request may interrupt."""
        with self.interruptible():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, within or after a step, a stop request interrupts at once: nothing is written there."""
        if self.listener is None or self.args.world_size > 1:
            yield
            return
        self.listener.release()
        yield
        if self.is_in_train:  # type: ignore[attr-defined]
            self.listener.hold()

    @property
    def was_stopped(self) -> bool:
        """True if training ended before its last step, and neither by the eval split nor by divergence."""
        return self.state.global_step < self.state.max_steps and not self.stopped_early()

    def evaluate_at_end(self) -> dict[str, float]:
        """Metrics on the eval split of the weights that were kept, unless they were evaluated already; none of a run
        that was stopped."""
        if self.was_stopped:
            return {}
        for row in reversed(self.state.log_history):
            if "eval_loss" in row and row.get("step") == (self.best_step() or self.state.global_step):
                return {name: value for name, value in row.items() if name.startswith("eval_")}
        if self.listener is not None:
            self.listener.on_phase(EVALUATING)
        return dict(self.evaluate())

    def best_step(self) -> int:
        """The step of the weights that were kept; 0: the last one's, without early stopping."""
        if self.early_stopping is None:
            return 0
        return best_evaluation(self.state.log_history, self.args.metric_for_best_model)[0]

    def stopped_early(self) -> str:
        """Reason why the eval split or the limit of minutes ended the run; empty where neither did."""
        watchers = (self.early_stopping, self.time_limit)
        return next((watcher.reason for watcher in watchers if watcher is not None and watcher.reason), "")

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """TRL's, after the step's general prompts, whose gradient stands in the weights when that of the first
        micro-batch comes: a wrapper that averages gradients over processes averages it too."""
        if self.rehearsal is not None and self._rehearsed != self.state.global_step:
            self._rehearsed = self.state.global_step
            self._rehearse(self.rehearsal)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss

    def _rehearse(self, rehearsal: Rehearsal) -> None:
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            loss = rehearsal.loss(self.model, self.state.global_step)
        # accelerate divides by the micro-batches of a step, of which this is none
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)
        self._metrics["train"]["general_kl"].append(self.metric(loss.detach() / rehearsal.weight))

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        if self.args.world_size > 1:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return self.accelerator.clip_grad_norm_(self.trained, self.args.max_grad_norm)

    def metric(self, value: torch.Tensor) -> float | LazyScalar:
        """A number of the device for the log: read now, or with the others where metrics wait."""
        return float(value) if self.lazy_metrics is None else self.lazy_metrics.wrap(value).item()

    def metrics_deferred(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what TRL gathers for its metrics waits on the device where metrics do."""
        return (
            contextlib.nullcontext()
            if self.lazy_metrics is None
            else self.lazy_metrics.gather_on_device(self)
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, once what waits on the device is fetched."""
        self.metrics_read()
        super().log(logs, start_time)  # type: ignore[misc]

    def loss_check(self, loss: torch.Tensor, advice: str) -> None:
        """Raises TrainingFailed for a loss that is not a number any more; with a lazy_metrics, when that is read."""
        step = self.state.global_step + 1
        if self.lazy_metrics is not None:
            self._pending_losses += ((step, advice, self.lazy_metrics.wrap(loss).item()),)
        else:
            self._loss_finite(step, advice, float(loss.detach()))

    def _loss_finite(self, step: int, advice: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingFailed(
                f"the loss became {value:g} at step {step} of {self.state.max_steps}: "
                f"training diverged. Lower learning_rate (now {self.args.learning_rate:g}){advice}; "
                "the last whole checkpoint is kept"
            )

    def metrics_read(self) -> None:
        """Fetch what waits on the device. Raises TrainingFailed for a loss among it that is not a number."""
        if self.lazy_metrics is None:
            return
        unchecked, self._pending_losses = self._pending_losses, ()
        for step, advice, loss in unchecked:
            self._loss_finite(step, advice, float(loss))
        for metrics in self._metrics.values():
            for name, values in metrics.items():
                metrics[name] = [v.resolve() if isinstance(v, LazyScalar) else v for v in values]
        if isinstance(self._total_train_tokens, LazyScalar):
            self._total_train_tokens = self._total_train_tokens.resolve()

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        self.metrics_read()  # no checkpoint of a run that has diverged
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            adapter_describe(self.policy, path, agent=self.agent, method=self.method)
            checkpoint_seal(path)


def train_stoppable(trainer: Trainer, context: RunContext[RecipeT], checkpoint: Path | None) -> None:
    """Make the trainer's steps, from a checkpoint where there is one. A stop request keeps the last whole step as a
    checkpoint, and returns. Raises KeyboardInterrupt where no step was made, or all of them, and TrainingFailed.
    """
    try:
        with failures_explained(context):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except KeyboardInterrupt:
        step, randomness = trainer.state.global_step, trainer.step_randomness
        if not context.listener.should_stop() or not 0 < step < trainer.state.max_steps:
            raise
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        if randomness is not None and not checkpoint_is_whole(folder):
            randomness_restore(randomness)
            trainer._save_checkpoint(trainer.model, None)
        return
    finally:
        graphs_release(causal_model(trainer.model))
    if not trainer.was_stopped:
        context.listener.release()


def moved(batch: Mapping[str, object], device: torch.device) -> dict[str, Any]:
    """A batch that a step made itself, on its device; a loader moves its own."""
    if device.type == "cuda":
        batch = {name: value.pin_memory() for name, value in batch.items()}  # type: ignore[attr-defined]
    return dict(send_to_device(batch, device, non_blocking=True))


def forward_settle(trainer: Trainer, temperature: float = 1.0) -> None:
    """`install_forward` into the model of a settled trainer, as its device and its loss need it."""
    install_forward(causal_model(trainer.model), head_compact(trainer, trainer.policy), temperature)
