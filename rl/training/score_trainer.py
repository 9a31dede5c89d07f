"""Trainer of a score at the end of a response: batches, the three objectives, rows that share a prompt."""

from __future__ import annotations

import functools
import statistics
import types
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate.utils import send_to_device
from torch.nn import functional
from transformers.modeling_outputs import SequenceClassifierOutput

from packed_forward.forward import packed_hidden, strategy_of
from packed_forward.logps import causal_model
from packed_forward.packing import PackedBatch, completion_with_end, pack
from packed_forward.strategies import Strategy
from rl.recipes import RewardModelRecipe
from rl.training.encoding import EncodedResponse
from rl.training.policy import LoadedPolicy
from rl.training.run_context import RunContext
from rl.training.trl_runs import TokenizedTrainerMixin, strategy_apply, trainer_settle


def pad_batch(rows: Sequence[Sequence[int]], pad: int) -> dict[str, torch.Tensor]:
    """Right-padded ids and mask: the head reads each row's last real token (or an encoder's first)."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


@dataclass
class ScoreCollator:
    """Chosen and then rejected in one batch; of single responses only the first half is used."""

    pad: int
    strategy: Strategy = Strategy.STOCK

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        sides = [("ids", "prompt"), ("other_ids", "other_prompt")]
        if all(row["ids"] == row["other_ids"] for row in rows):
            sides = sides[:1]
        texts = [row[ids] for ids, _ in sides for row in rows]
        batch: dict[str, Any]
        if self.strategy is Strategy.STOCK:
            batch = pad_batch(texts, self.pad)
        else:
            starts = [row[prompt] for _, prompt in sides for row in rows]
            prompts = [ids[:start] for ids, start in zip(texts, starts, strict=True)]
            answers = [
                completion_with_end(ids[start:], self.pad) for ids, start in zip(texts, starts, strict=True)
            ]
            batch = {"packed": pack(prompts, answers, pad_token_id=self.pad)}
        batch["target"] = torch.tensor([row["target"] for row in rows])
        return batch


def scores_read(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The head's numbers for hidden states [n, width] of the transformers classifier itself: [n]."""
    return torch.as_tensor(model.score(hidden)[:, 0])


class ScoreTrainer(TokenizedTrainerMixin, transformers.Trainer):
    """transformers' trainer with the three objectives."""

    method = "reward_model"
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
        def forward(_: Any, *args: Any, packed: PackedBatch | None = None, **kwargs: Any) -> Any:
            if packed is None:
                return stock(*args, **kwargs)
            hidden = packed_hidden(inner, packed, strategy_of(inner))
            scores = scores_read(inner, hidden.reshape(-1, hidden.shape[-1])[packed.ends()])
            return SequenceClassifierOutput(logits=scores[:, None])

        inner.forward = types.MethodType(forward, inner)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
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

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None

    def scores(self, rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
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
