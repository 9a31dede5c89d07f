"""Registry of widget drawings by name, and the panels and words they share."""

from __future__ import annotations

from collections.abc import Callable

from rl.agents.canvas import Canvas
from rl.agents.widgets.figures import DrawingFigures

Drawer = Callable[[DrawingFigures], Canvas]
DRAWERS: dict[str, Drawer] = {}
"""Widget name -> the function that draws it."""

SMALL = 230
"""Width of a compact widget in pixels."""


def draws(*names: str) -> Callable[[Drawer], Drawer]:
    def register(drawer: Drawer) -> Drawer:
        DRAWERS.update(dict.fromkeys(names, drawer))
        return drawer

    return register


def panel(width: int, height: int, label: str) -> Canvas:
    canvas = Canvas(width, height, label)
    canvas.rect(0.5, 0.5, width - 1, height - 1, "panel", round=8)
    return canvas


def change_text(figures: DrawingFigures) -> tuple[str, str]:
    """The change of the series as words, and whether it is a good or a bad one."""
    up = figures.change >= 0
    return ("▲" if up else "▼") + f" {abs(figures.change):.0f} %", "good" if up else "bad"
