"""Roll back a champion whose ratings in use are worse than its predecessor's.

The gate uses held-out prompts; this uses ratings of live answers. It looks once each when 20, 40, 80, ... of the
champion's decisions are rated. Look k spends alpha / (k (k + 1)), which sums to alpha: a champion that is no worse is
rolled back with probability at most `alpha` over all looks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import scipy

from backend.isolation import agent_isolated
from backend.notifications import notify
from feedback.explorer.bulk_readers import policy_verdicts
from rl.datasets.feedback_types import rating_value
from rl.models import Policy, PolicyEvent
from rl.models.learning import learner_settings
from rl.registry import service as registry
from rl.registry.gate_evidence import gate_bounds

logger = logging.getLogger("rl.online.champion_monitor")

FIRST_LOOK = 20
"""Rated decisions at the first look, and the least that the predecessor must have."""
MAX_COMPARISONS = 1000
"""Newest rated decisions of the predecessor to compare with."""
ACTOR = "online learner"

Kind, Stage = PolicyEvent.Kind, Policy.Stage


@dataclass(frozen=True)
class Look:
    """Result of one look; means are of verdicts in [0, 1] over rated decisions."""

    look: int
    decisions: int
    mean: float
    before: str
    """The preceding champion."""
    before_decisions: int
    before_mean: float
    p: float
    """p-value of ratings this much lower if it is no worse (one-sided Welch's t-test)."""
    alpha: float

    @property
    def worse(self) -> bool:
        return self.p <= self.alpha

    @property
    def words(self) -> str:
        return (
            f"{self.decisions} rated decisions average {self.mean:.3f}, {self.before}'s "
            f"{self.before_decisions} averaged {self.before_mean:.3f} (p = {self.p:.2g}, threshold "
            f"{self.alpha:.2g} at look {self.look})"
        )


def champions_watch() -> list[str]:
    """Look at every champion that is due and roll back worse ones; returns a line per action."""
    done = []
    for champion in Policy.objects.filter(stage=Stage.CHAMPION).order_by("agent"):
        if not champion.has_files:
            continue  # Not promoted by a gate: it is simply what answers.
        done += agent_isolated("champion watch", champion.agent, partial(_champion_watch, champion))
    return done


def _champion_watch(champion: Policy) -> list[str]:
    if not learner_settings(champion.agent).auto_rollback:
        return []
    look = champion_look(champion)
    if look is None:
        return []
    PolicyEvent.objects.create(
        policy=champion, kind=Kind.WATCHED, actor=ACTOR, reason=look.words, verdicts=asdict(look)
    )
    line = _roll_back(champion, look) if look.worse else ""
    return [line] if line else []


def champion_look(champion: Policy) -> Look | None:
    """The look that is due; None with too few ratings or without a predecessor."""
    promotion = champion.events.filter(to_stage=Stage.CHAMPION).first()
    if promotion is None or promotion.kind != Kind.PROMOTED:
        return None  # Restored by a rollback.
    retirement = (
        PolicyEvent.objects.filter(
            policy__agent=champion.agent, kind=Kind.RETIRED, from_stage=Stage.CHAMPION, pk__lt=promotion.pk
        )
        .select_related("policy")
        .first()
    )
    if retirement is None or retirement.policy.stage != Stage.RETIRED:
        return None
    verdicts = _verdicts(champion, promotion)
    if len(verdicts) < FIRST_LOOK:
        return None
    number = int(math.log2(len(verdicts) / FIRST_LOOK)) + 1
    if champion.events.filter(kind=Kind.WATCHED, pk__gt=promotion.pk, verdicts__look__gte=number).exists():
        return None
    verdicts = verdicts[: FIRST_LOOK * 2 ** (number - 1)]
    others = _verdicts(retirement.policy)[-MAX_COMPARISONS:]
    if len(others) < FIRST_LOOK:
        return None
    return Look(
        look=number,
        decisions=len(verdicts),
        mean=sum(verdicts) / len(verdicts),
        before=retirement.policy.name,
        before_decisions=len(others),
        before_mean=sum(others) / len(others),
        p=worse_by_chance(verdicts, others),
        alpha=alpha_of_look(gate_bounds(champion.agent).alpha, number),
    )


def alpha_of_look(alpha: float, number: int) -> float:
    """Error probability of the k-th look: 1/2, 1/6, 1/12, ... of alpha."""
    return alpha / (number * (number + 1))


def worse_by_chance(own: Sequence[float], others: Sequence[float]) -> float:
    """p-value of a one-sided Welch's t-test that `own` is lower than `others`."""
    if len({*own}) == len({*others}) == 1:
        return float(own[0] >= others[0])  # Without variance, t is undefined.
    return float(scipy.stats.ttest_ind(own, others, equal_var=False, alternative="less").pvalue)


def _verdicts(policy: Policy, since: PolicyEvent | None = None) -> list[float]:
    """Mean verdict per rated decision, oldest first."""
    values_by_unit: dict[object, list[float]] = {}
    recorded = policy.kind == Policy.Kind.RECORDED
    name = policy.recorded_as if recorded else policy.name
    after = since.created_at if since else None
    for row in policy_verdicts(policy.agent, name, after, recorded=recorded):
        value = rating_value(row.thumb, row.stars, row.score)
        if value is not None:
            values_by_unit.setdefault(row.decision, []).append(value)
    return [sum(values) / len(values) for values in values_by_unit.values()]


def _roll_back(champion: Policy, look: Look) -> str:
    """Roll a champion back, unless its predecessor is a recorded policy, which cannot answer here."""
    before = registry.champions_before(champion.agent)
    if before and before[0].kind == Policy.Kind.RECORDED:
        message = (
            f"{champion.name} is rated worse than {before[0].title}, which cannot be asked here: have the app ask its "
            f"own model again, then roll back by hand (policy rollback {champion.agent}). {look.words}"
        )
        notify("policy_rated_worse", message, policy=champion.name, agent=champion.agent, reason=look.words)
        return message
    try:
        back = registry.policy_rollback(champion.agent, actor=ACTOR, reason=f"{champion.name}: {look.words}")
    except registry.RegistryRefused as refusal:
        logger.warning("%s is worse and was not rolled back: %s", champion.name, refusal)
        return ""
    message = f"{champion.name} was rolled back to {back.name}: {look.words}"
    notify(
        "policy_rolled_back",
        message,
        policy=champion.name,
        agent=champion.agent,
        stage="retired",
        reason=look.words,
    )
    return message
