"""Drawings of the built-in agents' choices, and drawings of agents in general."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from feedback.explorer.previews import agent_facts, preview_of
from rl.agents import AGENTS, get_agent
from rl.agents.canvas import Canvas
from rl.agents.sketches import widget_drawing
from rl.agents.template import TemplateAgent
from rl.agents.widgets import WIDGETS
from tests.support.rating_page import record, scenario

pytestmark = pytest.mark.django_db

ALL_WIDGETS = sorted({name for kinds in WIDGETS.values() for kind in kinds for name in kind})


def draw(name: str, seed: str = "a", **context: Any) -> str | None:
    return widget_drawing(name, asked="compare orders of every team", context=context, seed=seed)


@pytest.mark.parametrize("name", ALL_WIDGETS)
def test_every_widget_is_drawn_within_its_sheet(name: str) -> None:
    for on in ("phone", "wall screen"):
        for points in (4, 4000):
            svg = draw(name, on=on, points=points)
            assert svg is not None
            width = float(re.search(r'<svg[^>]* width="(\d+)"', svg)[1])  # type: ignore[index]
            xs = [float(x) for x in re.findall(r' (?:x|x1|x2|cx)="([-\d.]+)"', svg)]
            assert all(-1 <= x <= width + 1 for x in xs)
            assert "nan" not in svg
            assert "inf" not in svg


@pytest.mark.parametrize("points", [None, True, "many", float("nan"), float("inf"), -3, 10**9])
def test_odd_counts_of_readings_are_drawn(points: Any) -> None:
    assert draw("line_chart", points=points) is not None


def test_an_agent_draws_its_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drawing is what agents without code that have its preview are shown by, too."""
    asked: dict[str, Any] = {}

    def sketch(choice: str, **facts: Any) -> str:
        asked.update(facts, choice=choice)
        return "<svg><text>mine</text></svg>"

    monkeypatch.setitem(AGENTS, "widgets", replace(AGENTS["widgets"], drawing=sketch))
    monkeypatch.setitem(
        AGENTS, "plain", TemplateAgent(slug="plain", title="", description="", preview="widget")
    )
    assert agent_facts("plain").draw is sketch
    assert agent_facts("filer").draw is None
    decision = record(**scenario("widgets"))
    facts = agent_facts(decision.agent)
    preview = preview_of(decision, facts)
    assert preview.drawing == "<svg><text>mine</text></svg>"
    assert asked["choice"] == preview.choice
    assert asked["seed"] == decision.prompt_hash


def test_a_drawing_that_fails_leaves_the_page_without_a_picture(caplog: pytest.LogCaptureFixture) -> None:
    def broken(choice: str, **facts: Any) -> str:
        raise KeyError("colour")

    preview = preview_of(record(**scenario("widgets")), replace(get_agent("widgets").facts(), draw=broken))
    assert preview.drawing is None
    assert preview.choice
    assert "the drawing of agent widgets failed" in caplog.text


def test_texts_of_a_drawing_cannot_leave_it() -> None:
    canvas = Canvas(100, 50, '"><script>')
    canvas.text(1, 1, "<script>alert(1)</script>")
    assert canvas.svg().count("&lt;script&gt;") == 2
    assert "<script" not in canvas.svg()


def test_a_widget_nobody_drew_has_no_drawing() -> None:
    assert draw("hologram") is None
