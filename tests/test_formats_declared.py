"""Paths of declared formats. What declarations read is told by the recorded examples."""

from __future__ import annotations

import jmespath
import pytest

from feedback.transfer.formats.declared import at

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


@pytest.mark.parametrize("path", PATHS)
def test_a_path_means_what_jmespath_says(path: str) -> None:
    assert at(ROW, path) == jmespath.search(path, ROW)


def test_json_in_a_text_is_decoded_and_a_text_is_no_number() -> None:
    assert at(ROW, "json(text).model") == "m"
    assert at(ROW, "json(a).b[0].c") == 1
    assert at(ROW, "text < `3`") is None
    assert at("no object", "a.b") is None
    assert at(ROW, "") is None
