"""TRL's DPO trainer on pairs that are already tokens: our batches and forward, TRL's loss, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import trl
from accelerate.utils import gather_object, send_to_device
from transformers import TrainingArguments

from packed_forward.compile_choice import CompileChoice, compile_choose
from packed_forward.forward import packed_logps, strategy_of
from packed_forward.lazy_metrics import LazyMetrics
from packed_forward.logps import causal_model
from packed_forward.micro_batches import MicroBatcher, UncollatedRows
from packed_forward.preference_collator import PreferenceCollator
from packed_forward.row_cache import RowCache, row_key
from packed_forward.selection import StrategyChoice, first_strategy
from packed_forward.trl_forward import install_forward
from rl.recipes import DPORecipe
from rl.training.early_stopping import RANKING_LOSS, ranking_loss
from rl.training.encoding import EncodedResponse
from rl.training.policy import LoadedPolicy
from rl.training.processes import Processes
from rl.training.run_context import RunContext
from rl.training.sampling import LengthGroupedSampler
from rl.training.scoring import score_encoded
from rl.training.trl_runs import TokenizedTrainerMixin, head_compact, strategy_apply, trainer_settle


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


@dataclass
class PairCollator(PreferenceCollator):
    """A batch of B pairs with their weights; or, where the trainer cuts micro-batches first, its rows as they are."""

    weight_scale: float = 1.0
    uncollated: bool = False
    """Leave the rows as they are: the trainer cuts them into micro-batches first (`packed.micro_batches`)."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"rows": UncollatedRows(examples)} if self.uncollated else self.batch(examples)

    def batch(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The tensors of these rows."""
        batch = super().torch_call(examples)
        if "weight" in examples[0]:
            weights = [example["weight"] * self.weight_scale for example in examples]
            batch["pair_weights"] = torch.tensor(weights)
        return batch


def forward_settle(trainer: Any, temperature: float = 1.0) -> None:
    """`install_forward` into the model of a settled trainer, as its device and its loss need it."""
    install_forward(causal_model(trainer.model), head_compact(trainer, trainer.policy), temperature)


class PairTrainer(TokenizedTrainerMixin, trl.DPOTrainer):
    """TRL's trainer on pairs that are already tokens. Loss, metrics, optimiser and checkpoints stay TRL's."""

    method = "dpo"

    context: RunContext[DPORecipe]
    policy: LoadedPolicy
    data_collator: PairCollator
    choice: StrategyChoice
    """Forward strategy of rows that share a prompt, and its reason."""
    compile_choice: CompileChoice
    """Decision to compile the layers, with the reason."""
    _differences: list[float] | None = None
    """log p(chosen) - log p(rejected) of the eval pairs so far, nats; None while it is not evaluated."""
    defer_metrics: bool | None = None
    """True if metrics stay on the device until they are logged; None: where the device is not the CPU."""

    def settle(self, context: RunContext[DPORecipe], policy: LoadedPolicy) -> None:
        """Apply the settings that TRL's constructor has no arguments for."""
        self.context = context
        self.precompute_ref_logps = context.recipe.precompute_reference
        trainer_settle(self, policy, context)
        forward_settle(self)
        items = self.token_rows("chosen_ids", "rejected_ids")
        self.choice = self._select_strategy(items)
        self.compile_choice = self._compile(items)
        self._busy_s, self._busy_tokens = 0.0, 0
        later = policy.device.type != "cpu" if self.defer_metrics is None else self.defer_metrics
        self.lazy_metrics = LazyMetrics(self.args.world_size) if later else None
        self._share = 1.0
        self._micro = MicroBatcher(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            context.recipe.micro_tokens,
            self._checkpoint,
            context.note,
            Processes(cpu=policy.device.type == "cpu").maximum if self.args.world_size > 1 else None,
        )

    def _select_strategy(self, items: list[EncodedResponse]) -> StrategyChoice:
        """Find how packed rows can be computed here, on this run's own longest rows, and batch for it."""
        first = first_strategy(self.context.recipe.attention, self.policy.device.type, items)
        choice = strategy_apply(self, items, first=first)
        self.data_collator.strategy = choice.strategy
        return choice

    def _compile(self, items: list[EncodedResponse]) -> CompileChoice:
        """Find whether the layers are compiled, and batch for it."""
        recipe = self.context.recipe
        steps = recipe.steps(len(self.train_dataset)) * recipe.gradient_accumulation // self.args.world_size
        choice = compile_choose(
            self.policy, self.choice.strategy, items,
            wish=recipe.compile, steps=steps, step_s=self._step_time, autocast=self._autocast,
        )  # fmt: skip
        self.data_collator.fit = choice.buckets.fit if choice.buckets else None
        return choice

    def _autocast(self) -> torch.autocast:
        """Autocast context of the run; accelerate wraps the model's forward in it."""
        half = torch.bfloat16 if self.args.bf16 else torch.float16
        return torch.autocast(
            self.policy.device.type, dtype=half, enabled=bool(self.args.bf16 or self.args.fp16)
        )

    def _step_time(self) -> float:
        """Seconds that a micro-batch takes, forward and backward, uncompiled; the second of two."""
        model = causal_model(self.model)
        rows = self.train_dataset.select(range(min(self.context.recipe.batch_size, len(self.train_dataset))))
        packed = self.data_collator.batch(list(rows))["packed"].to(self.args.device)
        seconds = 0.0
        for _ in range(2):
            began = time.perf_counter()
            with self._autocast():
                logps = packed_logps(model, packed, strategy_of(model))[0]
            logps.sum().backward()
            if self.args.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        return seconds

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data = train_dataset if train_dataset is not None else self.train_dataset
        lengths = [
            len(p) + max(len(c), len(r))
            for p, c, r in zip(data["prompt_ids"], data["chosen_ids"], data["rejected_ids"], strict=True)
        ]
        groups = (
            [hash(tuple(prompt)) for prompt in data["prompt_ids"]]
            if self.context.recipe.group_prompts
            else None
        )
        # trainer.state survives a resume, so the sampler reads it at each epoch
        # accelerate deals whole batches to the processes in turn: rows of one step lie together
        rows_at_once = self.args.train_batch_size * self.args.world_size
        return LengthGroupedSampler(
            lengths,
            rows_at_once,
            self.args.data_seed,
            lambda: self.state.epoch or 0,
            groups,
            shuffled=self.context.recipe.curriculum == "none",
        )

    def get_train_dataloader(self) -> Any:
        own = self.data_collator
        self.data_collator = dataclasses.replace(own, uncollated=True)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = own

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        began = time.perf_counter()

        def compute(rows: list[dict[str, Any]], share: float) -> torch.Tensor:
            lengths = {name: len(values) for name, values in self._metrics["train"].items()}
            batch = self.data_collator.batch(rows)
            self._busy_tokens += int(batch["attention_mask"].sum()) * self.args.world_size
            # the loader moves what it makes; this was made here
            if self.args.device.type == "cuda":
                batch = {name: value.pin_memory() for name, value in batch.items()}
            batch = send_to_device(batch, self.args.device, non_blocking=True)
            self._share = share
            try:
                loss: torch.Tensor = super(PairTrainer, self).training_step(model, batch, *args, **kwargs)
            except torch.OutOfMemoryError:
                for name, values in self._metrics["train"].items():
                    del values[lengths.get(name, 0) :]
                raise
            return loss

        loss = self._micro.run(inputs["rows"].rows, compute)
        self._busy_s += time.perf_counter() - began
        return loss

    def _checkpoint(self) -> bool:
        if self.model.is_gradient_checkpointing:
            return False
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        return True

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        with (
            contextlib.nullcontext()
            if self.lazy_metrics is None
            else self.lazy_metrics.gather_on_device(self)
        ):
            recorded = self._read_later(model) if self.model.training else self._read_differences(model)
            loss = super()._compute_loss(recorded, inputs, return_outputs)
            tokens = self.accelerator.gather(inputs["completion_mask"].sum()).sum().item()
        mode = "train" if self.model.training else "eval"
        self.loss_check(loss[0] if return_outputs else loss, f" or raise beta (now {self.beta:g})")
        metrics = self._metrics[mode]
        pairs = inputs["input_ids"].size(0) / 2 * self.args.world_size
        logratio = (metrics["rewards/chosen"][-1] + metrics["rewards/rejected"][-1]) / self.beta * pairs
        metrics["log_ratio"].append(logratio / tokens)
        if mode == "eval":
            return loss
        # a micro-batch is a share of its step
        return (loss[0] * self._share, *loss[1:]) if return_outputs else loss * self._share

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, with the ranking loss of the pairs beside its metrics."""
        self._differences = []
        output = super().evaluation_loop(*args, **kwargs)
        differences, self._differences = self._differences, None
        output.metrics[RANKING_LOSS] = ranking_loss(differences)
        return output

    def _read_differences(self, model: Any) -> Any:
        """The model, whose log-probabilities of the pairs are noted."""

        def forward(**inputs: Any) -> Any:
            output = model(**inputs)
            if self._differences is not None:
                chosen, rejected = output.log_probs.detach().float().sum(-1).chunk(2)
                self._differences += self.accelerator.gather_for_metrics(chosen - rejected).tolist()
            return output

        return forward

    def _read_later(self, model: Any) -> Any:
        """The model, whose mean logits TRL selects by a mask to average them."""
        if self.lazy_metrics is None:
            return model

        def forward(**inputs: Any) -> Any:
            assert self.lazy_metrics is not None
            output = model(**inputs)
            if isinstance(output.get("mean_logits"), torch.Tensor):
                output.mean_logits = self.lazy_metrics.wrap(output.mean_logits)
            return output

        return forward

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        began = time.perf_counter()
        self.metrics_read()
        self._busy_s += time.perf_counter() - began  # reading waits for the steps to end
        if "loss" in logs and self._busy_s > 0:
            self._metrics["train"]["tokens_per_second"] = [self._busy_tokens / self._busy_s]
            self._busy_s, self._busy_tokens = 0.0, 0
        super().log(logs, start_time)
