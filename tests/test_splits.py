"""Share held out, and that a prompt never changes sides. Shares are worked by hand from `rl.datasets.holdout`."""

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from feedback.models import prompt_hash
from feedback.services import decision_record, rating_submit
from rl.datasets import get_training_stats, prepare_training_dataset
from rl.datasets.holdout import (
    SplitCounts,
    draw_split,
    draw_splits,
    holdout_target,
    prompts_until,
    shares_in_force,
)
from rl.datasets.rows import FeedbackFile
from rl.datasets.splits import splits_of, splits_store
from rl.models import GateSettings, PromptSplit
from tests.support.split_worlds import Growth, looks_at, promoted_at

pytestmark = pytest.mark.django_db


def names(count: int, salt: str = "") -> list[str]:
    return [hashlib.sha256(f"{salt}:{i}".encode()).hexdigest() for i in range(count)]


def sides(splits: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(splits.values()))


def test_shares_held_out() -> None:
    # a third is held out until the gate can speak and then less and less
    assert holdout_target(30) == 40
    assert shares_in_force(SplitCounts(), 30).holdout == pytest.approx(1 / 3)
    assert shares_in_force(SplitCounts(120, 12, 40), 30).holdout == pytest.approx(1 / 3)
    assert shares_in_force(SplitCounts(300, 30, 80), 30).holdout == pytest.approx(0.1 + 7 / 60)
    assert shares_in_force(SplitCounts(10**6, 10**5, 10**5), 30).holdout == pytest.approx(0.1, abs=1e-3)
    # a share is pulled towards what is missing within bounds
    # 30 prompts, 8 held out: two fewer than a third, so 1/3 + 2/10 of 1
    assert shares_in_force(SplitCounts(30, 3, 8), 30).holdout == pytest.approx(0.5)
    assert shares_in_force(SplitCounts(30, 3, 9), 30).holdout == pytest.approx(1 / 3 + 0.1)
    assert shares_in_force(SplitCounts(30, 3, 13), 30).holdout == pytest.approx(0.1)
    assert shares_in_force(SplitCounts(30, 2, 10), 30).eval == pytest.approx(0.2)
    assert shares_in_force(SplitCounts(30, 9, 10), 30).eval == pytest.approx(0.02)
    # an agent of the days of one in ten: 200 rated prompts, 20 of them held out
    assert shares_in_force(SplitCounts(200, 20, 20), 30).holdout == 0.5


def test_the_upper_end_of_the_hashes_is_held_out_whatever_the_shares() -> None:
    for tally in (
        SplitCounts(),
        SplitCounts(30, 3, 13),
        SplitCounts(200, 20, 20),
        SplitCounts(10**6, 10**5, 10**5),
    ):
        shares = shares_in_force(tally, 30)
        assert draw_split("e6666667" + "0" * 56, shares) == "holdout"
        assert draw_split("4cccccc0" + "0" * 56, shares) == "train"


@pytest.mark.parametrize("seed", range(20))
def test_a_hundred_rated_prompts_are_enough_for_a_gate_and_leave_most_for_training(seed: int) -> None:
    found = sides(draw_splits({}, names(100, str(seed)), min_evidence=30))
    assert 30 <= found["holdout"] <= 36
    assert 6 <= found["eval"] <= 13


def test_many_prompts_are_drawn() -> None:
    # where data abound a tenth is held out
    found = sides(draw_splits({}, names(20_000), min_evidence=30))
    # what is missing to a tenth falls as 1/held out: dn/dh = 1 / (0.1 + 9.33 / h)
    assert 0.1 < found["holdout"] / 20_000 < 0.13
    assert found["eval"] == pytest.approx(2000, abs=5)
    # a prompt of which nothing was said stands by the shares of those with a word
    asked = names(3000, "asked")
    few = sides(draw_splits({}, names(30), unrated=asked, min_evidence=30))
    assert few["holdout"] == pytest.approx(1010, abs=80)
    many = draw_splits({}, names(3000), unrated=asked, min_evidence=30)
    assert sum(many[name] == "holdout" for name in asked) < 0.2 * 3000
    # what is known stays and the order of the prompts does not matter
    prompts = names(200)
    first = draw_splits({}, prompts[:80], min_evidence=30)
    then = draw_splits(first, prompts, min_evidence=30)
    assert not first.keys() & then.keys()
    assert draw_splits(first, prompts[::-1], min_evidence=30) == then


def test_how_many_more_prompts_it_takes_is_about_what_it_takes() -> None:
    assert prompts_until(30, SplitCounts(), 30) == 90
    assert prompts_until(30, SplitCounts(33, 3, 11), 30) == 57
    assert prompts_until(30, SplitCounts(120, 12, 40), 30) == 0
    # one in ten of 200 was held out before: half of what comes now, until a third of all is near
    assert prompts_until(30, SplitCounts(200, 20, 20), 30) == 20
    for seed in range(5):
        prompts = names(600, f"more {seed}")
        known = draw_splits({}, prompts[:200], min_evidence=30)
        more = prompts_until(100, SplitCounts.of(known.values()), 30)
        grown = draw_splits(known, prompts[: 200 + more], min_evidence=30)
        assert 90 <= sides({**known, **grown})["holdout"] <= 110


def groups_of(size: int, count: int, salt: str = "") -> dict[str, str]:
    """Prompt -> its cluster, named after its first prompt."""
    prompts = names(size * count, salt)
    return {name: prompts[i - i % size] if size > 1 else "" for i, name in enumerate(prompts)}


def drawn_in(clusters: dict[str, str], prompts: list[str], known: Any = (), **more: Any) -> dict[str, Any]:
    """Sides of prompts whose clusters are those given."""
    return draw_splits(
        dict(known), prompts, min_evidence=30, clusters=lambda those: {n: clusters[n] for n in those}, **more
    )


@pytest.mark.parametrize("size", [3, 10])
def test_near_identical_prompts_are_drawn_together_and_count_as_one(size: int) -> None:
    clusters = groups_of(size, 100)
    found = drawn_in(clusters, list(clusters))
    firsts = {name: found[name] for name in clusters.values()}
    assert found == {name: firsts[leader] for name, leader in clusters.items()}
    # half of a hundred groups until the gate has 40 and the share falls
    assert 38 <= sides(firsts)["holdout"] <= 50
    assert 6 <= sides(firsts)["eval"] <= 14
    assert drawn_in(clusters, list(clusters)[::-1]) == found


def test_a_prompt_joins_the_side_its_cluster_stands_on_and_changes_no_other() -> None:
    clusters = groups_of(3, 40)
    first = drawn_in(clusters, list(clusters.values()))
    grown = drawn_in(clusters, list(clusters), first)
    assert grown == {name: first[leader] for name, leader in clusters.items() if name not in first}
    # one that nobody judged joins too, whatever else was asked
    judged, asked = list(clusters)[:60], list(clusters)[60:]
    found = drawn_in(clusters, judged[::3], unrated=[*judged, *asked])
    assert all(found[name] == found[clusters[name]] for name in judged)
    assert {n: found[n] for n in judged[::3]} == drawn_in(clusters, judged[::3])


def test_prompts_of_a_torn_or_a_large_cluster_are_drawn_one_by_one() -> None:
    clusters = groups_of(3, 40)
    one, two, three = list(clusters)[:3]
    alone = draw_splits({}, [three], min_evidence=30)
    assert drawn_in(clusters, list(clusters), {one: "holdout", two: "train"})[three] in (
        "train",
        "eval",
        "holdout",
    )
    for sides_of in ({one: "holdout", two: "train"}, {one: "train", two: "holdout"}):
        assert drawn_in(clusters, [one, two, three], sides_of)[three] == alone[three]
    template = dict.fromkeys(names(100), names(1)[0])
    # a template of all prompts is no question: a hundred prompts, not one
    assert drawn_in(template, list(template)) == draw_splits({}, list(template), min_evidence=30)


def rate(number: int, agent: str = "helper") -> str:
    return rate_text(f"question {number}", agent)


def rate_text(text: str, agent: str = "helper") -> str:
    messages = [{"role": "user", "content": text}]
    for response, thumb in (("yes", "up"), ("no", "down")):
        row = decision_record(agent=agent, messages=messages, response=response).row
        rating_submit(decision=row, rater="ann", thumb=thumb)
    return prompt_hash(agent, messages)


def stored(agent: str = "helper") -> dict[str, str]:
    return dict(PromptSplit.objects.filter(agent=agent).values_list("prompt_hash", "split"))


@pytest.mark.slow
def test_a_dry_run_foretells_the_sides_and_writes_nothing() -> None:
    for number in range(40):
        rate(number)
    plan = prepare_training_dataset("helper", dry_run=True)
    assert get_training_stats("helper")["pairs"] == plan.counts
    assert stored() == {}
    made = prepare_training_dataset("helper")
    assert made.counts == plan.counts
    assert sides(stored()) == plan.counts
    assert 11 <= made.counts["holdout"] <= 15


@pytest.mark.slow
def test_a_prompt_never_changes_sides_while_feedback_grows() -> None:
    before: dict[str, str] = {}
    for start in range(0, 160, 20):
        for number in range(start, start + 20):
            rate(number)
        prepare_training_dataset("helper")
        now = stored()
        assert {name: now[name] for name in before} == before
        assert len(now) == start + 20
        before = now
    assert 45 <= sides(before)["holdout"] <= 57


def test_near_identical_prompts_of_a_database_stand_on_one_side_whatever_the_kind_of_dataset() -> None:
    # twenty words of its own each: one more of another question leaves 39 of 43 words and pairs of words in common
    questions = [" ".join(f"{subject}{i}" for i in range(20)) for subject in "abcdefghij"]

    def ask(*endings: str) -> list[set[str]]:
        return [{rate_text(f"{question} {ending}") for ending in endings} for question in questions]

    first = ask("today")
    prepare_training_dataset("helper")
    before = stored()
    groups = [one | two for one, two in zip(first, ask("please"), strict=True)]
    plan = {
        row["prompt_hash"]: row["split"]
        for row in prepare_training_dataset("helper", "labels", dry_run=True).rows()
    }
    assert all(len({plan[name] for name in group}) == 1 for group in groups)
    for kind in ("pairs", "prompts"):
        prepare_training_dataset("helper", kind)
    assert stored() == plan
    assert before.items() <= plan.items()
    assert len(plan) == 20


def test_a_file_that_grows_moves_no_prompt(tmp_path: Path) -> None:
    def file(count: int) -> Path:
        rows = [{"prompt": f"q {i}", "chosen": f"a {i}", "rejected": f"b {i}"} for i in range(count)]
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    small = prepare_training_dataset("helper", source=FeedbackFile(file(30)))
    known = {row["prompt_hash"]: row["split"] for row in small.rows()}
    large = prepare_training_dataset("helper", source=FeedbackFile(file(400)))
    grown = {row["prompt_hash"]: row["split"] for row in large.rows()}
    assert {name: grown[name] for name in known} == known
    assert large.counts["holdout"] > 80


def test_another_agents_sides_and_settings_count_for_nothing() -> None:
    GateSettings.objects.create(agent="strict", min_evidence=300)
    few = splits_store("helper", names(400, "helper"))
    strict = splits_store("strict", names(400, "strict"))
    assert sides(strict)["holdout"] == pytest.approx(400 / 3, abs=6)
    assert 90 < sides(few)["holdout"] < 125


def test_what_another_process_entered_a_moment_earlier_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = names(20)
    from rl.datasets import splits

    drawn = splits.draw_splits

    def late(*arguments: Any, **more: Any) -> dict[str, Any]:
        # between this process's look and its write, the other one has held all of them out
        for name in prompts[:10]:
            PromptSplit.objects.create(prompt_hash=name, agent="helper", split="holdout")
        return drawn(*arguments, **more)

    monkeypatch.setattr(splits, "draw_splits", late)
    found = splits_store("helper", prompts)
    assert all(found[name] == "holdout" for name in prompts[:10])
    assert found == splits_of("helper", prompts)


@pytest.mark.django_db(transaction=True)
def test_workers_at_once_agree_on_every_prompt() -> None:
    prompts = names(300)
    found: list[dict[str, Any]] = []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        gate.wait()
        found.append(splits_store("helper", prompts[number * 40 : number * 40 + 180]))
        connection.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    at_last = stored()
    assert all(at_last[name] == split for one in found for name, split in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_policies_that_are_no_better_do_not_get_through_while_the_holdout_grows(alike: bool) -> None:
    """They know by heart whatever any of them was trained on. `benchmarks/split.py` has the share of 1,000 series."""
    growth = Growth([60, 10, 200, 10, 10, 60, 40, 10], alike)
    assert sum(promoted_at(growth, seed) is not None for seed in range(40)) <= 5


def test_groups_keep_their_holdout_and_promote_nobody() -> None:
    def votes(group: int, one_by_one: bool = False) -> int:
        (found,) = looks_at(Growth([300], group=group, one_by_one=one_by_one), 1)
        return len(found.cases)

    # a hundred groups of three: half of them until there are 40, of which drawn one by one nearly all were lost
    assert 38 <= votes(3) <= 50
    assert votes(3, one_by_one=True) <= 12
    assert 9 <= votes(10) <= 15
    growth = Growth([60, 10, 200, 10, 10, 60, 40, 10], group=3)
    assert sum(promoted_at(growth, seed) is not None for seed in range(20)) <= 4


@pytest.mark.parametrize(("of_each", "least"), [(1, 21), (2, 30), (4, 30)])
def test_few_questions_asked_again_and_again_give_a_gate_its_evidence(of_each: int, least: int) -> None:
    """72 questions, each asked so often with another number: of each asked once a third is held out."""
    questions = {
        hashlib.sha256(f"{n}/{again}".encode()).hexdigest(): str(n)
        for n in range(72)
        for again in range(of_each)
    }
    found = draw_splits(
        {}, set(questions), min_evidence=30, clusters=lambda names: {name: questions[name] for name in names}
    )
    held_out = {questions[name] for name, side in found.items() if side == "holdout"}
    trained = {questions[name] for name, side in found.items() if side == "train"}
    assert held_out.isdisjoint(trained)
    assert least <= len(held_out) <= 41
    assert len(trained) >= 20
