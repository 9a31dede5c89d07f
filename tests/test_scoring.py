"""Log-probabilities of responses, and the tokens they are taken over."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.training.encoding import EncodedResponse, Encoder
from rl.training.policy import LoadedPolicy, load_policy
from rl.training.scoring import (
    ScoringError,
    head_check,
    kl_encoded,
    kl_next_token,
    score_encoded,
    score_responses,
)
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
def test_scores_are_the_sum_of_the_models_own_log_probabilities(
    policies: Callable[[str], LoadedPolicy], architecture: str
) -> None:
    policy = policies(architecture)
    (encoded,) = policy.encoder.responses([(ASK, '{"widget": "table"}')])
    (score,) = score_responses(policy, [(ASK, '{"widget": "table"}')])
    assert score.logp == pytest.approx(by_hand(policy, encoded.prompt_ids, encoded.response_ids), abs=1e-3)
    assert score.tokens == len(encoded.response_ids)
    assert not score.truncated
    head_check(policy)


def test_the_turn_end_is_scored_with_the_response(llama: LoadedPolicy) -> None:
    (with_end,) = llama.encoder.responses([(ASK, "table")])
    assert with_end.response_ids[-1] == llama.tokenizer.convert_tokens_to_ids("<|end|>")
    without = EncodedResponse(with_end.prompt_ids, with_end.response_ids[:-1])
    long, short = score_encoded(llama, [with_end, without])
    last = by_hand(llama, with_end.prompt_ids + without.response_ids, with_end.response_ids[-1:])
    assert long - short == pytest.approx(last, abs=1e-4)


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


def test_the_divergence_of_the_next_token_is_that_of_the_models_own_logits(
    tmp_path: Path, llama: LoadedPolicy
) -> None:
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


def test_a_token_that_the_policy_is_unsure_of_does_not_carry_its_distance(
    tmp_path: Path, llama: LoadedPolicy
) -> None:
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


def test_an_architecture_with_unknown_logits_is_refused(
    llama: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = llama.model.lm_head
    monkeypatch.setattr(head, "forward", lambda hidden: torch.nn.functional.linear(hidden, head.weight) * 0.5)
    with pytest.raises(ScoringError, match="llama"):
        head_check(llama)


def encoder(template: str | None = CHAT_TEMPLATE, context: int | None = None, kind: str = "gpt2") -> Encoder:
    tokenizer = tiny_tokenizer(kind)
    tokenizer.chat_template = template
    return Encoder(tokenizer, context)


def test_a_template_without_a_system_turn_gets_it_in_the_users() -> None:
    strict = encoder(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    assert strict.render(ASK) == "<|user|>Pick one.\n\nWhich widget, José?<|end|><|assistant|>"


def test_a_prompt_no_template_takes_is_refused_with_its_roles() -> None:
    strict = encoder("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"roles must alternate.*system, user"):
        strict.render(ASK)


def test_the_turn_ends_where_the_template_says() -> None:
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


def test_a_long_response_loses_its_end_and_its_turn_end() -> None:
    small = encoder()
    (item,) = small.responses([(ASK, "word " * 50)], max_length=200, max_response_length=10)
    assert len(item.response_ids) == 10
    assert item.response_cut
    assert small.turn_end_id not in item.response_ids


def test_the_models_context_is_a_limit_even_where_none_is_asked_for() -> None:
    small = encoder(context=48)
    (item,) = small.responses([([{"role": "user", "content": "why " * 100}], "table")])
    assert len(item.prompt_ids) + len(item.response_ids) == 48


def a_row(chosen: Any, rejected: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": ASK, "chosen": chosen, "rejected": rejected, **more}


def test_both_sides_of_a_pair_share_the_prompts_tokens() -> None:
    small = encoder()
    row = {"prompt": [{"role": "user", "content": "why " * 60}], "chosen": "a b c d", "rejected": "e"}
    (pair,) = small.pairs([row], 50, 20).rows
    assert len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"])) == 50


def test_truncation_is_counted_per_prompt_and_per_response() -> None:
    long = {"prompt": [{"role": "user", "content": "why " * 90}], "chosen": "a", "rejected": "b"}
    pairs = encoder().pairs([long, a_row("x " * 40, "y " * 40), a_row("a", "b")], 64, 12)
    assert pairs.truncated == {"prompts": 1, "completions": 2}
    assert len(pairs.rows) == 3


def test_only_pairs_that_cannot_teach_are_left_out_and_why_is_counted() -> None:
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
