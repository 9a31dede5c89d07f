"""Answer, and score answers, with a GGUF base and its adapters in this process, through llama.cpp. No torch."""

from __future__ import annotations

import codecs
import ctypes
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from feedback.messages import ChatMessage, MessageError, messages_read
from rl.chat_templates import (
    PROBE_TOOL,
    TEMPLATE_ERRORS,
    CallForm,
    ChatTemplate,
    TemplateRefused,
    call_form,
    probe_turns,
    prompt_rendered,
    template_turns,
)
from rl.decoding.constraint import Constraint, GrammarVocabulary
from rl.serving.assembly import answer_of
from rl.serving.base import (
    Answer,
    Ask,
    BackendFailed,
    BackendUnable,
    Piece,
    SentMessage,
    ServingRefused,
)
from rl.serving.llama_context import CACHE_BYTES, FloatArray, LlamaContext
from rl.serving.tool_calls import (
    ELSEWHERE,
    CallReader,
    CallSyntax,
    Tools,
    constraint_of,
    decoding_errors,
    tools_constraint,
)

MAX_TOKENS = 512
"""Of an answer, where the question names no limit."""

HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS |= {"prompt_cache_retention", "reasoning_effort", "verbosity", "response_format"}
HARMLESS |= {"parallel_tool_calls", "tools", "tool_choice"}
"""Fields of a request that say nothing about the answer's text, or are read here."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"], []),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "n": (1,),
}
"""Fields that this backend cannot do, with the values at which there is nothing to do."""

TEMPLATE_KEY = "tokenizer.chat_template"
"""Of the chat template in a GGUF file, of a base or of an adapter."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name in chat templates -> name in GGUF files."""
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "Ratchet asks"},
    {"role": "assistant", "content": "Ratchet answers"},
]


class Chat:
    """A chat template as serving uses it: prompts, and the syntax in which it writes calls."""

    def __init__(self, template: ChatTemplate, end: int) -> None:
        self.template = template
        self.end = end
        """Token that ends an assistant's turn."""

    def render(self, messages: Sequence[SentMessage], tools: Tools | None = None) -> str:
        """The prompt as text, as `rl.training.chat_template` renders it.

        Raises ServingRefused where the template refuses the messages, BackendUnable where it leaves out tools.
        """
        turns = template_turns(_messages_read(messages), self.call_form)
        offered = list(tools.offered) if tools else []
        try:
            text = prompt_rendered(lambda some: self.template.render(some, offered), turns)
        except TemplateRefused as refusal:
            raise ServingRefused(str(refusal), param="messages") from refusal
        names = [(name, "tools") for name in (tools.names if tools else ())]
        names += [
            (call["function"]["name"], "messages") for turn in turns for call in turn.get("tool_calls", ())
        ]
        for name, param in names:
            if name and name not in text:
                raise BackendUnable(
                    f"{param}: this model's chat template writes no tools ({name}); {ELSEWHERE}",
                    param=param,
                    code="unsupported",
                )
        return text

    def _probe(self, turns: Sequence[Any], tools: Sequence[object]) -> str:
        try:
            return self.template.render(turns, tools, answer=False)
        except TEMPLATE_ERRORS:
            return ""

    @functools.cached_property
    def call_form(self) -> CallForm:
        return call_form(self._probe)

    @functools.cached_property
    def call_syntax(self) -> CallSyntax | None:
        """Syntax in which the template writes calls; None: it writes none that can be read."""
        question, call = probe_turns(self.call_form)
        try:
            prompt = self.template.render([question], [PROBE_TOOL])
        except TEMPLATE_ERRORS:
            return None  # it writes no tools
        return CallSyntax.of_texts(prompt, self._probe([question, call], [PROBE_TOOL]))


class LlamaPolicy:
    """One GGUF base, loaded once, and any number of LoRA adapters on it. Use as a context manager.

    Not thread-safe: one question at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int = 2048,
        threads: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """cache_bytes: memory for caches of adapters, beside the weights."""
        self.context = LlamaContext(path, context=context, threads=threads, cache_bytes=cache_bytes)
        self._base_template = str(self.context.model.metadata().get(TEMPLATE_KEY) or "")
        """Empty where the base's file has none: its adapters carry the one they were trained with."""
        self._chats: dict[str, Chat] = {}
        self._vocabularies: dict[int, GrammarVocabulary] = {}
        self._pieces: dict[int, bytes] = {}

    # --- Text and tokens ----------------------------------------------------------------------------------

    def chat(self, adapter: Path | None = None) -> Chat:
        """The chat template that an adapter was trained with, which its file carries; else the base's.

        Raises BackendFailed where there is no such adapter.
        """
        own = self.context.adapter_value(adapter, TEMPLATE_KEY) if adapter is not None else ""
        source = own or self._base_template
        if not source:
            raise ServingRefused(
                f"expected a chat template in {adapter or 'the base model'}, found none; export the model again"
            )
        if source not in self._chats:
            try:
                template = ChatTemplate(source, self._special_tokens)
            except TemplateRefused as refusal:
                raise BackendFailed(f"{adapter or 'the base model'}: {refusal}", kind="missing") from refusal
            self._chats[source] = Chat(template, self._turn_end(template))
        return self._chats[source]

    def render(self, messages: Sequence[SentMessage], adapter: Path | None = None) -> str:
        """The prompt as text. Raises ServingRefused and BackendUnable as `Chat.render`."""
        return self.chat(adapter).render(messages)

    @functools.cached_property
    def _special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that templates use; only those that the model has."""
        metadata, model = self.context.model.metadata(), self.context.model
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
        return {name: model.token_get_text(int(token)) for name, token in ids.items() if token is not None}

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.context.model.tokenize(text.encode(), False, True)
        return found

    def _turn_end(self, template: ChatTemplate) -> int:
        """The token with which a template ends an assistant's turn, else the model's end of text."""
        model, lib = self.context.model, self.context._lib
        try:
            text = template.render(_PROBE, answer=False)
        except TEMPLATE_ERRORS:
            text = ""  # a template that takes no such conversation says nothing of how a turn ends
        _, found, tail = text.rpartition(_PROBE[1]["content"])
        added = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        for token in self.tokens(tail) if found else ():
            if lib.llama_vocab_get_attr(model.vocab, token) & added or self._ends_text(token):
                return token
        return int(model.token_eos())

    def _ends(self, token: int, chat: Chat) -> bool:
        """True for a token that ends an assistant's turn."""
        return token == chat.end or self._ends_text(token)

    def _ends_text(self, token: int) -> bool:
        return bool(self.context._lib.llama_vocab_is_eog(self.context.model.vocab, token))

    def _piece(self, token: int) -> bytes:
        """The bytes a token writes; none of a control token."""
        if token not in self._pieces:
            self._pieces[token] = self._piece_read(token)
        return self._pieces[token]

    def _vocabulary(self, end: int) -> GrammarVocabulary:
        """Vocabulary as constrained decoding reads it; any token that ends a turn ends an answer."""
        if end in self._vocabularies:
            return self._vocabularies[end]
        from llguidance import LLTokenizer

        lib, vocab = self.context._lib, self.context.model.vocab
        tokens = range(self.context.vocabulary)
        tokenizer: Any = LLTokenizer  # its stubs lack this constructor
        read = tokenizer.from_llamacpp(
            # a token that writes nothing is a control token, which llguidance knows by a byte that no text has
            tokens=[self._piece(token) or b"\xff<%d>" % token for token in tokens],
            vocab_ptr=vocab,
            tokenize_fptr=ctypes.cast(lib.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=[token for token in tokens if token == end or self._ends_text(token)],
        )
        self._vocabularies[end] = GrammarVocabulary(read, self.context.vocabulary, self._piece)
        return self._vocabularies[end]

    def _piece_read(self, token: int) -> bytes:
        lib, vocab = self.context._lib, self.context.model.vocab
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = lib.llama_token_to_piece(vocab, token, buffer, size, 0, False)
            if length >= 0:
                return buffer.raw[:length]
            size = -length

    # --- Answering ----------------------------------------------------------------------------------------

    def answer(
        self, ask: Ask, adapter: Path | None = None, *, scale: float = 1.0, deadline: float | None = None
    ) -> Answer:
        """Answer a question under an adapter, or under the base. deadline: of time.monotonic().

        Raises ServingRefused, BackendUnable, BackendFailed.
        """
        started = time.perf_counter()
        pieces = list(self.stream(ask, adapter, scale=scale, deadline=deadline))
        return answer_of(pieces, 1000 * (time.perf_counter() - started))

    def stream(
        self, ask: Ask, adapter: Path | None = None, *, scale: float = 1.0, deadline: float | None = None
    ) -> Iterator[Piece]:
        """The answer piece by piece; the last piece has the finish reason and the counts."""
        ask_check(ask)
        tools, chat = Tools.of(ask), self.chat(adapter)
        syntax = chat.call_syntax if tools else None
        prompt = self.tokens(chat.render(ask.messages, tools))
        if tools and syntax is None:
            raise BackendUnable(
                f"tools: this model's chat template writes calls in a syntax that is not read in process; {ELSEWHERE}",
                param="tools",
                code="unsupported",
            )
        constraint = self._constraint(ask, tools, syntax, chat.end)
        limit = min(ask.max_tokens or MAX_TOKENS, max(self.context.context - len(prompt), 1))
        random = np.random.default_rng(ask.seed)
        text, reader = _Text(ask.stop), CallReader(tools, syntax)
        logp, sure, count, reason = 0.0, 0.0, 0, "length"
        self.context.use(adapter, scale)
        written, allowed = self._forced(constraint, limit - 1)
        logits = self.context.prompt([*prompt, *written])
        computed = len(written)
        while True:
            for token in written:
                count += 1
                if self._ends(token, chat):
                    reason = "stop"
                    break
                if found := reader.add(text.add(self._piece(token))):
                    yield Piece.of_text(found)
                if text.stopped:
                    reason = "stop"
                    break
            if reason == "stop" or count >= limit:
                break
            if deadline is not None and time.monotonic() > deadline:
                raise BackendFailed(f"timed out after {count} tokens", kind="timeout")
            if count > computed:
                logits, computed = self.context.append(written), count
            token, nats = self._draw(logits, ask, random, allowed)
            logp += nats
            if ask.confidence:
                sure += _log_probability(logits, token, allowed)
            written = [token]
            if constraint is not None and count + 1 < limit and not self._ends(token, chat):
                constraint.accept(token)
                forced, allowed = self._forced(constraint, limit - count - 1)
                written += forced
        shown = reader.add(text.rest())
        words, calls = reader.end()
        if rest := shown + words:
            yield Piece.of_text(rest)
        for call in calls:
            yield Piece({"tool_calls": [call]})
        yield Piece(
            end=True,
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            tokens_in=len(prompt),
            tokens_out=count,
            log_probability=logp,
            confidence=math.exp(sure / max(count, 1)) if ask.confidence else None,
        )

    def _constraint(
        self, ask: Ask, tools: Tools | None, syntax: CallSyntax | None, end: int
    ) -> Constraint | None:
        if tools is not None and syntax is not None:
            return tools_constraint(ask, tools, syntax, self._vocabulary(end))
        constrained = ask.response_schema is not None or ask.answers
        return constraint_of(ask, self._vocabulary(end)) if constrained else None

    def _draw(
        self,
        logits: FloatArray,
        ask: Ask,
        random: np.random.Generator,
        allowed: npt.NDArray[np.int64] | None,
    ) -> tuple[int, float]:
        """A token out of those allowed, None: any, and the log-probability with which it was drawn, in nats."""
        if allowed is not None:
            logits = logits[allowed]
        place, nats = int(logits.argmax()), 0.0
        if ask.temperature:
            top_p = 1.0 if ask.top_p is None else ask.top_p
            place, nats = sampled(logits, ask.temperature, top_p, random)
        return place if allowed is None else int(allowed[place]), nats

    def _forced(
        self, constraint: Constraint | None, most: int
    ) -> tuple[list[int], npt.NDArray[np.int64] | None]:
        """Tokens that must come next, each the only one allowed, and the tokens allowed after them; None: any.

        The forced tokens are computed in one batch, and none of them is drawn. At most `most`; the end of a turn is
        left to be drawn.
        """
        tokens: list[int] = []
        while constraint is not None:
            with decoding_errors():
                allowed = np.flatnonzero(constraint.allowed_tokens())
            if len(allowed) > 1 or len(tokens) >= most or not self._piece(int(allowed[0])):
                return tokens, allowed
            tokens.append(int(allowed[0]))
            constraint.accept(tokens[-1])
        return tokens, None

    # --- Scoring ------------------------------------------------------------------------------------------

    def log_probabilities(
        self,
        messages: Sequence[SentMessage],
        responses: Sequence[str],
        adapter: Path | None = None,
        *,
        scale: float = 1.0,
    ) -> list[float]:
        """log p(response, turn end | messages) of each response, in nats; the prompt is computed once.

        As `rl.training.scoring.score_responses`: the sum over the response's tokens and the one that ends the turn.
        """
        text, end = self.render(messages, adapter), self.chat(adapter).end
        prompt = self.tokens(text)
        tails = []
        for response in responses:
            joint = self.tokens(text + response)
            # a token that straddles the border would not be what the model is asked to go on from
            alone = joint[len(prompt) :] if joint[: len(prompt)] == prompt else self.tokens(response)
            tails.append([*alone, end])
        self.context.use(adapter, scale)
        logits = self.context.prompt(prompt)
        first = _log_softmax(logits)
        totals = [float(first[tail[0]]) for tail in tails]
        for number, position, after in self.context.branches([tail[:-1] for tail in tails]):
            totals[number] += float(_log_softmax(after)[tails[number][position + 1]])
        return totals

    def close(self) -> None:
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _log_probability(logits: FloatArray, token: int, allowed: npt.NDArray[np.int64] | None) -> float:
    """Log-probability of a token among those allowed at temperature 1, in nats."""
    among = logits if allowed is None else logits[allowed]
    high = float(among.max())
    return float(logits[token]) - high - math.log(float(np.exp(among - high, dtype=np.float32).sum()))


def ask_check(ask: Ask) -> None:
    """Raises BackendUnable where a question asks for what is not done here."""
    Tools.of(ask)
    for name, value in ask.extra.items():
        if name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ()):
            raise BackendUnable(
                f"{name}: not supported by llama.cpp in process; add an OpenAI-compatible server to "
                "LOCAL_BACKENDS",
                param=name,
                code="unsupported",
            )


def _messages_read(messages: Sequence[SentMessage]) -> list[ChatMessage]:
    try:
        read = messages_read(list(messages))
    except MessageError as error:
        raise ServingRefused(str(error), param="messages") from error
    if not all(message.is_text for message in read):
        raise BackendUnable(
            "messages: llama.cpp in process reads text only; add an OpenAI-compatible server to LOCAL_BACKENDS",
            param="messages",
            code="unsupported",
        )
    return read


class _Text:
    """Bytes of tokens as text, whole characters only, held back where a stop text may have begun."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def add(self, piece: bytes) -> str:
        """Text that can be shown now."""
        self._held += self._decoder.decode(piece)
        if not self._stop:
            shown, self._held = self._held, ""
            return shown
        found = min((at for text in self._stop if (at := self._held.find(text)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            shown, self._held = self._held[:found], ""
            return shown
        safe = len(self._held) - max(len(text) for text in self._stop) + 1
        shown, self._held = self._held[: max(safe, 0)], self._held[max(safe, 0) :]
        return shown

    def rest(self) -> str:
        return "" if self.stopped else self._held + self._decoder.decode(b"", final=True)


NUCLEUS_TOKENS = 256
"""Likeliest tokens among which a nucleus is looked for first: to sort a whole vocabulary takes half as long as to
compute a token of a small model."""


def sampled(
    logits: FloatArray, temperature: float, top_p: float, random: np.random.Generator
) -> tuple[int, float]:
    """Draw an index of `logits` [n] at a temperature above 0: (index, its log-probability in nats).

    top_p below 1 draws within the smallest set of likeliest tokens whose probability reaches it
    (Holtzman et al. 2020).
    """
    weights = np.exp((logits - logits.max()) / np.float32(temperature), dtype=np.float32)
    inside = _nucleus(weights, top_p) if top_p < 1 else None
    if inside is not None:
        weights = weights[inside]
    sums = np.cumsum(weights, dtype=np.float64)
    place = min(int(np.searchsorted(sums, random.random() * sums[-1], side="right")), len(sums) - 1)
    return int(inside[place]) if inside is not None else place, float(np.log(weights[place] / sums[-1]))


def _nucleus(weights: FloatArray, top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the nucleus, likeliest first."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for size in (NUCLEUS_TOKENS, len(weights)):
        likely = np.argpartition(-weights, size)[:size] if size < len(weights) else np.arange(len(weights))
        likely = likely[np.lexsort((likely, -weights[likely]))]
        sums = np.cumsum(weights[likely], dtype=np.float64)
        if sums[-1] >= wanted:
            break
    return likely[: int(np.searchsorted(sums, wanted)) + 1]


def _log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found
