"""One step of PPO: what was sampled becomes experience, and the policy and the value learn from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.recipes import PPORecipe
from rl.training.ppo_formulas import (
    KL_ESTIMATORS,
    explained_variance,
    gae,
    kl_k1,
    kl_k3,
    masked_mean,
    masked_sum,
    masked_whiten,
    missing_eos_penalised,
    policy_loss_clipped,
    rewards_per_token,
    value_loss_clipped,
)
from rl.training.result import TrainingFailed
from rl.training.rollout import Rollout
from rl.training.run import Processes
from rl.training.shared_base import POLICY, VALUE, MicroBatch, SharedBase


@dataclass(frozen=True)
class Experience:
    """A batch of B responses of at most T tokens with everything the update needs; no tensor carries a gradient."""

    micros: list[MicroBatch]
    """The batch, cut once."""
    mask: Tensor
    """[B, T] bool: response tokens that were chosen (`MicroBatch.action_mask`)."""
    lengths: Tensor
    """[B]: tokens of each response, chosen or not."""
    logps: Tensor
    """[B, T]: under the policy that sampled."""
    reference_logps: Tensor
    """[B, T]: under the bare base."""
    entropy: Tensor
    """[B, T]: of the policy that sampled."""
    values: Tensor
    """[B, T]"""
    scores: Tensor
    """[B]: what the rewards gave each response, less the penalty for not ending its turn."""
    advantages: Tensor
    """[B, T], whitened."""
    returns: Tensor
    """[B, T]: what the value should have said."""

    def of(self, name: str, micro: MicroBatch) -> Tensor:
        """The rows and columns of one micro-batch, [N, C]."""
        rows: Tensor = getattr(self, name)[micro.rows]
        return rows[:, : micro.mask.shape[1]]


@torch.no_grad()
def experience_gather(
    base: SharedBase,
    rollouts: Sequence[Rollout],
    scores: Sequence[float],
    recipe: PPORecipe,
    kl_coef: float,
    processes: Processes,
) -> Experience:
    """Log-probabilities, values, rewards and advantages of a batch of responses and their scores."""
    size = recipe.mini_batch_size // recipe.gradient_accumulation
    rows = [list(range(start, start + size)) for start in range(0, len(rollouts), size)]
    micros = [base.micro_batch(r, [rollouts[i].item for i in r]) for r in rows]
    width = max(len(rollout.item.response_ids) for rollout in rollouts)
    device = base.policy.device

    def gather(part: Callable[[MicroBatch], Tensor]) -> Tensor:
        """One [N, C] per micro-batch -> [B, T]."""
        whole = torch.zeros(len(rollouts), width, device=device)
        for micro in micros:
            whole[micro.rows, : micro.mask.shape[1]] = part(micro).float()
        return whole

    mask = gather(lambda micro: micro.action_mask).bool()
    if recipe.value_backbone == "shared":
        outputs = {id(micro): base.policy_and_values(micro) for micro in micros}
        logps, entropy, values = (gather(lambda micro, i=i: outputs[id(micro)][i]) for i in range(3))  # type: ignore[misc]
    else:
        said = {id(micro): base.policy_tokens(micro) for micro in micros}
        logps, entropy = (gather(lambda micro, i=i: said[id(micro)][i]) for i in range(2))  # type: ignore[misc]
        values = gather(base.values)
    reference = gather(base.reference_logps)
    ended = torch.tensor([rollout.ended for rollout in rollouts], device=device)
    given = torch.tensor(list(scores), dtype=torch.float32, device=device)
    final = missing_eos_penalised(given, ended, recipe.missing_eos_penalty)
    rewards = rewards_per_token(final, KL_ESTIMATORS[recipe.kl_estimator](logps, reference), mask, kl_coef)
    if recipe.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False, across=processes.sum)
    advantages, returns = gae(rewards, values, mask, recipe.gamma, recipe.lam)
    advantages = masked_whiten(advantages, mask, across=processes.sum)
    return Experience(
        micros=micros,
        mask=mask,
        lengths=torch.tensor([float(len(rollout.item.response_ids)) for rollout in rollouts], device=device),
        logps=logps,
        reference_logps=reference,
        entropy=entropy,
        values=values,
        scores=final,
        advantages=advantages,
        returns=returns,
    )


def kl_per_response(experience: Experience) -> Tensor:
    """[B]: nats, never negative; its mean estimates KL(policy || reference) of a response (Schulman 2020, k3)."""
    kl = torch.where(experience.mask, kl_k3(experience.logps, experience.reference_logps), 0)
    return kl.sum(1)


def mini_batches(
    experience: Experience, recipe: PPORecipe, generator: torch.Generator
) -> Iterator[list[MicroBatch]]:
    """`ppo_epochs` passes over the batch, its micro-batches in a new order each time, so many to an optimiser step."""
    for _ in range(recipe.ppo_epochs):
        order = torch.randperm(len(experience.micros), generator=generator).tolist()
        for start in range(0, len(order), recipe.gradient_accumulation):
            yield [experience.micros[i] for i in order[start : start + recipe.gradient_accumulation]]


STEP_FIGURES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "clip_fraction",
    "value_clip_fraction",
    "ratio",
    "policy_kl",
    "value_error",
)
"""Averages over the update's optimiser steps, in the order in which `_backward` adds them up."""


def update(
    base: SharedBase,
    experience: Experience,
    optimizer: torch.optim.Optimizer,
    recipe: PPORecipe,
    processes: Processes,
    generator: torch.Generator,
) -> dict[str, float]:
    """Learn from a batch; returns the update's metrics. Raises TrainingFailed where the loss is not finite.

    Ends early, before a step is taken, once the policy is further than `early_stop_kl` from the one that sampled.
    """
    roles = {role: list(base.parameters_of(role).values()) for role in (POLICY, VALUE)}
    tokens_per_response = float(_mean_over(processes, experience.mask.sum(1).float()))
    limit = (recipe.early_stop_kl or recipe.target_kl) / tokens_per_response
    sums: dict[str, float] = dict.fromkeys((*STEP_FIGURES, "loss", "grad_norm"), 0.0)
    steps = early_stops = 0
    for mini_batch in mini_batches(experience, recipe, generator):
        optimizer.zero_grad(set_to_none=True)
        total = processes.sum(torch.stack([micro.action_mask.sum() for micro in mini_batch]).sum())
        measured = torch.stack(
            [_backward(base, experience, micro, recipe, total) for micro in mini_batch]
        ).sum(0)
        totals = dict(zip(STEP_FIGURES, processes.sum(measured).tolist(), strict=True))
        totals["loss"] = (
            totals["policy_loss"]
            + recipe.vf_coef * totals["value_loss"]
            - recipe.entropy_coef * totals["entropy"]
        )
        if not math.isfinite(totals["loss"]):
            raise TrainingFailed(
                f"the loss became {totals['loss']:g} (policy {totals['policy_loss']:g}, "
                f"value {totals['value_loss']:g}): training diverged. "
                f"Lower learning_rate (now {recipe.learning_rate:g}), or look at the rewards for values that are too "
                f"large; the last whole checkpoint is kept"
            )
        if totals["policy_kl"] > limit:
            early_stops = 1
            break
        processes.gradients_sum(p for group in roles.values() for p in group)
        totals["grad_norm"] = _clip(roles, recipe)
        optimizer.step()
        steps += 1
        for name in sums:
            sums[name] += totals[name]
    optimizer.zero_grad(set_to_none=True)
    metrics = {name: value / steps if steps else math.nan for name, value in sums.items()}
    return {**metrics, "optimiser_steps": float(steps), "early_stopped": float(early_stops)}


def _backward(
    base: SharedBase, experience: Experience, micro: MicroBatch, recipe: PPORecipe, total: Tensor
) -> Tensor:
    """Add one micro-batch's gradients; returns its share of the figures named in STEP_FIGURES.

    `total` is the mini-batch's count of chosen tokens, over all its micro-batches and processes. Policy and value go
    backward one after the other, each while its own adapter is active: recomputed activations would be another
    adapter's otherwise.
    """
    mask = micro.action_mask
    if recipe.value_backbone == "shared":
        logps, entropies, values = base.policy_and_values(micro)
    else:
        logps, entropies = base.policy_tokens(micro)
    policy = policy_loss_clipped(
        logps,
        experience.of("logps", micro),
        experience.of("advantages", micro),
        mask,
        recipe.cliprange,
        total,
    )
    entropy = masked_mean(entropies, mask, total)
    loss = policy.loss - recipe.entropy_coef * entropy
    if recipe.value_backbone == "adapter":
        with base.speaking_as(POLICY):
            loss.backward()
        values = base.values(micro)
    value = value_loss_clipped(
        values,
        experience.of("values", micro),
        experience.of("returns", micro),
        mask,
        recipe.cliprange_value,
        total,
    )
    value_loss = recipe.vf_coef * value.loss
    if recipe.value_backbone == "shared":
        with base.speaking_as(POLICY):
            (loss + value_loss).backward()
    else:
        with base.speaking_as(VALUE):
            value_loss.backward()
    return torch.stack(
        [
            policy.loss.detach(),
            value.loss.detach(),
            entropy.detach(),
            policy.clip_fraction,
            value.clip_fraction,
            policy.ratio,
            policy.kl,
            value.error,
        ]
    )


def _clip(roles: dict[str, list[torch.nn.Parameter]], recipe: PPORecipe) -> float:
    """Clip the gradients to `max_grad_norm`; returns the policy's norm before.

    A value with weights of its own is clipped on its own: a large value error must not shrink the policy's step.
    """
    if recipe.value_backbone == "shared":
        both = [*roles[POLICY], *roles[VALUE]]
        return float(torch.nn.utils.clip_grad_norm_(both, recipe.max_grad_norm))
    torch.nn.utils.clip_grad_norm_(roles[VALUE], recipe.max_grad_norm)
    return float(torch.nn.utils.clip_grad_norm_(roles[POLICY], recipe.max_grad_norm))


def experience_metrics(experience: Experience, kl_coef: float, processes: Processes) -> dict[str, float]:
    """Metrics of a batch of responses, before anything was learnt from it."""
    kl = kl_per_response(experience)
    mask = experience.mask
    reward = float(_mean_over(processes, experience.scores))
    variance = _mean_over(processes, (experience.scores - reward).square())
    nats = float(_mean_over(processes, kl))
    log_ratio = torch.where(mask, kl_k1(experience.logps, experience.reference_logps), 0).sum(1)
    tokens = processes.sum(mask.sum().float())
    entropy = processes.sum(masked_sum(experience.entropy, mask)) / tokens
    return {
        "reward": reward,
        "reward_std": math.sqrt(float(variance)),
        "reward_less_kl": reward - kl_coef * nats,
        "kl": nats,
        "log_ratio": float(_mean_over(processes, log_ratio)),
        "kl_coef": kl_coef,
        "tokens": float(_mean_over(processes, experience.lengths)),
        "sampled_entropy": float(entropy),
        "value": float(processes.sum(masked_sum(experience.values, mask)) / tokens),
        "return": float(processes.sum(masked_sum(experience.returns, mask)) / tokens),
        "explained_variance": float(explained_variance(experience.values, experience.returns, mask)),
    }


def _mean_over(processes: Processes, x: Tensor) -> Tensor:
    """Mean of the [B] of every process; each has as many."""
    return processes.sum(x.mean()) / processes.count


def kl_of_rollouts(base: SharedBase, rollouts: Sequence[Rollout], recipe: PPORecipe) -> Tensor:
    """[B]: as `kl_per_response`, from the bare base, of responses that are only looked at."""
    size = recipe.mini_batch_size // recipe.gradient_accumulation
    found = []
    with torch.no_grad():
        for start in range(0, len(rollouts), size):
            rows = list(range(start, min(start + size, len(rollouts))))
            micro = base.micro_batch(rows, [rollouts[i].item for i in rows])
            kl = kl_k3(base.policy_tokens(micro)[0], base.reference_logps(micro, bare=True))
            found.append(torch.where(micro.mask, kl, 0).sum(1))
    return torch.cat(found)
