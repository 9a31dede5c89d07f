"""Synthetic figures for a drawing: the same prompt always gets the same ones, so that its responses compare fairly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

SCREEN_WIDTHS = {"phone": 280, "tablet": 400, "desktop": 540, "wall screen": 620}
"""Pixels a widget may use on each screen, as drawn on the rating page."""

DEFAULT_WIDTH = 480
MAX_POINTS = 400
"""Readings drawn at most: more cannot be told apart on a page."""

TIME_WORDS = ("minute", "hour", "day", "week", "month", "quarter", "year")
PLACES = ("North", "Harbour", "Old Town", "Airport", "West", "Lakeside")


@dataclass(frozen=True)
class DrawingFigures:
    """Made-up figures of a drawing: nothing here was measured."""

    question: str
    context: Mapping[str, Any]
    seed: str

    @property
    def width(self) -> int:
        return SCREEN_WIDTHS.get(str(self.context.get("on")), DEFAULT_WIDTH)

    @property
    def points(self) -> int:
        """Number of readings, 2 to MAX_POINTS."""
        given = self.context.get("points")
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given != given:
            return 24
        return int(min(max(given, 2), MAX_POINTS))

    @property
    def rows(self) -> str:
        """Number of readings, in words for a caption."""
        given = self.context.get("points")
        return f"{given:,}" if isinstance(given, int) and not isinstance(given, bool) else str(self.points)

    @cached_property
    def series(self) -> list[float]:
        """`points` readings in (0, 100): a slow drift with a swing and some noise."""
        random = Random(f"{self.seed}/series")
        level, drift = random.uniform(30, 60), random.uniform(-25, 35) / self.points
        noise = 9 if self.points <= 24 else 4
        values = []
        for _ in range(self.points):
            level = min(94.0, max(6.0, level + drift + random.gauss(0, noise)))
            values.append(level)
        return values

    @cached_property
    def shares(self) -> list[float]:
        """Five shares, largest first; they sum to 1."""
        random = Random(f"{self.seed}/shares")
        raw = sorted((random.uniform(0.4, 3.0) for _ in range(5)), reverse=True)
        return [value / sum(raw) for value in raw]

    @cached_property
    def amounts(self) -> list[int]:
        """Five amounts, largest first."""
        total = Random(f"{self.seed}/total").randint(900, 9000)
        return [round(share * total) for share in self.shares]

    @cached_property
    def change(self) -> float:
        """Last reading against the first, in per cent."""
        return 100.0 * (self.series[-1] - self.series[0]) / self.series[0]

    @property
    def value(self) -> str:
        return f"{sum(self.amounts):,}"

    @cached_property
    def names(self) -> list[str]:
        """Five names of what the question compares: Team A, Site B, ..."""
        found = re.findall(r"\b(?:every|each|which|one|this|by) ([a-z]{3,12})\b", self.question)
        nouns = [word.removesuffix("s") for word in found if word.removesuffix("s") not in TIME_WORDS]
        noun = nouns[0].capitalize() if nouns else "Group"
        return [f"{noun} {letter}" for letter in "ABCDE"]

    @property
    def places(self) -> tuple[str, ...]:
        return PLACES[:5]

    @cached_property
    def heat(self) -> list[int]:
        """60 heats from 1 to 5: five rows of twelve, warmer in the rows of larger shares."""
        random = Random(f"{self.seed}/heat")
        rows = (share / self.shares[0] for share in self.shares)
        return [1 + min(4, int(5 * row * random.uniform(0.2, 1.1))) for row in rows for _ in range(12)]

    @cached_property
    def states(self) -> list[int]:
        """24 states, 0 good, 1 warning, 2 bad; mostly good."""
        random = Random(f"{self.seed}/states")
        return random.choices((0, 1, 2), weights=(14, 3, 2), k=24)
