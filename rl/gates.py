"""May this policy move up? Rules as pure functions of figures, each with its verdict. No Django, no torch.

A gate is asked again and again on much the same held-out prompts, so luck is paid for: the first attempt on a holdout
may spend two thirds of `alpha`, the k-th one third of 1 / ((k - 1) k). These shares sum to 1, so whatever attempts have
to do with each other (union bound) a policy no better than the champion gets past the accuracy rule at most `alpha` of
the time over ALL of them together. How they count on a holdout that grows: `attempt_number`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import scipy

from rl.gate_sheets import (
    NOT_APPLICABLE,
    OLDER,
    PASSED,
    REFUSED,
    Case,
    Evidence,
    GateBounds,
    GateError,
    Sheet,
    Verdict,
)
from rl.statistics import mcnemar_unconditional, mean_interval, paired_difference

CHALLENGER, CHAMPION = "challenger", "champion"
"""What a gate may open to. A champion must be better; a challenger must not be worse, as live traffic decides on."""


FIRST_SHARE = 2 / 3
"""Of alpha, what the first attempt may spend. Each new champion begins a new count, so most attempts are first ones."""


def alpha_of_attempt(alpha: float, attempt: int) -> float:
    """What the k-th attempt may spend: 2/3, 1/6, 1/18, 1/36, ... of alpha, summing to alpha."""
    if attempt < 1:
        raise GateError(f"attempts count from 1, found {attempt}")
    return alpha * (FIRST_SHARE if attempt == 1 else (1 - FIRST_SHARE) / (attempt * (attempt - 1)))


REMEMBERED = 2
"""What the looks at much smaller holdouts count for together. Where a holdout grows by as much with each look, from
nothing on, the numbers are 1, 3, 4, 4, 5, 5, ... and may spend 2/3 + 1/18 + 2 (1/36 + 1/60 + ...) = 17/18 of alpha."""


def attempt_number(looked_at: Sequence[int], samples: int) -> int:
    """The number of a look at a holdout of `samples` prompts; `looked_at`: the sizes at all looks so far, itself among
    them. Looks at holdouts of at most half the size count for REMEMBERED: most of what is looked at now is new.
    """
    small = sum(2 * size <= samples for size in looked_at)
    return max(len(looked_at) - small, 1) + (REMEMBERED if small else 0)


def points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def _table(cases: Sequence[Case]) -> tuple[int, int, int, int]:
    """Both right, own alone, other alone, neither."""
    own_only = sum(case.own and not case.other for case in cases)
    other_only = sum(case.other and not case.own for case in cases)
    both = sum(case.own and case.other for case in cases)
    return both, own_only, other_only, len(cases) - both - own_only - other_only


def _luck(wins: int, losses: int) -> float:
    """Chance of so many wins or more among the discordant pairs of two equal policies (exact binomial)."""
    return float(scipy.stats.binom.sf(wins - 1, wins + losses, 0.5)) if wins + losses else 1.0


# --- The rules ----------------------------------------------------------------------------------------------


def rule_evidence(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """Enough held-out prompts to say anything."""
    found = len(evidence.cases)
    figures = {"prompts": found, "needed": bounds.min_evidence}
    if found < bounds.min_evidence:
        return Verdict(
            "evidence",
            REFUSED,
            f"{found} held-out prompts were judged, {bounds.min_evidence} are needed",
            figures,
            waits=True,
        )
    return Verdict("evidence", PASSED, f"{found} held-out prompts were judged", figures)


def rule_accuracy(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """Better than the champion on the same prompts, beyond the luck of repeated attempts (challenger: not worse).

    The lower bound is Newcombe's of the paired difference at one-sided confidence 1 - alpha_k; the exact unconditional
    test must agree that it is no chance, because at small alpha_k the bound is only approximate.
    """
    if not evidence.cases:
        return Verdict("accuracy", REFUSED, "no held-out prompt was judged on both sides", waits=True)
    both, wins, losses, neither = _table(evidence.cases)
    alpha = alpha_of_attempt(bounds.alpha, evidence.attempt)
    found = paired_difference(both, wins, losses, neither, confidence=1 - 2 * alpha)
    luck = mcnemar_unconditional(wins, losses, len(evidence.cases))
    figures = {
        **found.as_dict(),
        "accuracy": (both + wins) / len(evidence.cases),
        "against_accuracy": (both + losses) / len(evidence.cases),
        "n": len(evidence.cases), "wins": wins, "losses": losses, "p": luck,
        "attempt": evidence.attempt, "alpha": alpha, "margin": bounds.margin,
    }  # fmt: skip
    said = f"{points(found.value)} in preference accuracy against {evidence.against}"
    if to == CHALLENGER:
        worse = _luck(losses, wins) <= bounds.alpha
        words = f"worse than {evidence.against}: {said}" if worse else f"not worse: {said}"
        return Verdict("accuracy", REFUSED if worse else PASSED, words, figures)
    bound = f"lower bound {points(found.low)} at attempt {evidence.attempt} on this holdout"
    if found.low > bounds.margin and luck <= alpha:
        return Verdict("accuracy", PASSED, f"{said}, {bound}", figures)
    return Verdict(
        "accuracy", REFUSED, f"no gain beyond chance is shown: {said}, {bound}, must be above {points(bounds.margin)}",
        figures, waits=True,
    )  # fmt: skip


def rule_raters(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """The gain is not one rater's alone.

    It is where the prompts of the others show none beyond chance, and they lost, or gained surely less than that rater
    (one-sided exact test of Fisher on the wins and losses of the two groups, 5 %). Fewer prompts alone are no reproach.
    """
    known = [case for case in evidence.cases if case.raters]
    if not known:
        return Verdict("raters", NOT_APPLICABLE, "it is not known who judged the held-out prompts")
    count: dict[str, int] = {}
    for case in known:
        for rater in set(case.raters):
            count[rater] = count.get(rater, 0) + 1
    frequent = [rater for rater, n in count.items() if n > bounds.max_rater_share * len(known)]
    if len(count) < 2:
        return Verdict("raters", NOT_APPLICABLE, "all held-out prompts were judged by one rater")
    alpha = alpha_of_attempt(bounds.alpha, evidence.attempt)
    _, all_wins, all_losses, _ = _table(known)
    if mcnemar_unconditional(all_wins, all_losses, len(known)) > alpha:
        return Verdict(
            "raters", NOT_APPLICABLE, "there is no gain beyond chance yet that could rest on one rater"
        )
    figures: dict[str, Any] = {"raters": len(count), "without": {}}
    alone = []
    for rater in sorted(frequent):
        rest = [case for case in known if rater not in case.raters]
        if len(rest) < bounds.min_evidence:
            continue  # too few others to contradict
        _, wins, losses, _ = _table(rest)
        left = (wins - losses) / len(rest)
        figures["without"][rater] = left
        table = [[all_wins - wins, all_losses - losses], [wins, losses]]
        unlike = float(scipy.stats.fisher_exact(table, alternative="greater").pvalue) <= 0.05
        if mcnemar_unconditional(wins, losses, len(rest)) > alpha and (wins <= losses or unlike):
            alone.append((rater, left))
    if alone:
        rater, left = alone[0]
        return Verdict(
            "raters", REFUSED,
            f"the gain rests on one rater: without {rater}'s {count[rater]} of {len(known)} prompts it is "
            f"{points(left)}",
            figures,
        )  # fmt: skip
    return Verdict("raters", PASSED, "the gain stands without any one frequent rater", figures)


def rule_reward(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """The mean reward of its answers is not worse."""
    if not evidence.answered:
        return Verdict("reward", NOT_APPLICABLE, "no prompt was answered by both")
    found = mean_interval([one.reward - one.other_reward for one in evidence.answered], bounds=(-1.0, 1.0))
    assert found.value is not None  # there is at least one
    figures = {**found.as_dict(), "bound": -bounds.max_reward_loss}
    surely = found.n > 1 and found.high is not None and found.high < 0
    if found.value < -bounds.max_reward_loss or surely:
        said = f"the average reward fell by {-found.value:.3f}"
        return Verdict("reward", REFUSED, said, figures, waits=not surely)
    return Verdict("reward", PASSED, f"the average reward changed by {found.value:+.3f}", figures)


def rule_valid(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """The agent can act on as many of its answers."""
    if not evidence.answered:
        return Verdict("valid", NOT_APPLICABLE, "no prompt was answered by both")
    n = len(evidence.answered)
    own = sum(one.valid for one in evidence.answered) / n
    other = sum(one.other_valid for one in evidence.answered) / n
    figures = {"value": own, "against": other, "n": n, "bound": -bounds.max_invalid_gain}
    said = f"{100 * own:.1f} % of its answers are valid, of {evidence.against}'s {100 * other:.1f} %"
    if own - other >= -bounds.max_invalid_gain:
        return Verdict("valid", PASSED, said, figures)
    losses = sum(one.other_valid and not one.valid for one in evidence.answered)
    wins = sum(one.valid and not one.other_valid for one in evidence.answered)
    return Verdict("valid", REFUSED, said, figures, waits=_luck(losses, wins) > 0.05)


def rule_kl(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """It has not gone further from the base model than allowed."""
    if evidence.kl is None:
        return Verdict("kl", NOT_APPLICABLE, "its distance to the base model was not measured")
    figures = {"value": evidence.kl, "bound": bounds.max_kl}
    said = f"{evidence.kl:.2f} nats per token from the base model, {bounds.max_kl:g} allowed"
    return Verdict("kl", REFUSED if not evidence.kl <= bounds.max_kl else PASSED, said, figures)


def rule_slices(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """No slice (tag, topic, length, which side is longer) loses more than the bound, where that is not chance.

    The 5 % of chance are shared among the slices (Bonferroni): of thirty, one or two would look broken by luck.
    """
    slices: dict[str, list[Case]] = {}
    for case in evidence.cases:
        for name in case.slices:
            if name == OLDER:
                continue  # a rule of its own
            slices.setdefault(name, []).append(case)
    judged = {name: cases for name, cases in slices.items() if len(cases) >= bounds.min_slice}
    if not judged:
        return Verdict("slices", NOT_APPLICABLE, f"no slice has {bounds.min_slice} held-out prompts")
    figures, broken = {}, []
    for name, cases in sorted(judged.items()):
        _, wins, losses, _ = _table(cases)
        change = (wins - losses) / len(cases)
        figures[name] = {"value": change, "n": len(cases)}
        if change < -bounds.max_slice_loss and _luck(losses, wins) <= 0.05 / len(judged):
            broken.append((change, name, len(cases)))
    if broken:
        change, name, n = min(broken)
        others = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return Verdict(
            "slices", REFUSED, f"worse on slice {name}: {points(change)} over {n} prompts{others}", figures
        )
    return Verdict("slices", PASSED, f"none of {len(judged)} slices is worse", figures)


def rule_forgetting(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """What the champion's time knew is still known: no loss beyond chance on held-out prompts with older feedback."""
    known = [case for case in evidence.cases if OLDER in case.slices]
    if len(known) < bounds.min_slice:
        return Verdict(
            "forgetting",
            NOT_APPLICABLE,
            f"{len(known)} held-out prompts have feedback that {evidence.against} knew, {bounds.min_slice} are asked",
        )
    both, wins, losses, neither = _table(known)
    found = paired_difference(both, wins, losses, neither)
    own, other = (both + wins) / len(known), (both + losses) / len(known)
    figures = {
        **found.as_dict(), "n": len(known), "accuracy": own, "against_accuracy": other, "p": _luck(losses, wins),
    }  # fmt: skip
    said = (
        f"on {len(known)} prompts with older feedback {100 * own:.1f} % are right, {100 * other:.1f} % of "
        f"{evidence.against}'s"
    )
    if losses > wins and _luck(losses, wins) <= 0.05:
        return Verdict("forgetting", REFUSED, f"it forgot: {said}", figures)
    return Verdict("forgetting", PASSED, said, figures)


def rule_golden(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """Every decision that must be right is right."""
    if not evidence.golden:
        return Verdict("golden", NOT_APPLICABLE, "no golden cases are listed for this agent")
    failed = [case for case in evidence.golden if not case.passed]
    figures = {"n": len(evidence.golden), "failed": [dataclasses.asdict(case) for case in failed]}
    if failed:
        names = ", ".join(case.name for case in failed[:3])
        return Verdict(
            "golden", REFUSED, f"{len(failed)} of {len(evidence.golden)} golden cases fail: {names}", figures
        )
    return Verdict("golden", PASSED, f"all {len(evidence.golden)} golden cases are right", figures)


def rule_length(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """Answers did not grow or shrink: preference rewards length, so length is the cheapest way to look better."""
    ratios = [math.log((one.chars + 1) / (one.other_chars + 1)) for one in evidence.answered]
    if not ratios:
        return Verdict("length", NOT_APPLICABLE, "no prompt was answered by both")
    ratio = math.exp(math.fsum(ratios) / len(ratios))
    figures = {"value": ratio, "n": len(ratios), "bound": bounds.max_length_ratio}
    said = f"its answers are {ratio:.2f} times as long as {evidence.against}'s"
    if not 1 / bounds.max_length_ratio <= ratio <= bounds.max_length_ratio:
        return Verdict("length", REFUSED, f"{said}, {bounds.max_length_ratio:g} is allowed", figures)
    return Verdict("length", PASSED, said, figures)


def rule_off_policy(evidence: Evidence, bounds: GateBounds, to: str) -> Verdict:
    """What it would have earned on logged decisions is not less than what the champion earned."""
    found = evidence.off_policy
    if found is None:
        return Verdict(
            "off_policy", NOT_APPLICABLE, "no decisions with propensities and rewards to estimate from"
        )
    figures = {**found.as_dict(), "bound": -bounds.max_off_policy_loss}
    said = f"the off-policy estimate of its reward is {found.value:+.3f} from the champion's"
    worse = found.value < -bounds.max_off_policy_loss or found.high < 0
    return Verdict("off_policy", REFUSED if worse else PASSED, said, figures)


Rule = Callable[[Evidence, GateBounds, str], Verdict]

RULES: tuple[Rule, ...] = (
    rule_evidence,
    rule_accuracy,
    rule_raters,
    rule_reward,
    rule_valid,
    rule_kl,
    rule_slices,
    rule_forgetting,
    rule_golden,
    rule_length,
    rule_off_policy,
)
"""In the order in which a sheet shows them."""


def gate_judge(evidence: Evidence, bounds: GateBounds, to: str = CHAMPION) -> Sheet:
    """Ask every rule; nothing is skipped, so that a refusal names all its reasons."""
    if to not in (CHALLENGER, CHAMPION):
        raise GateError(f"a gate opens to {CHALLENGER} or {CHAMPION}, found {to!r}")
    return Sheet(to, evidence.against, tuple(rule(evidence, bounds, to) for rule in RULES))
