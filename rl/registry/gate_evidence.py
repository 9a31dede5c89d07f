"""Gate evidence from a stored evaluation: the agent's bounds, the attempt's number, the report."""

from __future__ import annotations

import dataclasses
from typing import Any

from feedback.rating.requests import prompts_asked
from rl.datasets.prompt_clusters import cluster_text
from rl.gates.effects import effect_of, items_of, lead_of
from rl.gates.headlines import fields_text, right_of_classifier
from rl.gates.report import (
    AnswerPair,
    Case,
    Evidence,
    GateBounds,
    GateReport,
    GeneralAnswers,
    GoldenResult,
)
from rl.gates.rules import CHAMPION, alpha_of_attempt, gate_interval, gate_judge
from rl.models import Evaluation, GateSettings, Policy
from rl.registry.benchmark_results import gate_benchmarks
from rl.registry.judging import round_evidence
from rl.registry.looks import attempt_of
from rl.statistics import Difference


def gate_bounds(agent: str) -> GateBounds:
    """The bounds an operator set for the agent, or the defaults. Raises GateError for one outside its range."""
    row = GateSettings.objects.filter(agent=agent).first()
    return row.bounds if row else GateBounds()


def policy_judge(policy: Policy, to: str = CHAMPION) -> GateReport | None:
    """The gate's report by the policy's newest comparison with what it must beat; None where there is none.

    What it must beat is the agent's champion, or the base model where there is none.
    """
    evaluation = comparison_newest(policy)
    return None if evaluation is None else evaluation_judged(policy, evaluation, to)[1]


def evaluation_judged(policy: Policy, evaluation: Evaluation, to: str) -> tuple[Evidence, GateReport]:
    """Evidence of a comparison, and the gate's report by it."""
    bounds = gate_bounds(policy.agent)
    evidence = evidence_of(evaluation)
    if listed := bounds.benchmark_bounds:
        evidence = dataclasses.replace(evidence, **gate_benchmarks(policy, list(listed)))
    return evidence, gate_judge(evidence, bounds, to)


def rival_name(policy: Policy) -> str:
    """Name of the policy to beat: the champion's, or `base`."""
    champion = Policy.objects.filter(agent=policy.agent, stage=Policy.Stage.CHAMPION).first()
    return champion.name if champion is not None and champion.pk != policy.pk else "base"


def rival_title(name: str) -> str:
    """What a reader knows an opponent as: its title, or `the base model`."""
    if name == "base":
        return "the base model"
    policy = Policy.objects.filter(name=name).first()
    return policy.title if policy is not None else name


def comparison_newest(policy: Policy) -> Evaluation | None:
    """The newest evaluation on the holdout against whom it must beat."""
    return (
        policy.evaluations.filter(split="holdout", against=rival_name(policy))
        .select_related("snapshot", "policy")
        .defer("evidence", "figures")
        .order_by("-pk")
        .first()
    )


def evidence_of(evaluation: Evaluation) -> Evidence:
    """Evidence for the gate's rules, out of the stored evaluation."""
    body = evaluation.evidence
    asked = prompts_asked(evaluation.agent)
    off_policy = body.get("off_policy")
    return Evidence(
        against=evaluation.against,
        cases=[item for item in items_of(body.get("cases", ())) if isinstance(item, Case)],
        other_kinds={kind: items_of(items) for kind, items in body.get("others", {}).items()},
        exclusions=body.get("barred", {}),
        answer_pairs=[
            AnswerPair(
                one["valid"],
                one["other_valid"],
                one["reward"],
                one["other_reward"],
                len(one["answer"]),
                len(one["other_answer"]),
                one.get("judged", True),
                one.get("loops", False),
                one.get("written_valid"),
                one.get("other_written_valid"),
                one.get("same"),
                one.get("said", False),
                one.get("other_said", False),
                one.get("settled", False),
                one.get("prompt_hash", "") in asked,
                one.get("prompt_hash", ""),
            )
            for one in body.get("answers", ())
        ],
        kl=body.get("kl"),
        written_gain=Difference(**gain) if (gain := body.get("written_gain")) else None,
        general=GeneralAnswers(**general) if (general := body.get("general")) else None,
        good_chars=(good["value"], good["n"]) if (good := body.get("good_chars")) else None,
        golden=[GoldenResult(**case) for case in body.get("golden", ())],
        off_policy=Difference(**off_policy) if off_policy else None,
        judging=round_evidence(evaluation.policy, evaluation.against) if evaluation.policy else None,
        attempt=attempt_of(evaluation),
        near_identical=cluster_text(evaluation.figures.get("clusters") or {}),
        discrete=body.get("discrete", False),
        right_beside=right_of_classifier(evaluation.figures),
        fields=fields_text(evaluation.figures),
    )


def gate_difference(evaluation: Evaluation) -> dict[str, Any] | None:
    """Lead of a policy in the evidence that decides, with the interval whose lower end the gate asks about.

    {"value", "low", "high", "unit", "kind", "confidence", "attempt"}; None where both sides were not judged. Pages,
    cards and commands show this one, so that there is one lower bound.
    """
    evidence, bounds = evidence_of(evaluation), gate_bounds(evaluation.agent)
    lead = lead_of(evidence, bounds)
    effect = effect_of(lead, evidence.items(lead))
    if effect is None:
        return None
    return {
        **gate_interval(effect, evidence, bounds).as_dict(),
        "unit": effect.unit,
        "kind": lead,
        "confidence": 1 - 2 * alpha_of_attempt(bounds.alpha, evidence.attempt),
        "attempt": evidence.attempt,
    }
