"""Methods of one instance in the place of which watched ones stand, and the way back; its class never changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ratchet_client.call_wrappers import Begin, observed

Begins = Callable[[str, Callable[..., Any], bool], Begin]
"""A method's name, the function behind it, whether that takes the instance first -> what observes its calls."""


MARK = "__ratchet_watched__"
"""Stands in the dictionary of watched classes and functions."""


def is_watched(agent: Any) -> bool:
    """Whether `watch` changed this object, and nobody changed it back."""
    own = getattr(agent, "__dict__", {}).values()
    return MARK in vars(type(agent)) or any(
        inspect.isfunction(value) and MARK in vars(value) for value in own
    )


def watch(agent: Any, begins: dict[str, Begins]) -> Iterator[Callable[[], bool]]:
    """Put watched methods in the place of these. Yields, for each change as it is made, what undoes it.

    That returns False, and leaves things alone, where somebody else changed the same since. Raises TypeError or
    AttributeError where the object cannot be changed.
    """
    own = getattr(agent, "__dict__", {})
    in_class = {name: begin for name, begin in begins.items() if name not in own}
    if in_class:
        yield _watch_class(agent, in_class)
    for name, begin in begins.items():
        if name in own:
            yield _watch_value(own, name, begin)


def _watch_class(agent: Any, begins: dict[str, Begins]) -> Callable[[], bool]:
    """Give the instance a class of its own: Python looks `__call__` up there alone, and a copy of the agent by copy
    or pickle is an unwatched agent of the original class, not one that calls this one's methods."""
    original: Any = type(agent)
    body: dict[str, Any] = {
        "__slots__": (),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        MARK: True,
    }
    for name, begin in begins.items():
        raw = inspect.getattr_static(original, name)
        is_method = inspect.isfunction(raw)
        body[name] = observed(raw, begin(name, raw, True)) if is_method else _Watched(original, name, begin)
    watched = _subclass_unnoticed(original, body)
    # not `agent.__class__ = ...`: a frozen or validating class refuses that
    object.__setattr__(agent, "__class__", watched)

    def put_back() -> bool:
        if type(agent) is not watched:
            return False
        object.__setattr__(agent, "__class__", original)
        return True

    return put_back


def _watch_value(own: dict[str, Any], name: str, begin: Begins) -> Callable[[], bool]:
    """Replace a function that the instance itself holds."""
    original = own[name]
    watched = observed(original, begin(name, original, False))
    watched.__dict__[MARK] = True
    own[name] = watched

    def put_back() -> bool:
        if own.get(name) is not watched:
            return False
        own[name] = original
        return True

    return put_back


class _Quiet:
    """Stands between a watched class and its original in the order of look-up alone: see _subclass_unnoticed."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _subclass_unnoticed(original: Any, body: dict[str, Any]) -> Any:
    """A subclass that the original does not hear of: many a framework registers every subclass by its name, and would
    take the watched class for the agent's. So neither its metaclass's __new__ nor its __init_subclass__ runs; the
    memory layout stays the original's, for otherwise an instance could not change over."""

    def mro(cls: Any) -> list[Any]:
        return [cls, _Quiet, *original.__mro__]

    metaclass: Any = type.__new__(type, type(original).__name__, (type(original),), {"mro": mro})
    watched: Any = type.__new__(metaclass, original.__name__, (original,), body)
    type.__setattr__(watched, "__reduce_ex__", _reduce_as(watched, original))
    return watched


class _Watched:
    """A watched attribute that is no plain function: a static or class method, a property, a callable object."""

    def __init__(self, original: type, name: str, begin: Begins) -> None:
        self._original, self._name, self._begin = original, name, begin

    def __get__(self, instance: Any, owner: Any) -> Any:
        raw = inspect.getattr_static(self._original, self._name)
        bind = getattr(type(raw), "__get__", None)
        bound = raw if bind is None else bind(raw, instance, self._original)
        return bound if instance is None else observed(bound, self._begin(self._name, bound, False))


def _reduce_as(watched: type, original: Any) -> Callable[..., Any]:
    """A __reduce_ex__ by which copy and pickle make an instance of the original class."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        found = original.__reduce_ex__(self, protocol)
        if not isinstance(found, tuple):
            return found
        function, arguments, *rest = found
        arguments = tuple(original if value is watched else value for value in arguments)
        if function is watched:
            function = original
        elif getattr(function, "__module__", "") == "copyreg" and arguments[0] is original:
            # pickle insists that copyreg's own makers are given the class that the instance says it has
            if function.__name__ == "__newobj__":
                function = original.__new__
            elif function.__name__ == "__newobj_ex__":
                function, arguments = partial(original.__new__, original, *arguments[1], **arguments[2]), ()
        return (function, arguments, *rest)

    return reduce_ex
