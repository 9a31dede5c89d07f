"""Whatever we write we can read back: every shape, with texts nobody would think of."""

import json
import uuid
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from feedback.transfer import formats
from feedback.transfer.formats.labelling import prompt_messages
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowRefused,
)
from feedback.transfer.formats.writers import REASONS, RowShape, View

EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

texts = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "\n",
            "Yes.",
            " spaces ",
            "Grüße 😀\u2028",
            *"0 1.5 None NaN true".split(),
            '{"a": [1]}',
            "[1]",
            "\n\nHuman: hi\n\nAssistant: ho",
            "\n\nAssistant:",
            "=1+1",
            "'=1+1",
            'a "quoted" one',
            "a,b;c\td\r\ne",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12),
)
turns = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], texts),
    st.builds(
        lambda system, first, answer, last: [
            {"role": "system", "content": system},
            {"role": "user", "content": first},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": last},
        ],
        texts,
        texts,
        texts,
        texts,
    ),
)
call = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
]
responses = st.one_of(texts, texts, texts, st.just(call))
ratings = st.builds(
    ImportedRating,
    rater=st.sampled_from(["ann", "bob"]),
    thumb=st.sampled_from(["up", "down", ""]),
    stars=st.none() | st.integers(1, 5),
    score=st.none() | st.floats(0, 1),
    correction=st.none() | texts.filter(str.strip),
    tags=st.lists(st.sampled_from(["clear", "long"]), unique=True).map(tuple),
    notes=st.just("noted") | texts,
    id=st.uuids(version=4),
)


@st.composite
def decisions(draw: st.DrawFn, messages: Any = None) -> ImportedDecision:
    response = draw(responses)
    listed = draw(st.booleans()) and isinstance(response, str)
    return ImportedDecision(
        line=0,
        key="",
        id=draw(st.uuids(version=4)),
        agent="helper",
        messages=draw(turns) if messages is None else messages,
        response=response,
        policy=draw(st.sampled_from(["", "m1", "a_b"])),
        candidates=[response, "another"] if listed else None,
        propensity=0.5 if listed else None,
        ratings=tuple(draw(st.lists(ratings, max_size=2))),
        outcomes=(ImportedOutcome("reward", 0.25),) if listed else (),
        metadata={"response_is": "messages"} if isinstance(response, list) else {},
    )


@st.composite
def comparisons(draw: st.DrawFn) -> ImportedComparison:
    messages = draw(turns)
    return ImportedComparison(
        line=0,
        key="",
        id=uuid.uuid4(),
        left=draw(decisions(messages)),
        right=draw(decisions(messages)),
        preference=draw(st.sampled_from(["left", "right", "tie", "both_bad"])),
        rater="ann",
    )


SHAPES = [shape for shape in formats.SHAPES.values() if shape.views != (View.HISTORY,)]
OF_COMPARISONS = (View.PREFERENCES, View.COMPARISONS)


def records_for(shape: RowShape) -> Any:
    parts = [
        st.lists(comparisons() if view in OF_COMPARISONS else decisions(), max_size=3) for view in shape.views
    ]
    return st.tuples(*parts).map(lambda lists: [record for part in lists for record in part])


def told(record: Record) -> list[Any]:
    """What a pair says, in words: both responses and which is better."""
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert isinstance(record.right, ImportedDecision)
    sides = {"left": record.left.response, "right": record.right.response}
    if record.preference not in sides:
        return [record.preference, sorted(map(str, sides.values()))]
    return ["preferred", sides.pop(record.preference), *sides.values()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_is_written_is_read_back(shape: RowShape, tmp_path: Path) -> None:
    @EXAMPLES
    @given(records_for(shape))
    def check(records: list[Any]) -> None:
        left_out: Counter[str] = Counter()
        lines = [json.loads(orjson.dumps(dict(line))) for line in shape.write(iter(records), left_out)]
        assert set(left_out) <= set(REASONS)
        if not lines:
            return
        with TemporaryDirectory(dir=tmp_path) as folder:
            path = Path(folder) / ("t.json" if shape.container == "array" else "t.jsonl")
            if shape.container == "array":
                path.write_text(json.dumps(lines, ensure_ascii=False), "utf-8")
            else:
                path.write_text(
                    "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8"
                )
            named = formats.format_by_name(shape.name)
            if shape.name != "simulation-ratings":
                assert formats.detect(path) == named.name
                found = list(formats.read(path, shape.name))
                assert [record for record in found if isinstance(record, RowRefused)] == []
                if shape.views == (View.PREFERENCES,) and shape.name != "oasst":
                    written = [record for record in records if record.preference in ("left", "right")]
                    kept = [told(record) for record in found if isinstance(record, ImportedComparison)]
                    assert len(kept) == len(records) - sum(left_out.values())
                    spoken = [told(record) for record in written]
                    for pair in kept:
                        assert any(_same(pair, other) for other in spoken), (pair, spoken)

    check()


def _same(pair: list[Any], other: list[Any]) -> bool:
    """Whether two pairs say the same; hh takes white space off both ends of a response."""
    return [_stripped(one) for one in pair] == [_stripped(one) for one in other]


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def test_a_prompt_that_is_json_and_no_chat_is_what_the_user_wrote() -> None:
    assert prompt_messages({"prompt": '{"a": [1]}'}, "prompt") == [{"role": "user", "content": '{"a": [1]}'}]
