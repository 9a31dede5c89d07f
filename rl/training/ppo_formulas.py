"""The mathematics of PPO on language models: pure functions of tensors, each with its shapes and its source.

B responses of at most T tokens. `mask` [B, T] is true at the tokens of a response, its turn end included; each
response starts at column 0, and may have gaps where others wrote (what a tool returned). Sums are over masked tokens
only: what stands elsewhere never matters.

Sources: PPO, Schulman et al. 2017 (arXiv 1707.06347); GAE, Schulman et al. 2016 (arXiv 1506.02438); RLHF, Ziegler et
al. 2019 (arXiv 1909.08593) and Stiennon et al. 2020 (arXiv 2009.01325); Schulman 2020, "Approximating KL divergence"
(joschu.net/blog/kl-approx.html); Huang et al. 2024, "The N+ implementation details of RLHF with PPO" (arXiv
2403.17031).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

# --- Masked statistics --------------------------------------------------------------------------------------


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x where mask; a scalar. Values elsewhere may be anything, NaN included."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    """Mean of x [B, T] over the masked tokens; a scalar, 0 where there are none.

    `total` replaces the number of tokens: with the token count of a whole mini-batch the means of its micro-batches
    add up to the mini-batch's own mean, however it was cut. (Token-weighted: a long response counts for more. The mean
    of the micro-batches' means would depend on the cut.)
    """
    count = mask.sum() if total is None else torch.as_tensor(total, device=x.device)
    return masked_sum(x, mask) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of x [B, T] over the masked tokens; a scalar, 0 for fewer than two."""
    centred = x - masked_mean(x, mask)
    return masked_sum(centred.square(), mask) / (mask.sum() - 1).clamp(min=1)


def masked_whiten(
    x: Tensor, mask: Tensor, *, shift_mean: bool = True, across: Callable[[Tensor], Tensor] = lambda t: t
) -> Tensor:
    """(x - mean) / std over the masked tokens, 0 elsewhere, [B, T]; without `shift_mean` the mean stays.

    `across` sums a scalar over the processes that hold the rest of the batch.
    """
    count = across(mask.sum())
    mean = across(masked_sum(x, mask)) / count.clamp(min=1)
    variance = across(masked_sum((x - mean).square(), mask)) / (count - 1).clamp(min=1)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0)


def truncate_at_stop(tokens: Tensor, stop_ids: Collection[int], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] with everything after the first stop token padded, and the mask [B, T] of what is left.

    The stop token itself is part of the answer: ending the turn is an action, and is learnt like any other.
    """
    stops = torch.isin(tokens, torch.tensor(sorted(stop_ids), dtype=tokens.dtype, device=tokens.device))
    mask = stops.cumsum(1) - stops.long() == 0
    return torch.where(mask, tokens, pad_token_id), mask


# --- Rewards ------------------------------------------------------------------------------------------------


def kl_k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """log p(x) - log q(x) per sampled token [B, T]: unbiased for KL(p || q), may be negative (Schulman 2020, k1)."""
    return logps - reference_logps


def kl_k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """q/p - 1 - log(q/p) per sampled token [B, T]: unbiased for KL(p || q), never negative (Schulman 2020, k3)."""
    log_ratio = reference_logps - logps
    return torch.expm1(log_ratio) - log_ratio


def missing_eos_penalised(scores: Tensor, ended: Tensor, penalty: float) -> Tensor:
    """Scores [B] less `penalty` where a response did not end its turn before the length limit; `ended` [B] bool."""
    return torch.where(ended, scores, scores - penalty)


def rewards_per_token(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """R_t = -kl_coef * kl_t at every token, plus the response's score at its last one (Ziegler et al. 2019, eq. 2).

    scores [B], kl and mask [B, T] -> [B, T], 0 outside the mask. A response has at least one token.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, 0).amax(1, keepdim=True)  # beyond any gap
    return rewards.scatter_add(1, last, scores[:, None].to(rewards))


def kl_coef_adapted(kl_coef: float, kl: float, target: float, horizon: float, responses: int) -> float:
    """The next KL coefficient (Ziegler et al. 2019, section 2.2): grows while `kl` is above `target`, shrinks below.

    e = clip(kl / target - 1, -0.2, 0.2);  coef' = coef * (1 + e * responses / horizon). `kl` and `target` are nats per
    response against the reference; `horizon` is the number of responses over which the correction acts.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * responses / horizon)


# --- Advantages ---------------------------------------------------------------------------------------------


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, each [B, T], 0 outside the mask (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t.
    Nothing follows a response's last token: V and A are 0 there. With lam = 1 this is the discounted return less the
    value, with lam = 0 the one-step error. A gap in the mask is no step: what follows the token before it is the token
    after it, undiscounted by the gap's length.
    """
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        acted = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(acted, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(acted, values[:, t], next_value)
        advantages[:, t] = torch.where(acted, next_advantage, 0)
    return advantages, advantages + values


# --- Losses -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy loss and what it says about the step. All but `loss` are detached scalars."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens where the clipped term was the larger, so that no gradient came from it."""
    ratio: Tensor
    """Mean of new / old probability."""
    kl: Tensor
    """Mean KL(old || new) per token by k3: how far this update has moved the policy from the one that sampled."""


def policy_loss_clipped(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    total: float | Tensor | None = None,
) -> PolicyLoss:
    """-mean min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) (Schulman et al. 2017, eq. 7); all inputs [B, T].

    ratio = exp(logps - old_logps). `total` as in `masked_mean`. Only `logps` carries a gradient.
    """
    # what stands outside the mask must be finite: 0 * inf in the backward would be NaN
    log_ratio, advantages = torch.where(mask, logps - old_logps, 0), torch.where(mask, advantages, 0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    with torch.no_grad():
        # sampled from the old policy: KL(old || new) is the mean of new/old - 1 - log(new/old)
        kl = masked_mean(torch.expm1(log_ratio) - log_ratio, mask, total)
        clip_fraction = masked_mean((clipped > plain).float(), mask, total)
    loss = masked_mean(torch.maximum(plain, clipped), mask, total)
    return PolicyLoss(loss, clip_fraction, masked_mean(ratio.detach(), mask, total), kl)


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss. All but `loss` are detached scalars."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens where the clipped error was the larger."""
    error: Tensor
    """Mean squared error of the value, unclipped and not halved."""


def value_loss_clipped(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float,
    total: float | Tensor | None = None,
) -> ValueLoss:
    """mean max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2; all inputs [B, T].

    As in OpenAI's baselines and Huang et al. 2024, section 4. `clip_range` 0 does not clip.
    """
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range) if clip_range else values
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    with torch.no_grad():
        clip_fraction = masked_mean((clipped_error > plain_error).float(), mask, total)
        error = masked_mean(plain_error, mask, total)
    loss = masked_mean(torch.maximum(plain_error, clipped_error), mask, total) / 2
    return ValueLoss(loss, clip_fraction, error)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns): 1 foresees everything, 0 is a constant, below 0 is worse than one.

    NaN where the returns do not vary: there is nothing to explain.
    """
    variance = masked_var(returns, mask)
    explained = 1 - masked_var(returns - values, mask) / variance
    return torch.where(variance > 0, explained, torch.nan)


KL_ESTIMATORS = {"k1": kl_k1, "k3": kl_k3}
"""Name -> per-token estimate of KL(policy || reference), of the two log-probabilities."""
