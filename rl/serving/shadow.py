"""Shadow answers: a challenger answers recorded prompts beside the answer that a user got.

The decision log is the queue. A worker asks after the user was answered, in a process of its own, so no request waits
for a shadow and none breaks with it. While an upstream or the database is away, decisions wait in the log for a day.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from django.db.models import F, QuerySet
from django.utils import timezone

from feedback.explorer.bulk_readers import COST
from feedback.models import SHADOW, Decision, shadow_id
from feedback.selectors import decisions_of, shadow_answers
from feedback.storage.masking import DECISION_TEXTS, facts_masked
from feedback.storage.sql import chunks
from rl.experiments.traffic import arms_of, experiment_stop, out_of_service
from rl.models import Experiment, Policy
from rl.serving import fallback
from rl.serving.assembly import answer_of
from rl.serving.base import Ask, ServingRefused
from rl.serving.chat_request import ChatRequest
from rl.serving.decide import DecideOrder, facts_decided
from rl.serving.decision_facts import answer_storable, facts_of
from rl.serving.fallback import NobodyAnswers
from rl.serving.files import model_of
from rl.serving.gateway import ask_of, recorder
from rl.serving.routing import Target, budget_reached
from rl.statistics.assignment import positions

TURN_S = 50.0
"""Seconds that a worker asks before it makes room for other work."""
WINDOW = timedelta(days=1)
LOOK = 1_000
"""Newest decisions among which those without a shadow are looked for. Under more traffic the rest is left out."""
LOAD = 1.5
"""Runnable processes per core above which the machine counts as busy."""
MEMORY = 0.05
"""Share of free memory below which the machine counts as busy."""
BUSY_LOOKS = 10
"""Busy looks in a row, one a minute, after which the shadow is stopped."""
CLOCK = "the clock"


@dataclass(frozen=True)
class ShadowTurn:
    """What one turn of a worker came to."""

    answered: int = 0
    refused: int = 0
    """Prompts that the challenger will never answer; they are recorded with the reason."""
    waits: str = ""
    """Why asking ended early; it goes on at the next look."""
    stopped: str = ""
    """Why the experiment was stopped; empty if it goes on."""


def challenger_of(experiment: Experiment) -> Policy:
    """The policy that answers beside users' answers."""
    policy = next(arm.policy for arm in arms_of(experiment) if not arm.is_control)
    assert policy is not None  # `experiment_create` refuses the base model
    return policy


def shadow_turn(experiment: Experiment, *, seconds: float = TURN_S) -> ShadowTurn:
    """Ask the challenger what waits for it and record its answers; stop the experiment where a limit is reached."""
    ends, answered, refused = time.monotonic() + seconds, 0, 0
    policy = challenger_of(experiment)
    spent = _cost(_answers(experiment, policy))

    def ended(waits: str = "", stopped: str = "") -> ShadowTurn:
        if stopped:
            experiment_stop(experiment, actor=CLOCK, reason=stopped)
        return ShadowTurn(answered, refused, waits, stopped)

    if gone := out_of_service(experiment):
        return ended(stopped=f"{gone[0]} was rejected or retired")
    for row in shadows_due(experiment, policy):
        if time.monotonic() >= ends:
            return ended("the turn is over")
        if busy := machine_busy():
            return ended(busy, _stopped_as_busy(experiment, busy))
        if policy.upstream is not None and budget_reached(experiment.agent):
            return ended(f"agent {experiment.agent} has spent its budget of this month")
        limit = experiment.shadow_budget_usd
        if limit is not None and spent >= limit:
            return ended(stopped=f"its budget is spent: {spent:.4f} of {limit:g} USD")
        try:
            facts = _answer(policy, row)
        except NobodyAnswers as failure:
            return ended(str(failure))
        except ServingRefused as refusal:
            facts, refused = _refusal(policy, row, str(refusal)), refused + 1
        else:
            answered += 1
        serving = facts["metadata"]["serving"]
        serving["shadow"] = {"of": str(row.pk), "experiment": experiment.name}
        recorder.record(facts_masked(facts, *DECISION_TEXTS))
        cost = serving.get("cost_usd")
        if cost is None and limit is not None and "error" not in serving:
            return ended(
                stopped=f"its budget cannot be kept, as {policy.name} has no known price: set its upstream's"
            )
        spent += cost or 0.0
        Experiment.objects.filter(pk=experiment.pk, shadow_busy__gt=0).update(shadow_busy=0)
    return ended()


IDLE = 19
"""Lowest priority of a process."""


def process_idle() -> None:
    """Let everything else on this machine go before this process."""
    os.nice(IDLE)
    if os.getsid(0) == os.getpid():
        # Linux shares the cores between sessions first, whatever their processes' priorities are
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(IDLE))


def machine_busy() -> str:
    """Why the machine has nothing left for shadows; empty if it has."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > LOAD * cores:
        return f"the machine is busy: {load:.1f} processes want {cores} cores"
    memory = psutil.virtual_memory()
    if memory.available < MEMORY * memory.total:
        return f"the machine is busy: {memory.available / 2**30:.1f} GiB of memory are free"
    return ""


def _stopped_as_busy(experiment: Experiment, busy: str) -> str:
    Experiment.objects.filter(pk=experiment.pk).update(shadow_busy=F("shadow_busy") + 1)
    experiment.refresh_from_db(fields=["shadow_busy"])
    if experiment.shadow_busy < BUSY_LOOKS:
        return ""
    return f"it costs the machine too much; at {BUSY_LOOKS} looks in a row {busy}"


def shadows_due(experiment: Experiment, policy: Policy) -> Iterator[Decision]:
    """Decisions that wait for their shadow, newest first."""
    since = max(experiment.started_at or timezone.now(), timezone.now() - WINDOW)
    rows = decisions_of(experiment.agent).filter(import_batch=None, created_at__gte=since)
    rows = rows.exclude(source__in=("simulation", "feedback")).exclude(policy=policy.name)
    newest = rows.order_by("-created_at", "-id").values_list("pk", "metadata__serving__route__explored")[
        :LOOK
    ]
    drawn = [
        pk
        for pk, explored in newest
        # of a routed agent's other decisions the champion answered only the unsure ones: no sample of the traffic
        if explored is not False and 100 * positions(experiment.salt, str(pk))[0] < experiment.shadow
    ]
    there: set[uuid.UUID] = set()
    for chunk in chunks([shadow_id(pk) for pk in drawn]):
        there |= set(Decision.objects.filter(pk__in=chunk).values_list("pk", flat=True))
    for pk in drawn:
        # it may have been withdrawn or erased since
        if shadow_id(pk) not in there and (row := decisions_of(experiment.agent).filter(pk=pk).first()):
            yield row


def _answer(policy: Policy, row: Decision) -> dict[str, Any]:
    """The facts of the challenger's answer to a decision's prompt. Raises ServingRefused, NobodyAnswers."""
    target = Target(row.agent, (model_of(policy),))
    if row.candidates:
        order = DecideOrder(row.agent, row.state, row.messages, row.candidates, row.unit, row.run_id)
        _, facts = facts_decided(target, order)
        return facts | _beside(row)
    tools = row.metadata.get("tools")
    asked = Ask(row.messages, extra={"tools": tools} if tools else {})
    ask = ask_of(ChatRequest(row.agent, asked, has_format=bool(tools)), target)
    served = fallback.pieces(target, replace(ask, confidence=True))
    answer = answer_storable(answer_of(list(served.result), served.latency_ms))
    return facts_of(target, served, answer) | _beside(row)


def _refusal(policy: Policy, row: Decision, reason: str) -> dict[str, Any]:
    serving = {"backend": "none", "meant": policy.name, "finish_reason": "error", "error": reason[:1000]}
    return {
        "agent": row.agent,
        "response": "",
        "policy": policy.name,
        "metadata": {"serving": serving},
        "created_at": timezone.now().isoformat(),
        **_beside(row),
    }


def _beside(row: Decision) -> dict[str, object]:
    """Facts that a shadow shares with the decision it stands beside."""
    shared = {"messages": row.messages, "state": row.state, "unit": row.unit, "run_id": row.run_id}
    return {**shared, "id": str(shadow_id(row.pk)), "source": SHADOW}


# --- Figures ----------------------------------------------------------------------------------------------------

NEWEST = 1_000
"""Newest answers that latency and agreement are measured on."""


@dataclass(frozen=True)
class ShadowFigures:
    """A shadow's answers so far."""

    answers: int
    refused: int
    cost_usd: float
    unpriced: int
    """Answers without a known price; they are in no sum."""
    latency_ms: float | None
    """Median; None without an answer."""
    user_latency_ms: float | None
    """Median of the answers that the users got to the same prompts."""
    same: float | None
    """Share of answers that say the same, word for word."""

    @property
    def same_percent(self) -> str:
        return "–" if self.same is None else f"{100 * self.same:.0f}\u202f%"


def shadow_figures(experiment: Experiment) -> ShadowFigures:
    """What an experiment's shadow answered, what it took, and how it compares with what the users got."""
    policy = challenger_of(experiment)
    rows = _answers(experiment, policy)
    refused = rows.filter(metadata__serving__finish_reason="error").count()
    newest = (
        rows.exclude(response="")
        .order_by("-created_at")
        .values_list("metadata__serving__shadow__of", "response", "latency_ms")[:NEWEST]
    )
    beside = {uuid.UUID(of): (response, latency) for of, response, latency in newest}
    theirs: dict[uuid.UUID, tuple[str, float | None]] = {}
    for chunk in chunks(list(beside)):
        found = Decision.objects.filter(pk__in=chunk).values_list("pk", "response", "latency_ms")
        theirs |= {pk: (response, latency) for pk, response, latency in found}
    same = [response == beside[pk][0] for pk, (response, _) in theirs.items()]
    return ShadowFigures(
        answers=rows.count() - refused,
        refused=refused,
        cost_usd=_cost(rows),
        unpriced=rows.annotate(cost=COST).filter(cost=None).count() - refused,
        latency_ms=_median(latency for _, latency in beside.values()),
        user_latency_ms=_median(latency for _, latency in theirs.values()),
        same=sum(same) / len(same) if same else None,
    )


def _answers(experiment: Experiment, policy: Policy) -> QuerySet[Decision]:
    ends = {"created_at__lte": experiment.ended_at} if experiment.ended_at else {}
    rows = shadow_answers(experiment.agent, policy.name)
    return rows.filter(created_at__gte=experiment.started_at or timezone.now(), **ends).order_by()


def _cost(rows: QuerySet[Decision]) -> float:
    return sum(cost or 0.0 for cost in rows.values_list(COST, flat=True))


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
