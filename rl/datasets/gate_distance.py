"""Distance to the gate: how many held-out prompts an agent has, how many its gate asks for, how many more to rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from feedback.cache import StampedCache
from feedback.selectors import FeedbackCounts
from rl.datasets import DatasetRefused, PreparedDataset, snapshot_rows
from rl.datasets.feedback_types import Split
from rl.datasets.held_out_evidence import evidence_counts
from rl.datasets.holdout import SplitCounts, prompts_until
from rl.datasets.splits import min_evidence_of
from rl.gates.evidence_kinds import LABELS, PAIRS, TESTS, lead_kind
from rl.gates.report import GateBounds
from rl.models import GateSettings, RewardRecord, Snapshot
from rl.models.agent_definitions import agent_served

TELLING = 5
"""Held-out prompts with evidence from which their share among all held-out ones is taken to go on like that."""

MAX_COUNT = 20_000
"""Ratings and comparisons (without any: decisions) up to which a page counts what is held out; with more the gate waits
for something else."""


@dataclass(frozen=True)
class Distance:
    """Number of held-out prompts there are, and how many more rated prompts the gate takes."""

    available: int
    """Held-out prompts with evidence of the kind that carries the accuracy rule."""
    minimum: int
    kind: str
    further: int
    """Rated prompts until then, about: by the share that is held out of what comes next."""

    @property
    def reached(self) -> bool:
        return self.available >= self.minimum

    @property
    def words(self) -> str:
        if self.reached:
            return f"{self.available:,} held-out prompts ({self.kind}), the gate asks for {self.minimum:,}"
        return (
            f"{self.available:,} of {self.minimum:,} held-out prompts that the gate asks for ({self.kind}); "
            f"about {self.further:,} more rated prompts"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "found": self.available, "needed": self.minimum, "kind": self.kind, "further": self.further,
            "words": self.words,
        }  # fmt: skip


def distance_of(
    counts: Mapping[str, int], tally: SplitCounts, needed: int, *, discrete: bool = False
) -> Distance:
    """Pure. counts: held-out prompts by kind of evidence; tally: all prompts with evidence, by side."""
    kind = lead_kind(counts, needed, discrete=discrete)
    found = counts.get(kind, 0)
    if found >= needed:
        return Distance(found, needed, kind, 0)
    # not every held-out prompt has this kind of evidence: so many must be held out for one that has
    each = tally.holdout / found if found >= TELLING else 1.0
    wanted = tally.holdout + round((needed - found) * each)
    return Distance(found, needed, kind, _about(prompts_until(wanted, tally, needed)))


def gate_distance(agent: str) -> Distance:
    """Of an agent's feedback as it is now; nothing is written."""
    counts, tally = evidence_counts(agent)
    return distance_of(counts, tally, min_evidence_of(agent), discrete=agent_served(agent).discrete)


def distance_of_prepared(prepared: PreparedDataset, agent: str) -> Distance | None:
    """Of what a policy trained on this dataset would be judged on: the agent's feedback, or the file's own holdout."""
    if prepared.query.get("source") == "file":
        return _of_rows(agent, prepared.rows())
    return gate_distance(agent)


def distance_of_snapshot(snapshot: Snapshot) -> Distance | None:
    """The same of a run's dataset; None where its file cannot be read."""
    if snapshot.query.get("source") != "file":
        return gate_distance(snapshot.agent)
    try:
        return _of_rows(snapshot.agent, snapshot_rows(snapshot))
    except DatasetRefused:
        return None


def _of_rows(agent: str, rows: Iterable[Mapping[str, Any]]) -> Distance:
    """Of a file's rows: they are pairs, single responses with a verdict, or prompts with tests or answers."""
    kind, splits = LABELS, dict[str, Split]()
    for row in rows:
        splits[row["prompt_hash"]] = row["split"]
        if "chosen" in row:
            kind = PAIRS
        elif row.get("facts") and not {"completion", "completions"} & set(row):
            kind = TESTS
    tally = SplitCounts.of(splits.values())
    return distance_of({kind: tally.holdout}, tally, min_evidence_of(agent))


_distances: StampedCache[Distance] = StampedCache()


def gate_distances_cached(counts: Mapping[str, FeedbackCounts]) -> dict[str, Distance]:
    """Of every agent with feedback, measured outcomes or demonstrations, a query or two and what was counted before;
    an agent is counted again when that has grown. Agents with more than MAX_COUNT of it are left out."""
    needed = dict(GateSettings.objects.order_by().values_list("agent", "min_evidence"))
    distances = {}
    for agent, one in counts.items():
        minimum = needed.get(agent, GateBounds().min_evidence)
        if 0 < one.feedback <= MAX_COUNT:
            stamp: tuple[Any, ...] = (one.ratings, one.comparisons, one.newest_at, minimum)
            distances[agent] = _distances.get_unless(agent, stamp, partial(gate_distance, agent))
        elif not one.feedback and 0 < one.decisions <= MAX_COUNT:
            # nobody rated anything: what was measured, written or can be tested may carry the gate all the same
            measured = RewardRecord.objects.filter(agent=agent, measured=True).count()
            stamp = (one.decisions, measured, minimum)
            distance = _distances.get_unless(agent, stamp, partial(gate_distance, agent))
            if distance.available or measured:
                distances[agent] = distance
    return distances


def _about(prompts: int) -> int:
    """To the nearest ten from 20 on: it is an estimate."""
    return prompts if prompts < 20 else round(prompts, -1)
