"""Rules of a gate about a policy's answers: rewards, validity, distance, golden cases, length, benchmarks. Pure.

Each rule about a loss bounds two errors, by intervals of the paired difference on the same prompts. A policy as good as
its rival is refused for good in at most `HARM` of cases. A policy that lost the bound or more passes in at most
`UNSEEN` of cases. With too few answers to exclude the bound, the rule waits for more.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rl.gates.effects import TableEffect, binomial_luck, effect_of, lead_of, points
from rl.gates.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS, REWARDS, TESTS
from rl.gates.report import (
    Evidence,
    GateBounds,
    JudgingEvidence,
    RuleResult,
    not_applicable,
    passed,
    refused,
)
from rl.statistics import mean_interval, paired_difference
from rl.statistics.assignment import BASE
from rl.statistics.permutation import sign_flip_p
from rl.statistics.sequential import BETTER, NOT_WORSE, WORSE

HARM = 0.05
"""One-sided level of the exact test of a loss: below it the policy is refused for good."""

UNSEEN = 0.1
"""One-sided level of the interval that must exclude a loss of the bound or more (non-inferiority)."""


MOST_LOOPING = 0.25
"""Largest share of free-text answers that may repeat themselves, whatever the rival's do."""


def rule_reward(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Its answers' mean reward is not worse, over the prompts whose answers a reward can tell apart.

    Refused for good if the loss is beyond chance (sign flips, `HARM`). Waits if Student's interval (`UNSEEN`) does not
    exclude a loss of `max_reward_loss`.
    """
    known = [one.reward - one.other_reward for one in evidence.answer_pairs if one.judged]
    if not known:
        return not_applicable("no held-out prompt has rewarded answers of both")
    interval = mean_interval(known, 1 - 2 * UNSEEN, bounds=(-1.0, 1.0))
    assert interval.value is not None  # there is at least one
    assert interval.low is not None
    luck = sign_flip_p([-one for one in known])
    bound = -bounds.max_reward_loss
    figures = {**interval.as_dict(), "confidence": 1 - 2 * UNSEEN, "p": luck, "bound": bound}
    words = f"the average reward changed by {interval.value:+.3f} over {interval.n} prompts"
    if luck <= HARM:
        return refused(
            f"the average reward fell by {-interval.value:.3f} over {interval.n} prompts, more than chance "
            f"explains (p = {luck:.3g})",
            figures,
        )
    if interval.low < bound:
        words = (
            f"{words}, but a fall of up to {-interval.low:.3f} cannot be ruled out (one-sided 90 % interval, "
            f"allowed: {-bound:g})"
        )
        return refused(words, figures, waits=True)
    return passed(words, figures)


def rule_valid(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """As many of its answers are valid.

    Refused for good if the loss is beyond chance (exact test, `HARM`). Waits if Newcombe's interval (`UNSEEN`) does not
    exclude a loss of `max_invalid_gain`, or if more than `MOST_LOOPING` of its answers are repetitive free text.
    """
    if not evidence.answer_pairs:
        return not_applicable("no held-out prompt was answered by both")
    n = len(evidence.answer_pairs)
    both = sum(one.valid and one.other_valid for one in evidence.answer_pairs)
    wins = sum(one.valid and not one.other_valid for one in evidence.answer_pairs)
    losses = sum(one.other_valid and not one.valid for one in evidence.answer_pairs)
    difference = paired_difference(both, wins, losses, n - both - wins - losses, 1 - 2 * UNSEEN)
    luck = binomial_luck(losses, wins)
    figures = {
        **difference.as_dict(),
        "confidence": 1 - 2 * UNSEEN,
        "own": (both + wins) / n,
        "against": (both + losses) / n,
        "n": n,
        "p": luck,
        "bound": -bounds.max_invalid_gain,
    }
    words = (
        f"{100 * (both + wins) / n:.1f} % of its {n} answers are valid, of {evidence.against}'s "
        f"{100 * (both + losses) / n:.1f} %"
    )
    written = [one for one in evidence.answer_pairs if one.written_valid is not None]
    if written:
        own, other = (
            sum(bool(side) for side in sides) / len(written)
            for sides in zip(*((one.written_valid, one.other_written_valid) for one in written), strict=True)
        )
        figures |= {"written": own, "against_written": other}
        words += (
            f", {len(written)} of them chosen or written within a schema, as in serving (as free text "
            f"{100 * own:.1f} % and {100 * other:.1f} % are valid)"
        )
    if luck <= HARM:
        return refused(f"{words}: a larger loss than chance explains (p = {luck:.3g})", figures)
    if (looping := sum(one.loops for one in evidence.answer_pairs) / n) > MOST_LOOPING:
        words += f", but {100 * looping:.0f} % repeat themselves (allowed: {100 * MOST_LOOPING:g} %)"
        return refused(words, {**figures, "looping": looping}, waits=True)
    if difference.low < -bounds.max_invalid_gain:
        allowed = f"allowed: {100 * bounds.max_invalid_gain:g}"
        words += (
            f": a loss of up to {-100 * difference.low:.1f} points cannot be ruled out (one-sided 90 % interval, "
            f"{allowed})"
        )
        return refused(words, figures, waits=True)
    return passed(words, figures)


FIELDS_BEHIND = 0.05
"""A policy may be right this much less often than a classifier of each field, as a share of prompts."""


def rule_fields(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Answers with several fields are right as often as those of a classifier of each field, less FIELDS_BEHIND.

    Waits otherwise: more corrections, or that classifier as the policy (`train_linear`), may help.
    """
    if evidence.right_beside is None:
        words = evidence.fields or "answers with several fields were not judged beside a classifier"
        return not_applicable(words)
    own, other = evidence.right_beside
    figures = {"value": own, "classifier": other, "bound": FIELDS_BEHIND}
    words = f"right in {100 * own:.1f} % of prompts, a classifier of each field in {100 * other:.1f} %"
    words += f" ({evidence.fields.rstrip('.')})" if evidence.fields else ""
    if own < other - FIELDS_BEHIND:
        words += f": {100 * FIELDS_BEHIND:g} points less are allowed: promote that classifier (train_linear) instead"
        return refused(words, figures, waits=True)
    return passed(words, figures)


def rule_kl(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """The KL to its reference (the base model or its warm-up) is within `max_kl`.

    What people wrote may be unlikely under the reference. The bound therefore grows by the gain in log-likelihood of
    held-out answers that people wrote, or preferred (SFT with `teacher=preferred`), in nats per token: its interval's
    lower end.
    """
    if evidence.kl is None:
        words = (
            "no KL was measured: its answers are chosen from a closed set, or it is linear and has no base "
            "model"
        )
        return not_applicable(words)
    way = 0.0
    if evidence.written_gain is not None:
        way = max(evidence.written_gain.low, 0.0)
    figures = {"value": evidence.kl, "bound": bounds.max_kl, "written": way}
    allowed = f"at most {bounds.max_kl + way:.3g} is allowed"
    words = f"KL to its reference {evidence.kl:.2f} nats per token of its answers, {allowed}"
    if way:
        words += f" ({way:.3g} of that because answers that people wrote or preferred are that far from the reference)"
    return (passed if evidence.kl <= bounds.max_kl + way else refused)(words, figures)


def rule_general(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """It still answers prompts that have nothing to do with its agent, about as well as its base.

    For an agent that is never asked anything else, raise `max_general_kl` and `max_general_loss` (1 allows every loss).
    """
    found = evidence.general
    if found is None:
        return not_applicable("general prompts are asked of adapters on a base model that is not bundled")
    loss = found.base_plain_text - found.plain_text
    figures = {
        **dataclasses.asdict(found),
        "bound": bounds.max_general_loss,
        "kl_bound": bounds.max_general_kl,
    }
    faults = []
    if loss > bounds.max_general_loss + 1e-9:
        faults.append(
            f"a loss of {100 * loss:.0f} points, at most {100 * bounds.max_general_loss:g} are allowed"
        )
    if found.kl > bounds.max_general_kl:
        faults.append(f"at most {bounds.max_general_kl:g} nats are allowed")
    if not faults:
        return passed(found.words.removesuffix("."), figures)
    example = "".join(f'; to "{one["prompt"]}" it says: {one["answer"]}' for one in found.broken[:1])
    return refused(f"{found.words} ({'; '.join(faults)}{example})", figures)


def rule_golden(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Every golden case is right."""
    if not evidence.golden:
        return not_applicable("this agent has no golden cases")
    failed = [case for case in evidence.golden if not case.passed]
    figures = {"n": len(evidence.golden), "failed": [dataclasses.asdict(case) for case in failed]}
    if failed:
        names = ", ".join(case.name for case in failed[:3])
        return refused(f"{len(failed)} of {len(evidence.golden)} golden cases fail: {names}", figures)
    return passed(f"all {len(evidence.golden)} golden cases pass", figures)


def rule_length(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Its answers are about as long as before: raters prefer long answers, so length can pass for quality.

    Compared with the rival's answers to the same prompts or, if those differ in length, with at least `min_slice`
    held-out answers that people wrote, chose or liked. Waits with fewer than `min_evidence` answers.
    """
    own = [math.log(one.chars + 1) for one in evidence.answer_pairs]
    if not own:
        return not_applicable("no held-out prompt was answered by both")
    n = len(own)
    mean = math.fsum(own) / n
    ratio = math.exp(mean - math.fsum(math.log(one.other_chars + 1) for one in evidence.answer_pairs) / n)
    figures: dict[str, float] = {"value": ratio, "n": n, "bound": bounds.max_length_ratio}
    words = f"its answers are {ratio:.2f} times as long as {evidence.against}'s"
    similar = _similar(ratio, bounds)
    if evidence.good_chars is not None and evidence.good_chars[1] >= bounds.min_slice:
        figures["good"] = math.exp(mean) / (evidence.good_chars[0] + 1)
        words += f", {figures['good']:.2f} times as long as answers that people wrote, chose or liked"
        similar = similar or _similar(figures["good"], bounds)
    if not similar:
        return refused(
            f"{words} (allowed: {1 / bounds.max_length_ratio:.2g} to {bounds.max_length_ratio:g})",
            figures,
            waits=n < bounds.min_evidence,
        )
    return passed(words, figures)


def _similar(ratio: float, bounds: GateBounds) -> bool:
    return 1 / bounds.max_length_ratio <= ratio <= bounds.max_length_ratio


def rule_off_policy(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """The reward estimated on logged decisions is not below what the champion earned."""
    found = evidence.off_policy
    if found is None:
        return not_applicable("no decisions with propensities and rewards to estimate from")
    figures = {**found.as_dict(), "bound": -bounds.max_off_policy_loss}
    words = (
        f"off-policy estimate of its reward minus the champion's: {found.value:+.3f} [{found.low:+.3f}, "
        f"{found.high:+.3f}]"
    )
    worse = found.value < -bounds.max_off_policy_loss or found.high < 0
    return (refused if worse else passed)(words, figures)


# --- Benchmarks ---


def rule_benchmarks(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """On every listed task a loss of its bound or more to its own base is excluded, on the same items.

    Asked only if an operator lists tasks in the Gate settings. Refused for good if the whole interval lies below the
    bound. Waits if the bound is not excluded, or a result is missing or outdated. A smaller loss passes even if it is
    significant.
    """
    if evidence.no_benchmarks:
        return not_applicable(evidence.no_benchmarks)
    figures: dict[str, Any] = {}
    absent: list[str] = []
    open_: list[str] = []
    lost: list[str] = []
    for task, bound in bounds.benchmark_bounds.items():
        found = evidence.benchmarks.get(task)
        effect = effect_of(TESTS, found.cases) if found is not None else None
        if found is None or found.fault or effect is None:
            absent.append(found.fault if found is not None else f"{task} was not run")
            continue
        interval = effect.interval(1 - 2 * UNSEEN)
        figures[task] = {
            **interval.as_dict(),
            "confidence": 1 - 2 * UNSEEN,
            "own": effect.sides[0],
            "base": effect.sides[1],
            "n": effect.n,
            "metric": found.metric,
            "bound": -bound,
            "test": "Newcombe" if isinstance(effect, TableEffect) else "Student",
        }
        words = f"{points(effect.value)} on {task} over {effect.n} items"
        if interval.high < -bound:
            lost.append(f"{words} (allowed loss: {100 * bound:g})")
        elif interval.low < -bound:
            open_.append(
                f"{words}: a loss of up to {-100 * interval.low:.1f} cannot be ruled out (allowed loss: "
                f"{100 * bound:g})"
            )
    if lost or open_ or absent:
        return refused("; ".join([*lost, *open_, *absent]), figures, waits=not lost)
    text = ", ".join(f"{points(one['value'])} on {task}" for task, one in figures.items())
    return passed(f"no listed benchmark is worse than the base model's by more than allowed: {text}", figures)


# --- Compared answers ---


CHALLENGER, CHAMPION = "challenger", "champion"
"""Stages a gate opens to. A champion must be better; a challenger must not be worse: live traffic decides."""


def by_likelihood(evidence: Evidence, bounds: GateBounds) -> bool:
    """True if the leading evidence is likelihoods of texts or rewards, which training aims at, and not answers."""
    lead = lead_of(evidence, bounds)
    return lead in (PAIRS, LABELS, OUTCOMES, REWARDS) or (lead == CORRECTIONS and not evidence.discrete)


def needs_judging(evidence: Evidence, bounds: GateBounds, to: str) -> bool:
    """True if people must compare answers before the policy replaces the champion."""
    return to == CHAMPION and evidence.against != BASE and by_likelihood(evidence, bounds)


def only_people_compare(evidence: Evidence, bounds: GateBounds, to: str) -> bool:
    """True if the rival has no likelihoods and no right answer is known, so that only a judging round can decide."""
    barred = {PAIRS, LABELS, OUTCOMES, CORRECTIONS} & evidence.exclusions.keys()
    return (
        needs_judging(evidence, bounds, to) and bool(barred) and not evidence.items(lead_of(evidence, bounds))
    )


def challenger_round(evidence: Evidence, to: str) -> JudgingEvidence | None:
    """The ended round that gives a policy part of the traffic: its answers are better, or not worse than the margin."""
    judging = evidence.judging
    is_enough = judging is not None and judging.ended and judging.verdict in (BETTER, NOT_WORSE)
    return judging if is_enough and to == CHALLENGER else None


def rule_compared(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Its answers were compared: by known right answers, by tests, or by people side by side.

    Likelihoods of recorded answers tell which text a policy finds more probable, not whether it writes better ones.
    Rewards tell what training aimed at. Both may open the challenger stage, and so may a judging round that says
    "better" or "not worse"; a champion needs compared answers that are better, or a live experiment.
    """
    judging = evidence.judging
    if judging is not None and judging.ended and judging.verdict == WORSE:
        return refused(f"judging round {judging.round}: {judging.words}", judging.as_dict())
    if not needs_judging(evidence, bounds, to):
        words = (
            "nothing that people use is replaced"
            if evidence.against == BASE
            else "live traffic compares answers"
        )
        if to == CHAMPION and evidence.against != BASE:
            return passed("its answers were compared with known answers or tests")
        return not_applicable(words)
    if judging is None:
        kind = "rewards" if lead_of(evidence, bounds) == REWARDS else "likelihoods"
        only = "" if only_people_compare(evidence, bounds, to) else f"only {kind} were compared: "
        words = f"{only}nobody compared its answers with those of {evidence.against}"
        return refused(words, waits=True)
    words, figures = f"judging round {judging.round}: {judging.words}", judging.as_dict()
    if not judging.ended:
        return refused(words, figures, waits=True)
    enough = judging.verdict == NOT_WORSE and judging.share.margin <= bounds.not_inferior
    if judging.verdict == BETTER or enough:
        return passed(words, figures)
    if judging.verdict == NOT_WORSE:
        words += (
            " It is not shown to be better, so it may have part of the traffic as a challenger. Promote it by force, "
            "with a reason, or set `not_inferior` in its gate settings to the loss you allow."
        )
    return refused(words, figures, waits=True)
