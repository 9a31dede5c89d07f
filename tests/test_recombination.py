"""New prompts from the parts of recorded ones, for a classifier to answer."""

from __future__ import annotations

import itertools
import json

import pytest

from rl.linear.distillation import recombined_prompts

ASK = [{"role": "system", "content": "Sort it."}]


def texts(recorded: list[str], count: int = 50) -> list[str]:
    prompts = [[*ASK, {"role": "user", "content": text}] for text in recorded]
    made = recombined_prompts(prompts, count, seed=1)
    assert all(prompt[:-1] == ASK and prompt[-1]["role"] == "user" for prompt in made)
    return [prompt[-1]["content"] for prompt in made]


def test_members_of_json_are_exchanged_within_their_field() -> None:
    recorded = [json.dumps({"kind": "mail", "size": 3}), json.dumps({"kind": 'a "call"', "size": 40})]
    assert set(texts(recorded)) <= {
        json.dumps({"kind": "mail", "size": 40}),
        '{"kind": "a \\"call\\"", "size": 3}',
    }


def test_what_is_json_stays_json() -> None:
    recorded = [
        json.dumps({"size": size, "tag": tag}) for size, tag in ((3, "a"), ("big", None), (True, 'say "b"'))
    ]
    made = texts(recorded)
    assert {json.dumps(json.loads(text)["size"]) for text in made} == {"3", '"big"', "true"}


@pytest.mark.parametrize("separator", [": ", " = "])
def test_lines_are_exchanged_and_all_else_stays(separator: str) -> None:
    recorded = [f"Guest #{n}\nhour{separator}{hour}\nmood{separator}{mood}\n" for n, hour, mood in (
        (1, "noon", "calm"), (2, "late", "tired"),
    )]  # fmt: skip
    assert set(texts(recorded)) == {
        f"Guest #{n}\nhour{separator}{hour}\nmood{separator}{mood}\n"
        for n, (hour, mood) in itertools.product(
            (1, 2), itertools.product(("noon", "late"), ("calm", "tired"))
        )
        if (n, hour, mood) not in ((1, "noon", "calm"), (2, "late", "tired"))
    }


def test_sentences_that_exclude_each_other_never_stand_together() -> None:
    slots = (
        ["I have a fever.", "It hurts.", "I cough."],
        ["Since today.", "For a week."],
        ["Thanks!", "Help!"],
    )
    recorded = [f"Case {n}. {' '.join(parts)}" for n, parts in enumerate(itertools.product(*slots))]
    made = texts(recorded[1:], 100)
    assert len(made) > 30
    for text in made:
        assert [sum(part in text for part in slot) for slot in slots] == [1, 1, 1]
    assert any(
        text.endswith("I have a fever. Since today. Thanks!") for text in made
    )  # the one that was left out


def test_a_sentence_of_one_text_goes_where_all_others_have_stood_beside_it() -> None:
    slots = (["It hurts.", "I cough."], ["Since today.", "For a week."], ["Thanks!", "Help!"])
    recorded = [f"Case {n}. {' '.join(parts)}" for n, parts in enumerate(itertools.product(*slots))]
    made = texts([*recorded, "Case 9. It hurts. Since today. My dog ate it."])
    assert any("dog" in text for text in made)
    assert all("It hurts. Since today. My dog ate it." in text for text in made if "dog" in text)


def test_texts_that_share_nothing_give_nothing() -> None:
    assert texts(["The lamp is broken.", "Where is my parcel?", "A word"]) == []
    assert texts([]) == []
    assert recombined_prompts([[]], 5, seed=1) == []


def test_the_same_seed_gives_the_same_prompts_and_none_twice() -> None:
    recorded = [f"a: {n}\nb: {n % 3}" for n in range(20)]
    made = texts(recorded)
    assert made == texts(recorded)
    assert len(set(made)) == len(made) == len(set(texts(recorded, 1000)) & set(made))
    assert set(made).isdisjoint(recorded)
