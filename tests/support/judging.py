"""Judging rounds in the database: an app's recorded answers, a candidate, and pairs of both."""

from typing import Any

from feedback.models import Decision
from feedback.services import decision_record
from rl.models import JudgedPair, JudgingRound, Policy
from rl.registry.judging import pair_next
from tests.support.experiments import policy_of

AGENT = "support-bot"
SIDES = "The candidate's answer", "The app's answer"
"""Beginnings of the answers of both sides."""


def decision_of(number: int, agent: str = AGENT, response: str = "", **facts: Any) -> Decision:
    asked = [
        {
            "role": "user",
            "content": f"Where is parcel {'abcdefghij'[number % 10]}{'klmnopqrst'[number // 10 % 10]}?",
        }
    ]
    return decision_record(
        agent=agent, messages=asked, response=response or f"{SIDES[1]} {number}", **facts
    ).row


def incumbent_of(agent: str = AGENT) -> Policy:
    return Policy.objects.create(
        name=f"{agent}-recorded", agent=agent, kind="recorded", stage="champion", recorded_as=""
    )


def round_of(
    pairs: int = 6, *, same: int = 0, raters: int = 1, agent: str = AGENT, **facts: Any
) -> JudgingRound:
    """A running round of a candidate against recorded answers, `same` of whose pairs have equal answers."""
    opponent = Policy.objects.filter(agent=agent, stage="champion").first() or incumbent_of(agent)
    policy = facts.pop("policy", None) or policy_of(f"{agent}-v9", "candidate", agent)
    judging = JudgingRound.objects.create(
        **{
            "agent": agent,
            "policy": policy,
            "opponent": opponent,
            "status": "running",
            "prompts": pairs,
            "raters": raters,
            "attempt": 1,
            "alpha": 1 / 30,
            **facts,
        }
    )
    for number in range(pairs):
        row = decision_of(number, agent)
        answer = row.response if number < same else f"{SIDES[0]} {number}"
        JudgedPair.objects.create(
            round=judging, decision=row.pk, answer=answer, other_answer=row.response, same=number < same
        )
    return judging


def preference(judging: JudgingRound, rater: str, wanted: str) -> tuple[JudgedPair, str]:
    """The rater's next pair, and the side on which the policy's ("policy") or the opponent's answer stands."""
    shown = pair_next(judging, rater)
    assert shown is not None
    if wanted not in ("policy", "opponent"):
        return shown.pair, wanted
    text = shown.pair.answer if wanted == "policy" else shown.pair.other_answer
    return shown.pair, "left" if shown.left == text else "right"
