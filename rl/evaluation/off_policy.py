"""Off-policy evaluation: what a policy would have earned on decisions sampled among listed candidates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import numpy as np

from feedback.explorer.bulk_readers import (
    ListedChoice,
    listed_choices,
    listed_prompts,
    outcomes_named,
    verdicts_on,
)
from feedback.messages import Message
from feedback.storage.problem_rows import RowReader
from feedback.storage.sql import chunks
from rl.agents import get_agent
from rl.datasets.feedback_types import rating_value
from rl.datasets.rows import recorded_prompts
from rl.datasets.splits import splits_store
from rl.models import RewardRecord, RewardSettings, ServingSettings
from rl.rewards.horizons import outcomes_parsed
from rl.serving.linear import choice_probabilities
from rl.statistics import Difference
from rl.statistics.offpolicy import (
    MIN_DECISIONS,
    Array,
    Draw,
    LoggedChoice,
    OffPolicyRefused,
    Report,
    gain,
    propensity_fault,
    report,
)

MAX_DECISIONS = 400
"""Newest decisions that are scored again: each costs a pass over its prompt and candidates."""
MAX_PROPENSITIES = 5_000
"""Newest decisions whose propensities are tested; this needs no policy, so that trained ones count too."""
REWARD = "reward"
"""Name of the outcome that is the reward of a logged choice, as imports and apps record it."""
BUCKETS = 16
"""Features made of a candidate's words, by hash."""


@dataclass(frozen=True)
class LoggedDecision:
    """A decision among candidates with what it earned."""

    prompt_hash: str
    messages: list[Message]
    responses: list[str]
    chosen: int
    propensity: float
    probabilities: tuple[float, ...] | None
    """Of every candidate when it was logged; None where only the chosen one's is known."""
    reward: float


@dataclass(frozen=True)
class LoggedChoices:
    """Part of an agent's log that off-policy estimates can be made from."""

    rows: list[LoggedDecision]
    kind: str
    """`outcome` (the reward that was logged), `score` (what people said) or `reward` (what was calculated)."""
    decisions: int
    """Held-out decisions with candidates and a propensity, rewarded or not."""
    scale: tuple[float, float] = (0.0, 1.0)
    """The logged rewards that count 0 and 1; the rewards of the rows are in [0, 1]."""
    fault: str = ""
    """Fault of the agent's recorded propensities, in words; empty where none is shown."""


def logged_choices(agent: str, most: int = MAX_DECISIONS) -> LoggedChoices:
    """The newest held-out choices of an agent that have a reward: no policy learnt from their prompts.

    Rewards are what was logged (outcomes named `reward`) where at least MIN_DECISIONS choices have one, else ratings
    where as many have one, else calculated rewards: one scale, never two. Logged rewards in [0, 1] are taken as they
    are, others from their worst to their best, or as the agent's reward settings say what a `reward` is worth.
    """
    splits = splits_store(
        agent, [], unrated=listed_prompts(agent), clustered=partial(recorded_prompts, agent)
    )
    draws: list[Draw] = []
    sample = []
    for row in listed_choices(agent):
        if len(draws) < MAX_PROPENSITIES and (draw := _draw(row)) is not None:
            draws.append(draw)
        if splits.get(row.prompt_hash) == "holdout":
            sample.append(row)
    scale = (0.0, 1.0)
    values = outcomes_named([row.id for row in sample], REWARD)
    if len(values) >= MIN_DECISIONS:
        kind = "outcome"
        scale = _scale(agent, values.values())
        values = {pk: min(1.0, max(0.0, (v - scale[0]) / (scale[1] - scale[0]))) for pk, v in values.items()}
    else:
        values = _scores(sample)
        kind = "score" if len(values) >= MIN_DECISIONS else "reward"
        values = values if kind == "score" else _rewards(sample)
    rows = []
    reader = RowReader(agent, "off-policy")
    for row in sample:
        with reader.row(row.id):
            if row.id in values and (logged := _logged_decision(row, values[row.id])) is not None:
                rows.append(logged)
        if len(rows) == most:
            break
    reader.save()
    return LoggedChoices(rows, kind, len(sample), scale, propensity_fault(draws))


def _scale(agent: str, rewards: Iterable[float]) -> tuple[float, float]:
    """The reward that counts 0 and the one that counts 1."""
    row = RewardSettings.objects.filter(agent=agent).first()
    scale = (outcomes_parsed(row.outcomes) if row else {}).get(REWARD)
    scale = scale or get_agent(agent).reward_facts.outcomes.get(REWARD)
    if scale is not None:
        return scale.bad, scale.good
    found = [0.0, *rewards]
    low, high = min(found), max(found)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _scores(held: Sequence[ListedChoice]) -> dict[UUID, float]:
    found = {}
    for pk, verdicts in verdicts_on([row.id for row in held]).items():
        values = [rating_value(one.thumb, one.stars, one.score) for one in verdicts]
        known = [value for value in values if value is not None]
        if known:
            found[pk] = math.fsum(known) / len(known)
    return found


def _rewards(held: Sequence[ListedChoice]) -> dict[UUID, float]:
    found: dict[UUID, float] = {}
    for chunk in chunks(row.id for row in held):
        rows = RewardRecord.objects.filter(
            decision__in=chunk, superseded_by__isnull=True, value__isnull=False
        )
        found |= {pk: value for pk, value in rows.values_list("decision", "value") if value is not None}
    return found


def _logged_decision(row: ListedChoice, reward: float) -> LoggedDecision | None:
    """None where the response is none of the candidates, or prompt or candidates are not texts."""
    draw = _draw(row)
    if draw is None or not all(isinstance(message.get("content"), str) for message in row.messages):
        return None
    known = None if draw.probabilities is None else tuple(draw.probabilities)
    return LoggedDecision(
        row.prompt_hash, row.messages, list(draw.arms), draw.chosen, row.propensity, known, reward
    )


def _draw(row: ListedChoice) -> Draw | None:
    """The choice among its candidates; None where the response is none of them, or they are not texts."""
    if not isinstance(row.candidates, list):
        return None
    texts = [one.get("response") if isinstance(one, Mapping) else one for one in row.candidates]
    responses = [text for text in texts if isinstance(text, str)]
    if len(responses) != len(texts) or row.response not in responses:
        return None
    shares = [one.get("probability") if isinstance(one, Mapping) else None for one in row.candidates]
    known = [float(share) for share in shares if isinstance(share, (int, float))]
    return Draw(
        responses, responses.index(row.response), row.propensity, known if len(known) == len(shares) else None
    )


# --- From log-probabilities to figures ----------------------------------------------------------------------


def off_policy(
    log: LoggedChoices,
    own: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]] | None,
    serving: ServingSettings,
) -> tuple[dict[str, object], Difference | None]:
    """(figures, difference to the other for the gate) of a policy on logged choices.

    own, other: log-probabilities of each row's candidates, in nats; the choice is drawn from them as the agent's
    serving settings say. The difference is None where there is no other, or the log only answers with a warning.
    Figures are {"refused": why} where it cannot answer at all.
    """
    if log.fault:
        return {"refused": log.fault, "decisions": len(log.rows)}, None
    try:
        mine = report(_choices(log.rows, own, own, serving))
        figures = {"decisions": len(log.rows), "reward": log.kind, "scale": list(log.scale), **mine.as_dict()}
        if other is None:
            return figures, None
        theirs = report(_choices(log.rows, other, own, serving))
    except OffPolicyRefused as refusal:
        return {"refused": _refusal_text(log, refusal), "decisions": len(log.rows)}, None
    difference = gain(mine.best, theirs.best)
    figures |= {
        "against": theirs.as_dict(),
        "difference": difference.as_dict(),
    }
    return figures, None if _warning(mine, theirs) else difference


def _refusal_text(log: LoggedChoices, refusal: OffPolicyRefused) -> str:
    if not log.rows and log.decisions:
        return f"none of {log.decisions} held-out choices with a propensity has a rating or reward yet"
    return str(refusal)


def _warning(*reports: Report) -> bool:
    return any(one.overlap.warnings for one in reports)


def _choices(
    rows: Sequence[LoggedDecision],
    logps: Sequence[Sequence[float]],
    seen: Sequence[Sequence[float]],
    serving: ServingSettings,
) -> list[LoggedChoice]:
    """logps: of the policy judged; seen: what the reward model is shown of each candidate, the same for both sides."""
    return [
        LoggedChoice(
            features=_features(row, view),
            chosen=row.chosen,
            reward=row.reward,
            propensity=row.propensity,
            target=np.array(
                choice_probabilities(
                    list(scores), temperature=serving.choose_temperature, epsilon=serving.epsilon
                )
            ),
            logging_probabilities=np.array(row.probabilities) if row.probabilities is not None else None,
            group=row.prompt_hash,
        )
        for row, scores, view in zip(rows, logps, seen, strict=True)
    ]


def _features(row: LoggedDecision, logps: Sequence[float]) -> Array:
    """(k, d): how a policy ranks a candidate, where it stands in the list, how long it is, its words by hash."""
    shares = choice_probabilities(list(logps), temperature=1.0)
    found = np.zeros((len(row.responses), 3 + BUCKETS))
    for number, text in enumerate(row.responses):
        found[number, :3] = (shares[number], number / len(row.responses), math.log1p(len(text)))
        for word in text.split():
            bucket = int.from_bytes(hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()[:2], "big")
            found[number, 3 + bucket % BUCKETS] += 1.0
    return found
