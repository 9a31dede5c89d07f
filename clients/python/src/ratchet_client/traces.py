"""Trace of one run of the app: its steps in the order they began, from any thread or task."""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from ratchet_client.decisions import MAX_NAME, decision_payload
from ratchet_client.json_values import error_text, to_json, truncate
from ratchet_client.problem_log import ProblemLog

PART_SIZE = 700_000
"""Most characters of steps in one part of a trace, unless one step is longer. A server accepts 1,000,000."""

P = ParamSpec("P")
R = TypeVar("R")


class Recorder(Protocol):
    """Makes traces and receives the finished ones. TraceCollector is one."""

    agent: str
    problems: ProblemLog

    def add(self, trace: dict[str, object]) -> bool: ...

    def trace(self, run_id: str = "", *, unit: str = "", policy: str = "") -> Trace: ...


@contextmanager
def _at(trace: Trace, step: int | None) -> Iterator[None]:
    token = _position.set(TracePosition(trace, step, _position.get()))
    try:
        yield
    finally:
        try:
            _position.reset(token)
        except ValueError:
            # Another task closes it (an abandoned generator). The context that opened it is gone.
            _position.set(None)


class TracePosition(NamedTuple):
    """Position of the running code in a trace, linked to the position before."""

    trace: Trace
    step: int | None
    outer: TracePosition | None


_position: ContextVar[TracePosition | None] = ContextVar("ratchet_position", default=None)
last_decision: ContextVar[str | None] = ContextVar("ratchet_last_decision", default=None)
"""Id of the decision recorded last in this thread or task."""


def trace_current(recorder: Recorder) -> Trace | None:
    """The recorder's innermost open trace around the running code."""
    position = _position.get()
    while position is not None and position.trace.recorder is not recorder:
        position = position.outer
    return position.trace if position is not None and not position.trace.finished else None


def utc_now() -> str:
    """The current time as an ISO text with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def log_errors(method: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a method that must not raise into the app: it logs its errors and returns None."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            problems: ProblemLog = args[0].problems  # type: ignore[attr-defined]
            problems.report(method.__qualname__, f"{method.__qualname__} recorded nothing: {error!r}", error)
            return None

    return guarded


class Span:
    """A step of a trace. As a context manager it records its duration, its error and the steps inside it.

    A tool call is open until its result, its error or `finish`. Any other step is done at once, unless it is entered.
    """

    def __init__(self, trace: Trace, kind: str, name: str, details: Mapping[str, object]) -> None:
        self.trace = trace
        self.problems = trace.problems
        self.record: dict[str, Any] = {}
        self._began = time.perf_counter()
        self._entered: list[Any] = []
        self._begin(kind, name, details)

    @log_errors
    def _begin(self, kind: str, name: str, details: Mapping[str, Any]) -> None:
        values = {key: to_json(value) for key, value in details.items() if value is not None}
        self.record = {
            "kind": kind,
            "name": truncate(str(to_json(name)), MAX_NAME),
            "at": utc_now(),
            **values,
        }
        self.trace.append(self.record)
        if kind != "tool_call":
            self.trace.step_done(self.record, None)

    @log_errors
    def result(self, value: Any) -> None:
        """Record the result of the step."""
        self.record["result"] = to_json(value)
        if not self._entered:
            self.finish()

    @log_errors
    def error(self, error: BaseException | str) -> None:
        """Record the error that ended the step."""
        self.record["error"] = error_text(error)
        if not self._entered:
            self.finish()

    @log_errors
    def note(self, **details: object) -> None:
        """Add facts that the timeline shows."""
        self.record |= {key: to_json(value) for key, value in details.items()}

    @log_errors
    def start(self) -> None:
        """Start the clock, which runs until `finish`."""
        self.trace.step_open(self.record)
        self._began = time.perf_counter()

    @log_errors
    def finish(self) -> None:
        """End the step and record its duration. A second call changes nothing."""
        self.trace.step_done(self.record, (time.perf_counter() - self._began) * 1000)

    def inside(self) -> AbstractContextManager[None]:
        """Context in which new steps belong to this step."""
        return _at(self.trace, self.record.get("n"))

    def __enter__(self) -> Self:
        self.start()
        context = self.inside()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(None, None, None)
        if error is not None:
            self.error(error)
        self.finish()


class Trace:
    """One run of an agent. The end of its `with` block, or `finish`, writes it to the outbox.

    run_id: the app's own id of the run; the trace's id if left out. unit, policy: of its decisions that name none.
    Methods may be called from any thread and never raise.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        run_id: str = "",
        unit: str = "",
        policy: str = "",
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.recorder = recorder
        self.problems = recorder.problems
        self.id = str(uuid.uuid4())
        self.run_id = truncate(str(run_id), MAX_NAME) if run_id else self.id
        self.unit, self.policy = unit, policy
        self.finished = False
        self._metadata: dict[str, object] = {}
        self._started_at = utc_now()
        self._steps: list[dict[str, object]] = []
        self._open: set[int] = set()  # numbers of the open steps
        self._size = self._parts = 0
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._entered: list[Any] = []
        self.has_decision = False
        self.note(**({"unit": unit} if unit else {}), **dict(metadata or {}))

    # --- Recording ----------------------------------------------------------------------------------------

    def step(self, name: str, **details: object) -> Span:
        """Record a step of the agent. `with trace.step("plan"):` also records its duration and the steps inside it."""
        return Span(self, "step", name, details)

    def reasoning(self, text: str, **details: object) -> Span:
        """Record a thought of the agent."""
        return Span(self, "reasoning", "", {"text": text, **details})

    def tool_call(self, name: str, arguments: object = None) -> Span:
        """Record a tool call: `with trace.tool_call("search", {"q": 1}) as call: call.result(search(1))`."""
        return Span(self, "tool_call", name, {"arguments": arguments})

    def task_completed(self, name: str, result: object = None) -> None:
        """Record that a task of the agent is done."""
        Span(self, "task", name, {"status": "completed", "result": result})

    def task_failed(self, name: str, error: BaseException | str | None = None) -> None:
        """Record that a task of the agent failed."""
        text = None if error is None else error_text(error)
        Span(self, "task", name, {"status": "failed", "error": text})

    def decision(
        self,
        messages: object,
        response: object,
        *,
        id: str | uuid.UUID | None = None,
        name: str = "",
        candidates: Sequence[object] | None = None,
        propensity: float | None = None,
        unit: str | None = None,
        policy: str | None = None,
        arm: str = "",
        state: object = None,
        latency_ms: float | None = None,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, object] | None = None,
    ) -> str:
        """Record a prompt and its response. Returns the decision's id, for `rate`.

        messages: one text, or a list of {role, content}. response: a text; data becomes JSON. candidates: the options,
        texts or {response, score}. propensity: probability of the choice, in (0, 1]. A decision that the server would
        refuse is not recorded, and the log says why.
        """
        key = str(id or uuid.uuid4())
        self._decide(
            name,
            {
                "id": key,
                "messages": messages,
                "response": response,
                "candidates": candidates,
                "propensity": propensity,
                "unit": self.unit if unit is None else unit,
                "policy": self.policy if policy is None else policy,
                "arm": arm,
                "run_id": self.run_id,
                "state": state,
                "latency_ms": latency_ms,
                "tokens_in": tokens_in,
                "tokens_out": tokens_out,
                "tags": tags,
                "metadata": metadata,
            },
        )
        return key

    @log_errors
    def _decide(self, name: str, facts: dict[str, Any]) -> None:
        try:
            payload = decision_payload(**facts)
        except ValueError as error:
            self.problems.report("decision", f"a decision of {self.recorder.agent} was not recorded: {error}")
            Span(self, "step", "decision not recorded", {"error": str(error)})
            return
        step = {"kind": "decision", "name": truncate(str(name), MAX_NAME), "at": utc_now(), **payload}
        self.append(step)
        self.step_done(step, payload.get("latency_ms"))
        self.has_decision = True
        last_decision.set(payload["id"])

    @log_errors
    def note(self, **metadata: object) -> None:
        """Add facts about the whole run."""
        self._metadata |= {key: to_json(value) for key, value in metadata.items()}

    # --- Steps --------------------------------------------------------------------------------------------

    def append(self, step: dict[str, Any]) -> None:
        """Add an open step under the current one. `n` is its number in the trace."""
        position = _position.get()
        with self._lock:
            step["n"] = next(self._numbers)
            step["parent"] = position.step if position is not None and position.trace is self else None
            if not self.finished:
                self._steps.append(step)
                self._open.add(step["n"])
            else:
                self.problems.report("finished", f"a step {step['name']!r} came after its trace was finished")

    def step_open(self, step: dict[str, Any]) -> None:
        """Mark a step as open."""
        with self._lock:
            if any(known is step for known in reversed(self._steps)):
                self._open.add(step["n"])

    def step_done(self, step: dict[str, object], duration_ms: float | None) -> None:
        """Mark a step as done."""
        with self._lock:
            if step.get("n") not in self._open:
                return
            if duration_ms is not None:
                step["duration_ms"] = round(duration_ms, 3)
            size = len(json.dumps(step))
            if self._size and self._size + size > PART_SIZE:
                self._send_part()
            self._open.discard(step["n"])
            self._size += size

    def _send_part(self) -> None:
        """Write the steps that are done as a part of the trace. Open steps follow in a later part."""
        done = [step for step in self._steps if step["n"] not in self._open]
        self._steps = [step for step in self._steps if step["n"] in self._open]
        self._size = 0
        self._parts += 1
        # The last part has the trace's id. Ids of earlier parts follow from it, so that a repeated part is stored once.
        part = uuid.uuid5(uuid.UUID(self.id), f"part {self._parts}")
        self.recorder.add(self._payload(str(part), done, {"trace": self.id, "part": self._parts}))

    def _payload(
        self, id: str, steps: list[dict[str, object]], metadata: Mapping[str, object]
    ) -> dict[str, object]:
        return {
            "id": id,
            "agent": self.recorder.agent,
            "run_id": self.run_id,
            "started_at": self._started_at,
            "finished_at": utc_now(),
            "steps": steps,
            "metadata": {**self._metadata, **metadata},
        }

    @log_errors
    def finish(self, error: BaseException | str | None = None) -> None:
        """End the run and write the trace to the outbox. error: why the run failed.

        A run that ends without an error is not a completed task: `task_completed` records that.
        """
        with self._lock:
            if self.finished:
                return
            for step in [step for step in self._steps if step["n"] in self._open]:
                step["unfinished"] = True  # steps still open when the trace ends
                self.step_done(step, None)
            self._metadata.setdefault("status", "ended" if error is None else "failed")
            if error is not None:
                self._metadata["error"] = error_text(error)
            self.finished = True
            more = {"part": self._parts + 1, "trace": self.id} if self._parts else {}
            payload = self._payload(self.id, self._steps, more)
        self.recorder.add(payload)

    def inside(self) -> AbstractContextManager[None]:
        """Context in which new steps belong to this trace. Leaving it does not finish the trace."""
        return _at(self, None)

    def __enter__(self) -> Self:
        context = self.inside()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(None, None, None)
        self.finish(error)
