"""Hooks: they record the runs and tool calls of one agent object, whose code and class stay as they are."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

from ratchet_client.call_wrappers import CallObserver, ObserverFactory, wrap_calls
from ratchet_client.decisions import find_prompt, find_response
from ratchet_client.traces import Recorder, Span, Trace, log_errors, trace_current

RUN_METHODS = (
    "run",
    "arun",
    "invoke",
    "ainvoke",
    "stream",
    "astream",
    "execute",
    "chat",
    "achat",
    "__call__",
)
"""Names of methods that run an agent. `__call__` counts only if it has none of the others."""
TOOL_DISPATCHERS = ("call_tool", "use_tool", "run_tool", "execute_tool", "invoke_tool", "acall_tool")
"""Names of methods whose first argument names the tool to call."""


class ToolObserver:
    """Observer of a tool call, which becomes a step of a trace. own: the trace ends with the call."""

    def __init__(self, trace: Trace, name: str, arguments: object, *, own: bool) -> None:
        self._trace, self._own = trace, own
        self._span: Span = trace.tool_call(name, arguments)

    def context(self) -> AbstractContextManager[None]:
        return self._span.inside()

    def on_result(self, result: object) -> None:
        self._span.result(result)
        if self._own:
            self._trace.finish()

    def on_error(self, error: BaseException) -> None:
        self._span.error(error)
        if self._own:
            self._trace.finish(error)


class RunObserver:
    """Observer of a run: a trace with a task. A run inside a run is a step of its trace."""

    def __init__(
        self, hook: Hook, trace: Trace, name: str, arguments: dict[str, object], *, own: bool
    ) -> None:
        self._hook, self._trace, self._own = hook, trace, own
        self._arguments = arguments
        self._prompt = hook.prompt_of(arguments) if own else None
        self._span = Span(trace, "task" if own else "step", name, {"arguments": arguments})
        self._span.start()

    def context(self) -> AbstractContextManager[None]:
        return self._span.inside()

    def on_result(self, result: object) -> None:
        self._span.note(**({"status": self._hook.status_of(result)} if self._own else {}), result=result)
        self._span.finish()
        if self._own:
            self._hook.record_decision(self._trace, self._prompt, result)
            self._trace.finish()
            self._hook.end_run(self._trace)

    def on_error(self, error: BaseException) -> None:
        self._span.note(**({"status": "failed"} if self._own else {}))
        self._span.error(error)
        self._span.finish()
        if self._own:
            self._trace.finish(error)
            self._hook.end_run(self._trace)


class Hook:
    """A hooked agent. `unhook()`, or the end of its `with` block, restores the agent exactly."""

    def __init__(
        self,
        agent: object,
        collector: Recorder,
        *,
        prompt: Callable[..., object] | None,
        response: Callable[[object], object] | None,
        unit: str | Callable[..., str],
        policy: str,
        decisions: bool,
        completed: Callable[[object], bool | None] | None,
    ) -> None:
        self.agent, self.collector, self.problems = agent, collector, collector.problems
        self._prompt, self._response, self._unit = prompt, response, unit
        self._completed = completed
        self._policy, self._decisions = policy, decisions
        self._runs: list[Trace] = []
        self._lock = threading.Lock()
        self._undo: list[Callable[[], bool]] = []
        self.methods: tuple[str, ...] = ()
        """Names of the observed methods."""

    # --- Calls --------------------------------------------------------------------------------------------

    def run_observer(self, name: str, function: Callable[..., object], takes_self: bool) -> ObserverFactory:
        binder = ArgumentBinder(function, takes_self)

        def observer_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> CallObserver | None:
            return self._begin_run(name, binder.bind(args, kwargs))

        return observer_of

    def tool_observer(self, name: str, function: Callable[..., object], takes_self: bool) -> ObserverFactory:
        binder = ArgumentBinder(function, takes_self)

        def observer_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> CallObserver | None:
            return self._begin_tool(name, binder.bind(args, kwargs))

        return observer_of

    @log_errors
    def _begin_run(self, name: str, arguments: dict[str, object]) -> CallObserver:
        current = trace_current(self.collector)
        if current is not None:
            return RunObserver(self, current, name, arguments, own=False)
        unit = self._unit_of(arguments) if callable(self._unit) else self._unit
        trace = self.collector.trace(unit=unit or "", policy=self._policy)
        with self._lock:
            self._runs.append(trace)
        return RunObserver(self, trace, name, arguments, own=True)

    @log_errors
    def _unit_of(self, arguments: Mapping[str, object]) -> str:
        assert callable(self._unit)
        return str(self._unit(**arguments))

    @log_errors
    def _begin_tool(self, name: str, arguments: Mapping[str, object]) -> CallObserver:
        first = next(iter(arguments.values()), None)
        if name in TOOL_DISPATCHERS and isinstance(first, str):
            name = first
        trace = trace_current(self.collector)
        if trace is None:
            # A thread that the agent started does not know its run. If only one run is open, it is that one.
            with self._lock:
                trace = self._runs[0] if len(self._runs) == 1 else None
        if trace is not None:
            return ToolObserver(trace, name, arguments, own=False)
        return ToolObserver(self.collector.trace(policy=self._policy), name, arguments, own=True)

    @log_errors
    def prompt_of(self, arguments: dict[str, object]) -> object:
        """The prompt of a run. It is read before the run, which may change its arguments."""
        if not self._decisions:
            return None
        return find_prompt(arguments) if self._prompt is None else self._prompt(**arguments)

    @log_errors
    def record_decision(self, trace: Trace, prompt: object, result: object) -> None:
        """Record the run as a decision if it has a prompt and a response and recorded no decision itself."""
        if prompt is None or trace.has_decision:
            return
        response = find_response(result) if self._response is None else self._response(result)
        if response is not None:
            trace.decision(prompt, response)

    def status_of(self, result: object) -> str:
        """Record the task as completed or failed if the app says so, otherwise as returned."""
        done = None if self._completed is None else self._completion_of(result)
        return "returned" if done is None else "completed" if done else "failed"

    @log_errors
    def _completion_of(self, result: object) -> bool | None:
        assert self._completed is not None
        done = self._completed(result)
        return None if done is None else bool(done)

    def end_run(self, trace: Trace) -> None:
        """Remove a run from the open ones, so that it gets no more tool calls of other threads."""
        with self._lock:
            self._runs = [run for run in self._runs if run is not trace]

    # --- The agent's methods ------------------------------------------------------------------------------

    def attach(self, observers: dict[str, MethodObserverFactory]) -> None:
        """Observe these methods. Raises TypeError or AttributeError if the object cannot be changed."""
        for restore in instrument(self.agent, observers):
            self._undo.append(restore)
        self.methods = tuple(observers)

    def unhook(self) -> None:
        """Restore the agent. Open runs are recorded to their end. A second call does nothing."""
        while self._undo:
            if not self._undo.pop()():
                self.problems.report(
                    "unhook",
                    f"{self.agent!r} was changed by others while watched; that part is left as it is",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unhook()


class ArgumentBinder:
    """Binds a call's arguments to the function's parameter names, without self."""

    def __init__(self, function: Callable[..., object], takes_self: bool) -> None:
        self._signature: inspect.Signature | None
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None  # Some built-in callables have no signature.
        self._first = 1 if takes_self else 0

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        if self._signature is not None:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError:
                pass  # The call will fail with this error too. The trace shows its arguments.
            else:
                arguments: dict[str, object] = {}
                for name, value in list(bound.arguments.items())[self._first :]:
                    kind = self._signature.parameters[name].kind
                    arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
                return arguments
        return {**{f"argument {i + 1}": value for i, value in enumerate(args[self._first :])}, **kwargs}


def hook_into_agent(
    agent: object,
    collector: Recorder,
    run_methods: Sequence[str] | None = None,
    tool_methods: Sequence[str] | None = None,
    *,
    prompt: Callable[..., object] | None = None,
    response: Callable[[object], object] | None = None,
    unit: str | Callable[..., str] = "",
    policy: str = "",
    decisions: bool = True,
    completed: Callable[[object], bool | None] | None = None,
) -> Hook:
    """Record every run of this object, and its tool calls, until `unhook()`.

    run_methods: by default, the RUN_METHODS that the object has. tool_methods: by default, its TOOL_DISPATCHERS and
    its public methods named `tool_...` or `..._tool`. Methods may be sync, async or (async) generators. A run called by
    a run is a step of its trace. Runs in different tasks and threads have different traces.

    The outermost run becomes a decision if it has a prompt and a response. `prompt(**arguments)` and `response(result)`
    find them. By default the prompt is the first text or list of messages, and the response is the returned text. None
    means no decision. unit: a text, or unit(**arguments). decisions=False records no decisions.

    completed(result) says whether the task was done: True, False, or None if that is not known yet. Without it, a run
    that returns is recorded as `returned`. A run that raises is recorded as failed.

    Raises ValueError if the object has none of these methods, is hooked already, or cannot be changed.
    """
    if is_instrumented(agent):
        raise ValueError(f"{agent!r} is watched already: unhook it first")
    runs = _existing_methods(agent, run_methods) if run_methods is not None else _run_methods(agent)
    tools = _existing_methods(agent, tool_methods) if tool_methods is not None else _tool_methods(agent, runs)
    if not runs and not tools:
        raise ValueError(
            f"expected {type(agent).__name__} to have one of the methods {', '.join(RUN_METHODS)}, found "
            f"{', '.join(_public_methods(agent)) or 'no public method'}: name them with run_methods and tool_methods"
        )
    hook = Hook(
        agent,
        collector,
        prompt=prompt,
        response=response,
        unit=unit,
        policy=policy,
        decisions=decisions,
        completed=completed,
    )
    try:
        hook.attach({**dict.fromkeys(tools, hook.tool_observer), **dict.fromkeys(runs, hook.run_observer)})
    except (TypeError, AttributeError) as error:
        hook.unhook()
        raise ValueError(f"the methods of {type(agent).__name__} cannot be replaced: {error}") from error
    return hook


def _public_methods(agent: object) -> list[str]:
    return [name for name in dir(type(agent)) if not name.startswith("_") and _callable(agent, name)]


def _callable(agent: object, name: str) -> bool:
    # getattr_static: a property is not run, and the metaclass's __call__ is not taken for the object's.
    places = (getattr(agent, "__dict__", {}), *(vars(base) for base in type(agent).__mro__))
    raw = next((place[name] for place in places if name in place), None)
    return callable(raw) or isinstance(raw, (staticmethod, classmethod))


def _existing_methods(agent: object, names: Iterable[str]) -> list[str]:
    methods = list(names)
    if missing := [name for name in methods if not callable(getattr(agent, name, None))]:
        raise ValueError(
            f"expected methods of {type(agent).__name__}, found no {', '.join(missing)}; it has "
            f"{', '.join(_public_methods(agent)) or 'no public method'}"
        )
    return methods


def _run_methods(agent: object) -> list[str]:
    methods = [name for name in RUN_METHODS[:-1] if _callable(agent, name)]
    return methods or ([RUN_METHODS[-1]] if _callable(agent, RUN_METHODS[-1]) else [])


def _tool_methods(agent: object, runs: Sequence[str]) -> list[str]:
    names = {*dir(type(agent)), *getattr(agent, "__dict__", {})}
    return sorted(
        name
        for name in names
        if not name.startswith("_")
        and name not in runs
        and (name in TOOL_DISPATCHERS or name.startswith("tool_") or name.endswith("_tool"))
        and _callable(agent, name)
    )


MethodObserverFactory = Callable[[str, Callable[..., object], bool], ObserverFactory]
"""(method's name, its function, whether the function takes self) -> factory of the observers of its calls."""

MARK = "__ratchet_watched__"
"""Attribute that marks instrumented classes and functions."""


def is_instrumented(agent: object) -> bool:
    """True if `instrument` replaced methods of this object."""
    own = getattr(agent, "__dict__", {}).values()
    return MARK in vars(type(agent)) or any(
        inspect.isfunction(value) and MARK in vars(value) for value in own
    )


def instrument(agent: object, observers: dict[str, MethodObserverFactory]) -> Iterator[Callable[[], bool]]:
    """Replace these methods by observed ones. Yields a function after each change, which undoes the change.

    That function returns False, and does nothing, if other code has changed the same method since. Raises TypeError or
    AttributeError if the object cannot be changed.
    """
    own = getattr(agent, "__dict__", {})
    in_class = {name: factory for name, factory in observers.items() if name not in own}
    if in_class:
        yield _instrument_class(agent, in_class)
    for name, factory in observers.items():
        if name in own:
            yield _instrument_value(own, name, factory)


def _instrument_class(agent: Any, observers: dict[str, MethodObserverFactory]) -> Callable[[], bool]:
    """Give the instance a class of its own.

    Python looks up `__call__` only in the class. A copy made by copy or pickle has the original class again, so that
    it does not record into this hook.
    """
    original: Any = type(agent)
    body: dict[str, object] = {
        "__slots__": (),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        MARK: True,
    }
    for name, factory in observers.items():
        raw = inspect.getattr_static(original, name)
        is_method = inspect.isfunction(raw)
        body[name] = (
            wrap_calls(raw, factory(name, raw, True))
            if is_method
            else _InstrumentedAttribute(original, name, factory)
        )
    instrumented = _hidden_subclass(original, body)
    # A frozen or validating class refuses `agent.__class__ = ...`.
    object.__setattr__(agent, "__class__", instrumented)

    def restore() -> bool:
        if type(agent) is not instrumented:
            return False
        object.__setattr__(agent, "__class__", original)
        return True

    return restore


def _instrument_value(own: dict[str, Any], name: str, factory: MethodObserverFactory) -> Callable[[], bool]:
    """Replace a function in the instance's own dictionary."""
    original = own[name]
    replacement = wrap_calls(original, factory(name, original, False))
    replacement.__dict__[MARK] = True
    own[name] = replacement

    def restore() -> bool:
        if own.get(name) is not replacement:
            return False
        own[name] = original
        return True

    return restore


class _NoSubclassHook:
    """Base of an instrumented class, before the original in the method resolution order: see _hidden_subclass."""

    __slots__ = ()

    def __init_subclass__(cls, **_: object) -> None:
        pass


def _hidden_subclass(original: Any, body: dict[str, object]) -> object:
    """A subclass made without the metaclass's __new__ and without __init_subclass__.

    Many frameworks register subclasses there by name, and would take this one for the agent's class. The memory layout
    is the original's, as a change of an instance's class requires.
    """

    def mro(cls: object) -> list[object]:
        return [cls, _NoSubclassHook, *original.__mro__]

    metaclass: Any = type.__new__(type, type(original).__name__, (type(original),), {"mro": mro})
    subclass: Any = type.__new__(metaclass, original.__name__, (original,), body)
    type.__setattr__(subclass, "__reduce_ex__", _reduce_as(subclass, original))
    return subclass


class _InstrumentedAttribute:
    """An observed static or class method, property or callable object."""

    def __init__(self, original: type, name: str, factory: MethodObserverFactory) -> None:
        self._original, self._name, self._factory = original, name, factory

    def __get__(self, instance: object, owner: object) -> object:
        raw = inspect.getattr_static(self._original, self._name)
        bind = getattr(type(raw), "__get__", None)
        bound = raw if bind is None else bind(raw, instance, self._original)
        return bound if instance is None else wrap_calls(bound, self._factory(self._name, bound, False))


def _reduce_as(instrumented: type, original: Any) -> Callable[..., object]:
    """A __reduce_ex__ with which copy and pickle make an instance of the original class."""

    def reduce_ex(self: object, protocol: object) -> object:
        reduced = original.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        arguments = tuple(original if value is instrumented else value for value in arguments)
        if function is instrumented:
            function = original
        elif getattr(function, "__module__", "") == "copyreg" and arguments[0] is original:
            # pickle checks that copyreg's functions get the instance's class, so the original's __new__ replaces them.
            if function.__name__ == "__newobj__":
                function = original.__new__
            elif function.__name__ == "__newobj_ex__":
                function, arguments = partial(original.__new__, original, *arguments[1], **arguments[2]), ()
        return (function, arguments, *rest)

    return reduce_ex
