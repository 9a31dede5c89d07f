"""Hosted policies: a model of an upstream enters the registry, and answers where nothing trained does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction

from feedback.selectors import SLUG_PATTERN
from rl.models import Policy, PolicyEvent, Upstream
from rl.registry.service import policy_instate, policy_name_free
from rl.upstreams.service import UpstreamRefused

SENT_BY_RATCHET = ("model", "messages", "input", "system", "instructions", "stream", "tools")
"""Parameters that the gateway takes from each request."""


@transaction.atomic
def hosted_policy_create(
    agent: str,
    upstream: Upstream,
    *,
    model: str = "",
    parameters: Mapping[str, Any] | None = None,
    actor: str,
) -> Policy:
    """The hosted policy of an agent for a model and parameters (by default the upstream's model and none).

    It becomes the agent's champion where there is none, or where the champion is hosted or recorded. It stays a
    candidate beside a champion that was trained here. Raises UpstreamRefused.
    """
    parameters = dict(parameters or {})
    if not re.fullmatch(SLUG_PATTERN, agent):
        fault = f"expected a short name such as support-bot, found {agent[:80]!r}"
        raise UpstreamRefused(f"agent: {fault}", {"agent": fault})
    if taken := sorted(parameters.keys() & set(SENT_BY_RATCHET)):
        fault = f"{', '.join(taken)} cannot be set: each request says it"
        raise UpstreamRefused(f"parameters: {fault}", {"parameters": fault})
    model = model or upstream.model
    # two first requests at once make one policy, and nobody removes the upstream meanwhile
    if not Upstream.objects.select_for_update().filter(pk=upstream.pk).exists():
        raise UpstreamRefused(
            f"upstream {upstream.name} was removed meanwhile: add it again", code="conflict"
        )
    same = Policy.objects.filter(agent=agent, kind=Policy.Kind.HOSTED, upstream=upstream, base_model=model)
    same = same.exclude(stage=Policy.Stage.REJECTED)
    policy = next((one for one in same if one.parameters == parameters), None)
    if policy is None:
        policy = _created(agent=agent, upstream=upstream, base_model=model, parameters=parameters)
        PolicyEvent.objects.create(
            policy=policy,
            kind=PolicyEvent.Kind.REGISTERED,
            to_stage=policy.stage,
            actor=actor,
            reason=f"{model} of upstream {upstream.name}",
        )
    policy_instate(policy, actor=actor, reason=f"{upstream.name} answers for {agent}")
    return policy


def _created(**facts: Any) -> Policy:
    """A hosted policy under the first free name of its agent and model."""
    plain = re.sub(r"[^a-z0-9.]+", "-", facts["base_model"].lower()).strip("-.")
    name = policy_name_free(f"{facts['agent']}-{plain}"[:180])
    try:
        with transaction.atomic():
            return Policy.objects.create(name=name, kind=Policy.Kind.HOSTED, **facts)
    except IntegrityError:  # the same model of another upstream took the name meanwhile
        return _created(**facts)
