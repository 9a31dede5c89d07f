"""Answers with fallback: of the intended policy, else of the champion or the base; every failed try is recorded."""

from __future__ import annotations

import dataclasses
import logging
import queue
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from django.conf import settings

from backend.database import connection_release
from rl.models.learning import IN_PROCESS
from rl.registry.integrity import stand_in_notify
from rl.serving import metrics
from rl.serving.base import (
    BASE,
    Ask,
    Backend,
    BackendFailed,
    BackendUnable,
    ConcurrencyLimiter,
    Endpoint,
    Model,
    Piece,
    SentMessage,
    ServingRefused,
)
from rl.serving.endpoint import EndpointBackend
from rl.serving.engines import UNPUBLISHED, Engine, adapter_missed, engine_name
from rl.serving.files import files_of, files_present, unaskable_words
from rl.serving.linear import LINEAR, LinearBackend
from rl.serving.llama import LlamaPolicy, ask_check
from rl.serving.llama_context import CACHE_BYTES
from rl.serving.routing import Target

logger = logging.getLogger("rl.serving")

T = TypeVar("T")

FILE_FAULTS = ("missing", "damaged")
"""Kinds of failure for which another policy of the same backend may answer at once."""


class NobodyAnswers(RuntimeError):
    """Policy, champion and base all failed on every backend."""

    def __init__(self, fallbacks: Sequence[Fallback], retry_after_s: float) -> None:
        self.fallbacks = list(fallbacks)
        self.retry_after_s = retry_after_s
        super().__init__("; ".join(f"{f.policy} on {f.backend}: {f.reason}" for f in fallbacks))

    @property
    def malformed(self) -> bool:
        """True if every server answered, and none with a completion."""
        asked = [tried for tried in self.fallbacks if tried.kind != "recorded"]
        return bool(asked) and all(tried.kind == "malformed" for tried in asked)


@dataclass(frozen=True)
class Fallback:
    """A policy on a backend that was tried and failed, with the reason."""

    policy: str
    backend: str
    kind: str
    reason: str


@dataclass
class ServedAnswer(Generic[T]):
    """Answer, the backend that gave it, and the failed tries before it."""

    result: T
    model: Model
    backend: str
    fallbacks: list[Fallback] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    """When the backend was asked."""
    route: Mapping[str, object] | None = None
    """Of a routed request: confidence, threshold, whether it was explored, probability of what was done."""
    own: OwnAnswer | None = None
    """Of an explored request: the own model's answer, which the user does not get."""

    @property
    def latency_ms(self) -> float:
        return 1000 * (time.perf_counter() - self.began)


@dataclass(frozen=True)
class OwnAnswer:
    """An own model's whole answer beside the one that the user gets."""

    target: Target
    ask: Ask
    served: ServedAnswer[Iterator[Piece]]
    pieces: Sequence[Piece]
    latency_ms: float


_backends: dict[tuple[object, ...], list[Backend]] = {}
_making = threading.Lock()


def backends() -> list[Backend]:
    """The backends of LOCAL_BACKENDS, made once per process. Only policies trained here, and base models, are asked of
    them."""
    key = (
        tuple(settings.LOCAL_BACKENDS),
        settings.LOCAL_API_KEY,
        settings.SERVING_CONTEXT,
        settings.SERVING_CACHE_MB,
        settings.SERVING_QUEUE,
        settings.RATCHET_HOME,
    )
    with _making:
        if key not in _backends:
            _backends[key] = [_backend(name) for name in settings.LOCAL_BACKENDS]
        return _backends[key]


def local_engines() -> list[Engine]:
    """The servers of LOCAL_BACKENDS."""
    return [
        server.engine
        for server in backends()
        if isinstance(server, EndpointBackend) and server.engine is not None
    ]


def backends_for(model: Model) -> list[Backend]:
    """The backends that may answer for a model: of a hosted one its upstream alone, which nothing else is asked of. A
    linear policy needs no server, and answers in this process."""
    if model.endpoint is not None:
        return [upstream_backend(model.endpoint)]
    return [_linear] if model.kind == LINEAR else backends()


_linear: Backend = LinearBackend()
_upstreams: dict[str, EndpointBackend] = {}


def upstream_backend(endpoint: Endpoint) -> EndpointBackend:
    """The backend of an upstream, made once per process and anew where its row changed."""
    with _making:
        found = _upstreams.get(endpoint.name)
        if found is None or found.endpoint != endpoint:
            found = _upstreams[endpoint.name] = EndpointBackend(endpoint, waiting=settings.SERVING_QUEUE)
        return found


def _backend(name: str) -> Backend:
    if name == IN_PROCESS:
        return InProcess(
            context=settings.SERVING_CONTEXT,
            waiting=settings.SERVING_QUEUE,
            cache_bytes=settings.SERVING_CACHE_MB * 1024**2,
        )
    endpoint = Endpoint(engine_name(name), name, key=settings.LOCAL_API_KEY)
    return EndpointBackend(endpoint, waiting=settings.SERVING_QUEUE, listed=True)


def pieces(target: Target, ask: Ask) -> ServedAnswer[Iterator[Piece]]:
    """An answer in pieces. A failure before the first piece falls back to the next policy; after it nothing can. Of a
    whole answer no piece is given before the last is there. Raises ServingRefused, NobodyAnswers."""

    def begin(backend: Backend, model: Model, timeout_s: float) -> Iterator[Piece]:
        found = backend.pieces(ask, model, timeout_s)
        return _stream_rest(next(found), found) if ask.stream else iter(list(found))

    return _first(target, begin)


def routed(
    target: Target, ask_of: Callable[[Target], Ask]
) -> tuple[Target, Ask, ServedAnswer[Iterator[Piece]]]:
    """As `pieces`, by the target's route: the own model's answer where it is sure, else the champion's.

    ask_of: the question as a target is asked it. Returns whom it came from too. Raises ServingRefused, NobodyAnswers.
    """
    route, ask = target.route, ask_of(target)
    explored = route is not None and random.random() < route.explore
    if route is None or (route.threshold is None and not explored):
        return target, ask, pieces(target, ask)
    own = _own_answer(replace(target, models=(route.model,), standby=(), route=None), ask_of)
    found = None if own is None else confidence_of(own)
    sure = found is not None and route.threshold is not None and found >= route.threshold
    said = {
        "policy": route.model.name,
        "confidence": found,
        "threshold": route.threshold,
        "explored": explored,
    }
    if own is not None and sure and not explored:
        own.served.result = iter(own.pieces)
        own.served.route = {**said, "propensity": 1 - route.explore}
        return own.target, own.ask, own.served
    served = pieces(target, ask)
    served.route = {**said, "propensity": route.explore if sure else 1.0}
    served.own = own if explored else None
    if own is not None:
        served.began = own.served.began  # the user waited for both
    return target, ask, served


def _own_answer(target: Target, ask_of: Callable[[Target], Ask]) -> OwnAnswer | None:
    """The own model's whole answer; None where it gives none."""
    try:
        ask = replace(ask_of(target), stream=False, confidence=True)
        served = pieces(target, ask)
        given = list(served.result)
    except (NobodyAnswers, ServingRefused) as failure:
        logger.warning("%s cannot answer, so %s's champion does (%s)", target.meant, target.agent, failure)
        return None
    return OwnAnswer(target, ask, served, given, served.latency_ms)


def confidence_of(own: OwnAnswer) -> float | None:
    """How sure the own model is of its answer, in [0, 1]; None where the backend does not tell.

    None of an empty answer too: nobody judges those.
    """
    if not any(value for piece in own.pieces for value in piece.delta.values()):
        return None
    return own.pieces[-1].confidence


def _stream_rest(first: Piece, rest: Iterator[Piece]) -> Iterator[Piece]:
    try:
        yield first
        yield from rest
    finally:
        if close := getattr(rest, "close", None):
            close()


def log_probabilities(
    target: Target, messages: Sequence[SentMessage], responses: Sequence[str]
) -> ServedAnswer[list[float]]:
    """log p of each response. Raises BackendUnable where no backend tells, ServingRefused, NobodyAnswers."""
    meant = target.models[0]
    if meant.endpoint is not None:
        # no endpoint tells, and nobody steps in for a policy that can answer in words
        target = replace(target, models=(meant,), standby=())
    return _first(target, lambda b, model, s: b.log_probabilities(messages, responses, model, s))


def _first(target: Target, call: Callable[[Backend, Model, float], T]) -> ServedAnswer[T]:
    """First answer. An upstream takes its own timeout; all other tries together take SERVING_TIMEOUT_S, each but the
    last half of what is left."""
    left = settings.SERVING_TIMEOUT_S
    pending = deque((model, backend) for model in target.models for backend in backends_for(model))
    fallbacks: list[Fallback] = []
    if target.unaskable:
        fallbacks.append(Fallback(target.unaskable, "none", "recorded", unaskable_words(target.unaskable)))
    passed_over = len(fallbacks)
    unable: BackendUnable | None = None
    retry_after_s: list[float] = []
    while pending:
        model, backend = pending.popleft()
        own_timeout_s = model.endpoint.timeout_s if model.endpoint is not None else None
        if own_timeout_s is None and left <= 0:
            continue
        if model.endpoint is not None:
            connection_release()  # an upstream takes seconds
        began, asked = time.monotonic(), time.perf_counter()
        try:
            result = call(backend, model, own_timeout_s or (left / 2 if pending else left))
        except BackendUnable as refusal:
            unable = refusal
            continue
        except BackendFailed as failure:
            fallbacks.append(Fallback(model.name, backend.name, failure.kind, str(failure)))
            retry_after_s.append(failure.retry_after_s)
            metrics.FALLBACKS.labels(backend.name, failure.kind).inc()
            logger.warning("%s on %s failed to answer (%s)", model.name, backend.name, failure)
            if own_timeout_s is None:
                left -= time.monotonic() - began
            if failure.kind == "away":  # another server has it: nothing stands in for it here
                raise NobodyAnswers(fallbacks, failure.retry_after_s) from failure
            if failure.kind == UNPUBLISHED:
                adapter_missed()
                if not target.fallbacks_named:  # an earlier champion may stand in, and never the base
                    pending = deque((other, place) for other, place in pending if other.name != BASE)
            if failure.kind in (*FILE_FAULTS, UNPUBLISHED):
                _stand_in_add(target, pending, backend, {fallback.policy for fallback in fallbacks})
            continue
        for fallback in fallbacks:
            if fallback.kind == "damaged" and fallback.policy != model.name:
                stand_in_notify(target.agent, fallback.policy, model.name)
        return ServedAnswer(result, model, backend.name, fallbacks, asked)
    if unable is not None and len(fallbacks) == passed_over:
        raise unable
    raise NobodyAnswers(fallbacks, min(retry_after_s, default=2.0))


def _stand_in_add(
    target: Target, pending: deque[tuple[Model, Backend]], backend: Backend, tried: Collection[str]
) -> None:
    """Put the last earlier champion who was not tried, and in process has whole files, before the base."""
    if any(model in target.standby for model, _ in pending):
        return
    untried = (model for model in target.standby if model.name not in tried)
    has_files = backend.name != IN_PROCESS and isinstance(backend, EndpointBackend)
    stand_in = next((model for model in untried if has_files or files_present(model) is not None), None)
    if stand_in is not None:
        place = next((at for at, (model, _) in enumerate(pending) if model.name == BASE), len(pending))
        able = backends_for(stand_in)
        pending.insert(place, (stand_in, backend if backend in able else able[0]))


BASES = 2
"""Base models held in memory; agents commonly share one."""


class InProcess:
    """llama.cpp with every base loaded once, and every policy an adapter on its base."""

    name = IN_PROCESS

    def __init__(self, *, context: int = 4096, waiting: int = 64, cache_bytes: int = CACHE_BYTES) -> None:
        self._context, self._cache_bytes = context, cache_bytes
        self._turns = ConcurrencyLimiter(1, waiting, "llama.cpp in process")
        self._bases: OrderedDict[Path, LlamaPolicy] = OrderedDict()

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        """A stream is written by a thread of its own: a reader who is slow, or gone, must not keep others waiting."""
        ask_check(ask)
        deadline = time.monotonic() + timeout_s
        if not ask.stream:
            with self._open_policy(model, timeout_s) as (llama, adapter):
                whole = list(llama.stream(_ask_for_model(ask, model), adapter, deadline=deadline))
            yield from whole
            return
        pieces: queue.SimpleQueue[Piece | Exception | None] = queue.SimpleQueue()
        stop = threading.Event()

        def write() -> None:
            try:
                with self._open_policy(model, timeout_s) as (llama, adapter):
                    for piece in llama.stream(_ask_for_model(ask, model), adapter, deadline=deadline):
                        if stop.is_set():
                            return
                        pieces.put(piece)
                pieces.put(None)
            except Exception as error:
                pieces.put(error)  # raised by the reader, below

        threading.Thread(target=write, name="ratchet-llama", daemon=True).start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            stop.set()

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        with self._open_policy(model, timeout_s) as (llama, adapter):
            return llama.log_probabilities(messages, responses, adapter)

    @contextmanager
    def _open_policy(self, model: Model, timeout_s: float) -> Iterator[tuple[LlamaPolicy, Path | None]]:
        base, adapter = files_of(model)
        with self._turns.turn(timeout_s):
            yield self._base(base), adapter

    def _base(self, path: Path) -> LlamaPolicy:
        if path not in self._bases:
            while len(self._bases) >= BASES:
                self._bases.popitem(last=False)[1].close()
            try:
                self._bases[path] = LlamaPolicy(path, context=self._context, cache_bytes=self._cache_bytes)
            except ImportError as error:
                raise BackendUnable(
                    "llama-cpp-python is not installed: pip install -r requirements-rl.txt, or name a server in "
                    "LOCAL_BACKENDS",
                    code="unsupported",
                ) from error
            except ServingRefused as refusal:
                raise BackendFailed(str(refusal), kind="missing") from refusal
        self._bases.move_to_end(path)
        return self._bases[path]

    def close(self) -> None:
        while self._bases:
            self._bases.popitem()[1].close()


def _ask_for_model(ask: Ask, model: Model) -> Ask:
    """The closed set of answers holds for policies: the base model, which never saw them, answers freely."""
    return dataclasses.replace(ask, answers=()) if model.name == BASE and ask.answers else ask
