"""Reward models (Ouyang et al. 2022): rows people judged in, a base with LoRA and a score head out."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import statistics
import types
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
import transformers
from accelerate.utils import send_to_device
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn import functional
from transformers import TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from packed_forward.forward import packed_hidden, strategy_of
from packed_forward.logps import causal_model
from packed_forward.packing import PackedBatch, Strategy, completion_with_end, pack
from packed_forward.selftest import install
from rl.agents.base import Row
from rl.checksums import base_hash
from rl.recipes import RewardModelRecipe
from rl.recipes import RewardModelRecipe as RewardModelConfig
from rl.recipes.reward_model import AUTO, CAUSAL, FACTS, LINEAR
from rl.training.adapter_trainer import AdapterTrainer, Outcome, TrainRows, common_arguments
from rl.training.chat_template import LeftOut
from rl.training.encoding import EncodedResponse, Encoder
from rl.training.hardware import Hardware
from rl.training.loading import load_encoder, model_located
from rl.training.policy import LoadedPolicy
from rl.training.result import Silent, TrainingRefused, TrainResult
from rl.training.reward_scores import (
    HEADS,
    RewardModel,
    ScoreFacts,
    backbone_load,
    held_out_metrics,
    linear_reward_train,
    pad_batch,
    ranked_share,
)
from rl.training.rows import SCALE_ROWS, rows_writable
from rl.training.run import RunContext
from rl.training.trl_trainer import TokenizedTrainerMixin, strategy_apply, trainer_settle


def train_reward_model(
    rows: Sequence[Row],
    config: RewardModelConfig | None = None,
    *,
    output_dir: str | Path,
    eval_rows: Sequence[Row] = (),
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


class ScoreRow(TypedDict):
    """Tokens of a response, or of the chosen and the rejected one; `prompt`: how many of them the prompt has."""

    ids: list[int]
    other_ids: list[int]
    prompt: int
    other_prompt: int
    target: float


class RewardModelTrainer(AdapterTrainer[RewardModelRecipe, list[ScoreRow]]):
    """Train a reward model.

    Rows are pairs {"prompt", "chosen", "rejected"} (pairwise), {"prompt", "completion", "score"} with scores in [0, 1]
    (regression) or {"prompt", "completion", "label"} (binary).
    """

    method = "reward_model"
    left_out: LeftOut
    facts: ScoreFacts
    """Facts stored beside the weights."""

    def load_base_model(self) -> LoadedPolicy:
        """Load the base with LoRA and a fresh score head, and its encoder, once. Raises PolicyLoadError."""
        if self.policy is None:
            torch.manual_seed(self.recipe.seed)  # the score head starts at random
            context = self.context
            backbone, encoder = backbone_load(context.base_model, self.recipe.architecture, context.hardware)
            model = get_peft_model(backbone, self._lora(backbone))
            revision = getattr(model.config, "_commit_hash", None)
            self.policy = LoadedPolicy(
                model=model,
                tokenizer=encoder.tokenizer,
                encoder=encoder,
                base_model=context.base_model,
                base_model_hash=base_hash(model_located(context.base_model), revision),
                device=model.device,
                hardware=context.hardware,
                notes=list(encoder.notes),
            )
        return self.policy

    def check(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise TrainingRefused(
                f"expected at least one row of {self.recipe.objective} feedback, found none"
            )

    def check_model(self, policy: LoadedPolicy) -> None:
        """Every model will do: its head is replaced."""

    def train(self, train_dataset: Sequence[Row], eval_dataset: Sequence[Row] | None = None) -> TrainResult:
        """Train and return what came of it; the checkpoint opens with `RewardModel.load`."""
        train_rows, eval_rows = list(train_dataset or []), list(eval_dataset or [])
        self.check(train_rows)
        if self.recipe.is_linear:
            return self._train_linear(self.context, train_rows, eval_rows)
        encoder = load_encoder(self.context.base_model)
        train_rows, self.left_out = rows_writable(encoder, train_rows)
        eval_rows, _ = rows_writable(encoder, eval_rows, needed=False)
        if self.recipe.architecture == AUTO:
            return self._train_better(train_rows, eval_rows)
        return super().train(train_rows, eval_rows)

    def _train_linear(
        self, context: RunContext[RewardModelRecipe], train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainResult:
        return linear_reward_train(
            context, train_rows, self._targets(train_rows), eval_rows, self._targets(eval_rows)
        )

    def _train_better(self, train_rows: Sequence[Row], eval_rows: Sequence[Row]) -> TrainResult:
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
            self.recipe = recipe.with_knobs(architecture=CAUSAL)
            head = super().train(train_rows, eval_rows)
            result = head
            if linear is not None and head.status == "succeeded" and context.main_process:
                result = self._better(linear, head, eval_rows)
        finally:
            if context.main_process:  # it holds words of the feedback, and is fitted anew by a resumed run
                shutil.rmtree(beside.output_dir, ignore_errors=True)
        return dataclasses.replace(result, recipe=recipe.as_dict())

    def _better(self, linear: TrainResult, head: TrainResult, eval_rows: Sequence[Row]) -> TrainResult:
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

    def _ranked_share(self, checkpoint: str, rows: Sequence[Row]) -> float | None:
        model = RewardModel.load(checkpoint, self.context.hardware)
        prompts = [str(row.get("prompt_hash") or row["prompt"]) for row in rows]
        scores = model.row_scores(rows, self.recipe.max_completion_length)
        return ranked_share(scores, self._targets(rows), prompts)

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[list[ScoreRow]]:
        train, held_out = (self._encode(policy.encoder, rows) for rows in (train_rows, eval_rows))
        return TrainRows(
            train,
            held_out,
            facts=train,
            samples={"train": len(train), "eval": len(held_out)},
            left_out=self.left_out.counts,
            notes=self.left_out.notes("rows"),
        )

    def arguments(self, rows: TrainRows[list[ScoreRow]]) -> transformers.TrainingArguments:
        return transformers.TrainingArguments(
            **common_arguments(self.context, rows=len(rows.train), eval_rows=len(rows.held_out))
        )

    def build(
        self, policy: LoadedPolicy, arguments: TrainingArguments, rows: TrainRows[list[ScoreRow]]
    ) -> ScoreTrainer:
        self.scorer = ScoreTrainer(
            model=policy.model,
            args=arguments,
            train_dataset=Dataset.from_list(rows.train),
            eval_dataset=Dataset.from_list(rows.held_out) if rows.held_out else None,
            data_collator=ScoreCollator(policy.tokenizer.pad_token_id),
        )
        self.scorer.objective = self.recipe.objective
        self.scorer.settle(self.context, policy)
        return self.scorer

    def begin(self, trainer: ScoreTrainer, *, resumed: bool) -> None:
        """It starts from the base alone."""

    def fit(self, policy: LoadedPolicy, rows: TrainRows[list[ScoreRow]], checkpoint: Path | None) -> Outcome:
        outcome = super().fit(policy, rows, checkpoint)
        if not outcome.cancelled:
            self.facts = self._facts(self.scorer, rows.train, rows.held_out)
            held = self.facts.get("held_out", {})
            outcome.metrics |= {name: value for name, value in held.items() if name != "curve"}
        install(policy, Strategy.STOCK)
        return outcome

    def save(self, policy: LoadedPolicy, outcome: Outcome) -> Path:
        if self.processes.main:
            shutil.rmtree(self._folder, ignore_errors=True)
            policy.model.save_pretrained(self._folder)
            policy.tokenizer.save_pretrained(self._folder)
            (self._folder / FACTS).write_text(json.dumps(self.facts, indent=2) + "\n", "utf-8")
        return self._folder

    def _lora(self, backbone: torch.nn.Module) -> LoraConfig:
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

    def _encode(self, encoder: Encoder, rows: Sequence[Row]) -> list[ScoreRow]:
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
        encoded: list[ScoreRow] = []
        for i, target in enumerate(targets):
            both = [column[i] for column in columns]
            ids = [item.prompt_ids + item.response_ids for item in both]
            if len(ids) == 2 and ids[0] == ids[1]:
                continue  # cut to the same tokens: nothing to prefer
            prompts = [len(item.prompt_ids) for item in both]
            encoded.append(
                {
                    "ids": ids[0],
                    "other_ids": ids[-1],
                    "prompt": prompts[0],
                    "other_prompt": prompts[-1],
                    "target": target,
                }
            )
        return encoded

    def _targets(self, rows: Sequence[Row]) -> list[float]:
        try:
            return [self._target(row, n) for n, row in enumerate(rows)]
        except ValueError as error:
            raise TrainingRefused(str(error)) from error

    def _target(self, row: Row, number: int) -> float:
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

    def _facts(self, trainer: ScoreTrainer, train: list[ScoreRow], held_out: list[ScoreRow]) -> ScoreFacts:
        some = train[:: -(-len(train) // SCALE_ROWS)]
        scores = [score for pair in trainer.scores(some) for score in pair]
        facts: ScoreFacts = {
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


@dataclass
class ScoreCollator:
    """Chosen and then rejected in one batch; of single responses only the first half is used."""

    pad: int
    strategy: Strategy = Strategy.STOCK

    def __call__(self, rows: list[ScoreRow]) -> dict[str, torch.Tensor]:
        sides = [(row["ids"], row["prompt"]) for row in rows]
        if any(row["ids"] != row["other_ids"] for row in rows):
            sides += [(row["other_ids"], row["other_prompt"]) for row in rows]
        texts = [ids for ids, _ in sides]
        batch: dict[str, torch.Tensor]
        if self.strategy is Strategy.STOCK:
            batch = pad_batch(texts, self.pad)
        else:
            prompts = [ids[:start] for ids, start in sides]
            answers = [completion_with_end(ids[start:], self.pad) for ids, start in sides]
            batch = {"packed": pack(prompts, answers, pad_token_id=self.pad)}
        batch["target"] = torch.tensor([row["target"] for row in rows])
        return batch


def scores_read(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The head's numbers for hidden states [n, width] of the transformers classifier itself: [n]."""
    return torch.as_tensor(model.score(hidden)[:, 0])


class ScoreTrainer(TokenizedTrainerMixin, transformers.Trainer):
    """transformers' trainer with the three objectives."""

    objective: str

    def settle(self, context: RunContext[RewardModelRecipe], policy: LoadedPolicy) -> None:
        """Apply what the constructor has no arguments for, and pack rows where the model can compute them."""
        self._noted: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        trainer_settle(self, policy, context)
        if context.recipe.architecture != "causal":
            return
        items = [
            EncodedResponse(row[ids][: row[prompt]], row[ids][row[prompt] :])
            for data in (self.train_dataset, self.eval_dataset)
            for row in data or ()
            for ids, prompt in (("ids", "prompt"), ("other_ids", "other_prompt"))
        ]
        choice = strategy_apply(self, items, scores_read)
        self.data_collator.strategy = choice.strategy
        context.detail(choice.summary)
        inner = causal_model(self.model)
        stock = inner.forward

        @functools.wraps(type(inner).forward)
        def forward(
            _: object, *args: object, packed: PackedBatch | None = None, **kwargs: object
        ) -> SequenceClassifierOutput:
            if packed is None:
                return stock(*args, **kwargs)
            hidden = packed_hidden(inner, packed, strategy_of(inner))
            scores = scores_read(inner, hidden.reshape(-1, hidden.shape[-1])[packed.ends()])
            return SequenceClassifierOutput(logits=scores[:, None])

        inner.forward = types.MethodType(forward, inner)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        **_: object,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = dict(inputs)
        target = inputs.pop("target")
        scores = model(**inputs).logits[:, 0].float()
        loss = reward_loss(scores, target, self.objective)
        self.loss_check(loss, "")
        self._scores_note(scores.detach(), target)
        return (loss, {"scores": scores.detach()}) if return_outputs else loss

    def _scores_note(self, scores: torch.Tensor, target: torch.Tensor) -> None:
        noted = self._noted["train" if self.model.training else "eval"]
        noted["rewards/mean"].append(float(scores.mean()))
        noted["rewards/std"].append(float(scores.std(correction=0)))
        noted["rewards/accuracies"].append(float(row_accuracy(scores, target, self.objective).mean()))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for mode, first, prefix in (("train", "loss", ""), ("eval", "eval_loss", "eval_")):
            if first in logs:
                noted = self._noted.pop(mode, {})
                logs |= {prefix + name: statistics.fmean(values) for name, values in noted.items()}
        super().log(logs, start_time)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *_: object, **__: object
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss = self.compute_loss(model, inputs)
        assert isinstance(loss, torch.Tensor)  # its outputs are not asked for
        return loss.detach(), None, None

    def scores(self, rows: Sequence[ScoreRow]) -> list[tuple[float, float]]:
        """The head's numbers for each row's response and for the other of its pair, the same where there is none.

        In batches and on packed rows, as they are trained.
        """
        pairs: list[tuple[float, float]] = [(0.0, 0.0)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["ids"]))
        self.model.eval()
        for start in range(0, len(order), self.args.per_device_eval_batch_size):
            chosen = order[start : start + self.args.per_device_eval_batch_size]
            batch = self.data_collator([rows[i] for i in chosen])
            del batch["target"]
            batch = send_to_device(batch, self.args.device)  # transformers' own moves no packed rows
            with torch.no_grad():
                outputs = self.model(**batch).logits[:, 0].float().tolist()
            others = outputs[-len(chosen) :]  # the second half of pairs, all of single responses
            for i, first, other in zip(chosen, outputs[: len(chosen)], others, strict=True):
                pairs[i] = first, other
        return pairs


def row_accuracy(scores: torch.Tensor, target: torch.Tensor, objective: str) -> torch.Tensor:
    """1 for each row scored as people judged it, else 0; the shapes are those of `reward_loss`.

    A pair whose chosen response scores higher; a score on the same side of neutral as people's.
    """
    if objective == "pairwise":
        chosen, rejected = scores.chunk(2)
        return (chosen > rejected).float()
    return ((scores > (0.5 if objective == "regression" else 0)) == (target > 0.5)).float()


def reward_loss(scores: torch.Tensor, target: torch.Tensor, objective: str) -> torch.Tensor:
    """The mean loss of a batch.

    pairwise: -log sigmoid(s_chosen - s_rejected), `scores` [2B] with the chosen half first (Ouyang et al. 2022, eq. 1);
    regression: (s - target)^2; binary: cross-entropy of sigmoid(s); `scores` and `target` [B].
    """
    if objective == "pairwise":
        chosen, rejected = scores.chunk(2)
        return -functional.logsigmoid(chosen - rejected).mean()
    if objective == "regression":
        return functional.mse_loss(scores, target.to(scores))
    return functional.binary_cross_entropy_with_logits(scores, target.to(scores))
