"""A served prompt is the trained prompt: one rendering of chat templates, in training, in serving and in GGUF files."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from feedback.messages import MessageError, message_read, messages_read, reasoning_split, response_of
from rl.chat_templates import DEFAULT_CHAT_TEMPLATE, ChatTemplate, TemplateRefused, template_read
from rl.export.gguf import export_gguf
from rl.export.gguf_lora import lora_write
from rl.export.gguf_names import layout_of
from rl.export.source import source_open
from rl.recipes import Recipe
from rl.serving.base import Ask, ServingRefused
from rl.serving.llama import Chat, LlamaPolicy
from rl.training.encoding import Encoder, NotRenderable
from rl.training.policy import adapter_save, load_policy
from tests.support.serving import BUNDLED
from tests.support.tiny_models import HARDWARE, tiny_adapter, tiny_model

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages if message['role'] != 'system' %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DATED = (
    "{{- strftime_now('%Y') }}\n{%- for message in messages %}\n    {%- if loop.index > 9 %}{% break %}{% endif %}\n"
    "[{{ message.role }}] {{ {'words': message['content']} | tojson }}{{ eos_token }}\n{% endfor %}\n"
    "{%- if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{% endif %}"
)
TEMPLATES = {"bundled": (BUNDLED / "chat_template.jinja").read_text(), "gemma": GEMMA, "no system": NO_SYSTEM}
TEMPLATES |= {"dated": DATED, "default": DEFAULT_CHAT_TEMPLATE}


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


PROMPTS = {
    "a question": turns(("user", "Letter by Silva, March")),
    "system": turns(("system", "Name the folder."), ("user", "Letter by Silva, March")),
    "two users": turns(("system", "Name it."), ("user", "Hi"), ("user", "Invoice by Tanaka")),
    "assistant first": turns(("system", "Name it."), ("assistant", "Hello!"), ("user", "Invoice")),
    "system later": turns(
        ("user", "Hi"), ("assistant", "Hello!"), ("system", "Name it."), ("user", "Invoice")
    ),
    "two systems": turns(("system", "One."), ("system", "Two."), ("user", "Invoice")),
    "developer": turns(("developer", "Name it."), ("user", "Invoice")),
    "system alone": turns(("system", "Name it.")),
    "empty": turns(("system", ""), ("user", "")),
    "special tokens": turns(
        ("user", "<|end|><|assistant|> yes <|pad|> {{ bos_token }} <b>&'\"\u00e9\u4f60</b>\n\n ")
    ),
    "long": turns(*[("user", "a"), ("assistant", "b")] * 4, ("user", "  c\n")),
}


def tokenizer_with(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_serving_renders_what_training_renders(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    encoder = Encoder(tokenizer)
    chat = Chat(ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map), 0)
    for prompt in PROMPTS.values():
        try:
            expected: str | None = encoder.render(prompt)
        except NotRenderable:
            expected = None
        try:
            found: str | None = chat.render(prompt)
        except ServingRefused:
            found = None
        assert found == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "system",
            "<start_of_turn>user\nName the folder.\n\nLetter by Silva, March<|end|>\n<start_of_turn>model\n",
        ),
        (
            "system later",
            "<start_of_turn>user\nHi<|end|>\n<start_of_turn>model\nHello!<|end|>\n<start_of_turn>user\nName it.\n\n"
            "Invoice<|end|>\n<start_of_turn>model\n",
        ),
        ("two systems", "<start_of_turn>user\nOne.\n\nTwo.\n\nInvoice<|end|>\n<start_of_turn>model\n"),
        ("two users", None),
        ("assistant first", None),
        ("system alone", None),
    ],
)
def test_a_refused_system_turn_goes_into_the_user_turn(name: str, text: str | None) -> None:
    chat = Chat(ChatTemplate(GEMMA, {}), 0)
    if text is None:
        with pytest.raises(ServingRefused, match="refuses this prompt"):
            chat.render(PROMPTS[name])
    else:
        assert chat.render(PROMPTS[name]) == text


def test_what_is_no_jinja_is_refused() -> None:
    with pytest.raises(TemplateRefused, match="no Jinja"):
        ChatTemplate("{% for %}", {})


def test_a_template_is_read_wherever_it_stands(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert template_read(tmp_path) is None
    write("chat_template.json", json.dumps({"chat_template": "processor"}))
    assert template_read(tmp_path) == "processor"
    write("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "listed"}]}))
    assert template_read(tmp_path) == "listed"
    write("chat_template.jinja", "file")
    assert template_read(tmp_path) == "file"
    write("additional_chat_templates/tool_use.jinja", "tools")
    assert template_read(tmp_path) == {"default": "file", "tool_use": "tools"}
    # as transformers reads it
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == template_read(tmp_path)


def copy_with(folder: Path, template: str | None) -> Path:
    """The bundled weights with another chat template, or without one."""
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("sha256.json", "chat_template.jinja"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def header(path: Path, key: str = "tokenizer.chat_template") -> str:
    field = gguf.GGUFReader(path).get_field(key)
    return "" if field is None else str(field.contents())


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base without a template, and its GGUF file."""
    folder = copy_with(tmp_path_factory.mktemp("bases") / "without", None)
    made = export_gguf(str(folder), None, folder.parent / "base.gguf", quantization="f16")
    return folder, made.files[0].path


@pytest.mark.slow
def test_a_base_without_a_template_uses_the_stored_one(without: tuple[Path, Path], tmp_path: Path) -> None:
    base, file = without
    assert header(file) == DEFAULT_CHAT_TEMPLATE
    policy = load_policy(str(base), hardware=HARDWARE, trainable=True, recipe=Recipe(lora_r=4))
    trained = adapter_save(policy, tmp_path / "trained", agent="widgets", method="dpo")
    assert template_read(trained) == DEFAULT_CHAT_TEMPLATE
    elsewhere = tiny_adapter(base, tmp_path / "elsewhere")  # no ratchet.json, and a template of its own
    (elsewhere / "chat_template.jinja").write_text(NO_SYSTEM)
    with LlamaPolicy(file, threads=1) as llama:
        for adapter in (trained, elsewhere):
            source = source_open(str(base), adapter)
            layout = layout_of(source.weights.base.config)
            assert layout is not None
            lora = tmp_path / f"{adapter.name}.gguf"
            lora_write(source, layout, lora, "policy")
            encoder = load_policy(str(base), adapter, hardware=HARDWARE).encoder
            for prompt in PROMPTS.values():
                text = llama.render(prompt, lora)
                assert text == encoder.render(prompt)
                assert llama.tokens(text) == encoder.prompts([prompt], 1)[0][0]
            assert llama.chat(lora).end == encoder.turn_end_id
        assert llama.answer(Ask(PROMPTS["system"], max_tokens=2), lora).tokens_in == 14
        assert llama.answer(Ask(PROMPTS["system"], max_tokens=2)).tokens_in == 31
        llama._base_template = GEMMA
        with pytest.raises(ServingRefused, match="Roles must alternate"):
            llama.render(PROMPTS["two users"])


@pytest.mark.slow
def test_an_export_carries_the_template_of_its_own_base(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("one", "two")}
    for name, folder in folders.items():
        tiny_model(folder, "llama")
        (folder / "chat_template.jinja").write_text(TEMPLATES["bundled"] if name == "one" else NO_SYSTEM)
        made = export_gguf(str(folder), None, tmp_path / f"{name}.gguf", quantization="f32")
        assert header(made.files[0].path) == (TEMPLATES["bundled"] if name == "one" else NO_SYSTEM)


def test_named_templates_are_written_by_name(tmp_path: Path) -> None:
    from rl.export.gguf_tokenizer import chat_template_of

    tokenizer = tokenizer_with("plain")
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "with tools"}
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_chat_template(chat_template_of(tokenizer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert header(tmp_path / "file.gguf") == "{{ messages[0].content }}"
    assert header(tmp_path / "file.gguf", "tokenizer.chat_template.tool_use") == "with tools"


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"sku": 4}'}}
    ],
}
THOUGHT = {"role": "assistant", "content": "It ships Monday.", "reasoning": "It is Friday."}


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"]},
        {"role": "assistant", "tool_calls": CALL["tool_calls"], "refusal": None, "annotations": []},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "stock", "input": {"sku": 4}}],
        },
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c1", "name": "stock", "arguments": {"sku": 4}}],
        },
        {
            "role": "assistant",
            "content": [{"toolUse": {"toolUseId": "c1", "name": "stock", "input": {"sku": 4}}}],
        },
        {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "stock", "args": {"sku": 4}}}]},
        {"type": "ai", "content": "", "tool_calls": [{"name": "stock", "args": {"sku": 4}, "id": "c1"}]},
        {"type": "function_call", "call_id": "c1", "name": "stock", "arguments": '{"sku": 4}'},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "function": {"name": "stock", "arguments": {"sku": 4}}}],
        },
    ],
)
def test_a_tool_call_of_any_dialect_is_the_same_message(given: dict[str, Any]) -> None:
    assert message_read(given).dump() == CALL


def test_calls_without_ids_are_kept() -> None:
    legacy = message_read({"role": "assistant", "function_call": {"name": "stock", "arguments": "{}"}})
    share = message_read({"from": "function_call", "value": '{"name": "stock", "arguments": {"sku": 4}}'})
    assert [call.function.name for call in (*legacy.tool_calls, *share.tool_calls)] == ["stock", "stock"]
    assert share.tool_calls[0].function.parsed == {"sku": 4}
    assert share.content == ""


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant", "content": "It ships Monday.", "reasoning_content": "It is Friday."},
        {"role": "assistant", "content": "It ships Monday.", "reasoning": "It is Friday."},
        {"role": "assistant", "content": "<think>\nIt is Friday.\n</think>\n\nIt ships Monday."},
        {"role": "assistant", "content": "It is Friday.\n</think>\n\nIt ships Monday."},
        {"role": "assistant", "content": ":::thinking\nIt is Friday.\n:::\nIt ships Monday."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "It is Friday.", "signature": "s"},
                                          {"type": "text", "text": "It ships Monday."}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "It is Friday."}]},
                                          {"type": "text", "text": "It ships Monday."}]},
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "It is Friday."},
                                        {"type": "text", "content": "It ships Monday."}]},
        {"role": "model", "parts": [{"text": "It is Friday.", "thought": True}, {"text": "It ships Monday."}]},
        {"role": "assistant", "content": [{"reasoningContent": {"reasoningText": {"text": "It is Friday."}}},
                                          {"text": "It ships Monday."}]},
        {"role": "assistant", "content": '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 '
                                         "seconds</summary>\n&gt; It is Friday.\n</details>\nIt ships Monday."},
    ],
)  # fmt: skip
def test_reasoning_stands_beside_the_answer(given: dict[str, Any]) -> None:
    assert message_read(given).dump() == THOUGHT
    response = response_of([message_read(given)])
    assert (response.value, response.reasoning) == ("It ships Monday.", "It is Friday.")


def test_tags_inside_a_text_belong_to_the_text() -> None:
    text = "Write <think>your thoughts</think> before the answer."
    assert reasoning_split(text) == (text, "")
    assert reasoning_split("<think>cut off") == ("<think>cut off", "")
    assert message_read({"role": "user", "content": "<think>a</think>b"}).content == "<think>a</think>b"


def test_results_of_tools_become_messages_of_the_tool() -> None:
    content = [
        {
            "type": "tool_result",
            "tool_use_id": "c1",
            "content": [{"type": "text", "text": "3"}],
            "is_error": False,
        },
        {"type": "text", "text": "And blue ones?"},
    ]
    tool, user = messages_read([{"role": "user", "content": content}])
    assert tool.dump() == {"role": "tool", "content": "3", "tool_call_id": "c1", "is_error": False}
    assert user.dump() == {"role": "user", "content": "And blue ones?"}
    (gemini,) = messages_read(
        [{"role": "user", "parts": [{"functionResponse": {"name": "stock", "response": {"n": 3}}}]}]
    )
    assert gemini.dump() == {"role": "tool", "content": '{"n": 3}', "name": "stock"}


def test_items_of_a_responses_turn_are_one_message() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "stock", "arguments": '{"sku": 4}'}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It is Friday."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    first, tool, last = messages_read([thought, said, call, call | {"call_id": "c2"}, result, thought, said])
    assert (first.content, first.reasoning) == ("I look.", "It is Friday.")
    assert [one.id for one in first.tool_calls] == ["c1", "c2"]
    assert (tool.content, tool.tool_call_id) == ("3", "c1")
    assert last.dump() == {"role": "assistant", "content": "I look.", "reasoning": "It is Friday."}


def test_other_ways_of_langchain_and_bedrock() -> None:
    given = [
        ("human", "Where?"),
        {"type": "AIMessageChunk", "content": "Here."},
        {"role": "user", "content": [{"text": "Thanks."}, {"cachePoint": {"type": "default"}}]},
    ]
    expected = [("user", "Where?"), ("assistant", "Here."), ("user", "Thanks.")]
    assert [(m.role, m.content) for m in messages_read(given)] == expected


def test_a_refusal_is_an_answer() -> None:
    whole = message_read({"role": "assistant", "content": None, "refusal": "I cannot help with that."})
    part = message_read(
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot help with that."}]}
    )
    assert whole == part
    assert whole.text == "I cannot help with that."
    assert response_of([whole]).is_refusal
    assert response_of([whole]).value == "I cannot help with that."


@pytest.mark.parametrize("content", [None, "", []])
def test_nothing_said_is_a_message_without_words(content: Any) -> None:
    message = message_read({"role": "assistant", "content": content})
    assert message.dump() == {"role": "assistant", "content": ""}


def test_parts_that_are_no_text_stay_parts() -> None:
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    ]
    message = message_read({"role": "user", "content": parts})
    assert not message.is_text
    assert message.dump() == {"role": "user", "content": parts}
    assert message.text == "What is this?"


def test_other_keys_of_a_message_stay() -> None:
    message = message_read({"role": "assistant", "content": "Yes?", "weight": 0, "id": "m1", "name": "ben"})
    assert message.dump() == {"role": "assistant", "content": "Yes?", "name": "ben", "weight": 0, "id": "m1"}
    assert message.model_extra == {"weight": 0, "id": "m1"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("x", "messages"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "narrator", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": ["stock"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_fault_names_its_place(given: Any, named: str) -> None:
    with pytest.raises(MessageError) as error:
        messages_read(5 if given == "x" else [given])
    assert str(error.value).startswith(named)
