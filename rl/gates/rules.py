"""Rules of a gate as pure functions of evidence, and the judgement of all of them. No Django, no torch.

A gate judges again and again on nearly the same held-out prompts, so attempts share `alpha`: the first may spend two
thirds of it, the k-th one third of 1 / ((k - 1) k). The shares sum to 1. By the union bound a policy no better than the
champion passes the accuracy rule with probability at most `alpha` over ALL attempts on a holdout that stays or grows.
Every evaluation counts (`rl.registry.gate_evidence.attempt_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import scipy

from rl.gates.answers import (
    CHALLENGER,
    CHAMPION,
    by_likelihood,
    challenger_round,
    needs_judging,
    only_people_compare,
    rule_benchmarks,
    rule_compared,
    rule_fields,
    rule_general,
    rule_golden,
    rule_kl,
    rule_length,
    rule_off_policy,
    rule_reward,
    rule_valid,
)
from rl.gates.effects import (
    Effect,
    TableEffect,
    amount,
    effect_of,
    lead_of,
    prompts_of,
)
from rl.gates.evidence_kinds import (
    CORRECTIONS,
    KINDS,
    KNOWN,
    LABELS,
    MEASURES,
    OUTCOMES,
    PAIRS,
    POOLED,
    REWARDS,
    TESTS,
    Figures,
)
from rl.gates.report import (
    OLDER,
    Evidence,
    GateBounds,
    GateError,
    GateReport,
    Item,
    RuleResult,
    not_applicable,
    passed,
    refused,
)
from rl.statistics import Difference
from rl.statistics.assignment import BASE

FIRST_SHARE = 2 / 3
"""Share of alpha for the first attempt. A new champion starts a new count, so most attempts are first ones."""


def alpha_of_attempt(alpha: float, attempt: int) -> float:
    """Error probability of the k-th attempt: 2/3, 1/6, 1/18, 1/36, ... of alpha, summing to alpha."""
    if attempt < 1:
        raise GateError(f"attempts count from 1, found {attempt}")
    return alpha * (FIRST_SHARE if attempt == 1 else (1 - FIRST_SHARE) / (attempt * (attempt - 1)))


# --- The rules ----------------------------------------------------------------------------------------------

EVIDENCE_WORDS = {
    PAIRS: "",
    LABELS: " with thumbs, stars or scores",
    CORRECTIONS: " with answers that people wrote",
    TESTS: " with tests",
    KNOWN: " with a known answer",
    OUTCOMES: " with outcomes",
    REWARDS: " that reward functions apply to",
}
"""Kind of evidence -> what its held-out prompts have."""


NO_LIKELIHOODS = "{rival} gives answers alone, so people compare them side by side"


def rule_evidence(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """There are enough held-out prompts. Not asked if only a judging round can decide."""
    if only_people_compare(evidence, bounds, to):
        return not_applicable(NO_LIKELIHOODS.format(rival=evidence.against))
    lead = lead_of(evidence, bounds)
    found = prompts_of(evidence.items(lead))
    counts = {kind: n for kind in KINDS if (n := prompts_of(evidence.items(kind)))}
    figures = {"prompts": found, "needed": bounds.min_evidence, "kind": lead, "kinds": counts}
    words = f"{found} held-out prompts{EVIDENCE_WORDS[lead]}"
    reasons: dict[str, list[str]] = {}
    for kind, why in evidence.exclusions.items():
        if lead != KNOWN or kind not in POOLED:  # known answers hold what the others say
            reasons.setdefault(why, []).append(kind)
    if barred := [f"{', '.join(kinds)} are not used: {why}" for why, kinds in reasons.items()]:
        words += f" ({'; '.join(barred)})"
    if evidence.near_identical:
        words += f" ({evidence.near_identical})"
    if found < bounds.min_evidence and (judging := challenger_round(evidence, to)) is not None:
        return passed(f"{words}; answers compared in judging round {judging.round} are enough", figures)
    if found < bounds.min_evidence:
        words += f", at least {bounds.min_evidence} are needed"
        return refused(words, figures, waits=True)
    return passed(words, figures)


TICKET = " (a ticket to 1 % of the traffic, no proof: few prompts hide a loss)"
"""Added to the words of a challenger that passes."""


def rule_accuracy(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Better than the champion on the same prompts, beyond the luck of repeated attempts; or not inferior to it.

    With `not_inferior` a loss of that many points must be excluded instead: the bound must exceed minus the margin, and
    the exact test of that hypothesis must agree. A challenger must only not be worse; so must a champion if likelihoods
    lead, as `rule_compared` decides then. Judged on the leading kind (`lead_of`). The gain's one-sided lower bound at
    confidence 1 - alpha_k must exceed the margin, and the kind's exact test must agree: at small alpha_k the bound is
    approximate. Pairs, tests: Newcombe's bound and the exact unconditional test. Labels, outcomes: concordance with its
    studentised permutation test. Figures: Student's bound and the sign-flip test.
    """
    if only_people_compare(evidence, bounds, to):
        return not_applicable(NO_LIKELIHOODS.format(rival=evidence.against))
    lead = lead_of(evidence, bounds)
    items = evidence.items(lead)
    if not items and (judging := challenger_round(evidence, to)) is not None:
        words = f"judging round {judging.round}: {judging.words}"
        return passed(words, judging.as_dict())
    if not items:
        return refused("no held-out prompt has evidence on both policies", waits=True)
    effect = effect_of(lead, items)
    if effect is None:
        n = prompts_of(items)
        return refused(
            f"all answers to the {n} held-out prompts have the same rating, so nothing can be compared",
            {"kind": lead, "n": n},
            waits=True,
        )
    alpha = alpha_of_attempt(bounds.alpha, evidence.attempt)
    bound = gate_interval(effect, evidence, bounds)
    allowed = allowed_loss(evidence, bounds, to)
    limit = -allowed if allowed else bounds.margin
    # a permutation test is slow, and skipped if the bound refuses already
    is_above = bound.low > limit
    luck = None
    if is_above or isinstance(effect, TableEffect):
        luck = effect.not_inferior(allowed, alpha) if allowed else effect.better(alpha)
    own, other = effect.sides
    figures: dict[str, object] = {
        **bound.as_dict(),
        "kind": lead,
        "unit": effect.unit,
        "confidence": 1 - 2 * alpha,
        "accuracy": own,
        "against_accuracy": other,
        "n": effect.n,
        "p": luck,
        "attempt": evidence.attempt,
        "alpha": alpha,
        "margin": limit,
    }
    if isinstance(effect, TableEffect):
        figures |= {"wins": effect.wins, "losses": effect.losses}
    gain = f"{amount(effect, bound.value)} {MEASURES[lead]} against {evidence.against}"
    if to == CHALLENGER or needs_judging(evidence, bounds, to):
        worse = effect.worse(bounds.alpha) <= bounds.alpha
        words = f"worse than {evidence.against}: {gain}" if worse else f"not shown to be worse: {gain}"
        words += TICKET if to == CHALLENGER and not worse else ""
        words += "; compared answers decide" if to == CHAMPION and not worse else ""
        return (refused if worse else passed)(words, figures)
    lowest = (
        f"lower bound {amount(effect, bound.low)} (comparison {evidence.attempt} on these held-out prompts)"
    )
    if is_above and luck is not None and luck <= alpha:
        shown = f"not worse by {100 * allowed:g} points: " if allowed else ""
        return passed(f"{shown}{gain}, {lowest}", figures)
    missing = f"{lowest}, which must be above {amount(effect, limit)}"
    if is_above and luck is not None:  # the bound is approximate, the test is exact
        missing = (
            f"which chance gives in {100 * luck:.1f} % of comparisons; at most {100 * alpha:.1f} % is allowed"
        )
    wanted = f"a loss of {100 * allowed:g} points is not ruled out" if allowed else "not shown to be better"
    return refused(f"{wanted}: {gain}, {missing}", figures, waits=True)


def allowed_loss(evidence: Evidence, bounds: GateBounds, to: str) -> float:
    """The margin of `not_inferior` if that is the question: a champion is replaced, and its right answers are known.

    0 if a gain is asked for. Likelihoods have no margin in right answers: a judging round answers for them.
    """
    asked = to == CHAMPION and evidence.against != BASE and not by_likelihood(evidence, bounds)
    return bounds.not_inferior if asked else 0.0


def gate_interval(effect: Effect, evidence: Evidence, bounds: GateBounds) -> Difference:
    """The interval whose lower end the accuracy rule reads: two-sided, confidence 1 - 2 alpha_k."""
    return effect.interval(1 - 2 * alpha_of_attempt(bounds.alpha, evidence.attempt))


def rule_other_evidence(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """No other kind with enough prompts shows a loss beyond chance; 5 % are shared among them (Bonferroni).

    Kinds within the known answers are left out if those lead.
    """
    lead = lead_of(evidence, bounds)
    asked = POOLED if lead == KNOWN and evidence.discrete else ()
    effects = {
        kind: effect
        for kind in KINDS
        if kind != lead
        and kind not in asked
        and prompts_of(evidence.items(kind)) >= bounds.min_evidence
        and (effect := effect_of(kind, evidence.items(kind))) is not None
    }
    if not effects:
        return not_applicable(f"no other kind of evidence has {bounds.min_evidence} held-out prompts")
    level = 0.05 / len(effects)
    figures, lost = {}, []
    for kind, effect in effects.items():
        p = effect.worse(level)
        figures[kind] = {**effect.interval(0.95).as_dict(), "n": effect.n, "unit": effect.unit, "p": p}
        if effect.value < 0 and p <= level:
            lost.append(f"{amount(effect, effect.value)} {MEASURES[kind]} over {effect.n} prompts")
    if lost:
        return refused(f"worse by other kinds of evidence: {'; '.join(lost)}", figures)
    text = ", ".join(f"{amount(effect, effect.value)} {MEASURES[kind]}" for kind, effect in effects.items())
    return passed(f"not shown to be worse by other kinds of evidence: {text}", figures)


UNLIKE = 0.4
"""One-sided level below which rated prompts count as unlike unrated ones."""


def rule_ratings(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Rated prompts are like unrated ones: people did not only complain about the rival.

    If only complaints are rated, the rival is wrong on every rated prompt and any candidate looks better. On unrated
    prompts the right answer is unknown, but agreement of both sides is known, and they agree more often where the rival
    is right. So more agreement on unrated than on rated prompts shows complaints (Fisher's exact test, `UNLIKE`).
    Ratings that the queue asked for count as unrated: nobody chose them. Waits: ratings of the prompts on which the two
    differ settle it.
    """
    answered = [one for one in evidence.answer_pairs if one.same is not None]
    rated = [one for one in answered if one.said and not one.asked]
    unrated = [one for one in answered if not one.said or one.asked]
    of_rival = sum(one.other_said for one in rated)
    if lead_of(evidence, bounds) != KNOWN or 2 * of_rival <= len(rated):
        return not_applicable(f"it is not {evidence.against}'s answers that people rated")
    if not any(one.same is False for one in answered if not one.said):
        return not_applicable("every held-out prompt on which the two differ is rated")
    counts = [
        [sum(bool(one.same) for one in some), sum(not one.same for one in some)] for some in (unrated, rated)
    ]
    p = float(scipy.stats.fisher_exact(counts, alternative="greater").pvalue)
    figures = {
        "rated": len(rated),
        "unrated": len(unrated),
        "agree_rated": counts[1][0] / len(rated),
        "agree_unrated": counts[0][0] / len(unrated),
        "differ_unrated": counts[0][1],
        "p": p,
        "bound": UNLIKE,
    }
    words = (
        f"the two answer alike on {100 * figures['agree_rated']:.0f} % of {len(rated)} rated prompts and on "
        f"{100 * figures['agree_unrated']:.0f} % of {len(unrated)} unrated ones"
    )
    if p <= UNLIKE:
        words += f": ratings seem to be complaints about {evidence.against}, so any other policy looks better on them"
        return refused(words, figures, waits=True)
    return passed(words, figures)


def rule_raters(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """The gain is not one rater's alone.

    Refused if the prompts of the others show no gain beyond chance, and show a loss or a significantly smaller gain
    (one-sided test of two groups, 5 %; Fisher's exact test for wins and losses). Fewer prompts alone are no reason.
    """
    lead = lead_of(evidence, bounds)
    items = evidence.items(lead)
    rated_items = [item for item in items if item.raters]
    if not rated_items:
        return not_applicable("the raters of the held-out prompts are not recorded")
    count: dict[str, int] = {}
    for item in rated_items:
        for rater in set(item.raters):
            count[rater] = count.get(rater, 0) + 1
    frequent = [rater for rater, n in count.items() if n > bounds.max_rater_share * len(rated_items)]
    if len(count) < 2:
        return not_applicable("one rater rated all held-out prompts")
    alpha = alpha_of_attempt(bounds.alpha, evidence.attempt)
    whole = effect_of(lead, rated_items, items)
    if whole is None or whole.better(alpha) > alpha:
        return not_applicable("no gain is shown yet, so none can depend on one rater")
    figures: dict[str, Any] = {"raters": len(count), "without": {}}
    alone = []
    for rater in sorted(frequent):
        rest = [item for item in rated_items if rater not in item.raters]
        if prompts_of(rest) < bounds.min_evidence:
            continue  # too few others to contradict
        left = effect_of(lead, rest, items)
        theirs = effect_of(lead, [one for one in rated_items if rater in one.raters], items)
        if left is None:
            continue
        figures["without"][rater] = left.value
        unlike = theirs is not None and theirs.p_larger(left) <= 0.05
        if left.better(alpha) > alpha and (left.value <= 0 or unlike):
            alone.append((rater, left))
    if alone:
        rater, left = alone[0]
        return refused(
            f"the gain depends on one rater: without {rater}'s {count[rater]} of {len(rated_items)} prompts it is "
            f"{amount(left, left.value)}",
            figures,
        )
    return passed("the gain does not depend on any one rater", figures)


def rule_slices(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """No slice (tag, topic, length, which side is longer) loses more than the bound, beyond chance.

    5 % are shared among the slices (Bonferroni): of thirty, one or two would otherwise look broken by luck.
    """
    lead = lead_of(evidence, bounds)
    slices: dict[str, list[Item]] = {}
    for item in evidence.items(lead):
        for name in item.slices:
            if name == OLDER:
                continue  # a rule of its own
            slices.setdefault(name, []).append(item.restrict_to_slice(name))
    whole = evidence.items(lead)
    large = {name: items for name, items in slices.items() if prompts_of(items) >= bounds.min_slice}
    effects = {
        name: effect for name, items in large.items() if (effect := effect_of(lead, items, whole)) is not None
    }
    if not effects:
        return not_applicable(f"no slice has {bounds.min_slice} held-out prompts")
    figures, broken = {}, []
    for name, effect in sorted(effects.items()):
        figures[name] = {"value": effect.value, "n": effect.n}
        level = 0.05 / len(effects)
        if effect.value < -bounds.max_slice_loss and effect.worse(level) <= level:
            broken.append((effect.value, name, effect))
    if broken:
        change, name, effect = min(broken, key=lambda one: one[:2])
        others = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return refused(
            f"worse on slice {name}: {amount(effect, change)} over {effect.n} prompts{others}", figures
        )
    return passed(f"no slice is worse, of {len(effects)}", figures)


def rule_forgetting(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """No loss beyond chance on held-out prompts with feedback older than the champion."""
    lead = lead_of(evidence, bounds)
    known = [item.restrict_to_slice(OLDER) for item in evidence.items(lead) if OLDER in item.slices]
    effect = effect_of(lead, known, evidence.items(lead))
    n = prompts_of(known)
    if n < bounds.min_slice or effect is None:
        return not_applicable(
            f"{n} held-out prompts have feedback older than {evidence.against}, at least "
            f"{bounds.min_slice} are needed"
        )
    own, other = effect.sides
    p = effect.worse()
    figures = {**effect.interval(0.95).as_dict(), "n": n, "accuracy": own, "against_accuracy": other, "p": p}
    text = f"{amount(effect, effect.value)} {MEASURES[lead]} on {n} prompts with older feedback"
    if isinstance(effect, TableEffect):
        text = (
            f"on {n} prompts with older feedback it is right in {100 * own:.1f} %, {evidence.against} in "
            f"{100 * other:.1f} %"
        )
    if effect.value < 0 and p <= 0.05:
        return refused(f"worse on older feedback: {text}", figures)
    return passed(text, figures)


Rule = Callable[[Evidence, GateBounds, str], RuleResult]

RULES: tuple[Rule, ...] = (
    rule_evidence,
    rule_accuracy,
    rule_compared,
    rule_other_evidence,
    rule_ratings,
    rule_raters,
    rule_reward,
    rule_fields,
    rule_valid,
    rule_kl,
    rule_general,
    rule_slices,
    rule_forgetting,
    rule_golden,
    rule_length,
    rule_off_policy,
)
"""In the order of a report."""


def gate_judge(evidence: Evidence, bounds: GateBounds, to: str = CHAMPION) -> GateReport:
    """Applies every rule, so that a refusal names all its reasons; benchmarks only if the bounds list any."""
    if to not in (CHALLENGER, CHAMPION):
        raise GateError(f"a gate opens to {CHALLENGER} or {CHAMPION}, found {to!r}")
    rules = (*RULES, rule_benchmarks) if bounds.benchmark_bounds else RULES
    results = (
        replace(rule(evidence, bounds, to), rule=rule.__name__.removeprefix("rule_")) for rule in rules
    )
    return GateReport(to, evidence.against, tuple(results))


# --- Outlook ---


MAX_PROMPTS = 100_000
"""Largest estimate; more prompts than this are out of reach."""


def prompts_to_show(value: float, low: float, margin: float, n: int, widening: float = 1.0) -> int | None:
    """Held-out prompts at which the interval's lower end reaches the margin, if the difference stays at `value`.

    value, low: the difference and its lower end over n prompts; the width shrinks with the square root of n. widening:
    ratio of the next interval's width to this one's at equal n. None if the difference does not exceed the margin. An
    estimate: the difference itself has an error.
    """
    if value <= margin:
        return None
    wanted = n * ((value - low) * widening / (value - margin)) ** 2
    return min(math.ceil(wanted), MAX_PROMPTS) if math.isfinite(wanted) else MAX_PROMPTS


def prompts_for_gain(figures: Figures, alpha: float) -> int | None:
    """`prompts_to_show` for the accuracy rule's stored figures at the next attempt, which gets a smaller share of
    `alpha`."""
    value, low, n = (figures.get(name) for name in ("value", "low", "n"))
    attempt = figures.get("attempt")
    if value is None or low is None or not n or attempt is None:
        return None
    normal = NormalDist()
    now, then = (normal.inv_cdf(1 - alpha_of_attempt(alpha, number)) for number in (attempt, attempt + 1))
    return prompts_to_show(value, low, figures.get("margin", 0.0), n, then / now)
