"""A function with its calls observed: sync or async, plain or generator, unchanged for whoever calls it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Protocol

from ratchet_client.decisions import MAX_DECISION
from ratchet_client.json_values import MAX_ITEMS, plain


class Call(Protocol):
    """One call under observation. No method raises."""

    def inside(self) -> AbstractContextManager[None]:
        """Around the code of the call."""
        ...

    def done(self, result: Any) -> None:
        """It returned, or its stream ended."""
        ...

    def failed(self, error: BaseException) -> None:
        """It raised."""
        ...


class _Unobserved:
    def inside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def done(self, result: Any) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        pass


UNOBSERVED: Call = _Unobserved()

Begin = Callable[[tuple[Any, ...], dict[str, Any]], Call | None]
"""Called with a call's arguments before it runs; None leaves that call unobserved. Must not raise."""


def observed(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    """A function of the same kind (plain, coroutine, generator, asynchronous generator), name and signature.

    A generator's result is what it returned, or what it yielded: texts joined, other items listed. What a plain
    function returns as coroutine, generator or future is followed to its end.
    """
    if inspect.isasyncgenfunction(function):
        return _async_streaming(function, begin)
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def streams(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _stream(begin(args, kwargs) or UNOBSERVED, function(*args, **kwargs)))

        return streams

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaits(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(begin(args, kwargs) or UNOBSERVED, function(*args, **kwargs))

        return awaits

    @wraps(function)
    def calls(*args: Any, **kwargs: Any) -> Any:
        call = begin(args, kwargs) or UNOBSERVED
        try:
            with call.inside():
                result = function(*args, **kwargs)
        except BaseException as error:
            call.failed(error)
            raise
        return _followed(call, result)

    return calls


def _followed(call: Call, result: Any) -> Any:
    if inspect.isgenerator(result):
        return _stream(call, result)
    if inspect.isasyncgen(result):
        return _async_streaming(lambda: result, lambda args, kwargs: call)()
    if inspect.iscoroutine(result):
        return _awaited(call, result)
    if isinstance(result, (asyncio.Future, concurrent.futures.Future)):
        # the caller may want to cancel it or hand it on, so it stays what it is
        result.add_done_callback(partial(_settled, call))
        return result
    call.done(result)
    return result


def _settled(call: Call, future: Any) -> None:
    if future.cancelled():
        call.failed(asyncio.CancelledError())
    elif error := future.exception():
        call.failed(error)
    else:
        call.done(future.result())


async def _awaited(call: Call, coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        with call.inside():
            result = await coroutine
    except BaseException as error:
        call.failed(error)
        raise
    call.done(result)
    return result


def _stream(call: Call, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    # The consumer's own code runs between two items and must not count as the agent's: hence in and out of the call.
    chunks = _Chunks()
    resume: Callable[[], Any] = partial(next, generator)
    try:
        while True:
            with call.inside():
                item = resume()
            chunks.add(item)
            try:
                resume = partial(generator.send, (yield item))
            except GeneratorExit:
                with call.inside():
                    generator.close()
                call.done(chunks.value())
                raise
            except BaseException as error:
                resume = partial(generator.throw, error)
    except StopIteration as stop:
        call.done(chunks.value() if stop.value is None else stop.value)
        return stop.value
    except GeneratorExit:
        raise
    except BaseException as error:
        call.failed(error)
        raise


def _async_streaming(function: Callable[..., AsyncGenerator[Any, Any]], begin: Begin) -> Callable[..., Any]:
    # as _stream; there is no `yield from` for asynchronous generators, so the loop stands in the wrapper itself
    @wraps(function)
    async def streams(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = begin(args, kwargs) or UNOBSERVED
        generator = function(*args, **kwargs)
        chunks = _Chunks()
        resume: Callable[[], Any] = generator.__anext__
        try:
            while True:
                with call.inside():
                    item = await resume()
                chunks.add(item)
                try:
                    resume = partial(generator.asend, (yield item))
                except GeneratorExit:
                    with call.inside():
                        await generator.aclose()
                    call.done(chunks.value())
                    raise
                except BaseException as error:
                    resume = partial(generator.athrow, error)
        except StopAsyncIteration:
            call.done(chunks.value())
        except GeneratorExit:
            raise
        except BaseException as error:
            call.failed(error)
            raise

    return streams


class _Chunks:
    """What a stream yielded: texts joined whole, anything else as bounded data."""

    def __init__(self) -> None:
        self._texts: list[str] | None = []
        self._items: list[Any] = []
        self._size = self._count = 0

    def add(self, item: Any) -> None:
        self._count += 1
        if self._texts is not None and isinstance(item, str):
            # one text beyond what a decision may hold is kept, so that it is refused as too long and not cut
            if self._size <= MAX_DECISION:
                self._texts.append(item)
                self._size += len(item)
            return
        if self._texts is not None:
            self._items = [*self._texts[:MAX_ITEMS]]
            self._texts = None
        if len(self._items) < MAX_ITEMS:
            self._items.append(plain(item))

    def value(self) -> Any:
        if self._texts is not None:
            return "".join(self._texts)
        more = self._count - len(self._items)
        return [*self._items, f"… {more} more"] if more > 0 else self._items
