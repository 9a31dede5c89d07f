"""Widgets that look something up, show a state or a place. Compact ones are small, rich ones fill the screen."""

from __future__ import annotations

from rl.agents.canvas import Canvas, short
from rl.agents.widgets.drawers import SMALL, change_text, draws, panel
from rl.agents.widgets.figures import DrawingFigures

STATE_WORDS = ("fine", "watch", "down")
STATE_CLASSES = ("good", "warn", "bad")

# --- Look up ------------------------------------------------------------------------------------------------


@draws("number_card")
def number_card(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 86, "number card")
    canvas.text(SMALL / 2, 58, figures.value, "t strong", size=40, anchor="middle")
    return canvas


@draws("kpi_tile")
def kpi_tile(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 104, "KPI tile")
    words, css = change_text(figures)
    canvas.text(16, 28, figures.names[0], "dim", size=12)
    canvas.text(16, 64, figures.value, "t strong", size=30)
    canvas.text(16, 90, f"{words} on before", f"t {css}-ink", size=12)
    return canvas


@draws("caption")
def caption(figures: DrawingFigures) -> Canvas:
    canvas = Canvas(SMALL, 40, "caption")
    canvas.text(0, 26, f"It is {figures.value}.", "t", size=18)
    return canvas


@draws("record_sheet")
def record_sheet(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 216, "record sheet")
    canvas.text(16, 30, figures.names[0], "t strong", size=16)
    words, _ = change_text(figures)
    rows = (
        ("total", figures.value), ("largest", f"{figures.amounts[0]:,}"), ("smallest", f"{figures.amounts[-1]:,}"),
        ("mean", f"{sum(figures.amounts) // 5:,}"), ("on before", words), ("readings", figures.rows),
    )  # fmt: skip
    for index, (name, value) in enumerate(rows):
        y = 60 + index * 27
        canvas.line(16, y - 18, width - 16, y - 18)
        canvas.text(16, y, name, "dim", size=12)
        canvas.text(width - 16, y, value, "t", size=13, anchor="end")
    return canvas


@draws("data_grid")
def data_grid(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 220, "data grid")
    columns = 4 if width < 360 else 7
    cell = (width - 44) / columns
    canvas.rect(1, 1, width - 2, 24, "head", round=7)
    for column in range(columns):
        canvas.text(44 + (column + 0.5) * cell, 17, "ABCDEFG"[column], "dim strong", size=11, anchor="middle")
        canvas.line(44 + column * cell, 25, 44 + column * cell, 196)
    for row in range(7):
        y = 42 + row * 24
        canvas.text(34, y, str(row + 1), "dim", size=11, anchor="end")
        canvas.line(1, y + 7, width - 1, y + 7)
        for column in range(columns):
            value = (
                figures.series[(row * columns + column) % figures.points] * figures.amounts[column % 5] / 100
            )
            canvas.text(38 + (column + 1) * cell, y, f"{value:,.0f}", "t", size=11, anchor="end")
    canvas.text(16, 212, f"rows 1 to 7 of {figures.rows}", "dim", size=11)
    return canvas


# --- Status -------------------------------------------------------------------------------------------------


@draws("traffic_light")
def traffic_light(figures: DrawingFigures) -> Canvas:
    canvas = Canvas(86, 150, "traffic light")
    canvas.rect(15, 4, 56, 142, "case", round=16)
    worst = figures.states[0]
    for index, lamp in enumerate((2, 1, 0)):
        canvas.circle(43, 30 + index * 45, 17, STATE_CLASSES[lamp] if lamp == worst else "lamp-off")
    return canvas


@draws("badge")
def badge(figures: DrawingFigures) -> Canvas:
    canvas = Canvas(120, 44, "badge")
    state = figures.states[0]
    canvas.rect(1, 6, 112, 32, STATE_CLASSES[state], round=16)
    canvas.text(57, 27, STATE_WORDS[state], "on-1 strong", size=14, anchor="middle")
    return canvas


@draws("gauge")
def gauge(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 140, "gauge")
    share = figures.series[-1] / 100
    canvas.path("M35 112 A80 80 0 0 1 195 112", "dial")
    for start, end, css in ((0.0, 0.6, "good"), (0.6, 0.85, "warn"), (0.85, 1.0, "bad")):
        canvas.slice(115, 112, 80, start / 2 - 0.25, end / 2 - 0.25, css, hole=62)
    # the needle is a slice too thin to see as one
    canvas.slice(115, 112, 74, share / 2 - 0.256, share / 2 - 0.244, "needle")
    canvas.circle(115, 112, 6, "needle")
    canvas.text(115, 134, f"{100 * share:.0f} of 100", "dim", size=11, anchor="middle")
    return canvas


def _events(figures: DrawingFigures, label: str, *, only_bad: bool) -> Canvas:
    width = figures.width
    states = [state for state in figures.states if state or not only_bad][:5]
    canvas = panel(width, 34 + 34 * max(1, len(states)), label)
    for index, state in enumerate(states):
        y = 32 + index * 34
        name = figures.names[(index * 3) % 5]
        words = ("is back to normal", "is slower than usual", "does not answer")[state]
        canvas.circle(24, y - 4, 7, STATE_CLASSES[state])
        canvas.text(42, y, short(f"{name} {words}", (width - 110) // 7), "t", size=12)
        canvas.text(width - 16, y, f"{3 + index * 7} min ago", "dim", size=11, anchor="end")
        canvas.line(16, y + 14, width - 16, y + 14)
    if not states:
        canvas.text(width / 2, 40, "Nothing to report", "dim", size=13, anchor="middle")
    return canvas


@draws("alert_list")
def alert_list(figures: DrawingFigures) -> Canvas:
    return _events(figures, "alert list", only_bad=True)


@draws("event_log")
def event_log(figures: DrawingFigures) -> Canvas:
    return _events(figures, "event log", only_bad=False)


@draws("status_grid")
def status_grid(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 190, "status grid")
    columns = 6 if width < 360 else 8
    side = (width - 24) / columns
    rows = 24 // columns
    high = 150 / rows
    for index, state in enumerate(figures.states):
        x, y = 12 + (index % columns) * side, 12 + (index // columns) * high
        canvas.rect(x + 2, y + 2, side - 4, high - 4, STATE_CLASSES[state])
    bad = sum(state > 0 for state in figures.states)
    canvas.text(14, 180, f"{24 - bad} fine, {bad} to look at", "dim", size=11)
    return canvas


# --- Where --------------------------------------------------------------------------------------------------

LAND = (
    "M20 60 Q60 14 120 34 T230 24 Q290 30 330 70 T420 90 Q452 130 410 168 T300 182 Q230 206 170 178 T60 170 "
    "Q8 130 20 60 Z"
)
SPOTS = ((92, 74), (210, 60), (320, 112), (160, 138), (384, 140))


@draws("map")
def map_view(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 220, "map")
    canvas.path(_scale_path(LAND, (width - 20) / 450), "land")
    for index, (x, y) in enumerate(SPOTS):
        at = 10 + x * (width - 20) / 450
        canvas.circle(at, y + 6, 6 + 34 * figures.shares[index], "d-1 see-through")
        if width > 360 or index < 3:
            canvas.text(at, y + 10, figures.places[index], "t strong", size=11, anchor="middle")
    return canvas


def _scale_path(path: str, factor: float) -> str:
    """A path of x y pairs with x scaled."""
    words: list[str] = []
    axis = 0
    for word in path.split():
        letter, digits = ("", word) if word[0].isdigit() else (word[0], word[1:])
        if not digits:
            words.append(letter)
            continue
        value = float(digits)
        words.append(letter + f"{10 + value * factor if axis == 0 else value + 6:.1f}")
        axis = 1 - axis
    return " ".join(words)


@draws("heatmap")
def heatmap(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 210, "heatmap")
    cell = (width - 96) / 12
    for row, place in enumerate(figures.places):
        y = 16 + row * 34
        canvas.text(14, y + 20, short(place, 9), "t", size=12)
        for column in range(12):
            heat = figures.heat[row * 12 + column]
            canvas.rect(82 + column * cell, y, cell - 2, 30, f"heat-{heat}", round=2)
    canvas.text(82, 202, "then", "dim", size=11)
    canvas.text(width - 14, 202, "now", "dim", size=11, anchor="end")
    return canvas


@draws("pin_card")
def pin_card(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 84, "pin card")
    canvas.path("M40 64 C22 44 22 20 40 20 C58 20 58 44 40 64 Z", "bad")
    canvas.circle(40, 36, 6, "panel")
    canvas.text(76, 38, figures.places[0], "t strong", size=16)
    canvas.text(76, 60, f"{figures.amounts[0]:,} there", "dim", size=12)
    return canvas


@draws("region_list")
def region_list(figures: DrawingFigures) -> Canvas:
    canvas = panel(SMALL, 150, "region list")
    for index, place in enumerate(figures.places):
        canvas.text(16, 28 + index * 27, place, "t", size=13)
        canvas.text(SMALL - 14, 28 + index * 27, f"{figures.amounts[index]:,}", "t", size=13, anchor="end")
    return canvas


@draws("site_grid")
def site_grid(figures: DrawingFigures) -> Canvas:
    width = figures.width
    canvas = panel(width, 190, "site grid")
    columns = 2 if width < 360 else 3
    wide = (width - 20) / columns
    cells = 4 if columns == 2 else 6
    for index in range(cells):
        x, y = 10 + (index % columns) * wide, 10 + (index // columns) * 87
        canvas.rect(x + 4, y + 4, wide - 8, 78, "soft", round=6)
        name = (*figures.places, "Riverside")[index]
        canvas.text(x + 16, y + 28, short(name, 12), "dim", size=12)
        canvas.text(x + 16, y + 58, f"{(*figures.amounts, 12)[index]:,}", "t strong", size=20)
    return canvas
