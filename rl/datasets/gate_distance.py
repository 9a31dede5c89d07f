"""Distance to the gate: held-out prompts an agent has, held-out prompts its gate needs, and prompts left to rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from backend.bodies import Answer
from feedback.cache import StampedCache
from feedback.selectors import FeedbackCounts
from rl.datasets import DatasetRefused, PreparedDataset, snapshot_rows
from rl.datasets.feedback_types import Row, Split
from rl.datasets.held_out_evidence import evidence_counts
from rl.datasets.holdout import SplitCounts, prompts_until
from rl.datasets.splits import min_evidence_of
from rl.gates.evidence_kinds import LABELS, PAIRS, TESTS, lead_kind
from rl.gates.report import GateBounds
from rl.models import GateSettings, RewardRecord, Snapshot
from rl.models.agent_definitions import agent_served

TELLING = 5
"""Fewest held-out prompts with the leading kind of evidence before their share is extrapolated."""

MAX_COUNT = 20_000
"""Most ratings and comparisons (without any: decisions) of an agent for which a page counts the holdout."""


class GateDistance(Answer):
    """Distance to the gate's minimum of held-out prompts."""

    found: int
    """Held-out prompts with evidence of the leading kind."""
    needed: int
    kind: str
    """Kind of evidence that carries the accuracy rule."""
    further: int
    """Rated prompts still needed, about."""

    words: str

    @property
    def reached(self) -> bool:
        return self.found >= self.needed


def distance_of(
    counts: Mapping[str, int], tally: SplitCounts, needed: int, *, discrete: bool = False
) -> GateDistance:
    """counts: kind of evidence -> held-out prompts; tally: prompts with any evidence, by split."""
    kind = lead_kind(counts, needed, discrete=discrete)
    found, further = counts.get(kind, 0), 0
    words = f"{found:,} held-out prompts; the gate needs {needed:,}"
    if found < needed:
        # Held-out prompts per held-out prompt with this kind of evidence.
        each = tally.holdout / found if found >= TELLING else 1.0
        wanted = tally.holdout + round((needed - found) * each)
        further = _about(prompts_until(wanted, tally, needed))
        words = (
            f"{found:,} of the {needed:,} held-out prompts that the gate needs: "
            f"rate about {further:,} more prompts"
        )
    return GateDistance(found=found, needed=needed, kind=kind, further=further, words=words)


def gate_distance(agent: str) -> GateDistance:
    counts, tally = evidence_counts(agent)
    return distance_of(counts, tally, min_evidence_of(agent), discrete=agent_served(agent).discrete)


def distance_of_prepared(prepared: PreparedDataset, agent: str) -> GateDistance | None:
    """Distance for a policy trained on this dataset: of the agent's feedback, or of the file's own holdout."""
    if prepared.query.get("source") == "file":
        return _of_rows(agent, prepared.rows())
    return gate_distance(agent)


def distance_of_snapshot(snapshot: Snapshot) -> GateDistance | None:
    """As `distance_of_prepared`, for a run's snapshot; None if its file is unreadable."""
    if snapshot.query.get("source") != "file":
        return gate_distance(snapshot.agent)
    try:
        return _of_rows(snapshot.agent, snapshot_rows(snapshot))
    except DatasetRefused:
        return None


def _of_rows(agent: str, rows: Iterable[Row]) -> GateDistance:
    kind, splits = LABELS, dict[str, Split]()
    for row in rows:
        splits[row["prompt_hash"]] = row["split"]
        if "chosen" in row:
            kind = PAIRS
        elif row.get("facts") and "completion" not in row:
            kind = TESTS
    tally = SplitCounts.of(splits.values())
    return distance_of({kind: tally.holdout}, tally, min_evidence_of(agent))


_distances: StampedCache[GateDistance] = StampedCache()


def gate_distances_cached(counts: Mapping[str, FeedbackCounts]) -> dict[str, GateDistance]:
    """Agent -> distance, for agents with at most MAX_COUNT of feedback; counted again when an agent's counts change."""
    needed = dict(GateSettings.objects.order_by().values_list("agent", "min_evidence"))
    distances = {}
    for agent, one in counts.items():
        minimum = needed.get(agent, GateBounds().min_evidence)
        if 0 < one.feedback <= MAX_COUNT:
            stamp: tuple[object, ...] = (one.ratings, one.comparisons, one.newest_at, minimum)
            distances[agent] = _distances.get_unless(agent, stamp, partial(gate_distance, agent))
        elif not one.feedback and 0 < one.decisions <= MAX_COUNT:
            # Without ratings, outcomes, demonstrations or tests may still lead. An app records decisions all the time,
            # so they are read again only when their number has doubled.
            measured = RewardRecord.objects.filter(agent=agent, measured=True).count()
            stamp = (one.decisions.bit_length(), measured, minimum)
            distance = _distances.get_unless(agent, stamp, partial(gate_distance, agent))
            if distance.found or measured:
                distances[agent] = distance
    return distances


def _about(prompts: int) -> int:
    """An estimate, rounded to tens from 20 on."""
    return prompts if prompts < 20 else round(prompts, -1)
