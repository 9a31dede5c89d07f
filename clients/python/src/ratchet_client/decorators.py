"""Decorators for plain functions: one that takes a decision, one that is a tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from ratchet_client.call_wrappers import Call, observed
from ratchet_client.decisions import response_text
from ratchet_client.hooks import Arguments, ToolCall
from ratchet_client.traces import Recorder, Trace, quietly, trace_current

P = ParamSpec("P")
R = TypeVar("R")


class _Decider:
    """How the calls of one function become decisions."""

    def __init__(
        self,
        collector: Recorder,
        name: str,
        prompt: Callable[..., Any],
        response: Callable[[Any], Any],
        unit: str | Callable[..., str],
        policy: str,
        candidates: Callable[..., Sequence[Any]] | None,
        propensity: Callable[[Any], float] | None,
        completed: Callable[[Any], bool | None] | None,
    ) -> None:
        self.collector, self.problems, self.name = collector, collector.problems, name
        self._prompt, self._response, self._unit = prompt, response, unit
        self._policy, self._candidates, self._propensity = policy, candidates, propensity
        self._completed = completed

    @quietly
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        # asked before the call, which may change what it was given
        return _DecisionCall(self, self._asked(args, kwargs))

    @quietly
    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        unit = self._unit(*args, **kwargs) if callable(self._unit) else self._unit
        return {
            "messages": self._prompt(*args, **kwargs),
            "unit": unit or None,
            "policy": self._policy or None,
            "candidates": None if self._candidates is None else self._candidates(*args, **kwargs),
        }

    @quietly
    def record(self, trace: Trace, asked: dict[str, Any] | None, result: Any) -> None:
        if asked is not None:
            propensity = None if self._propensity is None else self._propensity(result)
            trace.decision(response=self._response(result), name=self.name, propensity=propensity, **asked)

    @quietly
    def conclude(self, trace: Trace, result: Any) -> None:
        """Record whether what was asked is done, where the app says so."""
        done = None if self._completed is None else self._completed(result)
        if done is not None:
            (trace.task_completed if done else trace.task_failed)(self.name)


class _DecisionCall:
    """One call, in the trace it happens in or in one of its own."""

    def __init__(self, decider: _Decider, asked: dict[str, Any] | None) -> None:
        current = trace_current(decider.collector)
        self._own = current is None
        self._trace = decider.collector.trace() if current is None else current
        self._decider, self._asked = decider, asked

    def inside(self) -> AbstractContextManager[None]:
        return self._trace.inside()

    def done(self, result: Any) -> None:
        self._decider.record(self._trace, self._asked, result)
        self._decider.conclude(self._trace, result)
        if self._own:
            self._trace.finish()

    def failed(self, error: BaseException) -> None:
        self._trace.task_failed(self._decider.name, error)
        if self._own:
            self._trace.finish(error)


def records_decision(
    collector: Recorder,
    *,
    prompt: Callable[..., Any],
    response: Callable[[Any], Any] = response_text,
    unit: str | Callable[..., str] = "",
    policy: str = "",
    candidates: Callable[..., Sequence[Any]] | None = None,
    propensity: Callable[[Any], float] | None = None,
    completed: Callable[[Any], bool | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a plain function, sync or async, that takes a decision: each call that returns records one.

    prompt, unit and candidates are called with the function's own arguments, response and propensity with what it
    returned (a text stands for itself, data becomes JSON). A call that raises is recorded as a failed task; one that
    returns is a completed or a failed one where completed(result) says so (None: not known). What these callables raise
    is logged and reaches nobody.

        @records_decision(collector, prompt=lambda ticket: ticket.text, unit=lambda ticket: ticket.user)
        def choose_queue(ticket): ...
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__name__", "decision")
        decider = _Decider(collector, name, prompt, response, unit, policy, candidates, propensity, completed)
        return cast(Callable[P, R], observed(function, decider.begin))

    return decorate


def records_tool(collector: Recorder, name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a plain function, sync or async, that is a tool: each call is a step of the trace it happens in."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        tool = _Tool(collector, name or getattr(function, "__name__", "tool"), Arguments(function, False))
        return cast(Callable[P, R], observed(function, tool.begin))

    return decorate


class _Tool:
    def __init__(self, collector: Recorder, name: str, arguments: Arguments) -> None:
        self.collector, self.problems = collector, collector.problems
        self._name, self._arguments = name, arguments

    @quietly
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        trace: Trace | None = trace_current(self.collector)
        own = trace is None
        return ToolCall(
            trace or self.collector.trace(), self._name, self._arguments.of(args, kwargs), own=own
        )
