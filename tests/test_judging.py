"""Judging rounds: who sees which pair, what counts, when a round ends, and how its answers come about."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.test import Client

from feedback.erasure.withdrawals import WithdrawalSelection, decisions_withdraw
from rl.checksums import file_sum
from rl.datasets.erasure import decisions_forget
from rl.evaluation.judging import round_answer, round_create, round_opened
from rl.evaluation.sides import HostedFailed, HostedSide
from rl.linear.model import CLOSED, WEIGHTS, LinearPolicy
from rl.models import JudgedPair, JudgingRound, PairJudgement, Policy, PromptSplit, ServingSettings, Upstream
from rl.registry.judging import (
    JudgingRefused,
    ShownPair,
    judgement_submit,
    judgement_undo,
    pair_next,
    pair_shown,
    round_standing,
    round_stop,
)
from rl.registry.service import policy_reject
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE
from rl.training.held_out import HeldOutPrompt
from rl.training.policy import Generation
from tests.support.judging import AGENT, decision_of, incumbent_of, preference, round_of
from tests.support.registry_rows import policy_of

pytestmark = pytest.mark.django_db


def shown_to(pair: JudgedPair, rater: str) -> ShownPair:
    found = pair_shown(pair, rater)
    assert found is not None
    return found


def judge(judging: JudgingRound, rater: str, wanted: str) -> PairJudgement:
    pair, side = preference(judging, rater, wanted)
    return judgement_submit(pair, rater, side)


def test_a_rater_sees_each_pair_once_and_no_equal_answers() -> None:
    judging = round_of(5, same=2)
    seen = []
    while (shown := pair_next(judging, "ada")) is not None:
        seen.append(shown.pair.pk)
        judgement_submit(shown.pair, "ada", "tie")
    assert len(set(seen)) == len(seen) == 3
    with pytest.raises(JudgingRefused):
        judgement_submit(JudgedPair.objects.get(pk=seen[0]), "ada", "left")


def test_sides_are_shuffled_by_rater_and_stay() -> None:
    judging = round_of(40)
    sides = []
    for rater in ("ada", "bob", "cy"):
        for pair in judging.pairs.all():
            shown = shown_to(pair, rater)
            assert {shown.left, shown.right} == {pair.answer, pair.other_answer}
            assert shown.left == shown_to(pair, rater).left
            sides.append(shown.left == pair.answer)
    assert 35 < sum(sides) < 85


def test_a_preference_is_stored_by_policy_and_not_by_side() -> None:
    judging = round_of(30)
    for rater in ("ada", "bob", "cy"):
        assert judge(judging, rater, "policy").preference == "policy"
        assert judge(judging, rater, "opponent").preference == "opponent"
    assert round_standing(judging).counts.wins == 3


def test_the_units_are_prompts_whose_raters_are_heard_together() -> None:
    judging = round_of(2, raters=3)
    for rater, first, second in (
        ("ada", "policy", "tie"),
        ("bob", "policy", "opponent"),
        ("cy", "opponent", "both_bad"),
    ):
        for pair, wanted in zip(judging.pairs.order_by("pk"), (first, second), strict=True):
            shown = shown_to(pair, rater)
            side = wanted
            if wanted in ("policy", "opponent"):
                side = (
                    "left"
                    if shown.left == (pair.answer if wanted == "policy" else pair.other_answer)
                    else "right"
                )
            judgement_submit(pair, rater, side)
            if (rater, wanted) == ("bob", "policy"):
                assert round_standing(judging).counts.wins == 0
    found = round_standing(JudgingRound.objects.get()).counts
    assert (found.wins, found.losses, found.ties, found.judgements, found.raters) == (1, 1, 0, 6, 3)


def test_a_judgement_too_many_changes_nothing() -> None:
    judging = round_of(3)
    pair = pair_next(judging, "ada").pair
    for rater, wanted in (("ada", "policy"), ("bob", "opponent")):
        side = "left" if (shown_to(pair, rater).left == pair.answer) == (wanted == "policy") else "right"
        judgement_submit(pair, rater, side)
    found = round_standing(judging).counts
    assert (found.wins, found.losses, found.judgements) == (1, 0, 2)


def test_a_judgement_is_taken_back() -> None:
    judging = round_of(4)
    first, second = judge(judging, "ada", "policy").pair, judge(judging, "ada", "tie").pair
    assert judgement_undo(judging, "bob") is None
    assert [judgement_undo(judging, "ada") for _ in range(3)] == [second, first, None]
    assert not PairJudgement.objects.exists()


def test_withdrawn_and_forgotten_decisions_are_not_shown() -> None:
    judging = round_of(3)
    first, second, third = judging.pairs.all()
    decisions_withdraw(WithdrawalSelection(ids=[first.decision]), actor="ada")
    decisions_forget([second.decision])
    assert pair_next(judging, "ada").pair == third
    judgement_submit(third, "ada", "tie")
    judging.refresh_from_db()
    assert (judging.status, judging.verdict) == ("ended", OPEN)


@pytest.mark.parametrize(("wanted", "verdict"), [("policy", BETTER), ("opponent", WORSE)])
def test_a_round_ends_with_its_verdict(wanted: str, verdict: str) -> None:
    judging = round_of(30)
    while JudgingRound.objects.get().is_open:
        judge(judging, "ada", wanted)
    judging.refresh_from_db()
    assert (judging.status, judging.verdict) == ("ended", verdict)
    assert judging.result["judgements"] < 20
    standing = round_standing(judging)
    assert (standing.share.low > 0.5, standing.share.high < 0.5) == (verdict == BETTER, verdict == WORSE)
    pair = judging.pairs.filter(judgements=None).first()
    assert pair is not None
    with pytest.raises(JudgingRefused):
        judgement_submit(pair, "bob", "tie")
    assert pair_next(judging, "bob") is None
    assert judgement_undo(judging, "ada") is None


def test_a_round_that_sets_a_route_goes_on_after_its_verdict() -> None:
    judging = round_of(30)
    ServingSettings.objects.create(agent=AGENT, route_policy=judging.policy.name)
    for _ in range(29):
        judge(judging, "ada", "opponent")
    judging.refresh_from_db()
    assert judging.is_open
    assert round_standing(judging).verdict == WORSE
    judge(judging, "ada", "opponent")
    judging.refresh_from_db()
    assert (judging.status, judging.verdict) == ("ended", WORSE)


def test_a_round_that_is_used_up_stays_open_and_keeps_its_result() -> None:
    judging = round_of(4, same=1)
    for wanted in ("policy", "opponent", "both_bad"):
        judge(judging, "ada", wanted)
    judging.refresh_from_db()
    assert (judging.status, judging.verdict) == ("ended", OPEN)
    judging.pairs.all().delete()
    found = round_standing(judging).counts
    assert (found.wins, found.losses, found.ties, found.same, found.both_bad) == (1, 1, 1, 1, 1)


def test_a_round_is_stopped_with_the_verdict_it_has() -> None:
    judging = round_of(60, margin=0.45)
    for wanted in ("policy", "opponent") * 8:
        judge(judging, "ada", wanted)
    stopped = round_stop(judging, actor="olga", reason="enough")
    assert (stopped.verdict, stopped.status) == (NOT_WORSE, "ended")
    assert "olga" in stopped.reason
    with pytest.raises(JudgingRefused):
        round_stop(judging, actor="olga")


def test_a_forecast_counts_answers_of_people() -> None:
    standing = round_standing(round_of(60, raters=2))
    assert 60 < standing.further <= 120
    assert standing.minutes == round(standing.further / 6)
    assert round_standing(round_of(8, policy=policy_of("other", "candidate", AGENT))).further is None


@pytest.mark.parametrize(("decided", "way_on"), [(2, "Compare on:"), (10, "Stop the round below")])
def test_an_even_round_says_whether_to_compare_on_or_to_stop(
    operator: Client, decided: int, way_on: str
) -> None:
    judging = round_of(14)
    for number in range(decided):
        pair, side = preference(judging, "bob", ("policy", "opponent")[number % 2])
        judgement_submit(pair, "bob", side)
    page = operator.get(f"/judging/{judging.pk}/").text
    assert way_on in page
    assert ('<button type="submit">Stop the round' in page) == (decided == 10)


def test_a_round_of_ties_says_that_they_were_ties() -> None:
    judging = round_of(3, same=1)
    for wanted in ("tie", "both_bad"):
        judge(judging, "ada", wanted)
    judging.refresh_from_db()
    standing = round_standing(judging)
    assert (judging.status, standing.verdict, standing.share.value) == ("ended", OPEN, None)
    words = standing.words("new", "old")
    assert "yet" not in words
    assert "2 of the judged prompts" in words and "1 had equal answers" in words  # noqa: PT018


@pytest.mark.parametrize("whose", ["policy", "opponent"])
def test_a_round_ends_when_one_of_its_policies_is_rejected(whose: str) -> None:
    opponent = policy_of("other", "candidate", AGENT)
    judging = round_of(5, opponent=opponent)
    judge(judging, "ada", "policy")
    loser = judging.policy if whose == "policy" else opponent
    policy_reject(loser, actor="olga", reason="too slow")
    judging.refresh_from_db()
    assert (judging.status, judging.verdict, judging.result["judgements"]) == ("ended", OPEN, 1)
    assert loser.name in judging.reason
    with pytest.raises(JudgingRefused):
        round_create(judging.policy, against=opponent.name, actor="olga")


def linear_policy(name: str, home: Path, *, says: str, stage: str = "candidate") -> Policy:
    """A policy that gives one answer whatever it is asked."""
    folder = home / "policies" / AGENT / name
    folder.mkdir(parents=True)
    answers = (says, "I do not know.")
    LinearPolicy(
        agent=AGENT,
        mode=CLOSED,
        families=("words",),
        answers=answers,
        quoted=False,
        rows=tuple(answers),
        columns=("word parcel",),
        weights=np.array([[0.0], [0.0]]),
        bias=np.array([1.0, 0.0]),
    ).save(folder)
    place = {"adapter_path": str(folder.relative_to(home)), "adapter_sha256": file_sum(folder / WEIGHTS)}
    return policy_of(name, stage, AGENT, kind="linear", base_model="", base_model_hash="", **place)


@pytest.fixture
def home(settings: Any, tmp_path: Path) -> Path:
    settings.RATCHET_HOME = tmp_path
    return tmp_path


def test_the_answers_of_a_recorded_opponent_are_those_it_gave(home: Path) -> None:
    rows = [decision_of(number, response="Same." if number == 0 else "") for number in range(20)]
    decision_of(30, policy="somebody-else")
    incumbent, policy = incumbent_of(), linear_policy("v1", home, says="Same.")
    for row in rows[10:]:
        PromptSplit.objects.create(prompt_hash=row.prompt_hash, agent=AGENT, split="train")
    judging = round_answer(round_create(policy, prompts=50, actor="olga"))
    assert judging.opponent == incumbent
    assert (judging.status, judging.attempt) == ("running", 1)
    assert {pair.decision for pair in judging.pairs.all()} <= {row.pk for row in rows[:10]}
    assert judging.pairs.count() == 10
    assert {pair.other_answer for pair in judging.pairs.all()} == {row.response for row in rows[:10]}
    assert judging.pairs.get(same=True).other_answer == "Same."
    assert "10 prompts" in judging.reason


def test_the_apps_model_is_the_opponent_before_anybody_looked_at_the_agent(home: Path) -> None:
    decision_of(0)
    opponent = round_create(linear_policy("v1", home, says="B"), actor="olga").opponent
    assert (opponent.kind, opponent.stage) == ("recorded", "champion")


def test_what_people_wrote_and_simulations_are_no_answers_of_the_apps_model(home: Path) -> None:
    own = decision_of(0)
    decision_of(1, tags=["demonstration"])
    decision_of(2, source="simulation")
    decision_of(0, response="What a teacher wrote.", tags=["teacher"])
    judging = round_answer(round_create(linear_policy("v1", home, says="B"), actor="olga"))
    assert list(judging.pairs.values_list("other_answer", flat=True)) == [own.response]


def test_an_opponent_with_files_is_asked(home: Path) -> None:
    for number in range(5):
        decision_of(number, policy="an-app")
    linear_policy("v1", home, says="A", stage="champion")
    judging = round_answer(round_create(linear_policy("v2", home, says="B"), prompts=3, actor="olga"))
    assert set(judging.pairs.values_list("answer", "other_answer", "same")) == {("B", "A", False)}
    assert judging.pairs.count() == 3


def test_a_hosted_opponent_is_asked_what_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream.objects.create(name="provider", url="http://127.0.0.1:9/v1", model="m")
    Policy.objects.create(name="hosted", agent=AGENT, kind="hosted", stage="champion", upstream=upstream)
    recorded, other = decision_of(0, policy="hosted"), decision_of(1, policy="an-app")
    asked: list[str] = []

    def answers(side: HostedSide, prompts: Sequence[HeldOutPrompt]) -> list[Generation]:
        asked.extend(prompt.messages[-1]["content"] for prompt in prompts)
        return [Generation("Asked again.", 2, "stop") for _ in prompts]

    monkeypatch.setattr(HostedSide, "answers", answers)
    policy = linear_policy("v1", home, says="B")
    judging = round_answer(round_create(policy, actor="olga"))
    assert asked == [other.messages[-1]["content"]]
    expected = {recorded.pk: recorded.response, other.pk: "Asked again."}
    assert dict(judging.pairs.values_list("decision", "other_answer")) == expected

    def refuses(side: HostedSide, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        return [None for _ in prompts]

    monkeypatch.setattr(HostedSide, "answers", refuses)
    round_stop(judging, actor="olga")
    judging = round_answer(round_create(policy, actor="olga"))
    assert list(judging.pairs.values_list("decision", flat=True)) == [recorded.pk]
    assert "1 prompts are left out" in judging.reason

    def fails(side: HostedSide, prompts: Sequence[HeldOutPrompt]) -> list[Generation]:
        raise HostedFailed("the provider is busy")

    monkeypatch.setattr(HostedSide, "answers", fails)
    round_stop(judging, actor="olga")
    with pytest.raises(JudgingRefused, match="busy"):
        round_answer(round_create(policy, actor="olga"))
    assert JudgingRound.objects.latest("pk").status == "failed"


def test_near_identical_prompts_are_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [decision_of(number) for number in range(12)]
    incumbent_of()
    names = [row.prompt_hash for row in rows]
    monkeypatch.setattr("rl.evaluation.judging.MIN_PROMPTS", 2)
    monkeypatch.setattr(
        "rl.evaluation.judging.clusters_of",
        lambda prompts: {names[0]: "", **dict.fromkeys(names[1:4], names[1])},
    )
    PromptSplit.objects.create(prompt_hash=names[9], agent=AGENT, split="train")
    judging = round_answer(round_create(linear_policy("v1", home, says="B"), actor="olga"))
    assert judging.pairs.count() == 12 - 1 - 2


def test_a_round_without_prompts_has_failed_and_says_why(home: Path) -> None:
    decision_of(1, policy="somebody-else")
    waiting = round_create(linear_policy("v1", home, says="B"), against=incumbent_of().name, actor="olga")
    with pytest.raises(JudgingRefused, match="recorded answer"):
        round_answer(waiting)
    judging = JudgingRound.objects.get()
    assert (judging.status, judging.verdict) == ("failed", "")
    with pytest.raises(JudgingRefused, match="failed"):
        round_answer(judging)


def test_a_round_whose_process_died_keeps_what_it_has() -> None:
    assert round_opened(round_of(3, status="answering"), "killed").status == "running"
    empty = round_opened(
        round_of(0, status="answering", prompts=9, policy=policy_of("v8", agent=AGENT)), "killed"
    )
    assert (empty.status, empty.reason) == ("failed", "killed")
    ended = round_of(1, status="ended", verdict="open", policy=policy_of("v7", agent=AGENT))
    assert round_opened(ended, "killed").status == "ended"


def test_a_round_that_is_stopped_is_not_answered_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        decision_of(number)
    incumbent_of()
    monkeypatch.setattr("rl.evaluation.judging.AT_ONCE", 3)
    judging = round_create(linear_policy("v1", home, says="B"), actor="olga")

    def stop(done: int, total: int, text: str) -> None:
        if done == 3:
            round_stop(judging, actor="olga")

    round_answer(judging, stop)
    judging.refresh_from_db()
    assert (judging.status, judging.pairs.count()) == ("ended", 3)


def test_what_cannot_be_judged_is_refused() -> None:
    incumbent, policy = incumbent_of(), policy_of("v1", "candidate", AGENT)
    other = policy_of("filer-v1", "candidate", "filer")
    for wrong, facts in (
        (incumbent, {}),
        (policy, {"against": "filer-v1"}),
        (policy, {"against": "v1"}),
        (policy, {"prompts": 0}),
        (policy, {"prompts": 801}),
        (policy, {"raters": 0}),
        (policy, {"margin": 0.5}),
        (policy, {"margin": float("nan")}),
    ):
        with pytest.raises(JudgingRefused):
            round_create(wrong, actor="olga", **facts)  # type: ignore[arg-type]
    assert round_create(other, actor="olga").opponent is None
    round_create(policy, actor="olga")
    with pytest.raises(JudgingRefused, match="open"):
        round_create(policy, actor="olga")


def test_each_round_against_an_opponent_may_spend_less() -> None:
    first = round_of(2)
    judge(first, "ada", "tie")
    round_stop(first, actor="olga")
    unused = round_create(policy_of("v1", "candidate", AGENT), actor="olga")
    assert (unused.attempt, unused.alpha) == (2, pytest.approx(0.05 / 6))
    round_stop(unused, actor="olga")
    assert round_create(policy_of("v2", "candidate", AGENT), actor="olga").attempt == 2
    assert round_create(policy_of("v3", "candidate", AGENT), actor="olga").attempt == 3
    assert round_create(policy_of("v4", "candidate", AGENT), against="base", actor="olga").attempt == 1


def test_the_command_makes_shows_and_stops_rounds(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        decision_of(number)
    incumbent_of()
    linear_policy("v1", home, says="B")
    call_command("judging_round", "create", "--policy", "v1")
    judging = JudgingRound.objects.get()
    assert f"/rate/pairs/?round={judging.pk}" in capsys.readouterr().out
    call_command("judging_round", "list")
    call_command("judging_round", "show", judging.pk)
    call_command("judging_round", "stop", judging.pk, "--reason", "enough")
    judging.refresh_from_db()
    assert (judging.status, judging.pairs.count()) == ("ended", 4)
