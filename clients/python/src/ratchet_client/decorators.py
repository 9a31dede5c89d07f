"""Decorators that record the calls of functions which decide, and of functions which are tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from ratchet_client.call_wrappers import CallObserver, wrap_calls
from ratchet_client.decisions import response_text
from ratchet_client.hooks import ArgumentBinder, ToolObserver
from ratchet_client.problem_log import ProblemLog
from ratchet_client.traces import Recorder, Trace, log_errors, trace_current

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _DecisionRecorder:
    """Records the calls of one function as decisions."""

    collector: Recorder
    name: str
    prompt: Callable[..., Any]
    response: Callable[[Any], Any]
    unit: str | Callable[..., str]
    policy: str
    candidates: Callable[..., Sequence[object]] | None
    propensity: Callable[[object], float] | None
    completed: Callable[[object], bool | None] | None

    @property
    def problems(self) -> ProblemLog:
        return self.collector.problems

    @log_errors
    def begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> CallObserver:
        # Read before the call, because the call may change its arguments.
        return _DecisionObserver(self, self._request(args, kwargs))

    @log_errors
    def _request(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        unit = self.unit(*args, **kwargs) if callable(self.unit) else self.unit
        return {
            "messages": self.prompt(*args, **kwargs),
            "unit": unit or None,
            "policy": self.policy or None,
            "candidates": None if self.candidates is None else self.candidates(*args, **kwargs),
        }

    @log_errors
    def record(self, trace: Trace, request: dict[str, Any] | None, result: object) -> None:
        if request is not None:
            propensity = None if self.propensity is None else self.propensity(result)
            trace.decision(response=self.response(result), name=self.name, propensity=propensity, **request)

    @log_errors
    def record_completion(self, trace: Trace, result: object) -> None:
        """Record whether the task is done, if the app says so."""
        done = None if self.completed is None else self.completed(result)
        if done is not None:
            (trace.task_completed if done else trace.task_failed)(self.name)


class _DecisionObserver:
    """Observer of one call, in the current trace or in a new one."""

    def __init__(self, recorder: _DecisionRecorder, request: dict[str, object] | None) -> None:
        current = trace_current(recorder.collector)
        self._own = current is None
        self._trace = recorder.collector.trace() if current is None else current
        self._recorder, self._request = recorder, request

    def context(self) -> AbstractContextManager[None]:
        return self._trace.inside()

    def on_result(self, result: object) -> None:
        self._recorder.record(self._trace, self._request, result)
        self._recorder.record_completion(self._trace, result)
        if self._own:
            self._trace.finish()

    def on_error(self, error: BaseException) -> None:
        self._trace.task_failed(self._recorder.name, error)
        if self._own:
            self._trace.finish(error)


def records_decision(
    collector: Recorder,
    *,
    prompt: Callable[..., object],
    response: Callable[[object], object] = response_text,
    unit: str | Callable[..., str] = "",
    policy: str = "",
    candidates: Callable[..., Sequence[object]] | None = None,
    propensity: Callable[[object], float] | None = None,
    completed: Callable[[object], bool | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, sync or async, that decides: each call that returns records a decision.

    prompt, unit and candidates get the function's arguments; response and propensity get its result. A response that
    is no text becomes JSON. A call that raises is recorded as a failed task. If it returns, completed(result) says
    whether the task was completed (True) or failed (False); None means unknown. Errors of these callables are logged
    and never raised into the app.

        @records_decision(collector, prompt=lambda ticket: ticket.text, unit=lambda ticket: ticket.user)
        def choose_queue(ticket): ...
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__name__", "decision")
        recorder = _DecisionRecorder(
            collector, name, prompt, response, unit, policy, candidates, propensity, completed
        )
        return cast(Callable[P, R], wrap_calls(function, recorder.begin))

    return decorate


def records_tool(collector: Recorder, name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, sync or async, that is a tool: each call is a step of the current trace."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        tool = _ToolRecorder(
            collector, name or getattr(function, "__name__", "tool"), ArgumentBinder(function, False)
        )
        return cast(Callable[P, R], wrap_calls(function, tool.begin))

    return decorate


class _ToolRecorder:
    def __init__(self, collector: Recorder, name: str, arguments: ArgumentBinder) -> None:
        self.collector, self.problems = collector, collector.problems
        self._name, self._arguments = name, arguments

    @log_errors
    def begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> CallObserver:
        trace: Trace | None = trace_current(self.collector)
        own = trace is None
        return ToolObserver(
            trace or self.collector.trace(), self._name, self._arguments.bind(args, kwargs), own=own
        )
