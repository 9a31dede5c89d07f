"""An evaluation's figures in sentences, and the step that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend import command
from rl.datasets.gate_distance import gate_distance
from rl.gates.evidence_kinds import CORRECTIONS, KINDS, PAIRS, REWARDS, UNITS
from rl.gates.evidence_kinds import MEASURES as EVIDENCE_MEASURES
from rl.models import Policy
from rl.registry import gate_evidence


def right_text(result: dict[str, Any]) -> str:
    """Right answers of the policy, the incumbent and the base model; empty if none are known."""
    right = dict(result["right"])
    if not (own := right.pop("policy", None)):
        return ""
    names = {"incumbent": result.get("incumbent", {}).get("title", ""), "base": "the base model"}
    sides = [f"{names[side]} in {count_text(found)}" for side, found in right.items()]
    return f"Right in {count_text(own)} held-out prompts{'; ' if sides else ''}{'; '.join(sides)}."


def count_text(found: dict[str, Any]) -> str:
    """A share as a count: `43 of 58`."""
    return f"{round(found['value'] * found['n']):,} of {found['n']:,}"


def quantised_text(found: dict[str, Any]) -> str:
    """Answers on the quantised base compared with full precision."""
    right = f", right {share_text(found['ground_truth'])}" if found["ground_truth"] else ""
    return (
        f"On the quantised base ({Path(found['base_file']).name}, llama.cpp): the same answer to "
        f"{share_text(found['same_answers'])}, valid {share_text(found['valid_rate'])}, average reward "
        f"{share_text(found['average_reward'])}{right}."
    )


def look_text(look: int) -> str:
    return (
        f"Use {look} of this holdout. Picking policies by held-out figures biases them upwards, so the "
        "gate corrects for every use, with or without a comparison. An evaluation on other prompts "
        "(--test-data FILE) is not counted."
    )


LIKED_UNKNOWN = "Share of liked answers: unknown, because none of its answers to held-out prompts is rated."

MEASURES = {
    "preference_accuracy": "preference accuracy",
    "preference_accuracy_length_normalised": "... per token",
    "valid_rate": "valid answers",
    "ground_truth": "agrees with the known answer",
    "average_reward": "average reward",
}


def next_after_evaluation(result: Mapping[str, object]) -> str:
    """The next command: a comparison, a promotion if the gate is open, or what opens it."""
    policy = Policy.objects.filter(name=result["policy"]).first()
    if policy is None:
        return ""
    report = gate_evidence.policy_judge(policy)
    if report is None:
        rival = gate_evidence.rival_name(policy)
        return command.after_training(policy.name, "" if rival == "base" else rival)
    if policy.stage not in (Policy.Stage.CANDIDATE, Policy.Stage.CHALLENGER):
        return ""
    if report.passed:
        return command.after_gate_opens(policy.name)
    if report.harmful:
        return command.after_harm(policy.name, policy.agent, report.reason)
    return command.after_gate_stays_closed(policy.agent, gate_distance(policy.agent).further)


def share_text(figure: dict[str, Any] | None) -> str:
    if not figure or figure.get("value") is None:
        return ""
    if figure.get("low") is None or "n" not in figure:
        return f"{100 * figure['value']:.1f} %"
    return f"{100 * figure['value']:.1f} % [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}] n={figure['n']:,}"


def off_policy_text(found: dict[str, Any]) -> str:
    """Estimated reward on logged choices, or why there is no estimate."""
    if "refused" in found:
        return f"No off-policy estimate: {found['refused']}."
    best = found["doubly_robust"]
    text = (
        f"Off-policy estimate on {found['decisions']:,} logged decisions: average reward {best['value']:.3f} "
        f"[{best['low']:.3f}, {best['high']:.3f}]; the logged policy earned {found['logged']:.3f}"
    )
    low, high = found.get("scale", (0.0, 1.0))
    if (low, high) != (0.0, 1.0):
        text += f" (rewards from {low:g} to {high:g}, rescaled to 0 to 1)"
    if difference := found.get("difference"):
        text += (
            f"; {difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}] against "
            "the compared policy"
        )
    warnings = found["overlap"]["warnings"]
    return f"{text}. {'Warning: ' + '; '.join(warnings) + '.' if warnings else ''}".strip()


def evidence_text(result: dict[str, Any]) -> str:
    """The leading kind of evidence, its number of prompts, and why it is not pairs."""
    lead, evidence = result["carried_by"], result["evidence"]
    prompts = evidence.get(lead, {}).get("prompts", 0)
    if lead == PAIRS:
        pairs = evidence[PAIRS].get("pairs", prompts)
        if pairs == prompts:
            return f"Evaluated on {prompts:,} held-out pairs, each of its own prompt."
        return f"Evaluated on {pairs:,} held-out pairs of {prompts:,} prompts, each prompt with one vote."
    pairs = evidence.get(PAIRS, {}).get("prompts", 0)
    if lead == CORRECTIONS and pairs:
        return f"Evaluated on {prompts:,} held-out prompts with an answer that people wrote: is the policy's the same?"
    found = f"only {pairs:,} held-out prompts have" if pairs else "no held-out prompt has"
    return (
        f"{result['agent']}: {found} a preferred and a rejected answer. Evaluated on {lead} instead "
        f"({KINDS[lead]}): {prompts:,} held-out prompts."
    )


def kind_cells(figures: dict[str, Any], compared: bool) -> list[str]:
    """Cells of a kind of evidence: the policy's figure and, if compared, the other's."""
    own = figures.get("concordance") or figures.get("own")
    if figures.get("unit", "points") == "points":
        cells = [share_text(own)]
        other = figures.get("against_value")
        return [*cells, f"{100 * other:.1f} %" if other is not None else ""] if compared else cells
    cells = [f"{own['value']:.3f} [{own['low']:.3f}, {own['high']:.3f}] n={own['n']:,}"] if own else [""]
    unit = "" if figures["unit"] == UNITS[REWARDS] else f" {figures['unit']}"
    return [*cells, f"{figures['against_value']:.3f}{unit}"] if compared else cells


def verdict(result: dict[str, Any]) -> str:
    """Whether the policy is better, with figures: the gate's interval if it has one, else the 95 % interval."""
    comparison = result["comparison"]
    difference, gate = comparison["difference"], comparison.get("gate")
    against = comparison["against"]
    if difference is None:
        return f"No gain over {against} can be shown: all held-out answers have the same rating."
    estimate = gate or difference
    scale, unit = (100.0, "points") if comparison["unit"] == "points" else (1.0, comparison["unit"])
    form = "+.1f" if scale == 100 else "+.3f"
    value, low, high = (format(scale * estimate[part], form) for part in ("value", "low", "high"))
    confidence = gate["confidence"] if gate else 0.95
    whose = f", the gate's for attempt {gate['attempt']}" if gate else ""
    figures = (
        f"{value} {unit} {EVIDENCE_MEASURES[comparison['kind']]} [{low}, {high}] "
        f"({100 * confidence:.1f} % interval{whose}), "
        f"{'exact McNemar ' if 'b' in comparison else ''}p = {comparison['p_value']:.2g}"
    )
    if estimate["low"] > 0:
        return f"Better than {against}: {figures}."
    if estimate["high"] < 0:
        return f"WORSE than {against}: {figures}."
    return f"No gain over {against} is shown: {figures}; the interval includes zero."
