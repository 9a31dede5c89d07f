"""Log-probabilities of responses, and the tokens they are taken over."""

import dataclasses
import math
from collections.abc import Callable
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
from rl.training.encoding import Encoder
from rl.training.general import MEASURED, REHEARSED, Rehearsal, base_answers, general_answers, plain_texts
from rl.training.policy import LoadedPolicy, load_policy
from rl.training.scoring import ScoringError, head_check, kl_encoded, kl_next_token, score_responses
from rl.training.sft import SFTTrainer
from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    HARDWARE,
    TOKENIZERS,
    tiny_adapter,
    tiny_model,
    tiny_tokenizer,
)

ASK = [{"role": "system", "content": "Pick one."}, {"role": "user", "content": "Which widget, José?"}]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedPolicy]:
    loaded: dict[str, LoadedPolicy] = {}

    def policy(architecture: str) -> LoadedPolicy:
        if architecture not in loaded:
            folder = tiny_model(tmp_path_factory.mktemp(architecture), architecture)
            loaded[architecture] = load_policy(str(folder), hardware=HARDWARE)
        return loaded[architecture]

    return policy


@pytest.fixture
def llama(policies: Callable[[str], LoadedPolicy]) -> LoadedPolicy:
    return policies("llama")


def by_hand(policy: LoadedPolicy, prompt: list[int], response: list[int]) -> float:
    """log p of each response token, one at a time, from the model's own logits."""
    total = 0.0
    for i, token in enumerate(response):
        with torch.inference_mode():
            logits = policy.model(input_ids=torch.tensor([prompt + response[:i]])).logits[0, -1].double()
        total += float(logits[token]) - math.log(float(logits.exp().sum()))
    return total


@pytest.mark.parametrize("architecture", TOKENIZERS)
def test_scores_are_the_models_own(policies: Callable[[str], LoadedPolicy], architecture: str) -> None:
    policy = policies(architecture)
    (encoded,) = policy.encoder.responses([(ASK, '{"widget": "table"}')])
    (score,) = score_responses(policy, [(ASK, '{"widget": "table"}')])
    assert score.logp == pytest.approx(by_hand(policy, encoded.prompt_ids, encoded.response_ids), abs=1e-3)
    assert score.tokens == len(encoded.response_ids)
    assert not score.truncated
    head_check(policy)


def test_padding_and_batching_do_not_change_a_score(llama: LoadedPolicy) -> None:
    items = [
        ([{"role": "user", "content": "why " * n}], "because " * m) for n, m in ((1, 9), (30, 1), (7, 4))
    ]
    together = score_responses(llama, items, batch_size=3)
    alone = [score_responses(llama, [item])[0] for item in items]
    assert [s.logp for s in together] == pytest.approx([s.logp for s in alone], abs=1e-4)


def test_without_its_adapter_a_policy_scores_as_its_base(tmp_path: Path, llama: LoadedPolicy) -> None:
    adapter = tiny_adapter(Path(llama.base_model), tmp_path / "adapter")
    adapted = load_policy(llama.base_model, adapter, hardware=HARDWARE)
    items = [(ASK, "table"), (ASK, "chart")]
    base = [s.logp for s in score_responses(llama, items)]
    assert [s.logp for s in score_responses(adapted, items, adapter=False)] == pytest.approx(base, abs=1e-5)
    assert [s.logp for s in score_responses(adapted, items)] != pytest.approx(base, abs=1e-2)


def test_scores_that_are_kept_are_computed_once_for_the_policy_and_once_for_its_base(
    tmp_path: Path, llama: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tiny_adapter(Path(llama.base_model), tmp_path / "adapter")
    policy = load_policy(llama.base_model, adapter, hardware=HARDWARE)
    items = [(ASK, "a table"), (ASK, "Yes")]
    asked: list[dict[str, Any]] = [{}, {"adapter": False}, {"forms": [None, ("Yes", "No")]}]
    expected = [[score.logp for score in score_responses(policy, items, **options)] for options in asked]
    policy.scored = {}
    for _ in range(2):
        found = [[score.logp for score in score_responses(policy, items, **options)] for options in asked]
        assert found == expected
        monkeypatch.setattr("rl.training.scoring._batch_logps", None)


def test_the_divergence_is_of_the_models_logits(tmp_path: Path, llama: LoadedPolicy) -> None:
    adapter = tiny_adapter(Path(llama.base_model), tmp_path / "adapter")
    policy = load_policy(llama.base_model, adapter, hardware=llama.hardware)
    texts = ["a line", "a pie, and then a table", "none"]
    items = llama.encoder.responses([(ASK, text) for text in texts])

    def logits(ids: list[int], start: int) -> torch.Tensor:
        """Log-probabilities at the positions before each response token."""
        with torch.inference_mode():
            whole = policy.model(input_ids=torch.tensor([ids])).logits[0]
        return torch.log_softmax(whole[start - 1 : -1].double(), -1)

    expected = []
    for item in items:
        ids = [*item.prompt_ids, *item.response_ids]
        own = logits(ids, len(item.prompt_ids))
        with policy.without_adapter():
            base = logits(ids, len(item.prompt_ids))
        expected.append(float((own.exp() * (own - base)).sum()))
    assert min(expected) > 0
    assert kl_next_token(policy, items, batch_size=2) == pytest.approx(expected, rel=1e-3)
    assert kl_next_token(policy, items, reference=llama) == pytest.approx(expected, rel=1e-3)


def test_an_unsure_token_does_not_carry_the_distance(tmp_path: Path, llama: LoadedPolicy) -> None:
    """An answer chosen for a policy may hold a token that its reference is sure of and the policy is not."""
    adapter = tiny_adapter(Path(llama.base_model), tmp_path / "adapter")
    policy = load_policy(llama.base_model, adapter, hardware=llama.hardware)
    items = llama.encoder.responses([(ASK, "a pie, and then a table")])
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-60)  # away from what was written, as far as a training that diverged
    exact, estimate = kl_next_token(policy, items)[0], kl_encoded(policy, items)[0]
    assert 0 < exact < estimate / 2


def test_unknown_logits_are_refused(llama: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    head = llama.model.lm_head
    monkeypatch.setattr(head, "forward", lambda hidden: torch.nn.functional.linear(hidden, head.weight) * 0.5)
    with pytest.raises(ScoringError, match="llama"):
        head_check(llama)


def encoder(template: str | None = CHAT_TEMPLATE, context: int | None = None, kind: str = "gpt2") -> Encoder:
    tokenizer = tiny_tokenizer(kind)
    tokenizer.chat_template = template
    return Encoder(tokenizer, context)


def test_templates_render_and_end_turns() -> None:
    # a template without a system turn gets it in the users
    strict = encoder(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    assert strict.render(ASK) == "<|user|>Pick one.\n\nWhich widget, José?<|end|><|assistant|>"
    # a prompt no template takes is refused with its roles
    strict = encoder("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"roles must alternate.*system, user"):
        strict.render(ASK)
    # the turn ends where the template says
    other = encoder(CHAT_TEMPLATE.replace("<|end|>", "<|pad|>"))
    assert other.turn_end_id == other.tokenizer.convert_tokens_to_ids("<|pad|>")
    assert other.stop_ids == sorted(other.tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"]))


def test_what_a_template_adds_to_past_answers_is_not_trained_on() -> None:
    thinking = encoder(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}think{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (item,) = thinking.responses([(ASK, "table")])
    assert thinking.tokenizer.decode(item.prompt_ids).endswith("<|assistant|>")
    assert thinking.tokenizer.decode(item.response_ids) == "table<|end|>"


def test_a_long_prompt_loses_its_oldest_words_and_keeps_the_system_turn() -> None:
    small = encoder()
    words = " ".join(f"word{i}" for i in range(100))
    long = [{"role": "system", "content": "Pick one."}, {"role": "user", "content": words}]
    (item,) = small.responses([(long, "table")], max_length=64)
    text = small.tokenizer.decode(item.prompt_ids)
    assert len(item.prompt_ids) + len(item.response_ids) == 64
    assert text.startswith("<|system|>Pick one.<|end|><|user|>")
    assert text.endswith("word98 word99<|end|><|assistant|>")
    assert item.prompt_cut
    assert not item.response_cut


def test_responses_are_cut_at_the_limits() -> None:
    # a long response loses its end and its turn end
    small = encoder()
    (item,) = small.responses([(ASK, "word " * 50)], max_length=200, max_response_length=10)
    assert len(item.response_ids) == 10
    assert item.response_cut
    assert small.turn_end_id not in item.response_ids
    # the models context is a limit even where none is asked for
    small = encoder(context=48)
    (item,) = small.responses([([{"role": "user", "content": "why " * 100}], "table")])
    assert len(item.prompt_ids) + len(item.response_ids) == 48


def a_row(chosen: Any, rejected: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": ASK, "chosen": chosen, "rejected": rejected, **more}


def test_pairs_are_encoded_cut_and_left_out() -> None:
    # both sides of a pair share the prompts tokens
    small = encoder()
    row = {"prompt": [{"role": "user", "content": "why " * 60}], "chosen": "a b c d", "rejected": "e"}
    (pair,) = small.pairs([row], 50, 20).rows
    assert len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"])) == 50
    # truncation is counted per prompt and per response
    long = {"prompt": [{"role": "user", "content": "why " * 90}], "chosen": "a", "rejected": "b"}
    pairs = encoder().pairs([long, a_row("x " * 40, "y " * 40), a_row("a", "b")], 64, 12)
    assert pairs.truncated == {"prompts": 1, "completions": 2}
    assert len(pairs.rows) == 3
    # only pairs that cannot teach are left out and why is counted
    rows = [a_row("same", "same"), a_row("a " * 40 + "x", "a " * 40 + "y"), a_row("left", "right")]
    pairs = encoder().pairs(rows, 64, 8)
    assert pairs.left_out.counts == {"identical responses": 1, "identical after truncation": 1}
    assert [row["index"] for row in pairs.rows] == [2]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen": "a", "rejected": "b"}, r"row 1: expected `prompt`"),
        ({"prompt": "text", "chosen": "a", "rejected": "b"}, r"row 1: expected `prompt`"),
        (a_row(None, "b"), r"row 1: expected `chosen`"),
        (a_row("a", "b", weight=0), r"row 1: expected a weight above 0"),
    ],
)
def test_a_row_of_another_shape_is_refused_with_its_number(row: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encoder().pairs([a_row("a", "b"), row], 64, 8)


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


def test_the_bases_answers_are_kept(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = base_answers(load_policy(str(base), hardware=HARDWARE), PROMPTS, 6)
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
        learning_rate=2e-2,
        lora_r=4,
        lora_alpha=8,
        batch_size=8,
        max_steps=16,
        warmup_ratio=0.0,
        gradient_accumulation=2,
        general_weight=weight,
    )
    rows = [
        {"prompt": [{"role": "user", "content": f"Sort message {i}"}], "completion": '{"queue": "billing"}'}
        for i in range(16)
    ]
    result = SFTTrainer(recipe, str(base), output_dir=folder, hardware=HARDWARE).train(rows)
    assert ("general_kl" in result.metrics) is (weight > 0)
    return general_answers(load_policy(str(base), result.checkpoint, hardware=HARDWARE), MEASURED[:8])


@pytest.mark.campaign
def test_a_trained_policy_stays_near_its_base(base: Path, tmp_path: Path) -> None:
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
def test_a_lost_skill_is_refused(figures: dict[str, float], bounds: dict[str, Any], outcome: str) -> None:
    found = rule_general(general(**figures), GateBounds(**bounds), rules.CHAMPION)
    assert (found.outcome, found.waits) == (outcome, False)


def test_general_answers_at_the_gate() -> None:
    # the gate shows a broken answer
    broken = ({"prompt": "What is the capital?", "answer": '{"{"{', "base": "Paris."},)
    found = rule_general(general(plain_text=0.0, broken=broken), GateBounds(), rules.CHAMPION)
    assert '{"{"{' in found.words
    assert found.figures["broken"] == broken
    # a policy without general answers is not asked
    assert rule_general(Evidence("base", ()), GateBounds(), rules.CHAMPION).outcome == NOT_APPLICABLE
    with pytest.raises(GateError):
        GateBounds(max_general_kl=-1.0)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_a_base_with_skills_rehearses_general_prompts(method: str, base: Path) -> None:
    def weight(**options: Any) -> float:
        return float(recipe_for(TrainOrder("widgets", method, "cpu", **options), HARDWARE)[1].general_weight)

    assert weight(base_model="bundled") == 0
    assert weight(base_model=str(base)) == 1
    assert weight(base_model=str(base), knobs={"general_weight": "0.25"}) == 0.25


@pytest.mark.django_db
def test_a_small_base_model_on_a_gpu_gets_the_rates_of_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled one too: the presets for a GPU's memory have rates for models of some billions."""
    card = dataclasses.replace(HARDWARE, device="cuda", preset="high_quality")
    order = TrainOrder("widgets", "sft")
    assert recipe_for(order, card)[0] == "cpu"
    monkeypatch.setattr("rl.jobs.run_recipe.base_parameters", lambda base: 1_240_000_000)
    assert recipe_for(order, card)[0] == "high_quality"
    assert recipe_for(dataclasses.replace(order, config="small_gpu"), card)[0] == "small_gpu"
