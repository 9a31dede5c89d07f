"""Rule of a gate: before a policy replaces one that people use, the answers themselves were compared. Pure.

Likelihoods of recorded answers (pairs, ratings, outcomes, corrections in free words) say which text a policy holds more
probable, not whether what it writes is better. They may open the challenger stage. A champion needs known right
answers, tests, a judging round, or a live experiment, which asks the gate as for a challenger.
"""

from __future__ import annotations

from rl.gates.effects import lead_of
from rl.gates.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS
from rl.gates.report import NOT_APPLICABLE, PASSED, REFUSED, Evidence, GateBounds, RuleResult
from rl.statistics.assignment import BASE
from rl.statistics.sequential import BETTER, NOT_WORSE, WORSE

CHAMPION = "champion"


def by_likelihood(evidence: Evidence, bounds: GateBounds) -> bool:
    """True where the evidence that leads compares likelihoods of texts and not answers."""
    lead = lead_of(evidence, bounds)
    return lead in (PAIRS, LABELS, OUTCOMES) or (lead == CORRECTIONS and not evidence.discrete)


def needs_judging(evidence: Evidence, bounds: GateBounds, to: str) -> bool:
    """True where people must compare answers before the policy takes the champion's place."""
    return to == CHAMPION and evidence.against != BASE and by_likelihood(evidence, bounds)


def only_people_compare(evidence: Evidence, bounds: GateBounds, to: str) -> bool:
    """True where the rival gives answers without likelihoods and no right answer is known: a judging round decides."""
    barred = {PAIRS, LABELS, OUTCOMES, CORRECTIONS} & evidence.exclusions.keys()
    return (
        needs_judging(evidence, bounds, to) and bool(barred) and not evidence.items(lead_of(evidence, bounds))
    )


def rule_compared(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """Answers were compared: by known right answers, tests, or people side by side. A shown loss is harm."""
    judging = evidence.judging
    if judging is not None and judging.ended and judging.verdict == WORSE:
        return RuleResult(
            "compared", REFUSED, f"judging round {judging.round}: {judging.words}", judging.as_dict()
        )
    if not needs_judging(evidence, bounds, to):
        words = (
            "nothing that people use is replaced"
            if evidence.against == BASE
            else "live traffic compares answers"
        )
        if to == CHAMPION and evidence.against != BASE:
            return RuleResult(
                "compared", PASSED, "its answers were compared with known answers, tests or rewards"
            )
        return RuleResult("compared", NOT_APPLICABLE, words)
    if judging is None:
        only = "" if only_people_compare(evidence, bounds, to) else "only likelihoods were compared: "
        words = f"{only}nobody compared its answers with those of {evidence.against}"
        return RuleResult("compared", REFUSED, words, waits=True)
    words, figures = f"judging round {judging.round}: {judging.words}", judging.as_dict()
    if not judging.ended:
        return RuleResult("compared", REFUSED, words, figures, waits=True)
    if judging.verdict == BETTER:
        return RuleResult("compared", PASSED, words, figures)
    if judging.verdict == NOT_WORSE:
        words += " It is not shown to be better: promote it by force, with a reason, if not worse is enough."
    return RuleResult("compared", REFUSED, words, figures, waits=True)
