"""Feedback to export: decisions of every kind with what was said of them, the bytes of an export, and a clean slate."""

import json
from typing import Any

import pytest

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.recording.ingest import trace_record
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from feedback.transfer.export import ExportReport, export_stream
from feedback.transfer.export_views import Selection

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
]
PAIRS = 4
"""Pairs in `world`: two comparisons with a preference, a correction, and the best over the worst response to the first
prompt."""
UNSAID = {"tie": 1, "both_bad": 1}
"""Comparisons of `world` that prefer neither side."""


def decided(response: str, messages: Any = "Where is my order?", **facts: Any) -> Decision:
    row: Decision = decision_record(agent="helper", messages=messages, response=response, **facts).row
    return row


@pytest.fixture
def world() -> None:
    """Six decisions, six ratings by three raters, four comparisons, an outcome, a trace."""
    listed = {"candidates": ["It is on its way.", "No idea."], "propensity": 0.6, "policy": "helper-v1"}
    good = decided("It is on its way.", **listed)
    bad, so_so = decided("No idea."), decided("Perhaps it is.")
    talk = decided("Nothing new.", TALK, unit="user-1", run_id="run-1")
    called = json.dumps([{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    tool = decided(called, "Weather?", metadata={"response_is": "messages", "tools": TOOLS}, reserved=True)
    trace_record(
        agent="helper",
        steps=[{"kind": "decision", "messages": "Unrated?", "response": "Yes.", "name": "answer"}],
    )
    rating_submit(decision=good, rater="ann", thumb="up", tags=["clear"], notes="fine")
    rating_submit(decision=good, rater="bob", stars=4)
    rating_submit(decision=bad, rater="ann", thumb="down", correction="It arrives today.")
    rating_submit(decision=so_so, rater="cy", stars=3)
    rating_submit(decision=talk, rater="ann", score=0.9, notes="good")
    rating_submit(decision=tool, rater="ann", thumb="up")
    comparison_submit(left=good, right=bad, preference="left", rater="ann")
    comparison_submit(left=good, right=bad, preference="tie", rater="bob")
    comparison_submit(left=bad, right=so_so, preference="right", rater="ann")
    comparison_submit(left=bad, right=so_so, preference="both_bad", rater="bob")
    outcome_record(decision=good, name="reward", value=0.5)


def forget_everything() -> None:
    Outcome.objects.all().delete()
    for model in (Comparison, Rating):
        while model._default_manager.exists():  # the newest of a chain first
            model._default_manager.filter(superseded_by__isnull=True).delete()
    Decision.objects.all().delete()
    Trace.objects.all().delete()


def exported(name: str = "ratchet", selection: Selection | None = None) -> bytes:
    return b"".join(export_stream(name, selection or Selection(), ExportReport(name)))
