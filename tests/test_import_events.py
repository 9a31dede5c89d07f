"""Votes and events that look alike are still each their own; the same file again adds nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Comparison, Decision, Outcome
from feedback.transfer import formats
from feedback.transfer.formats.records import ImportedDecision, RowRefused
from tests.support.formats import HERE, one, outside, refusal, written
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db


def event(cost: float, chosen: int = 1, **more: Any) -> dict[str, Any]:
    """A choice of one of two actions, as Vowpal Wabbit logs it without an id."""
    return {
        "_label_cost": cost,
        "_label_probability": 0.5,
        "_label_Action": chosen,
        "_labelIndex": chosen - 1,
        "a": [chosen, 3 - chosen],
        "p": [0.5, 0.5],
        "c": {"User": {"tier": "gold"}, "_multi": [{"_tag": "v1"}, {"_tag": "v2"}]},
        **more,
    }


def test_200_events_without_ids_are_200_decisions_and_the_same_200_again(tmp_path: Path) -> None:
    # 35 different lines, as a log of one context and few actions has
    log = [event(-float(number % 2), 1 + number % 2) for number in range(200)]
    path = written(tmp_path / "log.jsonl", log)
    report = file_import(path, agent="bandit")
    assert (report.decisions, report.outcomes, report.skipped) == (200, 200, 0)
    assert Counter(Outcome.objects.values_list("value", flat=True)) == {1.0: 100, -0.0: 100}
    again = file_import(path, agent="bandit")
    assert (again.decisions, again.outcomes) == (0, 0)
    # the log goes on
    written(path, [*log, event(0.0)])
    assert file_import(path, agent="bandit").decisions == 1
    assert Decision.objects.count() == 201


def test_an_event_with_an_id_is_the_same_one_wherever_it_stands(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", [event(0.0), event(0.0, EventId="e1")])
    written(tmp_path / "b.jsonl", [event(0.0, EventId="e1")])
    assert file_import(tmp_path / "a.jsonl", agent="bandit").decisions == 2
    assert file_import(tmp_path / "b.jsonl", agent="bandit").decisions == 0


def test_a_table_of_logged_choices_has_an_event_on_each_line(tmp_path: Path) -> None:
    row = {"prompt": "Which?", "response": "x", "candidates": ["x", "y"], "propensity": 0.5, "reward": 1}
    path = written(tmp_path / "log.jsonl", [row] * 3)
    assert file_import(path, agent="bandit").decisions == 3
    assert file_import(path, agent="bandit").decisions == 0
    assert list(Outcome.objects.values_list("name", "value")) == [("reward", 1.0)] * 3


def test_votes_that_agree_are_still_votes(tmp_path: Path) -> None:
    # the same two answers by other models, judged alike by the same three annotators
    (row,) = json.loads((HERE / "pandalm.json").read_text())
    same = [{**row, "idx": n, "cmp_key": key} for n, key in enumerate(("m1_m2", "m1_m3", "org_m_1_x"))]
    (tmp_path / "p.json").write_text(json.dumps(same))
    report = file_import(tmp_path / "p.json")
    assert (report.comparisons, report.skipped) == (9, 0)
    assert Comparison.objects.filter(superseded_by__isnull=True).count() == 9
    assert {side.policy for side in Decision.objects.all()} == {"m1", "m2", "m3", ""}
    assert file_import(tmp_path / "p.json").comparisons == 0


def test_every_vote_of_pandalms_test_set_comes_into_an_empty_database(tmp_path: Path) -> None:
    rows = json.loads(outside("pandalm/testset-v1.json").read_text("utf-8"))
    texts = [(row["instruction"], row["input"], str(row["response1"]), str(row["response2"])) for row in rows]
    # 71 pairs of answers stand there several times, each time of other models: 170 of the 999 rows
    again = Counter(texts)
    several = [row for row, text in zip(rows, texts, strict=True) if again[text] > 1]
    (tmp_path / "p.json").write_text(json.dumps(several), "utf-8")
    report = file_import(tmp_path / "p.json", skip_bad=True)
    assert (len(several), report.comparisons + 3 * len(report.refused)) == (170, 510)
    assert dict(report.skipped_because) == {}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (event(0.0, _label_probability=0.9), "_label_probability: 0.9, but p says 0.5 for the same action"),
        ({**event(0.0), "_label_Action": None, "_labelIndex": None, "a": [0, 1]}, "a: holds a 0"),
        ({**event(0.0), "_label_Action": 3}, "_label_Action: expected 1 to 2, found 3"),
        ({"_label_ca": {"action": 0.5}, "c": {}}, "a continuous action"),
        ({"c": {"_multi": [{"_slot_id": 0}], "_slots": [{}]}, "_outcomes": []}, "a slates file"),
        ({"c": {"_multi": [{}, {}], "_slots": [{}]}, "_outcomes": []}, "_outcomes: expected 1"),
        (
            {"c": {"_multi": [{}, {}], "_slots": [{"_inc": [1]}]}, "_outcomes": [{"_a": [0], "_p": [1]}]},
            "_outcomes[0]._a: expected one of 1, found 0",
        ),
        (
            {"c": {"_multi": [{}], "_slots": [{}, {}]}, "_outcomes": [{"_a": 0}, {"_a": 0}]},
            "_outcomes[1]._a: expected one of none, found 0",
        ),
    ],
)
def test_a_choice_that_cannot_be_told_is_refused(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    found = list(formats.read(written(tmp_path / "x.jsonl", [row]), "vw"))
    assert isinstance(found[-1], RowRefused)
    assert reason in found[-1].reason


def test_a_propensity_in_single_precision_is_no_contradiction(tmp_path: Path) -> None:
    assert isinstance(one(tmp_path, event(0.0, _label_probability=0.50000002)), ImportedDecision)
    assert "propensity" not in refusal(tmp_path, {**event(0.0), "_label_Action": 9}, "vw")
