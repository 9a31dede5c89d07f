"""Chat messages into token ids: one way for training, scoring and generating, so that all three see the same text."""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packed_forward.packing import PairTokens
from packed_forward.row_cache import RowCache, row_key
from rl.agents.base import Message, Row
from rl.chat_templates import DEFAULT_CHAT_TEMPLATE, TEMPLATE_ERRORS
from rl.training.chat_template import (
    Answer,
    LeftOut,
    NotRenderable,
    ToolPrompt,
    TrainingTemplate,
    prompt_messages,
    response_of,
    tools_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = [{"role": "user", "content": "Ratchet asks"}, {"role": "assistant", "content": "Ratchet answers"}]


@dataclass(frozen=True)
class EncodedResponse:
    """One response to one prompt, ready to be scored."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Ends with the token that ends the turn, unless the response was cut."""
    prompt_cut: bool = False
    response_cut: bool = False


def parts_alike(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Places of rows in parts of like length, of at most `most` tokens each with their padding, or of one row."""
    parts: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if parts and (len(parts[-1]) + 1) * lengths[place] <= most:
            parts[-1].append(place)
        else:
            parts.append([place])
    return parts


def batches_within(
    places: Sequence[int], lengths: Sequence[int], most: int, tokens: int
) -> Iterator[list[int]]:
    """Places of rows, which are sorted by length, in batches of `most` rows and `tokens` with their padding, at most;
    a longer row alone. 0 tokens set no limit."""
    batch: list[int] = []
    for place in places:
        if batch and (len(batch) == most or 0 < tokens < (len(batch) + 1) * lengths[place]):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


NOT_TEXT = "not_text"
"""Reason for leaving a row out: the base model's chat template cannot write its prompt or its answer."""

EMPTY = "empty response"


@dataclass
class EncodedColumn:
    """Single responses of rows, and what had to be left out to get there."""

    items: list[EncodedResponse] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    """Of each item the row it is of, among what was given."""
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def truncated(self) -> dict[str, int]:
        return {
            "prompts": sum(item.prompt_cut for item in self.items),
            "completions": sum(item.response_cut for item in self.items),
        }


@dataclass
class EncodedPairs:
    """Preference pairs with the same prompt tokens on both sides, and what had to be cut or left out to get there."""

    rows: list[PairTokens] = field(default_factory=list)
    truncated: dict[str, int] = field(default_factory=lambda: {"prompts": 0, "completions": 0})
    """`prompts`: pairs whose prompt was cut; `completions`: responses cut, up to two a pair."""
    left_out: LeftOut = field(default_factory=LeftOut)


class Encoder:
    """A tokenizer with chat template, padding and the token that ends a turn set as training needs them.

    The response is put after exactly the prompt a server would send (the template with its generation prompt) and
    is followed by the token with which the template ends an assistant's turn. What a template would add inside past
    answers (Qwen3's empty thinking block) is therefore not trained on: a server would not send it either. An answer
    that calls tools is what the template writes for it after that prompt (`TrainingTemplate.turns`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int | None = None) -> None:
        """Complete `tokenizer` in place. `context`: positions the model can read, if it has a limit."""
        self.tokenizer = tokenizer
        self.context = context
        self.notes: list[str] = []
        self.cache: RowCache | None = None
        """Tokens of earlier runs; `pairs` and `column` look there first."""
        if not tokenizer.chat_template:
            tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
            self.notes.append(
                "the base model has no chat template: the plain default is used (and saved with the adapter)"
            )
        if tokenizer.pad_token_id is None:
            # any existing token serves: padded positions are masked everywhere, and a new one would need new weights
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        self.template = TrainingTemplate(tokenizer)
        tokenizer.padding_side = "left"
        tokenizer.truncation_side = "left"
        self.turn_end_id = self._turn_end()

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: the template's turn end and the eos token."""
        return sorted({i for i in (self.turn_end_id, self.tokenizer.eos_token_id) if i is not None})

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, with the tools of a ToolPrompt. Raises NotRenderable as `TrainingTemplate.prompt`."""
        return self.template.prompt(messages)

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
        self,
        items: Sequence[tuple[Sequence[Message], Answer]],
        max_length: int | None = None,
        max_response_length: int | None = None,
    ) -> list[EncodedResponse]:
        """Prompt and response ids of each item, cut to fit. Lengths in tokens; None means the model's context.

        Raises NotRenderable for an item that the template cannot write, or that takes several turns.
        """
        encoded = []
        for (messages, _), tokens in zip(items, self._tokens(items), strict=True):
            if isinstance(tokens, NotRenderable):
                raise tokens
            encoded.append(self._response(messages, _single(tokens), max_length, max_response_length))
        return encoded

    def column(
        self,
        rows: Sequence[Row],
        side: str,
        max_length: int,
        max_response_length: int,
        *,
        turns: bool = False,
    ) -> EncodedColumn:
        """Encode rows {"prompt": messages, side: text or messages, "tools"?} like `responses`.

        Left out is what the template cannot write. `turns`: an answer of several turns is an item for each turn of the
        assistant; else it is left out. Raises ValueError for a row of another shape, with its number (from 0).
        """
        items = [(prompt_messages(row, n), response_of(row, side, n)) for n, row in enumerate(rows)]
        column = EncodedColumn()
        for number, tokens in enumerate(self._tokens(items)):
            try:
                if isinstance(tokens, NotRenderable):
                    raise tokens
                for one in tokens if turns else [_single(tokens)]:
                    column.items.append(
                        self._response(items[number][0], one, max_length, max_response_length)
                    )
                    column.index.append(number)
            except NotRenderable as error:
                column.left_out.add(NOT_TEXT, rows[number], number, str(error))
        return column

    def pairs(self, rows: Sequence[Row], max_length: int, max_response_length: int) -> EncodedPairs:
        """Encode rows {"prompt": messages, "chosen", "rejected": text or messages, "weight"?, "tools"?}.

        A response longer than `max_response_length` loses its end; a prompt that then does not fit `max_length` with
        the longer response loses its oldest tokens, the system turn last. Turns with which both responses begin belong
        to the prompt. Left out is only what cannot teach: sides that are identical once cut, and what the template
        cannot write. Raises ValueError for a row of another shape, with its number (from 0).
        """
        items, weights = [], []
        for number, row in enumerate(rows):
            prompt = prompt_messages(row, number)
            sides = [response_of(row, side, number) for side in ("chosen", "rejected")]
            prompt, sides = _shared_turns(prompt, sides)
            items += [(prompt, answer) for answer in sides]
            weight = row.get("weight")
            weights.append(1.0 if weight is None else float(weight))
            if not 0 < weights[-1] < float("inf"):
                raise ValueError(f"row {number}: expected a weight above 0, found {row['weight']!r}")
        tokens = self._tokens(items)
        pairs = EncodedPairs()
        for i, (one, other) in enumerate(zip(tokens[::2], tokens[1::2], strict=True)):
            try:
                (prompt_ids, good), (other_ids, bad) = _single(one), _single(other)
                if prompt_ids != other_ids:
                    raise NotRenderable(
                        "the base model's chat template writes the two answers after different prompts"
                    )
            except NotRenderable as error:
                pairs.left_out.add(NOT_TEXT, rows[i], i, str(error))
                continue
            prompt_part, (good_kept, bad_kept) = self._fit(
                items[2 * i][0], prompt_ids, [good, bad], max_length, max_response_length
            )
            if good_kept == bad_kept:
                why = "identical responses" if good == bad else "identical after truncation"
                pairs.left_out.add(why, rows[i], i)
                continue
            pairs.truncated["prompts"] += len(prompt_part) < len(prompt_ids)
            pairs.truncated["completions"] += (len(good_kept) < len(good)) + (len(bad_kept) < len(bad))
            pairs.rows.append(
                {
                    "prompt_ids": prompt_part,
                    "chosen_ids": good_kept,
                    "rejected_ids": bad_kept,
                    "weight": weights[i],
                    "index": i,
                }
            )
        return pairs

    def written(self, rows: Sequence[Row]) -> tuple[list[Row], LeftOut]:
        """The rows with answers that call tools as the text that the template writes for them, which is what the policy
        has to write; left out are those that the template cannot write. Raises ValueError as `column`."""
        kept: list[Row] = []
        left_out = LeftOut()
        for number, row in enumerate(rows):
            prompt = prompt_messages(row, number)
            try:
                start = self.render(prompt)
                said: dict[str, object] = {
                    side: self._text(prompt, start, response_of(row, side, number))
                    for side in ("chosen", "rejected", "completion")
                    if side in row
                }
            except NotRenderable as error:
                left_out.add(NOT_TEXT, row, number, str(error))
            else:
                kept.append({**row, **said})
        return kept, left_out

    def _text(self, prompt: Sequence[Message], start: str, answer: Answer) -> str:
        if isinstance(answer, str):
            return answer
        turns = self._without_end(self.template.turns(prompt, answer))
        if len(turns) != 1 or turns[0][0] != start:
            raise NotRenderable(
                f"an answer of {len(turns)} turns, where one is compared or scored as a whole"
            )
        return turns[0][1]

    def _response(
        self,
        messages: Sequence[Message],
        tokens: Tokens,
        max_length: int | None,
        max_response_length: int | None,
    ) -> EncodedResponse:
        prompt, response = tokens
        prompt_ids, (answer,) = self._fit(messages, prompt, [response], max_length, max_response_length)
        return EncodedResponse(prompt_ids, answer, len(prompt_ids) < len(prompt), len(answer) < len(response))

    def _tokens(
        self, items: Sequence[tuple[Sequence[Message], Answer]]
    ) -> list[list[Tokens] | NotRenderable]:
        """Uncut token ids of each (prompt, answer), a pair for each of the assistant's turns, from the cache
        where they are there; the reason where the template cannot write it.

        A key is the tokenizer, its template, and the words. What is new is rendered and tokenised in one batch.
        """
        keys = [self._key(*item) for item in items]
        hits = self.cache.get(keys) if self.cache is not None else {}
        faults: dict[bytes, NotRenderable] = {}
        written: dict[bytes, list[tuple[str, str]]] = {}
        prompts: dict[int, str] = {}  # one prompt is rendered once, however many answers it has
        for key, (messages, answer) in zip(keys, items, strict=True):
            if key in hits or key in written or key in faults:
                continue
            try:
                if isinstance(answer, str):
                    if id(messages) not in prompts:
                        prompts[id(messages)] = self.render(messages)
                    written[key] = [(prompts[id(messages)], answer)]
                else:
                    written[key] = self._without_end(self.template.turns(messages, answer))
            except NotRenderable as error:
                faults[key] = error
        texts = [turn for turns in written.values() for turn in turns]
        distinct = list(dict.fromkeys(prompt for prompt, _ in texts))
        ids = dict(zip(distinct, self._ids(distinct), strict=True))
        alone = [ids[prompt] for prompt, _ in texts]
        answers = iter(
            zip(
                alone,
                self._answers([prompt for prompt, _ in texts], alone, [words for _, words in texts]),
                strict=True,
            )
        )
        fresh = {
            key: array(
                "i",
                [number for _ in turns for p, a in [next(answers)] for number in (len(p), len(a), *p, *a)],
            ).tobytes()
            for key, turns in written.items()
        }
        if self.cache is not None:
            self.cache.put(fresh)
        return [faults.get(key) or _unpacked(hits.get(key) or fresh[key]) for key in keys]

    def _key(self, messages: Sequence[Message], answer: Answer) -> bytes:
        prompt = json.dumps([list(messages), tools_of(messages)], sort_keys=True)
        said = answer if isinstance(answer, str) else "\0" + json.dumps(list(answer), sort_keys=True)
        return row_key(self.identity, prompt, said)

    def _without_end(self, turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Turns as their template writes them, without the token that ends them and blanks behind it. The same token
        further inside a turn (gpt-oss ends its reasoning by one) belongs to the turn."""
        if self.turn_end_id is None:
            return turns
        end = self.tokenizer.decode([self.turn_end_id])
        return [(prompt, words.rstrip().removesuffix(end) if end else words) for prompt, words in turns]

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
        self,
        messages: Sequence[Message],
        prompt: list[int],
        responses: list[list[int]],
        max_length: int | None,
        max_response_length: int | None,
    ) -> tuple[list[int], list[list[int]]]:
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
        system = [messages[0]] if messages and messages[0]["role"] == "system" else []
        one, two = self._ids(
            [
                self.render(ToolPrompt([*system, {"role": "user", "content": text}], tools_of(messages)))
                for text in ("Ratchet", "9 probes")
            ]
        )
        head = _common(one, two)
        return prompt[: len(_common(head, prompt))]

    def _turn_end(self) -> int | None:
        """The first special token the template puts after an assistant's words, else eos, else None."""
        try:
            text = self.template.raw(PROBE, add_generation_prompt=False)
        except TEMPLATE_ERRORS:
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


Tokens = tuple[list[int], list[int]]
"""Token ids of a prompt and of one turn of the assistant after it."""


def _unpacked(stored: bytes) -> list[Tokens]:
    numbers = array("i", stored)
    found, place = [], 0
    while place < len(numbers):
        prompt, answer = numbers[place], numbers[place + 1]
        start, middle = place + 2, place + 2 + prompt
        place = middle + answer
        found.append((list(numbers[start:middle]), list(numbers[middle:place])))
    return found


def _single(tokens: list[Tokens] | NotRenderable) -> Tokens:
    """The tokens of an answer of one turn. Raises NotRenderable for another."""
    if isinstance(tokens, NotRenderable):
        raise tokens
    if len(tokens) != 1:
        raise NotRenderable(f"an answer of {len(tokens)} turns, where one is compared or scored as a whole")
    return tokens[0]


def _shared_turns(prompt: ToolPrompt, sides: list[Answer]) -> tuple[ToolPrompt, list[Answer]]:
    """Prompt and answers of a pair, where the turns with which both answers begin are part of the prompt."""
    one, other = sides
    if isinstance(one, str) or isinstance(other, str):
        return prompt, sides
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    while shared and any(side[shared].get("role") != "assistant" for side in (one, other)):
        shared -= 1
    if not shared:
        return prompt, sides
    return ToolPrompt([*prompt, *map(dict, one[:shared])], prompt.tools), [one[shared:], other[shared:]]
