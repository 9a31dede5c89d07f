"""Chat messages into token ids: one way for training, scoring and generating, so that all three see the same text."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from feedback.messages import ChatMessage, messages_read
from rl.agents.base import Message
from rl.training.packed.row_cache import RowCache, row_key

DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% else %}{{ 'Assistant:\n' + message['content'] + (eos_token or '') + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
"""For base models that come without one (GPT-2, OPT): plain paragraphs, each answer ended by the eos token."""

PROBE = [{"role": "user", "content": "Ratchet asks"}, {"role": "assistant", "content": "Ratchet answers"}]


class NotRenderable(ValueError):
    """A prompt or a response that the base model's chat template cannot render whole; its row is left out."""


class ToolPrompt(list[Message]):
    """The messages of a prompt, with the tools that were offered beside them."""

    def __init__(self, messages: Iterable[Message], tools: Sequence[Any] = ()) -> None:
        super().__init__(messages)
        self.tools = list(tools)


class SpokenAnswer(str):
    """A response that only the chat template can write: with calls of tools, or with its reasoning.

    As a text it is its words with its calls as Hermes and Qwen write them, so that it can be compared and measured.
    """

    turn: ChatMessage

    @classmethod
    def of(cls, turn: ChatMessage) -> SpokenAnswer:
        calls = ({"name": call.function.name, "arguments": call.function.parsed} for call in turn.tool_calls)
        text = turn.text + "".join(
            f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls
        )
        made = cls(text)
        made.turn = turn
        return made


@dataclass(frozen=True)
class EncodedResponse:
    """One response to one prompt, ready to be scored."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Ends with the token that ends the turn, unless the response was cut."""
    prompt_cut: bool = False
    response_cut: bool = False


@dataclass
class EncodedPairs:
    """Preference pairs with the same prompt tokens on both sides, and what had to be cut or left out to get there."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """`prompt_ids`, `chosen_ids`, `rejected_ids`, `weight`, and `index` into what was given."""
    truncated: dict[str, int] = field(default_factory=lambda: {"prompts": 0, "completions": 0})
    """`prompts`: pairs whose prompt was cut; `completions`: responses cut, up to two a pair."""
    left_out: dict[str, int] = field(default_factory=dict)


class Encoder:
    """A tokenizer with chat template, padding and the token that ends a turn set as training needs them.

    The response is put after exactly the prompt a server would send (the template with its generation prompt) and
    is followed by the token with which the template ends an assistant's turn. What a template would add inside past
    answers (Qwen3's empty thinking block) is therefore not trained on: a server would not send it either.
    """

    def __init__(self, tokenizer: Any, context: int | None = None) -> None:
        """Complete `tokenizer` in place. `context`: positions the model can read, if it has a limit."""
        self.tokenizer = tokenizer
        self.context = context
        self.notes: list[str] = []
        self.cache: RowCache | None = None
        """Tokens of earlier runs; `pairs` looks there first."""
        if not tokenizer.chat_template:
            tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
            self.notes.append(
                "the base model has no chat template: the plain default is used (and saved with the adapter)"
            )
        if tokenizer.pad_token_id is None:
            # any existing token serves: padded positions are masked everywhere, and a new one would need new weights
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        tokenizer.padding_side = "left"
        tokenizer.truncation_side = "left"
        self.turn_end_id = self._turn_end()

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: the template's turn end and the eos token."""
        return sorted({i for i in (self.turn_end_id, self.tokenizer.eos_token_id) if i is not None})

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, ready to be answered. Templates without a system turn get it in the user turn.

        Raises NotRenderable where the template refuses the messages, or drops a tool or a call.
        """
        return self._rendered(messages, getattr(messages, "tools", []), answer=None)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any], answer: ChatMessage | None) -> str:
        """The prompt with its generation prompt, or followed by an answer. Raises NotRenderable."""
        asked = [template_message(message) for message in messages]
        whole = (
            asked if answer is None else [*asked, template_message(answer.dump(), reasoning=answer.reasoning)]
        )
        try:
            text = self._template(whole, add_generation_prompt=answer is None, tools=tools)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            if whole[0]["role"] != "system" or len(whole) < 2:
                raise self._refusal(error, messages) from error
            first = {**whole[1], "content": f"{whole[0]['content']}\n\n{whole[1]['content']}"}
            try:
                text = self._template([first, *whole[2:]], add_generation_prompt=answer is None, tools=tools)
            except (TemplateError, TypeError, KeyError, AttributeError):
                raise self._refusal(error, messages) from error  # the first reason is the one to report
        names = [_tool_name(tool) for tool in tools]
        names += [call["function"]["name"] for message in asked for call in message.get("tool_calls", ())]
        if missing := [name for name in names if name and name not in text]:
            raise NotRenderable(
                f"the base model's chat template does not write tools or their calls ({', '.join(missing[:4])})"
            )
        return text

    def _refusal(self, error: Exception, messages: Sequence[Message]) -> NotRenderable:
        return NotRenderable(
            f"the base model's chat template refuses this prompt ({error}); roles found: "
            f"{', '.join(str(message.get('role')) for message in messages)}"
        )

    def answer_text(self, messages: Sequence[Message], answer: str) -> str:
        """The words of an answer after the rendered prompt, without the token that ends the turn.

        A text is itself. An answer with calls, or with reasoning, is what the template writes for it: the rendering of
        prompt and answer less the rendering of the prompt. Raises NotRenderable where the template cannot write it.
        """
        if not isinstance(answer, SpokenAnswer):
            return answer
        tools = getattr(messages, "tools", [])
        prompt = self._rendered(messages, tools, answer=None)
        whole = self._rendered(messages, tools, answer=answer.turn)
        if not whole.startswith(prompt):
            raise NotRenderable(
                "the base model's chat template writes a prompt otherwise once it is answered"
            )
        text = self._without_turn_end(whole[len(prompt) :])
        if not answer.turn.reasoning:
            text = re.sub(r"^\s*<think>\s*</think>\s*", "", text)
        elif answer.turn.reasoning not in text:
            raise ValueError(
                "the base model's chat template does not write reasoning; train without --set reasoning=keep"
            )
        for call in answer.turn.tool_calls:
            if call.function.name not in text or not all(
                name in text for name in _argument_names(call.function.parsed)
            ):
                raise NotRenderable(
                    f"the base model's chat template does not write the call of {call.function.name}"
                )
        return text

    def _without_turn_end(self, text: str) -> str:
        if self.turn_end_id is None:
            return text.rstrip()
        end = str(self.tokenizer.convert_ids_to_tokens(self.turn_end_id))
        before, found, _ = text.rpartition(end)
        return before if found else text.rstrip()

    def renderable(self, rows: Sequence[Any], sides: Sequence[str]) -> tuple[list[Any], dict[str, int]]:
        """The rows that the chat template can render, with their answers `sides`, and how many it cannot.

        Raises ValueError for a row of another shape, with its number (from 0).
        """
        kept = []
        for number, row in enumerate(rows):
            messages = prompt_messages(row, number)
            try:
                self.render(messages)
                for side in sides:
                    self.answer_text(messages, response_text(row, side, number))
            except NotRenderable:
                continue
            kept.append(row)
        left_out = len(rows) - len(kept)
        return kept, {NOT_TEXT: left_out} if left_out else {}

    def prompts(
        self, prompts: Sequence[Sequence[Message]], room: int, max_length: int | None = None
    ) -> tuple[list[list[int]], int]:
        """Token ids of each prompt, and how many had to be cut to leave space for `room` more tokens in the context.

        `max_length` in tokens stands for the context where it is shorter.
        """
        ids = self._ids([self.render(messages) for messages in prompts])
        longest = min((n for n in (self.context, max_length) if n is not None), default=None)
        if longest is None:
            return ids, 0
        limit = max(longest - room, 1)
        cut = [self._cut_prompt(p, m, limit) for p, m in zip(ids, prompts, strict=True)]
        return cut, sum(len(a) < len(b) for a, b in zip(cut, ids, strict=True))

    def responses(
        self, items: Sequence[tuple[Sequence[Message], str]], max_length: int | None = None,
        max_response_length: int | None = None,
    ) -> list[EncodedResponse]:  # fmt: skip
        """Prompt and response ids of each item, cut to fit. Lengths in tokens; None means the model's context."""
        texts = [self.render(messages) for messages, _ in items]
        alone = self._ids(texts)
        answers = self._answers(texts, alone, [self.answer_text(*item) for item in items])
        encoded = []
        for (messages, _), prompt, response in zip(items, alone, answers, strict=True):
            prompt_ids, (answer,) = self._fit(messages, prompt, [response], max_length, max_response_length)
            encoded.append(
                EncodedResponse(prompt_ids, answer, len(prompt_ids) < len(prompt), len(answer) < len(response))
            )  # fmt: skip
        return encoded

    def column(
        self, rows: Sequence[Any], side: str, max_length: int, max_response_length: int
    ) -> list[EncodedResponse]:
        """Encode rows {"prompt": messages, side: text or [message]} like `responses`. Raises ValueError as
        `pairs` does."""
        items = [(prompt_messages(row, n), response_text(row, side, n)) for n, row in enumerate(rows)]
        return self.responses(items, max_length, max_response_length)

    def pairs(self, rows: Sequence[Any], max_length: int, max_response_length: int) -> EncodedPairs:
        """Encode rows {"prompt": messages, "chosen", "rejected": text or messages, "weight"?}.

        A response longer than `max_response_length` loses its end; a prompt that then does not fit `max_length` with
        the longer response loses its oldest tokens, the system turn last. Left out is only what cannot teach: sides
        that are identical once cut. Raises ValueError for a row of another shape, with its number (from 0).
        """
        prompts, chosen, rejected, weights, places = [], [], [], [], []
        pairs = EncodedPairs()
        for number, row in enumerate(rows):
            prompt = prompt_messages(row, number)
            try:
                self.render(prompt)
                sides = [
                    self.answer_text(prompt, response_text(row, side, number))
                    for side in ("chosen", "rejected")
                ]
            except NotRenderable:
                pairs.left_out[NOT_TEXT] = pairs.left_out.get(NOT_TEXT, 0) + 1
                continue
            prompts.append(prompt)
            chosen.append(sides[0])
            rejected.append(sides[1])
            places.append(number)
            weight = row.get("weight")
            weights.append(1.0 if weight is None else float(weight))
            if not 0 < weights[-1] < float("inf"):
                raise ValueError(f"row {number}: expected a weight above 0, found {row['weight']!r}")
        alone, answers = self._cached_ids([*prompts, *prompts], [*chosen, *rejected])
        goods, bads = answers[: len(prompts)], answers[len(prompts) :]
        for i, (prompt_ids, good, bad) in enumerate(zip(alone[: len(prompts)], goods, bads, strict=True)):
            prompt_part, (good_kept, bad_kept) = self._fit(
                prompts[i], prompt_ids, [good, bad], max_length, max_response_length
            )
            if good_kept == bad_kept:
                why = "identical responses" if good == bad else "identical after truncation"
                pairs.left_out[why] = pairs.left_out.get(why, 0) + 1
                continue
            pairs.truncated["prompts"] += len(prompt_part) < len(prompt_ids)
            pairs.truncated["completions"] += (len(good_kept) < len(good)) + (len(bad_kept) < len(bad))
            pairs.rows.append(
                {
                    "prompt_ids": prompt_part,
                    "chosen_ids": good_kept,
                    "rejected_ids": bad_kept,
                    "weight": weights[i],
                    "index": places[i],
                }
            )
        return pairs

    def _cached_ids(
        self, prompts: Sequence[Sequence[Message]], responses: Sequence[str]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Uncut token ids of prompts and of the responses after them, from the cache where they are there.

        A key is the tokenizer, its template, and the words. What is new is rendered and tokenised in one batch.
        """
        prompt_texts = [
            json.dumps([list(prompt), getattr(prompt, "tools", [])], sort_keys=True) for prompt in prompts
        ]
        keys = [
            row_key(self.identity, prompt, response)
            for prompt, response in zip(prompt_texts, responses, strict=True)
        ]
        hits = self.cache.get(keys) if self.cache is not None else {}
        new = {key: i for i, key in enumerate(keys) if key not in hits}
        distinct = {prompt_texts[i]: prompts[i] for i in new.values()}
        rendered = {prompt: self.render(messages) for prompt, messages in distinct.items()}
        tokens = dict(zip(rendered, self._ids(list(rendered.values())), strict=True))
        texts = [rendered[prompt_texts[i]] for i in new.values()]
        alone = [tokens[prompt_texts[i]] for i in new.values()]
        answers = self._answers(texts, alone, [responses[i] for i in new.values()])
        fresh = {
            key: array("i", [len(prompt), *prompt, *answer]).tobytes()
            for key, prompt, answer in zip(new, alone, answers, strict=True)
        }
        if self.cache is not None:
            self.cache.put(fresh)
        both = []
        for key in keys:
            count, *ids = array("i", hits.get(key) or fresh[key])
            both.append((ids[:count], ids[count:]))
        return [prompt for prompt, _ in both], [answer for _, answer in both]

    @functools.cached_property
    def identity(self) -> str:
        """A hash of everything that decides which tokens a text becomes."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = (
            backend.to_str()
            if backend is not None
            else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        )
        about = [
            rules,
            str(self.tokenizer.chat_template),
            str(self.turn_end_id),
            type(self.tokenizer).__name__,
        ]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def _template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: Sequence[Any] = ()
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **({"tools": list(tools)} if tools else {}),
            )
        )

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # the template writes bos itself where the model wants one
        return (
            list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []
        )

    def _answers(self, prompts: list[str], alone: list[list[int]], responses: list[str]) -> list[list[int]]:
        """Token ids of each response after its prompt, whose own tokens (`alone`) stay as they are tokenized for
        inference."""
        joint = self._ids([p + r for p, r in zip(prompts, responses, strict=True)])
        answers = []
        for prompt_ids, joint_ids, response in zip(alone, joint, responses, strict=True):
            if joint_ids[: len(prompt_ids)] == prompt_ids:
                answer = joint_ids[len(prompt_ids) :]
            else:  # a token would straddle the border
                answer = self._ids([response])[0]
            answers.append(answer if self.turn_end_id is None else [*answer, self.turn_end_id])
        return answers

    def _fit(
        self, messages: Sequence[Message], prompt: list[int], responses: list[list[int]], max_length: int | None,
        max_response_length: int | None,
    ) -> tuple[list[int], list[list[int]]]:  # fmt: skip
        """Cut responses at their end and the prompt at its start until prompt + longest response fit.

        A prompt that needs it keeps at least half of `max_length`, whatever the responses' own limit.
        """
        limit = min(n for n in (max_length, self.context, 1 << 60) if n is not None)
        longest = limit - min(len(prompt), limit // 2)
        if max_response_length is not None:
            longest = min(longest, max_response_length)
        cut_responses = [response[: max(longest, 1)] for response in responses]
        room = limit - max(len(response) for response in cut_responses)
        return self._cut_prompt(prompt, messages, room), cut_responses

    def _cut_prompt(self, prompt: list[int], messages: Sequence[Message], limit: int) -> list[int]:
        if len(prompt) <= limit:
            return prompt
        head = self._head(prompt, messages)
        if len(head) > limit // 2:  # a system turn that would crowd out the question goes too
            bos = self.tokenizer.bos_token_id
            head = [bos] if bos is not None and prompt[0] == bos and limit > 1 else []
        return head + prompt[len(prompt) - (limit - len(head)) :]

    def _head(self, prompt: list[int], messages: Sequence[Message]) -> list[int]:
        """The tokens before the first user's own words: bos, the system turn, the user turn's opening."""
        system = messages[:1] if messages and messages[0]["role"] == "system" else []
        tools = getattr(messages, "tools", [])
        one, two = self._ids(
            [
                self.render(ToolPrompt([*system, {"role": "user", "content": text}], tools))
                for text in ("Ratchet", "9 probes")
            ]
        )
        head = _common(one, two)
        return prompt[: len(_common(head, prompt))]

    def _turn_end(self) -> int | None:
        """The first special token the template puts after an assistant's words, else eos, else None."""
        try:
            text = self._template(PROBE, add_generation_prompt=False)
        except TemplateError:
            text = ""
        _, found, tail = text.rpartition(str(PROBE[1]["content"]))
        if found:
            special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
            for token in self._ids([tail])[0]:
                if token in special:
                    return int(token)
        eos: int | None = self.tokenizer.eos_token_id
        if eos is None:
            self.notes.append("the base model has no eos token: answers end only at the length limit")
        return eos


def _common(one: list[int], two: list[int]) -> list[int]:
    length = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    return one[:length]


NOT_TEXT = "not_text"
"""Reason why rows that the chat template cannot render are left out."""


def none_rendered(what: str, rows: int) -> str:
    """The refusal where no row is left to train on."""
    return (
        f"expected at least one {what} that the base model's chat template can render, found none among {rows}; "
        "choose a base model whose template writes tools and their calls"
    )


def template_message(message: Mapping[str, Any], reasoning: str = "") -> dict[str, Any]:
    """A message as chat templates expect it: arguments of calls as objects, no id that differs from run to run."""
    found = {
        key: value for key, value in message.items() if key in ("role", "content", "name", "tool_call_id")
    }
    if found["role"] == "developer":
        found["role"] = "system"
    if found.get("content") is None:
        found["content"] = ""
    if calls := message.get("tool_calls"):
        read = ChatMessage.model_validate({"role": "assistant", "tool_calls": calls}).tool_calls
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call.function.name, "arguments": call.function.parsed}}
            | ({"id": call.id} if call.id else {})
            for call in read
        ]
    if reasoning:  # Qwen and DeepSeek read the first name, gpt-oss and SmolLM the second
        found |= {"reasoning_content": reasoning, "thinking": reasoning}
    return found


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _argument_names(arguments: Any) -> list[str]:
    return [str(name) for name in arguments] if isinstance(arguments, Mapping) else []


def prompt_messages(row: Any, number: int) -> ToolPrompt:
    """The prompt of a row with its tools. Raises ValueError unless it is a list of text messages."""
    prompt = row.get("prompt") if hasattr(row, "get") else None
    if isinstance(prompt, (list, tuple)) and prompt:
        try:
            messages = messages_read(list(prompt), "prompt")
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        if messages and all(message.is_text for message in messages):
            plain = [{**message.bare.dump(), "content": message.text} for message in messages]
            return ToolPrompt(plain, row.get("tools") or ())
    raise ValueError(
        f"row {number}: expected `prompt`, a list of messages with role and content; found {str(prompt)[:120]}"
    )


def response_text(row: Any, side: str, number: int) -> str:
    """The response under `side`: a text, or a SpokenAnswer where it has calls or reasoning.

    Of several messages the first turn is taken: what follows depends on the results of its calls. Raises ValueError
    unless it is a text or messages that begin with the assistant's.
    """
    value = row.get(side)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value:
        try:
            turn = messages_read(list(value), side)[0]
        except (ValueError, IndexError) as error:
            raise ValueError(f"row {number}: {error}") from error
        if turn.role == "assistant" and not turn.says_something:
            raise NotRenderable(f"row {number}: `{side}` is a message that says nothing")
        if turn.role == "assistant" and turn.is_text:
            return SpokenAnswer.of(turn) if turn.tool_calls or turn.reasoning else turn.text
    raise ValueError(
        f"row {number}: expected `{side}`, a text or the assistant's messages; found {str(value)[:120]}"
    )
