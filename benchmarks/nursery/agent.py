"""The nursery's agent: beds, waterings, what its gardeners want, and the logged decisions that a newcomer brings."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

AGENT = "nursery"
PLANTS = ("Fern", "Lavender", "Tomato", "Rose", "Basil", "Hydrangea", "Thyme", "Maple")
PLACES = ("glasshouse", "shade tunnel", "open field")
SOILS = ("dry", "damp", "wet")
FORECASTS = ("sun", "rain")
OPTIONS = ("soak", "mist", "rest")
SYSTEM = "Pick one listed watering for the bed. Answer in JSON."


def best_watering(soil: str, forecast: str) -> str:
    """The watering that the gardeners want; it depends on both."""
    if soil == "wet" or (soil == "damp" and forecast == "rain"):
        return "rest"
    return "soak" if soil == "dry" and forecast == "sun" else "mist"


def question(plant: str, place: str, soil: str, forecast: str, options: tuple[str, ...]) -> str:
    return "\n".join(
        [f"bed: {plant}, {place}", f"soil: {soil}", f"forecast: {forecast}", "waterings:", *options]
    )


def reply(option: str) -> str:
    return json.dumps({"watering": option})


def rows(rated: int, unrated: int) -> list[dict[str, Any]]:
    """Logged decisions of an app that always mists a little too much, `rated` of them with a thumb or a correction."""
    draw = random.Random(7)
    beds = list(itertools.product(PLANTS, PLACES, SOILS, FORECASTS))
    draw.shuffle(beds)
    found = []
    for number, (plant, place, soil, forecast) in enumerate(
        itertools.islice(itertools.cycle(beds), rated + unrated)
    ):
        options = tuple(draw.sample(OPTIONS, len(OPTIONS)))
        answered = draw.choice(OPTIONS)
        right = best_watering(soil, forecast)
        row: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question(plant, place, soil, forecast, options)},
            ],
            "response": reply(answered),
        }
        if number < rated:
            row |= {"rater": "greta", "thumb": "up" if answered == right else "down"}
            if answered != right:
                row["correction"] = reply(right)
        found.append(row)
    return found


def data_lines(rated: int = 138, unrated: int = 12) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows(rated, unrated))
