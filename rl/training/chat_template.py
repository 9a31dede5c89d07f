"""A base model's chat template: prompts with tools, answers with calls and reasoning, and what it cannot write."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from feedback.messages import ChatMessage, MessageError, messages_read
from rl.agents.base import Message, Row
from rl.chat_templates import (
    PROBE_TOOL,
    TEMPLATE_ERRORS,
    CallForm,
    TemplateRefused,
    call_form,
    prompt_rendered,
    template_turns,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = str | Sequence[Row]
"""A response: a text, or messages where a text cannot say it (calls of tools and their results)."""

PLAIN_ROLES = ("system", "user", "assistant", "tool")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template marks an assistant's tokens."""
EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")
"""What Qwen 3 writes before an answer without reasoning; its generation prompt does not."""
REASONING_KEYS = ("reasoning_content", "thinking")
"""Fields of a message from which templates take the reasoning."""


class NotRenderable(ValueError):
    """A prompt or an answer that the base model's chat template cannot write; the message says why."""


class ToolPrompt(list[Message]):
    """The messages of a prompt, and the tools that the model is offered with them."""

    def __init__(self, messages: Iterable[Message], tools: Sequence[Row] = ()) -> None:
        super().__init__(messages)
        self.tools = list(tools or ())


def tools_of(messages: Sequence[Message]) -> list[Row]:
    """The tools of a prompt; a plain list of messages has none."""
    return getattr(messages, "tools", [])


def answer_text(answer: Answer) -> str | None:
    """The text of an answer that is nothing else; None where it calls tools, takes several turns or has reasoning.

    Raises NotRenderable for messages that cannot be read, or hold something else than text.
    """
    if isinstance(answer, str):
        return answer
    turns = _read(answer)
    if len(turns) != 1 or turns[0].tool_calls or turns[0].reasoning:
        return None
    return turns[0].text


def _read(messages: Sequence[object]) -> list[ChatMessage]:
    try:
        found = messages_read(list(messages))
    except MessageError as error:
        raise NotRenderable(str(error)) from error
    if not found or not all(message.is_text for message in found):
        raise NotRenderable("a message holds something else than text")
    return found


class TrainingTemplate:
    """The template of a tokenizer. Tools, calls and results are given to it as transformers documents them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def source(self) -> str:
        return str(self.tokenizer.chat_template)

    # --- Writing ----------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message]) -> str:
        """The prompt as text, ready to be answered. Templates without a system turn get it in the user turn.

        Raises NotRenderable where the template refuses the messages, or leaves out tools, calls or results.
        """
        tools = tools_of(messages)
        if tools and not self.takes_tools:
            raise NotRenderable("the base model's chat template writes no tools")
        turns = self._turns(messages)
        try:
            text = prompt_rendered(lambda some: self.raw(some, tools, add_generation_prompt=True), turns)
        except TemplateRefused as refusal:
            raise NotRenderable(str(refusal)) from refusal
        for turn in turns:
            _appear(text, turn.get("tool_calls", ()))
        if not all(_tool_name(tool) in text for tool in tools):
            raise NotRenderable("the base model's chat template leaves tools out of the prompt")
        return text

    def turns(self, prompt: Sequence[Message], answer: Answer) -> list[tuple[str, str]]:
        """(prompt as text, words of the answer) of each assistant's turn in an answer, without what ends the turn.

        A text stands after the prompt as it is: a server would send that prompt. What calls tools or has its reasoning
        beside it is written by the template, and its words are what the template writes beyond the prompt. Raises
        NotRenderable where the template cannot write it.
        """
        text = answer_text(answer)
        if text is not None:
            return [(self.prompt(prompt), text)]
        given = _read(answer)
        if given[0].role != "assistant":
            raise NotRenderable("an answer that does not begin with a turn of the assistant")
        found = []
        for place, message in enumerate(given):
            if message.role == "assistant":
                before = ToolPrompt([*prompt, *(one.dump() for one in given[:place])], tools_of(prompt))
                found.append(self._turn(before, message, message.reasoning))
        return found

    def _turn(self, before: ToolPrompt, answer: ChatMessage, reasoning: str) -> tuple[str, str]:
        """Prompt and words of one turn of the assistant."""
        start = self.prompt(before)
        *history, message = self._turns([*before, answer.dump()])
        if reasoning and self.reasoning_field == "<think>":
            opened = start.rstrip().endswith("<think>")
            thought = f"{'' if opened else '<think>' + chr(10)}{reasoning}\n</think>\n\n"
            prompt, words = self._turn(before, answer, "") if message.get("tool_calls") else (start, "")
            return prompt, thought + (words or str(message["content"]))
        if reasoning:
            message = {**message, self.reasoning_field: reasoning}
        try:
            start, words = self._beyond(start, [*history, message], before.tools)
        except TEMPLATE_ERRORS as error:
            if isinstance(error, NotRenderable):
                raise
            raise NotRenderable(f"the base model's chat template refuses this answer ({error})") from error
        if not reasoning:
            words = EMPTY_THOUGHT.sub("", words)
        elif reasoning.strip() not in words:
            raise NotRenderable("the base model's chat template leaves the reasoning out of this answer")
        _appear(words, message.get("tool_calls", ()))
        if str(message["content"] or "").strip() not in words:
            raise NotRenderable("the base model's chat template leaves words out of this answer")
        return start, words

    def _beyond(self, start: str, turns: Sequence[Row], tools: Sequence[Row]) -> tuple[str, str]:
        """The prompt, and what the template writes after it for the last turn: as it marks an assistant's tokens, else
        what is more than the prompt."""
        if GENERATION.search(self.source):
            (text,), (spans,) = render_jinja_template(
                [list(turns)],
                tools=list(tools) or None,
                chat_template=self.tokenizer.get_chat_template(tools=list(tools) or None),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
            if spans and spans[-1][1] > spans[-1][0]:
                first, last = spans[-1]
                return (
                    (start, text[len(start) : last])
                    if text.startswith(start)
                    else (text[:first], text[first:last])
                )
        text = self.raw(turns, tools, add_generation_prompt=False)
        if not text.startswith(start):
            raise NotRenderable(
                "the base model's chat template writes this answer after another prompt than it is asked with"
            )
        return start, text[len(start) :]

    def raw(self, turns: Sequence[Row], tools: Sequence[Row] = (), *, add_generation_prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def _turns(self, messages: Sequence[Row]) -> list[dict[str, Any]]:
        """Messages as templates take them: text, calls with their arguments as an object, no reasoning."""
        if all(_is_plain(message) for message in messages):
            return [dict(message) for message in messages]
        return template_turns(_read(messages), self._call_form)

    # --- What it can write ------------------------------------------------------------------------------------

    def _probe(self, turns: Sequence[Row], tools: Sequence[Row] = ()) -> str:
        try:
            return self.raw(turns, tools, add_generation_prompt=False)
        except TEMPLATE_ERRORS:
            return ""

    @functools.cached_property
    def takes_tools(self) -> bool:
        return "ratchet_probe" in self._probe([{"role": "user", "content": "Ratchet asks"}], [PROBE_TOOL])

    @functools.cached_property
    def _call_form(self) -> CallForm:
        return call_form(self._probe)

    @functools.cached_property
    def reasoning_field(self) -> str:
        """Field of a message that the template takes reasoning from; `<think>` where it knows that tag alone, empty
        where it knows none."""
        for key in REASONING_KEYS:
            said = {"role": "assistant", "content": "Ratchet answers", key: "ratchet_thought"}
            if "ratchet_thought" in self._probe([{"role": "user", "content": "Ratchet asks"}, said]):
                return key
        return "<think>" if "think>" in self.source else ""


def _is_plain(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and message.keys() == {"role", "content"}
        and message["role"] in PLAIN_ROLES
        and isinstance(message["content"], str)
        and (
            message["role"] != "assistant"
            or not ("think" in message["content"] or "<details" in message["content"])
        )
    )


def _tool_name(tool: Row) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def _appear(text: str, calls: Iterable[Row]) -> None:
    """Raise NotRenderable unless name and arguments of each call stand in the text."""
    for call in calls:
        function = call["function"]
        parts = [function["name"], *_leaves(function["arguments"])]
        if missing := [part for part in parts if not _stands(part, text)]:
            raise NotRenderable(
                f"the base model's chat template leaves {str(missing[0])[:40]!r} of a call out"
            )


def _leaves(value: object) -> list[object]:
    """Keys and values of nested JSON; of JSON as text likewise."""
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in (key, *_leaves(item))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _stands(value: object, text: str) -> bool:
    if isinstance(value, str):
        spellings = [
            value,
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
        ]
    else:
        spellings = [json.dumps(value), str(value)]
    return any(spelling in text for spelling in spellings)


@dataclass
class LeftOut:
    """Rows that were not encoded: how many for which reason, and the first ones by name."""

    counts: dict[str, int] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)

    def add(self, reason: str, row: Row, number: int, why: str = "") -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if why and len(self.named) < 5:
            prompt_hash = str(row.get("prompt_hash") or "")[:12]
            self.named.append(f"row {number}{f' (prompt {prompt_hash})' if prompt_hash else ''}: {why}")

    def notes(self, what: str) -> list[str]:
        """Lines that tell it."""
        told = [f"left out {count} {what}: {reason}" for reason, count in self.counts.items()]
        return [*told, *self.named]

    def words(self) -> str:
        told = ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
        return told + (f"; {'; '.join(self.named)}" if self.named else "")


def prompt_messages(row: Row, number: int) -> ToolPrompt:
    """The prompt of a row, with its `tools`. Raises ValueError unless it is a list of messages."""
    prompt = row.get("prompt") if hasattr(row, "get") else None
    if (
        not isinstance(prompt, (list, tuple))
        or not prompt
        or not all(isinstance(m, dict) and m.get("role") for m in prompt)
    ):
        raise ValueError(
            f"row {number}: expected `prompt`, a list of messages with role and content; found {str(prompt)[:120]}"
        )
    return ToolPrompt(prompt, row.get("tools") or ())


def response_of(row: Row, side: str, number: int) -> Answer:
    """The response of a row under `side`. Raises ValueError unless it is a text or a list of messages."""
    value = row.get(side)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(m, dict) for m in value):
        only = value[0] if len(value) == 1 else {}
        plain = isinstance(only.get("content"), str) and only.keys() <= {"role", "content"}
        return only["content"] if plain and only["content"] else list(value)
    raise ValueError(
        f"row {number}: expected `{side}`, a text or messages of the assistant; found {str(value)[:120]}"
    )


def response_text(row: Row, side: str, number: int) -> str:
    """The response of a row as text; one that calls tools as JSON of its messages."""
    answer = response_of(row, side, number)
    return answer if isinstance(answer, str) else json.dumps(list(answer), ensure_ascii=False)
