"""Drawing of a widget as a person would see it, as SVG: a rater judges the picture, not its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.agents.widgets import charts, panels  # noqa: F401  (they enter their widgets into DRAWERS)
from rl.agents.widgets.drawers import DRAWERS
from rl.agents.widgets.figures import DrawingFigures


def widget_drawing(
    choice: str, *, asked: str, description: str = "", context: Mapping[str, Any], seed: str
) -> str | None:
    """The widget as SVG with made-up figures, or None for one we have no drawing of.

    context: "on" (screen) and "points" (readings) decide size and density. seed: the same one, the same figures.
    """
    key = choice.strip().lower().replace("-", "_").replace(" ", "_")
    drawer = DRAWERS.get(key) or DRAWERS.get(f"{key}_chart")
    return None if drawer is None else drawer(DrawingFigures(asked, context, seed)).svg()
