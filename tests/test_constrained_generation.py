"""Answers that torch writes under a JSON schema, and evaluations of agents that are served so."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from rl.agents.base import Agent
from rl.agents.template import TemplateAgent
from rl.training.evaluate import evaluate_policy
from rl.training.policy import LoadedPolicy, generate, load_policy
from tests.support.tiny_models import TOKENIZERS, tiny_model
from tools.bundled_model.unseen import BLIND, UNSEEN

pytestmark = pytest.mark.training

ROOM = 96


@pytest.fixture(scope="module")
def bundled() -> LoadedPolicy:
    return load_policy("bundled")


def strangers(prompts: int) -> list[tuple[Agent, dict[str, Any]]]:
    """Prompts of agents that the bundled base never saw, some of each."""
    return [one.prompt(Random(f"{one.slug}/{n}"))[:2] for one in (*UNSEEN, *BLIND) for n in range(prompts)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_strangers_answer_within_their_schema(bundled: LoadedPolicy, temperature: float) -> None:
    cases = strangers(2)
    answers = generate(
        bundled,
        [agent.render(state) for agent, state in cases],
        max_new_tokens=ROOM,
        temperature=temperature,
        forms=[agent.schema_served(state) for agent, state in cases],
    )
    problems = {
        (agent.slug, answer.text)
        for answer, (agent, state) in zip(answers, cases, strict=True)
        if not agent.is_valid(answer.text, state)
    }
    assert problems == set()
    assert all(answer.finish_reason == "stop" for answer in answers)


@pytest.mark.slow
def test_prompts_without_a_schema_are_answered_as_ever(bundled: LoadedPolicy) -> None:
    cases = strangers(1)[:6]
    prompts = [agent.render(state) for agent, state in cases]
    free = generate(bundled, prompts, max_new_tokens=ROOM)
    forms = [
        agent.schema_served(state) if number % 2 else None for number, (agent, state) in enumerate(cases)
    ]
    mixed = generate(bundled, prompts, max_new_tokens=ROOM, forms=forms)
    assert mixed[::2] == free[::2]
    unforced = [answer.unforced for answer in mixed]
    assert all(unforced[::2])
    assert all(mixed[i].text == free[i].text for i in range(len(cases)) if unforced[i])


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["klein", "mittel groß", "日本"]},
        "n": {"type": "integer", "minimum": 3, "maximum": 17},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "uniqueItems": True, "minItems": 3},
    },
    "required": ["größe", "n", "tags"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma3_text", "gpt2"])
def test_models_of_random_weights_write_what_the_schema_says(architecture: str, tmp_path: Path) -> None:
    # a kind of tokenizer each: bytes with other splits, and SentencePiece's with spaces and bytes of their own
    assert len({TOKENIZERS[name] for name in ("llama", "mistral", "qwen3", "gemma3_text", "gpt2")}) == 5
    policy = load_policy(str(tiny_model(tmp_path / architecture, architecture)))
    agent = TemplateAgent("stranger", "", "", system_prompt="", template="{ask}", schema=SCHEMA)
    prompts = [agent.render({"ask": f"say {number}"}) for number in range(4)]
    for temperature in (0.0, 1.0):
        answers = generate(
            policy, prompts, max_new_tokens=160, temperature=temperature, forms=[SCHEMA] * len(prompts)
        )
        for answer in answers:
            assert sorted(agent.parse(answer.text)["tags"]) == ["a", "b", "ü"]
            assert (answer.finish_reason, answer.unforced) == ("stop", False)


def test_a_schema_that_nothing_can_enforce_is_noted_and_left(bundled: LoadedPolicy) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
    prompt = [[{"role": "user", "content": "Hello!"}]]
    answers = generate(bundled, prompt, max_new_tokens=8, forms=[schema])
    assert answers == generate(bundled, prompt, max_new_tokens=8)
    assert [note for note in bundled.notes if "without their JSON schema" in note and "look-around" in note]


@pytest.mark.slow
def test_an_agent_with_a_schema_is_judged_as_it_is_served(bundled: LoadedPolicy) -> None:
    unseen = next(one for one in UNSEEN if one.slug == "kitchen")
    rows = []
    for number in range(12):
        agent, state, options = unseen.prompt(Random(f"judged/{number}"))
        rows.append(
            {
                "prompt": agent.render(state),
                "state": state,
                "chosen": f'{{"allergens": ["{options[0]}"]}}',
                "rejected": f'{{"allergens": ["{options[1]}"]}}',
            }
        )
    names = {"type": "array", "items": {"enum": list(unseen.pool)}, "uniqueItems": True, "minItems": 1}
    every = {"allergens": names}
    schema = {"type": "object", "properties": every, "required": ["allergens"], "additionalProperties": False}
    agent = TemplateAgent(
        unseen.slug,
        "",
        "",
        system_prompt=unseen.system,
        template=unseen.template,
        schema=schema,
        max_new_tokens=ROOM,
    )
    outcome = evaluate_policy(bundled, rows, agent=agent, against="base")
    assert outcome["valid_rate"]["value"] == 1.0
    # what it writes without the schema stands beside it
    assert outcome["written"]["valid_rate"]["n"] == 12
    assert all(one["written_valid"] in (True, False) for one in outcome["held_out"]["answers"])
