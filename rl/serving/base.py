"""Types that all serving backends share: request, answer, and the errors of not answering."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from feedback.messages import ChatMessage

SentMessage = Mapping[str, Any]
"""One chat turn as it was sent: role, and content that is a text, a list of parts, or null."""

BASE = "base"
"""Name of the base model where a policy's name could stand."""


class ServingRefused(ValueError):
    """A request that fails however often it is sent: the caller has to change it."""

    def __init__(self, message: str, *, param: str = "", code: str = "invalid") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BackendUnable(ServingRefused):
    """This backend cannot do what is asked (tools, pictures, log-probabilities); another one may."""


class BackendFailed(RuntimeError):
    """No answer now: down, overloaded, too slow, or files not there yet. Another backend, or a later try, may."""

    def __init__(self, message: str, *, kind: str = "failed", retry_after_s: float = 2.0) -> None:
        super().__init__(message)
        self.kind = kind
        """For counters: timeout, busy, open (the circuit), missing or damaged (a file), malformed (what came is no
        completion), failed."""
        self.retry_after_s = retry_after_s
        """Seconds until another try may do better."""


@dataclass(frozen=True)
class Ask:
    """One question to a model, and how it is to be answered."""

    messages: Sequence[SentMessage]
    max_tokens: int | None = None
    temperature: float | None = None
    """None: the backend's own (in process 0, the likeliest answer)."""
    top_p: float | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    response_schema: Mapping[str, object] | None = None
    """JSON schema that constrains decoding; {} is any JSON object."""
    answers: Sequence[str] = ()
    """The closed set a policy's answer is taken from, where its agent has one; applied in process."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of an OpenAI request (tools, tool_choice, logit_bias, ...), passed on as they are."""
    limit_field: str = "max_tokens"
    """Caller's name for its limit: `max_tokens` or `max_completion_tokens`."""
    stream: bool = False
    """The answer is given in pieces, as it comes; else whole."""
    confidence: bool = False
    """The answer says how sure the model is of it."""


def text_length(messages: Sequence[SentMessage]) -> int:
    """Characters of the text in messages; pictures and calls are not counted."""
    count = 0
    for message in messages:
        content = message.get("content")
        parts = [{"text": content}] if isinstance(content, str) else content or ()
        count += sum(len(part["text"]) for part in parts if isinstance(part.get("text"), str))
    return count


@dataclass(frozen=True)
class Extras:
    """Fields that a server sends beside the message, as they came."""

    source: Mapping[str, Any] = field(default_factory=dict)
    """The server's own `id`, `model` and `request_id` (of its headers)."""
    usage: Mapping[str, object] | None = None
    """Token counts with their details; None: the server sent none."""
    choice: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the choice: logprobs, results of content filters."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the completion: system_fingerprint, service_tier, citations."""
    choices: Sequence[Mapping[str, object]] = ()
    """Choices beside the first; one was asked for."""
    left_out: tuple[str, ...] = ()
    """Fields of the request that the server's dialect has none for."""


@dataclass(frozen=True)
class Answer:
    """One answer, and what it took."""

    message: ChatMessage
    tokens_in: int | None
    tokens_out: int | None
    latency_ms: float
    finish_reason: str | None = "stop"
    said: Mapping[str, object] = field(default_factory=dict)
    """The message as a client gets it: OpenAI's fields, and the server's own as they came."""
    log_probability: float | None = None
    """Of this answer under the distribution it was drawn from, in nats; None where the backend does not say."""
    chosen: bool = False
    """Picked out of a set of answers, so that its probability is the propensity of a choice."""
    extras: Extras = Extras()
    confidence: float | None = None
    """Geometric mean probability of its tokens at temperature 1, also of an answer without a draw, whose
    `log_probability` is 0. None where nobody asked, or the backend does not say."""

    @property
    def text(self) -> str:
        return self.message.text

    @property
    def served_model(self) -> str:
        """The server's own name of the model that answered, with its version; empty where it does not say."""
        return str(self.extras.source.get("model") or "")

    @classmethod
    def of_text(
        cls,
        text: str,
        latency_ms: float,
        *,
        log_probability: float | None = None,
        chosen: bool = False,
    ) -> Answer:
        """An answer of words alone, whose tokens nobody counted."""
        said = {"role": "assistant", "content": text}
        message = ChatMessage(role="assistant", content=text)
        return cls(message, None, None, latency_ms, said=said, log_probability=log_probability, chosen=chosen)


@dataclass(frozen=True)
class Piece:
    """A part of an answer on its way. The last piece has `end`, and says why the answer ended and what it took. An
    earlier one may say what is known by then, for an answer that breaks off."""

    delta: Mapping[str, object] = field(default_factory=dict)
    """Further words, calls or other fields of the message, as OpenAI streams them."""
    choice: Mapping[str, object] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)
    end: bool = False
    finish_reason: str | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    log_probability: float | None = None
    chosen: bool = False
    extras: Extras = Extras()
    """Of the answer so far; with the last piece of the whole."""
    confidence: float | None = None

    @property
    def text(self) -> str:
        return str(self.delta.get("content") or "")

    @classmethod
    def of_text(cls, text: str) -> Piece:
        return cls({"content": text} if text else {})


@dataclass(frozen=True)
class Completion:
    """An answer that is a decision."""

    id: uuid.UUID
    agent: str
    policy: str
    arm: str
    message: Mapping[str, object] = field(default_factory=dict)
    """The answer as the client gets it; empty where a stream begins."""
    finish_reason: str | None = None
    usage: Mapping[str, object] | None = None
    """Token counts as they came, with their details; None: unknown."""
    extras: Extras = field(default_factory=Extras)
    created: int = field(default_factory=lambda: int(time.time()))
    intended_policy: str = ""
    """The policy that was to answer; `policy` is another where that one failed and somebody stepped in."""

    recorded: bool = True
    """True if the decision outlives this process; of a stream that begins, whether it is expected to."""
    feedback: Mapping[str, str] = field(default_factory=dict)
    """The token by which the answer can be rated, and the address of its form; empty where a stream begins."""

    @property
    def stepped_in(self) -> bool:
        """True if another policy answered than the one the request came to."""
        return bool(self.intended_policy) and self.intended_policy != self.policy

    @property
    def routing(self) -> dict[str, object]:
        """Policies asked and the one that answered; with the server's own names of its answer, and choices that nobody
        asked for."""
        extras = self.extras
        return {
            "decision": str(self.id),
            "agent": self.agent,
            "policy": self.policy,
            "intended": self.intended_policy,
            "stepped_in": self.stepped_in,
            "arm": self.arm,
            "recorded": self.recorded,
            **({"upstream": dict(extras.source)} if extras.source else {}),
            **({"other_choices": list(extras.choices)} if extras.choices else {}),
            **({"left_out": list(extras.left_out)} if extras.left_out else {}),
            **self.feedback,
        }


@dataclass(frozen=True)
class BrokenOff:
    """Stands at the end of a stream whose answer broke off, in place of its Completion."""

    message: str
    code: str = "unavailable"


StreamItem = Piece | Completion | BrokenOff
"""What follows a stream's first Completion: pieces, then how it ended."""


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens, as the upstream's row says; None: the bundled price table."""

    read: float | None = None
    cached: float | None = None
    written: float | None = None


@dataclass(frozen=True)
class Endpoint:
    """A server that answers over HTTP: an upstream, or a server of the team's own that holds its policies."""

    name: str
    url: str
    dialect: str = "openai"
    schemas: str = "json_schema"
    """How it is told the form of an answer; see `Upstream.Schemas`."""
    key: str = field(default="", repr=False)
    fault: str = ""
    """Why it cannot be asked at all, such as a key that is missing."""
    timeout_s: float | None = None
    """Seconds an answer may take; None: what is left of SERVING_TIMEOUT_S."""
    connect_timeout_s: float = 2.0
    concurrency: int = 64
    context_tokens: int | None = None
    """Tokens of prompt and answer together, at most; None: unknown."""
    forward_fields: bool = False
    prices: Prices = Prices()


@dataclass(frozen=True)
class Model:
    """What is to answer: a policy's adapter on its base, a base alone, a linear policy, or a hosted model."""

    name: str
    """The policy's name, or BASE."""
    base_model: str
    base_model_hash: str = ""
    """Empty: whatever file there is of this base model."""
    adapter: str = ""
    """The policy's adapter as a GGUF file, relative to RATCHET_HOME; empty: there is none (yet)."""
    merged_file: str = ""
    """The policy as one whole GGUF file, base and adapter in one; serves where there is no adapter file."""
    adapter_sha256: str = ""
    merged_sha256: str = ""
    """Sums the two files were registered with; empty: not recorded."""
    kind: str = ""
    """`linear`: `adapter` is the file of a linear policy, which has no base model."""
    endpoint: Endpoint | None = None
    """Of a hosted policy: who answers; `base_model` is the provider's name of the model."""
    parameters: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Of a hosted policy: fields of each request, in the endpoint's own dialect; they win over the request's."""

    @property
    def is_the_apps(self) -> bool:
        """True of models that were not trained here: what their answers look like is not inferred from records."""
        return self.name == BASE or self.endpoint is not None


class Backend(Protocol):
    """One way of answering. Raises ServingRefused, BackendUnable, BackendFailed; seconds count from the call."""

    name: str

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        """The answer in pieces: one and a last one where it is asked for whole. What goes wrong before the first piece
        is raised by the first `next`."""
        ...

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        """log p(response, end of turn | messages) of each response, in nats."""
        ...


# --- Guards against a slow or dead backend ---------------------------------------------------------------------


class ConcurrencyLimiter:
    """Limiter with a number of places inside and a number of places to wait; a caller beyond both is refused
    at once."""

    def __init__(self, slots: int, waiting: int, name: str) -> None:
        self.name = name
        self._free = threading.Semaphore(slots)
        self._limit = slots + waiting
        self._there = 0
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, timeout_s: float) -> Iterator[None]:
        """Wait for a place and hold it. Raises BackendFailed where the queue is full, or the time is over before."""
        with self._lock:
            if self._there >= self._limit:
                raise BackendFailed(
                    f"{self.name} is busy: {self._there} requests are waiting or running", kind="busy"
                )
            self._there += 1
        try:
            if not self._free.acquire(timeout=max(timeout_s, 0)):
                raise BackendFailed(
                    f"{self.name} is busy: no free slot within {timeout_s:.3g} s", kind="busy"
                )
            try:
                yield
            finally:
                self._free.release()
        finally:
            with self._lock:
                self._there -= 1


class CircuitBreaker:
    """Opens after so many failures in a row; after a pause one request tries again, and the others wait for its word.

    The pattern of Nygard, Release It! (2007). A library was looked at: pybreaker holds one lock during every call.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int = 5,
        pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.failures, self.pause_s = name, failures, pause_s
        self._clock = clock
        self._failed = 0
        self._again_at = 0.0
        self._held_until = 0.0
        self._lock = threading.Lock()

    @property
    def held_s(self) -> float:
        """Seconds for which `hold` asked to wait."""
        return max(self._held_until - self._clock(), 0.0)

    def hold(self, seconds: float) -> None:
        """Keep the seconds that a server asked to be left alone for (`Retry-After`)."""
        with self._lock:
            self._held_until = max(self._held_until, self._clock() + seconds)

    @property
    def is_open(self) -> bool:
        return self._failed >= self.failures

    def enter(self) -> None:
        """Raises BackendFailed while the circuit is open."""
        with self._lock:
            if not self.is_open:
                return
            left = self._again_at - self._clock()
            if left > 0:
                raise BackendFailed(
                    f"{self.name} failed {self._failed} times in a row and is not asked for {left:.2g} "
                    "s more",
                    kind="open",
                    retry_after_s=left,
                )
            # this one tries; the next one is let in after another pause, even if this one is never heard of again
            self._again_at = self._clock() + self.pause_s

    def record_success(self) -> None:
        with self._lock:
            self._failed = 0

    def record_failure(self) -> None:
        with self._lock:
            self._failed += 1
            self._again_at = self._clock() + self.pause_s
