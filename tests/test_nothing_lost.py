"""The rule of imports: what a file states is used, kept beside the decision, or named as left out."""

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from django.core.management import call_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedback.models import Decision, Rating
from feedback.transfer import formats
from feedback.transfer.formats.base import columns_watched
from feedback.transfer.formats.columns import NAMES
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    Record,
    RowRefused,
    RowSkipped,
)
from tests.support.formats import HERE, written
from tests.support.imports import file_import

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Where is my lamp?"}
GOOD, BAD = "It ships Monday.", "Dunno."
TURN, OTHER = ({"role": "assistant", "content": text} for text in (GOOD, BAD))


def records_of(path: Path) -> list[Record]:
    return list(formats.read(path))


def one(tmp_path: Path, row: dict[str, Any]) -> Record:
    (record,) = records_of(written(tmp_path / "x.jsonl", [row]))
    return record


def compared(record: Record) -> tuple[Any, Any, Any]:
    """Prompt, better and worse response of a comparison."""
    assert isinstance(record, ImportedComparison), record
    assert isinstance(record.left, ImportedDecision)
    assert isinstance(record.right, ImportedDecision)
    assert record.preference == "left"
    assert record.left.messages == record.right.messages
    return record.left.messages, record.left.response, record.right.response


PROMPTS = ("prompt", "question", "query", "instruction", "input", "prompt_text", "user_prompt")
SIDES = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response", "rejected_response"),
    ("response", "rejected"),
    ("output", "rejected_output"),
    ("answer", "rejected_answer"),
    ("completion", "rejected_completion"),
    ("response", "response_rejected"),
)


@pytest.mark.parametrize("system", ["", "system", "system_prompt"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sides", SIDES)
def test_a_pair_keeps_its_prompt(tmp_path: Path, prompt: str, sides: tuple[str, str], system: str) -> None:
    row = {prompt: ASKED["content"], sides[0]: GOOD, sides[1]: BAD} | (
        {system: "Be brief."} if system else {}
    )
    assert compared(one(tmp_path, row)) == ([*([SYSTEM] if system else []), ASKED], GOOD, BAD)


ROWS = (
    {"messages": [SYSTEM, ASKED], "response": GOOD, "thumb": "up"},
    {"prompt": [SYSTEM, ASKED], "chosen": [TURN], "rejected": [OTHER]},
    {"messages": [SYSTEM, ASKED], "response": TURN, "score": 0.9},
    {"prompt": [SYSTEM, ASKED], "completion": [TURN], "label": 1},
    {"conversation": [SYSTEM, ASKED, TURN], "rating": "up"},
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "+".join(row))
@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "repr"])
def test_json_in_a_cell_is_the_same_in_every_file(tmp_path: Path, row: dict[str, Any], kind: str) -> None:
    (plain,) = records_of(written(tmp_path / "plain.jsonl", [row]))
    write = repr if kind == "repr" else json.dumps
    texts = {name: write(value) if isinstance(value, (list, dict)) else value for name, value in row.items()}
    path = tmp_path / f"x.{'jsonl' if kind == 'repr' else kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([texts]), path)
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(texts), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerow(texts)
    else:
        written(path, [texts])
    (record,) = records_of(path)
    assert said(record) == said(plain)


def said(record: Record) -> Any:
    """What a record says, wherever it stands in its file."""
    assert isinstance(record, (ImportedDecision, ImportedComparison)), record
    return json.loads(
        json.dumps(asdict(record), default=str), object_hook=lambda d: {**d, "line": 0, "key": ""}
    )


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (
            {"prompt": "q", "chosen_response": GOOD, "rejected_response": BAD, "chosen_reward": 4.0},
            ["chosen_reward"],
        ),
        (
            {"context": [ASKED], "completions": [{"rank": 0, "completion": [TURN]}]},
            ["context", "completions"],
        ),
        ({"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"}, ["text"]),
        (
            {"prompt": "q", "response": "a", "feedback": '{"thumb": "down", "comment": "late"}'},
            ["feedback.thumb"],
        ),
    ],
)
def test_unreadable_columns_are_named(tmp_path: Path, row: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(FormatRefused) as refusal:
        records_of(written(tmp_path / "x.jsonl", [row]))
    assert all(name in str(refusal.value) for name in names)


@pytest.mark.django_db
def test_a_column_that_nobody_reads_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "chosen": GOOD, "rejected": BAD, "colour": "red"} for n in range(3)]
    report = file_import(written(tmp_path / "x.jsonl", rows), agent="shop")
    assert report.left_out_columns == {"colour": 3}
    assert report.as_dict()["left_out_columns"] == {"colour": 3}
    assert "left out: colour (3 rows)" in report.notes


@pytest.mark.django_db
def test_keys_of_a_message_stand_beside_the_decision(tmp_path: Path) -> None:
    rows = [{"messages": [{**ASKED, "id": f"m{n}", "timestamp": n}, TURN]} for n in range(2)]
    file_import(written(tmp_path / "x.jsonl", rows), agent="shop", format="openai")
    first, second = Decision.objects.order_by("metadata__message_fields__0__timestamp")
    assert first.prompt_hash == second.prompt_hash
    assert first.messages == [ASKED]
    assert first.metadata["message_fields"] == {"0": {"id": "m0", "timestamp": 0}}


SINGLE = {"prompt": ASKED["content"], "response": GOOD, "thumb": "up"}
PAIR = {"prompt": ASKED["content"], "chosen": GOOD, "rejected": BAD}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), base=st.sampled_from([SINGLE, PAIR]))
def test_synonyms_say_the_same(tmp_path: Path, data: Any, base: dict[str, Any]) -> None:
    names = {name: data.draw(st.sampled_from(NAMES[name]), label=name) for name in base if name != "thumb"}
    if len(set(names.values())) < len(names):
        return
    row = {names.get(name, name): value for name, value in base.items()}
    assert said(one(tmp_path, row)) == said(one(tmp_path, base))


PARTS = st.sampled_from(
    [
        {"type": "thinking", "thinking": "hmm"},
        {"type": "text", "text": "more"},
        {"type": "tool_use", "id": "t", "name": "stock", "input": {"sku": 1}},
        {"type": "refusal", "refusal": "no"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "strange", "value": "zz"},
    ]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(PARTS, min_size=1, max_size=3), place=st.sampled_from(["messages", "chosen", "completion"])
)
def test_no_part_of_an_answer_vanishes(tmp_path: Path, parts: list[dict[str, Any]], place: str) -> None:
    turn = {"role": "assistant", "content": [{"type": "text", "text": "start "}, *parts]}
    row: dict[str, Any] = {
        "messages": {"messages": [ASKED, turn]},
        "chosen": {"prompt": [ASKED], "chosen": [turn], "rejected": [OTHER]},
        "completion": {"prompt": [ASKED], "completion": [turn]},
    }[place]
    record = one(tmp_path, row)
    kinds = {part["type"] for part in parts}
    if kinds & {"image_url", "strange"}:
        assert isinstance(record, RowRefused)
        assert "not_text" in record.reason
        return
    text = json.dumps(asdict(record), default=str)  # type: ignore[call-overload]
    for kind, words in (("thinking", "hmm"), ("text", "start "), ("tool_use", "stock"), ("refusal", "no")):
        assert kind not in kinds or words in text
    assert "hmm" not in json.dumps(getattr(record, "response", ""))


JSON_FILES = [
    path
    for path in (*sorted(HERE.glob("*.json*")), *sorted((HERE / "tools").glob("*.json*")))
    if path.name != "llamafactory_dataset_info.json"  # the description of a file
]


def content(path: Path) -> Any:
    text = path.read_text("utf-8")
    is_lines = path.suffix == ".jsonl"
    return [json.loads(line) for line in text.splitlines() if line.strip()] if is_lines else json.loads(text)


def named(folder: Path, path: Path, rows: Any) -> tuple[bool, list[str], set[str]]:
    """Of an example with other rows: whether `zz-value` is kept or nothing is, the refusals, the columns left out."""
    copy = folder / path.name
    copy.write_text(
        "\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows), "utf-8"
    )
    with columns_watched() as unread, formats.readings(copy, formats.detect(path)) as files:
        records = [record for file in files for record in file.records()]
    made = [record for record in records if not isinstance(record, (RowSkipped, RowRefused))]
    kept = "zz-value" in json.dumps([asdict(record) for record in made], default=str)
    refusals = [record.reason for record in records if isinstance(record, RowRefused)]
    return kept or not made, refusals, set(unread)


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: path.name)
def test_a_column_added_to_any_format_is_kept_or_named(tmp_path: Path, path: Path) -> None:
    rows = content(path)
    for row in rows if isinstance(rows, list) else [rows]:
        row["zz_added"] = "zz-value"
    kept, refusals, unread = named(tmp_path, path, rows)
    assert kept or "zz_added" in unread or any("zz_added" in reason for reason in refusals)


ADDED: dict[str, dict[str, Any]] = {
    "key of a message": {},
    "thinking": {"type": "thinking", "thinking": "zz-value"},
    "text": {"type": "text", "text": "zz-value"},
    "call": {"type": "tool_use", "id": "t", "name": "zz-value", "input": {}},
    "picture": {"type": "image_url", "image_url": {"url": "zz-value"}},
}


def messages_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get("role"), str) and isinstance(value.get("content"), str):
            yield value
            return
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from messages_in(item)


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: path.name)
def test_what_is_added_to_messages_is_kept_refused_or_named(tmp_path: Path, path: Path) -> None:
    for what, part in ADDED.items():
        rows = content(path)
        for turn in list(messages_in(rows)):
            if not part:
                turn["zz_added"] = "zz-value"
            elif what != "call" or turn["role"] == "assistant":
                turn["content"] = [{"type": "text", "text": turn["content"]}, part]
        items = rows if isinstance(rows, list) else [rows]
        holders = {key for row in items for key, value in row.items() if "zz-value" in json.dumps(value)}
        if not holders:
            continue
        kept, refusals, unread = named(tmp_path, path, rows)
        assert kept or refusals or holders & unread, what


@pytest.mark.django_db
def test_reasoning_goes_out_in_our_own_format_and_comes_back(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "stock", "arguments": "{}"}}
    rows = [
        {"messages": [ASKED, {**turn, "reasoning_content": f"thought {n}"}], "thumb": "up"}
        for n, turn in enumerate([TURN, {"role": "assistant", "content": "", "tool_calls": [call]}])
    ]
    file_import(written(tmp_path / "x.jsonl", rows), agent="shop")
    before = sorted(Decision.objects.values_list("id", "response", "reasoning", "metadata"))
    assert {reasoning for _, _, reasoning, _ in before} == {"thought 0", "thought 1"}
    call_command(
        "export_training_data", agent="shop", format="ratchet", output=str(tmp_path / "out.jsonl"), limit=0
    )
    Rating.objects.all().delete()
    Decision.objects.all().delete()
    file_import(tmp_path / "out.jsonl")
    assert sorted(Decision.objects.values_list("id", "response", "reasoning", "metadata")) == before
