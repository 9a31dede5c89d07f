"""The skeleton of every training of an adapter: options, base model, arguments, reference, result."""

from __future__ import annotations

import importlib.metadata
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar, Unpack

import torch
from accelerate.utils import gather_object
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from packed_forward.dpo_trainer import is_sharded
from packed_forward.row_cache import RowCache, row_key
from rl.agents.base import Row
from rl.recipes import BASE, AdapterRecipe, Recipe
from rl.training.encoding import EncodedResponse
from rl.training.loading import ADAPTER_FILES, PolicyLoadError, adapter_read
from rl.training.policy import LoadedPolicy, adapter_check, adapter_save, lora_config, matmul
from rl.training.result import TrainingRefused, TrainResult
from rl.training.rows import evaluation_interval, stops_early
from rl.training.run import (
    Processes,
    RecipeT,
    RunContext,
    RunOptions,
    base_load,
    folder_prepare,
    run_context,
    run_facts,
    same_run_check,
)
from rl.training.scoring import head_check, score_encoded
from rl.training.trl_trainer import train_stoppable

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "safetensors")

SplitT = TypeVar("SplitT")


@dataclass
class TrainRows(Generic[SplitT]):
    """Rows of both splits as a method trains on them."""

    train: SplitT
    held_out: SplitT
    facts: Sequence[object]
    """Tokens by which a resumed run knows that its rows are the same."""
    samples: dict[str, int]
    truncated: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What the steps of a run came to."""

    step: int
    total: int
    cancelled: bool
    log: Sequence[Row]
    """Metrics in the order in which they were logged, each row with its `step`."""
    metrics: dict[str, float] = field(default_factory=dict)
    stopped_early: str = ""
    best_step: int = 0
    weights: dict[str, torch.Tensor] | None = None
    """Weights of a model that is sharded over processes; None: they are read from the model."""


class AdapterTrainer(Generic[RecipeT, SplitT]):
    """A training from its options to its result. A method supplies `encode`, and either `arguments` and `build`, for
    TRL to make the steps, or `fit`, its own loop.

    Everything is written below `output_dir`: `checkpoints/` while it works, the finished adapter in `adapter/`. With
    `resume`, the newest whole checkpoint there is continued.
    """

    method = ""
    needs = "row"
    """What one row is called where there is none."""
    evaluated = "eval_loss"
    """Metric by which a row of the log is known to be of the eval split."""
    processes: Processes

    def __init__(self, recipe: RecipeT, base_model: str = "bundled", **options: Unpack[RunOptions]) -> None:
        self.context = run_context(recipe, base_model, **options)
        self.context.method = self.method
        self.policy: LoadedPolicy | None = None

    @property
    def recipe(self) -> RecipeT:
        return self.context.recipe

    @recipe.setter
    def recipe(self, recipe: RecipeT) -> None:
        self.context.recipe = recipe

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = base_load(self.context)
        return self.policy

    def train(self, train_dataset: Sequence[Row], eval_dataset: Sequence[Row] | None = None) -> TrainResult:
        """Train and return the result; a run stopped by its listener has the status `cancelled`.

        Raises TrainingRefused (nothing to train on, nothing to resume, a folder in use or not writable) before any
        work, and TrainingFailed when training cannot go on (divergence, a reward that breaks, memory, disk).
        """
        start = time.monotonic()
        train_rows, eval_rows = list(train_dataset or []), list(eval_dataset or [])
        self.check(train_rows)
        checkpoint, notes = folder_prepare(self.context)
        self.processes = Processes(cpu=self.context.hardware.device == "cpu")
        self.context.main_process = self.processes.main
        policy = self.load_base_model()
        self.context.note_all([*notes, *policy.notes])
        self.check_model(policy)
        with matmul(self.context.hardware):
            rows = self.encode(policy, train_rows, eval_rows)
            self.context.note_all(rows.notes)
            now = run_facts(self.recipe, policy, rows.facts, self.processes.count)
            same_run_check(self.context, now, resumed=checkpoint is not None)
            outcome = self.fit(policy, rows, checkpoint)
        return self._result(policy, rows, outcome, time.monotonic() - start)

    # --- What a method supplies ---------------------------------------------------------------------------------

    def check(self, rows: Sequence[Row]) -> None:
        """Raise TrainingRefused for training rows that no base model could learn from."""
        if not rows:
            raise TrainingRefused(f"expected at least one {self.needs} to train on, found none")

    def check_model(self, policy: LoadedPolicy) -> None:
        """Raise for a base model that this method cannot train."""
        head_check(policy)

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[SplitT]:
        """The rows as tokens. Raises TrainingRefused where none is left to train on."""
        raise NotImplementedError

    def arguments(self, rows: TrainRows[SplitT]) -> TrainingArguments:
        """TRL's arguments of this run."""
        raise NotImplementedError

    def build(self, policy: LoadedPolicy, arguments: TrainingArguments, rows: TrainRows[SplitT]) -> Trainer:
        """TRL's trainer, settled. Its parent's arguments are in `trl_arguments`."""
        raise NotImplementedError

    def begin(self, trainer: Trainer, *, resumed: bool) -> None:
        """Last preparations before the first step: the weights of the adapter that training starts from."""
        self.context.note_all(weights_begin(self.start_recipe, trainer.model))

    def end(self, trainer: Trainer) -> str:
        """Reason, beside those every method has, for which the run ended before its last step; empty where none."""
        return ""

    def save(self, policy: LoadedPolicy, outcome: Outcome) -> Path:
        """Write the finished model; returns its folder. Called in every process."""
        path = self.context.output_dir / "adapter"
        if self.processes.main:
            adapter_save(policy, path, agent=self.context.agent, method=self.method, weights=outcome.weights)
        return path

    # --- What every method shares -------------------------------------------------------------------------------

    @property
    def start_recipe(self) -> AdapterRecipe:
        """The recipe with the adapter that training starts from."""
        assert isinstance(self.recipe, AdapterRecipe)  # a reward model has a fresh one, and never asks
        return self.recipe

    def fit(self, policy: LoadedPolicy, rows: TrainRows[SplitT], checkpoint: Path | None) -> Outcome:
        """Make the steps, in TRL's trainer."""
        arguments = self.arguments(rows)
        self.context.note_all(one_gpu(arguments))
        trainer = self.build(policy, arguments, rows)
        self.begin(trainer, resumed=checkpoint is not None)
        train_stoppable(trainer, self.context, checkpoint)
        stopped_early = self.end(trainer) or trainer.stopped_early()
        cancelled = trainer.was_stopped and not stopped_early
        metrics = trainer.evaluate_at_end() if trainer.eval_dataset is not None else {}
        weights = None
        if not cancelled and is_sharded(
            trainer
        ):  # gathered by all processes together, before one of them writes
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        return Outcome(
            step=trainer.state.global_step,
            total=trainer.state.max_steps,
            cancelled=cancelled,
            log=trainer.state.log_history,
            metrics=metrics,
            stopped_early=stopped_early,
            best_step=trainer.best_step(),
            weights=weights,
        )

    def trl_arguments(self, policy: LoadedPolicy, arguments: TrainingArguments) -> dict[str, object]:
        """Arguments that each of TRL's trainers is made with."""
        special_tokens_settle(policy)
        return {
            "model": policy.model,
            "args": arguments,
            "processing_class": policy.tokenizer,
            "peft_config": lora_config_of(self.start_recipe, policy),
        }

    def reference_logps(
        self,
        policy: LoadedPolicy,
        arguments: TrainingArguments,
        items: Sequence[EncodedResponse],
        cache: RowCache | None,
    ) -> list[float]:
        """Log-probabilities of responses under the policy that the run is measured against, nats."""
        self.context.phase("reference pass")
        logps, computed = reference_logps(
            policy, arguments, items, 2 * self.recipe.batch_size, cache, self.context.phase
        )
        if cache is not None:
            self.context.detail(
                f"reference log-probabilities: {computed:,} computed, {len(items) - computed:,} from the cache"
            )
        return logps

    def _result(
        self, policy: LoadedPolicy, rows: TrainRows[SplitT], outcome: Outcome, seconds: float
    ) -> TrainResult:
        context = self.context
        checkpoint = context.output_dir / "checkpoints" / f"checkpoint-{outcome.step}"
        if not outcome.cancelled:
            checkpoint = self.save(policy, outcome)
            self.processes.wait()
        taken = outcome.best_step or outcome.step
        history = history_columns(outcome.log, self.evaluated)
        kept = history_columns([row for row in outcome.log if row.get("step", 0) <= taken], self.evaluated)
        last = {
            name: finite[-1]
            for name, values in kept.items()
            if not name.endswith("step") and (finite := [value for value in values if math.isfinite(value)])
        }
        if before := history.get("eval_reward"):
            last["eval_reward_before"] = before[0]
        return TrainResult(
            method=self.method,
            status="cancelled" if outcome.cancelled else "succeeded",
            checkpoint=str(checkpoint),
            base_model=policy.base_model,
            base_model_hash=policy.base_model_hash,
            steps=outcome.step,
            total_steps=outcome.total,
            seconds=round(seconds, 2),
            samples=rows.samples,
            truncated=rows.truncated,
            left_out=rows.left_out,
            metrics={**last, **outcome.metrics},
            history=history,
            recipe=self.recipe.as_dict(),
            hardware=context.hardware.as_dict(),
            libraries=versions(),
            notes=context.notes,
            details=context.details,
            stopped_early=outcome.stopped_early,
            best_step=outcome.best_step,
        )


def common_arguments(context: RunContext[RecipeT], *, rows: int = 0, eval_rows: int = 0) -> dict[str, object]:
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
        "train_sampling_strategy": "random",
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


def one_gpu(arguments: TrainingArguments) -> list[str]:
    """TRL has no DataParallel: of several GPUs one is used, and the note returned says what uses all."""
    if arguments.n_gpu <= 1:
        return []
    seen = arguments.n_gpu
    arguments._n_gpu = 1
    return [f"{seen} GPUs seen, one is used: `accelerate launch` uses all"]


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


def weights_begin(recipe: AdapterRecipe, model: torch.nn.Module) -> list[str]:
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
    return [f"starts from the weights of {folder.name}: {len(given)} matrices, its own LoRA rank"]


def versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions, for a run's record."""
    return {name: importlib.metadata.version(name) for name in names}


def history_columns(rows: Sequence[Row], evaluated: str = "eval_loss") -> dict[str, list[float]]:
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


def stopping_arguments(recipe: Recipe, steps: int, eval_rows: int) -> dict[str, object]:
    """Keyword arguments for transformers' TrainingArguments; none where the eval split cannot end the run."""
    if not stops_early(recipe, eval_rows):
        return {}
    interval = evaluation_interval(recipe, steps, eval_rows)
    return {
        "eval_strategy": "steps",
        "eval_steps": interval,
        "save_steps": interval,
        "load_best_model_at_end": True,
        "metric_for_best_model": recipe.eval_metric,
        "greater_is_better": False,
    }


CHUNK = 8
"""Batches of a reference pass after which its log-probabilities are kept, for a run that is stopped in it."""


def reference_logps(
    policy: LoadedPolicy,
    arguments: TrainingArguments,
    items: Sequence[EncodedResponse],
    batch_size: int,
    cache: RowCache | None = None,
    phase: Callable[[str, int, int], None] | None = None,
) -> tuple[list[float], int]:
    """Log-probabilities under the base model, in nats, in the order given, and how many had to be computed.

    Each process scores its share of what the cache does not know, and the main process keeps what it has every
    CHUNK batches. A completion's key is the base model, its arithmetic, its adapter where it has one, and the tokens of
    prompt and completion.
    """
    about = (
        policy.base_model_hash,
        str(policy.model.dtype),
        policy.quantization,
        policy.device.type,
        str(policy.adapter or "no adapter"),
    )
    keys = [row_key(*about, item.prompt_ids, item.response_ids) for item in items]
    hits = cache.get(keys) if cache is not None else {}
    missing = {key: item for key, item in zip(keys, items, strict=True) if key not in hits}
    order = sorted(missing)  # the same on every process
    share = order[arguments.process_index :: arguments.world_size]
    if arguments.world_size == 1:  # those of one prompt share a row, and rows of a chunk are as long
        share.sort(key=lambda key: (len(missing[key].prompt_ids), missing[key].prompt_ids))
    half = torch.bfloat16 if arguments.bf16 else torch.float16
    size = CHUNK * batch_size if arguments.world_size == 1 else max(1, len(share))
    pairs: list[tuple[bytes, float]] = []
    for start in range(0, len(share), size):
        chunk = share[start : start + size]

        def report(done: int, total: int, before: int = start) -> None:
            if phase is not None:
                phase("reference pass", before + done, len(share))

        with torch.autocast(policy.device.type, dtype=half, enabled=arguments.bf16 or arguments.fp16):
            items_scored = [missing[key] for key in chunk]
            scored = score_encoded(policy, items_scored, batch_size=batch_size, progress=report)
        found = list(zip(chunk, scored, strict=True))
        if cache is not None and arguments.world_size == 1:
            cache.put({key: struct.pack("<d", logp) for key, logp in found})
        pairs += found
    if arguments.world_size > 1:
        pairs = gather_object(pairs)
        if cache is not None and arguments.process_index == 0:
            cache.put({key: struct.pack("<d", logp) for key, logp in pairs})
    logps = {key: struct.unpack("<d", value)[0] for key, value in hits.items()} | dict(pairs)
    return [logps[key] for key in keys], len(order)
