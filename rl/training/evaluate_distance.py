"""Distance of a policy from its base model, in nats per token: on its own answers, and on texts that people wrote.

Where an agent's answers are written within a form (its JSON schema), both are distances between the distributions that
are served: of the tokens that the form allows. What a model would write beside the form is never
asked for, and a base that knows nothing of it lies far from every policy that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.base import Message
from rl.statistics import Difference, mean_interval
from rl.training.constrained_generation import AnswerForm
from rl.training.evaluate_evidence import hash_of, response_of
from rl.training.policy import LoadedPolicy
from rl.training.scoring import answer_forms, kl_next_token, score_encoded

KL_ANSWERS = 32
"""Answers whose distance is measured, evenly drawn from all: each costs two passes over its prompt."""


def kl_to_reference(
    policy: LoadedPolicy,
    answers: Sequence[tuple[Sequence[Message], str]],
    forms: Sequence[AnswerForm] = (),
) -> float | None:
    """KL to the reference a policy was trained against, nats per token of its own answers, never negative; None
    without adapter or answer. Measured on KL_ANSWERS of the answers at most. forms: of the answers, one each; none,
    and one that forbids its answer: free text.

    The reference is the base model, or what a warm-up made of it (`rl.training.sft`): how far a policy went for
    the sake of what people prefer is told by the latter. Exact at each token of the answers (`scoring.kl_next_token`):
    the answers are greedy or chosen, and an estimator that takes them for draws (k3) was carried by single tokens of
    which the policy is less sure than its reference (14 nats per token for 6.6).
    """
    given = [
        (messages, text, form)
        for (messages, text), form in zip(answers, forms or [None] * len(answers), strict=True)
        if text
    ]
    given = (
        [given[i * len(given) // KL_ANSWERS] for i in range(KL_ANSWERS)] if len(given) > KL_ANSWERS else given
    )
    items = policy.encoder.responses([(messages, text) for messages, text, _ in given])
    if policy.adapter is None or not items:
        return None
    grammar, reference = answer_forms(policy, items, [form for _, _, form in given]), policy.reference
    permitted = [grammar.permits(item) for item in items]
    apart = 0.0
    for within in (True, False):  # an answer that its form forbids is free text
        some = [item for item, permits in zip(items, permitted, strict=True) if permits == within]
        apart += sum(kl_next_token(policy, some, reference=reference, forms=grammar if within else None))
    return apart / max(sum(len(item.response_ids) for item in items), 1)


def written_gain(
    policy: LoadedPolicy, rows: Sequence[Mapping[str, Any]], forms: Sequence[AnswerForm] = ()
) -> Difference | None:
    """Mean over prompts of log p(policy) - log p(reference), nats per token with its 95 % interval, of held-out answers
    that people wrote: {"prompt", "completion"}. forms: of the answers, one each; one that its form forbids is left out.

    It is how much closer the policy is to what people write than its base. None without an adapter, or for
    fewer than two prompts.
    """
    if policy.adapter is None or not rows:
        return None
    items = policy.encoder.responses([response_of(row, number) for number, row in enumerate(rows)])
    within = answer_forms(policy, items, forms or [None] * len(rows))
    permitted = [within.permits(item) for item in items]
    rows = [row for row, permits in zip(rows, permitted, strict=True) if permits]
    items = [item for item, permits in zip(items, permitted, strict=True) if permits]
    own = score_encoded(policy, items, forms=within)
    if (reference := policy.reference) is not None:
        base = score_encoded(reference, items, forms=within)
    else:
        with policy.without_adapter():
            base = score_encoded(policy, items, forms=within)
    by_prompt: dict[str, list[float]] = {}
    for row, item, mine, theirs in zip(rows, items, own, base, strict=True):
        gain = (mine - theirs) / max(len(item.response_ids), 1)
        by_prompt.setdefault(hash_of(row), []).append(gain)
    found = mean_interval([sum(gains) / len(gains) for gains in by_prompt.values()])
    if found.value is None or found.low is None or found.high is None:
        return None
    return Difference(found.value, found.low, found.high)
