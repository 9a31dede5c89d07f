"""An agent's feedback as a dataset that is ready to train on: asked for, made, counted, written, or refused."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings

from backend.installation import PROGRAM
from feedback import selectors
from feedback.storage.problem_rows import unreadable_summary
from feedback.transfer.formats.records import FormatRefused
from rl.datasets.evidence import EvidenceSource
from rl.datasets.examples import (
    ExampleSet,
    Replay,
    examples_balanced,
)
from rl.datasets.feedback_types import SOURCES, SPLITS
from rl.datasets.rows import make_rows, making_knobs, rows_sampled, rows_with_prompts, source_opened
from rl.datasets.snapshots import (
    DatasetRefused,
    DatasetTooSmall,
    file_store,
    rows_write,
    snapshot_of,
    snapshot_rows,
    temporary_file,
)
from rl.datasets.stats import label_balance
from rl.models import Snapshot
from rl.recipes import DATASET_CONFIG, RecipeError
from rl.recipes.base import curriculum_order
from rl.recipes.sft import EXAMPLE_SOURCES


@dataclass(frozen=True)
class PreparedDataset:
    """A dataset that is ready to train on; with dry_run nothing was written, and `snapshot` and `path` are None."""

    agent: str
    kind: str
    counts: dict[str, int]
    """Rows per split; all three are there."""
    left_out: dict[str, int]
    """Counts of evidence that made no row: {reason: count}; reasons as in rl.datasets.pairs.REASONS and
    rl.datasets.evidence.REASONS."""
    sources: dict[str, int]
    """Rows per kind of evidence."""
    feedback_count: int
    """Ratings and comparisons it was made from."""
    simulated_share: float
    """Share of them given by a simulated rater, 0 to 1."""
    query: dict[str, Any]
    """Query behind the dataset: source, knobs, newest feedback seen."""
    snapshot: Snapshot | None
    path: Path | None
    feedback: dict[str, frozenset[uuid.UUID]]
    """Split -> ids of the feedback that its rows were made of; that of a file is numbered as it is read."""
    unreadable: dict[str, str]
    """Decisions that could not be read, the first of them: id -> why. `left_out` has how many."""
    balance: dict[str, Any]
    """Of labels: how many are good and bad, and how many of them a reward decided; empty for other kinds."""
    _rows: Callable[[], Iterator[dict[str, Any]]] = field(repr=False)

    @property
    def samples(self) -> int:
        """Rows in all splits together."""
        return sum(self.counts.values())

    def rows(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """The rows, of one split or of all; may be asked for more than once."""
        return (row for row in self._rows() if split is None or row["split"] == split)


@dataclass
class _Tally:
    """Counts rows as they pass."""

    counts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    labels: Counter[tuple[bool, str]] = field(default_factory=Counter)

    @property
    def counts_ordered(self) -> dict[str, int]:
        return {split: self.counts[split] for split in SPLITS}

    @property
    def sources_ordered(self) -> dict[str, int]:
        return {name: self.sources[name] for name in SOURCES if self.sources[name]}

    def count_rows(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self.counts[row["split"]] += 1
            self.sources[row["source"]] += 1
            if "label" in row:
                self.labels[row["label"], row["source"]] += 1
            yield row


def _only_agent(source: str) -> str:
    """The agent that is meant where none is named. Raises DatasetRefused where that is not clear."""
    if source == "file":
        return "assistant"
    known = selectors.agent_slugs()
    if len(known) != 1:
        there = f"found {', '.join(known)}" if known else "no decisions are recorded yet"
        raise DatasetRefused(f"expected the name of an agent, or decisions of a single one; {there}")
    return known[0]


def prepare_training_dataset(
    agent: str | None = None,
    kind: str = "pairs",
    *,
    source: str = "db",
    data_file: str | Path | None = None,
    ratings_file: str | Path | None = None,
    file_format: str = "auto",
    min_samples: int | None = None,
    max_samples: int | None = None,
    rating_margin: float | None = None,
    max_pairs_per_prompt: int | None = None,
    reward_threshold: float | None = None,
    sources: Collection[str] = EXAMPLE_SOURCES,
    implied: bool = False,
    put_off: Collection[uuid.UUID] = (),
    replay: Replay | None = None,
    balance: bool = False,
    for_training: bool = True,
    dry_run: bool = False,
    binding: bool = False,
    keep_reasoning: bool = False,
) -> PreparedDataset:
    """The agent's feedback as rows of a kind (Snapshot.Kind), written as a snapshot (or only counted, with dry_run).

    agent: None takes the only one that has decisions here, and of a file `assistant`.

    pairs are made by rl.datasets.pairs, the other kinds by rl.datasets.examples: labels (KTO), scores (reward
    regression), corrections (SFT), groups (several rated responses to a prompt) and prompts alone.

    source "db" reads what was rated here; "file" reads `data_file`, in any format of feedback.transfer.formats
    (recognised where `file_format` is "auto"), with its `ratings_file` where the format has two. Knobs left None are
    those of DATASET_CONFIG. max_samples draws that many pairs, always the same. The same feedback and knobs give the
    same file, byte for byte; a snapshot of that content is used again.

    reward_threshold: of labels, the reward in (0, 1) from which a response that nobody rated is good; None: as the
    agent's reward settings say. sources: of corrections, where demonstrations may come from.
    implied: of pairs, also those that a verdict on one of several listed options implies. put_off: ids of feedback
    that is not read this time.

    balance: of labels, leave out training rows of the kind there is more of, until four stand beside three.

    replay: train on the prompts with new feedback and a share of the others; without it, on all.

    for_training: refuse where no pair stands in the train split; an evaluation may be held out as a whole.

    binding: in a dry run, write down the sides of the prompts all the same, because the rows are made use of.

    Raises DatasetRefused: unknown agent, kind or source, fewer pairs than min_samples, a file that cannot be read, a
    folder that cannot be written to (nothing half-written stays behind).
    """
    if kind not in Snapshot.Kind.values:
        raise DatasetRefused(f"a dataset's kind is one of {', '.join(Snapshot.Kind.values)}; found {kind!r}")
    agent = _only_agent(source) if agent is None else agent
    if not re.fullmatch(selectors.SLUG_PATTERN, agent):
        raise DatasetRefused(
            f"an agent is a slug of 1 to 64 lower-case letters, digits, - and _; found {agent!r}"
        )
    need = DATASET_CONFIG["min_samples"] if min_samples is None else min_samples
    knobs = making_knobs(
        agent,
        kind,
        rating_margin=rating_margin,
        max_pairs_per_prompt=max_pairs_per_prompt,
        reward_threshold=reward_threshold,
        sources=sources,
        implied=implied,
    )
    left_out: Counter[str] = Counter()
    try:
        evidence_source = source_opened(
            agent, source, data_file, ratings_file, file_format, kind, put_off, keep_reasoning=keep_reasoning
        )
        pairs = make_rows(evidence_source, kind, left_out, knobs, dry_run=dry_run and not binding)
        replay_query = {}
        if replay is not None:
            salt = str(evidence_source.feedback_count)
            pairs = replay.draw(pairs, salt)
            replay_query = {"replay": replay.query(salt, pairs.rows)}
        if balance:
            if kind != Snapshot.Kind.LABELS or not isinstance(pairs, ExampleSet):
                raise RecipeError(f"only labels can be balanced, found {kind}")
            pairs = examples_balanced(pairs)
        pairs = rows_sampled(pairs, max_samples)
    except (RecipeError, FormatRefused) as error:
        raise DatasetRefused(str(error)) from error
    left_out.update(pairs.left_out)
    query = {
        "agent": agent,
        "source": source,
        **knobs,
        "max_samples": max_samples,
        **({"balance": True} if balance else {}),
        **({"reasoning": True} if keep_reasoning else {}),
    }
    query |= evidence_source.query() | replay_query
    unreadable = evidence_source.rows.unreadable
    share = (
        evidence_source.simulated_count / evidence_source.feedback_count
        if evidence_source.feedback_count
        else 0.0
    )

    tally = _Tally()
    feedback_ids: dict[str, set[uuid.UUID]] = {}
    rows = tally.count_rows(rows_with_prompts(agent, evidence_source, pairs, left_out, feedback_ids))
    if dry_run:
        for _ in rows:
            pass
        left_out.update(_unreadable(evidence_source))
        _check_enough(agent, kind, tally, need, source, left_out, for_training)
        snapshot, path = None, None
    else:
        with temporary_file(settings.RATCHET_HOME / "snapshots" / agent) as file:
            sha256 = rows_write(file, rows)
            left_out.update(_unreadable(evidence_source))
            if source == "db":
                evidence_source.rows.save()
            _check_enough(agent, kind, tally, need, source, left_out, for_training)
            path = file_store(file, sha256)
        named = {"unreadable": unreadable_summary(unreadable)} if unreadable else {}
        snapshot = snapshot_of(
            agent=agent,
            kind=kind,
            path=str(path.relative_to(settings.RATCHET_HOME)),
            sha256=sha256,
            counts=tally.counts_ordered,
            sources=tally.sources_ordered,
            left_out=dict(left_out),
            query=query | named,
            feedback_count=evidence_source.feedback_count,
            simulated_share=share,
        )
    return PreparedDataset(
        agent=agent,
        kind=kind,
        counts=tally.counts_ordered,
        left_out=dict(left_out),
        sources=tally.sources_ordered,
        feedback_count=evidence_source.feedback_count,
        simulated_share=share,
        query=query,
        snapshot=snapshot,
        path=path,
        feedback={split: frozenset(ids) for split, ids in feedback_ids.items()},
        unreadable=unreadable_summary(unreadable),
        balance=label_balance(tally.labels) if tally.labels else {},
        _rows=lambda: (
            snapshot_rows(snapshot)
            if snapshot
            else rows_with_prompts(agent, evidence_source, pairs, Counter())
        ),
    )


def _unreadable(given: EvidenceSource) -> dict[str, int]:
    return {"unreadable": len(given.rows.unreadable)} if given.rows.unreadable else {}


def _check_enough(
    agent: str, kind: str, tally: _Tally, need: int, source: str, left_out: Counter[str], for_training: bool
) -> None:
    total, train = sum(tally.counts.values()), tally.counts["train"]
    if total >= need and (train or not for_training):
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(4) if count)
    advice = (
        f"rate more at /rate/?agent={agent}, or lower --min-samples"
        if source == "db"
        else "give a larger file, or lower --min-samples"
    )
    if kind == "pairs" and left_out["single_response"] >= need:
        advice = (
            f"answers rated one by one teach {PROGRAM} train_kto --agent {agent}, and `--method auto` of "
            "run_pipeline picks what fits"
        )
    short = f"{need} needed" if total < need else "none of them in the train split"
    raise DatasetTooSmall(
        f"{total} {kind} found for agent {agent}, {short}{f' (left out: {reasons})' if reasons else ''}: {advice}"
    )


# --- Rows -------------------------------------------------------------------------------------------------


# --- The file ---------------------------------------------------------------------------------------------


FORMATS = ("jsonl", "json", "datasets")


def dataset_write(
    prepared: PreparedDataset, path: Path, file_format: str, *, order: str = "none"
) -> list[Path]:
    """Write the rows of a dataset and return the files: one a split and line (`jsonl`), one object with a list a split
    (`json`), or a DatasetDict (`datasets`).

    The training rows stand in the order that a curriculum gives them. Raises DatasetRefused for a folder that is there
    already, or a file that cannot be written.
    """
    if file_format not in FORMATS:
        raise DatasetRefused(f"a dataset is written as {', '.join(FORMATS)}; found {file_format!r}")
    rows: dict[str, list[dict[str, Any]]] = {
        split: [_with_reward(row) for row in prepared.rows(split)] for split in SPLITS
    }
    try:
        rows["train"] = [rows["train"][i] for i in curriculum_order(rows["train"], order)]
    except ValueError as error:
        raise DatasetRefused(str(error)) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if file_format == "datasets":
            return _folder(path, rows)
        if file_format == "json":
            return [_file(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")]
        lines = (json.dumps(row, ensure_ascii=False) for split in SPLITS for row in rows[split])
        return [_file(path, "".join(f"{line}\n" for line in lines))]
    except OSError as error:
        raise DatasetRefused(f"the dataset cannot be written to {path}: {error.strerror or error}") from error


def _with_reward(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `reward`, in [0, 1], where it has one response and what that was worth is known: its score, or 1
    and 0 of a good and a bad one. Groups have `rewards`, one for each response."""
    if "score" in row:
        return {**row, "reward": float(row["score"])}
    return {**row, "reward": float(row["label"])} if "label" in row else row


def _file(path: Path, text: str) -> Path:
    half = path.with_name(f".{path.name}.half")
    half.write_text(text, "utf-8")
    half.replace(path)
    return path


def _folder(path: Path, rows: dict[str, list[dict[str, Any]]]) -> list[Path]:
    from datasets import Dataset, DatasetDict

    if path.exists():
        raise DatasetRefused(f"{path} is there already: give another folder, or remove it")
    # what an agent knew has another shape in each row; a column has one
    plain = {
        split: [{**row, "state": json.dumps(row["state"], ensure_ascii=False)} for row in part]
        for split, part in rows.items()
        if part
    }
    half = path.with_name(f".{path.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    DatasetDict({split: Dataset.from_list(part) for split, part in plain.items()}).save_to_disk(str(half))
    half.replace(path)
    return sorted(file for file in path.rglob("*") if file.is_file())
