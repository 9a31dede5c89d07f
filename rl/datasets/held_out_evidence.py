"""Held-out evidence of an agent: rows of every kind, and the number of prompts per kind. No torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings

from feedback import selectors
from feedback.storage.sql import chunks
from rl.agents import get_agent
from rl.agents.base import Agent
from rl.datasets import (
    DatasetRefused,
    DatasetTooSmall,
    prepare_training_dataset,
    snapshot_rows,
)
from rl.datasets.evidence import EvidenceSource
from rl.datasets.examples import Example, examples_from_evidence
from rl.datasets.feedback_types import (
    NEUTRAL,
    OF_PEOPLE,
    SPLITS,
    Evidence,
    Row,
    Split,
    known_digest,
    known_rows,
)
from rl.datasets.file_evidence import holds_prompts
from rl.datasets.holdout import SplitCounts
from rl.datasets.pairs import Pair, pairs_from_evidence
from rl.datasets.prompt_clusters import cluster_report, clusters_of
from rl.datasets.rows import (
    PROMPTS_AT_ONCE,
    FeedbackFile,
    clustered_prompts,
    recorded_prompts,
    source_opened,
)
from rl.datasets.splits import SourceSplits
from rl.gates.evidence_kinds import (
    CORRECTIONS,
    KINDS,
    KNOWN,
    LABELS,
    OUTCOMES,
    PAIRS,
    POOLED,
    REWARDS,
    TESTS,
    all_alike,
    lead_kind,
    telling_counts,
)
from rl.models import Snapshot
from rl.models.agent_definitions import agent_served
from rl.recipes import DATASET_CONFIG
from rl.rewards import answers as right_answers
from rl.rewards.answers import FACTS, ROW_COLUMNS
from rl.rewards.code_execution import EXPECTED_OUTPUTS
from rl.rewards.code_execution import TESTS as CODE_TESTS

HOLDOUT: Split = "holdout"


DATASETS: dict[str, str] = {
    PAIRS: Snapshot.Kind.PAIRS,
    LABELS: Snapshot.Kind.SCORES,
    OUTCOMES: Snapshot.Kind.SCORES,
    CORRECTIONS: Snapshot.Kind.CORRECTIONS,
    TESTS: Snapshot.Kind.PROMPTS,
    KNOWN: Snapshot.Kind.PROMPTS,
    REWARDS: Snapshot.Kind.PROMPTS,
}
"""Kind of evidence -> kind of dataset with its rows."""

EVALUATION_SPLITS: tuple[Split, ...] = ("eval", HOLDOUT)
"""Splits that no policy is trained on."""

SPARE = 400
"""Most further prompts kept to ask for answers."""

WRITTEN_SOURCES = ("correction", "demonstration", "teacher")
"""Sources of answers written to be right, as opposed to liked answers."""


@dataclass
class HeldOutPrompts:
    """The split of every prompt of an agent, and rows of some evaluation prompts."""

    sides: dict[str, str] = field(default_factory=dict)
    spare: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.sides[row["prompt_hash"]] = row["split"]
        if row["split"] in EVALUATION_SPLITS and len(self.spare) < SPARE:
            self.spare.append(row)


@dataclass
class HeldOut:
    """Held-out rows by kind of evidence."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    """Snapshot with the rows of the leading kind; None for a file that is only evaluated on."""
    trained_rows: int = 0
    """Rows left out because the policy was trained on their prompts."""
    spare: list[Row] = field(default_factory=list)
    """Eval and holdout prompts, with or without feedback; their answers are checked for validity."""
    left_out: Counter[str] = field(default_factory=Counter)
    clusters: dict[str, object] = field(default_factory=dict)
    """`prompt_clusters.cluster_report`; empty if near-identical prompts were not looked for."""

    def counts(self) -> dict[str, int]:
        """Kind -> distinct prompts; near-identical prompts count once."""
        return {
            kind: len({row.get("cluster") or row["prompt_hash"] for row in rows})
            for kind, rows in self.rows.items()
        }

    @property
    def known_digest(self) -> str:
        return known_digest(self.rows[KNOWN]) if KNOWN in self.rows else ""

    def pool(self, agent: Agent) -> None:
        """Add known answers, pooled from all human feedback."""
        if known := known_rows(self.rows, agent):
            self.rows[KNOWN] = known

    def dataset(self, lead: str) -> str:
        """The kind of dataset with most evidence of the leading kind."""
        counts = self.counts()
        kinds = [kind for kind in POOLED if counts.get(kind)]
        if lead != KNOWN or not kinds:
            return DATASETS[lead]
        return DATASETS[max(kinds, key=counts.__getitem__)]

    def lead(self, needed: int, *, discrete: bool = False) -> str:
        """The kind that the accuracy rule is checked on (`rl.gates.evidence_kinds.lead_kind`)."""
        alike = [
            kind
            for kind in (LABELS, OUTCOMES)
            if all_alike(float(row["score"]) for row in self.rows.get(kind, ()))
        ]
        return lead_kind(telling_counts(self.counts(), alike), needed, discrete=discrete)


def held_out_of_database(agent: str, needed: int, *, rewarded: bool = False) -> HeldOut:
    """Held-out evidence recorded here; the leading kind is stored as a snapshot.

    rewarded: every prompt also counts as evidence of the kind `rewards`, because a reward function judges its answers.
    """
    held_out = HeldOut()
    source_opened(agent)  # Refuses an unknown agent.
    prompts = HeldOutPrompts()
    rows = _rows_by_kind(agent, (HOLDOUT,), held_out.left_out, rewarded, prompts=prompts, binding=True)
    clusters = clusters_of(recorded_prompts(agent, prompts.sides))
    held_out.rows = _with_clusters(rows, clusters, prompts.sides, held_out.left_out)
    held_out.spare = prompts.spare
    held_out.clusters = cluster_report(clusters, prompts.sides)
    served = agent_served(agent)
    held_out.pool(served)
    if held_out.rows:
        lead = held_out.lead(needed, discrete=served.discrete)
        dataset = held_out.dataset(lead)
        prepared = prepare_training_dataset(agent, dataset, for_training=False)
        held_out.snapshot = prepared.snapshot
    return held_out


def held_out_of_file(
    agent: str, path: Path, trained: Iterable[str] = (), *, rewarded: bool = False
) -> HeldOut:
    """A whole file as held-out evidence, without the prompts (hashes) in `trained`. Raises DatasetRefused."""
    found = HeldOut()
    trained = set(trained)
    rows = _rows_by_kind(agent, SPLITS, found.left_out, rewarded, file=FeedbackFile(path))
    for kind, whole in rows.items():
        unseen = [row for row in whole if row["prompt_hash"] not in trained]
        found.trained_rows += len(whole) - len(unseen)
        if unseen:
            found.rows[kind] = unseen
    found.pool(agent_served(agent))
    return found


def held_out_of_snapshot(snapshot: Snapshot, *, rewarded: bool = False) -> HeldOut:
    """Held-out rows of a training dataset. Raises DatasetRefused if its file is gone or changed."""
    rows = list(snapshot_rows(snapshot, HOLDOUT))
    spare = list(itertools.islice(snapshot_rows(snapshot, "eval"), SPARE))
    found = HeldOut(
        rows=_sorted_by_kind(str(snapshot.kind), rows, rewarded, get_agent(snapshot.agent)),
        snapshot=snapshot,
        spare=spare,
    )
    found.pool(agent_served(snapshot.agent))
    return found


def eval_rows(agent: str) -> dict[str, list[Row]]:
    """Kind -> rows of the eval split. Comparing candidates on it spends no holdout."""
    return _rows_by_kind(agent, ("eval",), Counter(), False)


def trained_prompts(snapshot: Snapshot | None) -> set[str]:
    """Hashes of the prompts in a dataset's train split."""
    return {row["prompt_hash"] for row in snapshot_rows(snapshot, "train")} if snapshot is not None else set()


def _rows_by_kind(
    agent: str,
    splits: Sequence[str],
    left_out: Counter[str],
    rewarded: bool,
    *,
    file: FeedbackFile | None = None,
    prompts: HeldOutPrompts | None = None,
    binding: bool = False,
) -> dict[str, list[Row]]:
    """Kind -> rows in these splits; `prompts` collects every prompt. Raises DatasetRefused."""
    rows_by_kind: dict[str, list[Row]] = {}
    datasets = list(dict.fromkeys(DATASETS.values()))
    if file is not None and holds_prompts(file.path):
        datasets = [Snapshot.Kind.PROMPTS]
    for dataset in datasets:
        try:
            prepared = prepare_training_dataset(
                agent, dataset, source=file, for_training=False, dry_run=True, binding=binding
            )
        except DatasetTooSmall:
            continue
        rows = [row for row in prepared.rows() if row["split"] in splits]
        if prompts is not None and dataset == Snapshot.Kind.PROMPTS:
            for row in prepared.rows():
                prompts.add(row)
        rows_by_kind |= _sorted_by_kind(dataset, rows, rewarded, get_agent(agent))
        left_out.update(prepared.left_out)
    return rows_by_kind


def _with_clusters(
    rows: Mapping[str, list[Row]],
    clusters: Mapping[str, str],
    sides: Mapping[str, str],
    left_out: Counter[str],
) -> dict[str, list[Row]]:
    """The rows with their prompts' clusters, without rows whose cluster reaches into another split."""
    elsewhere = {clusters[name] for name, side in sides.items() if side != HOLDOUT} - {""}
    found: dict[str, list[Row]] = {}
    for kind, whole in rows.items():
        named = [{**row, "cluster": clusters.get(row["prompt_hash"], "")} for row in whole]
        alone = [row for row in named if row["cluster"] not in elsewhere]
        left_out["near_identical"] += len(named) - len(alone)
        if alone:
            found[kind] = alone
    return found


def _sorted_by_kind(dataset: str, rows: list[Row], rewarded: bool, agent: Agent) -> dict[str, list[Row]]:
    """Rows of one kind of dataset as evidence: kind -> rows."""
    rows_by_kind: dict[str, list[Row]] = {}
    for row in rows:
        if dataset == Snapshot.Kind.PAIRS:
            rows_by_kind.setdefault(PAIRS, []).append(row)
        elif dataset == Snapshot.Kind.SCORES:
            rows_by_kind.setdefault(kind_of(row["source"]), []).append(row)
        elif dataset == Snapshot.Kind.LABELS:
            rows_by_kind.setdefault(kind_of(row["source"]), []).append({**row, "score": float(row["label"])})
        elif dataset == Snapshot.Kind.CORRECTIONS:
            if row["source"] in WRITTEN_SOURCES:  # Liked answers count as labels or outcomes.
                rows_by_kind.setdefault(CORRECTIONS, []).append(row)
        elif dataset == Snapshot.Kind.PROMPTS:
            if testable(row.get("facts") or {}):
                rows_by_kind.setdefault(TESTS, []).append(row)
            if agent.truths(row.get("state")):
                rows_by_kind.setdefault(KNOWN, []).append(row)
            if rewarded:
                rows_by_kind.setdefault(REWARDS, []).append(row)
    return {kind: single for kind, some in rows_by_kind.items() if (single := _single_texts(some))}


def testable(facts: Mapping[str, object]) -> bool:
    """True if a prompt's facts decide whether an answer is right: a right answer, or tests if code may run."""
    columns = [
        *right_answers.COLUMNS,
        *((*CODE_TESTS, *EXPECTED_OUTPUTS) if settings.ENABLE_CODE_EXECUTION else ()),
    ]
    return any(facts.get(name) not in (None, "", [], {}) for name in columns)


def _single_texts(rows: list[Row]) -> list[Row]:
    """The rows whose responses are a single text; turns with tool calls are not scored as a whole."""
    sides = ("chosen", "rejected", "completion")
    return [row for row in rows if all(_is_single(row[side]) for side in sides if side in row)]


def _is_single(completion: Any) -> bool:
    if isinstance(completion, str):
        return True
    return len(completion) == 1 and isinstance(completion[0].get("content"), str)


def good_chars(rows: Mapping[str, list[Row]]) -> dict[str, object]:
    """Geometric mean length of the answers that people wrote, chose or liked: {"value": characters, "n"}, or {}."""
    texts = [row["chosen"] for row in rows.get(PAIRS, ())]
    texts += [row["completion"] for row in rows.get(CORRECTIONS, ())]
    for kind in (LABELS, OUTCOMES):
        texts += [row["completion"] for row in rows.get(kind, ()) if row["score"] > NEUTRAL]
    if not texts:
        return {}
    lengths = [len(text if isinstance(text, str) else text[0]["content"]) for text in texts]
    mean = math.fsum(math.log(length + 1) for length in lengths) / len(lengths)
    return {"value": math.exp(mean) - 1, "n": len(lengths)}


def evidence_counts(agent: str) -> tuple[dict[str, int], SplitCounts]:
    """(kind -> held-out prompts with evidence, prompts with evidence per split), from the database alone.

    The kind `rewards` is always 0, because the reward function is chosen when a policy is evaluated.
    """
    counts = dict.fromkeys(KINDS, 0)
    try:
        evidence_source = source_opened(agent)
    except DatasetRefused:
        return counts, SplitCounts()
    splits = SourceSplits(agent, dry_run=True, clustered=partial(clustered_prompts, evidence_source))
    for _ in itertools.chain(
        splits.track_rated(_all_evidence(evidence_source)),
        splits.track_rewarded(_reward_evidence(evidence_source)),
    ):
        pass  # Splits are known after all prompts; the second pass keeps only held-out evidence in memory.
    evidence = [item for item in _all_evidence(evidence_source) if splits(item.prompt_hash) == HOLDOUT]
    rewarded = [item for item in _reward_evidence(evidence_source) if splits(item.prompt_hash) == HOLDOUT]
    knobs = {name: DATASET_CONFIG[name] for name in ("rating_margin", "max_pairs_per_prompt")}
    scores = examples_from_evidence([*evidence, *rewarded], "scores", splits).rows
    demonstrations = examples_from_evidence(evidence, "corrections", splits).rows
    pairs = pairs_from_evidence([*evidence, *rewarded], splits, **knobs).rows
    prompts = {
        PAIRS: {pair.prompt_hash for pair in pairs},
        LABELS: _hashes(row for row in scores if kind_of(row.source) == LABELS),
        OUTCOMES: _hashes(row for row in scores if kind_of(row.source) == OUTCOMES),
        CORRECTIONS: _hashes(row for row in demonstrations if row.source in WRITTEN_SOURCES),
    }
    known = agent_served(agent)
    held_out: list[str] = []
    if _answers_recorded(known):
        hashes = evidence_source.prompt_hashes()
        splits.settle(hashes)
        held_out = [name for name in hashes if splits(name) == HOLDOUT]
    prompts[TESTS] = set()
    prompts[KNOWN] = _pooled(scores, pairs, prompts[CORRECTIONS]) if known.discrete else set()
    for chunk in chunks(held_out, PROMPTS_AT_ONCE):
        for name, prompt in evidence_source.prompts(chunk).items():
            if testable(prompt.facts):
                prompts[TESTS].add(name)
            if known.truths(prompt.state):
                prompts[KNOWN].add(name)
    readable = clustered_prompts(evidence_source, sorted(set().union(*prompts.values())))
    clusters = clusters_of(readable)
    counts |= {
        kind: len({clusters[name] or name for name in hashes & readable.keys()})
        for kind, hashes in prompts.items()
    }
    alike = [
        kind
        for kind in (LABELS, OUTCOMES)
        if all_alike(float(row.content["score"]) for row in scores if kind_of(row.source) == kind)
    ]
    return telling_counts(counts, alike), splits.tally


def _answers_recorded(agent: Agent) -> bool:
    """False if the app never sent right answers or tests: then only prompts with feedback can be evidence.

    An app records thousands of decisions before anybody rates one. Drawing and reading all their prompts takes seconds.
    """
    knows = type(agent).ground_truth is not Agent.ground_truth
    return selectors.answers_recorded(agent.slug, (FACTS, *ROW_COLUMNS), in_state=knows)


def _pooled(scores: Iterable[Example], pairs: Iterable[Pair], written: Iterable[str]) -> set[str]:
    """Prompts with known answers by `rl.datasets.feedback_types`."""
    rated = {
        row.prompt_hash
        for row in scores
        if kind_of(row.source) == LABELS and float(row.content["score"]) != NEUTRAL
    }
    return rated | {pair.prompt_hash for pair in pairs if pair.source in OF_PEOPLE} | set(written)


def _all_evidence(given: EvidenceSource) -> Iterator[Evidence]:
    return itertools.chain(given.evidence(Counter()), given.demonstrations())


def _reward_evidence(given: EvidenceSource) -> Iterator[Evidence]:
    return given.rewards(Counter(), compared=True)


def kind_of(source: str) -> str:
    """Kind of evidence of a scored row: an outcome if its source is `reward`, else a label."""
    return OUTCOMES if source == "reward" else LABELS


def _hashes(rows: Iterable[Example]) -> set[str]:
    return {row.prompt_hash for row in rows}
