"""Direct preference optimisation: recipe -> TRL's DPOTrainer -> TrainResult. Pairs in, an adapter out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import trl
from datasets import Dataset

from rl.recipes import AdapterRecipe, DPORecipe
from rl.training.encoding import EncodedPairs, EncodedResponse, Encoder, reasoning_check
from rl.training.folder import folder_prepare, same_run_check
from rl.training.pair_trainer import PairCollator, PairTrainer, reference_logps, trl_losses
from rl.training.policy import LoadedPolicy, matmul
from rl.training.result import TrainingRefused, TrainResult
from rl.training.run_context import RunOptions, base_load, reference_cache, run_context
from rl.training.scoring import head_check
from rl.training.trl_runs import (
    common_arguments,
    lora_config_of,
    one_gpu,
    result_of,
    rows_ordered,
    run_facts,
    special_tokens_settle,
    train_stoppable,
    weights_begin,
)
from rl.training.warm_up import WarmUp, warm_up


def pairs_encoded(
    encoder: Encoder, rows: Sequence[Any], recipe: DPORecipe, *, needed: bool = True
) -> EncodedPairs:
    """Pairs as tokens. Raises TrainingRefused where none is left of rows that are `needed`."""
    reasoning_check(encoder, recipe)
    try:
        pairs = encoder.pairs(rows, recipe.max_length, recipe.max_completion_length)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    if needed and not pairs.rows:
        raise TrainingRefused(
            f"expected at least one pair whose responses differ for the model, found none among {len(rows)}: "
            f"{pairs.left_out.words()}"
        )
    return pairs


class DPOTrainer:
    """Train a LoRA adapter on preference pairs.

    Rows are {"prompt": messages, "chosen": text or messages, "rejected": likewise, "weight": above 0, optional,
    "tools": that the prompt offers, optional},
    in a list or a Hugging Face Dataset. A weight multiplies that pair's gradient (weights are scaled to mean 1);
    the loss shown stays unweighted. Everything is written below `output_dir`: `checkpoints/` while it works, the
    finished adapter in `adapter/`. With `resume`, the newest whole checkpoint there is continued.
    """

    def __init__(
        self,
        recipe: DPORecipe,
        base_model: str = "bundled",
        **options: Unpack[RunOptions],
    ) -> None:
        self.context = run_context(recipe, base_model, **options)
        self.recipe = recipe
        self.policy: LoadedPolicy | None = None
        self.warm_up: WarmUp | None = None

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = base_load(self.context)
        return self.policy

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return the result; a run stopped by its listener has the status `cancelled`.

        Raises TrainingRefused (nothing to train on, nothing to resume, a folder in use or not writable) before any
        work, and TrainingFailed when training cannot go on (divergence, memory, disk).
        """
        start = time.monotonic()
        train_rows, eval_rows = rows_ordered(train_dataset or [], self.recipe), list(eval_dataset or [])
        if not train_rows:
            raise TrainingRefused("expected at least one preference pair to train on, found none")
        checkpoint, notes = folder_prepare(self.context)
        self.context.note_all(notes)
        arguments = self._arguments(len(train_rows), len(eval_rows))
        self.context.main_process = arguments.process_index == 0
        policy = self.load_base_model()
        self.context.note_all(policy.notes)
        head_check(policy)
        train = pairs_encoded(policy.encoder, train_rows, self.recipe)
        held_out = pairs_encoded(policy.encoder, eval_rows, self.recipe, needed=False)
        self._report_cuts(train)
        now = run_facts(self.recipe, policy, train.rows, arguments.world_size)
        same_run_check(self.context, now, resumed=checkpoint is not None)
        with matmul(self.context.hardware):
            self._warm_up(train_rows)
            trainer = self._trainer(policy, arguments, train, held_out)
            train_stoppable(trainer, self.context, checkpoint)
            metrics = trainer.evaluate_at_end() if held_out.rows else {}
        result = result_of(
            "dpo",
            trainer,
            policy,
            context=self.context,
            seconds=time.monotonic() - start,
            samples={"train": len(train.rows), "eval": len(held_out.rows)},
            truncated=train.truncated,
            left_out=train.left_out.counts,
            metrics=metrics,
        )
        if self.warm_up is not None and self.context.main_process and result.status == "succeeded":
            self.warm_up.store(Path(result.checkpoint))
        return result

    def _warm_up(self, rows: Sequence[Any]) -> None:
        responses = [
            {"prompt": row["prompt"], "completion": row[side], "tools": row.get("tools")}
            for row in rows
            for side in ("chosen", "rejected")
        ]
        self.warm_up = warm_up(self.context, responses)
        if self.warm_up is not None:
            self.context.note(self.warm_up.note)

    def _report_cuts(self, pairs: EncodedPairs) -> None:
        if any(pairs.truncated.values()):
            self.context.note(
                f"truncated to max_length {self.recipe.max_length} and max_completion_length "
                f"{self.recipe.max_completion_length}: {pairs.truncated['prompts']} prompts (oldest tokens), "
                f"{pairs.truncated['completions']} responses (end)"
            )
        self.context.note_all(pairs.left_out.notes("pairs"))

    def _arguments(self, rows: int, eval_rows: int) -> trl.DPOConfig:
        losses, weights = trl_losses(self.recipe)
        arguments = trl.DPOConfig(
            **common_arguments(
                self.context,
                rows=rows,
                eval_rows=eval_rows,
            ),
            beta=self.recipe.beta,
            loss_type=losses,
            loss_weights=weights,
            label_smoothing=self.recipe.label_smoothing,
            max_length=None,  # cut by us, before TRL would drop pairs
        )
        self.context.note_all(one_gpu(arguments))
        return arguments

    def _trainer(
        self, policy: LoadedPolicy, arguments: trl.DPOConfig, train: EncodedPairs, held_out: EncodedPairs
    ) -> PairTrainer:
        def dataset(pairs: EncodedPairs) -> Dataset | None:
            return self._dataset(policy, arguments, pairs) if pairs.rows else None

        weights = [row["weight"] for row in train.rows]
        collator = PairCollator(policy.tokenizer.pad_token_id, weight_scale=len(weights) / math.fsum(weights))
        special_tokens_settle(policy)
        recipe: AdapterRecipe = self.recipe
        train_rows, eval_rows = dataset(train), dataset(held_out)
        if self.warm_up is not None:
            recipe = self.warm_up.start_recipe(recipe)
            self.warm_up.release()
        trainer = PairTrainer(
            model=policy.model,
            args=arguments,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=policy.tokenizer,
            data_collator=collator,
            peft_config=lora_config_of(recipe, policy),
        )
        trainer.settle(self.context, policy)
        self.context.note_all(weights_begin(recipe, trainer.model))
        self.context.detail(trainer.choice.summary)
        self.context.detail(trainer.compile_choice.summary)
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
            reference, cache = policy, reference_cache(self.context)
            if self.warm_up is not None:
                assert self.warm_up.reference is not None  # until the rows of all splits are made
                reference, cache = self.warm_up.reference, self.warm_up.cache
            self.context.phase("reference pass")
            logps, computed = reference_logps(
                reference, arguments, items, 2 * self.recipe.batch_size, cache, self.context.phase
            )
            if cache is not None:
                self.context.detail(
                    f"reference log-probabilities: {computed:,} computed, "
                    f"{len(items) - computed:,} from the cache"
                )
            columns["ref_chosen_logps"], columns["ref_rejected_logps"] = logps[::2], logps[1::2]
        return Dataset.from_dict(columns)
