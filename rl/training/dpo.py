"""Direct preference optimisation: recipe -> TRL's DPOTrainer -> TrainResult. Pairs in, an adapter out."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset

from rl.recipes import DPORecipe
from rl.training.encoding import EncodedPairs, EncodedResponse
from rl.training.folder import folder_prepare, same_run_check, shortages_explained
from rl.training.following import history_columns
from rl.training.hardware import Hardware, detect
from rl.training.pair_trainer import PairCollator, PairTrainer, reference_logps, trl_losses
from rl.training.policy import (
    LoadedPolicy,
    adapter_save,
    load_policy,
    lora_config,
    matmul,
)
from rl.training.progress import Silent, TrainListener
from rl.training.result import TrainingRefused, TrainResult
from rl.training.row_cache import RowCache
from rl.training.scoring import head_check

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "safetensors")


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
        cache_dir: str | Path | None = None,
    ) -> None:
        """`cache_dir`: where tokens and reference log-probabilities are kept for the next run; None keeps nothing."""
        self.recipe = recipe
        self.base_model = base_model
        self.output_dir = Path(output_dir)
        self.agent = agent
        self.hardware = hardware or detect()
        self.listener: TrainListener = listener or Silent()
        self.resume = resume
        self.cache_dir = Path(cache_dir) if cache_dir is not None else None
        self.policy: LoadedPolicy | None = None
        self.notes: list[str] = []

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = load_policy(
                self.base_model, hardware=self.hardware, quantization=self.recipe.quantization
            )
            if self.cache_dir is not None:
                self.policy.encoder.cache = RowCache(self.cache_dir / "tokens.sqlite3")
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
        checkpoint, said = folder_prepare(self.output_dir, resume=self.resume)
        for note in said:
            self._note(note)
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
        rows = hashlib.sha256()
        for row in train.rows:
            rows.update(json.dumps(row).encode())
        now = {
            "recipe": self.recipe.as_dict(),
            "base_model_hash": policy.base_model_hash,
            "pairs": rows.hexdigest(),
            "processes": arguments.world_size,
        }
        same_run_check(self.output_dir, now, resumed=checkpoint is not None, main=self._main)

    def _trainer(
        self, policy: LoadedPolicy, arguments: trl.DPOConfig, train: EncodedPairs, held_out: EncodedPairs
    ) -> PairTrainer:
        def dataset(pairs: EncodedPairs) -> Dataset | None:
            return self._dataset(policy, arguments, pairs) if pairs.rows else None

        weights = [row["weight"] for row in train.rows]
        collator = PairCollator(policy.tokenizer.pad_token_id, weight_scale=len(weights) / math.fsum(weights))
        # TRL and transformers would warn about, and then do, just this
        policy.model.config.pad_token_id = policy.tokenizer.pad_token_id
        policy.model.config.eos_token_id = policy.tokenizer.eos_token_id
        policy.model.config.bos_token_id = policy.tokenizer.bos_token_id
        trainer = PairTrainer(
            model=policy.model,
            args=arguments,
            train_dataset=dataset(train),
            eval_dataset=dataset(held_out),
            processing_class=policy.tokenizer,
            data_collator=collator,
            peft_config=lora_config(self.recipe, policy.model),
        )
        trainer.settle(self, policy)
        self._note(
            f"rows that share a prompt: {trainer.choice.rung}, because it {trainer.choice.reason}"
            if trainer.choice.rung != "stock"
            else f"rows are not packed: {trainer.choice.reason}"
        )
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
            cache = RowCache(self.cache_dir / "reference.sqlite3") if self.cache_dir is not None else None
            logps, computed = reference_logps(policy, arguments, items, 2 * self.recipe.batch_size, cache)
            if cache is not None:
                self._note(
                    f"reference log-probabilities: {computed:,} computed, "
                    f"{len(items) - computed:,} known before"
                )
            columns["ref_chosen_logps"], columns["ref_rejected_logps"] = logps[::2], logps[1::2]
        return Dataset.from_dict(columns)

    def _run(self, trainer: PairTrainer, checkpoint: Path | None) -> None:
        with shortages_explained(self.output_dir, self.recipe):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def _result(
        self,
        trainer: PairTrainer,
        train: EncodedPairs,
        held_out: EncodedPairs,
        metrics: dict[str, float],
        seconds: float,
    ) -> TrainResult:
        state = trainer.state
        cancelled = state.global_step < state.max_steps
        history = history_columns(state.log_history)
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
