"""The cache of rows: kept for the next run, shared, bounded, and never a reason to fail."""

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from packed_forward.row_cache import RowCache, row_key


def key(number: int) -> bytes:
    return row_key(str(number))


def test_what_was_kept_is_found_by_the_next_run(tmp_path: Path) -> None:
    RowCache(tmp_path / "c.sqlite3").put({key(1): b"one", key(2): b"two"})
    assert RowCache(tmp_path / "c.sqlite3").get([key(1), key(3)]) == {key(1): b"one"}


def test_more_keys_than_one_statement_takes_are_found(tmp_path: Path) -> None:
    cache = RowCache(tmp_path / "c.sqlite3")
    values = {key(n): str(n).encode() for n in range(1_201)}
    cache.put(values)
    assert cache.get(list(values)) == values


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = RowCache(tmp_path / "c.sqlite3", max_rows=10)
    cache.put({key(n): b"old" for n in range(10)})
    with sqlite3.connect(tmp_path / "c.sqlite3") as database:
        database.execute("UPDATE rows SET used = used - 200000")
    assert cache.get([key(0)])  # used again
    cache.put({key(n): b"new" for n in range(20, 25)})
    left = cache.get([key(n) for n in (*range(10), *range(20, 25))])
    assert len(left) == 9
    assert key(0) in left
    assert all(key(n) in left for n in range(20, 25))


def write(path: Path, first: int) -> None:
    cache = RowCache(path)
    for n in range(first, first + 40):
        cache.put({key(n): b"x"})


@pytest.mark.slow
def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(path, first)) for first in (0, 1_000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(RowCache(path).get([key(n) for n in (*range(40), *range(1_000, 1_040))])) == 80


def test_a_broken_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.sqlite3"
    path.write_bytes(b"not a database" * 500)
    cache = RowCache(path)
    assert cache.get([key(1)]) == {}
    assert "going on without the cache" in caplog.text
    assert (tmp_path / "c.broken").exists()
    cache.put({key(1): b"one"})
    assert cache.get([key(1)]) == {key(1): b"one"}


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = RowCache(tmp_path / "file" / "c.sqlite3")
    cache.put({key(1): b"one"})
    assert cache.get([key(1)]) == {}


def test_parts_cannot_be_mistaken_for_other_parts() -> None:
    assert row_key("ab", "c") != row_key("a", "bc")
    assert row_key([1, 23]) != row_key([12, 3])
    assert row_key([1], [2]) != row_key([1, 2])
