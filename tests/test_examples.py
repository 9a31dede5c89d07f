"""Single responses as rows: labels, scores, demonstrations and prompts, from worked evidence."""

import itertools
import json
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from django.test import Client

from feedback.models import Decision, Trace, prompt_hash
from rl.datasets.examples import Example, examples_from_evidence, prompt_examples
from rl.datasets.feedback_types import (
    CorrectionEvidence,
    DemonstrationEvidence,
    Evidence,
    RatingEvidence,
    RewardEvidence,
)
from rl.datasets.held_out_evidence import evidence_counts, held_out_of_database
from rl.datasets.pairs import RowSet, pairs_from_evidence
from rl.datasets.prompt_clusters import ClusteredPrompt, cluster_report, cluster_text, clusters_of
from rl.datasets.rows import recorded_prompts
from rl.models import Snapshot
from rl.recipes import RecipeError
from rl.registry.gate_evidence import evidence_of
from rl.registry.service import policy_evaluated
from tests.support.api_client import ApiClient
from tests.support.dataset_feedback import rate
from tests.support.evaluations import judged
from tests.support.experiments import policy_of
from tests.support.split_prompts import split_by_hash, stand

ONE, TWO = "0" * 64, "f" * 64
"""Prompt hashes of the train and of the holdout split."""

EVIDENCE = [
    RatingEvidence(ONE, "good", 1.0, tags=("clear",)),
    RatingEvidence(ONE, "good", 0.75),
    RatingEvidence(ONE, "bad", 0.0, simulated=True),
    RatingEvidence(ONE, "split", 1.0),
    RatingEvidence(ONE, "split", 0.0),
    RatingEvidence(TWO, "only", 1.0),
    CorrectionEvidence(ONE, "bad", "mended"),
    CorrectionEvidence(TWO, "only", "nonsense", valid=False),
]


def examples_split_by_hash(evidence: Iterable[Evidence], kind: str, **knobs: Any) -> RowSet[Example]:
    """As the datasets make them, every prompt on the side its hash alone gives it."""
    return examples_from_evidence(evidence, kind, split_by_hash, **knobs)


def contents(examples: RowSet[Example]) -> list[dict[str, Any]]:
    return [dict(row.content) for row in examples.rows]


def test_a_response_is_good_where_its_mean_verdict_is_above_neutral() -> None:
    labels = examples_split_by_hash(EVIDENCE, "labels")
    assert contents(labels) == [
        {"completion": "bad", "label": False},
        {"completion": "good", "label": True},
        {"completion": "only", "label": True},
    ]
    assert labels.left_out == {"undecided": 1}
    assert [row.votes for row in labels.rows] == [1, 2, 1]
    assert [row.simulated for row in labels.rows] == [True, False, False]
    assert labels.rows[1].tags == ("clear",)


def test_scores_and_demonstrations() -> None:
    # a score is the mean verdict
    assert contents(examples_split_by_hash(EVIDENCE, "scores")) == [
        {"completion": "bad", "score": 0.0},
        {"completion": "good", "score": 0.875},
        {"completion": "split", "score": 0.5},
        {"completion": "only", "score": 1.0},
    ]
    # what a person wrote is the demonstration where there is one
    found = examples_split_by_hash(EVIDENCE, "corrections")
    assert contents(found) == [{"completion": "mended"}, {"completion": "only"}]
    assert [row.source for row in found.rows] == ["correction", "ratings"]
    assert found.left_out == {"correction_invalid": 1, "not_good_enough": 2, "outranked": 1}


REWARDS = [RewardEvidence(TWO, "earned", 0.25, simulated=True), RewardEvidence(ONE, "bad", 1.0)]


def test_a_reward_stands_in_where_nobody_gave_a_verdict() -> None:
    scores = examples_split_by_hash([*EVIDENCE, *REWARDS], "scores")
    assert {"completion": "bad", "score": 0.0} in contents(scores)  # what people say goes before it
    (row,) = (row for row in scores.rows if row.content["completion"] == "earned")
    assert (row.content["score"], row.source, row.votes, row.simulated) == (0.25, "reward", 0, True)
    only_compared = [replace(reward, measured=False) for reward in REWARDS]
    for kind in ("labels", "corrections"):
        assert examples_split_by_hash([*EVIDENCE, *only_compared], kind) == examples_split_by_hash(
            EVIDENCE, kind
        )


@pytest.mark.parametrize(("threshold", "labels"), [(0.5, [False, True, True]), (0.8, [False, False, True])])
def test_the_threshold_parts_good_labels_from_bad(threshold: float, labels: list[bool]) -> None:
    earned = [RewardEvidence(ONE, "a", 0.49), RewardEvidence(ONE, "b", 0.5), RewardEvidence(ONE, "c", 0.8)]
    found = examples_split_by_hash(earned, "labels", threshold=threshold)
    assert [row.content["label"] for row in found.rows] == labels
    assert {row.source for row in found.rows} == {"reward"}


def test_a_threshold_that_makes_one_kind_of_label_only_is_refused() -> None:
    with pytest.raises(RecipeError, match="reward_threshold must be between 0 and 1"):
        examples_split_by_hash([], "labels", threshold=1.0)


SHOWN_ON_ONE = [
    RatingEvidence(ONE, "liked", 1.0),
    DemonstrationEvidence(ONE, "brought"),
    DemonstrationEvidence(ONE, "taught", "teacher"),
    RewardEvidence(ONE, "earned", 0.9),
    CorrectionEvidence(ONE, "bad", "mended"),
]


@pytest.mark.parametrize(
    ("without", "kept", "source"),
    [
        (0, "mended", "correction"),
        (1, "brought", "demonstration"),
        (2, "taught", "teacher"),
        (3, "liked", "ratings"),
        (4, "earned", "reward"),
    ],
)
def test_the_strongest_source_of_a_prompt_is_its_demonstration(without: int, kept: str, source: str) -> None:
    sources = ("correction", "demonstration", "teacher", "ratings", "reward")
    found = examples_split_by_hash(SHOWN_ON_ONE, "corrections", sources=sources[without:])
    assert [(row.content["completion"], row.source) for row in found.rows] == [(kept, source)]
    assert found.left_out.get("other_source", 0) == without
    assert found.left_out.get("outranked", 0) == 4 - without


def test_what_people_dislike_is_never_shown_whoever_wrote_it() -> None:
    said = [
        DemonstrationEvidence(ONE, "brought"),
        RatingEvidence(ONE, "brought", 0.0),
        RatingEvidence(ONE, "mended", 0.25),
    ]
    found = examples_split_by_hash([*said, CorrectionEvidence(ONE, "x", "mended")], "corrections")
    assert (found.rows, found.left_out) == ((), {"disliked": 2})


def test_a_row_knows_the_feedback_it_is_made_of_and_no_other() -> None:
    ids = [uuid.UUID(int=number) for number in range(4)]
    said = [
        RatingEvidence(ONE, "a", 1.0, feedback=(ids[0],)),
        RatingEvidence(ONE, "a", 1.0, feedback=(ids[1],)),
        RewardEvidence(ONE, "a", 0.0, feedback=(ids[2],)),  # people's word goes before it, so it is not read
        RewardEvidence(ONE, "b", 0.0, feedback=(ids[3],)),
    ]
    labels = examples_split_by_hash(said, "labels")
    assert [set(row.feedback) for row in labels.rows] == [{ids[0], ids[1]}, {ids[3]}]
    (pair,) = pairs_from_evidence(said, split_by_hash).rows
    assert (pair.chosen, pair.rejected, pair.source, pair.votes) == ("a", "b", "reward", 0)
    assert set(pair.feedback) == {ids[0], ids[1], ids[3]}


@pytest.mark.parametrize("kind", ["labels", "scores", "corrections"])
def test_the_order_of_the_evidence_changes_nothing(kind: str) -> None:
    expected = examples_split_by_hash(EVIDENCE, kind)
    for order in itertools.islice(itertools.permutations(EVIDENCE), 0, 40_320, 1_009):
        assert examples_split_by_hash(order, kind) == expected


def test_every_prompt_is_a_row_once_on_its_side_of_the_split() -> None:
    prompts = prompt_examples([TWO, ONE, ONE], split_by_hash)
    expected = [(ONE, "train"), (TWO, split_by_hash(TWO))]
    assert [(row.prompt_hash, row.split) for row in prompts.rows] == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("labels", [{"completion": '{"a": 1, "b": 2}', "label": True}]),
        ("scores", [{"completion": '{"a": 1, "b": 2}', "score": pytest.approx(2 / 3)}]),
    ],
)
def test_key_order_does_not_split_an_object(kind: str, expected: list[dict[str, Any]]) -> None:
    usual, other = '{"a": 1, "b": 2}', '{"b": 2,"a": 1}'
    evidence = [
        RatingEvidence(ONE, usual, 1.0),
        RatingEvidence(ONE, other, 0.0),
        RatingEvidence(ONE, usual, 1.0),
    ]
    examples = examples_split_by_hash(evidence, kind)
    assert contents(examples) == expected
    assert [row.votes for row in examples.rows] == [3]


LONG = (
    "our printer on the second floor makes a grinding noise whenever somebody sends more than ten pages at once and "
    "{} then shows a red light"
)


def word_clusters(texts: Mapping[str, str]) -> dict[str, str]:
    return clusters_of({name: ClusteredPrompt(text) for name, text in texts.items()})


def test_a_prompt_that_differs_in_one_word_of_many_is_near_identical_and_another_question_is_not() -> None:
    texts = {"a": LONG.format("it"), "b": "where is my parcel from last week?"}
    texts |= {"c": LONG.format("IT").upper(), "d": LONG.format("this")}
    texts |= {"e": "where is my parcel from last month?"}
    # a and d: 25 words each, 24 of them and 22 pairs are the same, of 50 and 48 + ... in all: above 0.85; b and e: of
    # 7 words and 6 pairs 6 and 5 are shared, of 8 and 7: 11 / 15
    assert word_clusters(texts) == {"a": "a", "b": "", "c": "a", "d": "a", "e": ""}
    assert word_clusters({}) == {}


def test_what_an_agents_template_says_tells_no_prompt_from_another() -> None:
    form = "You sort letters for a small company. Name the folder for this letter, as JSON, and nothing else. Letter {}"
    texts = {
        f"p{i}": form.format(f"from {name} about {what}")
        for i, (name, what) in enumerate(
            (name, what) for name in ("ann", "bob", "cy", "dee") for what in ("rent", "tax", "leave")
        )
    }
    assert set(word_clusters(texts).values()) == {""}
    again = word_clusters({**texts, "q": form.format("from Ann about rent!")})
    assert {name for name, cluster in again.items() if cluster} == {"p0", "q"}


def test_clusters_do_not_grow_by_chains() -> None:
    words = [f"w{i}" for i in range(40)]
    texts = {}
    for step in range(12):  # each differs from the one before in one word, the last from the first in eleven
        texts[str(step)] = " ".join(["new" + word if i < step else word for i, word in enumerate(words)])
    # beside other questions: what most prompts say would count as the template
    texts |= {f"other{i}": " ".join(f"{word}of{i}" for word in words) for i in range(14)}
    found = word_clusters(texts)
    assert found["1"] == found["0"] == "0"
    assert found["11"] != "0"


def test_short_prompts_that_differ_in_a_number_alone_are_one() -> None:
    random = Random(1)
    things = ("Koffer", "Schirm", "Ticket", "Hund", "Kinderwagen", "Fahrrad", "Schlüssel")
    places = ("Gleis {}", "Wagen {}", "Zug ICE {}", "Schließfach {}/{}")
    texts = {
        f"{thing} {place} {number}": f"Ein {thing} an {place.format(number, number + 1)}?"
        for thing in things
        for place in places
        for number in random.sample(range(1, 500), 3)
    }
    found = Counter(word_clusters(texts).values())
    assert sorted(found.values()) == [3] * 28
    assert "" not in found


def test_numbers_tell_prompts_apart_where_they_are_what_an_agent_is_asked_about() -> None:
    amounts = {
        f"{what} {n}": f"Refund of {n} EUR for a {what}?" for what in ("bag", "hat") for n in range(60)
    }
    assert set(word_clusters(amounts).values()) == {""}
    # as a form that one in five asks by, beside questions of their own
    forms = {f"form {n}": f"Set row {n}" for n in range(20)}
    asked = {f"{a} {b}": f"what about {a} with {b}?" for a in "abcdefghi" for b in "klmnopqrs"}
    assert set(word_clusters(forms | asked).values()) == {""}


def test_a_number_that_many_prompts_share_is_a_value() -> None:
    months = ("January", "March", "April", "June", "November", "December", "May")
    documents = {
        f"{kind} {month} {year}": f"{kind} of {month} {year}, folders: {kind}s/{year}"
        for kind in ("Letter", "Invoice", "Contract")
        for month in months
        for year in (2024, 2025)
    }
    assert set(word_clusters(documents).values()) == {""}


def test_prompts_of_one_trace_are_one() -> None:
    texts = ("find the invoice", "open it", "who wrote it?", "send it back", "thanks")
    steps = {
        f"{trace} {text}": ClusteredPrompt(f"{trace} {text}", trace) for trace in "abcde" for text in texts
    }
    found = clusters_of({**steps, "alone": ClusteredPrompt("where is my parcel?", "z")})
    assert Counter(found.values()) == {"": 1, **{f"{trace} {texts[0]}": 5 for trace in "abcde"}}
    # a trace that holds a tenth of all prompts and more names an app, not a conversation
    whole = {name: ClusteredPrompt(prompt.text, "one") for name, prompt in steps.items()}
    assert set(clusters_of(whole).values()) == {""}


def test_a_person_who_asks_again_in_other_words_asks_the_same() -> None:
    asked = "my invoice of last month shows the wrong address"
    again = "the invoice of last month shows the wrong address, please"
    others = {
        f"{unit} {n}": ClusteredPrompt(f"{word} {word}{unit} {unit}{word} {unit}{unit}{word}", unit=unit)
        for unit in "bcdef"
        for n, word in enumerate(("red", "green"))
    }
    one = {"first": ClusteredPrompt(asked, unit="ann"), "then": ClusteredPrompt(again, unit="ann")}
    assert {name for name, cluster in clusters_of({**others, **one}).items() if cluster} == {"first", "then"}
    # of two people these are two questions, and of one customer with many users too
    two = {"first": ClusteredPrompt(asked, unit="ann"), "then": ClusteredPrompt(again, unit="bob")}
    tenant = {name: ClusteredPrompt(prompt.text, unit="acme") for name, prompt in {**others, **one}.items()}
    for prompts in ({**others, **two}, tenant):
        assert set(clusters_of(prompts).values()) == {""}


@pytest.mark.django_db
def test_the_trace_and_the_unit_of_recorded_prompts_are_known(client: Client) -> None:
    trace = Trace.objects.create(agent="helper", steps=[])
    for text, unit, of in (("hello there", "u1", None), ("and then?", "", trace)):
        prompt = [{"role": "user", "content": text}]
        Decision.objects.create(
            agent="helper",
            messages=prompt,
            prompt_hash=prompt_hash("helper", prompt),
            response="yes",
            unit=unit,
            trace=of,
        )
    found = recorded_prompts(
        "helper", [prompt_hash("helper", [{"role": "user", "content": "hello there"}]), "gone"]
    )
    assert list(found.values()) == [ClusteredPrompt("hello there", "", "u1")]
    (other,) = set(
        recorded_prompts("helper", Decision.objects.values_list("prompt_hash", flat=True)).values()
    ) - set(found.values())
    assert other == ClusteredPrompt("and then?", str(trace.pk), "")


@pytest.mark.django_db
def test_near_identical_prompts_count_as_one_and_not_at_all_where_one_is_trained_on() -> None:
    def rated(split: str, *texts: str) -> None:
        for text in texts:
            stand("helper", [{"role": "user", "content": text}], split)
            rate(text, "yes", "up")
            rate(text, "no", "down")

    rated("holdout", "how do I reset my password?", "which plan is the cheapest?")
    rated("holdout", LONG.format("it"), LONG.format("this"))
    assert evidence_counts("helper")[0]["pairs"] == 3
    found = held_out_of_database("helper", 30)
    assert (found.counts()["pairs"], len(found.rows["pairs"])) == (3, 4)
    rated("train", LONG.format("sometimes"))
    found = held_out_of_database("helper", 30)
    expected = (2, 6)
    assert (found.counts()["pairs"], found.left_out["near_identical"]) == expected
    report = found.clusters
    assert (report["prompts"], report["clusters"], report["clustered"]) == (5, 1, 3)
    assert (report["on_two_sides"], report["left_out"]) == (1, 2)
    assert report["largest"][0]["sides"] == {"holdout": 2, "train": 1}
    # named by their hashes: a copy of the words would be missed by whoever erases them
    assert "printer" not in json.dumps(report)
    assert len(set(report["largest"][0]["examples"])) == 3


def test_a_report_counts_clusters_and_shows_the_largest() -> None:
    clusters = {"a": "a", "b": "a", "c": "a", "d": "d", "e": "d", "f": ""}
    sides = {"a": "holdout", "b": "holdout", "c": "holdout", "d": "holdout", "e": "eval", "f": "train"}
    found = cluster_report(clusters, sides)
    assert found.pop("largest") == [
        {"prompts": 3, "sides": {"holdout": 3}, "examples": ["a", "b", "c"]},
        {"prompts": 2, "sides": {"holdout": 1, "eval": 1}, "examples": ["d", "e"]},
    ]
    assert found == {"prompts": 6, "clusters": 2, "clustered": 5, "on_two_sides": 1, "left_out": 1}
    assert re.findall(r"\d+", cluster_text(found)) == ["5", "6", "2", "1"]
    assert cluster_text(cluster_report({"a": ""}, {"a": "train"})) == ""


@pytest.mark.django_db
def test_clusters_stand_on_the_policys_page_and_in_the_gates_evidence(admin_client: Client) -> None:
    policy = policy_of("helper-v1", agent="helper")
    evaluation = judged(policy)
    prompt = [{"role": "user", "content": "<b>Reset</b>?"}]
    key = prompt_hash("helper", prompt)
    Decision.objects.create(agent="helper", messages=prompt, prompt_hash=key, response="yes")
    report = cluster_report({key: key, "b": key, "c": ""}, {key: "holdout", "b": "train"})
    snapshot = Snapshot.objects.create(
        agent="helper", kind="pairs", path="x", sha256="0" * 64, feedback_count=1, query={}
    )
    evaluation.figures["clusters"], evaluation.snapshot = report, snapshot
    evaluation.save()
    policy_evaluated(policy, evaluation, actor="test")
    page = admin_client.get("/policies/helper-v1/").text
    assert cluster_text(report) in page
    assert "&lt;b&gt;Reset&lt;/b&gt;?" in page
    assert evidence_of(evaluation).near_identical == cluster_text(report)
    rows = ApiClient("read").get("/api/policies/?agent=helper").json()["results"]
    (found,) = [row for row in rows if row["kind"] != "recorded"]
    expected = {"prompts": 3, "clusters": 1, "clustered": 2, "on_two_sides": 1, "left_out": 1}
    assert found["clusters"] == expected
