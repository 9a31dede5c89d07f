"""Recorded policies: the app's own model, known by its recorded answers, as the policy to beat.

A decision whose policy name is not registered belongs to a recorded policy. It is created when a page, command,
training or evaluation next looks at the agent; recording a decision costs nothing more. Without another champion, the
recorded policy that answers users today is the champion.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from django.db import IntegrityError, transaction

from feedback.cache import StampedCache
from feedback.selectors import FeedbackCounts, agent_has_decisions, app_answers, policy_answers
from rl.agents import AGENTS
from rl.models import AgentDefinition, Policy, PolicyEvent
from rl.registry.service import REPLACED, RegistryRefused, champion_of, policy_instate

NEWEST = 200
"""Newest decisions of an agent that decide which policy answers today."""

AHEAD = 2.0
"""A recorded policy replaces another as champion once it has this many times its newest answers."""

ACTOR = "incumbents"

RESERVED = frozenset({"base", "champion", "compare", "distil", "incumbent", "sft", "start"})
"""Words that options and addresses use in place of a policy's name."""

Kind, Stage, Event = Policy.Kind, Policy.Stage, PolicyEvent.Kind


def incumbent_sync(agent: str) -> Policy | None:
    """Creates the agent's missing recorded policies and returns its champion.

    The incumbent has most of the newest answers; ties go to the latest. It becomes champion if there is none, and
    replaces another recorded champion at AHEAD times its answers. A recorded policy that a person retired stays
    retired.
    """
    champion = champion_of(agent)
    newest = [answer.policy for answer in app_answers(agent, newest=NEWEST)]
    trained = Policy.objects.filter(agent=agent).exclude(kind=Kind.RECORDED)
    others = set(trained.filter(name__in=set(newest)).values_list("name", flat=True))
    # a Counter keeps the order of insertion, newest answer first
    counts = Counter(name for name in newest if name not in others)
    if not counts:
        return champion
    known = {row.recorded_as: row for row in Policy.objects.filter(agent=agent, kind=Kind.RECORDED)}
    for name in counts.keys() - known.keys():
        known[name] = _create(agent, name)
    (name, count), first = counts.most_common(1)[0], next(iter(counts))
    if counts[first] == count:
        name = first
    incumbent = known[name]
    if champion is not None and (
        champion.pk == incumbent.pk
        or champion.kind != Kind.RECORDED
        or count < AHEAD * counts[champion.recorded_as]
    ):
        return champion
    if not _may_stand(incumbent):
        return champion
    reason = f"{count} of the newest {sum(counts.values())} answers that the app recorded are its own"
    with suppress(RegistryRefused):  # another process was faster
        policy_instate(incumbent, actor=ACTOR, reason=reason)
    return champion_of(agent)


def recorded_answers(policy: Policy, prompt_hashes: Collection[str]) -> dict[str, str]:
    """Prompt hash -> the newest recorded answer of a policy."""
    hashes = sorted(set(prompt_hashes))
    found: dict[str, str] = {}
    if policy.kind == Kind.RECORDED:
        for answer in app_answers(policy.agent, prompt_hashes=hashes):
            if answer.policy == policy.recorded_as:
                found.setdefault(answer.prompt_hash, answer.response)
        return found
    for answer in policy_answers(policy.agent, policy.name, hashes):
        found.setdefault(answer.prompt_hash, answer.response)
    return found


_synced: StampedCache[int] = StampedCache()


def incumbents_sync(counts: Mapping[str, FeedbackCounts]) -> None:
    """`incumbent_sync` for each agent with decisions since this process last looked."""
    for agent, one in counts.items():
        _synced.get_unless(agent, one.decisions, partial(_sync, agent))


def _sync(agent: str) -> int:
    champion = incumbent_sync(agent)
    return champion.pk if champion is not None else 0


def _create(agent: str, recorded_as: str) -> Policy:
    """Creates a recorded policy, retired, under its app's name for it if that is free and plain."""
    try:
        with transaction.atomic():
            policy = Policy.objects.create(
                agent=agent,
                kind=Kind.RECORDED,
                recorded_as=recorded_as,
                name=_name_free(agent, recorded_as),
                stage=Stage.RETIRED,
            )
            PolicyEvent.objects.create(
                policy=policy,
                kind=Event.REGISTERED,
                to_stage=policy.stage,
                actor=ACTOR,
                reason=f"the app's decisions name {recorded_as!r}"
                if recorded_as
                else "the app's decisions name no policy",
            )
    except IntegrityError:  # another process was faster: with this policy, or with its name for another agent
        there = Policy.objects.filter(agent=agent, kind=Kind.RECORDED, recorded_as=recorded_as).first()
        return there or _create(agent, recorded_as)
    return policy


def _name_free(agent: str, recorded_as: str) -> str:
    """The first free name: the name itself, with its agent's slug before it, with a number."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", recorded_as).strip("-.")[:120]
    long = f"{agent}-{plain or 'app'}"
    names = itertools.chain(filter(None, (plain, long)), (f"{long}-{n}" for n in itertools.count(2)))
    return next(name for name in names if not _is_taken(name))


def _is_taken(name: str) -> bool:
    if name in RESERVED or name in AGENTS or Policy.objects.filter(name=name).exists():
        return True
    return agent_has_decisions(name) or AgentDefinition.objects.filter(slug=name).exists()


def _may_stand(policy: Policy) -> bool:
    """True unless a person took the policy out of service. Being replaced is not that: if the other one is retired, the
    app's model answers again."""
    left = policy.events.filter(from_stage=Stage.CHAMPION).first()
    if policy.stage != Stage.RETIRED or left is None:
        return policy.stage == Stage.RETIRED
    return left.actor == ACTOR or (left.kind == Event.RETIRED and left.reason.startswith(REPLACED))
