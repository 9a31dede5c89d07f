"""Pictures of what an agent chose, drawn on the server as SVG: a rater judges what a person would see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.safestring import SafeString

from feedback.drawings import charts, panels  # noqa: F401  (they enter their widgets into DRAWERS)
from feedback.drawings.figures import Figures
from feedback.drawings.fixtures import fixture_drawing
from feedback.drawings.registry import DRAWERS

__all__ = ["fixture_drawing", "widget_drawing"]


def widget_drawing(name: str, *, question: str, context: Mapping[str, Any], seed: str) -> SafeString | None:
    """The widget as SVG with made-up figures, or None for one we have no drawing of.

    context: "on" (screen) and "points" (readings) decide size and density. seed: the same one, the same figures.
    """
    key = name.strip().lower().replace("-", "_").replace(" ", "_")
    drawer = DRAWERS.get(key) or DRAWERS.get(f"{key}_chart")
    return None if drawer is None else drawer(Figures(question, context, seed)).svg()
