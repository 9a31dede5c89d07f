"""A language model as judge beside people: how it is asked, and whether its verdicts are used."""

from collections.abc import Sequence
from typing import Any

import pytest

from rl.evaluation import judge_model
from rl.evaluation.judge_model import round_judge, verdict
from rl.models import JudgedPair, JudgingRound
from rl.registry.judge_reports import drifts, round_judge_report, round_represent
from rl.registry.judging import JudgingRefused, judgement_submit
from tests.support.experiments import policy_of
from tests.support.hosted import hosted
from tests.support.judging import SIDES, preference, round_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A judge that prefers the policy's answers; `asked` has the prompts."""
    policy = hosted("http://127.0.0.1:1/v1", "judge-gpt", agent="judge")
    policy.asked = []  # type: ignore[attr-defined]

    def answers(_policy: Any, _agent: Any, prompts: Sequence[Any]) -> Any:
        texts = [prompt.messages[0]["content"] for prompt in prompts]
        policy.asked += texts  # type: ignore[attr-defined]
        yield ["A" if f"# Answer A\n{SIDES[0]}" in text else "The answer B." for text in texts]

    monkeypatch.setattr(judge_model, "policy_answers", answers)
    return policy


def judged_by_people(judging: JudgingRound, wanted: Sequence[str]) -> None:
    for one in wanted:
        pair, side = preference(judging, "ada", one)
        judgement_submit(pair, "ada", side)


@pytest.mark.parametrize(
    ("reply", "worth"),
    [
        ("A", 1),
        ("answer: b.", -1),
        ("T", 0),
        ("**A**", 1),
        ("It is a tie. B is longer.", 0),
        ("neither", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_a_reply_names_a_side_or_is_a_tie(reply: str | None, worth: int) -> None:
    assert verdict(reply) == worth


def test_each_pair_is_shown_in_both_orders_and_judged_once(judge: Any) -> None:
    judging = round_of(12, same=2)
    assert round_judge(judging, judge) == 10
    assert len(judge.asked) == 20
    assert set(judging.pairs.values_list("judged", flat=True)) == {1.0, None}
    assert round_judge(judging, judge) == 0


def test_a_judge_of_first_answers_says_nothing(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_model, "policy_answers", lambda p, a, prompts: iter([["A"] * len(prompts)]))
    judging = round_of(8)
    round_judge(judging, judge)
    assert set(judging.pairs.values_list("judged", flat=True)) == {0.0}


def test_a_side_and_a_recorded_policy_are_no_judges(judge: Any) -> None:
    judging = round_of(4)
    for policy in (judging.policy, judging.opponent):
        with pytest.raises(JudgingRefused):
            round_judge(judging, policy)  # type: ignore[arg-type]
    other = policy_of("linear-judge", agent="judge", kind="linear")
    with pytest.raises(JudgingRefused, match="cannot judge"):
        round_judge(judging, other)


def test_verdicts_are_used_where_people_agree_with_them(judge: Any) -> None:
    judging = round_of(100)
    judging.pairs.update(judged=1.0)
    JudgingRound.objects.filter(pk=judging.pk).update(judge=judge, alpha=1e-9)
    judging.refresh_from_db()
    assert round_judge_report(judging) is None
    seen = ["policy", "opponent", "policy"] * 8
    for number, wanted in enumerate(seen):
        pair, side = preference(judging, "ada", wanted)
        judgement_submit(pair, "ada", side)
        worth = (1.0 if wanted == "policy" else -1.0) if number % 8 else 0.0
        JudgedPair.objects.filter(pk=pair.pk).update(judged=worth)
    JudgedPair.objects.filter(judgements=None).update(judged=1.0)
    half = list(judging.pairs.filter(judgements=None).values_list("pk", flat=True)[:30])
    JudgedPair.objects.filter(pk__in=half).update(judged=-1.0)
    report = round_judge_report(judging)
    expected = (24, 100, 0.24, True, "")
    assert (report.audited, report.pairs, report.sampled, report.helps, report.why) == expected
    assert report.agrees.value == 1.0
    assert report.share.high - report.share.low < report.people.high - report.people.low  # type: ignore[operator]
    assert round_represent(judging)["judge"] == report.words


def test_a_judge_whom_people_contradict_is_not_used(judge: Any) -> None:
    judging = round_of(60)
    JudgingRound.objects.filter(pk=judging.pk).update(judge=judge, alpha=1e-9)
    judging.refresh_from_db()
    judging.pairs.update(judged=1.0)
    judged_by_people(judging, ["policy", "opponent"] * 8)
    report = round_judge_report(judging)
    assert not report.helps
    assert report.share == report.people
    assert "not used" in report.words


def test_a_judge_that_agrees_less_than_before_drifts() -> None:
    good, bad = [(1.0, 1.0)], [(1.0, -1.0)]
    assert drifts(good * 20 + bad * 20)
    assert not drifts((good + bad) * 20)
    assert not drifts(bad * 20 + good * 20)
    assert not drifts([])
