"""Calls of tools in process: the prompt is the training's, the syntax is the template's, the arguments fit."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl.chat_templates import ChatTemplate
from rl.serving.base import Ask, BackendUnable, ServingRefused
from rl.serving.llama import Chat, LlamaPolicy
from rl.serving.tool_calls import CallReader, CallSyntax, Tools
from rl.training.chat_template import NotRenderable, prompt_messages
from rl.training.encoding import Encoder
from tests.support.serving import BUNDLED, gguf_files

ID = {"type": "string", "enum": ["a1", "b2"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
TRACK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "track",
        "description": "Where is <it>?",
        "parameters": {"type": "object", "properties": {"id": ID, "days": DAYS}, "required": ["id", "days"]},
    },
}
STOCK: dict[str, Any] = {"type": "function", "function": {"name": "stock"}}
TOOLS = [TRACK, STOCK]
USER = {"role": "user", "content": "Where is a1?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "track", "arguments": '{"id": "a1", "days": 2}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "In Ulm."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "b2?"}]},
]
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + (message.role if message.role != 'tool' else 'ipython') + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
    {%- else %}{{- message.content | trim }}{%- endif %}
    {%- if loop.first and tools %}{%- for t in tools %}{{- '\\n\\n' + (t | tojson(indent=4)) }}{%- endfor %}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
TEMPLATES = BUNDLED.parents[1] / "tests/support/chat_templates"
PUBLISHED = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
PLAIN = (
    "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaPolicy]:
    with LlamaPolicy(gguf_files().base) as policy:
        yield policy


def renderer(template: str) -> Chat:
    """A chat template alone."""
    return Chat(ChatTemplate(template, {"eos_token": "<eos>", "bos_token": "<bos>"}), 0)


def asked(tools: Any = TOOLS, **extra: Any) -> Ask:
    return Ask([USER], 80, extra={"tools": tools, **extra})


@pytest.mark.parametrize("template", ["", *PUBLISHED.values()], ids=["bundled", *PUBLISHED])
@pytest.mark.parametrize("messages", [[USER], HISTORY, HISTORY[1:4]], ids=["one", "history", "result"])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "none"])
def test_a_prompt_is_rendered_as_the_training_renders_it(template: str, messages: Any, tools: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", "<eos>"
    try:
        wanted = Encoder(tokenizer).render(prompt_messages({"prompt": messages, "tools": tools}, 0))
    except NotRenderable:
        with pytest.raises(ServingRefused):
            renderer(tokenizer.chat_template).render(messages, Tools.of(asked(tools)))
        return
    assert renderer(tokenizer.chat_template).render(messages, Tools.of(asked(tools))) == wanted


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (QWEN, CallSyntax("<tool_call>\n", "arguments", "\n</tool_call>")),
        (LLAMA, CallSyntax("", "parameters", "")),
        (PLAIN, None),
        (PUBLISHED["qwen3"], CallSyntax("<tool_call>\n", "arguments", "\n</tool_call>")),
        (PUBLISHED["llama3_1"], CallSyntax("", "parameters", "")),
        (PUBLISHED["gemma3"], None),
    ],
)
def test_the_syntax_of_calls_is_read_off_the_template(template: str, syntax: CallSyntax | None) -> None:
    assert renderer(template).call_syntax == syntax


def test_a_template_without_tools_says_who_can(llama: LlamaPolicy) -> None:
    with pytest.raises(BackendUnable, match="LOCAL_BACKENDS") as refusal:
        renderer(PLAIN).render([USER], Tools.of(asked()))
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "track"}}])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_must_call_fits_its_schema(llama: LlamaPolicy, choice: Any, temperature: float) -> None:
    tools = TOOLS if isinstance(choice, dict) else [TRACK]
    extra = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    answer = llama.answer(Ask([USER], 80, temperature=temperature, seed=3, extra=extra))
    (call,) = answer.message.tool_calls
    arguments = call.function.parsed
    assert (call.function.name, answer.finish_reason, answer.text) == ("track", "tool_calls", "")
    assert arguments["id"] in ID["enum"]
    assert 1 <= arguments["days"] <= 9
    assert call.id is not None


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_words_are_an_answer_where_no_call_must_be_made(llama: LlamaPolicy, choice: str) -> None:
    pieces = list(llama.stream(asked(tool_choice=choice)))
    assert not any("tool_calls" in piece.delta for piece in pieces)
    assert len([piece for piece in pieces if piece.text]) > 1  # streamed as they are written


def test_a_call_is_streamed_whole(llama: LlamaPolicy) -> None:
    (piece, last) = llama.stream(asked([TRACK], tool_choice="required", parallel_tool_calls=False))
    (call,) = piece.delta["tool_calls"]
    assert (call["index"], call["function"]["name"], last.finish_reason) == (0, "track", "tool_calls")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": "banana"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none such"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "sql"}}]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_choice_that_is_none_is_refused(llama: LlamaPolicy, extra: Any, param: str) -> None:
    with pytest.raises(ServingRefused) as refusal:
        llama.answer(asked(**extra))
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "extra",
    [
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"top_logprobs": 0, "logprobs": False},
        {"functions": []},
        {"tools": [], "tool_choice": "auto"},
        {"frequency_penalty": 0.0, "presence_penalty": 0},
        {"n": 1},
        {"tool_choice": "none", "parallel_tool_calls": True},
    ],
)
def test_values_that_ask_for_nothing_are_answered(llama: LlamaPolicy, extra: Any) -> None:
    assert llama.answer(Ask([USER], 2, extra=extra)).tokens_out == 2


HERMES = CallSyntax("<tool_call>\n", "arguments", "\n</tool_call>")
JSON = CallSyntax("", "parameters", "")
TRACKED = ("track", {"id": "a1"})


@pytest.mark.parametrize(
    ("syntax", "text", "words", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "track", "arguments": {"id": "a1"}}\n</tool_call>', "", [TRACKED]),
        (HERMES, 'I look. <tool_call>{"name": "track", "arguments": {"id": "a1"}}', "I look. ", [TRACKED]),
        (
            HERMES,
            '<tool_call>{"name": "track", "arguments": "{\\"id\\": \\"a1\\"}"}</tool_call>\n'
            '<tool_call>{"name": "stock"}</tool_call>',
            "",
            [TRACKED, ("stock", {})],
        ),
        (HERMES, "a <tool_ b", "a <tool_ b", []),
        (
            HERMES,
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            [],
        ),
        (
            HERMES,
            '<tool_call>{"name": "stock"}</tool_call><tool_call>{"na',
            '<tool_call>{"na',
            [("stock", {})],
        ),
        (HERMES, '<tool_call>{"name": "tra', '<tool_call>{"name": "tra', []),
        (JSON, '{"name": "track", "parameters": {"id": "a1"}}', "", [TRACKED]),
        (
            JSON,
            '{"name": "track", "parameters": {"id": "a1"}}; {"name": "stock", "parameters": {}}',
            "",
            [TRACKED, ("stock", {})],
        ),
        (JSON, ' [{"name": "track", "arguments": {"id": "a1"}}]', "", [TRACKED]),
        (JSON, '{"answer": 4}', '{"answer": 4}', []),
        (JSON, "It is in Ulm.", "It is in Ulm.", []),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_are_read_from_text(syntax: CallSyntax, text: str, words: str, calls: Any, size: int) -> None:
    reader = CallReader(Tools.of(asked()), syntax)
    shown = "".join(reader.add(text[at : at + size]) for at in range(0, len(text), size))
    rest, found = reader.end()
    assert shown + rest == words
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls
