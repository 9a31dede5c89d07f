"""Agent `widgets`: which widget answers a dashboard question best, for this screen and this much data?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import JsonObject, Scenario, State, World
from rl.agents.sketches import widget_drawing
from rl.agents.worlds import TwoKinds, draw_any, two_of_each

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
    entries: Iterable[Mapping[str, Any]], all_scenarios: Mapping[str, State] | Iterable[Scenario]
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
