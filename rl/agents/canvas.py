"""Canvas for drawings of choices: SVG with escaped texts, and CSS classes instead of colours for dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def short(text: str, characters: int) -> str:
    """The text, cut with an ellipsis where it is longer."""
    return text if len(text) <= characters else text[: max(1, characters - 1)].rstrip() + "…"


class Canvas:
    """Collects SVG elements. Coordinates in pixels from the top left; classes `d-1` to `d-5` fill with the palette."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width = width
        self.height = height
        self.label = label
        self._parts: list[str] = []

    def _add(self, tag: str, css: str, body: str | None = None, **attributes: float | str) -> None:
        shown = "".join(
            f' {name.replace("_", "-")}="{escape(_number(value) if isinstance(value, (int, float)) else value)}"'
            for name, value in attributes.items()
        )
        end = "/>" if body is None else f">{escape(body)}</{tag}>"
        self._parts.append(f'<{tag} class="{escape(css)}"{shown}{end}')

    def text(
        self, x: float, y: float, words: str, css: str = "t", *, size: float = 13, anchor: str = "start"
    ) -> None:
        self._add("text", css, words, x=x, y=y, font_size=size, text_anchor=anchor)

    def rect(self, x: float, y: float, width: float, height: float, css: str, *, round: float = 3) -> None:
        self._add("rect", css, x=x, y=y, width=max(0.0, width), height=max(0.0, height), rx=round)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "rule") -> None:
        self._add("line", css, x1=x1, y1=y1, x2=x2, y2=y2)

    def circle(self, x: float, y: float, radius: float, css: str) -> None:
        self._add("circle", css, cx=x, cy=y, r=radius)

    def path(self, d: str, css: str) -> None:
        self._add("path", css, d=d)

    def curve(self, points: Sequence[tuple[float, float]], css: str) -> None:
        self.path("M" + " L".join(f"{_number(x)} {_number(y)}" for x, y in points), css)

    def slice(
        self, x: float, y: float, radius: float, start: float, end: float, css: str, *, hole: float = 0.0
    ) -> None:
        """A piece of a pie from share `start` to share `end`, clockwise from the top, both in [0, 1]."""

        def point(share: float, distance: float) -> str:
            angle = 2 * math.pi * share - math.pi / 2
            return f"{_number(x + distance * math.cos(angle))} {_number(y + distance * math.sin(angle))}"

        large = 1 if end - start > 0.5 else 0
        outer = f"M{point(start, radius)} A{radius} {radius} 0 {large} 1 {point(end, radius)}"
        inner = (
            f"L{point(end, hole)} A{hole} {hole} 0 {large} 0 {point(start, hole)}" if hole else f"L{x} {y}"
        )
        self.path(f"{outer} {inner} Z", css)

    def svg(self) -> str:
        """The drawing as one SVG element. Texts and attributes were escaped when they were added."""
        wide = " wide" if self.width > 400 else ""
        return (
            f'<svg class="drawing{wide}" role="img" aria-label="{escape(self.label)}" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}">{"".join(self._parts)}</svg>'
        )
