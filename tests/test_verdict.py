"""The verdict on a policy: one sentence, one bar, one action; the guard against ratings that are only complaints."""

from collections.abc import Sequence

import pytest
from django.test import Client

from rl.gates.evidence_kinds import KNOWN, LABELS, PAIRS
from rl.gates.report import AnswerPair, Case, Evidence, Item, RatedAnswer
from rl.gates.rules import gate_judge, rule_ratings
from rl.gates.verdict import (
    COMPARE,
    EVALUATE,
    PROMOTE,
    RATE,
    READY,
    REFUSED,
    SERVING,
    TRAIN,
    WAITS,
    Verdict,
    action_of,
    verdict_compared,
)
from rl.models import Policy
from rl.registry import service as registry
from rl.registry.checklist import policy_verdict, rival_title
from tests.support.evaluations import judged
from tests.support.gate_worlds import BOUNDS
from tests.support.registry_rows import make_policy
from tests.test_gate_compared import round_with


def table(both: int, wins: int, losses: int, neither: int) -> list[Item]:
    sides = [(1, 1)] * both + [(1, 0)] * wins + [(0, 1)] * losses + [(0, 0)] * neither
    return [Case(own, other) for own, other in sides]


def answer(*, same: bool, said: bool, settled: bool = True, number: int = 0) -> AnswerPair:
    return AnswerPair(
        True,
        True,
        0.5,
        0.5,
        10,
        10,
        False,
        same=same,
        said=said,
        other_said=said,
        settled=settled and said,
        prompt_hash=f"{number}",
    )


def evidence_known(
    items: Sequence[Item], answers: Sequence[AnswerPair] = (), *, attempt: int = 1
) -> Evidence:
    return Evidence("shop", (), list(answers), other_kinds={KNOWN: items}, discrete=True, attempt=attempt)


def said_of(evidence: Evidence, further: int = 0) -> Verdict:
    return verdict_compared(
        gate_judge(evidence, BOUNDS), evidence, BOUNDS, "your app's model", further=further
    )


def test_the_bike_shop_in_one_sentence() -> None:
    found = said_of(evidence_known(table(30, 13, 2, 13)))
    assert found.result == (
        "Right in 43 of 58 held-out prompts; your app's model in 32 (+19 points, 95 % interval +6 to +31)."
    )
    assert (found.state, found.standing) == (READY, "Ready to promote.")
    assert found.action.kind == PROMOTE
    assert (round(found.bar.own), round(found.bar.rival)) == (74, 55)
    assert found.bar.low == pytest.approx(55.2 + 6, abs=1)
    assert found.words == f"{found.result} {found.standing}"


def test_what_is_missing_is_an_action_with_its_effort() -> None:
    unsettled = [answer(same=False, said=True, settled=False, number=n) for n in range(25)]
    found = said_of(evidence_known(table(30, 9, 5, 14), unsettled))
    assert (found.state, found.standing) == (WAITS, "Not shown to be better yet.")
    assert found.action == action_of(COMPARE, "rate 25 answers where the two differ", 25)
    expected = ("rate 25 answers where the two differ, about 4 minutes", 4)
    assert (found.action.words, found.action.minutes) == expected
    # nothing left to compare: other prompts
    found = said_of(evidence_known(table(30, 9, 5, 14)), further=110)
    assert found.action == action_of(RATE, "rate 110 answers to other prompts, then evaluate again", 110)
    assert action_of(RATE, "rate 1 answer", 1).words == "rate 1 answer, about 1 minute"


def test_too_few_prompts_not_better_and_harm() -> None:
    few = said_of(evidence_known(table(5, 3, 1, 2)), further=40)
    assert few.standing == "Too few to tell: 11 of 30 held-out prompts are rated."
    assert (few.action.kind, few.action.answers) == (RATE, 40)
    equal = said_of(evidence_known(table(30, 4, 4, 10)))
    expected = ("Not better than your app's model.", TRAIN)
    assert (equal.standing, equal.action and equal.action.kind) == expected
    # twenty prompts that nobody decided could turn it
    open_ones = [answer(same=False, said=True, settled=False, number=n) for n in range(20)]
    assert said_of(evidence_known(table(30, 4, 4, 10), open_ones)).action == action_of(
        COMPARE, "rate 20 answers where the two differ", 20
    )
    tests = Evidence(
        "shop", (), other_kinds={KNOWN: table(30, 13, 2, 13), "tests": table(20, 0, 12, 0)}, discrete=True
    )
    harmed = said_of(tests)
    assert harmed.state == REFUSED
    assert harmed.standing.startswith("Refused: worse by other kinds of evidence: ")


def test_gains_and_concordances_in_words() -> None:
    # a gain that 95 percent shows and the gate does not says why
    found = said_of(evidence_known(table(30, 12, 3, 13), attempt=9))
    assert found.state == WAITS
    assert "comparison 9 on the same prompts asks for more certainty than 95 %" in found.standing
    # a concordance is said as what it is
    liked = [RatedAnswer(f"p{n}", float(n % 2), n % 2 + 0.01 * n) for n in range(40)]
    found = said_of(Evidence("base", (), other_kinds={LABELS: liked}))
    assert found.result.startswith(
        "Of two rated answers it moved towards the one that people found better in 100 %"
    )
    assert (found.basis, found.representative) == ("", None)


def test_likelihoods_alone_ask_for_a_judging_round() -> None:
    pairs = [one for one in table(10, 20, 2, 10) if isinstance(one, Case)]
    found = said_of(Evidence("shop-v1", pairs))
    assert found.state == WAITS
    assert found.action == action_of(
        COMPARE, "begin a judging round: people compare its answers side by side"
    )
    assert said_of(Evidence("base", pairs)).state == READY
    unscored = Evidence("shop-v1", (), exclusions={PAIRS: "no log-probabilities"})
    assert said_of(unscored).action == found.action


def test_a_round_that_decides_is_the_result() -> None:
    judging = round_with(40, 12)
    behind = [one for one in table(20, 6, 9, 0) if isinstance(one, Case)]
    found = said_of(Evidence("shop-v1", behind, judging=judging))
    assert (found.state, found.result, found.bar) == (READY, judging.words, None)


@pytest.mark.parametrize(
    ("unrated", "outcome", "representative"),
    [
        ([(True, 40)], "not_applicable", True),  # they differ on no unrated prompt
        ([(True, 24), (False, 16)], "passed", False),  # as often alike as on rated prompts
        ([(True, 36), (False, 4)], "refused", False),  # alike on 90 %, on rated ones on 60 %
        ([(True, 3), (False, 1)], "passed", False),  # nine in ten are rated: nobody needs to know who chose
    ],
)
def test_complaints_are_seen(unrated: list[tuple[bool, int]], outcome: str, representative: bool) -> None:
    rated = [answer(same=n < 24, said=True, number=n) for n in range(40)]
    more = [answer(same=same, said=False) for same, count in unrated for _ in range(count)]
    evidence = evidence_known(table(10, 14, 2, 14), [*rated, *more])
    assert rule_ratings(evidence, BOUNDS, "champion").outcome == outcome
    found = said_of(evidence)
    assert found.representative is representative
    assert bool(found.basis) == (unrated[-1] != (False, 1))
    if outcome == "refused":
        assert found.state == WAITS
        assert (found.action.kind, found.action.answers) == (COMPARE, 4)
    else:
        assert found.state == READY


def test_where_the_rated_answers_are_not_the_rivals_complaints_do_not_matter() -> None:
    others = [AnswerPair(True, True, 0, 0, 9, 9, same=n < 5, said=True, settled=True) for n in range(40)]
    unrated = [answer(same=True, said=False)] * 40 + [answer(same=False, said=False)]
    evidence = evidence_known(table(10, 14, 2, 14), [*others, *unrated])
    assert rule_ratings(evidence, BOUNDS, "champion").outcome == "not_applicable"


@pytest.mark.django_db
def test_a_policy_is_open_then_judged_then_serving() -> None:
    policy = make_policy()
    found = policy_verdict(policy)
    expected = ("Not compared with the base model yet.", EVALUATE)
    assert (found.standing, found.action and found.action.kind) == expected
    judged(policy)
    assert policy_verdict(policy).state == READY
    registry.policy_promote(policy, actor="test", force=True, reason="a test")
    policy.refresh_from_db()
    served = policy_verdict(policy)
    assert (served.state, served.action) == (SERVING, None)
    assert served.result.startswith("Prefers the better answer in 35 of 40 prompts; the base model in 20")


@pytest.mark.django_db
def test_an_unnamed_recorded_policy_is_the_apps_model() -> None:
    Policy.objects.create(name="shop-app", agent="shop", kind="recorded", recorded_as="")
    Policy.objects.create(name="gpt-x", agent="shop", kind="recorded", recorded_as="gpt-x")
    expected = ["the base model", "your app's model", "gpt-x"]
    assert [rival_title(name) for name in ("base", "shop-app", "gpt-x")] == expected


@pytest.mark.django_db
def test_page_and_rest_say_the_same_sentence(admin_client: Client) -> None:
    policy = make_policy()
    judged(policy, wins=5, losses=3)
    words = policy_verdict(policy).words
    page = admin_client.get(f"/policies/{policy.name}/").content.decode()
    assert policy_verdict(policy).standing in page
    assert page.count("Not shown to be better yet") == 1
    rows = admin_client.get("/api/policies/").json()
    assert next(row for row in rows["results"] if row["name"] == policy.name)["why"]["words"] == words
