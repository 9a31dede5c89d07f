"""Answer through a server: the upstream of a hosted policy, or the team's own server that holds its policies."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import urllib3
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from rl.decoding.unique_items import UniqueItems, items_repeated
from rl.serving.assembly import answer_of
from rl.serving.base import (
    BASE,
    Answer,
    Ask,
    BackendFailed,
    BackendUnable,
    CircuitBreaker,
    ConcurrencyLimiter,
    Endpoint,
    Model,
    Piece,
    SentMessage,
    ServingRefused,
    text_length,
)
from rl.serving.dialects import DIALECTS
from rl.serving.dialects.chat import (
    MALFORMED,
    Object,
    Sent,
    body_read,
    chat_body,
    error_read,
    events_read,
    object_read,
    pieces,
    request_id,
    retry_after,
)
from rl.serving.engines import UNPUBLISHED, Engine

logger = logging.getLogger("rl.serving")

RETRIES = 2
FIRST_PAUSE_S = 0.1
"""Before the first retry at most; doubled for the next. The pause itself is drawn from 0 to that (full jitter)."""
LONGEST_WAIT_S = 5.0
"""A `Retry-After` of up to this many seconds is waited for; a longer one is passed on to the caller at once."""
LONGEST_HOLD_S = 60.0
"""A model is asked again after this many seconds, whatever `Retry-After` said."""
RETRY_STATUSES = {408, 425, 429, 500, 502, 503, 504, 529}
"""HTTP statuses after which the same request may go through."""
BUSY_STATUSES = {408, 425, 429, 529}
OURS_TO_MEND = {401, 402, 403, 404, 405, 407}
"""The key, the account, the address, or the model's name: another policy may answer meanwhile."""
FORM = "form"
"""Kind of a failure whose cause may be that the server does not know `json_schema`."""
FORM_STATUSES = {500, 501}
"""Statuses with which such servers answer without naming it; llama-cpp-python's answers 500."""
WEAKER_S = 600.0
"""Seconds until a model that did not know `json_schema` is asked for it again."""
SPARE = {"user", "metadata", "store", "safety_identifier", "service_tier", "stream_options"}
SPARE |= {"prompt_cache_key", "prompt_cache_retention"}
"""Fields that say nothing about the answer: left out for a model that once refused them by name."""
LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
"""Either name of the limit -> the other one; newer models of OpenAI refuse the first."""
LONGEST_TOKEN = 8
"""Characters of a token of any text people write, on average, at most: English has 4 to 5, code up to 6."""
NO_CONNECTION = (NewConnectionError, ConnectTimeoutError, ProxyError, SSLError)


@dataclass(frozen=True)
class _Turn:
    """One request's model by the endpoint's name, that model's breaker, the request's deadline, its path and the fields
    that choose an adapter."""

    model: str
    breaker: CircuitBreaker
    deadline: float
    path: str
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def is_held(self) -> bool:
        """True while the server asked to be left alone for longer than a request waits."""
        return self.breaker.held_s > min(LONGEST_WAIT_S, self.left_s)

    def enter(self) -> None:
        """Wait for the seconds the server asked for. Raises BackendFailed where they are too many, or the circuit is
        open."""
        if held := self.breaker.held_s:
            if self.is_held():
                raise BackendFailed(
                    f"{self.breaker.name} asked to be left alone for {held:.3g} s more",
                    kind="busy",
                    retry_after_s=held,
                )
            time.sleep(held + random.uniform(0, FIRST_PAUSE_S))
        self.breaker.enter()


class EndpointBackend:
    """One endpoint with its own connections, limit and circuit breakers.

    `breaker` opens where no connection comes about. What goes wrong after that is the fault of a model: each has a
    breaker of its own, so that one model's failures keep no other from answering.
    """

    def __init__(self, endpoint: Endpoint, *, waiting: int = 64, listed: bool = False) -> None:
        """listed: ask only for models on the server's own list: no prompt goes to a server without the policy."""
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected an address such as http://localhost:11434/v1, found {endpoint.url!r}")
        self.endpoint, self.name, self.url = endpoint, endpoint.name, endpoint.url.rstrip("/")
        self._dialect = DIALECTS[endpoint.dialect]
        self._headers = {"Content-Type": "application/json", "User-Agent": "ratchet"}
        self._headers |= self._dialect.headers(endpoint.key)
        self._pool = urllib3.PoolManager(maxsize=endpoint.concurrency, retries=False)
        self._turns = ConcurrencyLimiter(endpoint.concurrency, waiting, self.name)
        self.breaker = CircuitBreaker(self.name)
        self._breakers: dict[str, CircuitBreaker] = {}
        """One for each model."""
        self._refused_fields: dict[str, set[str]] = {}
        """Model -> the fields of SPARE it does not take."""
        self._limit_fields: dict[str, str] = {}
        """Model -> its name for the most tokens of an answer."""
        self._weaker_until: dict[str, float] = {}
        """Model that does not know `json_schema` -> when it is asked for it again."""
        self.engine = Engine(self) if listed else None

    def answer(self, ask: Ask, model: Model, timeout_s: float) -> Answer:
        """A whole answer."""
        start = time.perf_counter()
        found = list(self.pieces(dataclasses.replace(ask, stream=False), model, timeout_s))
        return answer_of(found, 1000 * (time.perf_counter() - start))

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        """The answer in pieces; asked for again where it repeats an item of a list that holds each once."""
        deadline = time.monotonic() + timeout_s
        if UniqueItems.of(ask.response_schema) is None:
            yield from self._asked(ask, model, deadline)
            return
        # looked at whole: what was given cannot be taken back
        ask = dataclasses.replace(ask, stream=False)
        for _ in range(1 + RETRIES):
            found = list(self._asked(ask, model, deadline))
            if not (repeated := items_repeated(ask.response_schema, answer_of(found, 0).text)):
                yield from found
                return
            if time.monotonic() >= deadline or ask.temperature == 0 or ask.seed is not None:
                break  # it would say the same again
        raise BackendFailed(
            f"{self.name} ignored uniqueItems: {repeated}; serve this agent in process", kind="repeated"
        )

    def embeddings(self, body: Mapping[str, object], timeout_s: float) -> Object:
        """The answer to `POST /embeddings`, as the server sends it."""
        model = Model(BASE, str(body["model"]))
        with self._turn(model, time.monotonic() + timeout_s, "embeddings") as turn:
            response = self._post(body, turn)
            with self._reading(response, turn):
                found = self._object(response, turn)
                if not isinstance(found["data"], list):
                    raise TypeError("data is no list")
        return found

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        """Chat endpoints give log-probabilities of what was generated, not of what might have been."""
        raise BackendUnable(
            f"{self.name} cannot return the probabilities of listed responses; serve this agent in process",
            param="candidates",
            code="unsupported",
        )

    def reachable(self) -> bool:
        """True if the server answers at all."""
        try:
            self.get("models", self.endpoint.connect_timeout_s)
        except (HTTPError, OSError):
            return False
        return True

    def get(self, path: str, timeout_s: float) -> BaseHTTPResponse:
        """The response to a GET below the endpoint's address. Raises HTTPError, OSError."""
        return self._pool.request(
            "GET", f"{self.url}/{path}", headers=self._headers, timeout=timeout_s, retries=False
        )

    def post(self, path: str, body: Mapping[str, object], timeout_s: float) -> BaseHTTPResponse:
        """The response to a POST of JSON, tried once. Raises HTTPError, OSError."""
        return self._pool.request(
            "POST",
            f"{self.url}/{path}",
            body=json.dumps(body).encode(),
            headers=self._headers,
            timeout=urllib3.Timeout(connect=self.endpoint.connect_timeout_s, read=timeout_s),
            retries=False,
        )

    def key_hidden(self, text: str) -> str:
        """A text of the server's without the key: some repeat it in their errors."""
        return text.replace(self.endpoint.key, "[hidden]") if self.endpoint.key else text

    # --- Asking -------------------------------------------------------------------------------------------

    def _asked(self, ask: Ask, model: Model, deadline: float) -> Iterator[Piece]:
        """The pieces of an answer; one and a last one where the server sends it whole."""
        self._context_check(ask)
        with self._turn(model, deadline, self._dialect.path) as turn:
            response, sent = self._post_in_form(ask, model, turn)
            found = self._read(response, sent, turn)
            yield from confident(found, shown=bool(ask.extra.get("logprobs"))) if ask.confidence else found

    @contextmanager
    def _turn(self, model: Model, deadline: float, path: str) -> Iterator[_Turn]:
        """A place among the requests to this endpoint. Errors within it are raised without the API key."""
        if self.endpoint.fault:
            raise BackendFailed(self.endpoint.fault, kind="refused")
        with self._turns.turn(max(deadline - time.monotonic(), 0.0)):
            try:
                place: tuple[str, Mapping[str, object]]
                place = (model.base_model if model.is_the_apps else model.name), {}
                if self.engine is not None:
                    place = self.engine.place_of(model)
                named, fields = place
                breaker = self._breakers.setdefault(named, CircuitBreaker(f"{named} on {self.name}"))
                yield _Turn(named, breaker, deadline, path, fields)
            except (BackendFailed, ServingRefused) as failure:
                failure.args = (self.key_hidden(str(failure)),)
                raise

    def _context_check(self, ask: Ask) -> None:
        """Raises BackendUnable for a prompt that is too long whatever the tokenizer."""
        context = self.endpoint.context_tokens
        least = text_length(ask.messages) // LONGEST_TOKEN
        if context is not None and least >= context:
            raise BackendUnable(
                f"messages: {self.name} reads {context:,} tokens, and this prompt has at least {least:,}: send a "
                "shorter one, or raise the upstream's context_tokens",
                param="messages",
                code="context_length_exceeded",
            )

    def _read(self, response: BaseHTTPResponse, sent: Sent, turn: _Turn) -> Iterator[Piece]:
        kind = response.headers.get("Content-Type", "")
        # some servers stream what was asked for whole, or the other way round; they say so
        is_stream = "event-stream" in kind or (bool(sent.body.get("stream")) and "json" not in kind)
        with self._reading(response, turn, is_stream=is_stream):
            found: Iterable[Object]
            if is_stream:
                found = self._dialect.chunks(
                    events_read(response, turn.deadline, self.name, self.endpoint.key), self.name
                )
            else:
                found = [self._dialect.whole(self._object(response, turn), self.name)]
            yield from pieces(found, request_id(response.headers), self.name, sent.left_out)

    def _object(self, response: BaseHTTPResponse, turn: _Turn) -> Object:
        raw = body_read(response, turn.deadline, self.endpoint.key).decode("utf-8", "replace")
        return object_read(raw, self.name)

    @contextmanager
    def _reading(self, response: BaseHTTPResponse, turn: _Turn, *, is_stream: bool = False) -> Iterator[None]:
        """Counts how the reading of an answer ends, and gives its connection back."""
        try:
            yield
        except (HTTPError, OSError) as error:
            turn.breaker.record_failure()
            raise BackendFailed(f"{self.name} closed the connection before the end of its answer") from error
        except BackendFailed as failure:
            if failure.kind != MALFORMED:
                turn.breaker.record_failure()
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BackendFailed(
                f"{self.name} sent an answer of an unknown shape: {error!r}", kind=MALFORMED
            ) from error
        finally:
            # what is left of a stream that nobody reads is not worth a connection
            response.close() if is_stream else response.release_conn()
        turn.breaker.record_success()

    def _sent(self, ask: Ask, model: Model, turn: _Turn) -> Sent:
        """The request's body for a model of this endpoint."""
        named = turn.model
        is_weaker = self._weaker_until.get(named, 0.0) > time.monotonic()
        schemas = "json_object" if is_weaker else self.endpoint.schemas
        ask = dataclasses.replace(ask, limit_field=self._limit_fields.get(named, ask.limit_field))
        body = chat_body(ask, named, schemas, forward_fields=self.endpoint.forward_fields)
        try:
            sent = self._dialect.write(body)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            # what only another dialect has to understand was not looked at when the request was read
            raise BackendUnable(
                f"the request cannot be written for {self.name}: expected tools, tool_choice, tool_calls and "
                f"response_format as OpenAI has them ({error})"
            ) from error
        if ask.stream:
            sent.body["stream"] = True
            if self.endpoint.dialect == "openai":
                sent.body["stream_options"] = {"include_usage": True}
        if ask.confidence and self.endpoint.dialect == "openai":
            sent.body["logprobs"] = True
        refused = self._refused_fields.get(named, set())
        left_out = sent.left_out + (("json_schema",) if is_weaker and "response_format" in body else ())
        return Sent(
            {key: value for key, value in sent.body.items() if key not in refused}
            | {**turn.fields, **model.parameters},
            tuple(name for name in left_out if name not in model.parameters),
        )

    def _post_in_form(self, ask: Ask, model: Model, turn: _Turn) -> tuple[BaseHTTPResponse, Sent]:
        """The answer with its head read. A server that does not know `json_schema` is asked for `json_object`."""
        sent = self._sent(ask, model, turn)
        try:
            return self._post(sent.body, turn), sent
        except BackendFailed as failure:
            if failure.kind != FORM:
                raise
            reason = self.key_hidden(str(failure))
        self._weaker_until[turn.model] = time.monotonic() + WEAKER_S
        sent = self._sent(ask, model, turn)
        try:
            response = self._post(sent.body, turn)
        except (BackendFailed, ServingRefused):
            self._weaker_until.pop(turn.model, None)  # it was not the schema
            raise
        taken = "%s takes no json_schema; it gets json_object for %g s. Set its schemas to json_object (%s)"
        logger.warning(taken, turn.breaker.name, WEAKER_S, reason)
        return response, sent

    def _post(self, body: Mapping[str, object], turn: _Turn) -> BaseHTTPResponse:
        """Asks again without the spare fields a refusal names, or with the other name for the limit of tokens."""
        try:
            return self._post_retried(body, turn)
        except ServingRefused as refusal:
            named = {key for key in SPARE & body.keys() if _names(refusal, key)}
            limit = next((key for key in LIMITS if key in body and _names(refusal, key)), "")
            if not named and not limit:
                raise
        again = {key: value for key, value in body.items() if key not in named}
        if limit:
            other = LIMITS[limit]
            again[other] = again.pop(limit)
        response = self._post_retried(again, turn)
        # it was these: the model answers without them
        self._refused_fields.setdefault(turn.model, set()).update(named)
        if limit:
            self._limit_fields[turn.model] = other
        return response

    def _post_retried(self, body: Mapping[str, object], turn: _Turn) -> BaseHTTPResponse:
        """Tries again after a pause, or after the seconds the server asked for, while time is left."""
        raw, form = json.dumps(body).encode(), _has_schema(body)
        for attempt in range(RETRIES + 1):
            self.breaker.enter()
            turn.enter()
            try:
                return self._post_once(raw, turn, has_schema=form)
            except BackendFailed as failure:
                pause = random.uniform(0, FIRST_PAUSE_S * 2**attempt)
                # a server that fails under a schema is asked twice before the schema is blamed
                is_last = attempt == (1 if failure.kind == FORM else RETRIES)
                if (
                    is_last
                    or failure.kind in ("timeout", "refused")
                    or pause >= turn.left_s
                    or turn.is_held()
                ):
                    raise
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _post_once(self, raw: bytes, turn: _Turn, *, has_schema: bool) -> BaseHTTPResponse:
        left = max(turn.left_s, 0.001)
        try:
            response = self._pool.urlopen(
                "POST",
                f"{self.url}/{turn.path}",
                body=raw,
                headers=self._headers,
                timeout=urllib3.Timeout(connect=min(self.endpoint.connect_timeout_s, left), read=left),
                retries=False,
                preload_content=False,
            )
        except NO_CONNECTION as error:
            self.breaker.record_failure()
            reason = str(error).rpartition("): ")[2]  # urllib3 names its connection object first
            raise BackendFailed(f"{self.name} cannot be reached: {reason}") from error
        except ReadTimeoutError as error:
            turn.breaker.record_failure()
            raise BackendFailed(f"{self.name} did not answer within {left:.2g} s", kind="timeout") from error
        except (HTTPError, OSError) as error:
            turn.breaker.record_failure()
            raise BackendFailed(f"{self.name} closed the connection without an answer") from error
        self.breaker.record_success()
        if response.status == 200:
            return response
        try:
            fault = self._fault_of(
                response, body_read(response, turn.deadline, self.endpoint.key), turn, has_schema=has_schema
            )
        finally:
            response.release_conn()
        raise fault

    def _fault_of(
        self, response: BaseHTTPResponse, raw: bytes, turn: _Turn, *, has_schema: bool
    ) -> BackendFailed | ServingRefused:
        """What a status other than 200 comes to; counted by the model's breaker."""
        status, (message, code, param) = response.status, error_read(raw)
        text = f"{self.name} answered {status}: {message}"
        refusal = ServingRefused(message, param=param, code=code or "invalid")
        if has_schema and (status in FORM_STATUSES or (status in (400, 422) and _knows_no_schema(refusal))):
            return BackendFailed(text, kind=FORM)
        if status in RETRY_STATUSES:
            wait = retry_after(response.headers)
            if wait is not None:
                turn.breaker.hold(min(wait, LONGEST_HOLD_S))
            if status not in BUSY_STATUSES:
                turn.breaker.record_failure()
            kind = "busy" if status in BUSY_STATUSES else "failed"
            return BackendFailed(text, kind=kind, retry_after_s=2.0 if wait is None else wait)
        turn.breaker.record_success()
        if status == 404 and self.engine is not None and self.engine.forgot(turn.model):
            return BackendFailed(text, kind=UNPUBLISHED)
        if status in OURS_TO_MEND or status < 400:
            return BackendFailed(text, kind="refused")
        return refusal


def confident(found: Iterable[Piece], *, shown: bool) -> Iterator[Piece]:
    """Pieces whose last one has the confidence that the tokens' log-probabilities come to. Without `shown` these are
    taken out: the client did not ask for them."""
    for piece in found:
        told = piece.extras.choice.get("logprobs")
        tokens = told.get("content") if isinstance(told, Mapping) else None
        rows = [one for one in tokens if isinstance(one, Mapping)] if isinstance(tokens, list) else []
        nats = [one["logprob"] for one in rows if isinstance(one.get("logprob"), (int, float))]
        if piece.end and nats:
            piece = dataclasses.replace(piece, confidence=math.exp(min(statistics.fmean(nats), 0.0)))
        if not shown:
            choice, whole = (
                {key: value for key, value in one.items() if key != "logprobs"}
                for one in (piece.choice, piece.extras.choice)
            )
            extras = dataclasses.replace(piece.extras, choice=whole)
            piece = dataclasses.replace(piece, choice=choice, extras=extras)
        yield piece


def _has_schema(body: Mapping[str, object]) -> bool:
    form = body.get("response_format")
    return isinstance(form, Mapping) and form.get("type") == "json_schema"


def _knows_no_schema(refusal: ServingRefused) -> bool:
    """True if a refusal is of `json_schema` itself, not of one schema."""
    text = f"{refusal.param} {refusal}".lower()
    return bool(re.search(r"response[_ ]format|json_schema", text)) and "invalid schema" not in text


def _names(refusal: ServingRefused, key: str) -> bool:
    """True if a refusal names a field: as its parameter, or in quotation marks within its text."""
    quoted = re.search(rf"""["'`]{key}["'`.]""", str(refusal))
    return bool(quoted) or refusal.param.partition(".")[0].partition("[")[0] == key
