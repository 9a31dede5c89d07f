"""Training datasets: an agent's feedback as rows of one kind, stored as a snapshot."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings

from backend.installation import PROGRAM
from feedback import selectors
from feedback.storage.problem_rows import unreadable_summary
from feedback.transfer.formats.records import FormatRefused
from rl.datasets.examples import Replay
from rl.datasets.feedback_types import SOURCES, SPLITS, Row
from rl.datasets.pairs import rows_sampled
from rl.datasets.rows import REASONS, FeedbackFile, RowRules, make_rows, rows_with_prompts, source_opened
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
from rl.recipes.base import DATASET_KINDS


@dataclass(frozen=True)
class PreparedDataset:
    """A dataset ready to train on. After a dry run, `snapshot` and `path` are None."""

    agent: str
    kind: str
    counts: dict[str, int]
    """Split -> rows, for all three splits."""
    left_out: dict[str, int]
    """Reason -> evidence without a row; reasons as in rl.datasets.pairs.REASONS and rl.datasets.evidence.REASONS."""
    sources: dict[str, int]
    """Kind of evidence -> rows."""
    feedback_count: int
    """Ratings and comparisons read."""
    simulated_share: float
    """Share of simulated ones among them, 0 to 1."""
    query: dict[str, object]
    """What was asked for: source, knobs, newest feedback seen."""
    snapshot: Snapshot | None
    path: Path | None
    feedback: dict[str, frozenset[uuid.UUID]]
    """Split -> ids of the feedback behind its rows; feedback in a file is numbered in order."""
    unreadable: dict[str, str]
    """The first unreadable decisions: id -> reason. `left_out` has their number."""
    balance: Mapping[str, object]
    """Labels only: how many are good and bad, and how many of them a reward decided."""
    _rows: Callable[[], Iterator[Row]] = field(repr=False)

    @property
    def samples(self) -> int:
        """Rows in all splits."""
        return sum(self.counts.values())

    def rows(self, split: str | None = None) -> Iterator[Row]:
        """The rows of one split or of all; may be called repeatedly."""
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

    def count_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            self.counts[row["split"]] += 1
            self.sources[row["source"]] += 1
            if "label" in row:
                self.labels[row["label"], row["source"]] += 1
            yield row


FEWEST_ROWS = 5
"""Rows of one kind that suffice if the agent has `min_samples` pieces of feedback of all kinds."""


def prepare_training_dataset(
    agent: str | None = None,
    kind: str = "pairs",
    *,
    source: FeedbackFile | str | None = "db",
    data_file: Path | str | None = None,
    ratings_file: Path | str | None = None,
    rules: RowRules | None = None,
    put_off: Collection[uuid.UUID] = (),
    replay: Replay | None = None,
    min_samples: int | None = None,
    max_samples: int | None = None,
    for_training: bool = True,
    dry_run: bool = False,
    binding: bool = False,
) -> PreparedDataset:
    """An agent's feedback as rows of one kind, stored as a snapshot.

    `rl.datasets.pairs` makes pairs; `rl.datasets.examples` makes labels (KTO), scores (reward regression), corrections
    (SFT) and prompts. The same feedback and arguments give the same file, byte for byte; an existing snapshot of that
    content is reused.

    Args:
        agent: Slug; None: the only agent with decisions, or `assistant` for a file.
        kind: One of Snapshot.Kind.
        source: `db`, the feedback recorded here; `file`, with `data_file`; or a FeedbackFile.
        data_file, ratings_file: A file of feedback in any known format, and the second file of formats that have two.
        rules: How evidence becomes rows.
        put_off: Ids of feedback that is not read this time.
        replay: Train on prompts with new feedback and a share of the others; None: on all prompts.
        min_samples: Refuse fewer rows; None: DATASET_CONFIG for a training, otherwise 1.
        max_samples: Draw this many rows by hash, always the same ones.
        for_training: Refuse an empty train split. False also accepts a single row.
        dry_run: Count the rows; store nothing.
        binding: In a dry run, still store the prompts' sides of the split, because the rows are used.

    Raises DatasetRefused: unknown agent or kind, too few rows, an unreadable file, or a folder that is not writable
    (nothing half-written stays).
    """
    if kind not in Snapshot.Kind.values:
        raise DatasetRefused(f"a dataset's kind is one of {', '.join(Snapshot.Kind.values)}; found {kind!r}")
    given = _file_of(source, data_file, ratings_file)
    agent, rules = _agent_checked(agent, given), rules or RowRules()
    knobs = rules.knobs(agent, kind)
    left_out: Counter[str] = Counter()
    try:
        evidence = source_opened(agent, given, kind, put_off, keep_reasoning=rules.keep_reasoning)
        made = make_rows(evidence, kind, left_out, knobs, dry_run=dry_run and not binding)
        replayed: Mapping[str, object] = {}
        if replay is not None:
            salt = str(evidence.feedback_count)
            made = replay.draw(made, salt)
            replayed = {"replay": replay.query(salt, made.rows)}
        made = rows_sampled(made, max_samples)
    except (RecipeError, FormatRefused) as error:
        raise DatasetRefused(str(error)) from error
    left_out.update(made.left_out)
    query = {
        "agent": agent,
        "source": "file" if given else "db",
        **knobs,
        "max_samples": max_samples,
        **({"reasoning": True} if rules.keep_reasoning else {}),
        **evidence.query(),
        **replayed,
    }
    tally = _Tally()
    feedback_ids: dict[str, set[uuid.UUID]] = {}
    rows = tally.count_rows(rows_with_prompts(agent, evidence, made, left_out, feedback_ids))
    need = min_samples
    if need is None:
        need = DATASET_CONFIG["min_samples"] if for_training else 1
        if given is None and evidence.feedback_count >= need:
            need = min(need, FEWEST_ROWS)

    def check() -> None:
        if evidence.rows.unreadable:
            left_out["unreadable"] += len(evidence.rows.unreadable)
        _check_enough(agent, kind, tally, need, given, left_out, for_training)

    def prepared(snapshot: Snapshot | None, path: Path | None) -> PreparedDataset:
        count = evidence.feedback_count
        return PreparedDataset(
            agent=agent,
            kind=kind,
            counts=tally.counts_ordered,
            left_out=dict(left_out),
            sources=tally.sources_ordered,
            feedback_count=count,
            simulated_share=evidence.simulated_count / count if count else 0.0,
            query=query,
            snapshot=snapshot,
            path=path,
            feedback={split: frozenset(ids) for split, ids in feedback_ids.items()},
            unreadable=unreadable_summary(evidence.rows.unreadable),
            balance=label_balance(tally.labels) if tally.labels else {},
            _rows=lambda: (
                snapshot_rows(snapshot) if snapshot else rows_with_prompts(agent, evidence, made, Counter())
            ),
        )

    if dry_run:
        for _ in rows:
            pass
        check()
        return prepared(None, None)
    with temporary_file(settings.RATCHET_HOME / "snapshots" / agent) as file:
        sha256 = rows_write(file, rows)
        if given is None:
            evidence.rows.save()
        check()
        path = file_store(file, sha256)
    found = prepared(None, path)
    snapshot = snapshot_of(
        agent=agent,
        kind=kind,
        path=str(path.relative_to(settings.RATCHET_HOME)),
        sha256=sha256,
        counts=found.counts,
        sources=found.sources,
        left_out=found.left_out,
        query=query | ({"unreadable": found.unreadable} if found.unreadable else {}),
        feedback_count=found.feedback_count,
        simulated_share=found.simulated_share,
    )
    return prepared(snapshot, path)


def _file_of(
    source: FeedbackFile | str | None, data_file: Path | str | None, ratings_file: Path | str | None
) -> FeedbackFile | None:
    """The file to read, or None for the database. Raises DatasetRefused."""
    if source is None or isinstance(source, FeedbackFile):
        return source
    if source not in ("db", "file"):
        raise DatasetRefused(f"a dataset's source is db or file; found {source!r}")
    if data_file is not None:
        return FeedbackFile(Path(data_file), None if ratings_file is None else Path(ratings_file))
    if source == "file":
        raise DatasetRefused("source file: expected data_file, found none")
    return None


def _agent_checked(agent: str | None, source: FeedbackFile | None) -> str:
    if agent is None and source is not None:
        return "assistant"
    if agent is None:
        known = selectors.agent_slugs()
        if len(known) != 1:
            there = f"found {', '.join(known)}" if known else "no decisions are recorded yet"
            raise DatasetRefused(f"expected the name of an agent, or decisions of a single one; {there}")
        return known[0]
    if not re.fullmatch(selectors.SLUG_PATTERN, agent):
        raise DatasetRefused(
            f"an agent is a slug of 1 to 64 lower-case letters, digits, - and _; found {agent!r}"
        )
    return agent


def _check_enough(
    agent: str,
    kind: str,
    tally: _Tally,
    need: int,
    source: FeedbackFile | None,
    left_out: Counter[str],
    for_training: bool,
) -> None:
    total, train = sum(tally.counts.values()), tally.counts["train"]
    if total >= need and (train or not for_training):
        return
    without = "; ".join(
        f"{REASONS.get(reason, reason)} ({count})" for reason, count in left_out.most_common(4) if count
    )
    advice = (
        f"rate more at /rate/?agent={agent}, or lower --min-samples"
        if source is None
        else "give a larger file, or lower --min-samples"
    )
    if kind == "pairs" and left_out["single_response"] >= need:
        advice = (
            f"train on answers rated one by one with {PROGRAM} train_kto --agent {agent}, or let `--method auto` of "
            "run_pipeline choose"
        )
    short = f"{need} needed" if total < need else "none of them in the train split"
    raise DatasetTooSmall(
        f"{total} {DATASET_KINDS[kind]} found for agent {agent}, {short}"
        + (f" (left out: {without})" if without else ""),
        advice,
    )
