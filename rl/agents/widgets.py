"""Agent `widgets`: which widget answers a dashboard question best, for this screen and this much data?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from random import Random

from rl.agents.base import JsonObject, Scenario, State, World
from rl.agents.worlds import TwoKinds, draw_any, two_of_each


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


# --- Sketches of widgets: seven shapes, with made-up figures ---

SCREEN_WIDTHS = {"phone": 280, "tablet": 400, "desktop": 540, "wall screen": 620}
"""Width in pixels of a rich widget on each screen."""

DEFAULT_WIDTH, SMALL = 480, 230
"""Width in pixels of a rich widget on an unknown screen, and of a compact widget."""

MAX_POINTS = 400
"""Most readings drawn: more cannot be told apart on a page."""

Shape = Callable[[Canvas, list[float], list[float]], None]
"""Draws a series in (0, 100), or five shares (largest first, sum 1), on the canvas."""


def widget_drawing(
    choice: str, *, asked: str = "", description: str = "", context: Mapping[str, object], seed: str
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


def _points(context: Mapping[str, object]) -> int:
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


SCREENS = ("phone", "tablet", "desktop", "wall screen")
POINTS = (4, 8, 12, 20, 240, 600, 1500, 4000)

# What each intent can sensibly be answered with: (compact widgets, rich widgets).
WIDGETS: dict[str, tuple[tuple[str, str, str], tuple[str, str, str]]] = {
    "trend": (("sparkline", "delta_tile", "arrow"), ("line_chart", "area_chart", "timeline")),
    "compare": (("ranking", "podium", "bullet_bar"), ("bar_chart", "table", "dot_plot")),
    "share": (("percent_tile", "split_bar", "top_slice"), ("pie_chart", "treemap", "donut")),
    "lookup": (("number_card", "kpi_tile", "caption"), ("record_sheet", "table", "data_grid")),
    "status": (("traffic_light", "badge", "gauge"), ("alert_list", "status_grid", "event_log")),
    "where": (("top_places", "pin_card", "region_list"), ("map", "heatmap", "site_grid")),
}

# The taste of one made-up team: per intent, the kind of widget it wants. Each kind is liked for half of the intents,
# so no rule by position, length or name gets all of them right: "table" is liked for compare, disliked for lookup.
TASTE: dict[str, str] = {
    "trend": "compact",
    "compare": "rich",
    "share": "compact",
    "lookup": "compact",
    "status": "rich",
    "where": "rich",
}

QUESTIONS: dict[str, tuple[str, ...]] = {
    "trend": (
        "how did {metric} change over {time}",
        "show the {metric} trend for {time}",
        "is {metric} going up over {time}",
        "how has {metric} moved in {time}",
    ),
    "compare": (
        "compare {metric} across every {group} for {time}",
        "which {group} has the most {metric} in {time}",
        "rank each {group} by {metric} for {time}",
        "is {metric} better in one {group} than another in {time}",
    ),
    "share": (
        "what share of {metric} is each {group} in {time}",
        "break {metric} down by {group} for {time}",
        "how is {metric} split by {group} in {time}",
        "what part of {metric} comes from each {group} in {time}",
    ),
    "lookup": (
        "what is the {metric} of this {group} for {time}",
        "give me the {metric} for {time}",
        "look up {metric} of the {group} in {time}",
        "what was {metric} in {time}",
    ),
    "status": (
        "is {metric} healthy in {time}",
        "any problems with {metric} in {time}",
        "status of {metric} for this {group} in {time}",
        "should I worry about {metric} in {time}",
    ),
    "where": (
        "where is {metric} highest in {time}",
        "show {metric} by region for {time}",
        "which places have the most {metric} in {time}",
        "where did {metric} come from in {time}",
    ),
}
METRICS = (
    "revenue",
    "latency",
    "pump pressure",
    "energy use",
    "open tickets",
    "error rate",
    "temperature",
    "stock level",
    "uptime",
    "cash flow",
    "orders",
    "queue depth",
)
GROUPS = ("team", "site", "product", "customer", "machine", "channel")
TIMES = ("the last day", "last week", "this month", "2025", "the last hour", "the past quarter")


@dataclass(frozen=True)
class Widgets(TwoKinds):
    """Chooses a widget for a dashboard question.

    State: "question": text; "widgets": names; "context": "on" (the screen) and "points" (the number of readings).
    Never shown: "intent", a key of WIDGETS, and "wanted", "compact" or "rich".
    Response: {"widget": "<name>"}.
    """

    def kinds(self, state: State) -> dict[str, Iterable[str]]:
        compact, rich = WIDGETS[state["intent"]]
        return {"compact": compact, "rich": rich}

    def draw(self, random: Random, intent: str) -> JsonObject:
        """Two compact and two rich widgets, all sensible for the question."""
        listed = two_of_each(random, *WIDGETS[intent])
        question = random.choice(QUESTIONS[intent]).format(
            metric=random.choice(METRICS), group=random.choice(GROUPS), time=random.choice(TIMES)
        )
        return {
            "question": question,
            "intent": intent,
            "context": {"on": random.choice(SCREENS), "points": random.choice(POINTS)},
            "widgets": listed,
        }


def build_widget_dpo_pairs(
    entries: Iterable[Mapping[str, object]], all_scenarios: Mapping[str, State] | Iterable[Scenario]
) -> list[JsonObject]:
    """Preference pairs from rated widgets: up over down within a scenario, see `ChoiceAgent.dpo_pairs`.

    entries: {"entry_id", "scenario": key, "widget", "rating": "up" | "down", "tags"?, "notes"?};
    all_scenarios: scenario key -> state, or a list of Scenario. Raises ValueError on an unknown scenario.
    """
    states = (
        dict(all_scenarios)
        if isinstance(all_scenarios, Mapping)
        else {scenario.key: scenario.state for scenario in all_scenarios}
    )

    def state_of(key: str) -> State:
        if key not in states:
            raise ValueError(f"scenario {key!r} is rated but not among the {len(states)} scenarios given")
        return states[key]

    return AGENT.dpo_pairs(entries, state_of)


def _situation_answer(state: JsonObject) -> None:
    """Compact on a phone, rich on a wall screen; between them rich from 240 readings on."""
    screen, points = state["context"]["on"], state["context"]["points"]
    rich = screen == "wall screen" or (screen != "phone" and points >= 240)
    state["wanted"] = "rich" if rich else "compact"


AGENT = Widgets(
    slug="widgets",
    title="Widgets",
    description="Chooses the widget that answers a dashboard question.",
    system_prompt="Pick one listed widget for the question. Answer in JSON.",
    suggested_tags=("too much detail", "too little detail", "hard to read", "wrong kind"),
    max_new_tokens=24,
    preview="widget",
    drawing=widget_drawing,
    asked_key="question",
    answer_key="widget",
    options_key="widgets",
    group_key="intent",
    taste=TASTE,
    scenarios_per_group=168,
    world=World(draw_any, _situation_answer),
)
