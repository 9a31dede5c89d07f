"""Fields of JSON answers: leaves and what is put together of them, the share that is right, a policy for each field."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import llguidance
import pytest

from rl.agents.fields import composed, json_read, leaves, plain, share_right
from rl.agents.inference import agent_inferred
from rl.agents.template import TemplateAgent
from rl.decoding.constraint import schema_grammar
from rl.gates.headlines import fields_text, right_of_classifier
from rl.jobs.linear import eval_metrics
from rl.linear.fit import fit
from rl.linear.model import CLOSED, FIELDS, LinearPolicy
from rl.linear.rows import LinearRefused, prompts_teachable
from rl.training.evaluate import evaluate_policy
from rl.training.held_out import AnswerJudge
from rl.training.sides import LinearSide

RIGHT = {"a": {"b": {"c": "x", "d": 3}}, "tags": ["u", "v"], "done": True}


def test_leaves_and_what_is_put_together_of_them_are_the_same() -> None:
    assert dict(leaves(RIGHT)) == {
        ("a", "b", "c"): "x",
        ("a", "b", "d"): 3,
        ("tags",): ["u", "v"],
        ("done",): True,
    }
    assert composed(list(leaves(RIGHT))) == RIGHT
    # a field that is null has no fields below
    assert composed([(("a",), None), (("a", "b"), 1), (("c",), 2)]) == {"a": None, "c": 2}
    assert composed([(("a", "b"), 1), (("a",), None)]) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (RIGHT, 1.0),
        ({**RIGHT, "tags": ["v", "u"]}, 1.0),
        ({**RIGHT, "tags": ["u"]}, (3 + 2 / 3) / 4),
        ({**RIGHT, "done": 1}, 3 / 4),
        ({"a": {"b": {"c": "x"}}, "tags": [], "done": True}, 2 / 4),
        ({**RIGHT, "more": 1}, 4 / 5),
        ({}, 0.0),
        ([], 0.0),
        ("text", 0.0),
    ],
)
def test_share_of_fields_that_are_right(answer: Any, share: float) -> None:
    assert share_right(json.dumps(answer), json.dumps(RIGHT)) == pytest.approx(share)


def test_lists_of_objects_are_compared_place_by_place() -> None:
    right = json.dumps({"rows": [{"k": 1, "v": 2}, {"k": 3, "v": 4}]})
    assert share_right('{"rows": [{"k": 1, "v": 2}]}', right) == pytest.approx(0.5)
    assert share_right('{"rows": [{"k": 1, "v": 0}, {"k": 3, "v": 4}]}', right) == pytest.approx(0.75)
    assert share_right("{}", "some text") is None


@pytest.mark.parametrize("text", ["{", "[" * 5_000, "9" * 5_000, '"' + "x" * 200_000 + '"', ""])
def test_what_is_no_json_is_read_as_nothing(text: str) -> None:
    assert json_read(text) is None


def test_one_is_one_point_nought_and_not_true() -> None:
    assert plain({"a": [1.0, 2]}) == plain({"a": [1, 2.0]})
    assert plain(1) != plain(True)


# --- Inference ------------------------------------------------------------------------------------------------


def case(number: int) -> tuple[str, dict[str, Any]]:
    """A prompt and an object of three levels, all of them different."""
    random = Random(number)
    colour, size, urgent = (
        random.choice(("red", "blue")),
        random.choice(("small", "large")),
        random.random() < 0.5,
    )
    right = {
        "team": {
            "paint": "team " + colour,
            "effort": {"level": 3 if size == "large" else 1, "night": urgent},
        },
        "floor": None if number % 4 == 0 else number % 4,
        "needs": ["ladder"] * (size == "large") + ["mask"] * urgent,
        "ticket": f"T-{number:05d}",
        "price": number / 8,
    }
    return (
        f"paint number {number} {colour} {size} {'now' if urgent else 'some day'} floor {number % 4}",
        right,
    )


def recorded(count: int = 80) -> list[tuple[str, str]]:
    return [(prompt, json.dumps(right)) for prompt, right in map(case, range(count))]


def test_objects_that_all_differ_have_a_schema_field_by_field() -> None:
    agent = agent_inferred("paint", recorded())
    assert agent is not None
    assert agent.structured
    assert agent.discrete
    assert agent.schema is not None
    fields = agent.schema["properties"]
    assert set(fields["team"]["properties"]["paint"]["enum"]) == {"team red", "team blue"}
    effort = fields["team"]["properties"]["effort"]["properties"]
    assert effort["level"] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert effort["night"] == {"type": "boolean"}
    assert fields["floor"] == {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 3}, {"type": "null"}]}
    assert set(fields["needs"]["items"]["enum"]) == {"ladder", "mask"}
    assert (fields["needs"]["uniqueItems"], fields["needs"]["minItems"], fields["needs"]["maxItems"]) == (
        True,
        0,
        2,
    )
    assert fields["ticket"] == {"type": "string"}
    assert fields["price"] == {"type": "number"}
    assert agent.is_valid(recorded(200)[-1][1])
    assert not agent.is_valid('{"team": "red"}')
    assert agent.max_new_tokens >= 100


ODD = [
    "no JSON at all", "{", "[1, 2]", "null", '{"team": null}', json.dumps({**case(1)[1], "extra": 1}),
    json.dumps({**case(2)[1], "floor": "2"}), json.dumps({"x": "y" * 200_000}), "[" * 9_000, '{"a":' * 3_000,
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_few_broken_rows_do_not_undo_the_structure(odd: str) -> None:
    agent = agent_inferred("paint", [*recorded(80), *[("?", odd)] * 3])
    assert agent is not None
    assert agent.structured
    assert agent.is_valid(json.dumps(case(99)[1]))


def test_many_broken_rows_make_free_text() -> None:
    assert agent_inferred("paint", [*recorded(80), *[("?", f"sorry, {i}") for i in range(20)]]) is None


@pytest.mark.parametrize(
    "texts",
    [
        [json.dumps({f"key {i}": i}) for i in range(100)],
        [json.dumps({"deep": json.loads('{"a":' * 40 + str(i) + "}" * 40)}) for i in range(100)],
        [json.dumps({"ids": {f"id {i}": 1, f"id {i + 1}": 2}, "n": i}) for i in range(100)],
        [json.dumps([i, i + 1]) for i in range(100)],
        [json.dumps({"v": [1, "a", None, {"x": i}][i % 4]}) for i in range(100)],
        [json.dumps({"v": [[i]], "w": [], "x": {}}) for i in range(100)],
        [json.dumps({f"k{j}": i for j in range(300)}) for i in range(60)],
        [json.dumps({"v": float("inf"), "w": i}) for i in range(60)],
        [json.dumps({"v": f"text {i}"}) for i in range(10_000)],
        [json.dumps({"": i, "a.b": {"": str(i)}}) for i in range(60)],
    ],
)
def test_odd_objects_never_stop_inference(texts: list[str]) -> None:
    agent = agent_inferred("odd", [("?", text) for text in texts])
    if agent is not None:
        assert sum(map(agent.is_valid, texts)) >= 0.95 * len(texts)


def test_a_wording_beside_choices_is_left_out_of_what_must_be_the_same() -> None:
    rows = [
        (prompt, json.dumps({**right, "reason": f"because the customer number {number} said so"}))
        for number, (prompt, right) in enumerate(map(case, range(80)))
    ]
    agent = agent_inferred("paint", rows)
    assert agent is not None
    assert agent.discrete
    judge = AnswerJudge(agent, None)
    one = json.loads(rows[0][1])
    assert judge.action(json.dumps({**one, "reason": "as we see it here"})) == judge.action(rows[0][1])
    assert judge.action(json.dumps({**one, "ticket": "T-1"})) != judge.action(rows[0][1])


# --- Evaluation -----------------------------------------------------------------------------------------------


def test_evaluations_show_whole_answers_and_fields(policy: LinearPolicy) -> None:
    """Of a linear policy against one that answers each prompt alike; the classifier beside it is itself."""
    agent, held_out = TemplateAgent("paint", "Paint", "", schema={"type": "object"}), rows(200, 240)
    poor = fit(rows(0, 12), agent, families=[("words",)], penalties=(0.03,)).policy
    sides = [LinearSide(one, agent) for one in (poor, policy)]
    result = evaluate_policy(
        sides[0], agent=agent, others={"corrections": held_out}, against=sides[1], baseline=sides[1]
    )
    figures = result["evidence"]["corrections"]
    assert result["carried_by"] == "corrections"
    assert 0 < figures["fields"]["own"]["value"] < figures["fields"]["against"]["value"] < 1
    assert figures["fields"]["difference"]["high"] < 0
    assert figures["fields"]["own"]["value"] > figures["own"]["value"]
    assert right_of_classifier(result) == (figures["own"]["value"], figures["against_value"])
    assert fields_text(result).startswith("Of the fields of what people wrote ")
    alone = evaluate_policy(sides[1], agent=agent, others={"corrections": held_out})
    assert alone["evidence"]["corrections"]["fields"] == {"own": figures["fields"]["against"]}


# --- A policy for each field ----------------------------------------------------------------------------------


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    made = []
    for number in range(start, stop):
        prompt, right = case(number)
        right = {name: value for name, value in right.items() if name not in ("ticket", "price")}
        right["number"] = number % 97 if number % 2 else None  # nobody can know it, and all answers differ
        made.append(
            {
                "prompt": [{"role": "user", "content": prompt}],
                "prompt_hash": f"{number:064x}",
                "completion": json.dumps(right),
            }
        )
    return made


AGENT = TemplateAgent("paint", "Paint", "", schema={"type": "object"})


@pytest.fixture(scope="module")
def policy() -> LinearPolicy:
    return fit(rows(0, 120), AGENT, families=[("words",)], penalties=(1.0,)).policy


def test_few_combinations_of_two_fields_are_learnt_field_by_field() -> None:
    """Six combinations are a closed set, of which one is rare: each field alone has rows enough."""
    made: list[dict[str, Any]] = [
        {
            "prompt": [
                {"role": "user", "content": f"{queue} matter {number}, {'now' if urgent else 'please'}"}
            ],
            "prompt_hash": str(number),
            "completion": json.dumps({"queue": queue, "urgent": urgent}),
        }
        for number in range(90)
        for queue, urgent in [(("billing", "shipping", "account")[number % 3], number % 5 == 0)]
        if (queue, urgent) != ("account", True) or number > 80
    ]
    found = fit(made, AGENT, families=[("words",)], penalties=(1.0,))
    assert found.policy.mode == FIELDS
    asked = [{"role": "user", "content": "account matter, now"}]
    assert json.loads(found.policy.options(asked)[0]) == {"queue": "account", "urgent": True}
    one = [
        {**row, "completion": json.dumps({"queue": json.loads(row["completion"])["queue"]})} for row in made
    ]
    assert prompts_teachable(one, AGENT)[1] == CLOSED


def test_a_policy_for_each_field_is_right_where_the_prompt_says_it(
    policy: LinearPolicy, tmp_path: Path
) -> None:
    assert policy.mode == FIELDS
    assert prompts_teachable(rows(0, 120), AGENT) == (120, FIELDS)
    for row in rows(200, 240):
        best, *others = policy.options(row["prompt"])
        right, found = json.loads(row["completion"]), json.loads(best)
        assert (found["team"], found["needs"]) == (right["team"], right["needs"])
        assert list(found) == list(right)
        scores = policy.scores(row["prompt"], [best, *others, '{"strange": 1}'])
        assert max(scores) == scores[0]
        assert min(scores) == scores[-1]
    policy.save(tmp_path)
    loaded = LinearPolicy.load(tmp_path)
    prompt = rows(300, 301)[0]["prompt"]
    assert loaded.options(prompt) == policy.options(prompt)
    assert loaded.words == policy.words
    assert 0 < eval_metrics(policy, rows(0, 20), AGENT)["eval_accuracy"] <= 1


def test_what_is_erased_leaves_the_parts(policy: LinearPolicy) -> None:
    kept = policy.keep(lambda text: "red" not in text)
    assert "red" in json.dumps(policy.words)
    assert "red" not in json.dumps(kept.words)
    assert json.loads(kept.options(rows(0, 1)[0]["prompt"])[0])["team"]["paint"] == "team blue"
    few = policy.restrict({"word blue"}, {rows(1, 2)[0]["completion"]})
    assert {name for _, part in few.parts for name in part.columns} <= {"word blue"}


def test_objects_in_pairs_are_not_read_by_their_fields() -> None:
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows(0, 60), rows(60, 120), strict=True)
    ]
    with pytest.raises(LinearRefused, match="expected answers that are a choice"):
        fit(pairs, AGENT)


def test_the_inferred_form_can_be_enforced() -> None:
    odd = [
        ("?", json.dumps({"v": [[i], [i + 1]], "x": {}, "y": [], "z": None, "m": [1, "a"][i % 2]}))
        for i in range(60)
    ]
    for rows_of in (recorded(), odd):
        agent = agent_inferred("paint", rows_of)
        assert agent is not None
        assert agent.schema is not None
        assert llguidance.LLMatcher.validate_grammar(schema_grammar(agent.schema)) == ""
