"""Log-probabilities of responses: one formula for training, evaluation and candidate selection."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from packed_forward.forward import packed_logps
from packed_forward.logps import causal_model, collate, head_logits, token_logps
from packed_forward.packing import NO_CHOICE, Strategy, allowed_kl, pack
from packed_forward.selection import strategy_select
from rl.agents.base import Message, Row
from rl.statistics import Difference, mean_interval
from rl.training.chat_template import prompt_messages, response_text
from rl.training.constrained_generation import AnswerForm, AnswerForms
from rl.training.encoding import EncodedResponse, batches_within
from rl.training.policy import LoadedPolicy, matmul


class ScoringError(RuntimeError):
    """The quick log-probabilities do not agree with the model's own logits: an architecture that is not understood."""


BATCH = 16
"""Responses scored at once."""


@dataclass(frozen=True)
class ResponseScore:
    """Likelihood of exactly this answer, and of the turn ending after it."""

    logp: float
    """Sum over the response's tokens, in nats; at most 0."""
    tokens: int
    """Response tokens summed over, the turn end included."""
    truncated: bool = False
    """Prompt or response did not fit the model's context and was cut before scoring."""

    @property
    def mean_logp(self) -> float:
        """Per token: length-normalised."""
        return self.logp / self.tokens if self.tokens else 0.0


def score_responses(
    policy: LoadedPolicy,
    items: Sequence[tuple[Sequence[Message], str]],
    *,
    batch_size: int = BATCH,
    adapter: bool = True,
    forms: Sequence[AnswerForm] = (),
) -> list[ResponseScore]:
    """Score each (prompt, response), in the order given; `adapter=False` scores under the base model.

    log p(response, turn end | prompt) = the sum of log p(token | all before it) over the response's tokens and the
    token that ends the turn. Prompts are never scored. Items of similar length share a batch. forms: of the responses,
    one each: the probability is then that of the policy as it answers within the form; free where the form forbids the
    response, which served it would never be.
    """
    return _responses_scored(policy, items, batch_size, adapter, forms, together=1)


def _responses_scored(
    policy: LoadedPolicy,
    items: Sequence[tuple[Sequence[Message], str]],
    batch_size: int,
    adapter: bool,
    forms: Sequence[AnswerForm],
    *,
    together: int,
) -> list[ResponseScore]:
    """Scores of responses; of so many that stand `together` all are free where the form forbids one of them."""
    responses = policy.encoder.responses(items)
    grammar = answer_forms(policy, responses, forms) if any(form is not None for form in forms) else None
    permitted = [grammar is not None and grammar.permits(item) for item in responses]
    constrained = {
        i
        for first in range(0, len(responses), together)
        if all(permitted[first : first + together])
        for i in range(first, first + together)
    }
    logps = [0.0] * len(responses)
    with contextlib.nullcontext() if adapter else policy.without_adapter():
        for places, form in (
            (sorted(constrained), grammar),
            (sorted({*range(len(responses))} - constrained), None),
        ):
            part = [responses[i] for i in places]
            found = score_encoded(policy, part, batch_size=batch_size, forms=form) if part else []
            for i, logp in zip(places, found, strict=True):
                logps[i] = logp
    return [
        ResponseScore(logp, len(item.response_ids), item.prompt_cut or item.response_cut)
        for item, logp in zip(responses, logps, strict=True)
    ]


def answer_forms(
    policy: LoadedPolicy, items: Sequence[EncodedResponse], forms: Sequence[AnswerForm]
) -> AnswerForms:
    """Forms of responses that are tokens, one each, by their prompts."""
    found = policy.answer_forms()
    for item, form in zip(items, forms, strict=True):
        found.add(item.prompt_ids, form)
    return found


def score_pairs(
    policy: LoadedPolicy,
    rows: Sequence[Row],
    *,
    forms: Sequence[AnswerForm] = (),
) -> list[tuple[ResponseScore, ResponseScore]]:
    """Score the chosen and the rejected response of rows {"prompt", "chosen", "rejected"} as training takes them.

    forms: of the rows, one each, as `score_responses`; both responses are free where the form forbids one of them.
    """
    items = [
        (prompt_messages(row, number), response_text(row, side, number))
        for number, row in enumerate(rows)
        for side in ("chosen", "rejected")
    ]
    of_items = [form for form in forms for _ in range(2)]
    scores = _responses_scored(policy, items, BATCH, True, of_items, together=2)
    return list(zip(scores[::2], scores[1::2], strict=True))


def score_encoded(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    *,
    batch_size: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
    forms: AnswerForms | None = None,
) -> list[float]:
    """Summed log-probability of each response that is already tokens, in nats.

    The same item is scored once, and responses to one prompt share a row where the model can be computed so.
    `progress` is called with (done, total) distinct items. With `forms` among the tokens that they allow; minus
    infinity for a response that its form forbids.
    """
    return [row.sum().item() for row in _rows_scored(policy, items, batch_size, progress, forms)]


def kl_encoded(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    *,
    forms: AnswerForms | None = None,
) -> list[float]:
    """KL(policy || base) of each of the policy's own responses, summed over its tokens, in nats; never negative.

    The base is the same model without its adapter. With the `forms` that the responses were sampled within, of both as
    they answer within them.

    The k3 estimator, q/p - 1 - log(q/p) per token, unbiased where the policy drew the response at temperature 1.
    Source: Schulman 2020, Approximating KL Divergence.
    """
    own = _rows_scored(policy, items, forms=forms)
    with policy.without_adapter():
        base = _rows_scored(policy, items, forms=forms)
    return [
        float((torch.expm1(theirs - mine) - (theirs - mine)).sum())
        for mine, theirs in zip(own, base, strict=True)
    ]


POSITIONS = 128
"""Positions whose whole distributions are held at once, two of [POSITIONS, vocabulary] in float32."""


def kl_next_token(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    *,
    reference: LoadedPolicy | None = None,
    batch_size: int = BATCH,
    forms: AnswerForms | None = None,
) -> list[float]:
    """KL(policy || reference) of the next token, summed over the positions of each response, in nats; never negative.

    Without a `reference` it is the base, the same model without its adapter. With `forms` of both as they answer within
    them. Exact at each position: the sum over the
    vocabulary of p (log p - log q). So one position at which the policy is far less sure than its reference cannot
    outweigh all others, as it does in the k3 estimator of `kl_encoded` where a response was not drawn but chosen.
    """
    order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_ids) + len(items[i].response_ids))
    sums: dict[int, float] = {}
    models = [policy, reference or policy]
    modes = [model.model.training for model in models]
    for model in models:
        model.model.eval()
    try:
        with torch.inference_mode(), matmul(policy.hardware):
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                sums |= zip(rows, _batch_kl(policy, [items[i] for i in rows], reference, forms), strict=True)
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.model.train(mode)
    return [sums[i] for i in range(len(items))]


def _batch_kl(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    reference: LoadedPolicy | None,
    forms: AnswerForms | None,
) -> list[float]:
    batch = collate(items, policy.tokenizer.pad_token_id)
    reference_policy = reference or policy

    def as_reference() -> contextlib.AbstractContextManager[object]:
        return policy.without_adapter() if reference is None else contextlib.nullcontext()

    batch = {name: tensor.to(policy.device) for name, tensor in batch.items()}
    own = response_states(policy.model, batch)
    with as_reference():
        theirs = response_states(reference_policy.model, batch)
    token_sets = forms.allowed_tokens(items) if forms else None
    found = torch.zeros(len(own), dtype=torch.double)
    places = torch.arange(len(own))
    if token_sets is not None:
        places = places[token_sets.index != NO_CHOICE]
        token_sets = token_sets.to(policy.device)
    for at in places.split(POSITIONS):
        logits = head_logits(causal_model(policy.model), own[at])
        with as_reference():  # the head may have an adapter, too
            others = head_logits(causal_model(reference_policy.model), theirs[at]).to(logits.device)
        if token_sets is None:
            kl = distributions_kl(torch.log_softmax(logits, -1), torch.log_softmax(others, -1))
        else:
            kl = allowed_kl(logits, others, token_sets.at(at))
        found[at] = kl.cpu().double()
    by_response = found.split([len(item.response_ids) for item in items])
    return [float(row.sum()) for row in by_response]


def distributions_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) [n] in nats of log-probabilities [n, vocabulary]; rounding below 0 is 0."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)


def response_states(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states [n, width] of the positions that predict the response tokens of all rows, row after row."""
    hidden = (
        causal_model(model)
        .base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        .last_hidden_state
    )
    states: torch.Tensor = hidden[:, :-1][batch["completion_mask"][:, 1:].bool()]
    return states


def _rows_scored(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    batch_size: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
    forms: AnswerForms | None = None,
) -> list[torch.Tensor]:
    """Log-probabilities of each item's response tokens, float64, one for each."""
    firsts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    first_positions = [
        firsts.setdefault((tuple(a.prompt_ids), tuple(a.response_ids)), i) for i, a in enumerate(items)
    ]
    keys = {i: (policy.is_base, forms.form_of(key[0]) if forms else "", *key) for key, i in firsts.items()}
    scored = {} if policy.scored is None else policy.scored
    logps = {i: scored[key] for i, key in keys.items() if key in scored}
    order = sorted(
        keys.keys() - logps.keys(), key=lambda i: (len(items[i].prompt_ids), items[i].prompt_ids, i)
    )
    was_training = policy.model.training
    policy.model.eval()
    try:
        with torch.inference_mode(), matmul(policy.hardware):
            if order:
                _strategy_ensure(policy, items)
            lengths = [len(item.prompt_ids) for item in items]
            at_once = PADDED_TOKENS if policy.device.type == "cpu" else 0
            for rows in batches_within(order, lengths, batch_size, at_once):
                found = dict(zip(rows, _batch_logps(policy, [items[i] for i in rows], forms), strict=True))
                logps |= found
                scored |= {keys[i]: row for i, row in found.items()}
                if progress is not None:
                    progress(len(logps), len(keys))
    finally:
        policy.model.train(was_training)
    return [logps[i] for i in first_positions]


PADDED_TOKENS = 4096
"""Most tokens of prompts that a CPU scores at once, padding included: a few long prompts do not widen the others."""


MIN_PACKED_ITEMS = 8
"""Fewest items for which the self-test of packed strategies pays."""


def _strategy_ensure(policy: LoadedPolicy, items: Sequence[EncodedResponse]) -> None:
    """Select the model's strategy where it is not known for rows this long: a sliding window shows beyond its width."""
    if len(items) < MIN_PACKED_ITEMS and policy.strategy is None:
        return
    longest = max((len(item.prompt_ids) + len(item.response_ids) for item in items), default=0)
    if policy.strategy is None or (
        policy.strategy != Strategy.STOCK and longest > policy.strategy_max_tokens
    ):
        policy.strategy = strategy_select(policy, items, gradients=False).strategy
        policy.strategy_max_tokens = longest


def _batch_logps(
    policy: LoadedPolicy, items: Sequence[EncodedResponse], forms: AnswerForms | None
) -> list[torch.Tensor]:
    """Log-probabilities of each response's tokens, float64 on the CPU, whichever way the model is computed."""
    model, pad = causal_model(policy.model), policy.tokenizer.pad_token_id
    token_sets = forms.allowed_tokens(items) if forms else None
    if policy.strategy is None or policy.strategy == Strategy.STOCK:
        batch = {name: tensor.to(policy.device) for name, tensor in collate(items, pad).items()}
        on_device = None if token_sets is None else token_sets.to(policy.device)
        stock = token_logps(model, **batch, allowed=on_device).cpu().double()
        masks = batch["completion_mask"][:, 1:].bool().cpu()
        return [row[mask] for row, mask in zip(stock, masks, strict=True)]
    packed = pack(
        [item.prompt_ids for item in items],
        [item.response_ids for item in items],
        pad_token_id=pad,
        allowed=token_sets,
    )
    logps: torch.Tensor = packed_logps(model, packed.to(policy.device), Strategy(policy.strategy))[0]
    rows = logps.cpu().double()
    return [row[: len(item.response_ids)] for row, item in zip(rows, items, strict=True)]


def head_check(policy: LoadedPolicy) -> None:
    """Compare the quick log-probabilities with the model's own logits on one short prompt. Raises ScoringError."""
    (item,) = policy.encoder.responses([([{"role": "user", "content": "Ratchet asks"}], "Ratchet answers")])
    batch = {k: v.to(policy.device) for k, v in collate([item], policy.tokenizer.pad_token_id).items()}
    was_training = policy.model.training
    policy.model.eval()
    try:
        with torch.inference_mode():
            quick = token_logps(causal_model(policy.model), **batch)
            logits = policy.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    finally:
        policy.model.train(was_training)
    own = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    own = own * batch["completion_mask"][:, 1:]
    # one rounding of a logit in the model's dtype, at most a few tens in size, in either of the two
    allowed = 64 * float(torch.finfo(logits.dtype).eps) * max(1.0, float(logits.abs().max()))
    worst = float((quick - own).abs().max())
    if not worst <= allowed:
        raise ScoringError(
            f"{policy.base_model} ({policy.model.config.model_type}): log-probabilities taken before its head differ "
            f"by {worst:.2g} nats from its own logits (allowed {allowed:.2g}); this architecture does something to its "
            f"logits that is not known here. Please report it"
        )


# --- Distance from the reference ----------------------------------------------------------------------------
# Where an agent's answers are written within a form (its JSON schema), distances are between the distributions that are
# served: of the tokens that the form allows. What a model would write beside the form is never asked for.

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
    policy: LoadedPolicy, rows: Sequence[Row], forms: Sequence[AnswerForm] = ()
) -> Difference | None:
    """Mean over prompts of log p(policy) - log p(reference), nats per token with its 95 % interval, of held-out answers
    that people wrote: {"prompt", "completion"}. forms: of the answers, one each; one that its form forbids is left out.

    It is how much closer the policy is to what people write than its base. None without an adapter, or for
    fewer than two prompts.
    """
    if policy.adapter is None or not rows:
        return None
    items = policy.encoder.responses(
        [(prompt_messages(row, n), response_text(row, "completion", n)) for n, row in enumerate(rows)]
    )
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
        prompt = row.get("prompt_hash") or json.dumps(row["prompt"], sort_keys=True)
        by_prompt.setdefault(prompt, []).append(gain)
    found = mean_interval([sum(gains) / len(gains) for gains in by_prompt.values()])
    if found.value is None or found.low is None or found.high is None:
        return None
    return Difference(found.value, found.low, found.high)
