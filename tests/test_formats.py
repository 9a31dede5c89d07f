"""Outside formats: recognised by their rows, read to the letter; what is odd is refused with its line and reason."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from feedback import formats
from feedback.formats.files import CHUNK, Row, rows
from feedback.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedReference,
    Record,
    RowRefused,
    RowSkipped,
    time_of,
)

HERE = Path(__file__).parent / "formats"
SHARED = Path(__file__).parents[2] / "shared" / "data"

QUESTION = "Can I return opened headphones?"
GOOD, BAD = "Yes, within 30 days with the receipt.", "No idea."
ASKED = [{"role": "user", "content": QUESTION}]
BRIEF = [{"role": "system", "content": "Be brief."}, *ASKED]


def read(name: str, **how: Any) -> list[Record]:
    return list(formats.read(HERE / name, **how))


def written(path: Path, items: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    return path


def one(path: Path, row: Any, format: str = "auto") -> Record:
    (record,) = formats.read(written(path / "one.jsonl", [row]), format)
    return record


def refusal(path: Path, row: Any, format: str) -> str:
    record = one(path, row, format)
    assert isinstance(record, RowRefused), record
    assert record.line == 1
    return record.reason


def outside(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"outside data ../shared/data/{path} is not here")
    return SHARED / path


# --- Recognising ------------------------------------------------------------------------------------------

EXAMPLES = {
    "argilla_to_list_flatten.json": "argilla",
    "argilla_to_list_nested.json": "argilla",
    "feedback_collector.jsonl": "feedback_collector",
    "hh_rlhf.jsonl": "hh",
    "label_studio_chat.json": "label_studio",
    "label_studio_json_min.json": "label_studio",
    "label_studio_pairwise.json": "label_studio",
    "label_studio_rating.json": "label_studio",
    "langfuse_scores.json": "langfuse",
    "librechat_messages.json": "librechat",
    "llamafactory_alpaca_ranking.json": "llamafactory",
    "llamafactory_openai_kto.json": "llamafactory",
    "llamafactory_sharegpt_kto.json": "llamafactory",
    "llamafactory_sharegpt_ranking.json": "llamafactory",
    "oasst_tree.jsonl": "oasst",
    "open_webui_feedback_export.json": "open_webui",
    "openai_dpo.jsonl": "openai",
    "openai_sft.jsonl": "openai",
    "pandalm.json": "pandalm",
    "ratchet.jsonl": "ratchet",
    "simulation_entries.json": "simulation",
    "simulation_ratings.json": "simulation",
    "tensorzero_boolean_feedback.jsonl": "tensorzero",
    "tensorzero_chat_inference.jsonl": "tensorzero",
    "tensorzero_demonstration.jsonl": "tensorzero",
    "trl_preference_conversational_explicit.jsonl": "trl",
    "trl_preference_conversational_implicit.jsonl": "trl",
    "trl_preference_standard_explicit.jsonl": "trl",
    "trl_preference_standard_implicit.jsonl": "trl",
    "trl_preference_tools.jsonl": "trl",
    "trl_prompt_completion.jsonl": "trl",
    "trl_prompt_only.jsonl": "trl",
    "trl_unpaired_conversational.jsonl": "trl",
    "trl_unpaired_standard.jsonl": "trl",
    "vw_dsjson.jsonl": "vw",
}


@pytest.mark.parametrize(("name", "format"), EXAMPLES.items())
def test_an_example_is_recognised(name: str, format: str) -> None:
    assert formats.detect(HERE / name) == format


def test_there_is_an_example_of_every_format_and_a_format_for_every_example() -> None:
    assert set(EXAMPLES.values()) == set(formats.FORMATS)
    described = {path.name for path in HERE.iterdir()} - {"llamafactory_dataset_info.json"}
    assert described == set(EXAMPLES)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("llamafactory_alpaca_ranking.json", "llamafactory"),
        ("llamafactory_openai_kto.json", "llamafactory"),
        ("llamafactory_sharegpt_kto.json", "llamafactory"),
        ("llamafactory_sharegpt_ranking.json", "llamafactory"),
    ],
)
def test_llamafactory_rows_are_recognised_without_a_dataset_info(
    name: str, format: str, tmp_path: Path
) -> None:
    (tmp_path / "renamed.json").write_bytes((HERE / name).read_bytes())
    assert formats.detect(tmp_path / "renamed.json") == format
    before, after = (
        [r for r in formats.read(path, format) if not isinstance(r, RowSkipped)]
        for path in (HERE / name, tmp_path / "renamed.json")
    )
    assert before == after


def test_rows_nobody_knows_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"colour": "red", "size": 3}])
    with pytest.raises(FormatRefused, match="found rows with colour, size") as refused:
        formats.detect(path)
    assert "--format" in str(refused.value)


def test_an_unknown_format_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match=r"no format 'csv'; there are auto, ratchet"):
        formats.read(tmp_path / "x", "csv")


def test_a_ratings_file_beside_a_format_of_one_file_is_refused() -> None:
    with pytest.raises(FormatRefused, match="simulation"):
        formats.read(HERE / "hh_rlhf.jsonl", "auto", HERE / "simulation_ratings.json")


# --- Files ------------------------------------------------------------------------------------------------


def test_rows_know_the_line_they_start_on(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[\n {"a": 1},\n\n {"a":\n   2}, {"a": 3}\n]\n')
    assert list(rows(path)) == [Row(2, {"a": 1}), Row(4, {"a": 2}), Row(5, {"a": 3})]


def test_lines_that_are_blank_are_no_rows_but_count(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"a": 1}\n\n  \n{"a": 2}')
    assert list(rows(path)) == [Row(2, {"a": 1}), Row(5, {"a": 2})]


def test_a_line_that_is_no_json_is_refused_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 1,}\n{"a": NaN}\n{"a": 2}\n')
    found = list(rows(path))
    assert found[0] == Row(1, {"a": 1})
    assert found[3] == Row(4, {"a": 2})
    assert isinstance(found[1], RowRefused)
    assert found[1].broken
    assert found[1].line == 2
    assert "column" in found[1].reason
    assert isinstance(found[2], RowRefused)
    assert "NaN is not JSON" in found[2].reason


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"a": 1},\n {"a": }]', "line 2 column 8"),
        ('[{"a": 1}\n {"a": 2}]', "line 2 column 2"),
        ('[{"a": 1},\n', "line 2 column 1"),
        ('[{"a": 1}', "line 1 column 10"),
        ('[{"a": "cut off', "line 1 column 8"),
        ('[{"a": 1},]', "line 1 column 11"),
        ("[1] trailing", "line 1 column 5"),
        ('{\n "a": 1,\n "b": oops\n}', "line 3 column 7"),
    ],
)
def test_a_fault_in_an_array_or_document_names_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FormatRefused, match=rf"x\.json {where}: not JSON"):
        list(rows(path))


def test_a_long_array_is_read_piece_by_piece(tmp_path: Path) -> None:
    # rows of some 10 kB over several chunks, with texts, escapes and numbers across their edges
    items = [
        {"n": i, "text": 'ü"\\\n' * 2500, "x": [1.5, -2e10, True, None]} for i in range(3 * CHUNK // 10_000)
    ]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(items), "utf-8")
    assert path.stat().st_size > 3 * CHUNK
    assert [row.value for row in rows(path) if isinstance(row, Row)] == items


def test_one_row_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"a": "x" * (2 * CHUNK)}, {"a": 1}]))
    first, second = rows(path)
    assert isinstance(first, Row)
    assert len(first.value["a"]) == 2 * CHUNK
    assert second == Row(1, {"a": 1})


def test_gzip_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": 1}\n'), ("b.json", '[{"a": 1}]'), ("c.json", '{\n"a": 1}')):
        for start in ("", "\ufeff"):
            (tmp_path / name).write_text(start + text, "utf-8")
            assert [row.value for row in rows(tmp_path / name) if isinstance(row, Row)] == [{"a": 1}]
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress((start + text).encode()))
            assert [row.value for row in rows(tmp_path / f"{name}.gz") if isinstance(row, Row)] == [{"a": 1}]


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": "' + bytes(range(32, 33)) * 5000 + b'"}\n')
    (tmp_path / "x.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(FormatRefused, match="damaged or cut short"):
        list(rows(tmp_path / "x.jsonl.gz"))


@pytest.mark.parametrize("content", [b"", b"  \n\n "])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FormatRefused, match="empty file"):
        list(rows(tmp_path / "x.json"))


def test_bytes_that_are_no_utf8_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'[{"a": "caf\xe9"}]')
    with pytest.raises(FormatRefused, match=r"UTF-8 text, found the byte 0xe9"):
        list(rows(tmp_path / "x.json"))
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": "caf\xe9"}\n')
    (_, refused) = rows(tmp_path / "x.jsonl")
    assert isinstance(refused, RowRefused)
    assert (refused.line, "byte 11 is 0xe9" in refused.reason) == (2, True)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(FormatRefused, match="cannot be read"):
            list(rows(path))


def test_a_row_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (refused,) = rows(tmp_path / "x.jsonl")
    assert isinstance(refused, RowRefused)


@pytest.mark.parametrize(
    ("value", "time"),
    [
        ("2025-01-02T03:04:05Z", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2025-01-02T03:04:05.0000000Z", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2025-01-02T05:04:05+02:00", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2025-01-02 03:04:05", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (1735787045, datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (1735787045000, datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (None, None),
    ],
)
def test_times_are_read_in_all_their_spellings(value: Any, time: datetime | None) -> None:
    assert time_of(value, "at") == time


# --- TRL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "chosen", "rejected"),
    [
        ("trl_preference_conversational_explicit.jsonl", BRIEF, GOOD, BAD),
        ("trl_preference_conversational_implicit.jsonl", ASKED, GOOD, BAD),
        (
            "trl_preference_standard_explicit.jsonl",
            [{"role": "user", "content": "Refund window is"}],
            " 30 days.",
            " unknown.",
        ),
        (
            # the common beginning is "Refund window is ", whose last space belongs to the responses
            "trl_preference_standard_implicit.jsonl",
            [{"role": "user", "content": "Refund window is"}],
            " 30 days.",
            " unknown.",
        ),
        ("hh_rlhf.jsonl", ASKED, GOOD, BAD),
        ("openai_dpo.jsonl", ASKED, GOOD, BAD),
        ("llamafactory_alpaca_ranking.json", ASKED, GOOD, BAD),
        ("llamafactory_sharegpt_ranking.json", BRIEF, GOOD, BAD),
        ("oasst_tree.jsonl", ASKED, GOOD, BAD),
    ],
)
def test_a_preference_is_read_to_the_letter(name: str, prompt: Any, chosen: str, rejected: str) -> None:
    (record,) = read(name)
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert isinstance(record.right, ImportedDecision)
    assert record.preference == "left"
    assert not record.ordered
    assert record.left.messages == record.right.messages == prompt
    assert (record.left.response, record.right.response) == (chosen, rejected)


@pytest.mark.parametrize(
    ("name", "prompt", "response", "thumb"),
    [
        ("trl_unpaired_conversational.jsonl", ASKED, BAD, "down"),
        ("trl_unpaired_standard.jsonl", [{"role": "user", "content": "Refund window is"}], " 30 days.", "up"),
        ("llamafactory_openai_kto.json", ASKED, GOOD, "up"),
        ("llamafactory_sharegpt_kto.json", ASKED, BAD, "down"),
    ],
)
def test_a_label_is_read_as_a_thumb(name: str, prompt: Any, response: str, thumb: str) -> None:
    (record,) = read(name)
    assert isinstance(record, ImportedDecision)
    assert record.messages == prompt
    assert record.response == response
    assert [rating.thumb for rating in record.ratings] == [thumb]


@pytest.mark.parametrize(
    ("name", "prompt"), [("trl_prompt_completion.jsonl", ASKED), ("openai_sft.jsonl", BRIEF)]
)
def test_a_demonstration_is_a_decision_nobody_rated(name: str, prompt: Any) -> None:
    (record,) = read(name)
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response, record.tags) == (prompt, GOOD, ("demonstration",))
    assert record.ratings == ()


def test_a_prompt_alone_is_skipped() -> None:
    assert [type(record) for record in read("trl_prompt_only.jsonl")] == [RowSkipped, RowSkipped]


def test_tool_calls_stay_messages_and_tools_are_kept() -> None:
    (record,) = read("trl_preference_tools.jsonl")
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert isinstance(record.left.response, list)
    assert [message["role"] for message in record.left.response] == ["assistant", "tool", "assistant"]
    assert record.left.response[0]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Oslo"},
    }
    assert record.left.metadata["tools"][0]["function"]["name"] == "weather"


def test_tools_as_one_json_text_are_the_same_tools(tmp_path: Path) -> None:
    row = json.loads((HERE / "trl_preference_tools.jsonl").read_text())
    as_text = one(tmp_path, {**row, "tools": json.dumps(row["tools"])})
    assert isinstance(as_text, ImportedComparison)
    assert isinstance(as_text.left, ImportedDecision)
    assert as_text.left.metadata["tools"] == row["tools"]


def test_a_text_prompt_beside_whole_conversations_repeats_their_turn(tmp_path: Path) -> None:
    # as HuggingFaceH4/ultrafeedback_binarized has it
    row = {
        "prompt": QUESTION,
        "chosen": [*ASKED, {"role": "assistant", "content": GOOD}],
        "rejected": [*ASKED, {"role": "assistant", "content": BAD}],
        "score_chosen": 8.0,
    }
    record = one(tmp_path, row)
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert (record.left.messages, record.left.response) == (ASKED, GOOD)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen: is empty"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen: expected a list"),
        ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, "one of each"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt: is empty"),
        ({"prompt": "q", "chosen": "a\x00", "rejected": "b"}, "NUL"),
        ({"prompt": "q", "chosen": "a", "rejected": "\ud800"}, "lone surrogate"),
        ({"chosen": "abc", "rejected": "xyz"}, "no common beginning"),
        ({"chosen": "same", "rejected": "same"}, "same text"),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
            "share no turn",
        ),
        ({"prompt": "q", "completion": "a", "label": "yes"}, "label: expected true or false, found 'yes'"),
        ({"prompt": "q", "completion": "a", "label": 1}, "label: expected true or false, found 1"),
        ({"prompt": [{"role": "user"}, 5], "completion": "a"}, r"prompt[1]: expected an object, found 5"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": "a"},
            "only text parts can be read, found one of type 'image'",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": "[broken"}, "tools: expected a list"),
        (5, "expected an object, found 5"),
    ],
)
def test_an_odd_trl_row_is_refused_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    assert reason in refusal(tmp_path, row, "trl")


def test_conversations_that_differ_before_the_response_are_no_pair(tmp_path: Path) -> None:
    row = {
        side: [
            *ASKED,
            {"role": "assistant", "content": "Which?"},
            {"role": "user", "content": model},
            {"role": "assistant", "content": "Hm."},
        ]
        for side, model in (("chosen", "The red ones."), ("rejected", "The blue ones."))
    }
    assert "in turn 3: not the same prompt" in refusal(tmp_path, row, "trl")


def test_the_same_response_twice_is_no_preference(tmp_path: Path) -> None:
    assert isinstance(one(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "a"}), RowSkipped)


# --- OpenAI, hh, LLaMA-Factory ----------------------------------------------------------------------------


def test_every_assistant_turn_of_weight_one_is_a_demonstration(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 1},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    found = list(formats.read(written(tmp_path / "x.jsonl", [{"messages": turns}])))
    assert all(isinstance(record, ImportedDecision) for record in found)
    assert [(r.response, len(r.messages)) for r in found if isinstance(r, ImportedDecision)] == [
        ("d", 3),
        ("f", 5),
    ]
    assert all(
        "weight" not in message for r in found if isinstance(r, ImportedDecision) for message in r.messages
    )


def test_the_prompt_of_hh_is_everything_before_the_last_answer(tmp_path: Path) -> None:
    shared = "\n\nHuman: Hi\n\nAssistant: Hello. Did you say:\n\nHuman: yes?\n\nAssistant:"
    record = one(tmp_path, {"chosen": f"{shared} Right.", "rejected": f"{shared} Wrong."})
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert [(m["role"], m["content"]) for m in record.left.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello. Did you say:"),
        ("user", "yes?"),
    ]
    assert record.left.response == "Right."


def test_hh_rows_without_an_answer_or_with_other_prompts_are_refused(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    assert "chosen: is empty" in refusal(tmp_path, {"chosen": start, "rejected": f"{start} a"}, "hh")
    other = "\n\nHuman: Ho\n\nAssistant: b"
    assert "not two responses to the same prompt" in refusal(
        tmp_path, {"chosen": f"{start} a", "rejected": other}, "hh"
    )
    assert "expected a turn" in refusal(tmp_path, {"chosen": "hi", "rejected": "ho"}, "hh")


def test_a_dataset_info_beside_the_file_names_its_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps([{"q": "Can I?", "yes": "Sure.", "no": "No.", "sys": "Be brief."}])
    )
    info = {
        "mine": {
            "file_name": "mine.json",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "yes", "rejected": "no", "system": "sys"},
        }
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert formats.detect(tmp_path / "mine.json") == "llamafactory"
    (record,) = formats.read(tmp_path / "mine.json")
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert record.left.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Can I?"},
    ]
    assert record.left.response == "Sure."


def test_an_alpaca_row_with_history_and_input_is_one_conversation(tmp_path: Path) -> None:
    row = {
        "instruction": "Translate.",
        "input": "Haus",
        "history": [["Hi", "Hello"]],
        "chosen": "house",
        "rejected": "mouse",
    }
    record = one(tmp_path, row)
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert [m["content"] for m in record.left.messages] == ["Hi", "Hello", "Translate.\nHaus"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "elf", "value": "x"}], "chosen": {}, "rejected": {}}, "found 'elf'"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "expected at least one turn"),
        ({"conversations": [{"from": "human", "value": 3}]}, "expected a text, found 3"),
        ({"instruction": "", "chosen": "a", "rejected": "b"}, "instruction: is empty"),
        ({"instruction": "q", "chosen": "a", "rejected": "b", "history": [["a"]]}, "[question, answer]"),
    ],
)
def test_an_odd_llamafactory_row_is_refused_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    assert reason in refusal(tmp_path, row, "llamafactory")


# --- Two files --------------------------------------------------------------------------------------------


def test_simulation_entries_are_joined_with_their_ratings() -> None:
    first, second, third = read("simulation_entries.json", ratings_path=HERE / "simulation_ratings.json")
    assert isinstance(first, ImportedDecision)
    assert (first.agent, first.messages, first.response) == ("helper", ASKED, GOOD)
    assert [(r.thumb, r.tags, r.notes) for r in first.ratings] == [("up", ("clear",), "good")]
    assert isinstance(second, ImportedDecision)
    assert second.response == '{"answer": "No idea."}'
    assert [r.thumb for r in second.ratings] == ["down"]
    assert isinstance(third, ImportedDecision)
    assert third.messages == []
    assert third.metadata == {"entry": {"entry_id": "e3", "scenario": "trend-001", "widget": "line_chart"}}


def test_faults_in_simulation_ratings_are_told_with_their_file(tmp_path: Path) -> None:
    ratings = written(
        tmp_path / "r.jsonl",
        [
            {"entry_id": "e1", "rating": "sideways"},
            {"entry_id": "unknown", "rating": "up"},
            {"rating": "up"},
        ],
    )
    refused = [r for r in read("simulation_entries.json", ratings_path=ratings) if isinstance(r, RowRefused)]
    assert {r.line for r in refused} == {1, 2, 3}
    reasons = {r.line: r.reason for r in refused}
    assert "expected up or down, found 'sideways'" in reasons[1]
    assert "does not hold" in reasons[2]
    assert "entry_id: expected" in reasons[3]
    assert all("r.jsonl" in reason for reason in reasons.values())


def test_an_entry_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    row = {"entry_id": "e1", "prompt": "q", "response": "a"}
    found = list(formats.read(written(tmp_path / "x.jsonl", [row, row])))
    assert isinstance(found[1], RowRefused)
    assert "twice" in found[1].reason


def test_tensorzero_inferences_are_joined_with_their_feedback() -> None:
    (record,) = read(
        "tensorzero_chat_inference.jsonl", ratings_path=HERE / "tensorzero_boolean_feedback.jsonl"
    )
    assert isinstance(record, ImportedDecision)
    assert str(record.id) == "0195e000-0000-7000-8000-000000000001"
    assert (record.agent, record.policy, record.latency_ms) == ("answer", "v1", 812.0)
    assert (record.messages, record.response) == (BRIEF, GOOD)
    # UUIDv7 0195e000-0000 is 0x0195e0000000 = 1743219851264 ms after 1970
    assert record.created_at == datetime(2025, 3, 29, 3, 44, 11, 264000, tzinfo=UTC)
    assert [(r.rater, r.thumb, r.tags) for r in record.ratings] == [("Alice (accepted)", "up", ("accepted",))]


def test_feedback_on_an_episode_of_several_inferences_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "tensorzero_chat_inference.jsonl").read_text())
    both = [row, {**row, "id": "0195e000-0000-7000-8000-000000000009"}]
    feedback = {
        "id": "0195e000-0000-7000-8000-000000000003",
        "target_id": row["episode_id"],
        "metric_name": "accepted",
        "value": True,
    }
    said = written(tmp_path / "said.jsonl", [feedback])
    alone = list(formats.read(written(tmp_path / "one.jsonl", [row]), ratings_path=said))
    assert [len(r.ratings) for r in alone if isinstance(r, ImportedDecision)] == [1]
    several = list(formats.read(written(tmp_path / "two.jsonl", both), ratings_path=said))
    assert any(isinstance(r, RowRefused) and "several inferences" in r.reason for r in several)


def test_a_tensorzero_demonstration_is_a_correction() -> None:
    (record,) = read("tensorzero_demonstration.jsonl")
    assert isinstance(record, ImportedReference)
    assert record.reference == "0195e000-0000-7000-8000-000000000001"
    assert record.rating.correction == GOOD


def test_a_float_metric_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    row = {"id": "x", "target_id": "t", "metric_name": "seconds", "value": 12.5}
    assert "unknown scale" in refusal(tmp_path, row, "tensorzero")


# --- Annotation tools -------------------------------------------------------------------------------------


def test_label_studio_pairs_keep_their_sides_and_cancelled_ones_are_skipped() -> None:
    first, second, third = read("label_studio_pairwise.json")
    assert isinstance(first, ImportedComparison)
    assert isinstance(second, ImportedComparison)
    assert isinstance(third, RowSkipped)
    assert (first.preference, first.rater, second.preference, second.rater) == (
        "left",
        "annotator 1",
        "right",
        "annotator 2",
    )
    assert first.ordered
    assert isinstance(first.left, ImportedDecision)
    assert (first.left.messages, first.left.response) == (ASKED, GOOD)
    assert "cancelled" in third.reason


def test_label_studio_sides_follow_the_name_the_result_is_about(tmp_path: Path) -> None:
    (task,) = json.loads((HERE / "label_studio_pairwise.json").read_text())
    task["annotations"] = task["annotations"][:1]
    for to_name, left in (("answer2", BAD), ("answer1", GOOD), ("comparison", GOOD)):
        task["annotations"][0]["result"][0]["to_name"] = to_name
        record = one(tmp_path, task)
        assert isinstance(record, ImportedComparison)
        assert isinstance(record.left, ImportedDecision)
        assert record.left.response == left


def test_label_studio_stars_choices_and_text_are_one_rating() -> None:
    (record,) = read("label_studio_rating.json")
    assert isinstance(record, ImportedDecision)
    (rating,) = record.ratings
    assert (rating.stars, rating.thumb, rating.tags, rating.notes) == (4, "up", ("accept",), "fine")
    assert rating.rater == "rater@example.test"
    assert rating.created_at == datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_label_studio_json_min_says_the_same_as_the_full_export() -> None:
    (flat,) = read("label_studio_json_min.json")
    full = read("label_studio_pairwise.json")[0]
    assert flat == full


def test_a_rated_message_of_a_label_studio_chat_is_a_decision() -> None:
    (record,) = read("label_studio_chat.json")
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response) == (ASKED, GOOD)
    assert [(r.stars, r.rater) for r in record.ratings] == [(5, "annotator 1")]


def test_a_task_with_three_answers_cannot_be_paired(tmp_path: Path) -> None:
    (task,) = json.loads((HERE / "label_studio_pairwise.json").read_text())
    task["data"]["answer3"] = "Perhaps."
    assert "expected two answers" in refusal(tmp_path, task, "label_studio")


def test_argilla_preferences_and_rankings_become_comparisons() -> None:
    preference, ranking, skipped = read("argilla_to_list_nested.json")
    for record in (preference, ranking):
        assert isinstance(record, ImportedComparison)
        assert isinstance(record.left, ImportedDecision)
        assert isinstance(record.right, ImportedDecision)
        assert (record.left.response, record.right.response, record.preference) == (GOOD, BAD, "left")
        assert record.rater == "11111111-1111-4111-8111-111111111111"
    assert isinstance(skipped, RowSkipped)
    assert "which of 2 responses is meant cannot be told: quality" in skipped.reason


def test_argilla_drafts_do_not_count() -> None:
    (record,) = read("argilla_to_list_flatten.json")
    assert isinstance(record, ImportedComparison)
    assert record.rater == "11111111-1111-4111-8111-111111111111"


def test_an_argilla_ranking_of_three_is_three_comparisons_and_a_shared_rank_is_none(tmp_path: Path) -> None:
    fields = {"prompt": QUESTION, "response1": "a", "response2": "b", "response3": "c"}

    def pairs(value: Any) -> list[tuple[Any, Any]]:
        row = {"id": "r", "fields": fields, "responses": {"rank": [{"value": value, "user_id": "u"}]}}
        found = formats.read(written(tmp_path / "x.jsonl", [row]))
        return [(r.left.response, r.right.response) for r in found]  # type: ignore[union-attr]

    assert pairs(["response2", "response1", "response3"]) == [("b", "a"), ("b", "c"), ("a", "c")]
    tied = [
        {"value": "response1", "rank": 1},
        {"value": "response2", "rank": 1},
        {"value": "response3", "rank": 2},
    ]
    assert pairs(tied) == [("a", "c"), ("b", "c")]
    assert pairs("response3") == [("c", "a"), ("c", "b")]


def test_argilla_ratings_labels_and_texts_on_one_response_are_one_rating(tmp_path: Path) -> None:
    row = {
        "id": "r",
        "fields": {"prompt": QUESTION, "response": BAD},
        "responses": {
            "quality": [{"value": 2, "user_id": "u"}],
            "topics": [{"value": ["returns", "audio"], "user_id": "u"}],
            "corrected": [{"value": GOOD, "user_id": "u"}],
            "remark": [{"value": "short", "user_id": "u"}],
        },
    }
    record = one(tmp_path, row)
    assert isinstance(record, ImportedDecision)
    (rating,) = record.ratings
    assert (rating.stars, rating.tags, rating.correction, rating.notes) == (
        2,
        ("returns", "audio"),
        GOOD,
        "short",
    )


# --- Chat applications ------------------------------------------------------------------------------------


def test_open_webui_feedback_brings_its_chat_along() -> None:
    rated, sibling, elsewhere = read("open_webui_feedback_export.json")
    assert isinstance(rated, ImportedDecision)
    assert (rated.messages, rated.response, rated.policy, rated.run_id) == (ASKED, GOOD, "shop-b", "m3")
    (rating,) = rated.ratings
    # 9 on a scale of 1 to 10 is 8/9 of the way
    assert (rating.thumb, rating.score, rating.tags, rating.notes) == (
        "up",
        pytest.approx(8 / 9),
        ("returns",),
        "Accurate information",
    )
    assert isinstance(sibling, ImportedDecision)
    assert (sibling.response, sibling.policy, sibling.ratings) == (BAD, "shop-a", ())
    assert isinstance(elsewhere, ImportedReference)
    assert (elsewhere.reference, elsewhere.rating.thumb, elsewhere.rating.notes) == ("m2", "down", "wrong")


def test_an_open_webui_arena_thumb_chooses_between_the_answers(tmp_path: Path) -> None:
    row = json.loads((HERE / "open_webui_feedback_export.json").read_text())[0]
    row["meta"]["arena"] = True
    row["data"]["rating"] = "-1"
    found = list(formats.read(written(tmp_path / "x.jsonl", [row])))
    (comparison,) = [r for r in found if isinstance(r, ImportedComparison)]
    assert isinstance(comparison.left, ImportedDecision)
    assert (comparison.left.response, comparison.preference) == (GOOD, "right")


def test_librechat_thumbs_are_placed_in_their_conversation() -> None:
    skipped, rated = read("librechat_messages.json")
    assert isinstance(skipped, RowSkipped)
    assert isinstance(rated, ImportedDecision)
    assert (rated.messages, rated.response, rated.policy) == (ASKED, BAD, "m1")
    (rating,) = rated.ratings
    assert (rating.thumb, rating.tags, rating.notes) == ("down", ("inaccurate",), "wrong")


def test_a_librechat_thumb_whose_question_is_missing_is_refused(tmp_path: Path) -> None:
    message = json.loads((HERE / "librechat_messages.json").read_text())[1]
    assert "not in the file" in refusal(tmp_path, message, "librechat")


def test_langfuse_scores_are_ratings_of_decisions_elsewhere() -> None:
    found = read("langfuse_scores.json")
    assert all(isinstance(record, ImportedReference) for record in found)
    boolean, numeric, category = (r for r in found if isinstance(r, ImportedReference))
    assert (boolean.reference, boolean.also) == ("o1", ("t1",))
    assert (boolean.rating.thumb, boolean.rating.notes) == ("down", "wrong")
    assert (numeric.rating.score, numeric.rating.rater) == (0.9, "u1: quality")
    assert (category.rating.tags, category.rating.rater_kind) == (("tone: polite",), "simulated")


def test_a_langfuse_score_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    row = {"id": "s", "traceId": "t", "name": "n", "dataType": "NUMERIC", "value": 7}
    assert "unknown scale" in refusal(tmp_path, row, "langfuse")


# --- The others -------------------------------------------------------------------------------------------


def test_a_vw_event_is_a_choice_with_its_propensity_and_reward() -> None:
    (record,) = read("vw_dsjson.jsonl")
    assert isinstance(record, ImportedDecision)
    assert (record.response, record.propensity) == ('{"_tag": "v2"}', 0.85)
    assert record.candidates == ['{"_tag": "v1"}', '{"_tag": "v2"}']
    assert [(o.name, o.value) for o in record.outcomes] == [("reward", 1.0)]
    assert record.created_at == datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_vw_event_whose_two_numberings_disagree_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "vw_dsjson.jsonl").read_text())
    assert "_labelIndex: expected 1" in refusal(tmp_path, {**row, "_labelIndex": 2}, "vw")
    assert "expected 1 to 2" in refusal(tmp_path, {**row, "_label_Action": 3}, "vw")


def test_pandalm_annotators_are_three_raters() -> None:
    found = read("pandalm.json")
    assert [(r.rater, r.preference) for r in found if isinstance(r, ImportedComparison)] == [
        ("annotator1", "left"),
        ("annotator2", "tie"),
        ("annotator3", "right"),
    ]


def test_an_answer_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (row,) = json.loads((HERE / "pandalm.json").read_text())
    assert "response1: expected a text, found True" in refusal(
        tmp_path, {**row, "response1": True}, "pandalm"
    )


def test_feedback_collector_rows_hold_stars_thumbs_scores_and_corrections() -> None:
    found = [r for r in read("feedback_collector.jsonl") if isinstance(r, ImportedDecision)]
    said = [
        (r.ratings[0].stars, r.ratings[0].thumb, r.ratings[0].score, r.ratings[0].correction) for r in found
    ]
    assert said == [(2, "", None, GOOD), (None, "up", None, None), (None, "", 0.7, None)]
    assert found[0].ratings[0].rater == "u1"


def test_oasst_ranks_are_ordered_pairs_and_equal_ranks_ties(tmp_path: Path) -> None:
    tree = json.loads((HERE / "oasst_tree.jsonl").read_text())
    reply = tree["prompt"]["replies"][0]
    tree["prompt"]["replies"] = [
        {**reply, "message_id": name, "text": name, "rank": rank}
        for name, rank in (("c", 1), ("a", 0), ("b", 1))
    ]
    found = list(formats.read(written(tmp_path / "x.jsonl", [tree])))
    assert [(r.left.response, r.right.response, r.preference) for r in found] == [  # type: ignore[union-attr]
        ("a", "b", "left"),
        ("a", "c", "left"),
        ("b", "c", "tie"),
    ]


def test_ratchet_rows_keep_ids_times_and_every_rating() -> None:
    first, _, comparison = read("ratchet.jsonl")
    assert isinstance(first, ImportedDecision)
    assert str(first.id).startswith("11111111")
    assert [(r.thumb, str(r.id)[:4]) for r in first.ratings] == [("up", "2222"), ("down", "3333")]
    assert first.outcomes[0].name == "ticket_reopened"
    assert isinstance(comparison, ImportedComparison)
    assert str(comparison.left).startswith("11111111")


def test_an_unknown_key_in_a_ratchet_row_is_refused(tmp_path: Path) -> None:
    row = {"type": "decision", "agent": "a", "messages": "q", "response": "r", "colour": "red"}
    assert "unknown keys colour" in refusal(tmp_path, row, "ratchet")


# --- Odd values, everywhere -------------------------------------------------------------------------------

ODD: list[Any] = [
    None,
    0,
    -1,
    7.5,
    True,
    "",
    "x",
    "\ud800",
    "a\x00b",
    [],
    [None],
    [[]],
    {},
    {"x": None},
    "{",
    10**400,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy of a JSON value with another one in a place."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], odd)
    return copy


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "simulation_ratings.json"])
def test_no_odd_value_in_any_place_gets_past_as_a_crash(name: str, tmp_path: Path) -> None:
    items = [row.value for row in rows(HERE / name) if isinstance(row, Row)]
    mutants = [put(item, place, odd) for item in items for place in places(item) for odd in ODD]
    lines = 0
    for record in formats.read(written(tmp_path / "odd.jsonl", mutants), EXAMPLES[name]):
        lines = max(lines, record.line)
        assert not isinstance(record, RowRefused) or record.reason
        if isinstance(record, ImportedDecision):
            assert record.messages or record.metadata
            assert isinstance(record.response, (str, list))
    assert lines > len(mutants) * 0.9, "reading went on to the end"


# --- Real files of others ---------------------------------------------------------------------------------


def counted(path: Path, **how: Any) -> Counter[str]:
    return Counter(type(record).__name__ for record in formats.read(path, **how))


def test_llamafactory_dpo_en_demo_holds_300_pairs_80_with_a_system_turn() -> None:
    found = list(formats.read(outside("llamafactory/dpo_en_demo.json")))
    assert counted(outside("llamafactory/dpo_en_demo.json")) == {"ImportedComparison": 300}
    assert sum(r.left.messages[0]["role"] == "system" for r in found) == 80  # type: ignore[union-attr]


def test_llamafactory_kto_en_demo_holds_150_good_and_150_bad() -> None:
    found = formats.read(outside("llamafactory/kto_en_demo.json"))
    assert Counter(r.ratings[0].thumb for r in found) == {"up": 150, "down": 150}  # type: ignore[union-attr]


def test_hh_harmless_refuses_four_empty_answers_and_five_other_prompts() -> None:
    found = list(formats.read(outside("hh-rlhf/harmless-base.test.jsonl.gz")))
    refused = [r for r in found if isinstance(r, RowRefused)]
    assert len(found) == 2312
    # rows 86, 516, 925 and 1103 counted from 0
    assert [r.line for r in refused if "empty" in r.reason] == [87, 517, 926, 1104]
    assert sum("same prompt" in r.reason for r in refused) == 5
    assert len(refused) == 9


def test_open_assistant_trees_give_754_ordered_pairs_of_212_ranked_sets() -> None:
    found = list(formats.read(outside("open-assistant/en_100_tree.jsonl")))
    pairs = [record for record in found if isinstance(record, ImportedComparison)]
    assert (len(found), len(pairs)) == (754, 754)
    assert {pair.preference for pair in pairs} == {"left"}
    # a set is the replies to one message: to one conversation of one tree
    asked = Counter((pair.line, json.dumps(pair.left.messages)) for pair in pairs)
    assert len(asked) == 212
    # of n ranked replies n (n - 1) / 2 pairs
    replies = {key: round((1 + math.sqrt(1 + 8 * pairs_of)) / 2) for key, pairs_of in asked.items()}
    keys = {(pair.line, side.key) for pair in pairs for side in (pair.left, pair.right)}  # type: ignore[union-attr]
    assert len(keys) == sum(replies.values())


def test_open_assistant_trees_hold_100_trees_of_1167_messages() -> None:
    lines = outside("open-assistant/en_100_tree.jsonl").read_text("utf-8").splitlines()
    waiting = [json.loads(line)["prompt"] for line in lines]
    assert len(waiting) == 100
    messages = 0
    while waiting:
        messages += 1
        waiting += waiting.pop()["replies"]
    assert messages == 1167


def test_the_reference_vectors_are_46_cases() -> None:
    cases = json.loads(outside("vectors/reference_vectors.json").read_text("utf-8"))
    assert len({case["id"] for case in cases}) == len(cases) == 46


@pytest.mark.parametrize("policy", ["random", "bts"])
def test_the_open_bandit_logs_are_10000_choices_each_with_its_propensity(policy: str) -> None:
    with outside(f"open-bandit/men/{policy}/men.csv").open(newline="") as file:
        found = [float(row["propensity_score"]) for row in csv.DictReader(file)]
    assert len(found) == 10_000
    assert all(0 < propensity <= 1 for propensity in found)


def test_pandalm_test_set_holds_999_rows_six_with_an_answer_that_is_no_text() -> None:
    found = list(formats.read(outside("pandalm/testset-v1.json")))
    refused = [r for r in found if isinstance(r, RowRefused)]
    assert len(refused) == 6
    assert all("expected a text, found True" in r.reason for r in refused)
    assert len({r.line for r in found}) == 999
    assert len(found) - len(refused) == (999 - 6) * 3
    pairs = [r for r in found if isinstance(r, ImportedComparison)]
    empty = {r.key for r in pairs if "" in (r.left.response, r.right.response)}  # type: ignore[union-attr]
    assert len(empty) == 54


def test_tensorzero_tables_hold_997_decisions_84_good_and_416_bad() -> None:
    path = outside("tensorzero-haiku/ChatInference.jsonl")
    found = list(formats.read(path, ratings_path=outside("tensorzero-haiku/BooleanMetricFeedback.jsonl")))
    assert len(found) == 997
    thumbs = Counter(r.ratings[0].thumb if r.ratings else "" for r in found)  # type: ignore[union-attr]
    assert thumbs == {"up": 84, "down": 416, "": 497}
    assert found[0].messages == [{"role": "user", "content": '{"topic": "devastation"}'}]  # type: ignore[union-attr]
