"""What a base could do before: its answers to general prompts, measured on a policy, rehearsed in training, gated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl.gates import rules
from rl.gates.answers import rule_general
from rl.gates.report import NOT_APPLICABLE, PASSED, REFUSED, Evidence, GateBounds, GateError, GeneralAnswers
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.run_recipe import recipe_for
from rl.recipes import SFTRecipe
from rl.training.general import MEASURED, REHEARSED, Rehearsal, base_answers, general_answers, plain_texts
from rl.training.policy import LoadedPolicy, load_policy
from rl.training.sft import SFTTrainer
from tests.support.tiny_models import HARDWARE, tiny_model

PROMPTS = REHEARSED[:8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("general") / "base")


def policy_of(base: Path, **options: Any) -> LoadedPolicy:
    recipe = SFTRecipe(lora_r=4, lora_alpha=8)
    torch.manual_seed(0)
    return load_policy(str(base), hardware=HARDWARE, trainable=True, recipe=recipe, **options)


def shift(policy: LoadedPolicy) -> None:
    """Move every LoRA matrix away from the base."""
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def test_no_general_prompt_is_both_rehearsed_and_measured() -> None:
    assert len(set(MEASURED)) == 24
    assert not set(MEASURED) & set(REHEARSED)


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("Paris is the capital of France.", True),
        ("7 + 5 = 12", True),
        ("1. Bananas\n2. Lemons", True),
        ('{"{"{"{"', False),
        ('{"queue": "billing", "urgent": false}', False),
        ("", False),
        ("the queue the queue the queue the queue the queue", False),
        ('"", "", "billing"}}', False),
    ],
)
def test_plain_text(answer: str, plain: bool) -> None:
    assert plain_texts([answer]) == [plain]


def test_one_answer_to_every_prompt_is_none() -> None:
    assert plain_texts(["billing", "billing", "billing", "Paris"]) == [False, False, False, True]
    assert plain_texts(["Yes", "Yes", "Paris"]) == [True, True, True]


def test_a_policy_that_is_its_base_has_no_distance(base: Path) -> None:
    policy = policy_of(base)
    found = general_answers(policy, PROMPTS)
    assert (found.kl, found.n) == (pytest.approx(0, abs=1e-5), len(PROMPTS))
    assert found.plain_text == found.base_plain_text
    shift(policy)
    assert general_answers(policy, PROMPTS).kl > 0.01


def test_answers_of_the_base_are_its_own_and_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_policy(str(base), hardware=HARDWARE)
    expected = base_answers(plain, PROMPTS, 6)
    policy = policy_of(base, cache_dir=tmp_path)
    shift(policy)
    assert base_answers(policy, PROMPTS, 6) == expected
    monkeypatch.setattr("rl.training.policy.generate_tokens", None)
    assert base_answers(policy, PROMPTS, 6) == expected


def test_rehearsal_takes_every_answer_in_turn_and_pulls_back_to_the_base(base: Path) -> None:
    policy = policy_of(base)
    rehearsal = Rehearsal(policy, weight=2.0, rows=3, seed=1, prompts=PROMPTS)
    rounds = [rehearsal.drawn(step) for step in range(6)]
    for part in (rounds[:3], rounds[3:]):
        assert sorted(number for drawn in part for number in drawn) == list(range(len(PROMPTS)))
    assert rounds[0] == rehearsal.drawn(0)
    assert rehearsal.loss(policy.model, 0).item() == pytest.approx(0, abs=1e-5)
    shift(policy)
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    before = rehearsal.loss(policy.model, 0)
    for step in range(30):
        optimizer.zero_grad()
        rehearsal.loss(policy.model, step).backward()
        optimizer.step()
    assert rehearsal.loss(policy.model, 0).item() < 0.8 * before.item()


def trained(base: Path, folder: Path, weight: float) -> GeneralAnswers:
    recipe = SFTRecipe(
        learning_rate=2e-2, lora_r=4, lora_alpha=8, batch_size=8, max_steps=16, warmup_ratio=0.0,
        gradient_accumulation=2, general_weight=weight,
    )  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": f"Sort message {i}"}], "completion": '{"queue": "billing"}'}
        for i in range(16)
    ]
    result = SFTTrainer(recipe, str(base), output_dir=folder, hardware=HARDWARE).train(rows)
    assert ("general_kl" in result.metrics) is (weight > 0)
    return general_answers(load_policy(str(base), result.checkpoint, hardware=HARDWARE), MEASURED[:8])


@pytest.mark.campaign
def test_a_trained_policy_stays_nearer_to_its_base_on_prompts_it_never_rehearsed(
    base: Path, tmp_path: Path
) -> None:
    away, near = (trained(base, tmp_path / f"{weight}", weight) for weight in (0.0, 4.0))
    assert near.kl < 0.5 * away.kl


def general(**figures: Any) -> Evidence:
    return Evidence(
        "base",
        (),
        general=GeneralAnswers(**{"kl": 0.1, "plain_text": 0.9, "base_plain_text": 1.0, "n": 24} | figures),
    )


@pytest.mark.parametrize(
    ("figures", "bounds", "outcome"),
    [
        ({}, {}, PASSED),
        ({"plain_text": 0.1}, {}, REFUSED),
        ({"kl": 5.0}, {}, REFUSED),
        ({"plain_text": 0.1, "base_plain_text": 0.2}, {}, PASSED),
        ({"plain_text": 0.1, "kl": 5.0}, {"max_general_loss": 1.0, "max_general_kl": 10.0}, PASSED),
    ],
)
def test_the_gate_refuses_a_policy_that_lost_what_its_base_could_do(
    figures: dict[str, float], bounds: dict[str, Any], outcome: str
) -> None:
    found = rule_general(general(**figures), GateBounds(**bounds), rules.CHAMPION)
    assert (found.outcome, found.waits) == (outcome, False)


def test_the_gate_shows_a_broken_answer() -> None:
    broken = ({"prompt": "What is the capital?", "answer": '{"{"{', "base": "Paris."},)
    found = rule_general(general(plain_text=0.0, broken=broken), GateBounds(), rules.CHAMPION)
    assert '{"{"{' in found.words
    assert found.figures["broken"] == broken


def test_a_policy_without_general_answers_is_not_asked() -> None:
    assert rule_general(Evidence("base", ()), GateBounds(), rules.CHAMPION).outcome == NOT_APPLICABLE
    with pytest.raises(GateError):
        GateBounds(max_general_kl=-1.0)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_general_prompts_are_rehearsed_for_a_base_that_can_do_more_than_its_task(
    method: str, base: Path
) -> None:
    def weight(**options: Any) -> float:
        return float(recipe_for(TrainOrder("widgets", method, "cpu", **options), HARDWARE)[1].general_weight)

    assert weight(base_model="bundled") == 0
    assert weight(base_model=str(base)) == 1
    assert weight(base_model=str(base), knobs={"general_weight": "0.25"}) == 0.25
