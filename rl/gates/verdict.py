"""Verdict on a policy: one sentence, one bar, and the next action with its effort. Pure.

Every page, command and endpoint shows this verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.gates.answers import CHAMPION, needs_judging
from rl.gates.effects import ConcordanceEffect, Effect, MeanEffect, TableEffect, effect_of, lead_of
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, OUTCOMES, PAIRS, REWARDS, TESTS
from rl.gates.report import Evidence, GateBounds, GateReport, RuleResult
from rl.statistics.sequential import BETTER

SECONDS_AN_ANSWER = 10
"""Estimated time to rate or compare one answer."""

READY, WAITS, REFUSED, OPEN, SERVING = "ready", "waits", "refused", "not compared", "serving"

COMPARE, RATE, TRAIN, EVALUATE, PROMOTE = "compare", "rate", "train", "evaluate", "promote"


@dataclass(frozen=True)
class Action:
    """The next action and its effort."""

    kind: str
    words: str
    answers: int = 0
    """About how many answers to rate or compare."""
    judging_round: int | None = None
    """Judging round to compare them in; None: the rating queue."""

    @property
    def minutes(self) -> int:
        """About how many minutes it takes; 0 without answers to rate."""
        return max(1, round(self.answers * SECONDS_AN_ANSWER / 60)) if self.answers else 0


def action_of(kind: str, words: str, answers: int = 0) -> Action:
    """An action whose words end with its effort."""
    if not answers:
        return Action(kind, words)
    minutes = Action(kind, words, answers).minutes
    return Action(kind, f"{words}, about {minutes} minute{'' if minutes == 1 else 's'}", answers)


@dataclass(frozen=True)
class VerdictBar:
    """Shares in percent: the policy's, its rival's, and the interval's ends relative to the rival's share."""

    own: float
    rival: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """Result of a policy against its rival."""

    state: str
    """READY, WAITS, REFUSED, OPEN or SERVING."""
    result: str
    """The comparison in one sentence; empty if nothing was compared."""
    standing: str
    """The consequence in one sentence."""
    against: str
    action: Action | None = None
    bar: VerdictBar | None = None
    basis: str = ""
    """Whose ratings these are, in one sentence; empty without ratings."""
    representative: bool | None = None
    """True if the rated prompts were drawn at random, or all prompts on which the two differ are rated; None without
    known answers."""

    caveat: bool = False
    """True if the gate opens and something no rule asks for speaks against a promotion."""

    @property
    def words(self) -> str:
        """Result and standing, as commands and REST show them."""
        return " ".join(filter(None, [self.result, self.standing]))


PREDICATES = {
    PAIRS: ("Prefers the better answer in", "prompts"),
    CORRECTIONS: ("Answers as people wrote in", "held-out prompts"),
    TESTS: ("Passes the tests of", "held-out prompts"),
    KNOWN: ("Right in", "held-out prompts"),
}
"""Kind of right or wrong figures -> beginning of the sentence, and what is counted."""


def result_words(lead: str, effect: Effect, rival: str) -> tuple[str, VerdictBar | None]:
    """The comparison in one sentence with its 95 % interval; its bar if both sides are shares."""
    found = effect.interval(0.95)
    own, other = effect.sides
    bar = None
    if effect.unit == "points":
        gain = f"{100 * found.value:+.0f} points, 95 % interval {100 * found.low:+.0f} to {100 * found.high:+.0f}"
        bar = VerdictBar(100 * own, 100 * other, *(_percent(other + end) for end in (found.low, found.high)))
    else:
        gain = f"{found.value:+.3f} {effect.unit}, 95 % interval {found.low:+.3f} to {found.high:+.3f}"
    begins, of = PREDICATES.get(lead, ("", ""))
    if isinstance(effect, TableEffect) and begins:
        counts = effect.both + effect.wins, effect.both + effect.losses
        return f"{begins} {counts[0]:,} of {effect.n:,} {of}; {rival} in {counts[1]:,} ({gain}).", bar
    if isinstance(effect, MeanEffect) and begins and effect.unit == "points":
        shares = f"{100 * own:.0f} % of {effect.n:,} {of}; {rival} in {100 * other:.0f} %"
        return f"{begins} {shares} ({gain}).", bar
    if isinstance(effect, ConcordanceEffect):
        judges = "what was measured" if lead == OUTCOMES else "people"
        return (
            f"Of two rated answers it moved towards the one that {judges} found better in {100 * own:.0f} % of "
            f"cases, against {rival}; 50 % is chance ({gain}; {effect.n:,} held-out prompts)."
        ), bar
    subject = "Mean reward of its answers" if lead == REWARDS else "Log-likelihood of what people wrote"
    return f"{subject} {own:.3f}; of {rival}'s {other:.3f} ({gain}; {effect.n:,} held-out prompts).", None


def _percent(share: float) -> float:
    return 100 * min(max(share, 0.0), 1.0)


def verdict_compared(
    report: GateReport,
    evidence: Evidence,
    bounds: GateBounds,
    rival: str,
    *,
    further: int = 0,
    sampled: bool = False,
) -> Verdict:
    """Verdict of a gate report. rival: its name for readers; further: about how many rated prompts are missing;
    sampled: the rated prompts were drawn at random."""
    lead = lead_of(evidence, bounds)
    effect = effect_of(lead, evidence.items(lead))
    result, bar = ("", None) if effect is None else result_words(lead, effect, rival)
    basis, representative = _basis(evidence, lead, sampled)
    judging = evidence.judging
    if judging and judging.ended and judging.verdict == BETTER and needs_judging(evidence, bounds, CHAMPION):
        result, bar = judging.words, None  # that is what decides, and likelihoods may point elsewhere
    if report.passed:
        action = action_of(PROMOTE, "promote it")
        return Verdict(READY, result, "Ready to promote.", rival, action, bar, basis, representative)
    harm = [one for one in report.refusals if not one.waits]
    if harm:
        standing = f"Refused: {_sentence(harm[0])}"
        action = action_of(TRAIN, "train again with other data or another recipe")
        return Verdict(REFUSED, result, standing, rival, action, bar, basis, representative)
    standing, action = _missing(report, evidence, effect, bounds, rival, further)
    return Verdict(WAITS, result, standing, rival, action, bar, basis, representative)


def _missing(
    report: GateReport,
    evidence: Evidence,
    effect: Effect | None,
    bounds: GateBounds,
    rival: str,
    further: int,
) -> tuple[str, Action]:
    """Standing of a policy that more evidence may lift, and the next action, by the first rule that waits."""
    rules = {one.rule: one for one in report.refusals}
    differing = len(evidence.open_prompts)
    compare = action_of(COMPARE, f"rate {_answers(differing)} where the two differ", differing)
    rate = action_of(RATE, f"rate {_answers(further)} to other prompts, then evaluate again", further)
    if "evidence" in rules:
        figures = rules["evidence"].figures
        standing = f"Too few to tell: {figures['prompts']} of {figures['needed']} held-out prompts are rated."
        return standing, rate if further else action_of(RATE, "rate more answers, then evaluate again")
    limit = rules["accuracy"].figures.get("margin", bounds.margin) if "accuracy" in rules else bounds.margin
    wanted = f"within {-100 * limit:g} points of" if limit < 0 else "better than"
    if "accuracy" in rules and (effect is None or effect.value <= limit):
        if differing and effect is not None and _could_turn(effect, differing):
            return f"Not {wanted} {rival} by what is known.", compare
        return f"Not {wanted} {rival}.", action_of(TRAIN, "train again on more ratings")
    if "accuracy" in rules:
        attempt = rules["accuracy"].figures.get("attempt", 1)
        standing = f"Not shown to be {wanted} {rival} yet" if limit < 0 else "Not shown to be better yet"
        if effect is not None and effect.interval(0.95).low > limit:
            standing += f": comparison {attempt} on the same prompts asks for more certainty than 95 %"
        if differing:
            return f"{standing}.", compare
        if further:
            return f"{standing}.", rate
        return f"{standing}.", action_of(
            TRAIN, "train again on more ratings: the gain is too small to be shown"
        )
    if "compared" in rules and evidence.judging is not None and not evidence.judging.ended:
        judging = evidence.judging
        action = action_of(
            COMPARE, f"compare {_answers(judging.further or 0)} side by side", judging.further or 0
        )
        return f"Not ready: {judging.words.rstrip('.')}.", replace(action, judging_round=judging.round)
    if "compared" in rules:
        action = action_of(COMPARE, "begin a judging round: people compare its answers side by side")
        return f"Not ready: {_sentence(rules['compared'])}", action
    if "ratings" in rules:
        return f"Not ready: people rated where {rival} was wrong, and hardly anything else.", compare
    first = report.refusals[0]
    return f"Not ready: {_sentence(first)}", rate if further else action_of(
        RATE, "rate more answers, then evaluate again"
    )


def _could_turn(effect: Effect, differing: int) -> bool:
    """True if prompts without a known answer could make the difference positive."""
    return effect.value * effect.n + differing > 0


def _answers(count: int) -> str:
    return f"{count:,} answer{'' if count == 1 else 's'}"


FEW_UNRATED = 0.1
"""Most held-out prompts without a rating, as a share, for which it does not matter who chose what to rate."""


def _basis(evidence: Evidence, lead: str, sampled: bool) -> tuple[str, bool | None]:
    if lead != KNOWN or not evidence.discrete:
        return "", None
    unrated = [one for one in evidence.answer_pairs if not one.said]
    if not any(one.same is False for one in unrated):
        return "Representative: every held-out prompt on which the two differ is rated.", True
    if sampled:
        return "Representative: the rated prompts were drawn at random.", True
    if len(unrated) <= FEW_UNRATED * len(evidence.answer_pairs):
        return "", False
    return "Not representative: people chose what they rated.", False


def _sentence(result: RuleResult) -> str:
    return f"{result.words.rstrip('.')}."


def verdict_open(rival: str, *, newest: str = "") -> Verdict:
    """Verdict of a policy that was not compared with what answers today."""
    standing = f"Not compared with {rival} yet."
    if newest:
        standing = f"Not compared with {rival} yet; its newest comparison is with {newest}."
    return Verdict(OPEN, "", standing, rival, action_of(EVALUATE, f"evaluate it against {rival}"))
