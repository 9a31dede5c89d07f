"""Sketches of the widgets that the agent `widgets` chooses among: seven shapes, with made-up figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from rl.agents.canvas import Canvas

SCREEN_WIDTHS = {"phone": 280, "tablet": 400, "desktop": 540, "wall screen": 620}
"""Width in pixels of a rich widget on each screen."""

DEFAULT_WIDTH, SMALL = 480, 230
"""Width in pixels of a rich widget on an unknown screen, and of a compact widget."""

MAX_POINTS = 400
"""Most readings drawn: more cannot be told apart on a page."""

Shape = Callable[[Canvas, list[float], list[float]], None]
"""Draws a series in (0, 100), or five shares (largest first, sum 1), on the canvas."""


def widget_drawing(
    choice: str, *, asked: str = "", description: str = "", context: Mapping[str, Any], seed: str
) -> str | None:
    """The widget as SVG, or None for a name without a sketch.

    context: "on" (the screen) sets the width, "points" (readings) the density. The same seed gives the same figures.
    """
    key = choice.strip().lower().replace("-", "_").replace(" ", "_")
    found = SKETCHES.get(key) or SKETCHES.get(f"{key}_chart")
    if found is None:
        return None
    shape, width, height = found
    canvas = Canvas(
        width or SCREEN_WIDTHS.get(str(context.get("on")), DEFAULT_WIDTH), height, key.replace("_", " ")
    )
    canvas.rect(0.5, 0.5, canvas.width - 1, height - 1, "panel", round=8)
    shape(canvas, _series(seed, _points(context)), _shares(seed))
    return canvas.svg()


def _points(context: Mapping[str, Any]) -> int:
    given = context.get("points")
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given != given:
        return 24
    return int(min(max(given, 2), MAX_POINTS))


def _series(seed: str, points: int) -> list[float]:
    random = Random(f"{seed}/series")
    level, drift = random.uniform(30, 60), random.uniform(-25, 35) / points
    values = []
    for _ in range(points):
        level = min(94.0, max(6.0, level + drift + random.gauss(0, 9 if points <= 24 else 4)))
        values.append(level)
    return values


def _shares(seed: str) -> list[float]:
    random = Random(f"{seed}/shares")
    raw = sorted((random.uniform(0.4, 3.0) for _ in range(5)), reverse=True)
    return [value / sum(raw) for value in raw]


def _amount(share: float) -> str:
    return f"{round(4000 * share):,}"


def curve(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    bottom, step = canvas.height - 16, (canvas.width - 32) / (len(series) - 1)
    canvas.line(16, bottom, canvas.width - 16, bottom, "axis")
    canvas.curve([(16 + i * step, bottom - v / 100 * (bottom - 12)) for i, v in enumerate(series)], "curve")


def bars(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    slot, floor = (canvas.width - 32) / len(shares), canvas.height - 28
    canvas.line(16, floor, canvas.width - 16, floor, "axis")
    for index, share in enumerate(shares):
        x, height = 16 + index * slot, (floor - 30) * share / shares[0]
        canvas.rect(x + slot * 0.18, floor - height, slot * 0.64, height, "d-1")
        canvas.text(x + slot / 2, floor - height - 6, _amount(share), "t", size=11, anchor="middle")
        canvas.text(x + slot / 2, floor + 18, "ABCDE"[index], "dim", size=11, anchor="middle")


def pie(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    middle, radius, start = canvas.height / 2, canvas.height / 2 - 14, 0.0
    for index, share in enumerate(shares):
        canvas.slice(middle, middle, radius, start, start + share, f"d-{index + 1} piece")
        start += share
        y = middle + (index - 2) * (canvas.height - 24) / 5 + 4
        canvas.rect(canvas.height + 4, y - 10, 12, 12, f"d-{index + 1}")
        canvas.text(canvas.height + 24, y, f"{'ABCDE'[index]}  {100 * share:.0f} %", "t", size=12)


def rows(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    for index in range(canvas.height // 32):
        y = 26 + index * 32
        canvas.text(16, y, f"Group {'ABCDEFG'[index]}", "t", size=13)
        canvas.text(canvas.width - 16, y, _amount(shares[index % 5]), "t strong", size=13, anchor="end")
        canvas.line(16, y + 10, canvas.width - 16, y + 10)


def number(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    change = 100 * (series[-1] - series[0]) / series[0]
    canvas.text(16, 50, _amount(series[-1] / 100), "t strong", size=32)
    canvas.text(16, 76, f"{'▲' if change >= 0 else '▼'} {abs(change):.0f} % on before", "dim", size=12)


def cells(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    wide, high = (canvas.width - 24) / 6, (canvas.height - 24) / 4
    for index in range(24):
        x, y = 12 + index % 6 * wide, 12 + index // 6 * high
        level = round(series[index % len(series)]) % 5 + 1
        canvas.rect(x + 2, y + 2, wide - 4, high - 4, f"d-{level} see-through")


def lamp(canvas: Canvas, series: list[float], shares: list[float]) -> None:
    lit = ("good", "warn", "bad")[round(series[0]) % 3]
    canvas.circle(canvas.width / 2, canvas.height / 2, canvas.height / 3, lit)


SKETCHES: dict[str, tuple[Shape, int, int]] = {
    name: (shape, width, height)
    for shape, width, height, names in (
        (curve, 0, 220, "line_chart area_chart timeline"),
        (curve, SMALL, 64, "sparkline"),
        (bars, 0, 220, "bar_chart dot_plot"),
        (bars, SMALL, 130, "podium bullet_bar split_bar"),
        (pie, 0, 150, "pie_chart donut donut_chart treemap"),
        (pie, SMALL, 112, "top_slice"),
        (rows, 0, 210, "table record_sheet data_grid alert_list event_log"),
        (rows, SMALL, 108, "ranking top_places region_list"),
        (number, SMALL, 92, "delta_tile percent_tile number_card kpi_tile caption pin_card arrow"),
        (cells, 0, 200, "map heatmap site_grid status_grid"),
        (lamp, SMALL, 92, "traffic_light badge gauge"),
    )
    for name in names.split()
}
"""Widget -> its shape, its width in pixels (0: as wide as the screen) and its height in pixels."""
