"""Common parts of the runs over TRL's trainers: arguments, settings after construction, checkpoints, the result."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PrinterCallback, TrainerCallback

from packed_forward.lazy_metrics import LazyMetrics, LazyScalar
from packed_forward.selection import StrategyChoice, strategy_select
from packed_forward.selftest import Head, install
from packed_forward.strategies import Strategy
from packed_forward.trl_forward import is_sharded
from rl.recipes import BASE, AdapterRecipe, Recipe
from rl.recipes.base import AnswerRecipe, curriculum_order
from rl.training.callbacks import (
    EVALUATING,
    ListenerCallback,
    Randomness,
    TimeLimit,
    history_columns,
    randomness_restore,
)
from rl.training.early_stopping import EarlyStopping, best_evaluation, stopping_arguments
from rl.training.encoding import EncodedResponse
from rl.training.folder import failures_explained
from rl.training.general import Rehearsal
from rl.training.model_files import ADAPTER_FILES, PolicyLoadError, adapter_read
from rl.training.policy import LoadedPolicy, adapter_check, adapter_describe, adapter_save, lora_config
from rl.training.progress import TrainListener, checkpoint_is_whole, checkpoint_last, checkpoint_seal
from rl.training.result import TrainingFailed, TrainingRefused, TrainResult
from rl.training.run_context import RunContext

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "safetensors")


def common_arguments(context: RunContext[Any], *, rows: int = 0, eval_rows: int = 0) -> dict[str, Any]:
    """Keyword arguments that every one of TRL's configs is given, for a run on so many rows; without `eval_rows` it is
    never evaluated."""
    recipe, hardware = context.recipe, context.hardware
    on_gpu = hardware.device == "cuda"
    steps = eval_rows > 0 and recipe.eval_steps > 0
    return {
        "output_dir": str(context.output_dir / "checkpoints"),
        "use_cpu": hardware.device == "cpu",
        "num_train_epochs": recipe.epochs,
        "max_steps": recipe.max_steps,
        "per_device_train_batch_size": recipe.batch_size,
        "per_device_eval_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        "warmup_steps": recipe.warmup_ratio,
        "lr_scheduler_type": recipe.lr_scheduler,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.max_grad_norm,
        "gradient_checkpointing": recipe.gradient_checkpointing,
        # Weights are loaded in the dtype the machine is quick with. Autocast on top is for GPUs, where it lets
        # the LoRA matrices (kept in float32) multiply in half precision; on a CPU it would only add casts.
        "bf16": on_gpu and hardware.dtype == "bfloat16",
        "fp16": on_gpu and hardware.dtype == "float16",
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "train_sampling_strategy": "random" if recipe.curriculum == "none" else "sequential",
        "logging_steps": recipe.logging_steps,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": recipe.save_steps,
        "save_total_limit": 2,
        "eval_strategy": "steps" if steps else "no",
        "eval_steps": recipe.eval_steps if steps else None,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": on_gpu,
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        **stopping_arguments(recipe, recipe.steps(rows), eval_rows),
    }


def rows_ordered(rows: Sequence[Any], recipe: Recipe) -> list[Any]:
    """Training rows easy to hard where the recipe asks for it, else as they are. Raises TrainingRefused."""
    try:
        return [rows[i] for i in curriculum_order(rows, recipe.curriculum)]
    except ValueError as error:
        raise TrainingRefused(str(error)) from error


def one_gpu(arguments: Any) -> list[str]:
    """TRL has no DataParallel: of several GPUs one is used, and the note returned says what uses all."""
    if arguments.n_gpu <= 1:
        return []
    seen = arguments.n_gpu
    arguments._n_gpu = 1
    return [f"{seen} GPUs seen, one is used: `accelerate launch` uses all"]


def head_compact(trainer: Any, policy: LoadedPolicy) -> bool:
    """True if the head is ours, over completion positions alone: TRL has its own on CUDA, and only TRL's
    gathers a sharded head or adds a router loss."""
    return policy.device.type != "cuda" and not trainer.aux_loss_enabled and not is_sharded(trainer)


def strategy_apply(
    trainer: Any,
    items: Sequence[EncodedResponse],
    head: Head | None = None,
    first: Strategy = Strategy.LAST_LAYER,
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
        choice = strategy_select(policy, items, gradients=True, head=head, first=first)
    policy.strategy = choice.strategy
    policy.strategy_max_tokens = max(len(item.prompt_ids) + len(item.response_ids) for item in items)
    return choice


def special_tokens_settle(policy: LoadedPolicy) -> None:
    """Set the special tokens as TRL and transformers would, without their warning."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(policy.model.config, name, getattr(policy.tokenizer, name))


def lora_config_of(recipe: AdapterRecipe, policy: LoadedPolicy) -> LoraConfig:
    """The LoRA to train: the recipe's, or of the shape of the adapter it starts from.

    Raises TrainingRefused for a folder that holds no adapter, or one of another base model.
    """
    if recipe.start_from == BASE:
        return lora_config(recipe, policy.model)
    folder = Path(recipe.start_from)
    try:
        adapter_check(policy, folder, adapter_read(folder))
        config = LoraConfig.from_pretrained(str(folder))
    except (PolicyLoadError, TypeError, ValueError) as error:
        raise TrainingRefused(f"training cannot start from {folder}: {error}") from error
    config.inference_mode, config.lora_dropout = False, recipe.lora_dropout
    return config


def weights_begin(recipe: AdapterRecipe, model: Any) -> list[str]:
    """Put the weights of the adapter that training starts from into the fresh one; returns what to note.

    Raises TrainingRefused where one does not fit.
    """
    if recipe.start_from == BASE:
        return []
    folder = Path(recipe.start_from)
    given = load_file(folder / ADAPTER_FILES[1])
    found = set_peft_model_state_dict(model, given)
    unset = [name for name in found.missing_keys if "lora_" in name]
    if found.unexpected_keys or unset:
        raise TrainingRefused(
            f"the adapter {folder} does not fit: {len(unset)} weights are not in it, {len(found.unexpected_keys)} are "
            "too many; start from base instead"
        )
    shape = "whole weights" if recipe.whole else "its own LoRA rank"
    return [f"starts from the weights of {folder.name}: {len(given)} matrices, {shape}"]


REFERENCE = "ref"
"""Adapter of a reference that is not the base; TRL's own name for it."""


def reference_add(model: Any, policy_adapter: str = "default") -> None:
    """Give a PEFT model a frozen copy of its policy's adapter, as the policy's own weights go on to change."""
    with torch.random.fork_rng():  # its first weights are drawn, and then replaced
        model.add_adapter(REFERENCE, model.peft_config[policy_adapter])
    for name, parameter in model.named_parameters():
        if f".{policy_adapter}." in name:
            copy = model.get_parameter(name.replace(f".{policy_adapter}.", f".{REFERENCE}."))
            copy.data = parameter.data.clone()
    model.set_adapter(policy_adapter)
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in name:
            parameter.requires_grad_(False)


def trainer_settle(trainer: Any, policy: LoadedPolicy, context: RunContext[Any]) -> None:
    """Apply what TRL's constructors have no arguments for: float32 LoRA, its dropout, the listener; no printing."""
    context.phase("testing the fast path")
    trainer.policy, trainer.agent = policy, context.agent
    policy.model = trainer.model
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL makes a 4-bit model's LoRA bfloat16, too coarse for small steps
            parameter.data = parameter.data.float()
    for name, module in trainer.model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" in name:  # TRL silences it with the others
            module.p = context.recipe.lora_dropout
    trainer.remove_callback(PrinterCallback)  # it prints to stdout
    if trainer.args.load_best_model_at_end:
        trainer.early_stopping = EarlyStopping(context.recipe.patience)
        trainer.add_callback(trainer.early_stopping)
    if context.recipe.checkpoints == "epoch":
        trainer.add_callback(EpochCheckpoints(trainer, context))
    if isinstance(context.recipe, AnswerRecipe) and context.recipe.general_weight > 0:
        trainer.rehearsal = rehearsal_begin(trainer, policy, context)
    trainer.add_callback(ListenerCallback(trainer, context.listener))
    if context.deadline is not None:
        trainer.time_limit = TimeLimit(context.deadline, context.recipe.minutes)
        trainer.add_callback(trainer.time_limit)
    trainer.listener = context.listener if context.main_process else None


def rehearsal_begin(
    trainer: Any, policy: LoadedPolicy, context: RunContext[AnswerRecipe]
) -> Rehearsal | None:
    """The rehearsal of general prompts that a recipe asks for; None, with a note, where weights are sharded."""
    recipe = context.recipe
    if is_sharded(trainer):
        context.note("general prompts are not rehearsed: the model's weights are sharded over processes")
        return None
    context.phase("sampling the base model's answers to general prompts")
    return Rehearsal(policy, weight=recipe.general_weight, rows=recipe.rehearsed_rows, seed=recipe.seed)


EPOCHS = "epochs"
"""Folder beside a run's checkpoints that holds the adapter of each whole epoch, where they are kept."""


class EpochCheckpoints(TrainerCallback):
    """Saves the adapter after each whole epoch, complete as a finished one is; nothing removes it."""

    def __init__(self, trainer: Any, context: RunContext[Any]) -> None:
        self.trainer, self.context = trainer, context

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = round(state.epoch or 0)
        if epoch < 1 or abs(state.epoch - epoch) > 1e-3:  # the part of one with which a run ends
            return
        trainer = self.trainer
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded(trainer) else None
        if state.is_world_process_zero:
            folder = Path(self.context.output_dir) / EPOCHS / f"epoch-{epoch}"
            adapter_save(
                trainer.policy, folder, agent=self.context.agent, method=trainer.method, weights=weights
            )


class TokenizedTrainerMixin:
    """Mixin for TRL's trainers whose rows are tokens already: checkpoints are sealed, no telemetry is sent.

    The underscored methods are TRL 1.16's and transformers 5.23's own; both are pinned.
    """

    policy: LoadedPolicy
    agent: str
    method: str
    model: Any
    args: Any
    state: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    _metrics: dict[str, dict[str, list[Any]]]
    _total_train_tokens: Any

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

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: the adapter is not a model to publish."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def token_rows(self, *columns: str) -> list[EncodedResponse]:
        """Every response of these columns, with its prompt, of both splits."""
        return [
            EncodedResponse(row["prompt_ids"], row[column])
            for data in (self.train_dataset, self.eval_dataset)
            for row in data or ()
            for column in columns
        ]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
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

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, after the step's general prompts, whose gradient stands in the weights when that of the first
        micro-batch comes: a wrapper that averages gradients over processes averages it too."""
        if self.rehearsal is not None and self._rehearsed != self.state.global_step:
            self._rehearsed = self.state.global_step
            self._rehearse(self.rehearsal)
        loss: torch.Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        return loss

    def _rehearse(self, rehearsal: Rehearsal) -> None:
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            loss = rehearsal.loss(self.model, self.state.global_step)
        # accelerate divides by the micro-batches of a step, of which this is none
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)
        divergence = loss.detach() / rehearsal.weight
        lazy = self.lazy_metrics
        self._metrics["train"]["general_kl"].append(
            float(divergence) if lazy is None else lazy.wrap(divergence).item()
        )

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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.metrics_read()  # no checkpoint of a run that has diverged
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            adapter_describe(self.policy, path, agent=self.agent, method=self.method)
            checkpoint_seal(path)


def train_stoppable(trainer: Any, context: RunContext[Any], checkpoint: Path | None) -> None:
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
    if not trainer.was_stopped:
        context.listener.release()


def run_facts(recipe: Recipe, policy: LoadedPolicy, rows: Sequence[Any], processes: int) -> dict[str, Any]:
    """Facts that a resumed run must have in common with the one that began (`folder.same_run_check`)."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return {
        "recipe": recipe.as_dict(),
        "base_model_hash": policy.base_model_hash,
        "pairs": digest.hexdigest(),
        "processes": processes,
    }


def last_good_restore(trainer: Any, output_dir: Path, reason: str) -> int:
    """Put the newest checkpoint's adapter, from before a run diverged, back into its model; returns its step.

    Raises TrainingFailed where there is none.
    """
    path, _ = checkpoint_last(output_dir / "checkpoints")
    if path is None:
        raise TrainingFailed(
            f"{reason}, before a checkpoint was written. Lower learning_rate (now {trainer.args.learning_rate:g}), "
            "raise beta, or lower save_steps to have something to go back to"
        )
    set_peft_model_state_dict(
        trainer.accelerator.unwrap_model(trainer.model), load_file(path / ADAPTER_FILES[1])
    )
    step = int(path.name.removeprefix("checkpoint-"))
    trainer.state.global_step = step
    return step


def result_of(
    method: str,
    trainer: Any,
    policy: LoadedPolicy,
    *,
    context: RunContext[Any],
    seconds: float,
    samples: dict[str, int],
    truncated: dict[str, int],
    left_out: dict[str, int],
    metrics: dict[str, float],
    evaluated: str = "eval_loss",
    stopped_early: str = "",
) -> TrainResult:
    """The result of a run over TRL; the finished adapter is saved below the output folder by the main process."""
    state = trainer.state
    stopped_early = stopped_early or trainer.stopped_early()
    is_cancelled = trainer.was_stopped and not stopped_early
    history = history_columns(state.log_history, evaluated)
    checkpoint = context.output_dir / "checkpoints" / f"checkpoint-{state.global_step}"
    if not is_cancelled:
        checkpoint = context.output_dir / "adapter"
        # gathered by all processes together, before one of them writes
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded(trainer) else None
        if trainer.is_world_process_zero():
            adapter_save(policy, checkpoint, agent=context.agent, method=method, weights=weights)
    taken = trainer.best_step() or state.global_step
    standing = history_columns([row for row in state.log_history if row.get("step", 0) <= taken], evaluated)
    last = {
        name: values[-1]
        for name, every in standing.items()
        if not name.endswith("step") and (values := [value for value in every if math.isfinite(value)])
    }
    return TrainResult(
        method=method,
        status="cancelled" if is_cancelled else "succeeded",
        checkpoint=str(checkpoint),
        base_model=policy.base_model,
        base_model_hash=policy.base_model_hash,
        steps=state.global_step,
        total_steps=state.max_steps,
        seconds=round(seconds, 2),
        samples=samples,
        truncated=truncated,
        left_out=left_out,
        metrics={**last, **metrics},
        history=history,
        recipe=context.recipe.as_dict(),
        hardware=dataclasses.asdict(context.hardware),
        libraries=versions(LIBRARIES),
        notes=context.notes,
        details=context.details,
        stopped_early=stopped_early,
        best_step=trainer.best_step(),
    )


def versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions, for a run's record."""
    return {name: importlib.metadata.version(name) for name in names}
