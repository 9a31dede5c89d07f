"""The chat message model: every dialect becomes the same message, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from feedback.messages import MessageError, message_read, messages_read, reasoning_split, response_of

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
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "stock", "input": {"sku": 4}}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "stock", "arguments": {"sku": 4}}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c1", "name": "stock", "input": {"sku": 4}}}]},
        {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "stock", "args": {"sku": 4}}}]},
        {"type": "ai", "content": "", "tool_calls": [{"name": "stock", "args": {"sku": 4}, "id": "c1"}]},
        {"type": "function_call", "call_id": "c1", "name": "stock", "arguments": '{"sku": 4}'},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "stock", "arguments": {"sku": 4}}}]},
    ],
)  # fmt: skip
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
    given = [("human", "Where?"), {"type": "AIMessageChunk", "content": "Here."},
             {"role": "user", "content": [{"text": "Thanks."}, {"cachePoint": {"type": "default"}}]}]  # fmt: skip
    assert [(m.role, m.content) for m in messages_read(given)] == [
        ("user", "Where?"), ("assistant", "Here."), ("user", "Thanks."),
    ]  # fmt: skip


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
