"""What formats keep of a file while they read the rest of it."""

from __future__ import annotations

import pytest

from feedback.transfer.formats.files import DiskMultimap, Tally


def test_values_under_one_key_come_back_in_the_order_they_came() -> None:
    kept = DiskMultimap()
    for value in ({"n": 1}, [2, None], "three"):
        kept.add("a", value)
    kept.add("b", 4)
    assert kept.all("a") == [{"n": 1}, [2, None], "three"]
    assert kept.last("a") == "three"
    assert list(kept) == [("a", {"n": 1}), ("a", [2, None]), ("a", "three"), ("b", 4)]


def test_what_was_never_added_is_not_there() -> None:
    kept = DiskMultimap()
    assert "a" not in kept
    assert (kept.all("a"), kept.last("a"), kept.count("a")) == ([], None, 0)


def test_values_are_counted_as_far_as_is_asked() -> None:
    kept = DiskMultimap()
    for _ in range(5):
        kept.add("a")
    assert "a" in kept
    assert (kept.count("a"), kept.count("a", 9)) == (2, 5)


@pytest.mark.parametrize("odd", ["\ud800", 'a"b', "\0", ""])
def test_any_text_is_a_key_of_its_own(odd: str) -> None:
    kept = DiskMultimap()
    kept.add(odd, odd)
    kept.add("a" + odd, 1)
    assert kept.all(odd) == [odd]


def test_two_stores_share_nothing() -> None:
    one, other = DiskMultimap(), DiskMultimap()
    one.add("a", 1)
    assert "a" not in other


def test_a_tally_is_a_mapping_of_numbers() -> None:
    tally = Tally()
    tally.update({-(2**61): 1, 7: 2})
    tally[7] = 3
    assert dict(tally) == {-(2**61): 1, 7: 3}
    del tally[7]
    assert (len(tally), 7 in tally, tally.get(7, 0)) == (1, False, 0)
    with pytest.raises(KeyError):
        del tally[7]
