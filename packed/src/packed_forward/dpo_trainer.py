"""Drop-in for `trl.DPOTrainer`: pairs share the computation of their prompt, loss and metrics stay TRL's.

    from packed_forward.dpo_trainer import PackedDPOTrainer

    trainer = PackedDPOTrainer(model=model, args=args, train_dataset=pairs, processing_class=tokenizer)

Differs from TRL in speed and memory alone. Where the model's forward over packed rows does not agree with its own
(`packed.selftest`), or the run has something packed rows cannot do, every batch is TRL's and `strategy_choice` has the
reason. `num_tokens` counts the tokens really computed, so it is lower than TRL's.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import trl
from datasets import Dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference

from packed_forward.logps import causal_model
from packed_forward.packing import TokenizedCompletion
from packed_forward.preference_collator import PreferenceCollator
from packed_forward.selection import FLEX_FROM, StrategyChoice, strategy_select
from packed_forward.selftest import PackableModel, install
from packed_forward.selftest_cache import SelftestCache
from packed_forward.strategies import Strategy
from packed_forward.trl_forward import install_forward, is_sharded

logger = logging.getLogger("packed_forward.dpo_trainer")


class PackedDPOTrainer(trl.DPOTrainer):
    """`trl.DPOTrainer`, same arguments, over packed rows.

    The underscored methods and attributes are TRL 1.16's.
    """

    strategy_choice: StrategyChoice | None = None
    """The forward strategy and the reason for it; None before the constructor has tested it."""

    def __init__(self, *args: Any, selftest_cache: SelftestCache | None = None, **kwargs: Any) -> None:
        """`selftest_cache`: results of earlier self-tests of the same model; None tests anew (a few seconds)."""
        self._selftest_cache = selftest_cache
        super().__init__(*args, **kwargs)
        self._pack()

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self._pack()  # TRL's constructor comes here before it ends
        return super()._precompute_ref_logps(dataset, *args, **kwargs)

    def _pack(self) -> None:
        """Select the strategy, once, and where it is a packed one prepare models and batches for it."""
        if self.strategy_choice is not None:
            return
        obstacle = self._obstacle()
        probes, median_prompt = ([], 0) if obstacle else self._probes()
        if not probes:
            obstacle = obstacle or "no pair with a prompt and two completions"
            self.strategy_choice = StrategyChoice(Strategy.STOCK, obstacle, {})
        else:
            self.strategy_choice = self._select(probes, median_prompt)
        logger.info("packed forward: %s", self.strategy_choice.summary)
        if self.strategy_choice.strategy is Strategy.STOCK:
            return
        for model in self._models():
            install_forward(causal_model(model), compact=False)
        self.data_collator = dataclasses.replace(
            self._collator(),
            strategy=self.strategy_choice.strategy,
            tested_tokens=max(len(probe.prompt_ids) + len(probe.response_ids) for probe in probes),
        )

    def _collator(self) -> PreferenceCollator:
        """TRL's collator as ours, not packing yet."""
        stock = self.data_collator
        return PreferenceCollator(
            pad_token_id=stock.pad_token_id,
            max_length=stock.max_length,
            truncation_mode=stock.truncation_mode,
            pad_to_multiple_of=stock.pad_to_multiple_of,
        )

    def _models(self) -> list[Any]:
        """The policy, and the reference where it is a model of its own."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        return [self.accelerator.unwrap_model(model) for model in models]

    def _obstacle(self) -> str:
        """The reason why this run's rows cannot be packed; empty where there is none."""
        adapters = getattr(self.model, "peft_config", None) or {}
        obstacles = {
            "a vision-language model": self._is_vlm or self._is_vision_dataset,
            "a data collator of its own": type(self.data_collator) is not DataCollatorForPreference,
            "an iterable dataset, whose longest row is not known": not isinstance(
                self.train_dataset, Dataset
            ),
            "a router loss, which depends on every token fed": self.aux_loss_enabled,
            "sharded weights, which only the model's own forward gathers": is_sharded(self),
            "use_weighting, which needs a sum over the vocabulary": self.use_weighting,
            "kernels that replace the model's forward": self.args.use_liger_kernel or self.args.torch_compile,
            "virtual tokens before the prompt": any(
                getattr(config, "is_prompt_learning", False) for config in adapters.values()
            ),
        }
        return next((reason for reason, found in obstacles.items() if found), "")

    def _select(self, probes: list[TokenizedCompletion], median_prompt: int) -> StrategyChoice:
        """Test the policy with gradients, then the reference model without; both must take a packed strategy."""
        subjects = [
            PackableModel(
                model, self.data_collator.pad_token_id, self._selftest_cache, self.accelerator.autocast
            )
            for model in self._models()
        ]
        long = subjects[0].device.type == "cuda" and median_prompt >= FLEX_FROM
        first = Strategy.FLEX_LAST_LAYER if long else Strategy.LAST_LAYER
        choices = [
            strategy_select(subject, probes, gradients=number == 0, first=first)
            for number, subject in enumerate(subjects)
        ]
        stock = next((choice for choice in choices if choice.strategy is Strategy.STOCK), None)
        if stock is not None:
            for subject in subjects:
                install(subject, Strategy.STOCK)
        return stock or choices[0]

    def _probes(self) -> tuple[list[TokenizedCompletion], int]:
        """Both completions of the longest and of the shortest pair of all splits, and the median prompt's tokens.

        Cut as TRL cuts them; pairs with an empty side are passed over, as they are not packed.
        """
        cut = self._collator().cut
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        longest: list[TokenizedCompletion] = []
        shortest: list[TokenizedCompletion] = []
        prompts: list[int] = []
        for dataset in (self.train_dataset, *evaluated.values()):
            for row in dataset if isinstance(dataset, Dataset) else ():
                pair = [TokenizedCompletion(*cut(row, side)) for side in ("chosen_ids", "rejected_ids")]
                if not all(one.prompt_ids and one.response_ids for one in pair):
                    continue
                prompts.append(len(pair[0].prompt_ids))
                longest = max(longest or pair, pair, key=_tokens)
                shortest = min(shortest or pair, pair, key=_tokens)
        probes = longest if longest is shortest else [*longest, *shortest]
        return probes, sorted(prompts)[len(prompts) // 2] if prompts else 0


def _tokens(pair: list[TokenizedCompletion]) -> int:
    return max(len(one.prompt_ids) + len(one.response_ids) for one in pair)
