"""Shapes of held-out evidence and gate reports as evaluations and policy events store them in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from rl.gates.evidence_kinds import Figures


class StoredItem(TypedDict):
    """One item of evidence: a case has `own` and `other`; a rated answer also has `value` and `shift`."""

    prompt_hash: str
    cluster: NotRequired[str]
    """Cluster of near-identical prompts; empty for a prompt of its own."""
    slices: list[str]
    raters: NotRequired[list[str]]
    own: float
    """Score of the policy; of a rated answer its shift from the policy's reference, nats per token."""
    other: float
    value: NotRequired[float]
    """Rating in [0, 1]."""
    shift: NotRequired[float]
    """own - other of a rated answer."""


class StoredAnswer(TypedDict):
    """Both sides' answers to one held-out prompt; fields as in `rl.gates.report.AnswerPair`."""

    prompt_hash: str
    messages: Sequence[Mapping[str, Any]]
    answer: str
    other_answer: str
    valid: bool
    other_valid: bool
    reward: float
    other_reward: float
    judged: NotRequired[bool]
    loops: NotRequired[bool]
    written_valid: NotRequired[bool]
    other_written_valid: NotRequired[bool]
    same: NotRequired[bool]
    said: NotRequired[bool]
    other_said: NotRequired[bool]
    settled: NotRequired[bool]


class StoredEvidence(TypedDict, total=False):
    """`Evaluation.evidence`; {} if nothing was compared."""

    discrete: bool
    cases: list[StoredItem]
    """Of pairs."""
    others: dict[str, list[StoredItem]]
    """Kind -> items, of all kinds except pairs."""
    barred: dict[str, str]
    answers: list[StoredAnswer]
    kl: float
    written_gain: dict[str, float]
    general: dict[str, Any]
    good_chars: Figures
    golden: list[dict[str, Any]]
    off_policy: dict[str, float]


class StoredVerdict(TypedDict):
    """Result of one rule."""

    rule: str
    outcome: str
    words: str
    figures: dict[str, Any]


class StoredReport(TypedDict):
    """`PolicyEvent.verdicts` of a gate."""

    to: str
    against: str
    passed: bool
    verdicts: list[StoredVerdict]
