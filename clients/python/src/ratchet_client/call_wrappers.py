"""Wrappers that observe the calls of a function: sync or async, plain or generator. Callers see no difference."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Protocol

from ratchet_client.decisions import MAX_DECISION
from ratchet_client.json_values import MAX_ITEMS, to_json


class CallObserver(Protocol):
    """Observer of one call. Its methods never raise."""

    def context(self) -> AbstractContextManager[None]:
        """The context in which the call's code runs."""
        ...

    def on_result(self, result: object) -> None:
        """The call returned, or its stream ended."""
        ...

    def on_error(self, error: BaseException) -> None:
        """The call raised."""
        ...


class _NullObserver:
    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_result(self, result: object) -> None:
        pass

    def on_error(self, error: BaseException) -> None:
        pass


NULL_OBSERVER: CallObserver = _NullObserver()

ObserverFactory = Callable[[tuple[object, ...], dict[str, object]], CallObserver | None]
"""Gets a call's arguments before the call runs. Returns None to leave the call unobserved. Must not raise."""


def wrap_calls(function: Callable[..., object], observer_of: ObserverFactory) -> Callable[..., object]:
    """An observed function with the same kind (plain, coroutine, generator, async generator), name and signature.

    The result of a generator is what it returns or, if that is None, what it yielded: texts joined, other items as a
    list. A plain function may return a coroutine, generator or future, which is observed to its end.
    """
    if inspect.isasyncgenfunction(function):
        return _async_streaming(function, observer_of)
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def streams(*args: object, **kwargs: object) -> Generator[object, object, object]:
            return (yield from _stream(observer_of(args, kwargs) or NULL_OBSERVER, function(*args, **kwargs)))

        return streams

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaits(*args: object, **kwargs: object) -> object:
            return await _await_coroutine(
                observer_of(args, kwargs) or NULL_OBSERVER, function(*args, **kwargs)
            )

        return awaits

    @wraps(function)
    def calls(*args: object, **kwargs: object) -> object:
        observer = observer_of(args, kwargs) or NULL_OBSERVER
        try:
            with observer.context():
                result = function(*args, **kwargs)
        except BaseException as error:
            observer.on_error(error)
            raise
        return _follow_result(observer, result)

    return calls


def _follow_result(observer: CallObserver, result: object) -> object:
    if inspect.isgenerator(result):
        return _stream(observer, result)
    if inspect.isasyncgen(result):
        return _async_streaming(lambda: result, lambda args, kwargs: observer)()
    if inspect.iscoroutine(result):
        return _await_coroutine(observer, result)
    if isinstance(result, (asyncio.Future, concurrent.futures.Future)):
        # Not wrapped: the caller may want to cancel the future.
        result.add_done_callback(partial(_on_future_done, observer))
        return result
    observer.on_result(result)
    return result


def _on_future_done(observer: CallObserver, future: Any) -> None:
    if future.cancelled():
        observer.on_error(asyncio.CancelledError())
    elif error := future.exception():
        observer.on_error(error)
    else:
        observer.on_result(future.result())


async def _await_coroutine(observer: CallObserver, coroutine: Coroutine[object, object, object]) -> object:
    try:
        with observer.context():
            result = await coroutine
    except BaseException as error:
        observer.on_error(error)
        raise
    observer.on_result(result)
    return result


def _stream(observer: CallObserver, generator: Generator[Any, Any, Any]) -> Generator[object, object, object]:
    # The context is left before each yield: the consumer's code that runs then is not part of the call.
    chunks = _Chunks()
    resume: Callable[[], object] = partial(next, generator)
    try:
        while True:
            with observer.context():
                item = resume()
            chunks.add(item)
            try:
                resume = partial(generator.send, (yield item))
            except GeneratorExit:
                with observer.context():
                    generator.close()
                observer.on_result(chunks.value())
                raise
            except BaseException as error:
                resume = partial(generator.throw, error)
    except StopIteration as stop:
        observer.on_result(chunks.value() if stop.value is None else stop.value)
        return stop.value
    except GeneratorExit:
        raise
    except BaseException as error:
        observer.on_error(error)
        raise


def _async_streaming(
    function: Callable[..., AsyncGenerator[object, Any]], observer_of: ObserverFactory
) -> Callable[..., object]:
    # The same loop as _stream. It is repeated because an async generator has no `yield from`.
    @wraps(function)
    async def streams(*args: object, **kwargs: object) -> AsyncGenerator[object, object]:
        observer = observer_of(args, kwargs) or NULL_OBSERVER
        generator = function(*args, **kwargs)
        chunks = _Chunks()
        resume: Callable[[], Any] = generator.__anext__
        try:
            while True:
                with observer.context():
                    item = await resume()
                chunks.add(item)
                try:
                    resume = partial(generator.asend, (yield item))
                except GeneratorExit:
                    with observer.context():
                        await generator.aclose()
                    observer.on_result(chunks.value())
                    raise
                except BaseException as error:
                    resume = partial(generator.athrow, error)
        except StopAsyncIteration:
            observer.on_result(chunks.value())
        except GeneratorExit:
            raise
        except BaseException as error:
            observer.on_error(error)
            raise

    return streams


class _Chunks:
    """The items of a stream: texts joined in full, other items truncated as data."""

    def __init__(self) -> None:
        self._texts: list[str] | None = []
        self._items: list[object] = []
        self._size = self._count = 0

    def add(self, item: object) -> None:
        self._count += 1
        if self._texts is not None and isinstance(item, str):
            # One text over the limit is kept, so that the decision is refused as too long. It must not be truncated.
            if self._size <= MAX_DECISION:
                self._texts.append(item)
                self._size += len(item)
            return
        if self._texts is not None:
            self._items = [*self._texts[:MAX_ITEMS]]
            self._texts = None
        if len(self._items) < MAX_ITEMS:
            self._items.append(to_json(item))

    def value(self) -> object:
        if self._texts is not None:
            return "".join(self._texts)
        more = self._count - len(self._items)
        return [*self._items, f"… {more} more"] if more > 0 else self._items
