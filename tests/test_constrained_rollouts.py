"""Answers that PPO and GRPO sample within the form their agent serves, and their probabilities among allowed tokens."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packed_forward import logps
from packed_forward.logps import causal_model, head_logps
from packed_forward.packing import NO_CHOICE, AllowedTokens, Strategy, allowed_logps
from packed_forward.selftest import install
from rl.agents import AGENTS
from rl.agents.template import TemplateAgent
from rl.recipes import GRPO_CONFIG, PPO_CONFIG, GRPORecipe, PPORecipe, SFTRecipe
from rl.rewards.base import RewardSample, RewardValue
from rl.training.constrained_generation import Sampling
from rl.training.encoding import EncodedResponse
from rl.training.grpo import GroupTrainer, GRPOTrainer
from rl.training.policy import LoadedPolicy, generate, load_policy
from rl.training.ppo import PPOTrainer
from rl.training.preflight import WITHIN, answers_check
from rl.training.result import TrainingRefused
from rl.training.rollout import sample_responses
from rl.training.scoring import answer_forms, kl_encoded, score_pairs, score_responses
from rl.training.shared_base import SharedBase
from tests.support.tiny_models import HARDWARE, TOKENIZERS, tiny_model

QUICK = PPORecipe(lora_r=4, lora_alpha=8, max_length=160, max_new_tokens=96)
NAMES = ("pump", "valve", "Zahnrad", "blue hose")
LIST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "check_these": {"type": "array", "items": {"enum": list(NAMES)}, "uniqueItems": True, "minItems": 1}
    },
    "required": ["check_these"],
    "additionalProperties": False,
}
WORKSHOP = TemplateAgent(
    "workshop",
    "",
    "",
    system_prompt="You help the workshop. Reply in JSON as the shop schema says.",
    template="Machine report: {symptom} since {hours} h.\nParts: " + " / ".join(NAMES),
    schema=LIST,
    max_new_tokens=48,
)
"""An agent that the bundled base never answers validly by itself."""


def test_allowed_sets() -> None:
    # a probability among allowed tokens is its share of theirs
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]))
    sets = torch.tensor([[True, False, True, False], [True, True, True, True]])
    chosen, entropy = allowed_logps(logits, torch.tensor([2, 2]), sets)
    assert chosen.exp().tolist() == pytest.approx([3 / 4, 3 / 10])
    assert entropy.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3), 1.279854])
    # sets are held once and a place without a choice needs none
    one, two = np.array([True, False, False]), np.array([True, False, True])
    allowed = AllowedTokens.of([one, two, None, two.copy()], 3)
    assert allowed.index.tolist() == [NO_CHOICE, 0, 1, 0]
    assert allowed.sets.tolist() == [[True, False, True], [True, True, True]]


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


def test_all_tokens_give_the_plain_gradient(base_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_policy(str(base_path), hardware=HARDWARE).model
    size = model.config.vocab_size
    targets = torch.randint(0, size, (7,), generator=torch.Generator().manual_seed(0))
    allowed = AllowedTokens.of([None] * 7, size)

    def values(among: AllowedTokens | None) -> list[torch.Tensor]:
        hidden = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
        hidden.requires_grad_()
        chosen, entropy = head_logps(model, hidden, targets, ("entropy",), 0.7, among)[:2]
        return [
            chosen,
            entropy,
            *(torch.autograd.grad(part.sum(), hidden, retain_graph=True)[0] for part in (chosen, entropy)),
        ]

    plain = values(None)
    for cells in (logps.CELLS, 2 * size):  # at once, and in slices of two places
        monkeypatch.setattr(logps, "CELLS", cells)
        for mine, theirs in zip(values(allowed), plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_places_without_a_choice_are_sure_and_pass_no_gradient(base_path: Path) -> None:
    model = load_policy(str(base_path), hardware=HARDWARE).model
    only = np.arange(model.config.vocab_size) == 9
    hidden = torch.randn(2, model.config.hidden_size, requires_grad=True)
    chosen = head_logps(
        model, hidden, torch.tensor([9, 9]), allowed=AllowedTokens.of([only, only], len(only))
    )[0]
    chosen.sum().backward()
    assert chosen.tolist() == [0.0, 0.0]
    assert hidden.grad.abs().max() == 0


def paths(policy: LoadedPolicy, form: Any, prompt: list[int]) -> list[list[int]]:
    """Every sequence of tokens that an answer within a form may be."""
    found: list[list[int]] = []
    open_paths: list[list[int]] = [[]]
    while open_paths:
        path = open_paths.pop()
        constraints = policy.constraints([form])
        for token in path:
            constraints.accept(0, token)
        allowed = constraints.allowed_tokens(0)
        if allowed is None:
            found.append(path)
        else:
            open_paths += [[*path, int(token)] for token in np.flatnonzero(allowed)]
    return found


@pytest.mark.parametrize("strategy", [Strategy.STOCK, Strategy.SPLIT])
def test_probabilities_of_all_answers_of_a_form_sum_to_one(base_path: Path, strategy: Strategy) -> None:
    policy = load_policy(str(base_path), hardware=HARDWARE)
    base = SharedBase(policy, QUICK)
    install(policy, strategy)
    base.strategy = strategy
    prompt, form = (
        policy.encoder.prompts([[{"role": "user", "content": "left?"}]], 8)[0][0],
        ("no", "yes", "é"),
    )
    base.forms.add(prompt, form)
    answers = paths(policy, form, prompt)
    assert len(answers) > len(form)  # whole words, and words of pieces
    micro = base.micro_batch(list(range(len(answers))), [EncodedResponse(prompt, path) for path in answers])
    sums = base.policy_tokens(micro)[0].detach().sum(1).exp()
    assert float(sums.sum()) == pytest.approx(1.0, abs=1e-4)
    base.forms = policy.answer_forms()
    free = base.micro_batch(list(range(len(answers))), [EncodedResponse(prompt, path) for path in answers])
    assert float(base.policy_tokens(free)[0].detach().sum(1).exp().sum()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma3_text", "gpt2"])
def test_models_of_random_weights_sample_within_the_form(architecture: str, tmp_path: Path) -> None:
    assert len({TOKENIZERS[name] for name in ("llama", "mistral", "qwen3", "gemma3_text", "gpt2")}) == 5
    policy = load_policy(str(tiny_model(tmp_path / architecture, architecture)), hardware=HARDWARE)
    prompts = policy.encoder.prompts(
        [WORKSHOP.render({"symptom": word, "hours": 2}) for word in ("rust", "leak", "heat")], 200
    )[0]
    forms = policy.answer_forms()
    forms.add(prompts[0], LIST)
    forms.add(prompts[1], ("links abbiegen", "rechts"))
    forms.add(prompts[2], None)
    rollouts = sample_responses(
        causal_model(policy.model),
        policy.encoder,
        prompts,
        4,
        Sampling(200),
        torch.Generator().manual_seed(0),
        forms,
    )
    for rollout in rollouts[:4]:
        assert WORKSHOP.is_valid(rollout.text), rollout.text
    assert {rollout.text for rollout in rollouts[4:8]} <= {"links abbiegen", "rechts"}
    assert all(rollout.ended for rollout in rollouts[:8])
    items = [rollout.item for rollout in rollouts]
    allowed = forms.allowed_tokens(items)
    tokens = [token for item in items for token in item.response_ids]
    assert all(
        allowed.sets[n, token]
        for n, token in zip(allowed.index.tolist(), tokens, strict=True)
        if n != NO_CHOICE
    )
    assert bool(allowed.sets[allowed.index[-sum(len(item.response_ids) for item in items[8:]) :]].all())


def test_a_prompt_of_two_forms_is_answered_freely(base_path: Path) -> None:
    forms = load_policy(str(base_path), hardware=HARDWARE).answer_forms()
    assert not forms
    forms.add([5, 6], ("no", "yes"))
    forms.add([5, 6], ("no", "yes"))
    assert forms
    forms.add([5, 6], ("left", "right"))
    assert not forms
    assert forms.allowed_tokens([EncodedResponse([5, 6], [7, 8])]) is None


def test_a_form_that_nothing_can_enforce_is_noted_before_training(base_path: Path, tmp_path: Path) -> None:
    pattern = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
    agent = TemplateAgent("shop", "", "", system_prompt="Sell.", template="{ask}", schema=pattern)
    rows = [{"prompt": agent.render({"ask": f"item {n}"}), "state": {"ask": f"item {n}"}} for n in range(2)]
    trainer = PPOTrainer(
        QUICK.with_knobs(max_new_tokens=4, max_steps=1, batch_size=4, allow_constant_reward=True),
        str(base_path),
        output_dir=tmp_path / "run",
        agent="shop",
        hardware=HARDWARE,
        rewards=[Short()],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AGENTS, "shop", agent)
        result = trainer.train(rows)
    assert [note for note in result.notes if "without their JSON schema" in note and "look-around" in note]


def test_a_forced_token_is_no_action(base_path: Path) -> None:
    policy = load_policy(str(base_path), hardware=HARDWARE)
    base = SharedBase(policy, QUICK)
    prompt = policy.encoder.prompts([[{"role": "user", "content": "left?"}]], 8)[0][0]
    base.forms.add(prompt, ("no", "yes"))
    (stop,) = policy.encoder.stop_ids[:1]
    word = policy.tokenizer.encode("yes", add_special_tokens=False)
    micro = base.micro_batch([0], [EncodedResponse(prompt, [*word, stop])])
    assert micro.mask.tolist() == [[True] * (len(word) + 1)]
    assert micro.action_mask[0, 0]
    assert not micro.action_mask[0, -1] or len(policy.encoder.stop_ids) > 1
    assert base.policy_tokens(micro)[0][0][~micro.action_mask[0]].abs().max() == 0
    assert PPORecipe(vllm_server="http://127.0.0.1:1").constrains is False
    assert GRPORecipe().constrains
    assert not GRPORecipe(constrained_decoding=False).constrains
    assert not SFTRecipe().constrains


class Short:
    """Pay for lists of few names that begin with the valve."""

    name = "short"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(self.pay(sample.response)) for sample in samples]

    @staticmethod
    def pay(answer: str) -> float:
        try:
            names = json.loads(answer)["check_these"]
        except (ValueError, KeyError, TypeError):
            return -2.0
        return 2.0 * (names[0] == "valve") - 0.5 * (len(names) - 1)


ROWS = [
    {"prompt": WORKSHOP.render(state), "state": state}
    for hours in range(1, 17)
    for symptom in ("rust", "leak", "noise", "heat")
    for state in [{"symptom": symptom, "hours": hours}]
]


def reward_of(policy: LoadedPolicy) -> float:
    rows = ROWS[48:]
    answers = generate(
        policy,
        [row["prompt"] for row in rows],
        max_new_tokens=48,
        temperature=1.0,
        seed=3,
        forms=[LIST] * len(rows),
    )
    return sum(Short.pay(answer.text) for answer in answers) / len(answers)


RUNS = {
    "ppo": (
        PPOTrainer,
        PPO_CONFIG["cpu"].with_knobs(max_steps=6, batch_size=32, mini_batch_size=16, learning_rate=1e-3),
    ),
    "grpo": (GRPOTrainer, GRPO_CONFIG["cpu"].with_knobs(max_steps=6, batch_size=32, learning_rate=1e-3)),
}


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.parametrize("method", sorted(RUNS))
def test_an_unwritten_form_is_taught_by_rewards(method: str, tmp_path: Path) -> None:
    trainer, recipe = RUNS[method]
    options = {"agent": "workshop", "hardware": HARDWARE, "rewards": [Short()]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AGENTS, "workshop", WORKSHOP)
        with pytest.raises(TrainingRefused, match=r"none of .* is one the agent can act on"):
            trainer(
                recipe.with_knobs(constrained_decoding=False),
                "bundled",
                output_dir=tmp_path / "free",
                **options,
            ).train(ROWS[:48])
        run = trainer(recipe, "bundled", output_dir=tmp_path / "run", **options)
        before = reward_of(load_policy("bundled", hardware=HARDWARE))
        result = run.train(ROWS[:48], ROWS[48:52])
        look = answers_check(run.load_base_model(), ROWS[:8], "workshop", within=True)
    assert (look.served, look.share) == (WITHIN, 1.0)
    assert result.history["valid"] == [1.0] * len(result.history["valid"])
    assert result.metrics["eval_kl"] > 0
    assert reward_of(load_policy("bundled", result.checkpoint, hardware=HARDWARE)) > before + 0.5


@pytest.mark.campaign
def test_packed_rows_are_the_stock(base_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, torch.Tensor] = {}
    plain = GroupTrainer._get_per_token_logps_and_entropies

    def both(
        self: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, *args: Any, **more: Any
    ) -> Any:
        made = plain(self, model, ids, mask, keep, *args, **more)
        if made[1] is not None and not found:
            found["packed"] = torch.stack(made[:2]).detach()
            found["stock"] = torch.stack(self._constrained_logps(model, ids, mask, keep)[:2]).detach()
            found["mask"] = mask[:, -keep:].bool()
        return made

    monkeypatch.setattr(GroupTrainer, "_get_per_token_logps_and_entropies", both)
    monkeypatch.setitem(AGENTS, "workshop", WORKSHOP)
    recipe = GRPORecipe(
        batch_size=8,
        num_generations=4,
        lora_r=4,
        lora_alpha=8,
        max_length=160,
        max_new_tokens=64,
        max_steps=1,
    )
    trainer = GRPOTrainer(
        recipe,
        str(base_path),
        output_dir=tmp_path / "run",
        agent="workshop",
        hardware=HARDWARE,
        rewards=[Short()],
    )
    trainer.train(ROWS[:8], ROWS[8:10])
    mask = found["mask"].expand(2, -1, -1)
    assert not any("forward stock" in line for line in trainer.context.details)
    torch.testing.assert_close(found["packed"][mask], found["stock"][mask], rtol=1e-4, atol=1e-4)
    policy = trainer.load_base_model()
    item = EncodedResponse(*policy.encoder.prompts([ROWS[0]["prompt"]], 64)[0], policy.encoder.stop_ids[:1])
    assert kl_encoded(policy, [item], forms=policy.answer_forms()) == kl_encoded(policy, [item])


def test_a_likelihood_is_that_of_the_policy_as_it_answers_within_the_form(base_path: Path) -> None:
    policy = load_policy(str(base_path), hardware=HARDWARE)
    prompt = [{"role": "user", "content": "Which part?"}]
    named, other, foreign = '{"part": "pump"}', '{"part": "valve"}', "the pump, I think"
    form = (named, other)
    scores = score_responses(policy, [(prompt, text) for text in (named, other)], forms=[form] * 2)
    assert math.fsum(math.exp(score.logp) for score in scores) == pytest.approx(1.0, abs=1e-4)
    plain = score_responses(policy, [(prompt, text) for text in (named, other, foreign)])
    assert all(mine.logp > free.logp + 5 for mine, free in zip(scores, plain, strict=False))
    # what the form forbids has the likelihood of free text, and so has what stands in a pair with it
    (alone,) = score_responses(policy, [(prompt, foreign)], forms=[form])
    assert alone.logp == pytest.approx(plain[2].logp, rel=1e-4)
    rows = [
        {"prompt": prompt, "chosen": named, "rejected": other},
        {"prompt": prompt, "chosen": named, "rejected": foreign},
    ]
    within, mixed = score_pairs(policy, rows, forms=[form] * 2)
    assert [side.logp for side in within] == pytest.approx([score.logp for score in scores], abs=1e-3)
    assert [side.logp for side in mixed] == pytest.approx([plain[0].logp, plain[2].logp], rel=1e-4)


def test_an_answer_is_permitted_where_each_of_its_tokens_was_allowed(base_path: Path) -> None:
    policy = load_policy(str(base_path), hardware=HARDWARE)
    prompt = [{"role": "user", "content": "Which parts?"}]
    texts = [
        '{"check_these": ["pump", "valve"]}',
        '{"check_these":["pump"]}',
        '{"check_these": ["pump", "pump"]}',
        "{}",
    ]
    items = policy.encoder.responses([(prompt, text) for text in texts])
    forms = answer_forms(policy, items, [LIST] * len(items))
    assert [forms.permits(item) for item in items] == [True, True, False, False]
    assert all(answer_forms(policy, items, [None] * 4).permits(item) for item in items)
