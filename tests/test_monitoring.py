"""Alerts and dashboard against the metrics that the program gives, and against the page that says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.api.health import _gauges
from rl.serving import metrics

ROOT = Path(__file__).resolve().parent.parent
RULES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "deploy/prometheus/ratchet.rules.yml").read_text("utf-8")
)["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/ratchet.json").read_text("utf-8"))
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(
        variable["query"]["query"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ),
]


def series() -> dict[str, set[str]]:
    """Name of every series that /metrics gives -> its labels."""
    found: dict[str, set[str]] = {name: set() for name in _gauges()}
    counters = (metrics.REQUESTS, metrics.TOKENS, metrics.FALLBACKS, metrics.DECISIONS_RECORDED)
    found |= {f"{metric._name}_total": set(metric._labelnames) for metric in counters}
    labels = set(metrics.SECONDS._labelnames)
    return found | {
        "ratchet_gateway_seconds_bucket": labels | {"le"},
        "ratchet_gateway_seconds_count": labels,
        "ratchet_gateway_seconds_sum": labels,
    }


@pytest.mark.django_db
def test_alerts_and_panels_ask_for_metrics_and_labels_that_there_are() -> None:
    known = series()
    assert len(EXPRESSIONS) >= 15
    for expression in EXPRESSIONS:
        bare = re.sub(r'"[^"]*"', '""', expression)
        names = set(re.findall(r"\bratchet_\w+", bare))
        assert names <= set(known), expression
        labels = set(re.findall(r"(\w+)=~?\"\"", bare))
        labels |= {name.strip() for group in re.findall(r"by \(([^)]*)\)", bare) for name in group.split(",")}
        given = set().union(*(known[name] for name in names))
        assert labels - given <= {"job"}, expression


@pytest.mark.django_db
def test_every_metric_is_on_the_dashboard() -> None:
    shown = "\n".join(EXPRESSIONS)
    missing = [name for name in series() if name not in shown]
    assert missing == ["ratchet_gateway_seconds_count", "ratchet_gateway_seconds_sum"]


def test_every_alert_says_what_to_do_on_the_page_of_production() -> None:
    page = (ROOT / "docs/production.md").read_text("utf-8")
    assert re.findall(r"(?m)^\| `(Ratchet\w+)` \|", page) == [rule["alert"] for rule in RULES]
    assert {rule["labels"]["severity"] for rule in RULES} <= {"page", "ticket"}


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    squares = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(squares)) == len(squares)
    assert max(x for x, _ in squares) < 24


def test_prometheus_scrapes_the_job_that_the_alerts_watch() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))
    (job,) = scrape["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}} == 0' in {rule["expr"] for rule in RULES}
    assert scrape["rule_files"] == ["ratchet.rules.yml"]
