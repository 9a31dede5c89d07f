"""The engine of declared formats: paths, fields, scores and pairs."""

from __future__ import annotations

from typing import Any

import jmespath
import pytest

from feedback.transfer.formats.declared import Call, Pair, Scores, at, facts_at
from feedback.transfer.formats.records import ImportedDecision, RowError, RowLeftOut

ROW = {
    "a": {"b": [{"c": 1}, {"c": 2}]},
    "text": '{"model": "m"}',
    "none": None,
    "zero": 0,
    "no": False,
    "x.y": "dot",
}
PATHS = (
    "a",
    "a.b",
    "a.b[1].c",
    "a.b[?c == `2`].c",
    "none || text",
    "zero || text",
    "no || a",
    "none || no",
    '"x.y"',
    "a.q.r || text",
    "!(a.q)",
    "a.b[0].c < `2` && text",
    "type(a) == 'object' && a.b || none",
    "none == 'x'",
    "text == zero",
    "zero == `0`",
    "none == nothing",
    "text != 'x'",
    "not_null(none, zero)",
)
CALL = Call(
    request="asked",
    answer="answer",
    own="id",
    fields={"policy": "model || 'm0'", "latency_s": "took", "created_at": "at", "tokens_in": "usage.in"},
    metadata={"about": "about"},
    left_out={"status >= `400`": "failed"},
    scores=(
        Scores(items="said", name="name", value="value", author="by", simulated="by == 'bot'"),
        Scores(items="remarks", name="'remark'", notes="text", comments=True),
    ),
    outcomes="measured",
)
LOGGED: dict[str, Any] = {
    "id": "call-1",
    "asked": "Why?",
    "answer": "So.",
    "took": 0.5,
    "usage": {"in": 3},
    "at": "2025-01-02T03:04:05Z",
    "said": [{"name": "good", "value": True, "by": "ann"}, {"name": "depth", "value": 7, "by": "bot"}],
    "remarks": [{"text": "ok"}, {"text": ""}, {"text": "late"}],
    "measured": {"Cost": 2, "none": None},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_means_what_jmespath_says(path: str) -> None:
    assert at(ROW, path) == jmespath.search(path, ROW)


def test_json_in_a_text_is_decoded_and_a_text_is_no_number() -> None:
    assert at(ROW, "json(text).model") == "m"
    assert at(ROW, "json(a).b[0].c") == 1
    assert at(ROW, "text < `3`") is None
    assert at("no object", "a.b") is None
    assert at(ROW, "") is None


def test_a_declared_call_is_a_decision_with_its_scores_and_outcomes() -> None:
    (decision,) = CALL(LOGGED, 4)
    assert isinstance(decision, ImportedDecision)
    assert (decision.line, decision.key, decision.run_id, decision.policy) == (4, "call-1", "call-1", "m0")
    assert (decision.response, decision.latency_ms, decision.tokens_in) == ("So.", 500.0, 3)
    assert [(r.rater, r.thumb, r.rater_kind, r.notes) for r in decision.ratings] == [
        ("ann: good", "up", "human", ""),
        ("remark", "", "human", "ok"),
        ("remark 3", "", "human", "late"),
    ]
    assert [(o.name, o.value) for o in decision.outcomes] == [("depth", 7.0), ("cost", 2.0)]


def test_a_declared_call_says_why_a_row_is_left_out_or_refused() -> None:
    with pytest.raises(RowLeftOut, match="failed"):
        list(CALL({**LOGGED, "status": 500}, 1))
    assert list(CALL({**LOGGED, "status": "500"}, 1))
    for name, value in (
        ("id", ""),
        ("took", "long"),
        ("at", "noon"),
        ("said", "x"),
        ("measured", {"Cost": "x"}),
    ):
        with pytest.raises(RowError):
            list(CALL({**LOGGED, name: value}, 1))


def test_the_end_of_a_call_gives_its_latency() -> None:
    times = {"s": "2025-01-02T03:04:05Z", "e": "2025-01-02T03:04:06Z"}
    assert facts_at(times, {"created_at": "s", "ended_at": "e"})["latency_ms"] == 1000
    assert facts_at(times, {"created_at": "e", "ended_at": "s"})["latency_ms"] == 0


def test_a_pair_with_the_same_words_on_both_sides_is_left_out() -> None:
    pair = Pair("q", ("a", "b"), ("m", "n"), metadata={"source": "from"})
    judged = pair({"q": "Why?", "a": "x", "b": "y", "m": "left", "from": "here"}, 2).judged(
        "tie", simulated=True
    )
    left = judged.left
    assert isinstance(left, ImportedDecision)
    assert (judged.preference, judged.rater_kind, left.policy) == ("tie", "simulated", "left")
    assert left.metadata == {"source": "here"}
    with pytest.raises(RowLeftOut):
        pair({"q": "Why?", "a": "x", "b": "x"}, 2)
