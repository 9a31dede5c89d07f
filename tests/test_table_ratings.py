"""Ratings in tables: what they mean is decided by the whole file; which of two responses is preferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    RowRefused,
)
from tests.support.formats import written
from tests.support.table_files import rated

# --- What ratings mean is decided by the file ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (["up", "down", "neutral", ""], ["up", "down", None, None]),
        (["👍", "👎🏽", "👍"], ["up", "down", "up"]),
        (["Yes", "no", "N/A"], ["up", "down", None]),
        ([True, False, None], ["up", "down", None]),
        ([1, 0, 1], ["up", "down", "up"]),
        (["1.0", "0.0", "NaN"], ["up", "down", None]),
        ([1, -1, 0], ["up", "down", None]),
        ([5, 1, 3], [5, 1, 3]),
        (["5.0", "1.0", None], [5, 1, None]),
        ([1, 1, 2], [1, 1, 2]),
        ([0.25, 1, 0.5], [0.25, 1.0, 0.5]),
        (["0,25", "1,0", "none"], [0.25, 1.0, None]),
        (["80%", "25 %", "-"], [0.8, 0.25, None]),
        (["8/10", "5/10"], [0.8, 0.5]),
        (["★★★★☆", "⭐"], [4, 1]),
        (["4 stars", "1 star"], [4, 1]),
    ],
)
def test_what_ratings_mean_is_decided_from_all_of_them(
    values: list[Any], found: list[Any], tmp_path: Path
) -> None:
    assert rated(tmp_path, values) == found


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([10, 7, 1], "scale unknown: numbers from 1 to 10"),
        ([85, 40], "scale unknown: numbers from 40 to 85"),
        ([4.5, 1, 3], "scale unknown: numbers from 1 to 4.5"),
        ([0, 3, 5], "scale unknown: numbers from 0 to 5"),
        ([-0.5, 0.5], "scale unknown"),
        ([1, 1, 1], "thumb up or one star"),
        (["spam", "ham"], "expected ratings, found ham, spam"),
        (["up", 3], "expected ratings"),
        ([["a"], "up"], "expected ratings"),
        ([10**400, 1], "expected ratings"),
    ],
)
def test_a_scale_nobody_stated_is_refused_with_the_map_that_states_it(
    values: list[Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatRefused, match=reason) as refused:
        rated(tmp_path, values)
    assert "--map" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "map", "found"),
    [
        ([85, 40, 0], "rating=rating:0..100", [0.85, 0.4, 0.0]),
        ([10, 1], "rating=rating:1..10", [1.0, 0.0]),
        ([1, 5], "rating=rating:5..1", [1.0, 0.0]),
        (["spam", "ham", None], "rating=rating:ham/spam", ["down", "up", None]),
        ([2, 1], "rating=rating:1/2", ["down", "up"]),
        ([1, 1], "stars=rating", [1, 1]),
        ([1, 1], "thumb=rating", ["up", "up"]),
        ([0, 1], "score=rating", [0.0, 1.0]),
    ],
)
def test_a_map_states_scale_words_or_kind(
    values: list[Any], map: str, found: list[Any], tmp_path: Path
) -> None:
    path = written(
        tmp_path / "r.jsonl",
        [{"prompt": f"q{i}", "response": "a", "rating": v} for i, v in enumerate(values)],
    )
    got = []
    for record in formats.read(path, columns=ColumnMap.parse(map)):
        assert isinstance(record, ImportedDecision)
        rating = record.ratings[0] if record.ratings else ImportedRating()
        got.append(rating.score if rating.score is not None else rating.stars or rating.thumb or None)
    assert got == found


def test_a_number_outside_the_scale_said_is_a_refused_row(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [{"prompt": "q", "response": "a", "rating": v} for v in (50, 101)])
    good, bad = formats.read(path, columns=ColumnMap.parse("rating=rating:0..100"))
    assert isinstance(good, ImportedDecision)
    assert isinstance(bad, RowRefused)
    assert "expected a number from 0 to 100, found 101" in bad.reason


def test_two_verdicts_of_different_kinds_are_both_read_and_of_one_kind_refused(tmp_path: Path) -> None:
    row = {
        "prompt": "q",
        "response": "a",
        "thumb": "up",
        "stars": 4,
        "score": 0.5,
        "correction": "b",
        "tags": "x, y",
        "comment": "c",
    }
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]))
    assert isinstance(record, ImportedDecision)
    assert record.ratings == (
        ImportedRating(thumb="up", stars=4, score=0.5, correction="b", tags=("x", "y"), notes="c"),
    )
    with pytest.raises(FormatRefused, match="vote: looks like"):
        list(formats.read(written(tmp_path / "r.jsonl", [{**row, "vote": "down"}])))


# --- Which of two -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0, 1], ["0", "1"], [True, False], [1, 0]])
def test_0_and_1_do_not_say_which_was_preferred(values: list[Any], tmp_path: Path) -> None:
    path = written(
        tmp_path / "r.jsonl",
        [{"prompt": "q", "response_a": "x", "response_b": "y", "winner": v} for v in values],
    )
    with pytest.raises(FormatRefused, match=r"winner: 0 and 1.*preferred=winner:0/1"):
        list(formats.read(path))


def test_a_map_says_what_0_and_1_are(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r.jsonl",
        [{"prompt": "q", "response_a": "x", "response_b": "y", "winner": v} for v in (0, 1, 2)],
    )
    found = list(formats.read(path, columns=ColumnMap.parse("preferred=winner:1/0/2")))
    assert [r.preference for r in found if isinstance(r, ImportedComparison)] == ["right", "left", "tie"]


def test_two_responses_without_a_preference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match="no column that says which was preferred"):
        list(
            formats.read(
                written(tmp_path / "r.jsonl", [{"prompt": "q", "response_a": "x", "response_b": "y"}])
            )
        )
