"""Checklist before a promotion: each rule's result now, what is missing, and about how many more ratings it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from backend.bodies import Answer
from backend.installation import PROGRAM
from feedback.agreement.report import agreement_low
from feedback.cache import CostAwareCache
from feedback.rating.requests import sampled_prompts
from feedback.selectors import feedback_counts_cached
from rl.datasets.gate_distance import GateDistance, gate_distances_cached
from rl.datasets.holdout import SplitCounts, prompts_until, share_held_out
from rl.gates.headlines import classifier_ahead
from rl.gates.report import NOT_APPLICABLE, RULE_TITLES, Evidence, GateBounds, GateReport, RuleResult
from rl.gates.rules import CHALLENGER, CHAMPION, MAX_PROMPTS, alpha_of_attempt, prompts_for_gain
from rl.gates.verdict import READY, SERVING, Verdict, verdict_compared, verdict_open
from rl.models import Evaluation, Policy
from rl.registry.comparisons import evaluation_newest_paired
from rl.registry.gate_evidence import (
    comparison_newest,
    evaluation_judged,
    gate_bounds,
    rival_name,
    rival_title,
)
from rl.registry.judging import minutes_of, rounds_state
from rl.registry.service import MOVES, rollback_possible
from rl.statistics.sequential import WinShare


@dataclass(frozen=True)
class ChecklistItem:
    """An unmet rule: what was found, and what more evidence could help."""

    rule: str
    title: str
    words: str
    missing: str = ""


@dataclass(frozen=True)
class GateChecklist:
    """The gate's result for a stage. `unmet`: rules that refuse, or that no comparison exists yet."""

    stage: str
    against: str
    unmet: list[ChecklistItem]
    passed_rules: list[str] = field(default_factory=list)
    """Titles of the rules that passed."""
    not_applicable: list[str] = field(default_factory=list)
    """Titles of the rules that do not apply."""
    harmful: bool = False
    """True if a rule found harm, so that more ratings do not help."""
    command: str = ""
    """Command that compares it with its rival, if nothing has."""
    ratings: int = 0
    """About how many more rated prompts it takes; 0 if none are missing or no number would help."""

    @property
    def opens(self) -> bool:
        return not self.unmet

    @property
    def against_words(self) -> str:
        return "the base model" if self.against == "base" else self.against

    @property
    def conditions(self) -> int:
        """Number of rules that apply."""
        return len(self.unmet) + len(self.passed_rules)


@dataclass(frozen=True)
class Promotion:
    """Moves that a person may make with a policy, and the checklist of each gate."""

    policy: Policy
    moves: tuple[str, ...]
    checks: list[GateChecklist]
    may_roll_back: bool

    @property
    def primary(self) -> str:
        """Stage of the main button; empty if no gate opens."""
        return next((check.stage for check in self.checks if check.opens), "")

    @property
    def may_rate_more(self) -> bool:
        """True if more ratings could help: no gate opens, and none found harm."""
        return bool(self.checks) and not self.primary and not any(check.harmful for check in self.checks)


_judged: CostAwareCache[tuple[Evidence, GateReport]] = CostAwareCache()

STANDINGS = {
    Policy.Stage.CHAMPION: "It answers now.",
    Policy.Stage.RETIRED: "Retired.",
    Policy.Stage.REJECTED: "Rejected.",
}
"""Stage without a further gate -> its standing."""


class NextStep(Answer):
    kind: str
    words: str
    answers: int
    """Answers to rate or compare, about."""
    judging_round: int | None
    """Judging round in which they are compared; null where the queue asks for them."""
    minutes: int


class VerdictShown(Answer):
    """Verdict against what answers today, as commands, the API and results show it."""

    state: str
    """ready, waits, refused, not compared, serving."""
    words: str
    against: str
    basis: str
    """Whose ratings these are."""
    representative: bool | None
    action: NextStep | None
    """null if nothing is to be done."""


def policy_verdict(policy: Policy) -> Verdict:
    """Verdict on a policy against its rival, as every page, command and endpoint shows it."""
    standing = STANDINGS.get(Policy.Stage(policy.stage), "")
    rival = rival_name(policy)
    evaluation = comparison_newest(policy)
    if standing:  # whom it would have to beat now is not whom it was compared with
        evaluation = evaluation_newest_paired(policy) or evaluation
        rival = evaluation.against if evaluation else rival
    title = rival_title(rival)
    if evaluation is None:
        newest = policy.metrics.get("against") or ""
        found = verdict_open(title, newest=rival_title(newest) if newest not in ("", rival) else "")
    else:
        evidence, report = _judge(policy, CHAMPION, evaluation)
        bounds = gate_bounds(policy.agent)
        check = _of_report(report, CHAMPION, rival, bounds, _distance(policy.agent))
        found = verdict_compared(
            report, evidence, bounds, title, further=check.ratings, sampled=_sampled(policy.agent, evidence)
        )
    if standing:
        return replace(found, state=SERVING, standing=standing, action=None)
    if found.state == READY and (caveats := _caveats(policy.agent, evaluation)):
        return replace(found, standing=f"{found.standing} But note: {'; '.join(caveats)}.", caveat=True)
    return found


def _caveats(agent: str, evaluation: Evaluation | None) -> list[str]:
    """What no rule of the gate asks for and a person should know before a promotion."""
    figures = evaluation.figures if evaluation else {}
    share = figures.get("simulated_share") or 0.0
    simulated = (
        "" if not share else f"{'all' if share == 1 else f'{100 * share:.0f} %'} of its ratings are simulated"
    )
    low = "the raters agree too little to rely on" if agreement_low(agent) else ""
    return [words for words in (simulated, low, classifier_ahead(figures)) if words]


def _sampled(agent: str, evidence: Evidence) -> bool:
    """True if all rated prompts of the evidence are in the agent's random sample."""
    rated = {one.prompt_hash for one in evidence.answer_pairs if one.said}
    return bool(rated) and rated <= sampled_prompts(agent)


def _judge(policy: Policy, to: str, evaluation: Evaluation) -> tuple[Evidence, GateReport]:
    """The judged comparison, cached until the comparison, the bounds or the policy change: permutation
    tests are slow."""
    key = (policy.pk, evaluation.pk, to, str(gate_bounds(policy.agent)), rounds_state(policy))
    return _judged.get(key, lambda: evaluation_judged(policy, evaluation, to))


def promotion_of(policy: Policy, *, may_move: bool) -> Promotion:
    """A policy's possible moves; none for somebody who may only read."""
    moves = MOVES[policy.stage] if may_move else ()
    if (
        policy.kind == Policy.Kind.RECORDED
    ):  # the gate judges what was trained here; a rollback puts this one back
        moves = tuple(move for move in moves if move != Policy.Stage.CHAMPION)
    rolls_back = may_move and rollback_possible(policy)
    return Promotion(policy, moves, gate_checklists(policy, moves), rolls_back)


def gate_checklists(policy: Policy, stages: Sequence[str]) -> list[GateChecklist]:
    """The checklists of the stages that have a gate: champion, challenger."""
    evaluation = comparison_newest(policy)
    return [gate_checklist(policy, to, evaluation) for to in (CHAMPION, CHALLENGER) if to in stages]


def gate_checklist(policy: Policy, to: str, evaluation: Evaluation | None) -> GateChecklist:
    """The gate's result for a stage, by the newest comparison with the rival."""
    rival = rival_name(policy)
    distance = _distance(policy.agent)
    if evaluation is None:
        option = "--compare-base" if rival == "base" else f"--compare {rival}"
        newest = policy.metrics.get("against")
        words = f"not compared with {rival} on held-out prompts yet"
        if newest and newest != rival:
            words += f"; the newest comparison is with {newest}"
        missing = "" if distance is None or distance.reached else distance.words
        item = ChecklistItem("comparison", f"Compared with {rival}", words, missing)
        ratings = 0 if distance is None else distance.further
        command = f"{PROGRAM} evaluate_model --policy {policy.name} {option}"
        return GateChecklist(to, rival, [item], command=command, ratings=ratings)
    bounds = gate_bounds(policy.agent)
    return _of_report(_judge(policy, to, evaluation)[1], to, rival, bounds, distance)


def _of_report(
    report: GateReport, to: str, rival: str, bounds: GateBounds, distance: GateDistance | None
) -> GateChecklist:
    missing = [_prompts_missing(result, bounds, distance) for result in report.refusals]
    rating_count = max((ratings for ratings, _ in missing), default=0)
    unmet = [  # one number: what the rule that asks for most needs is enough for the others
        ChecklistItem(
            result.rule,
            rule_title(result.rule, to),
            result.words,
            "" if 0 < ratings < rating_count else words,
        )
        for result, (ratings, words) in zip(report.refusals, missing, strict=True)
    ]
    rest = [result for result in report.verdicts if result.passed]
    return GateChecklist(
        to,
        rival,
        unmet,
        passed_rules=[rule_title(one.rule, to) for one in rest if one.outcome != NOT_APPLICABLE],
        not_applicable=[rule_title(one.rule, to) for one in rest if one.outcome == NOT_APPLICABLE],
        harmful=report.harmful,
        ratings=rating_count,
    )


def rule_title(rule: str, to: str) -> str:
    """Title of a rule; a challenger must only be no worse."""
    if rule == "accuracy" and to == CHALLENGER:
        return "Not worse than what it replaces"
    return RULE_TITLES.get(rule, rule)


def _prompts_missing(
    result: RuleResult, bounds: GateBounds, distance: GateDistance | None
) -> tuple[int, str]:
    """About how many more rated prompts a rule needs, as a number and in words."""
    if not result.waits:
        return 0, "More ratings will not change this. Train again with other knobs or other data."
    if result.rule == "compared":
        return 0, _answers_missing(result.figures)
    if result.rule == "evidence":
        if distance is not None and distance.reached:
            return 0, f"{distance.found:,} held-out prompts are rated now: evaluate again."
        further = distance.further if distance is not None else 0
        return (
            further,
            f"About {further:,} more rated prompts." if further else "Rate more, then evaluate again.",
        )
    if result.rule == "accuracy" and (n := result.figures.get("n")):
        prompt_count = prompts_for_gain(result.figures, bounds.alpha)
        if prompt_count is None:
            return 0, "The measured difference is not above zero: train again on more ratings."
        if prompt_count >= MAX_PROMPTS:
            return 0, (
                "The measured gain is too small to be shown with a realistic number of ratings: train again."
            )
        if prompt_count <= n:
            return 0, "Evaluate again: the present number of prompts may suffice."
        ratings = rated_until(prompt_count, n, bounds.min_evidence)
        return ratings, (
            f"If the gain stays as measured, about {prompt_count:,} held-out prompts are needed, that is about "
            f"{ratings:,} more rated prompts; then evaluate again."
        )
    return 0, "Rate more, then evaluate again."


def _answers_missing(figures: Mapping[str, object]) -> str:
    """What a judging round still needs, as an action."""
    if "round" not in figures:
        share = WinShare(0, 0, 0, alpha_of_attempt(GateBounds().alpha, 1), 0.0).further or 0
        return (
            f"Compare its answers side by side: about {share} answers ({minutes_of(share)} minutes) where "
            "7 of 10 prompts are won."
        )
    if figures["ended"]:
        return "The round has ended: train again, or begin another round, whose verdict takes more answers."
    address = f"/rate/pairs/?round={figures['round']}"
    if not figures["further"]:
        return f"Compare answers side by side at {address}; the pairs that are left may not bring a verdict."
    return f"Compare {figures['further']:,} answers side by side at {address} (about {figures['minutes']} minutes)."


def rated_until(wanted: int, held_out: int, min_evidence: int) -> int:
    """About how many more rated prompts make `wanted` held-out ones of `held_out`; from 20 on rounded to ten."""
    prompts = round(held_out / share_held_out(held_out, min_evidence))
    tally = SplitCounts(prompts=prompts, eval=round(0.1 * prompts), holdout=held_out)
    further = prompts_until(wanted, tally, min_evidence)
    return further if further < 20 else round(further, -1)


def _distance(agent: str) -> GateDistance | None:
    counts = feedback_counts_cached().get(agent)
    return gate_distances_cached({agent: counts}).get(agent) if counts is not None else None
