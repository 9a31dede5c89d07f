"""Agents without code: defined by an operator, or inferred from their recorded responses."""

from __future__ import annotations

from feedback.cache import TTLCache
from feedback.explorer.bulk_readers import corrections_recorded, responses_recorded
from rl.agents import AGENTS, get_agent
from rl.agents.base import Agent
from rl.agents.inference import LEAST_RESPONSES, agent_inferred, closed_answers
from rl.models import AgentDefinition
from rl.models.learning import IN_PROCESS

RESPONSES = 300
"""Newest recorded responses an agent is inferred from."""

_repeated_cache: TTLCache[tuple[str, ...]] = TTLCache(size=1_000)
_inference_cache: TTLCache[Agent | None] = TTLCache(size=1_000)
_definition_cache: TTLCache[dict[str, Agent]] = TTLCache(size=1)


def agent_defined(slug: str) -> Agent | None:
    """The defined agent of a slug, or None; cached for FEEDBACK_REMEMBER_S seconds."""
    return _definition_cache.get("all", _definitions).get(slug)


def _definitions() -> dict[str, Agent]:
    return {row.slug: row.agent for row in AgentDefinition.objects.all()}


def agent_served(slug: str) -> Agent:
    """The agent as it is judged and served: built in, defined, or inferred from recorded responses; else free text.

    Responses of this machine's own models are ignored: a rambling model must not widen what a valid answer is.
    """
    known = get_agent(slug)
    if slug in AGENTS or agent_defined(slug) is not None:
        return known
    return _inference_cache.get(slug, lambda: _infer(slug)) or known


def closed_answers_of(slug: str) -> tuple[str, ...]:
    """Every response of an agent with a closed set of answers, or whose recorded responses are a few that repeat; else
    empty.

    Options that stand in the prompts make no closed set for policies: another prompt may list others. For a person who
    corrects an answer they are worth a button.
    """
    return agent_served(slug).answers or _repeated_cache.get(slug, lambda: _repeated(slug))


def _repeated(slug: str) -> tuple[str, ...]:
    texts = [response.strip() for _, response in responses_recorded(slug, RESPONSES, not_by=IN_PROCESS)]
    return closed_answers(texts) if len(texts) >= LEAST_RESPONSES else ()


def _infer(slug: str) -> Agent | None:
    recorded = responses_recorded(slug, RESPONSES, not_by=IN_PROCESS)
    # if the app answers in another form than people write, the form of what people wrote counts
    return agent_inferred(slug, recorded) or agent_inferred(slug, corrections_recorded(slug, RESPONSES))
