"""Supervised fine-tuning: recipe -> TRL's SFTTrainer -> TrainResult. Demonstrations in, an adapter out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset

from rl.recipes import SFTRecipe
from rl.training.encoding import EncodedResponse
from rl.training.folder import failures_explained, folder_prepare, same_run_check
from rl.training.hardware import Hardware, detect
from rl.training.packed.row_cache import RowCache
from rl.training.pair_trainer import forward_settle, reference_logps
from rl.training.policy import LoadedPolicy, load_policy, matmul
from rl.training.progress import Silent, TrainListener
from rl.training.result import TrainingRefused, TrainResult
from rl.training.scoring import head_check
from rl.training.trl_runs import (
    TokenizedTrainerMixin,
    common_arguments,
    lora_begun,
    one_gpu,
    result_of,
    rows_ordered,
    run_facts,
    special_tokens_settle,
    trainer_settle,
    weights_begin,
)

Reference = dict[tuple[int, ...], float]
"""Tokens of a prompt and its demonstration -> the base's log-probability of the demonstration, nats."""


class SFTTrainer:
    """Train a LoRA adapter to answer as people showed.

    Rows are {"prompt": messages, "completion": text or [message]}; the loss is on the completion's tokens alone, the
    one that ends the turn included. Everything else as `rl.training.dpo.DPOTrainer`.
    """

    def __init__(
        self,
        recipe: SFTRecipe,
        base_model: str = "bundled",
        *,
        output_dir: str | Path,
        agent: str = "",
        hardware: Hardware | None = None,
        listener: TrainListener | None = None,
        resume: bool = False,
        cache_dir: str | Path | None = None,
    ) -> None:
        """`cache_dir`: where tokens and what the self-test found are kept for the next run; None keeps nothing."""
        self.recipe = recipe
        self.base_model = base_model
        self.output_dir = Path(output_dir)
        self.agent = agent
        self.hardware = hardware or detect()
        self.listener: TrainListener = listener or Silent()
        self.resume = resume
        self.cache_dir = cache_dir
        self.policy: LoadedPolicy | None = None
        self.notes: list[str] = []

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = load_policy(
                self.base_model,
                hardware=self.hardware,
                quantization=self.recipe.quantization,
                cache_dir=self.cache_dir,
            )
        return self.policy

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return what came of it; refusals and failures as DPOTrainer's."""
        started = time.monotonic()
        train_rows, eval_rows = rows_ordered(train_dataset or [], self.recipe), list(eval_dataset or [])
        if not train_rows:
            raise TrainingRefused("expected at least one demonstration to train on, found none")
        checkpoint, notes = folder_prepare(self.output_dir, resume=self.resume)
        policy = self.load_base_model()
        head_check(policy)
        train, held_out = self._encode(policy, train_rows), self._encode(policy, eval_rows)
        arguments = trl.SFTConfig(
            **common_arguments(
                self.recipe, self.hardware, self.output_dir, rows=len(train), eval_rows=len(held_out)
            ),
            max_length=None,
        )
        self._main = arguments.process_index == 0
        for note in [*notes, *policy.notes, *one_gpu(arguments)]:
            self._note(note)
        rows = [[item.prompt_ids, item.response_ids] for item in train]
        now = run_facts(self.recipe, policy, rows, arguments.world_size)
        same_run_check(self.output_dir, now, resumed=checkpoint is not None, main=self._main)
        with matmul(self.hardware):
            known = self._reference(policy, arguments, [*train, *held_out])
            special_tokens_settle(policy)
            trainer = _Trainer(
                model=policy.model,
                args=arguments,
                train_dataset=self._dataset(train),
                eval_dataset=self._dataset(held_out) if held_out else None,
                processing_class=policy.tokenizer,
                peft_config=lora_begun(self.recipe, policy),
            )
            trainer.settle(self, policy, known)
            for note in weights_begin(self.recipe, trainer.model):
                self._note(note)
            with failures_explained(self.recipe, self.output_dir):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            metrics = trainer.evaluate_at_end() if held_out else {}
        return result_of(
            "sft",
            trainer,
            policy,
            recipe=self.recipe,
            hardware=self.hardware,
            output_dir=self.output_dir,
            agent=self.agent,
            seconds=time.monotonic() - started,
            samples={"train": len(train), "eval": len(held_out)},
            truncated={
                "prompts": sum(item.prompt_cut for item in train),
                "completions": sum(item.response_cut for item in train),
            },
            left_out={},
            metrics=metrics,
            notes=self.notes,
        )

    def _encode(self, policy: LoadedPolicy, rows: Sequence[Any]) -> list[EncodedResponse]:
        try:
            return policy.encoder.column(
                rows, "completion", self.recipe.max_length, self.recipe.max_completion_length
            )
        except ValueError as error:
            raise TrainingRefused(str(error)) from error

    def _reference(
        self, policy: LoadedPolicy, arguments: trl.SFTConfig, items: Sequence[EncodedResponse]
    ) -> Reference:
        """What the base says of each demonstration: how far training goes from it is told by that."""
        cache = RowCache(Path(self.cache_dir) / "reference.sqlite3") if self.cache_dir is not None else None
        logps, _ = reference_logps(policy, arguments, items, 2 * self.recipe.batch_size, cache)
        return {(*item.prompt_ids, *item.response_ids): logp for item, logp in zip(items, logps, strict=True)}

    def _dataset(self, items: Sequence[EncodedResponse]) -> Dataset:
        return Dataset.from_dict(
            {
                "input_ids": [item.prompt_ids + item.response_ids for item in items],
                "labels": [[-100] * len(item.prompt_ids) + item.response_ids for item in items],
            }
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if getattr(self, "_main", True):
            self.listener.on_note(text)


class _Trainer(TokenizedTrainerMixin, trl.SFTTrainer):
    """TRL's trainer on demonstrations that are already tokens."""

    method = "sft"

    def settle(self, owner: SFTTrainer, policy: LoadedPolicy, reference: Reference) -> None:
        trainer_settle(self, policy, owner)
        forward_settle(self)
        self.reference = reference

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        rows = inputs["input_ids"], inputs["attention_mask"].bool(), inputs["labels"] != -100
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        value = loss[0] if return_outputs else loss
        self.loss_check(value, "")
        self._distance_note(value.detach(), *rows, kwargs.get("num_items_in_batch"))
        return loss

    def _distance_note(
        self, loss: torch.Tensor, ids: torch.Tensor, fed: torch.Tensor, told: torch.Tensor, items: Any
    ) -> None:
        """Log the demonstrations' log-ratio to the base: all of it per demonstration, and per token."""
        tokens = int(told.sum())
        # the loss is a sum over this batch divided by the tokens of the whole step, of all processes
        step = tokens if items is None else float(items) / (self.args.world_size if self._shares() else 1)
        base = sum(self.reference[tuple(row[kept].tolist())] for row, kept in zip(ids, fed, strict=True))
        ratio = -float(loss) * step - base
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rewards/demonstrations"].append(ratio / len(ids))
        metrics["log_ratio"].append(ratio / tokens)

    def _shares(self) -> bool:
        return bool(self.args.average_tokens_across_devices) and self.args.world_size > 1
