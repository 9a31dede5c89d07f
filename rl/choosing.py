"""Which method fits the feedback an agent has: the one meaning of `auto`, for commands, REST and the online learner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rl.datasets import DatasetRefused, Prepared, prepare_training_dataset
from rl.methods import METHODS, method_named
from rl.recipes import DATASET_CONFIG

PAIRED_SHARE = 0.25
"""Share of the prompts with verdicts that pairs must teach of for DPO: below, most of what people said stands on single
responses, which only KTO hears."""

FEWEST_OF_A_KIND = 3
"""Good and bad responses, each, that KTO needs to weigh one against the other."""


@dataclass(frozen=True)
class Chosen:
    """A method and why it was taken."""

    method: str
    why: str


def method_chosen(
    agent: str, wanted: str = "auto", *, min_samples: int | None = None, **source: Any
) -> Chosen:
    """The method of that name; for `auto`, DPO, KTO or SFT, by what the feedback holds.

    DPO where it makes pairs enough and they reach a quarter of the prompts people judged; KTO where it holds good and
    bad responses enough; SFT where it holds corrections or liked responses enough; DPO again where nothing is enough,
    whose refusal says what is missing. `source` is where the feedback is, as `prepare_training_dataset` takes it.
    Raises RecipeError for an unknown name.
    """
    if wanted != "auto":
        return Chosen(method_named(wanted).slug, f"{wanted} was asked for")
    need = DATASET_CONFIG["min_samples"] if min_samples is None else min_samples
    found = {slug: _prepared(agent, METHODS[slug].kind, need, source) for slug in ("dpo", "kto", "sft")}
    pairs, labels, shown = found["dpo"], found["kto"], found["sft"]
    judged = _prompts(labels)
    if pairs is not None:
        paired = _prompts(pairs)
        count = f"{pairs.counts['train']:,} pairs to train on"
        if len(paired) >= PAIRED_SHARE * len(judged | paired):
            return Chosen(
                "dpo", f"auto took dpo: {count}, on {len(paired):,} of {len(judged | paired):,} prompts"
            )
    if labels is not None:
        said = Counter(bool(row["label"]) for row in labels.rows("train"))
        if min(said[True], said[False]) >= FEWEST_OF_A_KIND:
            few = (
                f"pairs only on {len(_prompts(pairs)):,} of {len(judged):,} prompts"
                if pairs
                else "no pairs enough"
            )
            return Chosen(
                "kto", f"auto took kto: {said[True]:,} good and {said[False]:,} bad responses, {few}"
            )
    if pairs is not None:
        return Chosen("dpo", f"auto took dpo: {count}, and hardly any thumbs beside them")
    if shown is not None:
        return Chosen(
            "sft",
            f"auto took sft: {shown.counts['train']:,} corrections and liked responses, not enough of anything else",
        )
    return Chosen("dpo", "auto took dpo: no method has samples enough yet")


def _prepared(agent: str, kind: str, need: int, source: dict[str, Any]) -> Prepared | None:
    """The dataset of a kind, only counted; None where it is too small."""
    try:
        return prepare_training_dataset(agent, kind=kind, min_samples=need, dry_run=True, **source)
    except DatasetRefused:
        return None


def _prompts(prepared: Prepared | None) -> set[str]:
    return {row["prompt_hash"] for row in prepared.rows("train")} if prepared else set()
