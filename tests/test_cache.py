"""Values that several threads ask for at once are made once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from feedback.cache import TTLCache


class Making:
    """A value that takes as long as the test wants, and counts how often it was made."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.count = threading.Event(), threading.Event(), 0

    def __call__(self) -> int:
        self.count += 1
        self.begun.set()
        assert self.go_on.wait(10)
        return self.count


def asked_by_many(cache: TTLCache[int], make: Callable[[], int], pool: ThreadPoolExecutor) -> list[int]:
    found = [pool.submit(cache.get, "agent", make) for _ in range(8)]
    return [one.result(10) for one in found]


def test_threads_that_ask_at_once_make_a_value_once() -> None:
    cache, make = TTLCache[int](), Making()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(cache.get, "agent", make)
        assert make.begun.wait(10)
        threading.Timer(0.05, make.go_on.set).start()
        assert asked_by_many(cache, make, pool) == [1] * 8
        assert first.result(10) == 1
    assert make.count == 1


def test_what_is_read_before_a_change_is_not_kept_after_it() -> None:
    cache, before, after = TTLCache[int](), Making(), Making()
    after.go_on.set()
    after.count = 41
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(cache.get, "agent", before)
        assert before.begun.wait(10)
        cache.clear()
        assert cache.get("agent", after) == 42
        before.go_on.set()
        assert old.result(10) == 1
    assert cache.get("agent", before) == 42


def test_a_failure_is_told_to_everyone_and_tried_again() -> None:
    def fail() -> int:
        raise LookupError("no such agent")

    cache = TTLCache[int]()
    with ThreadPoolExecutor(2) as pool, pytest.raises(LookupError):
        asked_by_many(cache, fail, pool)
    assert cache.get("agent", lambda: 7) == 7


def test_a_forked_process_waits_for_no_thread_it_does_not_have() -> None:
    cache, make = TTLCache[int](), Making()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.get, "agent", make)
        assert make.begun.wait(10)
        child = os.fork()
        if not child:
            os._exit(cache.get("agent", lambda: 7))
        _, status = os.waitpid(child, 0)
        make.go_on.set()
    assert os.waitstatus_to_exitcode(status) == 7
