"""Training on calls of tools: what the chat templates of published models write, and what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl.bundled_models import BUNDLED_MODEL
from rl.recipes import SFT_CONFIG, DPORecipe, KTORecipe, SFTRecipe
from rl.training.chat_template import NotRenderable, ToolPrompt
from rl.training.encoding import Encoder
from rl.training.hardware import detect
from rl.training.policy import generate, load_policy
from rl.training.preflight import tokens_check
from rl.training.profiler import MeasuredBase
from rl.training.result import TrainingRefused
from rl.training.rows import demonstrations_encoded
from rl.training.sft import SFTTrainer
from tests.support.tiny_models import tiny_tokenizer

TEMPLATES = Path(__file__).parent / "support" / "chat_templates"
ENDS = {"llama3_1": "<|eot_id|>", "qwen3": "<|im_end|>", "qwen3_training": "<|im_end|>"}
ENDS |= {"gemma3": "<end_of_turn>", "smollm2": "<|im_end|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "units on the shelf",
            "parameters": {"type": "object", "properties": {"sku": {"type": "integer"}}, "required": ["sku"]},
        },
    }
]
ASK = [{"role": "user", "content": "How many of item 3?"}]


def call(sku: Any, call_id: str = "c0") -> dict[str, Any]:
    arguments = sku if isinstance(sku, str) else json.dumps({"sku": sku})
    function = {"name": "stock", "arguments": arguments}
    made = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def result(content: str, call_id: str = "c0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def encoder_of(name: str) -> Encoder:
    if name == "bundled":
        return Encoder(AutoTokenizer.from_pretrained(str(BUNDLED_MODEL)))
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": ENDS[name]})
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    return Encoder(tokenizer)


@pytest.fixture(scope="module")
def encoders() -> dict[str, Encoder]:
    return {name: encoder_of(name) for name in ("bundled", *ENDS)}


def trained(encoder: Encoder, row: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    column = encoder.column([row], "completion", 2048, 1024, **more)
    assert column.left_out.counts == {}, column.left_out.words()
    decode = encoder.tokenizer.decode
    return [(decode(item.prompt_ids), decode(item.response_ids)) for item in column.items]


CALLS = {
    "bundled": '<tool_call>{"name": "stock", "arguments": {"sku": 3}}</tool_call><|end|>',
    "llama3_1": '{"name": "stock", "parameters": {"sku": 3}}<|eot_id|>',
    "qwen3": '<tool_call>\n{"name": "stock", "arguments": {"sku": 3}}\n</tool_call><|im_end|>',
    "qwen3_training": '<tool_call>\n{"name": "stock", "arguments": {"sku": 3}}\n</tool_call><|im_end|>',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_trained_as_its_template_writes_it(encoders: dict[str, Encoder], name: str) -> None:
    ((prompt, words),) = trained(encoders[name], {"prompt": ASK, "tools": TOOLS, "completion": [call(3)]})
    assert words == CALLS[name]
    assert "units on the shelf" in prompt
    assert prompt == encoders[name].render(ToolPrompt(ASK, TOOLS))


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_history_stand_in_the_prompt(encoders: dict[str, Encoder], name: str) -> None:
    row = {"prompt": [*ASK, call(3), result("17")], "tools": TOOLS, "completion": "17 left."}
    ((prompt, words),) = trained(encoders[name], row)
    assert "17 left." in words
    assert "17" in prompt
    assert CALLS[name].rpartition("<|")[0] in prompt


@pytest.mark.parametrize("name", CALLS)
def test_each_turn_of_the_assistant_is_trained(encoders: dict[str, Encoder], name: str) -> None:
    answer = [call(3), result("17"), {"role": "assistant", "content": "17 left."}]
    first, second = trained(encoders[name], {"prompt": ASK, "tools": TOOLS, "completion": answer}, turns=True)
    assert first[1] == CALLS[name]
    assert second[1].startswith("17 left.")
    assert "17" in second[0].partition(CALLS[name].rpartition("<|")[0])[2]
    column = encoders[name].column(
        [{"prompt": ASK, "tools": TOOLS, "completion": answer}], "completion", 2048, 64
    )
    assert column.left_out.counts == {"not_text": 1}


@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASK, "tools": TOOLS, "completion": "3 left."},
        {"prompt": ASK, "completion": [call(3)]},
        {"prompt": [*ASK, call(3), result("17")], "completion": "17 left."},
    ],
    ids=["tools", "answer", "history"],
)
def test_the_unwritable_is_named(encoders: dict[str, Encoder], name: str, row: dict[str, Any]) -> None:
    rows = [row, {"prompt": ASK, "completion": "3 left."}]
    column = encoders[name].column(rows, "completion", 2048, 64)
    assert (column.index, column.left_out.counts) == ([1], {"not_text": 1})
    assert column.left_out.named[0].startswith("row 0: the base model's chat template")
    sides = [{**one, "chosen": one["completion"], "rejected": "no"} for one in rows]
    pairs = encoders[name].pairs(sides, 2048, 64)
    assert ([one["index"] for one in pairs.rows], pairs.left_out.counts) == ([1], {"not_text": 1})


@pytest.mark.parametrize("name", CALLS)
def test_pairs_of_calls_and_texts_share_their_prompt(encoders: dict[str, Encoder], name: str) -> None:
    rows = [
        {"prompt": ASK, "tools": TOOLS, "chosen": [call(3)], "rejected": [call(4)]},
        {
            "prompt": ASK,
            "chosen": [call(3)],
            "rejected": [{"role": "assistant", "content": "I have not looked."}],
        },
        {"prompt": ASK, "tools": TOOLS, "chosen": [call(3, "c0")], "rejected": [call('{ "sku":3}', "c1")]},
        {
            "prompt": ASK,
            "tools": TOOLS,
            "chosen": [call(3), result("7"), {"role": "assistant", "content": "7"}],
            "rejected": [call(3), result("7"), {"role": "assistant", "content": "8"}],
        },
    ]
    pairs = encoders[name].pairs(rows, 2048, 256)
    assert pairs.left_out.counts == {"identical responses": 1}
    decode = encoders[name].tokenizer.decode
    args, text, turns = (
        {side: decode(row[f"{side}_ids"]) for side in ("chosen", "rejected")} for row in pairs.rows
    )
    assert (args["chosen"], args["rejected"]) == (CALLS[name], CALLS[name].replace("3", "4"))
    assert text["rejected"].startswith("I have not looked.")
    assert turns["chosen"].startswith("7")
    assert "stock" in decode(pairs.rows[2]["prompt_ids"])


def test_arguments_that_are_no_json_are_trained_as_text(encoders: dict[str, Encoder]) -> None:
    ((_, words),) = trained(encoders["bundled"], {"prompt": ASK, "completion": [call("{sku: three")]})
    assert words == '<tool_call>{"name": "stock", "arguments": {sku: three}</tool_call><|end|>'


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "developer", "content": "Be brief."}, *ASK], "<|system|>Be brief."),
        (
            [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, *ASK],
            "<|system|>Two.",
        ),
        (
            [*ASK, {"role": "assistant", "content": None, "refusal": "I cannot."}, *ASK],
            "<|assistant|>I cannot.",
        ),
        ([*ASK, {"role": "assistant", "content": "It is"}], "<|assistant|>It is<|end|><|assistant|>"),
        ([*ASK, {"role": "assistant", "content": None}, *ASK], "<|assistant|><|end|>"),
        ([*ASK, {"role": "assistant", "content": "<think>so</think>3"}, *ASK], "<|assistant|>3<|end|>"),
    ],
    ids=["developer", "two systems", "refusal", "prefill", "null", "reasoning"],
)
def test_unusual_turns_are_written(encoders: dict[str, Encoder], prompt: list[Any], said: str) -> None:
    ((text, _),) = trained(encoders["bundled"], {"prompt": prompt, "completion": "3"})
    assert said in text


def test_a_picture_is_left_out(encoders: dict[str, Encoder]) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]
    column = encoders["bundled"].column([{"prompt": picture, "completion": "3"}], "completion", 64, 64)
    assert column.left_out.counts == {"not_text": 1}
    with pytest.raises(NotRenderable):
        encoders["bundled"].responses([(picture, "3")])


THOUGHT = {"role": "assistant", "content": "3 left.", "reasoning": "I count them."}


def test_reasoning_is_trained_as_the_template_writes_it(encoders: dict[str, Encoder]) -> None:
    qwen = encoders["qwen3"]
    ((prompt, words),) = trained(qwen, {"prompt": ASK, "completion": [THOUGHT]})
    assert words == "<think>\nI count them.\n</think>\n\n3 left.<|im_end|>"
    assert prompt.endswith("<|im_start|>assistant\n")
    ((_, words),) = trained(
        qwen, {"prompt": ASK, "tools": TOOLS, "completion": [call(3) | {"reasoning": "I look."}]}
    )
    assert words == f"<think>\nI look.\n</think>\n\n{CALLS['qwen3']}"


def test_reasoning_of_the_history_is_not_written(encoders: dict[str, Encoder]) -> None:
    for name in ("bundled", "qwen3", "llama3_1"):
        ((prompt, _),) = trained(encoders[name], {"prompt": [*ASK, THOUGHT, *ASK], "completion": "3"})
        assert "I count them." not in prompt
        assert "3 left." in prompt


@pytest.mark.parametrize("name", ["bundled", "llama3_1", "gemma3", "smollm2"])
def test_a_template_without_reasoning_is_refused_by_name(encoders: dict[str, Encoder], name: str) -> None:
    rows = [{"prompt": ASK, "completion": [THOUGHT]}]
    with pytest.raises(TrainingRefused, match="reasoning=keep: expected a base model whose chat template"):
        demonstrations_encoded(encoders[name], rows, SFTRecipe(reasoning="keep"))


def test_the_end_token_inside_a_turn_cuts_nothing_off() -> None:
    """gpt-oss writes reasoning as a message of its own, ended as any other."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.reasoning_content %}<|assistant|>{{ m.reasoning_content }}<|end|>{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ((_, words),) = trained(Encoder(tokenizer), {"prompt": ASK, "completion": [THOUGHT]})
    assert words == "I count them.<|end|><|assistant|>3 left.<|end|>"


def test_a_dry_run_counts_what_the_training_leaves_out() -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]
    rows = [
        {"prompt": ASK, "completion": [call(3)], "tools": TOOLS},
        {"prompt": ASK, "completion": ""},
        {"prompt": picture, "completion": "3"},
    ]
    expected = ({"train": 1, "eval": 0}, {"empty response": 1, "not_text": 1})
    assert tokens_check(MeasuredBase("bundled", detect()), SFTRecipe(), rows, rows[1:]) == expected


def test_a_dry_run_refuses_what_the_training_refuses() -> None:
    good = {"prompt": ASK, "completion": [call(3)], "label": True}
    bad = {
        "prompt": [{"role": "user", "content": [{"type": "image_url"}]}],
        "completion": "3",
        "label": False,
    }
    with pytest.raises(TrainingRefused, match=r"1 good and 0 bad.*1 not_text"):
        tokens_check(MeasuredBase("bundled", detect()), KTORecipe(), [good, bad])
    alike = {"prompt": ASK, "chosen": [call(3, "c0")], "rejected": [call('{"sku":  3}', "c1")]}
    with pytest.raises(TrainingRefused, match="1 identical responses"):
        tokens_check(MeasuredBase("bundled", detect()), DPORecipe(), [alike])


@pytest.mark.training
@pytest.mark.campaign
def test_a_policy_answers_fresh_prompts_with_the_call_it_was_taught(tmp_path: Path) -> None:
    def asking(sku: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"How many of item {sku}?"}]

    rows = [{"prompt": asking(sku), "tools": TOOLS, "completion": [call(sku)]} for sku in range(10, 40)]
    recipe = SFT_CONFIG["cpu"].with_knobs(max_steps=40)
    result = SFTTrainer(recipe, "bundled", output_dir=tmp_path).train(rows)
    policy = load_policy("bundled", result.checkpoint)
    (answer,) = generate(policy, [ToolPrompt(asking(55), TOOLS)], max_new_tokens=48)
    assert answer.text.startswith('<tool_call>{"name": "stock", "arguments": {"sku": ')
    assert answer.text.endswith("}}</tool_call>")
