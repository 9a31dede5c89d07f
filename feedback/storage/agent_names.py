"""The name an agent's prompts are hashed under: its slug, or the first one it had where it was renamed.

On which side of the split a prompt stands follows from its hash. With a new hash, prompts that a policy learnt from
would come to stand among those it is judged on; so the name inside the hash never changes.
"""

from __future__ import annotations

from feedback.cache import TTLCache
from feedback.messages import Message
from feedback.models import AgentName
from feedback.models import prompt_hash as model_prompt_hash

_names: TTLCache[str] = TTLCache()


def name_hashed(agent: str) -> str:
    """The name an agent's prompts are hashed under; a change is seen within FEEDBACK_REMEMBER_S seconds."""

    def read() -> str:
        return AgentName.objects.filter(agent=agent).values_list("hashed_as", flat=True).first() or agent

    return _names.get(agent, read)


def prompt_hash(agent: str, messages: list[Message]) -> str:
    """SHA-256 (64 hex digits) of an agent and its prompt, whatever the agent is called by now."""
    return model_prompt_hash(name_hashed(agent), messages)


def names_move(old: str, new: str) -> None:
    """Hash `new` under the name that `old` was hashed under; a later agent called `old` gets another one.

    Called in the transaction that renames the agent; `new` has no decisions of its own.
    """
    _names.clear()
    hashed = name_hashed(old)
    AgentName.objects.filter(agent__in=(old, new)).delete()
    if hashed != new:
        AgentName.objects.create(agent=new, hashed_as=hashed)
    name_reserve(old)
    _names.clear()


def name_reserve(agent: str) -> None:
    """Give a slug without decisions a name of its own to be hashed under, where another agent is hashed under it."""
    taken = set(AgentName.objects.filter(hashed_as__startswith=agent).values_list("hashed_as", flat=True))
    if agent not in taken:
        return
    number = 2
    while f"{agent}#{number}" in taken:  # no slug holds a #
        number += 1
    AgentName.objects.create(agent=agent, hashed_as=f"{agent}#{number}")


def name_free(agent: str) -> None:
    """Forget the name of an agent that was deleted; its slug may be taken again."""
    AgentName.objects.filter(agent=agent).delete()
    name_reserve(agent)
    _names.clear()
