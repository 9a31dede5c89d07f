"""Direct preference optimisation: recipe -> TRL's DPOTrainer -> TrainResult. Pairs in, an adapter out."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import FusedCausalLMOutput

from rl.recipes import DPORecipe
from rl.training.encoding import EncodedPairs, EncodedResponse
from rl.training.hardware import Hardware, detect
from rl.training.policy import (
    LoadedPolicy,
    adapter_describe,
    adapter_save,
    load_policy,
    lora_config,
    matmul,
)
from rl.training.progress import Silent, TrainListener, checkpoint_last, checkpoint_seal
from rl.training.result import TrainingFailed, TrainingRefused, TrainResult
from rl.training.scoring import causal_model, head_check, head_logps, score_encoded

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "safetensors")

EXTRAS = ("entropy", "mean_logits", "is_top1")
"""Per-token values TRL's metrics want beside the log-probabilities."""


class DPOTrainer:
    """Train a LoRA adapter on preference pairs.

    Rows are {"prompt": messages, "chosen": text or [message], "rejected": likewise, "weight": above 0, optional},
    in a list or a Hugging Face Dataset. A weight multiplies that pair's gradient (weights are scaled to mean 1);
    the loss shown stays unweighted. Everything is written below `output_dir`: `checkpoints/` while it works, the
    finished adapter in `adapter/`. With `resume`, the newest whole checkpoint there is continued.
    """

    def __init__(
        self,
        recipe: DPORecipe,
        base_model: str = "bundled",
        *,
        output_dir: str | Path,
        agent: str = "",
        hardware: Hardware | None = None,
        listener: TrainListener | None = None,
        resume: bool = False,
    ) -> None:
        self.recipe = recipe
        self.base_model = base_model
        self.output_dir = Path(output_dir)
        self.agent = agent
        self.hardware = hardware or detect()
        self.listener: TrainListener = listener or Silent()
        self.resume = resume
        self.policy: LoadedPolicy | None = None
        self.notes: list[str] = []

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = load_policy(
                self.base_model, hardware=self.hardware, quantization=self.recipe.quantization
            )
        return self.policy

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return what came of it; a run stopped by its listener comes back as `cancelled`.

        Raises TrainingRefused (nothing to train on, nothing to resume, a folder in use or not writable) before any
        work, and TrainingFailed when training cannot go on (divergence, memory, disk).
        """
        started = time.monotonic()
        train_rows, eval_rows = list(train_dataset or []), list(eval_dataset or [])
        if not train_rows:
            raise TrainingRefused("expected at least one preference pair to train on, found none")
        checkpoint = self._prepare_folder()
        arguments = self._arguments(bool(eval_rows))
        self._main = arguments.process_index == 0
        policy = self.load_base_model()
        for note in policy.notes:
            self._note(note)
        head_check(policy)
        train, held_out = self._encode(policy, train_rows), self._encode(policy, eval_rows)
        if not train.rows:
            raise TrainingRefused(
                f"expected at least one pair that can teach something, found none among {len(train_rows)}: "
                + ", ".join(f"{count} {why}" for why, count in train.left_out.items())
            )
        self._report_cuts(train)
        self._check_same_run(policy, train, arguments, checkpoint)
        with matmul(self.hardware):
            trainer = self._trainer(policy, arguments, train, held_out)
            self._run(trainer, checkpoint)
            metrics = trainer.evaluate_at_end() if held_out.rows else {}
        return self._result(trainer, train, held_out, metrics, time.monotonic() - started)

    def _prepare_folder(self) -> Path | None:
        """Make the folder, refuse one that is in use or cannot be written, find the checkpoint to go on from."""
        checkpoints = self.output_dir / "checkpoints"
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            probe = checkpoints / f".writable.{os.getpid()}"  # each process of a launch makes its own
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise TrainingRefused(
                f"expected a folder that can be written at {self.output_dir}, found {error.strerror}: "
                f"choose another or change its permissions"
            ) from error
        if self.resume:
            checkpoint, notes = checkpoint_last(checkpoints)
            for note in notes:
                self._note(note)
            self._note(
                f"resuming from {checkpoint.name}"
                if checkpoint
                else "no whole checkpoint: starting at step 0"
            )
            return checkpoint
        if any(checkpoints.glob("checkpoint-*")):
            raise TrainingRefused(
                f"expected a folder without checkpoints at {checkpoints}, found those of an earlier run: "
                f"resume that run, or give another folder"
            )
        return None

    def _encode(self, policy: LoadedPolicy, rows: Sequence[Any]) -> EncodedPairs:
        try:
            return policy.encoder.pairs(rows, self.recipe.max_length, self.recipe.max_completion_length)
        except ValueError as error:
            raise TrainingRefused(str(error)) from error

    def _report_cuts(self, pairs: EncodedPairs) -> None:
        if any(pairs.truncated.values()):
            self._note(
                f"truncated to max_length {self.recipe.max_length} and max_completion_length "
                f"{self.recipe.max_completion_length}: {pairs.truncated['prompts']} prompts (oldest tokens), "
                f"{pairs.truncated['completions']} responses (end)"
            )
        for why, count in pairs.left_out.items():
            self._note(f"left out {count} pairs: {why}")

    def _arguments(self, evaluates: bool) -> trl.DPOConfig:
        recipe, hardware = self.recipe, self.hardware
        on_gpu = hardware.device == "cuda"
        losses, weights = trl_losses(recipe)
        steps = evaluates and recipe.eval_steps > 0
        arguments = trl.DPOConfig(
            output_dir=str(self.output_dir / "checkpoints"),
            use_cpu=hardware.device == "cpu",
            num_train_epochs=recipe.epochs,
            max_steps=recipe.max_steps,
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.gradient_accumulation,
            learning_rate=recipe.learning_rate,
            warmup_steps=recipe.warmup_ratio,
            lr_scheduler_type=recipe.lr_scheduler,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm,
            gradient_checkpointing=recipe.gradient_checkpointing,
            beta=recipe.beta,
            loss_type=losses,
            loss_weights=weights,
            label_smoothing=recipe.label_smoothing,
            max_length=None,  # cut by us, before TRL would drop pairs
            # Weights are loaded in the dtype the machine is quick with. Autocast on top is for GPUs, where it lets
            # the LoRA matrices (kept in float32) multiply in half precision; on a CPU it would only add casts.
            bf16=on_gpu and hardware.dtype == "bfloat16",
            fp16=on_gpu and hardware.dtype == "float16",
            seed=recipe.seed,
            data_seed=recipe.seed,
            logging_steps=recipe.logging_steps,
            logging_nan_inf_filter=False,
            save_strategy="steps",
            save_steps=recipe.save_steps,
            save_total_limit=2,
            eval_strategy="steps" if steps else "no",
            eval_steps=recipe.eval_steps if steps else None,
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=on_gpu,
            ddp_find_unused_parameters=False,
            remove_unused_columns=False,
        )
        if arguments.n_gpu > 1:
            # TRL has no DataParallel; several GPUs are used through `accelerate launch`
            self._note(f"{arguments.n_gpu} GPUs seen, one is used: `accelerate launch` uses all")
            arguments._n_gpu = 1
        return arguments

    def _check_same_run(
        self, policy: LoadedPolicy, train: EncodedPairs, arguments: trl.DPOConfig, checkpoint: Path | None
    ) -> None:
        """A resumed run must be the one that was interrupted, or its steps and data order would not be."""
        rows = hashlib.sha256()
        for row in train.rows:
            rows.update(json.dumps(row).encode())
        now = {
            "recipe": self.recipe.as_dict(),
            "base_model_hash": policy.base_model_hash,
            "pairs": rows.hexdigest(),
            "processes": arguments.world_size,
        }
        file = self.output_dir / "run.json"
        if checkpoint is None:
            if self._main:
                file.write_text(json.dumps(now, indent=2) + "\n", "utf-8")
            return
        try:
            then = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingRefused(f"cannot resume: {file} is missing or broken ({error})") from error
        different = [name for name in now if then.get(name) != now[name]]
        if "recipe" in different and isinstance(then.get("recipe"), dict):
            different.remove("recipe")
            different += [
                f"{knob} ({then['recipe'].get(knob)!r}, now {value!r})"
                for knob, value in now["recipe"].items()
                if then["recipe"].get(knob) != value
            ]
        if different:
            raise TrainingRefused(
                f"cannot resume {self.output_dir}: it was started with other {', '.join(different)}; "
                f"start a new run, or give what it was started with"
            )

    def _trainer(
        self, policy: LoadedPolicy, arguments: trl.DPOConfig, train: EncodedPairs, held_out: EncodedPairs
    ) -> _Trainer:
        def dataset(pairs: EncodedPairs) -> Dataset | None:
            return self._dataset(policy, arguments, pairs) if pairs.rows else None

        weights = [row["weight"] for row in train.rows]
        collator = PairCollator(policy.tokenizer.pad_token_id, weight_scale=len(weights) / math.fsum(weights))
        # TRL and transformers would warn about, and then do, just this
        policy.model.config.pad_token_id = policy.tokenizer.pad_token_id
        policy.model.config.eos_token_id = policy.tokenizer.eos_token_id
        policy.model.config.bos_token_id = policy.tokenizer.bos_token_id
        trainer = _Trainer(
            model=policy.model,
            args=arguments,
            train_dataset=dataset(train),
            eval_dataset=dataset(held_out),
            processing_class=policy.tokenizer,
            data_collator=collator,
            peft_config=lora_config(self.recipe, policy.model),
        )
        trainer.settle(self, policy)
        return trainer

    def _dataset(self, policy: LoadedPolicy, arguments: trl.DPOConfig, pairs: EncodedPairs) -> Dataset:
        columns: dict[str, list[Any]] = {
            name: [row[name] for row in pairs.rows] for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        if any(row["weight"] != 1.0 for row in pairs.rows):
            columns["weight"] = [row["weight"] for row in pairs.rows]
        if self.recipe.precompute_reference:
            items = [
                EncodedResponse(row["prompt_ids"], row[side])
                for row in pairs.rows
                for side in ("chosen_ids", "rejected_ids")
            ]
            logps = reference_logps(policy, arguments, items, 2 * self.recipe.batch_size)
            columns["ref_chosen_logps"], columns["ref_rejected_logps"] = logps[::2], logps[1::2]
        return Dataset.from_dict(columns)

    def _run(self, trainer: _Trainer, checkpoint: Path | None) -> None:
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except torch.OutOfMemoryError as error:
            raise TrainingFailed(
                f"the accelerator ran out of memory: lower batch_size (now {self.recipe.batch_size}) or max_length "
                f"(now {self.recipe.max_length}), or use the small_gpu preset"
            ) from error
        except (OSError, SafetensorError, RuntimeError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if not full and shutil.disk_usage(self.output_dir).free > 1 << 20:
                raise
            raise TrainingFailed(
                f"the disk of {self.output_dir} is full: free some space and resume; the last whole checkpoint is kept"
            ) from error

    def _result(
        self,
        trainer: _Trainer,
        train: EncodedPairs,
        held_out: EncodedPairs,
        metrics: dict[str, float],
        seconds: float,
    ) -> TrainResult:
        state = trainer.state
        cancelled = state.global_step < state.max_steps
        history = _history(state.log_history)
        policy = self.load_base_model()
        checkpoint = self.output_dir / "checkpoints" / f"checkpoint-{state.global_step}"
        if not cancelled:
            checkpoint = self.output_dir / "adapter"
            if trainer.is_world_process_zero():
                adapter_save(policy, checkpoint, agent=self.agent, method="dpo")
        last = {name: values[-1] for name, values in history.items() if values and not name.endswith("step")}
        return TrainResult(
            method="dpo",
            status="cancelled" if cancelled else "succeeded",
            checkpoint=str(checkpoint),
            base_model=self.base_model,
            base_model_hash=policy.base_model_hash,
            steps=state.global_step,
            total_steps=state.max_steps,
            seconds=round(seconds, 2),
            samples={"train": len(train.rows), "eval": len(held_out.rows)},
            truncated=train.truncated,
            left_out=train.left_out,
            metrics={**last, **metrics},
            history=history,
            recipe=self.recipe.as_dict(),
            hardware=dataclasses.asdict(self.hardware),
            libraries={name: importlib.metadata.version(name) for name in LIBRARIES},
            notes=self.notes,
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if getattr(self, "_main", True):
            self.listener.on_note(text)


def trl_losses(recipe: DPORecipe) -> tuple[list[str], list[float]]:
    """TRL's loss_type and loss_weights for a recipe.

    TRL 1.16 ignores label smoothing in `sigmoid`. Conservative DPO, -(1-e) log s(x) - e log s(-x), is the sum
    (2-2e) sigmoid - (1-2e) robust, because robust is (-(1-e) log s(x) + e log s(-x)) / (1-2e).
    """
    losses, weights = [recipe.loss], [1.0]
    if recipe.loss == "sigmoid" and recipe.label_smoothing > 0:
        e = recipe.label_smoothing
        losses, weights = ["sigmoid", "robust"], [2 - 2 * e, -(1 - 2 * e)]
    if recipe.sft_weight > 0:
        losses, weights = [*losses, "sft"], [*weights, recipe.sft_weight]
    return losses, weights


def reference_logps(
    policy: LoadedPolicy, arguments: trl.DPOConfig, items: Sequence[EncodedResponse], batch_size: int
) -> list[float]:
    """Log-probabilities under the base model, each process scoring its share; in nats, in the order given."""
    share = list(range(arguments.process_index, len(items), arguments.world_size))
    half = torch.bfloat16 if arguments.bf16 else torch.float16
    with torch.autocast(policy.device.type, dtype=half, enabled=arguments.bf16 or arguments.fp16):
        scored = score_encoded(policy, [items[i] for i in share], batch_size=batch_size)
    pairs = list(zip(share, scored, strict=True))
    if arguments.world_size > 1:
        pairs = gather_object(pairs)
    return [logp for _, logp in sorted(pairs)]


@dataclass
class PairCollator(DataCollatorForPreference):
    """TRL's collator, with the pairs' weights beside."""

    weight_scale: float = 1.0

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        if "weight" in examples[0]:
            weights = [example["weight"] * self.weight_scale for example in examples]
            batch["pair_weights"] = torch.tensor(weights)
        return batch


class LengthGroupedSampler(torch.utils.data.Sampler[int]):
    """Each epoch's order, a function of seed and epoch only: shuffled, then pairs of like length put side by side.

    Sorting happens within windows of `WINDOW` batches and the batches are shuffled again, so that padding is saved
    while batches still differ from epoch to epoch. Nothing is remembered between epochs: a resumed run repeats it.
    """

    WINDOW = 8

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Any) -> None:
        """`epoch`: a function that says which epoch is about to start."""
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(self.epoch()))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        window = self.WINDOW * self.batch_size
        for start in range(0, len(order), window):
            order[start : start + window] = sorted(
                order[start : start + window], key=lambda i: self.lengths[i], reverse=True
            )
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        whole = [batch for batch in batches if len(batch) == self.batch_size]
        short = [batch for batch in batches if len(batch) < self.batch_size]
        for i in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[i]
        for batch in short:  # last, or every later batch would straddle two groups
            yield from batch


class _ScaleGradient(torch.autograd.Function):
    """x -> x, with the gradient multiplied: each pair's loss depends on its own log-probabilities only, so scaling
    their gradient by w is training on w times that pair's loss, whatever the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grads[0] * factor, None


def install_forward(model: Any, compact: bool) -> None:
    """Give the causal model the forward TRL's loss calls with fused_lm_head=True.

    `compact`: project completion positions only. TRL does so on CUDA itself; elsewhere it projects the prompt too.
    Further keys of a batch arrive here as keyword arguments (TRL passes what it does not know to the model).
    """
    stock = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, pair_weights: Any = None, **kwargs: Any
    ) -> Any:
        if not fused_lm_head:
            return stock(*args, **kwargs)
        output = (
            _compact_output(self, *args, **kwargs) if compact else stock(*args, fused_lm_head=True, **kwargs)
        )
        if pair_weights is not None:
            factor = pair_weights.to(output.log_probs).repeat(2)[
                :, None
            ]  # the chosen half, then the rejected
            output.log_probs = _ScaleGradient.apply(output.log_probs, factor)
        return output

    model.forward = types.MethodType(forward, model)


def _compact_output(model: Any, *args: Any, labels: torch.Tensor, **kwargs: Any) -> FusedCausalLMOutput:
    hidden = model.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    mask = targets != -100
    logps, entropy, _, mean_logits, is_top1 = head_logps(model, hidden[mask], targets[mask], EXTRAS)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    return FusedCausalLMOutput(
        log_probs=spread(logps),
        entropy=spread(entropy),
        mean_logits=spread(mean_logits),
        is_top1=spread(is_top1),
        label_mask=mask,
    )


class _Follower(TrainerCallback):
    """Passes the run on to its listener, and the listener's wish to stop back to the run. Rank 0 decides for all."""

    def __init__(self, trainer: _Trainer, listener: TrainListener) -> None:
        self.trainer, self.listener = trainer, listener

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.listener.on_start(state.max_steps)

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
        if state.is_world_process_zero and any(name.removeprefix("eval_") == "loss" for name in row):
            self.listener.on_metrics(state.global_step, row)


class _Trainer(trl.DPOTrainer):
    """TRL's trainer on pairs that are already tokens. Loss, metrics, optimiser and checkpoints stay TRL's.

    The underscored methods are TRL 1.16's and transformers 5.23's own; both are pinned.
    """

    owner: DPOTrainer
    policy: LoadedPolicy

    def settle(self, owner: DPOTrainer, policy: LoadedPolicy) -> None:
        """What TRL's constructor cannot be told."""
        self.owner, self.policy = owner, policy
        policy.model = self.model
        self.precompute_ref_logps = owner.recipe.precompute_reference
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:  # TRL makes a 4-bit model's LoRA bfloat16, too coarse for small steps
                parameter.data = parameter.data.float()
            assert parameter.requires_grad == ("lora_" in name)
        for name, module in self.model.named_modules():
            if (
                isinstance(module, torch.nn.Dropout) and "lora_dropout" in name
            ):  # TRL silences it with the others
                module.p = owner.recipe.lora_dropout
        install_forward(
            causal_model(self.model), compact=policy.device.type != "cuda" and not self.aux_loss_enabled
        )
        self.remove_callback(PrinterCallback)  # it prints to stdout
        self.add_callback(_Follower(self, owner.listener))
        self._busy_s, self._busy_tokens = 0.0, 0

    def evaluate_at_end(self) -> dict[str, float]:
        """Metrics on the eval split after the last step, unless that step's are there already."""
        for row in reversed(self.state.log_history):
            if "eval_loss" in row and row.get("step") == self.state.global_step:
                return {name: value for name, value in row.items() if name.startswith("eval_")}
        return dict(self.evaluate())

    def _send_telemetry(self) -> None:
        """TRL reports each run to its makers; what people rate here is nobody else's business."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Not a model to publish."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data = train_dataset if train_dataset is not None else self.train_dataset
        lengths = [
            len(p) + max(len(c), len(r))
            for p, c, r in zip(data["prompt_ids"], data["chosen_ids"], data["rejected_ids"], strict=True)
        ]
        # trainer.state survives a resume, so the sampler asks it rather than being told
        return LengthGroupedSampler(
            lengths, self.args.train_batch_size, self.args.data_seed, lambda: self.state.epoch or 0
        )

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        began = time.perf_counter()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._busy_s += time.perf_counter() - began
        self._busy_tokens += int(inputs["attention_mask"].sum()) * self.args.world_size
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        loss = super()._compute_loss(model, inputs, return_outputs)
        mode = "train" if self.model.training else "eval"
        value = float((loss[0] if return_outputs else loss).detach())
        if not math.isfinite(value):
            raise TrainingFailed(
                f"the loss became {value:g} at step {self.state.global_step + 1} of {self.state.max_steps}: "
                f"training diverged. Lower learning_rate (now {self.args.learning_rate:g}) or raise beta "
                f"(now {self.beta:g}); the last whole checkpoint is kept"
            )
        metrics = self._metrics[mode]
        tokens = self.accelerator.gather(inputs["completion_mask"].sum()).sum().item()
        pairs = inputs["input_ids"].size(0) / 2 * self.args.world_size
        logratio = (metrics["rewards/chosen"][-1] + metrics["rewards/rejected"][-1]) / self.beta * pairs
        metrics["kl"].append(logratio / tokens)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._busy_s > 0:
            self._metrics["train"]["tokens_per_second"] = [self._busy_tokens / self._busy_s]
            self._busy_s, self._busy_tokens = 0.0, 0
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            adapter_describe(self.policy, path, agent=self.owner.agent, method="dpo")
            checkpoint_seal(path)


def _history(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Columns of transformers' log: training rows against `step`, evaluation rows against `eval_step`."""
    history: dict[str, list[float]] = {}
    for prefix, step in (("", "step"), ("eval_", "eval_step")):
        kept = {row["step"]: row for row in rows if f"{prefix}loss" in row}  # a repeated step counts once
        if not kept:
            continue
        history[step] = [float(at) for at in kept]
        names = sorted({name for row in kept.values() for name in row} - {"step"})
        for name in names:
            if name.startswith("eval_") == bool(prefix):
                history[name] = [float(row.get(name, math.nan)) for row in kept.values()]
    return history
