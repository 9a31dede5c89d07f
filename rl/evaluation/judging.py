"""Judging rounds, begun: prompts drawn, both sides asked, pairs stored. Torch is imported in functions alone."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_q.tasks import async_task

from feedback.messages import Message
from feedback.models import Decision
from feedback.selectors import decisions_of, shadow_answers
from feedback.storage.masking import masker_of
from feedback.storage.sql import chunks
from rl.agents.base import Agent, State
from rl.base_models.service import agent_base_model
from rl.datasets import messages_plain
from rl.datasets.held_out_evidence import trained_prompts
from rl.datasets.prompt_clusters import MIN_PROMPTS, clusters_of
from rl.datasets.rows import recorded_prompts
from rl.evaluation.sides import HostedFailed, HostedSide, side_load, unheard
from rl.gates.rules import alpha_of_attempt
from rl.models import JudgedPair, JudgingRound, Policy, PromptSplit
from rl.models.agent_definitions import agent_served
from rl.registry import service as registry
from rl.registry.gate_evidence import gate_bounds
from rl.registry.incumbents import incumbent_sync, recorded_answers
from rl.registry.integrity import adapter_folder
from rl.registry.judging import JudgingRefused, round_close_if_settled
from rl.statistics.assignment import BASE

if TYPE_CHECKING:
    from rl.training.policy import LoadedPolicy
    from rl.training.sides import LinearSide

PROMPTS, MOST_PROMPTS = 200, 800
"""Prompts of a round: by default, and at most."""

MARGIN = 0.1
"""Loss of win share that counts as not worse, unless the gate names one."""

LOOK = 10_000
"""Newest decisions among which prompts are drawn."""

AT_ONCE = 16
"""Prompts asked between two looks at whether the round was stopped."""

INCUMBENT = "incumbent"
"""Name of the opponent: the agent's champion, else its base model."""

Status = JudgingRound.Status
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt of a recorded decision that both sides answer."""

    decision: uuid.UUID
    messages: list[Message]
    state: State | None
    recorded: str | None
    """The opponent's recorded answer; None where it has to be asked."""
    shadow: str | None = None
    """The policy's recorded shadow answer; None where it has to be asked."""


def round_create(
    policy: Policy,
    *,
    against: str = INCUMBENT,
    prompts: int = PROMPTS,
    raters: int = 1,
    margin: float | None = None,
    actor: str,
) -> JudgingRound:
    """A new round, which waits for its answers (`round_answer`). Raises JudgingRefused.

    margin: the gate's `not_inferior` by default, else MARGIN. A margin within `not_inferior` makes "not worse" the
    round's question.
    """
    bounds = gate_bounds(policy.agent)
    margin = (bounds.not_inferior or MARGIN) if margin is None else margin
    opponent = _opponent(policy, against)
    for one in filter(None, (policy, opponent)):
        if one.stage == Policy.Stage.REJECTED:
            raise JudgingRefused(f"{one.name} was rejected and will answer nobody: judge another policy")
    for name, value, low, high in (("prompts", prompts, 1, MOST_PROMPTS), ("raters", raters, 1, 9)):
        if not low <= value <= high:
            raise JudgingRefused(f"{name}: expected {low} to {high}, found {value}")
    if not 0 <= margin < 0.5:
        raise JudgingRefused(f"margin: expected at least 0 and less than 0.5, found {margin!r}")
    unfinished = JudgingRound.objects.filter(policy=policy, opponent=opponent).exclude(
        status__in=(Status.ENDED, Status.FAILED)
    )
    if (there := unfinished.first()) is not None:
        raise JudgingRefused(
            f"judging round {there.pk} of {policy.name} against {there.opponent_name} is open: judge it at "
            f"/rate/pairs/?round={there.pk}, or stop it first"
        )
    attempt = _attempt(policy.agent, opponent)
    return JudgingRound.objects.create(
        agent=policy.agent,
        policy=policy,
        opponent=opponent,
        prompts=prompts,
        raters=raters,
        margin=margin,
        not_inferior=0 < margin <= bounds.not_inferior,
        attempt=attempt,
        alpha=alpha_of_attempt(bounds.alpha, attempt),
        created_by=actor,
    )


def round_dispatch(judging: JudgingRound) -> None:
    """Hand the answering of a round to the workers."""
    async_task("rl.tasks.judging_round_answer", judging.pk, task_name=f"judging round {judging.pk}")


def _opponent(policy: Policy, against: str) -> Policy | None:
    if policy.kind == Policy.Kind.RECORDED:
        raise JudgingRefused(
            f"{policy.name} is known by recorded answers alone and cannot be asked: judge a trained policy"
        )
    if against == INCUMBENT:
        champion = incumbent_sync(policy.agent)
        opponent = champion if champion != policy else None
    elif against == BASE:
        opponent = None
    else:
        opponent = registry.policy_get(against)
    if opponent is not None and opponent.agent != policy.agent:
        raise JudgingRefused(
            f"{opponent.name} answers for {opponent.agent}, {policy.name} for {policy.agent}"
        )
    if opponent == policy:
        raise JudgingRefused(
            f"{policy.name} cannot be judged against itself; name another policy, incumbent or base"
        )
    return opponent


def _attempt(agent: str, opponent: Policy | None) -> int:
    """Number of the next round against an opponent, from 1. Rounds that failed or that nobody judged do not count."""
    earlier = JudgingRound.objects.filter(agent=agent, opponent=opponent).exclude(status=Status.FAILED)
    judged = earlier.filter(status=Status.ENDED, pairs__judgements__isnull=False).distinct().count()
    return 1 + judged + earlier.exclude(status=Status.ENDED).count()


# --- Answers --------------------------------------------------------------------------------------------------


def round_answer(judging: JudgingRound, progress: Progress | None = None) -> JudgingRound:
    """Ask both sides of a waiting round and open it. Pairs can be judged as soon as they are stored.

    A round that ends early keeps the pairs it has and says why; without any it has failed. Raises JudgingRefused for a
    round that does not wait, and whatever kept the sides from answering.
    """
    claimed = JudgingRound.objects.filter(pk=judging.pk, status=Status.WAITING)
    if not claimed.update(status=Status.ANSWERING):
        raise JudgingRefused(
            f"judging round {judging.pk} is {judging.status}: its answers are not waited for"
        )
    fault = "the process that generated the answers was stopped"
    try:
        fault = _answers_store(judging, progress or unheard)
    except Exception as error:
        fault = str(error) or type(error).__name__
        raise
    finally:
        judging = round_opened(judging, fault)
    if judging.status == Status.FAILED:
        raise JudgingRefused(f"judging round {judging.pk} failed: {judging.reason}")
    return judging


def round_opened(judging: JudgingRound, fault: str) -> JudgingRound:
    """The round after its answers were generated: running, or failed where it has no pair."""
    status = Status.RUNNING if judging.pairs.exists() else Status.FAILED
    rows = JudgingRound.objects.filter(pk=judging.pk, status__in=(Status.WAITING, Status.ANSWERING))
    rows.update(status=status, reason=fault[:2000])
    round_close_if_settled(judging)
    judging.refresh_from_db()
    return judging


def _answers_store(judging: JudgingRound, report: Progress) -> str:
    """Store the pairs, a few at a time. Returns why there are fewer than asked for; empty where there are not."""
    report(0, 0, "drawing prompts")
    prompts = _prompts_drawn(judging)
    if not prompts:
        return _nothing_to_ask(judging)
    from rl.training.held_out import AnswerJudge

    definition = agent_served(judging.agent)
    same = AnswerJudge(definition).action
    report(0, 0, f"asking {judging.opponent_name}")
    unknown = [prompt for prompt in prompts if prompt.recorded is None]
    asked = iter([text for texts in policy_answers(judging.opponent, definition, unknown) for text in texts])
    other = {
        prompt.decision: prompt.recorded if prompt.recorded is not None else next(asked) for prompt in prompts
    }
    report(0, 0, f"asking {judging.policy.name}")
    done = unanswered = 0
    unasked = [prompt for prompt in prompts if prompt.shadow is None]
    fresh = (text for texts in policy_answers(judging.policy, definition, unasked) for text in texts)
    for batch in chunks(prompts, AT_ONCE):
        texts = [prompt.shadow if prompt.shadow is not None else next(fresh) for prompt in batch]
        judging.refresh_from_db(fields=["status"])
        if judging.status != Status.ANSWERING:
            return "it was stopped while answers were generated"
        pairs = [
            _pair(judging, prompt, text, theirs, same=same(text) == same(theirs))
            for prompt, text in zip(batch, texts, strict=True)
            if text is not None and (theirs := other[prompt.decision]) is not None
        ]
        JudgedPair.objects.bulk_create(pairs)
        unanswered += len(batch) - len(pairs)
        done += len(batch)
        report(done, len(prompts), "prompts")
    reasons = []
    if len(prompts) < judging.prompts:
        reasons.append(f"{len(prompts)} prompts could be drawn, {judging.prompts} were asked for")
    if unanswered:
        reasons.append(f"{unanswered} prompts are left out: an upstream refused them")
    return "; ".join(reasons)


def _pair(judging: JudgingRound, prompt: AskedPrompt, text: str, theirs: str, *, same: bool) -> JudgedPair:
    answer, other = masker_of(judging.agent).masked([text, theirs])
    return JudgedPair(round=judging, decision=prompt.decision, answer=answer, other_answer=other, same=same)


def policy_answers(
    policy: Policy | None, agent: Agent, prompts: Sequence[AskedPrompt]
) -> Iterator[Sequence[str | None]]:
    """Texts of a policy's answers, None where its upstream refuses, AT_ONCE prompts at a time; of the base model where
    `policy` is None."""
    if not prompts:
        return
    from rl.training.held_out import HeldOutPrompt
    from rl.training.sides import generate_answers

    if policy is not None and policy.kind == Policy.Kind.HOSTED:
        for batch in chunks(prompts, AT_ONCE):
            asked = [HeldOutPrompt(prompt.messages, {"state": prompt.state}) for prompt in batch]
            try:
                yield [answer.text if answer else None for answer in HostedSide(policy).answers(asked)]
            except HostedFailed as failure:
                raise JudgingRefused(str(failure)) from failure
        return
    side = _side(policy, agent)
    for batch in chunks(prompts, AT_ONCE):
        found = generate_answers(
            side, [prompt.messages for prompt in batch], agent, states=[prompt.state for prompt in batch]
        )
        yield [answer.text for answer in found]


def _side(policy: Policy | None, agent: Agent) -> LoadedPolicy | LinearSide:
    if policy is None:
        return side_load(None, agent_base_model(agent.slug).name, agent)
    if not policy.has_files:
        raise JudgingRefused(
            f"{policy.name} ({policy.get_kind_display()}) has no recorded answer to some prompts"
        )
    return side_load(adapter_folder(policy), policy.base_model, agent)


# --- Prompts --------------------------------------------------------------------------------------------------


def _prompts_drawn(judging: JudgingRound) -> list[AskedPrompt]:
    """Random prompts among the newest decisions that neither side was trained on, one of near-identical ones; first
    those that the policy answered as a shadow.

    Of an opponent known by recorded answers alone, only prompts it answered.
    """
    opponent = judging.opponent
    is_recorded = opponent is not None and opponent.kind == Policy.Kind.RECORDED
    rows = decisions_of(judging.agent).order_by("-created_at", "-id")
    if opponent is not None and is_recorded:
        rows = rows.filter(policy=opponent.recorded_as)
    newest: dict[str, uuid.UUID] = {}
    for pk, prompt in rows.values_list("pk", "prompt_hash")[:LOOK]:
        newest.setdefault(prompt, pk)
    eligible = _untrained(judging, list(newest))
    random.Random(f"judging round {judging.pk}").shuffle(eligible)
    shadows = shadow_answers(judging.agent, judging.policy.name).exclude(response="").order_by("created_at")
    shadow = dict(shadows.values_list("prompt_hash", "response"))
    eligible.sort(key=lambda prompt: prompt not in shadow)
    found: list[AskedPrompt] = []
    for hashes in chunks(eligible, 100):
        decisions = Decision.objects.in_bulk([newest[prompt] for prompt in hashes])
        recorded = recorded_answers(opponent, hashes) if opponent and not opponent.has_files else {}
        for prompt in hashes:
            decision = decisions[newest[prompt]]
            if (messages := messages_plain(decision.messages)) is None or len(found) == judging.prompts:
                continue
            if is_recorded and prompt not in recorded:
                continue  # somebody else wrote it: people, a teacher, a simulation
            found.append(
                AskedPrompt(decision.pk, messages, decision.state, recorded.get(prompt), shadow.get(prompt))
            )
        if len(found) == judging.prompts:
            break
    return found


def _untrained(judging: JudgingRound, prompts: list[str]) -> list[str]:
    """Those prompts that no training has seen, nor one near-identical to them; of near-identical ones the first."""
    train = set(
        PromptSplit.objects.filter(agent=judging.agent, split=PromptSplit.Split.TRAIN).values_list(
            "prompt_hash", flat=True
        )
    )
    for side in filter(None, (judging.policy, judging.opponent)):
        if side.run is not None:
            train |= trained_prompts(side.run.snapshot)
    eligible = [prompt for prompt in prompts if prompt not in train]
    seen = sorted(train)
    if len(seen) + len(eligible) < MIN_PROMPTS:
        return eligible
    # prompts that were trained on come first, so that a cluster with one is named after it
    clusters = clusters_of(recorded_prompts(judging.agent, [*seen, *eligible]))
    taken = {clusters.get(prompt) or prompt for prompt in seen}
    found = []
    for prompt in eligible:
        name = clusters.get(prompt) or prompt
        if name not in taken:
            taken.add(name)
            found.append(prompt)
    return found


def _nothing_to_ask(judging: JudgingRound) -> str:
    if judging.opponent is not None and judging.opponent.kind == Policy.Kind.RECORDED:
        return (
            f"no recorded answer of {judging.opponent.name} to a prompt that training has not seen; record more "
            "decisions, then begin another round"
        )
    return (
        "no prompt of this agent that training has not seen; record more decisions, then begin another round"
    )
