"""PPO's formulas: against named vectors, cases worked by hand, and properties that must hold for any numbers."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl.recipes import PPORecipe
from rl.training.encoding import EncodedResponse
from rl.training.ppo_formulas import (
    explained_variance,
    gae,
    kl_coef_adapted,
    kl_k1,
    kl_k3,
    masked_mean,
    masked_var,
    masked_whiten,
    missing_eos_penalised,
    policy_loss_clipped,
    rewards_per_token,
    truncate_at_stop,
    value_loss_clipped,
)
from rl.training.ppo_step import experience_gather, update
from rl.training.rollout import Rollout
from rl.training.run import Processes
from rl.training.shared_base import POLICY, VALUE

VECTORS = Path(__file__).parent.parent.parent / "shared" / "data" / "vectors" / "reference_vectors.json"


def vector(name: str) -> dict[str, Any]:
    if not VECTORS.is_file():
        pytest.skip(f"the reference vectors are not beside the project ({VECTORS.name})")
    (case,) = (case for case in json.loads(VECTORS.read_text("utf-8")) if case["id"] == name)
    found: dict[str, Any] = case
    return found


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def all_true(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged(*lengths: int) -> Tensor:
    """A mask with rows of these lengths."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", ["ppo-policy-high", "ppo-policy-mid"])
def test_the_policy_loss_is_the_published_one(name: str) -> None:
    case = vector(name)
    given, expected = case["input"], case["expected"]
    new, old, advantages = (row(*given[key]) for key in ("new", "old", "adv"))
    found = policy_loss_clipped(new, old, advantages, all_true(new), given["eps"])
    assert float(found.loss) == pytest.approx(expected["policy_loss"], abs=case["tol"])
    assert float(found.ratio) == pytest.approx(expected["ratio"], abs=case["tol"])
    assert float(found.clip_fraction) == expected["clipfrac"]


def test_published_formulas() -> None:
    # gae is the published one
    case = vector("gae")
    given = case["input"]
    rewards, values = row(*given["rewards"]), row(*given["values"])
    advantages, returns = gae(rewards, values, all_true(values), given["gamma"], given["lam"])
    assert advantages[0].tolist() == pytest.approx(case["expected"]["advantages"], abs=case["tol"])
    assert returns[0].tolist() == pytest.approx(case["expected"]["returns"], abs=case["tol"])
    # masked statistics are the published ones
    case = vector("masked-stats")
    x, mask = row(*case["input"]["x"]), torch.tensor([case["input"]["mask"]], dtype=torch.bool)
    assert float(masked_mean(x, mask)) == pytest.approx(case["expected"]["mean"], abs=case["tol"])
    assert float(masked_var(x, mask)) == pytest.approx(case["expected"]["var"], abs=case["tol"])
    # an answer ends at its first stop token
    case = vector("truncate-at-stop")
    kept, mask = truncate_at_stop(torch.tensor(case["input"]["seqs"]), {2, 869}, 0)
    assert kept.tolist() == case["expected"]["out"]
    assert mask.sum(1).tolist() == [1, 1, 1, 3, 3, 3, 2, 2, 1]


def test_the_mean_over_tokens_is_the_published_one() -> None:
    case = vector("loss-token-mean")
    given, expected = case["input"]["a"], case["expected"]
    losses, mask = torch.tensor(given["loss"]).double(), torch.tensor(given["mask"]).bool()
    assert float(masked_mean(losses, mask)) == pytest.approx(expected["a_token_mean"], abs=case["tol"])
    small, large = row(1, 2), torch.tensor([[3.0, 4, 5], [6, 7, 0]])
    cut = masked_mean(small, all_true(small), 7) + masked_mean(large, ragged(3, 2), 7)
    assert float(cut) == pytest.approx(expected["d_global_token_mean"], abs=case["tol"])


def test_where_rewards_stand() -> None:
    # the score comes with the last token and the kl with each
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.5, 9.0, 9.0]])
    rewards = rewards_per_token(torch.tensor([1.0, -1.0]), kl, ragged(3, 1), kl_coef=0.2)
    # -0.2 * kl; row 0 gets +1 at its third token, row 1 gets -1 at its only one
    expected = torch.tensor([[-0.02, -0.04, 0.94], [-1.1, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    # the score stands at the last token beyond a gap
    mask = torch.tensor([[True, False, True, False]])
    rewards = rewards_per_token(torch.tensor([1.0]), torch.full((1, 4), 0.5), mask, kl_coef=0.2)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.0, 0.9, 0.0]]))


def test_advantages_bridge_what_others_wrote_between() -> None:
    """Two tokens, a tool's answer of two, one token; gamma 0.9, lambda 0.5, worked by hand.

    Of V = 1, 2, 3 and r = 0, 0, 10 at the tokens: delta = 0.9*2 - 1 = 0.8, 0.9*3 - 2 = 0.7, 10 - 3 = 7;
    A_3 = 7, A_2 = 0.7 + 0.45 * 7 = 3.85, A_1 = 0.8 + 0.45 * 3.85 = 2.5325.
    """
    mask = torch.tensor([[True, True, False, False, True, False]])
    values = torch.tensor([[1.0, 2.0, 77.0, math.nan, 3.0, 55.0]], dtype=torch.float64)
    rewards = torch.tensor([[0.0, 0.0, 9.0, math.inf, 10.0, 4.0]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(
        advantages, torch.tensor([[2.5325, 3.85, 0, 0, 7, 0]], dtype=torch.float64), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        returns, torch.tensor([[3.5325, 5.85, 0, 0, 10, 0]], dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_only_an_answer_without_end_is_penalised() -> None:
    found = missing_eos_penalised(torch.tensor([1.0, 0.5]), torch.tensor([True, False]), 1.5)
    assert found.tolist() == [1.0, -1.0]


def test_both_kl_estimates_expect_the_kl() -> None:
    p, q = row(0.7, 0.2, 0.1), row(0.2, 0.5, 0.3)
    exact = float((p * (p / q).log()).sum())
    for estimator in (kl_k1, kl_k3):
        assert float((p * estimator(p.log(), q.log())).sum()) == pytest.approx(exact, abs=1e-12)
    assert (kl_k3(p.log(), q.log()) >= 0).all()
    assert (kl_k1(p.log(), q.log()) < 0).any()


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 0.01)),  # 10 % above, 100 of 10,000 responses
        (60.0, 0.2 * (1 + 0.2 * 0.01)),  # far above: the error is clipped to 20 %
        (0.0, 0.2 * (1 - 0.2 * 0.01)),
    ],
)
def test_the_kl_coefficient_follows_its_target(kl: float, expected: float) -> None:
    found = kl_coef_adapted(0.2, kl, target=6.0, horizon=10_000, responses=100)
    assert found == pytest.approx(expected, rel=1e-12)


def test_value_loss_and_explained_variance() -> None:
    # value loss takes the worse of the clipped and the plain error
    # old 0, new 1, eps 0.2, return 2: plain (1-2)^2 = 1; clipped (0.2-2)^2 = 3.24 is the larger
    # old 0, new 1, eps 0.2, return 0: plain 1; clipped 0.04: the plain one is the larger
    values, old, returns = row(1, 1), row(0, 0), row(2, 0)
    found = value_loss_clipped(values, old, returns, all_true(values), 0.2)
    assert float(found.loss) == pytest.approx((3.24 + 1) / 2 / 2)
    assert float(found.clip_fraction) == 0.5
    assert float(found.error) == 1.0
    assert float(value_loss_clipped(values, old, returns, all_true(values), 0.0).loss) == 0.5
    # explained variance of perfect constant and opposite values
    returns = row(1, 2, 3, 4)
    mask = all_true(returns)
    assert float(explained_variance(returns, returns, mask)) == 1.0
    assert float(explained_variance(row(7, 7, 7, 7), returns, mask)) == pytest.approx(0.0)
    assert float(explained_variance(-returns, returns, mask)) == pytest.approx(-3.0)  # Var(2R) = 4 Var(R)
    assert math.isnan(float(explained_variance(returns, row(5, 5, 5, 5), mask)))


def test_ratio_one_clips_nothing_and_gives_the_plain_gradient() -> None:
    logps = noise(0, 3, 5).requires_grad_()
    advantages, mask = noise(1, 3, 5), ragged(5, 2, 4)
    found = policy_loss_clipped(logps, logps.detach(), advantages, mask, 0.2)
    assert float(found.clip_fraction) == 0
    assert float(found.ratio) == 1
    assert float(found.kl) == 0
    found.loss.backward()
    # the gradient of REINFORCE: -A / tokens
    torch.testing.assert_close(logps.grad, torch.where(mask, -advantages / 11, 0))


def test_a_clipped_token_gives_no_gradient() -> None:
    logps = row(1.0, -1.0).requires_grad_()
    policy_loss_clipped(logps, row(0, 0), row(1, -1), all_true(logps), 0.2).loss.backward()
    assert logps.grad.tolist() == [[0, 0]]


def everything(x: Tensor, y: Tensor, z: Tensor, mask: Tensor) -> list[Tensor]:
    """Every formula that takes a mask, on the same numbers; what it gives inside the mask."""
    policy = policy_loss_clipped(x, y, z, mask, 0.2)
    value = value_loss_clipped(x, y, z, mask, 0.2)
    advantages, returns = gae(x, y, mask, 0.9, 0.95)
    scores = torch.ones(len(x), dtype=x.dtype)
    scalars = [masked_mean(x, mask), masked_var(x, mask), explained_variance(x, y, mask)]
    scalars += [policy.loss, policy.clip_fraction, policy.ratio, policy.kl]
    scalars += [value.loss, value.clip_fraction, value.error]
    return [
        *scalars,
        masked_whiten(x, mask),
        rewards_per_token(scores, kl_k3(x, y), mask, 0.1),
        advantages,
        returns,
    ]


@pytest.mark.parametrize("junk", [0.0, 1e30, math.inf, math.nan])
def test_masked_positions_change_nothing(junk: float) -> None:
    mask = ragged(5, 2, 4)
    clean = [noise(seed, 3, 5) for seed in range(3)]
    dirty = [torch.where(mask, x, junk) for x in clean]
    for before, after in zip(everything(*clean, mask), everything(*dirty, mask), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_masked_positions_give_and_get_no_gradient() -> None:
    mask = ragged(5, 2, 4)
    x, y, z = (torch.where(mask, noise(seed, 3, 5), 1e30) for seed in range(3))
    for loss in (policy_loss_clipped, value_loss_clipped):
        given = x.clone().requires_grad_()
        loss(given, y, z, mask, 0.2).loss.backward()
        assert torch.isfinite(given.grad).all()
        assert (given.grad[~mask] == 0).all()


CUTS = [[3, 3], [1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1]]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, z, mask, total: policy_loss_clipped(x, y, z, mask, 0.2, total).loss,
        lambda x, y, z, mask, total: value_loss_clipped(x, y, z, mask, 0.2, total).loss,
    ],
    ids=["policy", "value"],
)
def test_the_loss_does_not_depend_on_how_rows_are_cut(loss: Loss, cut: list[int]) -> None:
    mask = ragged(5, 2, 4, 1, 3, 5)
    total = int(mask.sum())
    x, y, z = (noise(seed, 6, 5) for seed in range(3))
    whole = x.clone().requires_grad_()
    loss(whole, y, z, mask, total).backward()
    pieces = x.clone().requires_grad_()
    parts = zip(*(t.split(cut) for t in (pieces, y, z, mask)), strict=True)
    summed = torch.stack([loss(*part, total) for part in parts]).sum()
    summed.backward()
    torch.testing.assert_close(summed, loss(x, y, z, mask, total))
    torch.testing.assert_close(pieces.grad, whole.grad)


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
        return logps.gather(-1, micro.actions[..., None])[..., 0], -(logps.exp() * logps).sum(-1)

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
    batch_size=256,
    mini_batch_size=128,
    ppo_epochs=4,
    cliprange_value=0.0,
    vf_coef=1.0,
    max_grad_norm=100.0,
    kl_controller="fixed",
)


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
    assert total_variation((first[:, None] * second).detach().flatten(), best.flatten()) < 0.05
    # the value of the start is what the best policy earns less its KL: beta log Z (Rafailov et al. 2023, eq. 5)
    worth = beta * (torch.outer(reference[0], reference[0]) * (pairs / beta).exp()).sum().log()
    assert float(table.value[0, 0].detach()) == pytest.approx(float(worth), abs=0.1)
