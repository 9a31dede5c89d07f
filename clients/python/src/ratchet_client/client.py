"""Client of the REST API: ask for a decision, rate it, report an outcome. Each call has an async twin.

A decision needs the server. With an outbox, ratings and outcomes are stored on disk first: they survive an outage of
the server and the end of the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import http.client
import json
import math
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from ratchet_client.collector import TraceCollector
from ratchet_client.decisions import complete_json, normalize_messages, validate_agent
from ratchet_client.json_values import truncate
from ratchet_client.processes import renew_after_fork
from ratchet_client.transport import (
    MAX_IDLE_CONNECTIONS,
    HttpPool,
    HttpResponse,
    RatchetError,
    RequestRefused,
    ServerUnavailable,
)

MAX_ANSWER_BYTES = 32_000_000
"""Most bytes read of a response. A decision repeats its prompt, state and candidates: up to 10 MB."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Client")


@dataclass(frozen=True)
class Decision:
    """The server's decision: one of the candidates, or a text that the agent's policy wrote."""

    id: str
    """Id for `rate` and `outcome`."""
    response: str
    """The chosen candidate or the written text."""
    action: dict[str, object] | None
    """The action that the agent parsed from the response; None if it found none."""
    policy: str
    """Name of the policy that decided."""
    arm: str
    """The unit's arm in the running experiment; empty without an experiment."""
    propensity: float | None
    """Probability in (0, 1] of choosing this response; None for a written text."""
    recorded: bool
    """False if the server could store the decision neither in its database nor on its disk."""
    facts: Mapping[str, Any] = field(repr=False)
    """The whole answer of `POST /api/decide/`."""


@dataclass(frozen=True)
class Receipt:
    """What became of a rating or an outcome."""

    id: str
    """Id of the rating or outcome. A call repeated with it is stored once."""
    state: Literal["stored", "queued", "unsaved"]
    """stored: the server has it. queued: it is in the outbox on disk and is sent in the background. unsaved: it is only
    in memory because the disk cannot be written, or the redact hook dropped it."""


def _async_twin(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], Coroutine[object, object, R]]:
    """The method as a coroutine. It runs in one of the client's threads and does not block the event loop."""

    @wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = partial(contextvars.copy_context().run, method, self, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor(), call)

    twin.__doc__ = f"Async twin of `{method.__name__}`: the same arguments, result and errors."
    return twin


class Client:
    """Client of one server for one agent. Threads and tasks may share it.

    agent: slug of the agent. url: address of the server. api_key: key with the scopes `ingest` (decisions, outcomes),
    `rate` (ratings) and `rate_as` (ratings in the name of others). spool_dir: folder of an outbox. With it, `rate` and
    `outcome` return as soon as the record is on disk, and `client.collector` records the app's own traces and
    decisions. Without it, each call waits for the server. timeout_s: seconds allowed for one request.
    collector_options: further arguments of TraceCollector, such as `redact`.

    Raises ValueError for an invalid agent or url.
    """

    def __init__(
        self,
        agent: str,
        url: str,
        api_key: str | None = None,
        spool_dir: str | Path | None = None,
        *,
        timeout_s: float = 30.0,
        **collector_options: Any,
    ) -> None:
        self.agent = validate_agent(agent)
        self._pool = HttpPool(url, api_key, timeout_s)
        self._threads: ThreadPoolExecutor | None = None
        if collector_options and spool_dir is None:
            raise ValueError(f"expected a spool_dir with {', '.join(sorted(collector_options))}, found none")
        self._collector = (
            None if spool_dir is None else TraceCollector(agent, url, api_key, spool_dir, **collector_options)
        )
        renew_after_fork(self)

    @property
    def collector(self) -> TraceCollector:
        """The collector that writes to the client's outbox. Raises RatchetError without a spool_dir."""
        if self._collector is None:
            raise RatchetError(
                "this client has no outbox: give it a spool_dir to record traces and decisions"
            )
        return self._collector

    # --- Calls --------------------------------------------------------------------------------------------

    def decide(
        self,
        messages: object = None,
        *,
        state: object = None,
        candidates: Sequence[object] | None = None,
        unit: str = "",
        run_id: str = "",
        metadata: Mapping[str, object] | None = None,
        id: str | uuid.UUID | None = None,
    ) -> Decision:
        """Ask the agent for a decision: the server assigns a policy, answers and records the decision.

        messages: one text, or a list of {role, content}. state: input from which the server renders the agent's
        prompt. candidates: texts, or {response, score}, to choose from; without them the agent finds candidates in the
        state or writes an answer. unit: user or session, which keeps its arm in an experiment. id: id of the decision;
        a call repeated with it returns the first answer.

        Raises ValueError (neither messages nor state), RequestRefused, ServerUnavailable.
        """
        if messages is None and state is None:
            raise ValueError("expected messages or a state to decide about, found neither")
        body = {
            "id": str(uuid.uuid4() if id is None else uuid.UUID(str(id))),
            "agent": self.agent,
            "messages": None if messages is None else normalize_messages(messages),
            "state": complete_json(state),
            "candidates": None if candidates is None else [complete_json(item) for item in candidates],
            "unit": unit or None,
            "run_id": run_id or None,
            "metadata": complete_json(dict(metadata)) if metadata else None,
        }
        body = {name: value for name, value in body.items() if value is not None}
        facts = self._post("/api/decide/", body)
        try:
            return Decision(
                id=facts["id"],
                response=facts["response"],
                action=facts["action"],
                policy=facts["policy"],
                arm=facts["arm"],
                propensity=facts["propensity"],
                recorded=facts["recorded"],
                facts=facts,
            )
        except KeyError as error:
            raise ServerUnavailable(
                f"expected a decision from {self._pool.url}/api/decide/, found JSON without {error}; check the url",
                id=body["id"],
            ) from error

    def rate(
        self,
        decision: str | uuid.UUID | Decision,
        *,
        thumb: Literal["up", "down"] | None = None,
        stars: int | None = None,
        score: float | None = None,
        correction: str | None = None,
        tags: Sequence[str] = (),
        notes: str = "",
        rater: str | None = None,
        id: str | uuid.UUID | None = None,
    ) -> Receipt:
        """Rate a decision by thumb, stars 1..5, score 0..1, a better response (correction), tags or notes.

        rater: who rates; the name of the key if left out. A rater's later rating replaces the earlier one.
        Raises ValueError for an empty rating or a value outside its range; without an outbox also RequestRefused and
        ServerUnavailable.
        """
        body = {
            "thumb": thumb,
            "stars": stars,
            "score": score,
            "correction": correction,
            "tags": list(tags),
            "notes": notes,
        }
        body = {name: value for name, value in body.items() if value not in (None, "", [])}
        if not body:
            raise ValueError(
                "expected at least one of thumb, stars, score, correction, tags and notes, found none"
            )
        for name, allowed, valid in (
            ("thumb", "up or down", thumb in (None, "up", "down")),
            ("stars", "a whole number from 1 to 5", stars is None or stars in (1, 2, 3, 4, 5)),
            ("score", "a number from 0 to 1", score is None or _between(score, 0, 1)),
        ):
            if not valid:
                raise ValueError(f"{name}: expected {allowed}, found {body[name]!r}")
        return self._submit("rating", decision, body | ({"rater": rater} if rater else {}), id)

    def outcome(
        self,
        decision: str | uuid.UUID | Decision,
        name: str,
        value: float,
        *,
        at: str | None = None,
        id: str | uuid.UUID | None = None,
    ) -> Receipt:
        """Report a measured result of a decision, such as `ticket_reopened`: a slug and a number (True is 1).

        at: ISO time of the result; now if left out. Raises the errors of `rate`.
        """
        if not _between(value, -math.inf, math.inf):
            raise ValueError(f"value: expected a finite number, found {value!r}")
        return self._submit(
            "outcome", decision, {"name": name, "value": value} | ({"at": at} if at else {}), id
        )

    adecide = _async_twin(decide)
    arate = _async_twin(rate)
    aoutcome = _async_twin(outcome)

    # --- Transport ----------------------------------------------------------------------------------------

    def _submit(
        self,
        kind: Literal["rating", "outcome"],
        decision: str | uuid.UUID | Decision,
        body: dict[str, Any],
        id: str | uuid.UUID | None,
    ) -> Receipt:
        key = str(uuid.UUID(decision.id if isinstance(decision, Decision) else str(decision)))
        body = {"id": str(uuid.uuid4() if id is None else uuid.UUID(str(id))), **complete_json(body)}
        if self._collector is not None:
            queued = self._collector.submit(kind, key, body)
            return Receipt(body["id"], "queued" if queued else "unsaved")
        self._post(f"/api/decisions/{key}/{kind}s/", body)
        return Receipt(body["id"], "stored")

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object in the response. Raises RequestRefused, ServerUnavailable."""
        data = json.dumps(body, allow_nan=False).encode("ascii")
        try:
            response = self._pool.post(path, data, max_bytes=MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(
                f"no response from {self._pool.url}: {error!r}; check that it runs, or call again with the error's id",
                id=body["id"],
            ) from error
        answer = _json_object(response.text)
        # Another program at this address may answer with any JSON. Only the id shows that the write arrived.
        if 200 <= response.status < 300 and answer is not None and answer.get("id") == body["id"]:
            return answer
        raise _error(response, answer, self._pool.url + path, body["id"])

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_IDLE_CONNECTIONS, thread_name_prefix="ratchet-client")
        return self._threads

    def after_fork(self) -> None:
        """Make a new thread pool in the child: threads do not survive a fork."""
        self._threads = None

    # --- The end ------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the server has answered for all records in the outbox. True without an outbox."""
        return self._collector is None or self._collector.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flush, then end threads and connections. False if records stay in the outbox unsent."""
        sent = self._collector is None or self._collector.close(timeout_s)
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        self._pool.close()
        return sent

    async def aclose(self, timeout_s: float = 5.0) -> bool:
        """Async twin of `close`."""
        return await asyncio.to_thread(self.close, timeout_s)

    aflush = _async_twin(flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _between(value: object, low: float, high: float) -> bool:
    """True for a finite number in [low, high]."""
    return isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high


def _json_object(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _error(
    response: HttpResponse, answer: Mapping[str, object] | None, address: str, id: str
) -> RatchetError:
    """The error in a response: Ratchet's own JSON, or anything else that another program at the url answers."""
    status = response.status
    error = answer.get("error") if answer is not None else None
    if not isinstance(error, dict):
        text = truncate(" ".join(response.text.split()), 80) or "an empty body"
        message = f"{address}: expected JSON from Ratchet, found HTTP {status} with {text}; check the url"
        if 400 <= status < 500 and status not in (408, 425, 429):
            return RequestRefused(message, status=status, code="", fields={})
        return ServerUnavailable(message, status=status, retry_after_s=response.retry_after_s, id=id)
    code = str(error.get("code") or "")
    message = f"{address}: HTTP {status} {code}: {error.get('message')}"
    if status >= 500 or status in (408, 425, 429):
        return ServerUnavailable(message, status=status, retry_after_s=response.retry_after_s, id=id)
    fields = error.get("fields")
    return RequestRefused(
        message, status=status, code=code, fields=fields if isinstance(fields, dict) else {}
    )
