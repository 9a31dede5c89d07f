"""Held-out evidence of an agent: the rows of every kind, and how many prompts each kind has. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from rl.datasets import DatasetRefused, messages_plain
from rl.datasets.evidence import EvidenceSource
from rl.datasets.making import PROMPTS_AT_ONCE, source_opened
from rl.evidence_kinds import CORRECTIONS, KINDS, LABELS, OUTCOMES, PAIRS
from rl.examples import Example, examples_from_evidence
from rl.judgements import Split
from rl.pairs import pairs_from_evidence
from rl.recipes import DATASET_CONFIG
from rl.splits import SourceSplits

HOLDOUT: Split = "holdout"


def evidence_counts(agent: str) -> dict[str, int]:
    """Held-out prompts with evidence of each kind (KINDS); all zero for an agent without decisions.

    Reads the database alone, no file and no model. `rewards` is always 0 here: which reward function judges is said
    when a policy is evaluated.
    """
    counts = dict.fromkeys(KINDS, 0)
    try:
        given = source_opened(agent, "db")
    except DatasetRefused:
        return counts
    splits = SourceSplits(agent, dry_run=True)
    for _ in itertools.chain(splits.judged(given.evidence(Counter())), splits.rewarded(given.rewarded())):
        pass  # sides are known when all prompts are; a second pass keeps what is held out alone in memory
    evidence = [item for item in given.evidence(Counter()) if splits(item.prompt_hash) == HOLDOUT]
    rewarded = [item for item in given.rewarded() if splits(item.prompt_hash) == HOLDOUT]
    knobs = {name: DATASET_CONFIG[name] for name in ("rating_margin", "max_pairs_per_prompt")}
    scores = examples_from_evidence([*evidence, *rewarded], "scores", splits).rows
    demonstrations = examples_from_evidence(evidence, "corrections", splits).rows
    prompts = {
        PAIRS: {pair.prompt_hash for pair in pairs_from_evidence(evidence, splits, **knobs).rows},
        LABELS: _hashes(row for row in scores if kind_of(row.source) == LABELS),
        OUTCOMES: _hashes(row for row in scores if kind_of(row.source) == OUTCOMES),
        CORRECTIONS: _hashes(row for row in demonstrations if row.source != "ratings"),
    }
    readable = _readable(given, sorted(set().union(*prompts.values())))
    return counts | {kind: len(hashes & readable) for kind, hashes in prompts.items()}


def kind_of(source: str) -> str:
    """The kind of evidence a scored response is, by the source of its row: `reward` where nobody gave a verdict."""
    return OUTCOMES if source == "reward" else LABELS


def _hashes(rows: Iterable[Example]) -> set[str]:
    return {row.prompt_hash for row in rows}


def _readable(given: EvidenceSource, hashes: list[str]) -> set[str]:
    """Those of the prompts that are plain text: the others make no row of any dataset."""
    found = set[str]()
    for start in range(0, len(hashes), PROMPTS_AT_ONCE):
        prompts = given.prompts(hashes[start : start + PROMPTS_AT_ONCE])
        found |= {name for name, prompt in prompts.items() if messages_plain(prompt.messages) is not None}
    return found
