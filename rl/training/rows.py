"""Rows of each method as tokens, their order, and the looks at the eval split. Loads torch alone: a dry run takes these
without the trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from rl.agents.base import Row
from rl.recipes import DPORecipe, KTORecipe, Recipe, SFTRecipe
from rl.recipes.base import KEEP, AdapterRecipe, AnswerRecipe
from rl.training.chat_template import LeftOut
from rl.training.encoding import EMPTY, EncodedColumn, EncodedPairs, EncodedResponse, Encoder
from rl.training.result import TrainingRefused

SCALE_ROWS = 256
"""Training rows, at most, whose scores set the scale of a finished reward model's."""


def reasoning_check(encoder: Encoder, recipe: AdapterRecipe) -> None:
    """Raise TrainingRefused where the recipe keeps reasoning that the base model's chat template cannot write."""
    keeps = isinstance(recipe, AnswerRecipe) and recipe.reasoning == KEEP
    if keeps and not encoder.template.reasoning_field:
        raise TrainingRefused(
            "reasoning=keep: expected a base model whose chat template writes reasoning (Qwen 3, gpt-oss), "
            f"found {encoder.tokenizer.name_or_path or 'one'} whose template writes none; leave the knob out, or take "
            "another base model"
        )


def pairs_encoded(
    encoder: Encoder, rows: Sequence[Row], recipe: DPORecipe, *, needed: bool = True
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


BALANCE = (1.0, 4.0 / 3.0)
"""Bounds of (weight x number of good) / (weight x number of bad): Ethayarajh et al. 2024, eq. 9."""


def kto_weights(good: int, bad: int) -> tuple[float, float]:
    """Weights of good and of bad responses for so many of each, the rarer side's raised until the paper's bounds hold.

    Eq. 9 of arXiv 2402.01306: w_D n_D / (w_U n_U) in [1, 4/3]. Raises TrainingRefused where a side is empty.
    KTO needs bad responses; supervised fine-tuning learns from good ones alone.
    """
    if not good or not bad:
        raise TrainingRefused(
            f"expected good and bad responses, found {good} good and {bad} bad: rate more responses of "
            "the missing kind" + (", or use train_sft, which needs only good ones" if good else "")
        )
    ratio = good / bad
    low, high = BALANCE
    if ratio < low:
        return low / ratio, 1.0
    if ratio > high:
        return 1.0, ratio / high
    return 1.0, 1.0


def labels_encoded(
    encoder: Encoder, rows: Sequence[Row], recipe: KTORecipe, *, needed: bool = True
) -> tuple[list[tuple[EncodedResponse, bool]], LeftOut]:
    """Encode responses: each comes back as tokens, with True if it was good; the rows left out are counted.

    needed: raise TrainingRefused unless good and bad responses are left.
    """
    reasoning_check(encoder, recipe)
    try:
        column = encoder.column(rows, "completion", recipe.max_length, recipe.max_completion_length)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    items = []
    for item, number in zip(column.items, column.index, strict=True):
        if item.prompt_ids and item.response_ids:
            items.append((item, bool(rows[number]["label"])))
        else:
            column.left_out.add(EMPTY, rows[number], number)
    good = sum(label for _, label in items)
    if needed:
        try:
            kto_weights(good, len(items) - good)
        except TrainingRefused as refusal:
            left_out = f" (left out: {column.left_out.words()})" if column.left_out.counts else ""
            raise TrainingRefused(f"{refusal}{left_out}") from refusal
    return items, column.left_out


def demonstrations_encoded(
    encoder: Encoder, rows: Sequence[Row], recipe: SFTRecipe, *, needed: bool = True
) -> EncodedColumn:
    """Demonstrations as tokens; those without a word are left out. Raises TrainingRefused where none is left of rows
    that are `needed`."""
    reasoning_check(encoder, recipe)
    try:
        encoded = encoder.column(
            rows, "completion", recipe.max_length, recipe.max_completion_length, turns=True
        )
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    said = [item.response_ids != [encoder.turn_end_id] and item.response_ids != [] for item in encoded.items]
    for number, kept in zip(encoded.index, said, strict=True):
        if not kept:
            encoded.left_out.add(EMPTY, rows[number], number)
    encoded.items = [item for item, kept in zip(encoded.items, said, strict=True) if kept]
    encoded.index = [number for number, kept in zip(encoded.index, said, strict=True) if kept]
    if needed and not encoded.items:
        raise TrainingRefused(
            f"expected a demonstration that the base model can be shown, found none among {len(rows)}: "
            f"{encoded.left_out.words()}"
        )
    return encoded


def rows_writable(encoder: Encoder, rows: Sequence[Row], *, needed: bool = True) -> tuple[list[Row], LeftOut]:
    """`Encoder.written`. Raises TrainingRefused for rows of another shape, and where none is left of rows that are
    `needed`."""
    try:
        kept, left_out = encoder.written(rows)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    if needed and not kept:
        raise TrainingRefused(
            f"expected a row that the base model's chat template can write, found none among {len(rows)}: "
            f"{left_out.words()}"
        )
    return kept, left_out


class LengthGroupedSampler(torch.utils.data.Sampler[int]):
    """Each epoch's order, a function of seed and epoch only: shuffled, then pairs of like length put side by side.

    Sorting happens within windows of `WINDOW` batches and the batches are shuffled again, so that padding is saved
    while batches still differ from epoch to epoch. Nothing is remembered between epochs: a resumed run repeats it.
    """

    WINDOW = 8

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        epoch: Callable[[], int | float],
        groups: Sequence[int] | None = None,
    ) -> None:
        """`epoch`: a function that says which epoch is about to start. Rows of one of the `groups` (pairs of one
        prompt) stay together, so that what they share is computed once; without them every row stands alone."""
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, epoch
        members: dict[int, list[int]] = {}
        for row in range(len(lengths)):
            members.setdefault(groups[row] if groups is not None else row, []).append(row)
        self.groups = list(members.values())

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(self.epoch()))
        place: dict[int, int] = {}
        shuffled = torch.randperm(len(self.groups), generator=generator).tolist()
        for number, group in enumerate(shuffled):
            place.update(dict.fromkeys(self.groups[group], number))
        order = [row for group in shuffled for row in self.groups[group]]
        longest = [max(self.lengths[row] for row in self.groups[group]) for group in shuffled]
        window = self.WINDOW * self.batch_size
        for start in range(0, len(order), window):
            order[start : start + window] = sorted(
                order[start : start + window], key=lambda i: (-longest[place[i]], place[i])
            )
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        whole = [batch for batch in batches if len(batch) == self.batch_size]
        short = [batch for batch in batches if len(batch) < self.batch_size]
        for i in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[i]
        for batch in short:  # last, or every later batch would straddle two groups
            yield from batch


EVALUATIONS = 16
"""Most evaluations of a run whose recipe does not say after how many steps."""

EVALUATION_SHARE = 0.2
"""Time of these evaluations by that of the training steps, at most. A row that is evaluated takes a third of the time
of a row that is trained on."""


FEWEST_TO_STOP = 64
"""Eval rows from which they may end a run: the accuracy of 64 rows has a standard error of 6 points, that of the 30
which 300 rated prompts give one of 9, more than a policy gains between two evaluations. A run with fewer makes the
steps of its recipe."""


def stops_early(recipe: Recipe, eval_rows: int) -> bool:
    """True if the eval split may end such a run."""
    return recipe.patience > 0 and eval_rows >= FEWEST_TO_STOP


def evaluation_interval(recipe: Recipe, steps: int, eval_rows: int) -> int:
    """Optimiser steps between evaluations of a run of `steps`: the recipe's, or as EVALUATION_SHARE allows."""
    trained = steps * recipe.batch_size * recipe.gradient_accumulation
    affordable = int(3 * EVALUATION_SHARE * trained / max(eval_rows, 1))
    return recipe.eval_steps or max(1, math.ceil(steps / max(1, min(EVALUATIONS, affordable))))
