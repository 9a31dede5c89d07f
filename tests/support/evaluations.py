"""Evaluations as if a policy had been judged: stored evidence by counts of who was right where."""

from typing import Any

from django.utils import timezone

from rl.models import Evaluation, JudgingRound, Policy
from rl.registry.judging import RoundCounts, RoundStanding
from rl.registry.service import policy_evaluated
from rl.statistics import mcnemar_exact, paired_difference, wilson_interval
from rl.statistics.sequential import WinShare


def evidence_stored(
    both: int = 20, wins: int = 15, losses: int = 0, neither: int = 5, **more: Any
) -> dict[str, Any]:
    """An Evaluation's evidence; 40 prompts, 15 won and none lost, opens the default gate."""
    sides = (
        [(True, True)] * both + [(True, False)] * wins + [(False, True)] * losses + [(False, False)] * neither
    )
    cases = [
        {"prompt_hash": f"{number:064x}", "own": own, "other": other, "slices": [], "raters": ["ada"]}
        for number, (own, other) in enumerate(sides)
    ]
    return {"cases": cases, "answers": [], **more}


def round_ended(policy: Policy, rival: Policy | None, wins: int, losses: int) -> JudgingRound:
    """A judging round with these counts, over since a moment ago."""
    share = WinShare(wins, losses, 0, 1 / 30, 0.1)
    standing = RoundStanding(RoundCounts(wins, losses, judgements=wins + losses), share, share.verdict, 1)
    return JudgingRound.objects.create(
        agent=policy.agent,
        policy=policy,
        opponent=rival,
        status="ended",
        verdict=share.verdict,
        attempt=1,
        alpha=share.alpha,
        prompts=max(1, wins + losses),
        result=standing.dump(),
        ended_at=timezone.now(),
    )


def judged(
    policy: Policy,
    against: str = "base",
    *,
    both: int = 20,
    wins: int = 15,
    losses: int = 0,
    neither: int = 5,
    **more: Any,
) -> Evaluation:
    """Store an evaluation of the policy on the holdout and put its figures on it."""
    n = both + wins + losses + neither
    figures = {
        "policy": policy.name,
        "samples": n,
        "preference_accuracy": wilson_interval(both + wins, n).as_dict(),
        "comparison": {
            "against": against,
            "preference_accuracy": wilson_interval(both + losses, n).as_dict(),
            "difference": paired_difference(both, wins, losses, neither).as_dict(),
            "p_value": mcnemar_exact(wins, losses),
        },
    }
    evaluation = Evaluation.objects.create(
        agent=policy.agent,
        policy=policy,
        base_model=policy.base_model,
        against=against,
        samples=n,
        figures=figures,
        evidence=evidence_stored(both, wins, losses, neither, **more),
    )
    if (rival := Policy.objects.filter(name=against).first()) is not None:
        round_ended(policy, rival, wins, losses)
    policy_evaluated(policy, evaluation, actor="test")
    policy.refresh_from_db()
    return evaluation
