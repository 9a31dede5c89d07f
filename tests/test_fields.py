"""Fields of JSON answers: leaves and what is put together of them, the share that is right, a policy for each field."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import llguidance
import pytest
from django.contrib.auth.models import User
from django.template import Context, Template
from django.test import Client
from scipy import stats

from feedback.explorer.structure import MOST_PARTS, line_of, structure_of
from feedback.services import decision_record, rating_submit
from rl.agents import AGENTS
from rl.agents.fields import composed, fields_right, json_read, leaves, plain
from rl.agents.inference import agent_inferred
from rl.agents.template import TemplateAgent
from rl.decoding.constraint import schema_grammar
from rl.decoding.unique_items import UniqueItems, items_repeated, portable
from rl.gates.headlines import fields_text, right_of_classifier
from rl.jobs.linear import eval_metrics
from rl.linear.fit import fit
from rl.linear.model import CLOSED, FIELDS, LinearPolicy
from rl.linear.rows import LinearRefused, prompts_teachable
from rl.serving.linear import choice_probabilities, choose
from rl.training.evaluate import evaluate_policy
from rl.training.held_out import AnswerJudge
from rl.training.sides import LinearSide
from tests.support.said import words

RIGHT = {"a": {"b": {"c": "x", "d": 3}}, "tags": ["u", "v"], "done": True}


def test_leaves_and_what_is_put_together_of_them_are_the_same() -> None:
    expected = {("a", "b", "c"): "x", ("a", "b", "d"): 3, ("tags",): ["u", "v"], ("done",): True}
    assert dict(leaves(RIGHT)) == expected
    assert composed(list(leaves(RIGHT))) == RIGHT
    # a field that is null has no fields below
    assert composed([(("a",), None), (("a", "b"), 1), (("c",), 2)]) == {"a": None, "c": 2}
    assert composed([(("a", "b"), 1), (("a",), None)]) == {"a": {"b": 1}}


def test_share_of_fields_that_are_right() -> None:
    answers: list[tuple[Any, float]] = [
        *((RIGHT, 1.0), ({**RIGHT, "tags": ["v", "u"]}, 1.0), ({**RIGHT, "tags": ["u"]}, (3 + 2 / 3) / 4)),
        *(({**RIGHT, "done": 1}, 3 / 4), ({**RIGHT, "more": 1}, 4 / 5), ({}, 0.0), ([], 0.0), ("text", 0.0)),
        ({"a": {"b": {"c": "x"}}, "tags": [], "done": True}, 2 / 4),
    ]
    for answer, share in answers:
        points, count = fields_right(answer, RIGHT)
        assert points / count == pytest.approx(share), answer
    # lists of objects are compared place by place
    right = {"rows": [{"k": 1, "v": 2}, {"k": 3, "v": 4}]}
    assert fields_right({"rows": [{"k": 1, "v": 2}]}, right) == (pytest.approx(0.5), 1)
    assert fields_right({"rows": [{"k": 1, "v": 0}, {"k": 3, "v": 4}]}, right) == (pytest.approx(0.75), 1)


def test_what_is_no_json_is_read_as_nothing_and_one_is_one_point_nought_and_not_true() -> None:
    for text in ("{", "[" * 5_000, "9" * 5_000, '"' + "x" * 200_000 + '"', ""):
        assert json_read(text) is None
    assert plain({"a": [1.0, 2]}) == plain({"a": [1, 2.0]})
    assert plain(1) != plain(True)


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
    assert agent.structured
    assert agent.discrete
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
    *("no JSON at all", "{", "[1, 2]", "null", '{"team": null}', json.dumps({**case(1)[1], "extra": 1})),
    *(
        json.dumps({**case(2)[1], "floor": "2"}),
        json.dumps({"x": "y" * 200_000}),
        "[" * 9_000,
        '{"a":' * 3_000,
    ),
]


def test_a_few_broken_rows_do_not_undo_the_structure_and_many_make_free_text() -> None:
    for odd in ODD:
        agent = agent_inferred("paint", [*recorded(80), *[("?", odd)] * 3])
        assert agent.structured, odd[:40]
        assert agent.is_valid(json.dumps(case(99)[1]))
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
    assert agent.discrete
    judge = AnswerJudge(agent)
    one = json.loads(rows[0][1])
    assert judge.action(json.dumps({**one, "reason": "as we see it here"})) == judge.action(rows[0][1])
    assert judge.action(json.dumps({**one, "ticket": "T-1"})) != judge.action(rows[0][1])


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


def test_a_policy_for_each_field_is_right(policy: LinearPolicy, tmp_path: Path) -> None:
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
        assert agent.schema is not None
        assert llguidance.LLMatcher.validate_grammar(schema_grammar(agent.schema)) == ""


TICKET = {"queue": "billing", "urgent": True, "tags": ["refund", "card"], "customer": {"id": 7, "note": None}}


def shown(text: str) -> str:
    return Template("{% load answers %}{% answer text %}").render(Context({"text": text}))


def test_an_object_is_its_names_beside_its_values_and_objects_of_one_form_are_a_table() -> None:
    html = shown(json.dumps(TICKET))
    assert words(html) == "queue billing urgent yes tags refund card customer id 7 note none"
    assert html.count("<dt>") == 6
    assert "{" not in html
    html = shown(json.dumps([{"item": "tea", "n": 2}, {"n": 1, "item": "milk"}]))
    assert words(html) == "item n tea 2 milk 1"
    assert (html.count("<th "), html.count("<td>")) == (2, 4)
    # arguments of a call are JSON within JSON
    call = [{"function": {"name": "find", "arguments": '{"number": 1043}'}}]
    assert line_of(json.dumps(call)) == "(function: (name: find, arguments: (number: 1043)))"


def test_texts_are_read_as_structures() -> None:
    # a fence around the whole answer is no part of it and other text has no structure
    for fence in ("```json\n%s\n```", "```\n%s```", "  %s\n"):
        assert structure_of(fence % '{"a": 1}') == structure_of('{"a": 1}')
    others = ("", "billing", "12", '"a"', "{}", "[]", "{'a': 1}", '{"a": 1} and more', "[" * 100_000, "{" * 5)
    assert [text for text in others if structure_of(text) is not None] == []
    # an answer too large to lay out is shown as written
    assert structure_of(json.dumps(list(range(MOST_PARTS - 1)))) is not None
    assert structure_of(json.dumps(list(range(MOST_PARTS)))) is None
    # deep levels are json again
    deep: object = "bottom"
    for _ in range(40):
        deep = {"in": deep}
    assert '{"in":' in words(shown(json.dumps(deep))).replace("&quot;", '"')
    # markup in names and values is escaped
    html = shown(json.dumps({"<b>name": "<script>alert(1)</script>"}))
    assert "<script" not in html
    assert "<b>" not in html
    # code between words becomes a table where it is json
    html = shown('Here it is:\n```json\n{"a": "b"}\n```\nand\n```py\nx = {}\n```')
    assert words(html) == "Here it is: a b and x = {}"


@pytest.mark.django_db
def test_every_page_of_an_agent_nobody_defined_shows_tables(client: Client) -> None:
    client.force_login(User.objects.create_superuser("ada"))
    asked = {"agent": "router", "messages": "I was charged twice"}
    first, _ = (
        decision_record(**asked, response=json.dumps({**TICKET, "n": n}), policy=f"v{n}").row for n in (1, 2)
    )
    rating_submit(decision=first, rater="bob", correction='{"queue": "fraud"}')
    for page in ("/rate/?agent=router", "/rate/pairs/?agent=router", f"/decisions/{first.pk}/"):
        text = re.sub(r">\s+<", "><", client.get(page).text)
        assert '<div><dt>queue</dt><dd><span class="words">billing</span>' in text, page
    assert '<dd><span class="words">fraud</span>' in text
    assert "queue: billing · urgent: yes · tags: refund, card" in client.get("/decisions/?agent=router").text


NAMES: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LISTED: dict[str, Any] = {**NAMES, "items": {"type": "string", "enum": ["c3", "c33", "d"]}}
PAIRED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": NAMES["items"]},
    "$defs": {"n": NAMES},
}


@pytest.mark.parametrize(
    ("schema", "written", "piece", "allowed"),
    [
        (NAMES, '["c3", "c3', '"', False),  # the second would be the first
        (NAMES, '["c3", "c3', '3"', True),
        (NAMES, '["c3", "c3', "3", True),  # a string goes on as it likes
        (NAMES, '["c3", "c3', '", "d"', False),  # one token over the border
        (NAMES, r'["a\"b", "a\"b', '"', False),  # an escaped mark ends no string
        (NAMES, r'["\u00e9", "é', '"', False),  # however it is spelt
        (LISTED, '["c3", "c3', '"', False),
        (LISTED, '["c3", "c33"', ', "c', False),  # nothing that is left begins so
        (LISTED, '["c3", "c33"', ', "', True),
        (LISTED, '["c3", "c33", "d"', ",", False),  # nothing is left
        (LISTED, '["c3", "c33", "d"', "]", True),
        (LISTED, "[", "]", True),
        ({**NAMES, "items": {"type": "number"}}, "[1, 1", ".5]", True),
        ({**NAMES, "items": {"type": "number"}}, "[1, 1", "]", False),
        ({**NAMES, "items": {"type": "number"}}, "[1, 1.0", "]", False),
        ({**NAMES, "items": {"type": "object"}}, '[{"x": 1, "y": 2}, {"y": 2, "x": 1', "}]", False),
        (
            PAIRED,
            '{"b": "x", "a": ["x", "y", "x',
            '"',
            False,
        ),  # by reference; a value beside it is none of its items
        (PAIRED, '{"b": "x", "a": ["y", "x', '"', True),
        ({**NAMES, "uniqueItems": True, "items": NAMES}, '[["a"], ["a"', "]]", False),
        ({**NAMES, "items": NAMES}, '[["a"], ["b", "a"', "]]", True),  # each array has items of its own
    ],
)
def test_an_answer_goes_on_without_repeating(schema: Any, written: str, piece: str, allowed: bool) -> None:
    assert UniqueItems.of(schema).write(written.encode()).allows(piece.encode()) is allowed


def test_free_strings_and_repeats() -> None:
    # a schema that asks for no different items is not followed
    assert UniqueItems.of({"type": "array", "items": {"type": "string"}}) is None
    assert UniqueItems.of(None) is None
    # only a token with a quotation mark ends a free string
    begun, listed = UniqueItems.of(NAMES), UniqueItems.of(LISTED)
    assert begun is not None
    assert [begun.write(text).free for text in (b"[", b'["a', b'["a"')] == [False, True, False]
    assert not listed.write(b'["c').free
    # what repeats is named
    schema = AGENTS["prioritizer"].response_schema({"tasks": ["c1", "c2", "c3"]})
    assert "c3" in items_repeated(schema, '{"order": ["c3", "c3", "c3"]}')
    assert not items_repeated(schema, '{"order": ["c3", "c1", "c2"]}')
    # another fault than a repeated item is not told here
    assert not items_repeated(schema, '{"order": ["c9"]}')
    assert not items_repeated(schema, "no JSON")


def test_few_arrangements_are_listed_for_a_server_that_knows_no_different_items() -> None:
    schema = AGENTS["prioritizer"].response_schema({"tasks": ["a", "b", "c"]})
    assert schema is not None
    orders = portable(schema)["properties"]["order"]["enum"]
    # 3! = 6 orders of three
    assert sorted(orders) == [list(order) for order in ("abc", "acb", "bac", "bca", "cab", "cba")]
    # one or two of three: 3 + 3 * 2
    some = portable({**NAMES, "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2})
    assert len(some["enum"]) == 9
    # 7! = 5,040 are too many to list
    many = AGENTS["prioritizer"].response_schema({"tasks": list("abcdefg")})
    assert many is not None
    assert "uniqueItems" not in json.dumps(portable(many))
    assert portable(many)["properties"]["order"]["minItems"] == 7


LOGPS = [math.log(0.5), math.log(0.25), math.log(0.125)]


def test_the_shares_of_choices_by_temperature_and_epsilon() -> None:
    # 0.5, 0.25, 0.125 of 0.875; at temperature two their roots
    assert choice_probabilities(LOGPS, temperature=1) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    roots = [math.sqrt(0.5), 0.5, math.sqrt(0.125)]
    assert choice_probabilities(LOGPS, temperature=2) == pytest.approx([r / sum(roots) for r in roots])
    assert choice_probabilities([-2.0, -1.0, -1.0]) == (0.0, 1.0, 0.0)
    assert choice_probabilities(LOGPS, epsilon=0.3) == pytest.approx([0.8, 0.1, 0.1])
    assert choice_probabilities(LOGPS, temperature=1, epsilon=1.0) == pytest.approx([1 / 3] * 3)
    # exp(-5000) is no number; the difference of one nat is
    shares = choice_probabilities([-5000.0, -5001.0], temperature=1)
    assert shares == pytest.approx([1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1))])
    bad: list[tuple[list[float], dict[str, float]]] = [([], {}), (LOGPS, {"temperature": -1})]
    for logps, knobs in (*bad, (LOGPS, {"epsilon": 1.5}), (LOGPS, {"epsilon": -0.1})):
        with pytest.raises(ValueError, match="expected"):
            choice_probabilities(logps, **knobs)


def test_what_is_drawn() -> None:
    # the draw follows the distribution and the propensity is the share drawn
    random = Random(7)
    drawn = [choose(LOGPS, temperature=1, epsilon=0.2, random=random) for _ in range(20_000)]
    counts = Counter(choice.index for choice in drawn)
    expected = [20_000 * share for share in drawn[0].probabilities]
    assert stats.chisquare([counts[i] for i in range(3)], expected).pvalue > 1e-4
    assert all(choice.propensity == choice.probabilities[choice.index] > 0 for choice in drawn)

    # what has no share is never drawn
    class Last(Random):
        def random(self) -> float:
            return 1 - 2**-53

    assert choose([-1.0, -9.0], random=Last()).index == 0
