"""Linear policies by themselves: features, weights, their file, and the fit of each kind of feedback."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from threadpoolctl import threadpool_info, threadpool_limits

from rl.agents import get_agent
from rl.linear import fit as fit_module
from rl.linear.features import fields_of, prompt_features
from rl.linear.fit import fit
from rl.linear.model import CLOSED, LISTED, LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, rows_crossed
from tests.support.linear import BOT, QUEUES, asked, rows_of, weighted


def test_words_fields_and_sizes_of_a_prompt_are_its_features() -> None:
    found = prompt_features([{"role": "system", "content": "Pick."}, *asked("soil: dry\nreadings: 5")])
    assert found == dict.fromkeys(
        (
            "word soil",
            "word dry",
            "word readings",
            "soil=dry",
            "readings=5",
            "readings>=0",
            "readings>=0.0625",
            "readings>=0.125",
            "readings>=0.25",
            "readings>=0.5",
            "readings>=1",
            "readings>=2",
            "readings>=4",
        ),
        1.0,
    )
    assert fields_of('Ticket: {"tier": "gold", "age": 3}') == [("tier", "gold"), ("age", "3")]
    assert fields_of('{"a": {"b": [1, "x"]}}') == [("a.b", 1), ("a.b", "x")]
    # what somebody sends to break it costs no time and no error
    nasty = [
        "a: x" + " " * 19_000 + "y",
        '{"a":' * 900 + "1" + "}" * 900,
        '{"n": ' + "9" * 400 + "}",
        '"a"' * 6_000,
    ]
    assert [len(prompt_features(asked(text))) < 6 for text in nasty] == [True] * 4
    assert prompt_features([*asked("old"), *asked("new")]) == {"earlier word old": 1.0, "word new": 1.0}
    assert prompt_features(asked("a: x\nb: y"), ("crossed",)) == {"a=x & b=y": 0.5}
    assert prompt_features(asked("ab"), ("parts",)) == pytest.approx(
        dict.fromkeys(("part <ab", "part ab>", "part <ab>"), 1 / math.sqrt(3))
    )

    assert prompt_features(asked("not a b"), ("phrases",)) == dict.fromkeys(
        ("phrase not a", "phrase a b", "phrase not a b"), 1.0
    )


def test_the_order_of_words_is_learnt() -> None:
    """ "the lamp and not the pump" and its reverse have the same words."""
    things = ["lamp", "pump", "gear", "bell", "lock", "tyre"]
    rows = [
        {
            "prompt": asked(f"order {number}: the {one} and not the {other}"),
            "prompt_hash": str(number),
            "completion": one,
        }
        for number, (one, other) in enumerate(itertools.permutations(things, 2))
    ] * 2
    policy = fit(rows, BOT).policy
    assert policy.families == ("words", "phrases")
    scores = policy.scores(asked("please, the bell and not the tyre"), policy.answers)
    assert "bell" in policy.answers[int(np.argmax(scores))]


def test_rare_words_count_more_where_cross_validation_finds_that_better() -> None:
    """One rare word of two decides; the other words are frequent and say nothing."""
    random, filler = Random(0), [f"w{n}" for n in range(30)]
    filler = [word.translate(str.maketrans("0123456789", "abcdefghij")) for word in filler]
    signs = [("left", f"sign{chr(97 + n)}") for n in range(13)] + [
        ("right", f"mark{chr(97 + n)}") for n in range(13)
    ]

    def text(sign: str) -> str:
        return " ".join([*random.sample(filler, 15), sign])

    rows = [
        {"prompt": asked(text(sign)), "prompt_hash": f"{number} {sign}", "completion": side}
        for number in range(4)
        for side, sign in signs
    ]
    policy = fit(rows, BOT, families=(("words",),)).policy
    right = [
        policy.answers[int(np.argmax(policy.scores(asked(text(sign)), policy.answers)))] for _, sign in signs
    ]
    assert [side in answer for (side, _), answer in zip(signs, right, strict=True)].count(True) >= 24


def test_an_answers_score_is_the_sum_of_what_prompt_and_answer_have() -> None:
    policy = weighted()
    assert policy.scores(asked("hot hot and cold"), ["a", " b ", "c"]) == [2.0, 1.75, 1.75 - 5.0]
    logps = policy.log_probabilities(asked("hot"), ["a", "b"])
    # scores 2 and 0.75, so that the odds are e to the 1.25
    assert logps[0] - logps[1] == pytest.approx(1.25)
    assert math.exp(logps[0]) + math.exp(logps[1]) == pytest.approx(1.0)
    listed = weighted(mode=LISTED, rows=("is big fan", "has fan"))
    assert listed.scores(asked("hot"), ["big fan", "small fan", "tree"]) == [2.75, 0.75, 0.0]
    assert weighted(mode=CLOSED, rows=('is {"q": "x"}', "is b")).scores(asked("hot"), ['{ "q":"x" }']) == [
        2.0
    ]


def test_a_policy_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    policy = weighted(quoted=True)
    path = policy.save(tmp_path)
    again = LinearPolicy.load(tmp_path)
    assert again.scores(asked("hot cold"), ["a", "b"]) == policy.scores(asked("hot cold"), ["a", "b"])
    assert again.options(asked("one of b, c")) == ["b"]
    with pytest.raises(LinearPolicyError, match="expected a prompt that names one of the 2 answers"):
        again.options(asked("none"))
    path.write_text(path.read_text("utf-8").replace("ratchet-linear-1", "pickle"), "utf-8")
    with pytest.raises(LinearPolicyError, match="expected the format ratchet-linear-1, found 'pickle'"):
        LinearPolicy.load(tmp_path)


@pytest.mark.parametrize("kind", ["pairs", "scores", "corrections"])
def test_each_kind_of_feedback_teaches_which_answer_to_choose(kind: str) -> None:
    found = fit(rows_of(kind), BOT, families=(("words",),))
    assert found.policy.facts["feedback"] == kind
    assert sorted(found.policy.answers) == sorted(QUEUES)
    unseen = [
        ("charged twice, z 900", "billing"),
        ("no signal here", "network"),
        ("locked out again", "accounts"),
    ]
    for text, queue in unseen:
        scores = dict(zip(QUEUES, found.policy.scores(asked(text), QUEUES), strict=True))
        assert max(scores, key=scores.__getitem__) == queue
    # scores of 0.9 and 0.2 leave at most 85 % to be foretold
    assert found.metrics["cv_accuracy"] > (0.6 if kind == "scores" else 0.8)


def test_listed_answers_are_told_apart_by_their_words() -> None:
    agent, random, rows = get_agent("filer"), Random(1), []
    for number in range(60):
        kind = ("invoice", "photo")[number % 2]
        folders = [f"{name}s/{random.randrange(1000)}" for name in ("invoice", "photo")]
        rows.append(
            {
                "prompt": asked(f"a scanned {kind}"),
                "prompt_hash": str(number),
                "state": {"document": "x", "folders": folders},
                "completion": json.dumps({"folder": folders[number % 2]}),
            }
        )
    policy = fit(rows, agent, families=(("words",),)).policy
    assert policy.mode == LISTED
    new = [json.dumps({"folder": name}) for name in ("photos/new", "invoices/new")]
    assert np.argmax(policy.scores(asked("a scanned photo"), new)) == 0
    assert np.argmax(policy.scores(asked("a scanned invoice"), new)) == 1


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_rows_are_crossed_entry_by_entry(density: float) -> None:
    random = np.random.default_rng(0)
    left = scipy.sparse.random(30, 5, density, format="csr", random_state=random)
    right = scipy.sparse.random(30, 7, density, format="csr", random_state=random)
    by_rows = [np.kron(left[i].toarray(), right[i].toarray())[0] for i in range(30)]
    assert np.allclose(rows_crossed(left, right).toarray(), np.array(by_rows))


def test_fitting_leaves_its_vector_products_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    fit_logistic = fit_module._fit_weights

    def counting(*arguments: Any) -> Any:
        threads.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return fit_logistic(*arguments)

    monkeypatch.setattr(fit_module, "_fit_weights", counting)
    with threadpool_limits(2, user_api="blas"):
        fit(rows_of("pairs"), BOT)
    assert threads == {1}


def test_what_is_no_choice_is_refused_with_what_to_do() -> None:
    free = [{"prompt": asked(f"q{i}"), "completion": f"words nobody said before {i}"} for i in range(20)]
    with pytest.raises(LinearRefused, match="expected answers that are a choice, found 20 different texts"):
        fit(free, BOT)
    # wordings of one prompt stay wordings, in however many rows they stand
    repeated = [{**row, "prompt_hash": str(i)} for i, row in enumerate(free) for _ in range(9)]
    with pytest.raises(
        LinearRefused, match="found 20 different texts among 20 answers of tickets, 20 of them once"
    ):
        fit(repeated, BOT)
    with pytest.raises(LinearRefused, match="at least two different answers of tickets, found 1"):
        fit([{"prompt": asked(f"q{i}"), "completion": "yes"} for i in range(20)], BOT)
    with pytest.raises(LinearRefused, match="found prompts alone"):
        fit([{"prompt": asked("q")}], BOT)
    liked = [{"prompt": asked(f"q{i}"), "completion": "ab"[i % 2], "score": 1.0} for i in range(20)]
    with pytest.raises(LinearRefused, match="found only one of the two"):
        fit(liked, BOT)


def test_a_closed_set_of_orders_is_learnt_by_its_order(tmp_path: Path) -> None:
    """Of six orders each is rarely judged; which item stands before which is judged in every one."""
    random = Random(2)
    bins = ("cold room", "heavy rack", "glass shelf", "bulk floor")
    right = {
        goods: random.sample(bins, 4)
        for goods in ("wine", "fish", "tiles", "lamps", "bricks", "paper", "ice cream")
    }

    def worth(goods: str, route: Sequence[str]) -> int:
        return sum(right[goods].index(a) < right[goods].index(b) for a, b in itertools.combinations(route, 2))

    rows = []
    while len(rows) < 200:
        goods, (one, other) = random.choice(sorted(right)), (random.sample(bins, 4), random.sample(bins, 4))
        if worth(goods, one) != worth(goods, other):
            better, worse = sorted((one, other), key=lambda route: -worth(goods, route))
            texts = [json.dumps({"route": route}) for route in (better, worse)]
            prompt = asked(f"{goods}, dock {random.choice('ABCDEF')}{len(rows)}")
            rows.append(
                {"prompt": prompt, "prompt_hash": str(len(rows)), "chosen": texts[0], "rejected": texts[1]}
            )
    fitted = fit(rows, BOT)
    assert (fitted.policy.mode, fitted.policy.families[-2:]) == (CLOSED, ("values", "order"))
    policy = LinearPolicy.load(fitted.policy.save(tmp_path).parent)
    found = [
        worth(
            goods,
            json.loads(max(policy.answers, key=lambda text: policy.scores(asked(goods), [text])[0]))["route"],
        )
        for goods in right
    ]
    assert sum(found) / (6 * len(right)) > 0.9
    # single names are read as themselves, whatever words they share
    assert fit(rows_of("pairs"), BOT).policy.families[-1] not in ("values", "order")


def test_features_beyond_memory_are_left_out_and_texts_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            **row,
            "completion": f"{row['completion']}, as the desk in charge of it",
            "label": row["score"] > 0.5,
        }
        for row in rows_of("scores")
    ]
    assert fit(rows, BOT, judge=True).policy.families == ("words", "phrases")
    monkeypatch.setattr(fit_module, "MOST_ENTRIES", 6_000)
    assert fit(rows, BOT, judge=True).policy.families == ("words",)
    monkeypatch.setattr(fit_module, "MOST_ENTRIES", 600)
    with pytest.raises(LinearRefused, match="expected answers and prompts of fewer words: 60 rows make"):
        fit(rows, BOT, judge=True)


def test_a_preferred_answer_is_learnt_to_be_better_than_those_nobody_judged() -> None:
    """Each pair has the right topic and one of seven wrong ones; half of the words of a text say nothing."""
    random = Random(1)
    topics = {
        name: [f"{name}{chr(97 + n)}" for n in range(12)]
        for name in "oat elm fig yew ash bay box fir".split()
    }
    filler = [f"w{chr(97 + n)}" for n in range(20)]

    def text(topic: str) -> str:
        return " ".join([*random.sample(filler, 4), *random.sample(topics[topic], 2)])

    def pair(number: int) -> dict[str, Any]:
        topic = random.choice([*topics])
        wrong = random.choice([name for name in topics if name != topic])
        return {"prompt": asked(text(topic)), "prompt_hash": str(number), "chosen": topic, "rejected": wrong}

    policy = fit([pair(number) for number in range(120)], BOT, families=(("words",),)).policy
    asked_for = [random.choice([*topics]) for _ in range(100)]
    given = [
        policy.answers[int(np.argmax(policy.scores(asked(text(one)), policy.answers)))] for one in asked_for
    ]
    right = sum(one == other for one, other in zip(asked_for, given, strict=True))
    assert right >= 85, right
