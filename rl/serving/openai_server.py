"""Answer through any OpenAI-compatible server: Ollama, vLLM, llama.cpp's, OpenAI."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError

from rl.decoding.unique_items import UniqueItems, items_repeated, portable
from rl.serving.base import (
    BASE,
    Answer,
    Ask,
    BackendFailed,
    BackendUnable,
    ChatMessage,
    Model,
    Piece,
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
        with self._turns.turn(max(deadline - time.monotonic(), 0.0)):
            response = self._post(self._body(ask, model), deadline)
            try:
                raw = _read(response, deadline)
            finally:
                response.release_conn()
        try:
            body = json.loads(raw)
            choice = body["choices"][0]
            message, usage = choice["message"], body.get("usage") or {}
            return Answer(
                text=message.get("content") or "",
                tokens_in=usage.get("prompt_tokens"),
                tokens_out=usage.get("completion_tokens"),
                latency_ms=1000 * (time.perf_counter() - start),
                finish_reason=choice.get("finish_reason") or "stop",
                tool_calls=message.get("tool_calls") or (),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            self.breaker.record_failure()
            raise BackendFailed(f"{self.name} answered no chat completion: {raw[:200]!r}") from error

    def stream(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        if UniqueItems.of(ask.response_schema) is not None:
            # looked at whole: what was given cannot be taken back
            answer = self.answer(ask, model, timeout_s)
            yield Piece(answer.text, answer.tool_calls)
            yield Piece("", (), answer.finish_reason, answer.tokens_in, answer.tokens_out)
            return
        deadline = time.monotonic() + timeout_s
        body = {**self._body(ask, model), "stream": True, "stream_options": {"include_usage": True}}
        with self._turns.turn(timeout_s):
            response = self._post(body, deadline)
            try:
                yield from self._pieces(response, deadline)
            except (HTTPError, OSError) as error:
                self.breaker.record_failure()
                raise BackendFailed(f"{self.name} closed the connection: {error}") from error
            except BackendFailed:
                self.breaker.record_failure()
                raise
            finally:
                # what is left of an answer nobody reads is not worth a connection
                response.close()

    def _pieces(self, response: Any, deadline: float) -> Iterator[Piece]:
        usage: dict[str, Any] = {}
        reason, is_done = None, False
        for line in _lines(response, deadline, self.name):
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if not data:
                continue
            if data == "[DONE]":
                is_done = True
                break
            chunk = _chunk(data, self.name)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                reason = choice.get("finish_reason") or reason
                if delta.get("content") or delta.get("tool_calls"):
                    yield Piece(delta.get("content") or "", delta.get("tool_calls") or ())
        if not is_done and reason is None:
            raise BackendFailed(f"{self.name} closed the connection before the end of its answer")
        yield Piece("", (), reason or "stop", usage.get("prompt_tokens"), usage.get("completion_tokens"))

    def log_probabilities(
        self, messages: Sequence[ChatMessage], responses: Sequence[str], model: Model, timeout_s: float
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
        body: dict[str, Any] = {**ask.extra, "model": name, "messages": list(ask.messages)}
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
        """The answer with its head read, or a refusal. Tries again after a pause while time is left."""
        raw = json.dumps(body).encode()
        for attempt in range(RETRIES + 1):
            self.breaker.enter()
            try:
                return self._post_once(raw, deadline)
            except BackendFailed as failure:
                if failure.kind != "refused":
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
            raise BackendFailed(text)
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
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if held:
        yield held.decode("utf-8", "replace")


def _chunk(data: str, name: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise BackendFailed(f"{name} sent a chunk that is not JSON: {data[:200]!r}") from error
    if not isinstance(chunk, dict) or "error" in chunk:
        raise BackendFailed(f"{name} failed within its answer: {data[:200]}")
    return chunk


def _error_of(raw: bytes) -> tuple[str, str, str]:
    """Message, code and parameter of an OpenAI error body, or what was said instead."""
    try:
        error = json.loads(raw)["error"]
        if isinstance(error, dict):
            found = (error.get("message"), error.get("code"), error.get("param"))
            return str(found[0] or "no reason given"), str(found[1] or ""), str(found[2] or "")
        return str(error), "", ""
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace") or "no reason given", "", ""
