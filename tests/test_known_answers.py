"""Known answers: what thumbs, stars, comparisons, corrections and the agent say is right, on one list per prompt."""

from __future__ import annotations

from typing import Any

import pytest

from feedback.services import comparison_submit, rating_submit
from rl.datasets.held_out_evidence import evidence_counts, held_out_of_database
from rl.datasets.known_answers import known_digest, known_rows
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, PAIRS, POOLED
from rl.gates.report import Case, Evidence
from rl.gates.rules import rule_other_evidence
from rl.training.held_out import AnswerJudge, right_answer_check
from tests.support.dataset_feedback import decide, prompts_in, rate
from tests.support.gate_worlds import BOUNDS
from tests.test_evaluate import PICKER, TALKER, A, M, P

Rows = dict[str, list[dict[str, Any]]]


def said(prompt: str = "q", **fields: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}], "prompt_hash": prompt, "split": "holdout", **fields
    }  # fmt: skip


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
        ([label("  " + A + " ", 1.0), label(A.replace('": ', '":'), 0.0)], set(), {A}),  # one answer, spelled twice
    ],
)  # fmt: skip
def test_votes_decide_which_answers_are_right(
    rows: list[Rows], right: set[str] | None, wrong: set[str] | None
) -> None:
    found = lists(*rows)
    if right is None:
        assert found is None
    else:
        assert found is not None
        assert (found[0], {text.strip() for text in found[1]}) == (right, wrong)


def test_the_agents_own_truth_goes_before_what_people_say() -> None:
    known = {KNOWN: [said()]}
    assert lists(label(P, 1.0), known, fruits=["apple", "pear"], ripe="apple") == ({A}, set())


def test_the_last_answer_of_a_closed_set_is_right_where_all_others_are_wrong() -> None:
    assert lists(label(A, 0.0), fruits=["apple", "pear"]) == ({P}, {A})
    assert lists(label(A, 0.0), fruits=["apple", "pear", "plum"]) == (set(), {A})


def test_wordings_of_free_text_are_on_no_list() -> None:
    assert known_rows({LABELS: [said(completion="hello", score=1.0, source="ratings")]}, TALKER) == []


def test_an_answer_on_neither_list_is_not_right() -> None:
    rows = [{**said(), "right": [A], "wrong": [P]}, {**said("r"), "right": [], "wrong": [P]}]
    check = right_answer_check(AnswerJudge(PICKER, None))
    assert check([rows[0]] * 3 + [rows[1]] * 2, [A, P, M, P, M]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_digest_changes_with_the_lists() -> None:
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


@pytest.mark.django_db
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
    assert found.snapshot is not None
    assert found.snapshot.kind == "scores"
    assert found.counts()[KNOWN] >= max(found.counts().get(kind, 0) for kind in POOLED)
