"""Answer through any OpenAI-compatible server: Ollama, vLLM, llama.cpp's, OpenAI."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError

from rl.decoding.unique_items import UniqueItems, items_repeated, portable
from rl.serving.assembly import Assembly, answer_of, joined, pieces_of
from rl.serving.base import (
    BASE,
    Answer,
    Ask,
    BackendFailed,
    BackendUnable,
    Extras,
    Model,
    Piece,
    SentMessage,
    ServingRefused,
)
from rl.serving.guards import CircuitBreaker, ConcurrencyLimiter

CONNECT_S = 2.0
"""Longest wait for a connection: a server that is there takes one at once."""
RETRIES = 2
FIRST_PAUSE_S = 0.1
"""Before the first retry at most; doubled for the next. The pause itself is drawn from 0 to that (full jitter)."""
RETRY_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which the same request may go through."""
LONGEST_ANSWER = 16 * 1024**2
MALFORMED = "malformed"
"""Kind of a failure whose cause is what the server sent: it is up, and sent no completion."""
READ = {"id", "object", "created", "model", "choices", "usage", "error"}
"""Fields of a completion that are read here; every other one is passed on as it came."""
CHOICE_READ = {"index", "delta", "message", "text", "finish_reason"}
STORED_ONLY = {"user", "metadata"}
"""Fields that servers take only beside `store: true`. Ratchet records them itself."""
EVENT_LINE = re.compile(r"$|:|(?:data|event|id|retry)\b")
SPARE = {
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "service_tier", "stream_options",
}  # fmt: skip
"""Fields that say nothing about the answer: left out for a server that once refused them by name."""


class OpenAIServer:
    """One server by its address, such as http://localhost:11434/v1."""

    def __init__(
        self, url: str, *, api_key: str = "", model: str = "{policy}", concurrent: int = 64, waiting: int = 64
    ) -> None:
        """model: what the server calls a policy; `{policy}` stands for its name. The base goes by its own name."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected an address such as http://localhost:11434/v1, found {url!r}")
        self.name = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        self.url = url.rstrip("/")
        self._model = model
        self._headers = {"Content-Type": "application/json", "User-Agent": "ratchet"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pool = urllib3.PoolManager(maxsize=concurrent, retries=False)
        self._turns = ConcurrencyLimiter(concurrent, waiting, self.name)
        self.breaker = CircuitBreaker(self.name)
        self._refused_fields: set[str] = set()
        """Fields of SPARE that this server does not take."""

    def answer(self, ask: Ask, model: Model, timeout_s: float) -> Answer:
        """A whole answer; asked for again where it repeats an item of a list that holds each once."""
        deadline = time.monotonic() + timeout_s
        for _ in range(1 + RETRIES):
            answer = self._answer(ask, model, deadline)
            if not (repeated := items_repeated(ask.response_schema, answer.text)):
                return answer
            if time.monotonic() >= deadline or ask.temperature == 0 or ask.seed is not None:
                break  # it would say the same again
        raise BackendFailed(
            f"{self.name} ignored uniqueItems: {repeated}; serve this agent in process", kind="repeated"
        )

    def _answer(self, ask: Ask, model: Model, deadline: float) -> Answer:
        start = time.perf_counter()
        pieces = list(self._asked(self._body(ask, model), deadline))
        return answer_of(pieces, 1000 * (time.perf_counter() - start))

    def stream(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        if UniqueItems.of(ask.response_schema) is not None:
            # looked at whole: what was given cannot be taken back
            answer = self.answer(ask, model, timeout_s)
            yield from pieces_of(answer)
            return
        body = {**self._body(ask, model), "stream": True, "stream_options": {"include_usage": True}}
        yield from self._asked(body, time.monotonic() + timeout_s)

    def _asked(self, body: dict[str, Any], deadline: float) -> Iterator[Piece]:
        """The pieces of an answer; one and a last one where the server sends it whole."""
        with self._turns.turn(max(deadline - time.monotonic(), 0.0)):
            response = self._post(body, deadline)
            kind = response.headers.get("Content-Type", "")
            # some servers stream what was asked for whole, or the other way round; they say so
            is_stream = "event-stream" in kind or (bool(body.get("stream")) and "json" not in kind)
            try:
                chunks = (
                    _chunks(response, deadline, self.name)
                    if is_stream
                    else [_whole(_read(response, deadline), self.name)]
                )
                yield from _pieces(chunks, _request_id(response), self.name)
            except (HTTPError, OSError) as error:
                self.breaker.record_failure()
                raise BackendFailed(f"{self.name} closed the connection: {error}") from error
            except BackendFailed as failure:
                if failure.kind != MALFORMED:
                    self.breaker.record_failure()
                raise
            finally:
                # what is left of a stream that nobody reads is not worth a connection
                response.close() if is_stream else response.release_conn()

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        """Chat endpoints give log-probabilities of what was generated, not of what might have been."""
        raise BackendUnable(
            f"{self.name} cannot return the probabilities of listed responses; serve this agent in process",
            param="candidates",
            code="unsupported",
        )

    def reachable(self, timeout_s: float = CONNECT_S) -> bool:
        """True if the server answers at all."""
        try:
            self._pool.request(
                "GET", f"{self.url}/models", headers=self._headers, timeout=timeout_s, retries=False
            )
        except (HTTPError, OSError):
            return False
        return True

    def _body(self, ask: Ask, model: Model) -> dict[str, Any]:
        name = model.base_model if model.name == BASE else self._model.replace("{policy}", model.name)
        extra = {
            key: value for key, value in ask.extra.items() if key not in STORED_ONLY or ask.extra.get("store")
        }
        body: dict[str, Any] = {**extra, "model": name, "messages": list(ask.messages)}
        chosen: dict[str, Any] = {
            ask.limit_field: ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
        }
        chosen |= {"stop": list(ask.stop) or None, "seed": ask.seed}
        body |= {key: value for key, value in chosen.items() if value is not None}
        if ask.response_schema is not None and "response_format" not in body:
            schema = portable(ask.response_schema)
            named = {"name": "response", "schema": schema, "strict": True}
            body["response_format"] = (
                {"type": "json_schema", "json_schema": named} if schema else {"type": "json_object"}
            )
        return body

    def _post(self, body: dict[str, Any], deadline: float) -> Any:
        """The answer with its head read, or a refusal. Asks again without the spare fields a refusal names."""
        body = {key: value for key, value in body.items() if key not in self._refused_fields}
        try:
            return self._post_retried(body, deadline)
        except ServingRefused as refusal:
            named = {key for key in SPARE & body.keys() if _names(refusal, key)}
            if not named:
                raise
        response = self._post_retried({key: body[key] for key in body if key not in named}, deadline)
        self._refused_fields |= named  # it was these: the server answers without them
        return response

    def _post_retried(self, body: dict[str, Any], deadline: float) -> Any:
        """Tries again after a pause while time is left."""
        raw = json.dumps(body).encode()
        for attempt in range(RETRIES + 1):
            self.breaker.enter()
            try:
                return self._post_once(raw, deadline)
            except BackendFailed as failure:
                if failure.kind == "busy":
                    self.breaker.record_success()  # it is up
                elif failure.kind != "refused":
                    self.breaker.record_failure()
                pause = random.uniform(0, FIRST_PAUSE_S * 2**attempt)
                left = deadline - time.monotonic() - pause
                if attempt == RETRIES or failure.kind in ("timeout", "refused") or left <= 0:
                    raise
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _post_once(self, raw: bytes, deadline: float) -> Any:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            response = self._pool.urlopen(
                "POST",
                f"{self.url}/chat/completions",
                body=raw,
                headers=self._headers,
                timeout=urllib3.Timeout(connect=min(CONNECT_S, left), read=left),
                retries=False,
                preload_content=False,
            )
        except ReadTimeoutError as error:
            raise BackendFailed(f"{self.name} did not answer within {left:.3g} s", kind="timeout") from error
        except (HTTPError, OSError) as error:
            raise BackendFailed(f"{self.name} cannot be reached: {error}") from error
        if response.status == 200:
            self.breaker.record_success()
            return response
        try:
            self._refuse(response.status, _read(response, deadline))
        finally:
            response.release_conn()

    def _refuse(self, status: int, raw: bytes) -> None:
        message, code, param = _error_of(raw)
        text = f"{self.name} answered {status}: {message}"
        if status in RETRY_STATUSES:
            raise BackendFailed(text, kind="busy" if status in (408, 425, 429) else "failed")
        if status in (401, 403, 404, 405, 407) or status < 400:
            # the key, the address, or the model's name: ours to mend, while another backend may answer
            raise BackendFailed(text, kind="refused")
        self.breaker.record_success()
        raise ServingRefused(message, param=param, code=code or "invalid")


def _read(response: Any, deadline: float) -> bytes:
    """The rest of an answer, LONGEST_ANSWER bytes at most; a server that trickles is given up at the deadline."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := response.read1(65_536):
            parts.append(part)
            size += len(part)
            if size > LONGEST_ANSWER or time.monotonic() > deadline:
                response.close()
                raise BackendFailed("the answer is too long, or takes too long to arrive", kind="timeout")
    except (HTTPError, OSError) as error:
        raise BackendFailed(f"the answer broke off: {error}") from error
    return b"".join(parts)


def _lines(response: Any, deadline: float, name: str) -> Iterator[str]:
    """Lines of a stream, each as soon as it has arrived."""
    held = b""
    while part := response.read1(65_536):
        if time.monotonic() > deadline:
            raise BackendFailed(f"{name} takes too long", kind="timeout")
        *whole, held = (held + part).split(b"\n")
        if len(held) > LONGEST_ANSWER:
            raise BackendFailed(f"{name} sent a line of more than {LONGEST_ANSWER:,} bytes", kind=MALFORMED)
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if held:
        yield held.decode("utf-8", "replace").rstrip("\r")


def _chunks(response: Any, deadline: float, name: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of an event stream; raises BackendFailed where it breaks off before its end."""
    has_reason, stray = False, ""
    for line in _lines(response, deadline, name):
        if not EVENT_LINE.match(line):
            stray = stray or line
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not data:
            continue  # a comment, another field of an event, or nothing
        if data == "[DONE]":
            return
        chunk = _object(data, name)
        choices = chunk.get("choices")
        has_reason = has_reason or any(
            isinstance(one, Mapping) and one.get("finish_reason")
            for one in (choices if isinstance(choices, list) else ())
        )
        yield chunk
    if not has_reason and stray:
        raise BackendFailed(f"{name} sent no event stream: {stray[:200]!r}", kind=MALFORMED)
    if not has_reason:
        raise BackendFailed(f"{name} closed the connection before the end of its answer")


def _whole(raw: bytes, name: str) -> Mapping[str, Any]:
    body = _object(raw.decode("utf-8", "replace"), name)
    choices = body.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        # the first is the one with index 0, wherever it stands
        choices = sorted(choices, key=lambda one: one.get("index") != 0 if isinstance(one, Mapping) else True)
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping) or not any(
        first.get(key) is not None for key in CHOICE_READ - {"index"}
    ):
        raise BackendFailed(f"{name} sent no chat completion: {raw[:200]!r}", kind=MALFORMED)
    return {**body, "choices": choices}


def _object(data: str, name: str) -> Mapping[str, Any]:
    """A chunk, or a whole completion, as JSON. Raises BackendFailed where it is none, or an error."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BackendFailed(f"{name} sent what is not JSON: {data[:200]!r}", kind=MALFORMED) from error
    if not isinstance(found, dict):
        raise BackendFailed(f"{name} sent no chat completion: {data[:200]!r}", kind=MALFORMED)
    if fault := found.get("error"):
        said = fault.get("message") if isinstance(fault, Mapping) else fault
        raise BackendFailed(f"{name} failed within its answer: {said or data[:200]}", kind=MALFORMED)
    return found


def _pieces(chunks: Iterable[Mapping[str, Any]], request_id: str, name: str) -> Iterator[Piece]:
    """The pieces that chunks come to, or one whole completion. Every field goes on with the piece it came with."""
    assembly, others = Assembly(), {}  # type: ignore[var-annotated]
    source: dict[str, Any] = {"request_id": request_id} if request_id else {}
    usage, reason, first = None, None, None
    fields: dict[str, Any] = {}
    of_choice: dict[str, Any] = {}
    pending: dict[str, Any] = {}
    """Fields of the completion that wait for a chunk with a choice."""
    for chunk in chunks:
        source |= {
            key: chunk[key] for key in ("id", "model") if isinstance(chunk.get(key), str) and chunk[key]
        }
        usage = _usage(chunk) or usage
        more = {key: value for key, value in chunk.items() if key not in READ and value is not None}
        # what every chunk repeats is passed on once
        pending |= {key: value for key, value in more.items() if fields.get(key) != value}
        fields |= more
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            index = choice.get("index") or 0
            first = index if first is None else first
            said, whole = _said(choice)
            if index != first:
                other = others.setdefault(index, Assembly())
                other.add(other.read(said, whole=whole))
                continue
            reason = choice.get("finish_reason") or reason
            beside = {key: value for key, value in choice.items() if key not in CHOICE_READ}
            beside = {key: value for key, value in beside.items() if value is not None}
            of_choice = {**of_choice, **{k: joined(k, of_choice.get(k), v) for k, v in beside.items()}}
            delta = assembly.read(said, whole=whole)
            assembly.add(delta)
            if any(value not in ("", None) for value in delta.values()) or beside or (whole and delta):
                yield Piece(delta, beside, pending)
                pending = {}
    if first is None:
        raise BackendFailed(f"{name} sent no chat completion: it holds no choice", kind=MALFORMED)
    counts = usage or {}
    yield Piece(
        body=pending,
        end=True,
        finish_reason=reason if isinstance(reason, str) else None,
        tokens_in=_count(counts, "prompt_tokens", "input_tokens"),
        tokens_out=_count(counts, "completion_tokens", "output_tokens"),
        extras=Extras(source, usage, of_choice, fields, [other.message for other in others.values()]),
    )


def _said(choice: Mapping[str, Any]) -> tuple[Any, bool]:
    """The delta or the message of a choice, and whether it is a whole message."""
    if isinstance(delta := choice.get("delta"), Mapping):
        return delta, False
    if isinstance(message := choice.get("message"), (Mapping, str)):
        return ({"content": message} if isinstance(message, str) else message), True
    return {"content": choice.get("text")}, False


def _usage(chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Token counts of a chunk; Groq's stand in an object of its own."""
    for holder in (chunk, chunk.get("x_groq")):
        if isinstance(holder, Mapping) and isinstance(usage := holder.get("usage"), Mapping) and usage:
            return usage
    return None


def _count(usage: Mapping[str, Any], *names: str) -> int | None:
    found = next((usage[name] for name in names if name in usage), None)
    is_count = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < 2**31
    return int(found) if is_count else None  # type: ignore[arg-type]


def _request_id(response: Any) -> str:
    for name in ("x-request-id", "request-id", "apim-request-id", "x-amzn-requestid"):
        if found := response.headers.get(name):
            return str(found)[:200]
    return ""


def _names(refusal: ServingRefused, key: str) -> bool:
    """True if a refusal names a field: as its parameter, or in quotation marks within its text."""
    quoted = re.search(rf"""["'`]{key}["'`.]""", str(refusal))
    return bool(quoted) or refusal.param.partition(".")[0].partition("[")[0] == key


def _error_of(raw: bytes) -> tuple[str, str, str]:
    """Message, code and parameter of an OpenAI error body, or what was said instead."""
    try:
        error = json.loads(raw)["error"]
        if isinstance(error, dict):
            found = (error.get("message"), error.get("code"), error.get("param"))
            return str(found[0] or "no reason given"), str(found[1] or ""), str(found[2] or "")
        return str(error), "", ""
    except (ValueError, KeyError, TypeError):
        return raw[:1000].decode("utf-8", "replace") or "no reason given", "", ""
