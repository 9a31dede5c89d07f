"""Known answers: what thumbs, stars, comparisons, corrections and the agent say is right, on one list per prompt."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from feedback.services import comparison_submit, decision_record, rating_submit
from rl.agents import AGENTS
from rl.datasets import DatasetRefused, snapshot_rows
from rl.datasets.demonstrations import preferred_rows
from rl.datasets.feedback_types import known_digest, known_rows
from rl.datasets.held_out_evidence import evidence_counts, held_out_of_database
from rl.evaluation.service import _preferred_rows
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, PAIRS, POOLED
from rl.gates.headlines import liked_of, right_answer_figure
from rl.gates.report import Case, Evidence
from rl.gates.rules import rule_other_evidence
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import MethodChoice, _of_preferred, method_chosen
from rl.models import TrainingRun
from rl.training.held_out import (
    AnswerJudge,
    HeldOutPrompt,
    liked_difference,
    liked_share,
    right_answer_check,
    verdicts_on,
)
from tests.support.dataset_feedback import decide, prompts_in, rate
from tests.support.gate_worlds import BOUNDS
from tests.test_evaluate import PICKER, TALKER, A, M, P

pytestmark = pytest.mark.django_db

Rows = dict[str, list[dict[str, Any]]]


def said(prompt: str = "q", **fields: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "prompt_hash": prompt,
        "split": "holdout",
        **fields,
    }


def label(completion: str, score: float, votes: int = 1) -> Rows:
    return {LABELS: [said(completion=completion, score=score, votes=votes, source="ratings")]}


def written(completion: str, votes: int = 1) -> Rows:
    return {CORRECTIONS: [said(completion=completion, votes=votes, source="correction")]}


def pair(chosen: str, rejected: str, source: str = "comparison", votes: int = 1) -> Rows:
    return {PAIRS: [said(chosen=chosen, rejected=rejected, source=source, votes=votes)]}


def lists(*rows: Rows, **state: Any) -> tuple[set[str], set[str]] | None:
    """Right and wrong answers of the one prompt; None where nothing is known of it."""
    by_kind: Rows = {}
    for one in rows:
        for kind, some in one.items():
            by_kind.setdefault(kind, []).extend(dict(row, state=state or None) for row in some)
    found = known_rows(by_kind, PICKER)
    return (set(found[0]["right"]), set(found[0]["wrong"])) if found else None


@pytest.mark.parametrize(
    ("rows", "right", "wrong"),
    [
        ([label(A, 1.0)], {A}, set()),
        ([label(A, 0.75)], {A}, set()),  # four stars
        ([label(A, 0.25)], set(), {A}),
        ([label(A, 1.0), label(P, 0.0)], {A}, {P}),
        ([label(A, 2 / 3, votes=3)], {A}, set()),  # two of three raters
        ([label(A, 0.0), written(P), pair(P, A, "correction")], {P}, {A}),
        # one person likes what another corrects: as many for it as against it is not right
        ([label(A, 1.0), written(P), pair(P, A, "correction")], {P}, {A}),
        # three people like it: both are right
        ([label(A, 1.0, votes=3), written(P), pair(P, A, "correction")], {A, P}, set()),
        ([written(A, votes=2), written(P)], {A, P}, set()),
        ([pair(A, P)], {A}, {P}),
        ([pair(A, P), pair(P, M)], {A}, {P, M}),
        ([pair(A, P), label(P, 1.0)], {A, P}, set()),  # a thumb says more of an answer than a comparison
        ([pair(A, P), label(A, 0.0)], set(), {A, P}),
        ([pair(A, P), label(A, 0.5)], set(), {P}),  # three stars are neither
        ([pair(A, P, "candidates")], None, None),  # scores of the app's model are nobody's word
        ([label(A, 0.5)], None, None),
        (
            [label("  " + A + " ", 1.0), label(A.replace('": ', '":'), 0.0)],
            set(),
            {A},
        ),  # one answer, spelled twice
    ],
)
def test_votes_decide_what_is_right(rows: list[Rows], right: set[str] | None, wrong: set[str] | None) -> None:
    found = lists(*rows)
    if right is None:
        assert found is None
    else:
        assert (found[0], {text.strip() for text in found[1]}) == (right, wrong)


def test_lists_of_one_prompt() -> None:
    # the agents own truth goes before what people say
    known = {KNOWN: [said()]}
    assert lists(label(P, 1.0), known, fruits=["apple", "pear"], ripe="apple") == ({A}, set())
    # the last answer of a closed set is right where all others are wrong
    assert lists(label(A, 0.0), fruits=["apple", "pear"]) == ({P}, {A})
    assert lists(label(A, 0.0), fruits=["apple", "pear", "plum"]) == (set(), {A})
    # wordings of free text are on no list
    assert known_rows({LABELS: [said(completion="hello", score=1.0, source="ratings")]}, TALKER) == []


def test_answers_are_checked_and_lists_digested() -> None:
    # an answer on neither list is not right
    rows = [{**said(), "right": [A], "wrong": [P]}, {**said("r"), "right": [], "wrong": [P]}]
    check = right_answer_check(AnswerJudge(PICKER))
    assert check([rows[0]] * 3 + [rows[1]] * 2, [A, P, M, P, M]) == [1.0, 0.0, 0.0, 0.0, 0.0]
    # the digest changes with the lists
    one = {**said(), "right": [A], "wrong": [P]}
    assert known_digest([one]) == known_digest([{**one, "tags": ["x"]}])
    assert known_digest([one]) != known_digest([{**one, "right": [A, M]}])


def test_kinds_that_are_on_the_lists_are_not_asked_again_where_known_answers_lead() -> None:
    lost = [Case(0.0, 1.0)] * 30 + [Case(1.0, 1.0)] * 10
    kinds = {KNOWN: [Case(1.0, 0.0)] * 40, CORRECTIONS: lost}
    asked = Evidence("base", lost, other_kinds=kinds, discrete=True)
    assert rule_other_evidence(asked, BOUNDS, "champion").outcome == "not_applicable"
    free = Evidence("base", lost, other_kinds=kinds, discrete=False)
    assert rule_other_evidence(free, BOUNDS, "champion").outcome == "refused"


def test_the_counts_without_a_model_are_those_of_an_evaluation() -> None:
    for number, prompt in enumerate(prompts_in("train", 20, agent="router")):
        decide(prompt, ("sales", "repairs", "returns")[number % 3], agent="router")
    prompts = prompts_in("holdout", 30, agent="router")
    for number, prompt in enumerate(prompts[:24]):
        rate(prompt, ("sales", "repairs", "returns")[number % 3], ("up", "down")[number % 2], agent="router")
    rating_submit(decision=decide(prompts[24], "sales", agent="router"), rater="ann", stars=3)
    rating_submit(decision=decide(prompts[25], "sales", agent="router"), rater="ann", correction="repairs")
    one, other = (decide(prompts[26], answer, agent="router") for answer in ("sales", "returns"))
    comparison_submit(left=one, right=other, preference="right", rater="ann")
    decide(prompts[27], "sales", agent="router")
    found = held_out_of_database("router", 10)
    assert found.counts()[KNOWN] == evidence_counts("router")[0][KNOWN] == 26
    rows = {row["prompt"][-1]["content"]: row for row in found.rows[KNOWN]}
    assert rows[prompts[25]]["right"] == ["repairs"]
    assert (rows[prompts[26]]["right"], rows[prompts[26]]["wrong"]) == (["returns"], ["sales"])
    # the snapshot holds the ratings, so that new prompts alone make no new look at the holdout
    assert found.snapshot.kind == "scores"
    assert found.counts()[KNOWN] >= max(found.counts().get(kind, 0) for kind in POOLED)


def test_the_best_answer_to_a_prompt_is_the_one_that_won_or_is_liked() -> None:
    def row(prompt: str, **columns: Any) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": prompt}], "prompt_hash": prompt, **columns}

    def pair(chosen: str, rejected: str, prompt: str = "p") -> dict[str, Any]:
        return row(prompt, chosen=chosen, rejected=rejected)

    def scored(completion: str, score: float, prompt: str) -> dict[str, Any]:
        return row(prompt, completion=completion, score=score)

    rows = [
        pair("a", "b"),
        pair("b", "c"),
        pair("a", "c"),
        pair("x", "y", "tied"),
        pair("y", "x", "tied"),
        scored("fine", 0.7, "s"),
        scored("best", 1.0, "s"),
        scored("bad", 0.0, "disliked"),
    ]
    expected = [("p", "a"), ("s", "best")]
    assert [(one["prompt_hash"], one["completion"]) for one in preferred_rows(rows)] == expected
    assert all(
        set(row) <= {"prompt", "prompt_hash", "state", "facts", "completion"} for row in preferred_rows(rows)
    )


def orders_rated(count: int) -> None:
    """One thumb each on objects of three values, of which hardly two are the same."""
    for place in range(count):
        answer = {"dish": f"dish {place % 9}", "seats": place % 7, "notes": [f"n{place % 5}"]}
        decision = decision_record(agent="tables", messages=f"guest {place}", response=json.dumps(answer)).row
        rating_submit(decision=decision, rater="ada", thumb="up" if place % 2 else "down")


@pytest.mark.slow
def test_auto_shows_the_bundled_base_liked_objects() -> None:
    orders_rated(160)
    chosen = method_chosen("tables", base_model="bundled")
    assert (chosen.method, chosen.knobs) == ("sft", {"feedback": "scores", "teacher": "preferred"})
    assert "answers that people preferred or liked are the demonstrations" in chosen.reason
    assert method_chosen("tables", base_model="Qwen/Qwen2.5-0.5B-Instruct").method == "kto"


def test_thumbs_on_a_built_in_agent_are_left_to_kto_and_pairs_are_not() -> None:
    prepared = SimpleNamespace(rows=lambda split: _object_pairs(40))
    pairs, thumbs = (
        MethodChoice("dpo", "40 pairs"),
        MethodChoice("kto", "40 good"),
    )
    found = [_of_preferred(AGENTS["librarian"], like, "pairs", prepared) for like in (pairs, thumbs)]  # type: ignore[arg-type]
    assert [choice and choice.method for choice in found] == ["sft", None]


def _object_pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"text {place}"}],
            "prompt_hash": str(place),
            "chosen": json.dumps({"subjects": [f"s{place}"]}),
            "rejected": json.dumps({"subjects": [f"t{place}"]}),
        }
        for place in range(count)
    ]


@pytest.mark.parametrize(
    ("recipe", "imitated"),
    [
        ({"teacher": "preferred", "feedback": "scores"}, 3),
        ({"teacher": "preferred", "feedback": "corrections"}, 0),
        ({"teacher": "form", "feedback": "scores"}, 0),
        ({}, 0),
    ],
)
def test_preferred_answers_shown_count_as_distance(recipe: dict[str, str], imitated: int) -> None:
    policy: Any = SimpleNamespace(run=SimpleNamespace(recipe=recipe))
    liked = {"prompt": [], "prompt_hash": "liked", "completion": "{}", "score": 1.0}
    thumbs = [liked, {**liked, "prompt_hash": "no", "score": 0.0}]
    held_out: Any = SimpleNamespace(rows={PAIRS: _object_pairs(2), LABELS: thumbs})
    assert len(_preferred_rows(held_out, policy)) == imitated


@pytest.mark.slow
def test_few_liked_objects_are_left_to_kto() -> None:
    orders_rated(50)
    assert method_chosen("tables", base_model="bundled").method == "kto"


@pytest.mark.campaign
@pytest.mark.training
def test_a_run_learns_the_preferred_answers(base: str) -> None:
    orders_rated(100)
    knobs: dict[str, Any] = {"feedback": "scores", "teacher": "preferred", "max_steps": 2, "min_steps": 0}
    knobs |= {"batch_size": 4, "lora_r": 2, "lora_alpha": 4}
    train.train(TrainOrder("tables", "sft", "cpu", base, knobs))
    run = TrainingRun.objects.get()
    assert run.status == "succeeded"
    assert run.snapshot is not None
    liked = sum(row["score"] > 0.5 for row in snapshot_rows(run.snapshot, "train"))
    assert f"preferred or liked are the demonstrations, of {liked} prompts" in str(run.result["notes"])


@pytest.mark.slow
def test_a_run_without_a_liked_answer_is_refused(base: str) -> None:
    for place in range(60):
        decision = decision_record(agent="tables", messages=f"guest {place}", response=f"no {place}").row
        rating_submit(decision=decision, rater="ada", thumb="down")
    knobs = {"feedback": "scores", "teacher": "preferred"}
    order = TrainOrder("tables", "sft", "cpu", base, knobs)
    with pytest.raises(DatasetRefused, match="preferred or liked: rate at"):
        train.train(order)


def prompt(number: int, cluster: str = "", **said: Any) -> HeldOutPrompt:
    return HeldOutPrompt([{"role": "user", "content": f"q{number}"}], {"cluster": cluster}, **said)


def test_raters_who_disagree_share_an_answer_and_near_identical_prompts_count_as_one() -> None:
    prompts = [
        prompt(0, liked=[A, A], disliked=[A]),  # two of three liked it
        prompt(1, "c", liked=[A]),
        prompt(2, "c", disliked=[A]),  # one cluster with the one before: half of it
        prompt(3, demonstrations=[A]),
        prompt(4, liked=[P]),  # of another answer
    ]
    verdicts = verdicts_on(prompts, [A] * 5, AnswerJudge(PICKER))
    assert verdicts == {0: 2 / 3, 1: 1.0, 2: 0.0, 3: 1.0}
    share = liked_share(prompts, verdicts)
    # three clusters with a verdict, four in all: (2/3 + 1/2 + 1) / 3
    assert (share["value"], share["n"], share["of"]) == (pytest.approx(13 / 18), 3, 4)
    assert (share["least"], share["most"]) == (pytest.approx(13 / 24), pytest.approx(19 / 24))
    other = verdicts_on(prompts, [P] * 5, AnswerJudge(PICKER))
    assert other == {4: 1.0}
    assert liked_difference(prompts, verdicts, other)["n"] == 0  # no prompt on which both have a verdict
    assert liked_share(prompts, verdicts_on(prompts, [M] * 5, AnswerJudge(PICKER))) is None


RATED = {"value": 0.7, "low": 0.6, "high": 0.79, "n": 90, "of": 120, "least": 0.525, "most": 0.775}


def test_the_share_of_liked_answers_names_its_estimator_and_what_it_takes_for_granted() -> None:
    rated = {
        **RATED,
        "estimator": "rated answers",
        "assumes": "which answers to a prompt were rated is random",
    }
    theirs = {**rated, "value": 0.3, "low": 0.2, "high": 0.41}
    found = liked_of(
        {"liked": rated, "comparison": {"against": "base", "liked": theirs, "liked_difference": None}}
    )
    assert found["words"] == (
        "People would like 70.0 % [60.0, 79.0] of its answers, 30.0 % [20.0, 41.0] of base's (90 of its "
        "120 answers are rated; assuming that which answers to a prompt were rated is random; without that "
        "assumption 52.5 % to 77.5 %)."
    )
    assert liked_of({"liked": None, "off_policy": {"refused": "no log"}}) is None


@pytest.mark.parametrize(
    ("reward", "warnings", "estimator"),
    [
        ("score", [], "off-policy"),
        ("score", ["few decisions"], "rated answers"),
        ("outcome", [], "rated answers"),
    ],
)
def test_propensities_go_before_rated_answers(reward: str, warnings: list[str], estimator: str) -> None:
    log = {"reward": reward, "decisions": 400, "overlap": {"warnings": warnings}}
    log |= {"doubly_robust": {"value": 0.5, "low": 0.4, "high": 0.6}}
    rated = {**RATED, "estimator": "rated answers", "assumes": "chance"}
    found = liked_of({"liked": rated, "off_policy": log})
    assert found["estimator"] == estimator
    assert found["value"] == (0.5 if estimator == "off-policy" else 0.7)


def test_the_known_answer_is_told_with_its_gain() -> None:
    own = {"value": 0.61, "low": 0.51, "high": 0.7, "n": 100}
    gain = {"value": 0.41, "low": 0.31, "high": 0.5}
    figures = {
        "comparison": {"against": "base"},
        "evidence": {"known": {"own": own, "against_value": 0.2, "difference": gain}},
    }
    found = right_answer_figure(figures)
    assert found["words"] == (
        "Correct by the known answer in 61.0 % [51.0, 70.0] of 100 prompts, base in 20.0 %, a paired "
        "difference of +41.0 points [+31.0, +50.0]."
    )
    assert right_answer_figure({"ground_truth": None}) is None
