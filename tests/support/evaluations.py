"""Evaluations as if a policy had been judged: stored evidence by counts of who was right where."""

from __future__ import annotations

from typing import Any

from rl.models import Evaluation, Policy
from rl.registry.service import policy_evaluated
from rl.statistics import mcnemar_exact, paired_difference, wilson_interval


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
    policy_evaluated(policy, evaluation, actor="test")
    policy.refresh_from_db()
    return evaluation
