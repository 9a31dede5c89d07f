"""Experiments in the database: two policies, a split, and decisions as serving would record them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.utils import timezone

from feedback.models import Decision, Rating, prompt_hash
from rl.experiments.traffic import ArmOrder, experiment_create, experiment_start, plan_of
from rl.models import Experiment
from tests.support.registry_rows import policy_of as policy_of

PROMPT = [{"role": "user", "content": "Where does this go?"}]


def draft_of(name: str = "shorter", **settings: Any) -> Experiment:
    arms = (ArmOrder("filer-v1", "control"), ArmOrder("filer-v2", "challenger"))
    return experiment_create("filer", name, arms, actor="ann", **{"ramp": 100, **settings})


def running_of(name: str = "shorter", **settings: Any) -> Experiment:
    """Started a day ago."""
    started = experiment_start(draft_of(name, **settings), actor="ann")
    Experiment.objects.filter(pk=started.pk).update(started_at=timezone.now() - timedelta(days=1))
    started.refresh_from_db()
    return started


Facts = Callable[[int, bool], dict[str, Any]]
"""Number of the unit, whether it is in the challenger's arm -> a decision's facts."""


def expose(units: Sequence[int], facts: Facts = lambda _n, _new: {}, agent: str = "filer") -> list[Decision]:
    """One decision for each unit, by the arm that takes it; `thumb` among the facts becomes a rating."""
    plan, key = plan_of(agent), prompt_hash(agent, PROMPT)
    rows, ratings = [], []
    for number in units:
        found = plan.assign(f"user-{number}")
        given = dict(facts(number, found.arm.endswith("/challenger")))
        thumb, kind = given.pop("thumb", None), given.pop("rater_kind", "human")
        metadata = {"arm_propensity": found.propensity, **given.pop("metadata", {})}
        row = Decision(
            agent=agent,
            messages=PROMPT,
            prompt_hash=key,
            response="inbox",
            policy=found.policy,
            arm=found.arm,
            unit=f"user-{number}",
            metadata=metadata,
            **given,
        )
        rows.append(row)
        if thumb is not None:
            ratings.append(
                Rating(decision=row, rater="ann", rater_kind=kind, thumb="up" if thumb else "down")
            )
    Decision.objects.bulk_create(rows)
    Rating.objects.bulk_create(ratings)
    return rows
