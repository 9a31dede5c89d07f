"""Widgets that show a trend, a comparison or a share. Compact ones are small, rich ones fill the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rl.agents.canvas import Canvas, short
from rl.agents.widgets.drawers import SMALL, change_text, draws, panel
from rl.agents.widgets.figures import DrawingFigures

# --- Trend --------------------------------------------------------------------------------------------------


def _plot(figures: DrawingFigures, label: str) -> tuple[Canvas, list[tuple[float, float]], float]:
    """A panel with axes; the series in its coordinates, and the height of the axis."""
    width, height = figures.width, 220
    canvas = panel(width, height, label)
    left, right, top, bottom = 40.0, width - 14.0, 18.0, height - 30.0
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - share * (bottom - top)
        canvas.line(left, y, right, y)
        canvas.text(left - 8, y + 4, f"{share * 100:.0f}", "dim", size=11, anchor="end")
    canvas.text(left, height - 10, "then", "dim", size=11)
    canvas.text(right, height - 10, f"now · {figures.rows} readings", "dim", size=11, anchor="end")
    step = (right - left) / (figures.points - 1)
    points = [(left + i * step, bottom - v / 100 * (bottom - top)) for i, v in enumerate(figures.series)]
    return canvas, points, bottom


@draws("line_chart")
def line_chart(figures: DrawingFigures) -> Canvas:
    canvas, points, _ = _plot(figures, "line chart")
    canvas.curve(points, "curve")
    if figures.points <= 24:
        for x, y in points:
            canvas.circle(x, y, 3.5, "d-1")
    return canvas


@draws("area_chart")
def area_chart(figures: DrawingFigures) -> Canvas:
    canvas, points, bottom = _plot(figures, "area chart")
    canvas.curve([(points[0][0], bottom), *points, (points[-1][0], bottom)], "soft")
    canvas.curve(points, "curve")
    return canvas


@draws("timeline")
def timeline(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 130, "timeline")
    canvas.line(24, 70, width - 24, 70, "axis")
    shown = min(figures.points, 60)
    step = (width - 48) / max(1, shown - 1)
    stride = max(1, figures.points // shown)
    for index in range(shown):
        value = figures.series[min(index * stride, figures.points - 1)]
        canvas.circle(24 + index * step, 70, 3 + value / 16, "d-1 see-through")
    canvas.text(24, 112, "then", "dim", size=11)
    canvas.text(width - 24, 112, "now", "dim", size=11, anchor="end")
    canvas.text(width / 2, 24, f"{figures.rows} readings, larger is more", "dim", size=11, anchor="middle")
    return canvas


@draws("sparkline")
def sparkline(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 64, "sparkline")
    step = 140 / (figures.points - 1)
    points = [(14 + i * step, 52 - v * 0.4) for i, v in enumerate(figures.series)]
    canvas.curve(points, "curve")
    canvas.circle(*points[-1], 3, "d-1")
    canvas.text(SMALL - 14, 38, f"{figures.series[-1]:.0f}", "t strong", size=18, anchor="end")
    return canvas


@draws("delta_tile")
def delta_tile(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 92, "delta tile")
    words, css = change_text(figures)
    canvas.text(16, 50, words, f"t strong {css}-ink", size=30)
    canvas.text(16, 76, f"{figures.series[0]:.0f} then, {figures.series[-1]:.0f} now", "dim", size=12)
    return canvas


@draws("arrow")
def arrow(figures: DrawingFigures) -> Canvas:
    canvas = panel(92, 92, "arrow")
    up = figures.change >= 0
    canvas.path(
        "M46 20 L70 48 L54 48 L54 72 L38 72 L38 48 L22 48 Z"
        if up
        else "M46 72 L70 44 L54 44 L54 20 L38 20 L38 44 L22 44 Z",
        "good" if up else "bad",
    )
    return canvas


# --- Compare ------------------------------------------------------------------------------------------------


@draws("bar_chart")
def bar_chart(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 220, "bar chart")
    slot = (width - 32) / 5
    canvas.line(16, 184, width - 16, 184, "axis")
    for index, (name, amount) in enumerate(zip(figures.names, figures.amounts, strict=True)):
        height = 140 * amount / figures.amounts[0]
        x = 16 + index * slot + slot * 0.18
        canvas.rect(x, 184 - height, slot * 0.64, height, "d-1")
        canvas.text(x + slot * 0.32, 176 - height, f"{amount:,}", "t", size=11, anchor="middle")
        canvas.text(x + slot * 0.32, 202, name if width > 320 else name[-1], "dim", size=11, anchor="middle")
    return canvas


@draws("dot_plot")
def dot_plot(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 190, "dot plot")
    for index, (name, amount) in enumerate(zip(figures.names, figures.amounts, strict=True)):
        y = 32 + index * 32
        reach = (width - 150) * amount / figures.amounts[0]
        canvas.text(16, y + 4, short(name, 11), "t", size=12)
        canvas.line(100, y, width - 16, y)
        canvas.circle(100 + reach, y, 6, "d-1")
    return canvas


@draws("table")
def table(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 220, "table")
    canvas.rect(1, 1, width - 2, 32, "head", round=7)
    columns = (16, width * 0.52, width * 0.76, width - 16)
    for x, words, anchor in (
        (columns[0], "name", "start"),
        (columns[1], "amount", "end"),
        (columns[2], "share", "end"),
        (columns[3], "change", "end"),
    ):
        canvas.text(x, 22, words, "dim strong", size=11, anchor=anchor)
    rows = zip(figures.names, figures.amounts, figures.shares, figures.series * 5, strict=False)
    for index, (name, amount, share, change) in enumerate(rows):
        y = 54 + index * 29
        canvas.text(columns[0], y, name, "t", size=12)
        canvas.text(columns[1], y, f"{amount:,}", "t", size=12, anchor="end")
        canvas.text(columns[2], y, f"{100 * share:.0f} %", "t", size=12, anchor="end")
        canvas.text(columns[3], y, f"{change / 5 - 9:+.1f} %", "t", size=12, anchor="end")
        canvas.line(16, y + 10, width - 16, y + 10)
    canvas.text(16, 206, f"1 to 5 of {figures.rows} rows", "dim", size=11)
    return canvas


def _top_three(figures: DrawingFigures, label: str, names: Sequence[str]) -> Canvas:
    canvas = panel(SMALL, 112, label)
    for index, name in enumerate(names[:3]):
        y = 32 + index * 30
        canvas.circle(26, y - 4, 11, "d-1" if index == 0 else "soft")
        canvas.text(26, y, str(index + 1), "on-1" if index == 0 else "t", size=12, anchor="middle")
        canvas.text(48, y, name, "t", size=13)
        canvas.text(SMALL - 14, y, f"{figures.amounts[index]:,}", "t strong", size=13, anchor="end")
    return canvas


@draws("ranking")
def ranking(figures: DrawingFigures) -> Canvas:
    return _top_three(figures, "ranking", figures.names)


@draws("top_places")
def top_places(figures: DrawingFigures) -> Canvas:
    return _top_three(figures, "top places", figures.places)


@draws("podium")
def podium(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 140, "podium")
    for place, x, height in ((1, 86, 74), (2, 24, 52), (3, 148, 36)):
        canvas.rect(x, 122 - height, 58, height, f"d-{place}")
        canvas.text(x + 29, 122 - height + 22, str(place), "on-1", size=16, anchor="middle")
        canvas.text(x + 29, 112 - height, short(figures.names[place - 1], 9), "t", size=11, anchor="middle")
    return canvas


@draws("bullet_bar")
def bullet_bar(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 84, "bullet bar")
    best, second = figures.amounts[0], figures.amounts[1]
    canvas.text(14, 26, figures.names[0], "t", size=13)
    canvas.text(SMALL - 14, 26, f"{best:,}", "t strong", size=13, anchor="end")
    canvas.rect(14, 38, SMALL - 28, 14, "soft")
    canvas.rect(14, 38, (SMALL - 28) * 0.86, 14, "d-1")
    mark = 14 + (SMALL - 28) * 0.86 * second / best
    canvas.line(mark, 33, mark, 57, "mark")
    canvas.text(14, 72, f"mark: {figures.names[1]}, {second:,}", "dim", size=11)
    return canvas


# --- Share --------------------------------------------------------------------------------------------------


def _pie(figures: DrawingFigures, label: str, hole: float) -> Canvas:
    width = figures.width
    canvas = panel(width, 210, label)
    start = 0.0
    middle = 105.0 if width < 360 else width * 0.3
    for index, share in enumerate(figures.shares):
        canvas.slice(middle, 105, 82, start, start + share, f"d-{index + 1} piece", hole=hole)
        start += share
        x, y = middle + 104, 42 + index * 30
        canvas.rect(x, y - 10, 12, 12, f"d-{index + 1}")
        label_text = f"{100 * share:.0f} %" if width < 360 else f"{figures.names[index]}  {100 * share:.0f} %"
        canvas.text(x + 20, y, label_text, "t", size=12)
    return canvas


@draws("pie_chart")
def pie_chart(figures: DrawingFigures) -> Canvas:
    return _pie(figures, "pie chart", 0)


@draws("donut", "donut_chart")
def donut(figures: DrawingFigures) -> Canvas:
    return _pie(figures, "donut", 48)


@draws("treemap")
def treemap(figures: DrawingFigures) -> Canvas:
    width, height = figures.width, 210
    canvas = panel(width, height, "treemap")
    x, y, wide, high, left = 8.0, 8.0, width - 16.0, height - 16.0, 1.0
    for index, share in enumerate(figures.shares):
        part = share / left if index < 4 else 1.0
        across = index % 2 == 0
        cell_wide, cell_high = (wide * part, high) if across else (wide, high * part)
        canvas.rect(x, y, cell_wide - 3, cell_high - 3, f"d-{index + 1}")
        if cell_wide > 44 and cell_high > 20:
            words = f"{figures.names[index]} {100 * share:.0f} %"
            if len(words) * 6.4 > cell_wide - 16:
                words = f"{figures.names[index][-1]} {100 * share:.0f} %"
            canvas.text(x + 8, y + 18, words, "on-1", size=11)
        if across:
            x, wide = x + cell_wide, wide - cell_wide
        else:
            y, high = y + cell_high, high - cell_high
        left -= share
    return canvas


@draws("percent_tile")
def percent_tile(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 92, "percent tile")
    canvas.text(16, 50, f"{100 * figures.shares[0]:.0f} %", "t strong", size=32)
    canvas.text(16, 76, f"{figures.names[0]}, the largest", "dim", size=12)
    return canvas


@draws("top_slice")
def top_slice(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 92, "top slice")
    share = figures.shares[0]
    canvas.slice(48, 46, 30, 0, share, "d-1")
    canvas.slice(48, 46, 30, share, 1, "soft")
    canvas.text(96, 42, figures.names[0], "t", size=13)
    canvas.text(96, 66, f"{100 * share:.0f} %", "t strong", size=20)
    return canvas


@draws("split_bar")
def split_bar(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 72, "split bar")
    x = 14.0
    for index, share in enumerate(figures.shares):
        wide = (SMALL - 28) * share
        canvas.rect(x, 18, wide - 2, 18, f"d-{index + 1}", round=2)
        if wide > 26:
            canvas.text(x + wide / 2, 54, figures.names[index][-1], "dim", size=11, anchor="middle")
        x += wide
    return canvas
