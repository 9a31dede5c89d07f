"""A model that scores responses as people would: base with LoRA and a score head, an encoder, or a linear one. Trains,
judges, loads.

Pairwise: Bradley & Terry 1952 as in Ouyang et al. 2022 (arXiv 2203.02155, eq. 1). Regression: squared error on
scores in [0, 1]. Binary: cross-entropy on thumbs. The checkpoint is safetensors and is used by its path in later runs.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model

from packed_forward.selftest import install
from packed_forward.strategies import Strategy
from rl.checksums import base_hash
from rl.recipes import RewardModelRecipe
from rl.recipes import RewardModelRecipe as RewardModelConfig
from rl.recipes.reward_model import AUTO, CAUSAL, FACTS, LINEAR
from rl.training.callbacks import history_columns
from rl.training.encoding import rows_writable
from rl.training.folder import folder_prepare, same_run_check
from rl.training.hardware import Hardware
from rl.training.linear_reward import linear_reward_train
from rl.training.loading import load_encoder
from rl.training.model_files import model_located
from rl.training.policy import LoadedPolicy, lora_config, matmul
from rl.training.progress import Silent
from rl.training.result import TrainingRefused, TrainResult
from rl.training.reward_metrics import held_out_metrics, ranked_share
from rl.training.reward_scores import HEADS, RewardModel, backbone_load
from rl.training.run_context import RunContext, RunOptions, run_context, training_hardware
from rl.training.score_trainer import ScoreCollator, ScoreTrainer
from rl.training.trl_runs import (
    LIBRARIES,
    common_arguments,
    rows_ordered,
    run_facts,
    train_stoppable,
    versions,
)

SCALE_ROWS = 256
"""Training rows, at most, whose scores set the scale of a finished model's."""


def train_reward_model(
    rows: Sequence[Any],
    config: RewardModelConfig | None = None,
    *,
    output_dir: str | Path,
    eval_rows: Sequence[Any] = (),
    base_model: str = "bundled",
    agent: str = "",
    hardware: Hardware | None = None,
) -> tuple[RewardModel, TrainResult]:
    """Train one from rows and open it: the short way for a notebook."""
    trainer = RewardModelTrainer(
        config or RewardModelConfig(), base_model, output_dir=output_dir, agent=agent, hardware=hardware
    )
    result = trainer.train(rows, eval_rows)
    return RewardModel.load(result.checkpoint, trainer.context.hardware), result


class RewardModelTrainer:
    """Train a reward model; constructor, refusals and failures as `rl.training.dpo.DPOTrainer`.

    Rows are pairs {"prompt", "chosen", "rejected"} (pairwise), {"prompt", "completion", "score"} with scores in [0, 1]
    (regression) or {"prompt", "completion", "label"} (binary).
    """

    def __init__(
        self,
        recipe: RewardModelRecipe,
        base_model: str = "bundled",
        **options: Unpack[RunOptions],
    ) -> None:
        self.context = run_context(recipe, base_model, **options)
        self.recipe = recipe
        self.loaded: tuple[Any, Any] | None = None
        self.left_out: dict[str, int] = {}

    def load_base_model(self) -> tuple[Any, Any]:
        """Load the backbone with a fresh score head, and its encoder, once; a linear one has neither. Raises
        PolicyLoadError."""
        if self.recipe.is_linear:
            return None, None
        if self.loaded is None:
            hardware = training_hardware(self.context.hardware, self.recipe)
            self.loaded = backbone_load(self.context.base_model, self.recipe.architecture, hardware)
        return self.loaded

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return what came of it; the checkpoint opens with `RewardModel.load`."""
        train_rows, eval_rows = rows_ordered(train_dataset or [], self.recipe), list(eval_dataset or [])
        if not train_rows:
            raise TrainingRefused(
                f"expected at least one row of {self.recipe.objective} feedback, found none"
            )
        if self.recipe.is_linear:
            return self._train_linear(self.context, train_rows, eval_rows)
        encoder = load_encoder(self.context.base_model)
        train_rows, left_out = rows_writable(encoder, train_rows)
        eval_rows, _ = rows_writable(encoder, eval_rows, needed=False)
        self.left_out = left_out.counts
        self.context.note_all(left_out.notes("rows"))
        if self.recipe.architecture == AUTO:
            return self._train_better(train_rows, eval_rows)
        return self._train_head(train_rows, eval_rows)

    def _train_linear(
        self, context: RunContext[RewardModelRecipe], train_rows: list[Any], eval_rows: list[Any]
    ) -> TrainResult:
        return linear_reward_train(
            context, train_rows, self._targets(train_rows), eval_rows, self._targets(eval_rows)
        )

    def _train_better(self, train_rows: list[Any], eval_rows: list[Any]) -> TrainResult:
        """Train a linear judge and a score head, and keep the one that ranks more of the eval split as people did; the
        linear one where that tells nothing, as it is the surer of the two on few rows."""
        recipe, context = self.recipe, self.context
        beside = dataclasses.replace(
            context,
            recipe=recipe.with_knobs(architecture=LINEAR),
            output_dir=context.output_dir / LINEAR,
            listener=Silent(),
            notes=[],
            details=[],
        )
        linear: TrainResult | None = None
        try:
            try:
                linear = self._train_linear(beside, train_rows, eval_rows)
            except TrainingRefused as refusal:
                context.note(f"a linear reward model cannot learn from this feedback ({refusal})")
            self.recipe = context.recipe = recipe.with_knobs(architecture=CAUSAL)
            head = self._train_head(train_rows, eval_rows)
            result = head
            if linear is not None and head.status == "succeeded" and context.main_process:
                result = self._better(linear, head, eval_rows)
        finally:
            if context.main_process:  # it holds words of the feedback, and is fitted anew by a resumed run
                shutil.rmtree(beside.output_dir, ignore_errors=True)
        return dataclasses.replace(result, recipe=recipe.as_dict())

    def _better(self, linear: TrainResult, head: TrainResult, eval_rows: list[Any]) -> TrainResult:
        """The result of the judge that ranks more eval rows as people did, its files in their place.

        Of a linear one with the steps and curves of the head.
        """
        shares = [self._ranked_share(one.checkpoint, eval_rows) for one in (linear, head)]
        told = [share for share in shares if share is not None]
        keeps_linear = len(told) < len(shares) or told[0] >= told[1]
        words = " and ".join(f"{100 * share:.0f} %" for share in told)
        kept = "linear one is kept; the curves are the head's" if keeps_linear else "head is kept"
        self.context.note(
            f"a linear reward model and a score head ranked {words or 'none'} of {len(eval_rows):,} eval rows as "
            f"people did: the {kept}"
        )
        if not keeps_linear:
            return head
        shutil.rmtree(self._folder)
        Path(linear.checkpoint).rename(self._folder)
        return dataclasses.replace(
            linear,
            checkpoint=str(self._folder),
            steps=head.steps,
            total_steps=head.total_steps,
            seconds=linear.seconds + head.seconds,
            history=head.history,
            hardware=head.hardware,
            libraries=head.libraries | linear.libraries,
            notes=head.notes,
            details=[*linear.details, *head.details],
        )

    def _ranked_share(self, checkpoint: str, rows: list[Any]) -> float | None:
        model = RewardModel.load(checkpoint, self.context.hardware)
        prompts = [str(row.get("prompt_hash") or row["prompt"]) for row in rows]
        scores = model.row_scores(rows, self.recipe.max_completion_length)
        return ranked_share(scores, self._targets(rows), prompts)

    def _train_head(self, train_rows: list[Any], eval_rows: list[Any]) -> TrainResult:
        start = time.monotonic()
        checkpoint, notes = folder_prepare(self.context)
        torch.manual_seed(self.recipe.seed)  # the score head starts at random
        backbone, encoder = self.load_base_model()
        train, held_out = self._encode(encoder, train_rows), self._encode(encoder, eval_rows)
        arguments = transformers.TrainingArguments(
            **common_arguments(
                self.context,
                rows=len(train),
                eval_rows=len(held_out),
            )
        )
        self.context.main_process = arguments.process_index == 0
        self.context.note_all([*notes, *encoder.notes])
        model = get_peft_model(backbone, self._lora(backbone))
        policy = _as_policy(model, encoder, self.context.base_model, self.context.hardware)
        now = run_facts(self.recipe, policy, train, arguments.world_size)
        same_run_check(self.context, now, resumed=checkpoint is not None)
        with matmul(self.context.hardware):
            trainer = ScoreTrainer(
                model=model,
                args=arguments,
                train_dataset=Dataset.from_list(train),
                eval_dataset=Dataset.from_list(held_out) if held_out else None,
                data_collator=ScoreCollator(encoder.tokenizer.pad_token_id),
            )
            trainer.objective = self.recipe.objective
            trainer.settle(self.context, policy)
            train_stoppable(trainer, self.context, checkpoint)
            metrics = trainer.evaluate_at_end() if held_out else {}
            facts = self._facts(trainer, train, held_out)
            install(policy, Strategy.STOCK)
        if facts is not None and trainer.is_world_process_zero():
            self._save(model, encoder, facts)
        counts = {"train": len(train), "eval": len(held_out)}
        return self._result(trainer, facts, counts, metrics, time.monotonic() - start)

    def _lora(self, backbone: Any) -> LoraConfig:
        if self.recipe.whole:  # the score head is among its modules
            config = lora_config(self.recipe, backbone)
            config.task_type = TaskType.SEQ_CLS
            return config
        head = next(name for name in HEADS if hasattr(backbone, name))
        return LoraConfig(
            r=self.recipe.lora_r,
            lora_alpha=self.recipe.lora_alpha,
            lora_dropout=self.recipe.lora_dropout,
            target_modules="all-linear",
            modules_to_save=[head, *(["pooler"] if hasattr(backbone, "pooler") else [])],
            exclude_modules=[head, "pooler", "pooler.dense"],
            task_type=TaskType.SEQ_CLS,
        )

    def _encode(self, encoder: Any, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows as tokens: `ids` (and for pairs `other_ids`, the rejected one) and the `target`."""
        sides = ("chosen", "rejected") if self.recipe.objective == "pairwise" else ("completion",)
        try:
            columns = [
                encoder.column(rows, side, self.recipe.max_length, self.recipe.max_completion_length).items
                for side in sides
            ]
        except ValueError as error:
            raise TrainingRefused(str(error)) from error
        targets = self._targets(rows)
        encoded = []
        for i, target in enumerate(targets):
            both = [column[i] for column in columns]
            ids = [item.prompt_ids + item.response_ids for item in both]
            if len(ids) == 2 and ids[0] == ids[1]:
                continue  # cut to the same tokens: nothing to prefer
            prompts = [len(item.prompt_ids) for item in both]
            row = {"ids": ids[0], "other_ids": ids[-1], "target": target}
            encoded.append(row | {"prompt": prompts[0], "other_prompt": prompts[-1]})
        return encoded

    def _targets(self, rows: Sequence[Any]) -> list[float]:
        try:
            return [self._target(row, n) for n, row in enumerate(rows)]
        except ValueError as error:
            raise TrainingRefused(str(error)) from error

    def _target(self, row: Any, number: int) -> float:
        if self.recipe.objective == "pairwise":
            return 1.0
        value = row.get("score" if self.recipe.objective == "regression" else "label")
        if not isinstance(value, (bool, int, float)) or not 0 <= float(value) <= 1:
            wanted = (
                "`score`, a number in [0, 1]"
                if self.recipe.objective == "regression"
                else "`label`, true or false"
            )
            raise ValueError(f"row {number}: expected {wanted}; found {value!r}")
        return float(value)

    def _facts(
        self, trainer: ScoreTrainer, train: list[dict[str, Any]], held_out: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Facts stored beside the weights; None for a model that was stopped before it was finished."""
        if trainer.state.global_step < trainer.state.max_steps and not trainer.stopped_early():
            return None
        some = train[:: -(-len(train) // SCALE_ROWS)]
        scores = [score for pair in trainer.scores(some) for score in pair]
        facts: dict[str, Any] = {
            "objective": self.recipe.objective,
            "architecture": self.recipe.architecture,
            "base_model": self.context.base_model,
            "base_model_hash": trainer.policy.base_model_hash,
            "agent": self.context.agent,
            "max_length": self.recipe.max_length,
            "mean": statistics.fmean(scores),
            "std": statistics.pstdev(scores),
        }
        if held_out:
            targets = [row["target"] for row in held_out]
            held = held_out_metrics(trainer.scores(held_out), targets, self.recipe.objective)
            facts["held_out"] = dataclasses.asdict(held)
        return facts

    @property
    def _folder(self) -> Path:
        return self.context.output_dir / "reward_model"

    def _save(self, model: Any, encoder: Any, facts: dict[str, Any]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        model.save_pretrained(self._folder)
        encoder.tokenizer.save_pretrained(self._folder)
        (self._folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")

    def _result(
        self,
        trainer: ScoreTrainer,
        facts: dict[str, Any] | None,
        samples: dict[str, int],
        metrics: dict[str, float],
        seconds: float,
    ) -> TrainResult:
        state = trainer.state
        history = history_columns(state.log_history)
        checkpoint = self.context.output_dir / "checkpoints" / f"checkpoint-{state.global_step}"
        if facts is not None:
            held = facts.get("held_out", {})
            metrics |= {name: value for name, value in held.items() if name != "curve"}
        taken = trainer.best_step() or state.global_step
        standing = history_columns([row for row in state.log_history if row.get("step", 0) <= taken])
        last = {name: values[-1] for name, values in standing.items() if values and not name.endswith("step")}
        return TrainResult(
            method="reward_model",
            status="cancelled" if facts is None else "succeeded",
            checkpoint=str(checkpoint if facts is None else self._folder),
            base_model=self.context.base_model,
            base_model_hash=trainer.policy.base_model_hash,
            steps=state.global_step,
            total_steps=state.max_steps,
            seconds=round(seconds, 2),
            samples=samples,
            left_out=self.left_out,
            metrics={**last, **metrics},
            history=history,
            recipe=self.recipe.as_dict(),
            hardware=dataclasses.asdict(self.context.hardware),
            libraries=versions(LIBRARIES),
            notes=self.context.notes,
            details=self.context.details,
            stopped_early=trainer.stopped_early(),
            best_step=trainer.best_step(),
        )


# --- The model ----------------------------------------------------------------------------------------------


def _as_policy(model: Any, encoder: Any, base_model: str, hardware: Hardware) -> LoadedPolicy:
    return LoadedPolicy(
        model=model,
        tokenizer=encoder.tokenizer,
        encoder=encoder,
        base_model=base_model,
        base_model_hash=base_hash(model_located(base_model), getattr(model.config, "_commit_hash", None)),
        device=model.device,
        hardware=hardware,
    )
