"""PPO against problems whose best policy is known in closed form: the step that trains a model finds it in a table.

With a KL penalty against a reference, the policy that earns the most is pi*(a) = pi_ref(a) exp(r(a) / beta) / Z
(Ziegler et al. 2019, section 2; Rafailov et al. 2023, eq. 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from rl.recipes import PPORecipe
from rl.training.encoding import EncodedResponse
from rl.training.ppo_step import experience_gather, update
from rl.training.rollout import Rollout
from rl.training.run import Processes
from rl.training.shared_base import POLICY, VALUE


@dataclass(frozen=True)
class Rows:
    """A micro-batch of responses to a table: what each answered, and where its rows stand."""

    rows: list[int]
    states: Tensor
    """[N, C]: the state each token is chosen in."""
    actions: Tensor
    mask: Tensor

    @property
    def action_mask(self) -> Tensor:
        """Every token is chosen."""
        return self.mask


class Table:
    """A policy and a value for each state, under the same methods as a model has them for the step that trains it.

    A response is `length` tokens; the state of a token is its prompt and the token before it.
    """

    def __init__(self, reference: Tensor, length: int) -> None:
        """`reference`: [prompts, tokens], the reference's probabilities, the same at each place of a response."""
        self.reference, self.length = reference.log(), length
        prompts, tokens = reference.shape
        self.tokens = tokens
        # state 0 of a prompt is before the first token, state 1 + t is after token t
        self.logits = nn.Parameter(self.reference[:, None].repeat(1, tokens + 1, 1))
        self.value = nn.Parameter(torch.zeros(prompts, tokens + 1))
        self.policy = type("Device", (), {"device": torch.device("cpu")})

    def sample(self, prompts: Sequence[int], generator: torch.Generator) -> list[Rollout]:
        rollouts = []
        for number, prompt in enumerate(prompts):
            said: list[int] = []
            for _ in range(self.length):
                probs = self.logits[prompt, 1 + said[-1] if said else 0].softmax(-1)
                said.append(int(torch.multinomial(probs, 1, generator=generator)))
            rollouts.append(Rollout(number, EncodedResponse([prompt], said), True, ""))
        return rollouts

    def micro_batch(self, rows: list[int], items: Sequence[EncodedResponse]) -> Rows:
        actions = torch.tensor([item.response_ids for item in items])
        before = torch.cat([torch.zeros(len(items), 1, dtype=torch.long), 1 + actions[:, :-1]], 1)
        prompts = torch.tensor([item.prompt_ids for item in items])
        return Rows(rows, prompts * (self.tokens + 1) + before, actions, torch.ones_like(actions).bool())

    def policy_tokens(self, micro: Rows) -> tuple[Tensor, Tensor]:
        logps = self.logits.flatten(0, 1)[micro.states].log_softmax(-1)
        chosen = logps.gather(-1, micro.actions[..., None])[..., 0]
        return chosen, -(logps.exp() * logps).sum(-1)

    def reference_logps(self, micro: Rows) -> Tensor:
        prompts = micro.states // (self.tokens + 1)
        return self.reference[prompts].gather(-1, micro.actions[..., None])[..., 0]

    def values(self, micro: Rows) -> Tensor:
        return self.value.flatten()[micro.states]

    def parameters_of(self, role: str) -> dict[str, nn.Parameter]:
        return {POLICY: {"logits": self.logits}, VALUE: {"value": self.value}}[role]

    @contextlib.contextmanager
    def speaking_as(self, role: str) -> Iterator[None]:
        yield


RECIPE = PPORecipe(
    batch_size=256, mini_batch_size=128, ppo_epochs=4, cliprange_value=0.0, vf_coef=1.0, max_grad_norm=100.0,
    kl_controller="fixed",
)  # fmt: skip


def learn(
    table: Table,
    reward: Callable[[Rollout], float],
    *,
    beta: float,
    steps: int,
    rate: float,
    lam: float = 0.95,
) -> None:
    """PPO with a learning rate that falls to zero, so that the policy comes to rest."""
    recipe = RECIPE.with_knobs(init_kl_coef=beta, lam=lam)
    groups = [{"params": [table.logits], "lr": rate}, {"params": [table.value], "lr": 3 * rate}]
    optimizer = torch.optim.Adam(groups)
    generator, processes = torch.Generator().manual_seed(0), Processes(cpu=True)
    prompts = [i % len(table.reference) for i in range(recipe.batch_size)]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, (rate, 3 * rate), strict=True):
            group["lr"] = peak * (1 - step / steps)
        rollouts = table.sample(prompts, generator)
        scores = [reward(rollout) for rollout in rollouts]
        experience = experience_gather(table, rollouts, scores, recipe, beta, processes)
        update(table, experience, optimizer, recipe, processes, generator)


def tempered(reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    weighted = reference * (rewards / beta).exp()
    return weighted / weighted.sum(-1, keepdim=True)


def total_variation(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum(-1).max() / 2)


REFERENCE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
REWARDS = torch.tensor([[0.0, 0.5, 1.0, -0.5], [1.0, -1.0, 0.0, 0.5]])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_bandit_with_a_kl_price_is_solved_exactly(beta: float) -> None:
    table = Table(REFERENCE, length=1)
    before = total_variation(REFERENCE, tempered(REFERENCE, REWARDS, beta))
    learn(
        table,
        lambda r: float(REWARDS[r.item.prompt_ids[0], r.item.response_ids[0]]),
        beta=beta,
        steps=120,
        rate=0.05,
    )
    found = table.logits[:, 0].softmax(-1).detach()
    assert total_variation(found, tempered(REFERENCE, REWARDS, beta)) < 0.03 < before / 5


@pytest.mark.slow
def test_a_bandit_without_a_price_takes_the_best_arm() -> None:
    table = Table(REFERENCE, length=1)
    learn(
        table,
        lambda r: float(REWARDS[r.item.prompt_ids[0], r.item.response_ids[0]]),
        beta=0.0,
        steps=80,
        rate=0.1,
    )
    found = table.logits[:, 0].softmax(-1).detach()
    assert found[0, 2] > 0.97
    assert found[1, 0] > 0.97


@pytest.mark.campaign
def test_a_reward_at_the_end_of_two_tokens_teaches_both() -> None:
    """r = 1 if the second token repeats the first, and 0.5 more if the first is 0."""
    reference, beta = torch.tensor([[0.5, 0.3, 0.2]]), 0.5
    pairs = torch.eye(3) + torch.tensor([[0.5], [0.0], [0.0]])
    table = Table(reference, length=2)
    learn(
        table,
        lambda r: float(pairs[r.item.response_ids[0], r.item.response_ids[1]]),
        beta=beta,
        steps=150,
        rate=0.05,
        lam=1.0,
    )
    best = tempered(torch.outer(reference[0], reference[0]).flatten(), pairs.flatten(), beta).view(3, 3)
    first, second = table.logits[0, 0].softmax(-1), table.logits[0, 1:].softmax(-1)
    found = (first[:, None] * second).detach()
    assert total_variation(found.flatten(), best.flatten()) < 0.05
    # the value of the start is what the best policy earns less its KL: beta log Z (Rafailov et al. 2023, eq. 5)
    worth = beta * (torch.outer(reference[0], reference[0]) * (pairs / beta).exp()).sum().log()
    assert float(table.value[0, 0].detach()) == pytest.approx(float(worth), abs=0.1)
