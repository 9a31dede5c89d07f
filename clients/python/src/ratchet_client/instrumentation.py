"""Instrumentation of one instance: its methods replaced by observed ones, and the way back. Its class never changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ratchet_client.call_wrappers import ObserverFactory, wrap_calls

MethodObserverFactory = Callable[[str, Callable[..., Any], bool], ObserverFactory]
"""(name of a method, the function behind it, whether that takes the instance first) -> what makes its observers."""

MARK = "__ratchet_watched__"
"""Key in the dictionary of instrumented classes and functions."""


def is_instrumented(agent: Any) -> bool:
    """True while the methods of this object are the ones `instrument` put there."""
    own = getattr(agent, "__dict__", {}).values()
    return MARK in vars(type(agent)) or any(
        inspect.isfunction(value) and MARK in vars(value) for value in own
    )


def instrument(agent: Any, observers: dict[str, MethodObserverFactory]) -> Iterator[Callable[[], bool]]:
    """Replace these methods by observed ones. Yields, for each change as it is made, what undoes it.

    That returns False, and leaves things alone, where somebody else changed the same since. Raises TypeError or
    AttributeError where the object cannot be changed.
    """
    own = getattr(agent, "__dict__", {})
    in_class = {name: factory for name, factory in observers.items() if name not in own}
    if in_class:
        yield _instrument_class(agent, in_class)
    for name, factory in observers.items():
        if name in own:
            yield _instrument_value(own, name, factory)


def _instrument_class(agent: Any, observers: dict[str, MethodObserverFactory]) -> Callable[[], bool]:
    """Give the instance a class of its own: Python looks `__call__` up there alone, and a copy of the agent by copy
    or pickle is an agent of the original class, not one that calls this one's methods."""
    original: Any = type(agent)
    body: dict[str, Any] = {
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
    # not `agent.__class__ = ...`: a frozen or validating class refuses that
    object.__setattr__(agent, "__class__", instrumented)

    def restore() -> bool:
        if type(agent) is not instrumented:
            return False
        object.__setattr__(agent, "__class__", original)
        return True

    return restore


def _instrument_value(own: dict[str, Any], name: str, factory: MethodObserverFactory) -> Callable[[], bool]:
    """Replace a function that the instance itself holds."""
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
    """Class between an instrumented class and its original in the method resolution order: see _hidden_subclass."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _hidden_subclass(original: Any, body: dict[str, Any]) -> Any:
    """A subclass that the original does not hear of: many a framework registers every subclass by its name, and would
    take the instrumented class for the agent's. So neither its metaclass's __new__ nor its __init_subclass__ runs; the
    memory layout stays the original's, for otherwise an instance could not change over."""

    def mro(cls: Any) -> list[Any]:
        return [cls, _NoSubclassHook, *original.__mro__]

    metaclass: Any = type.__new__(type, type(original).__name__, (type(original),), {"mro": mro})
    subclass: Any = type.__new__(metaclass, original.__name__, (original,), body)
    type.__setattr__(subclass, "__reduce_ex__", _reduce_as(subclass, original))
    return subclass


class _InstrumentedAttribute:
    """An instrumented attribute that is no plain function: a static or class method, a property, a callable object."""

    def __init__(self, original: type, name: str, factory: MethodObserverFactory) -> None:
        self._original, self._name, self._factory = original, name, factory

    def __get__(self, instance: Any, owner: Any) -> Any:
        raw = inspect.getattr_static(self._original, self._name)
        bind = getattr(type(raw), "__get__", None)
        bound = raw if bind is None else bind(raw, instance, self._original)
        return bound if instance is None else wrap_calls(bound, self._factory(self._name, bound, False))


def _reduce_as(instrumented: type, original: Any) -> Callable[..., Any]:
    """A __reduce_ex__ by which copy and pickle make an instance of the original class."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        arguments = tuple(original if value is instrumented else value for value in arguments)
        if function is instrumented:
            function = original
        elif getattr(function, "__module__", "") == "copyreg" and arguments[0] is original:
            # pickle insists that copyreg's own makers are given the class that the instance says it has
            if function.__name__ == "__newobj__":
                function = original.__new__
            elif function.__name__ == "__newobj_ex__":
                function, arguments = partial(original.__new__, original, *arguments[1], **arguments[2]), ()
        return (function, arguments, *rest)

    return reduce_ex
