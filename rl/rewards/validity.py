"""Validity floor: an answer that a structured agent cannot act on earns the worst reward. Pure."""

from __future__ import annotations

from rl.agents import get_agent
from rl.agents.base import InvalidResponse
from rl.rewards.base import RAW_LOW, RewardSample


def invalid_reason(sample: RewardSample) -> str:
    """Reason why an agent with a schema, or a closed set of answers, cannot act on a response; empty where it
    can, and for agents of free text."""
    agent = get_agent(sample.agent or "assistant")
    if not agent.discrete:
        return ""
    try:
        agent.parse(sample.response, sample.facts.get("state"))
    except InvalidResponse as error:
        return str(error)[:300]
    return ""


def reward_with_validity(raw: float, sample: RewardSample) -> float:
    """A raw reward in [-2, 2]: -2 for a response that its agent cannot act on.

    A reward model has read answers people rated, which were all valid, so what it says of another kind of text is no
    opinion: without the floor a policy earns more by leaving the form than by answering well.
    """
    return RAW_LOW if invalid_reason(sample) else raw
