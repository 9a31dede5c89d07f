"""Distance of a policy from its base model, in nats per token: on its own answers, and on texts that people wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.base import Message
from rl.statistics import Difference, mean_interval
from rl.training.evaluate_evidence import hash_of, response_of
from rl.training.policy import LoadedPolicy, reference_load
from rl.training.scoring import kl_next_token, score_responses


def kl_to_reference(policy: LoadedPolicy, answers: Sequence[tuple[Sequence[Message], str]]) -> float | None:
    """KL to the reference a policy was trained against, nats per token of its own answers, never negative; None
    without adapter or answer.

    The reference is the base model, or what a warm-up made of it (`rl.training.warm_up`): how far a policy went for
    the sake of what people prefer is told by the latter. Exact at each token of the answers (`scoring.kl_next_token`):
    the answers are greedy or chosen, and an estimator that takes them for draws (k3) was carried by single tokens of
    which the policy is less sure than its reference (14 nats per token for 6.6).
    """
    items = policy.encoder.responses([(list(messages), text) for messages, text in answers if text])
    if policy.adapter is None or not items:
        return None
    apart = kl_next_token(policy, items, reference=reference_load(policy))
    return sum(apart) / max(sum(len(item.response_ids) for item in items), 1)


def written_gain(policy: LoadedPolicy, rows: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Mean over prompts of log p(policy) - log p(reference), nats per token with its 95 % interval, of held-out answers
    that people wrote: {"prompt", "completion"}.

    It is how much closer the policy is to what people write than its base. None without an adapter, or for
    fewer than two prompts.
    """
    if policy.adapter is None or not rows:
        return None
    items = [response_of(row, number) for number, row in enumerate(rows)]
    own = score_responses(policy, items)
    if (reference := reference_load(policy)) is not None:
        base = score_responses(reference, items)
    else:
        with policy.without_adapter():
            base = score_responses(policy, items)
    by_prompt: dict[str, list[float]] = {}
    for row, mine, theirs in zip(rows, own, base, strict=True):
        by_prompt.setdefault(hash_of(row), []).append(mine.mean_logp - theirs.mean_logp)
    found = mean_interval([sum(gains) / len(gains) for gains in by_prompt.values()])
    if found.value is None or found.low is None or found.high is None:
        return None
    return Difference(found.value, found.low, found.high)
