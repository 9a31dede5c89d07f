"""The bundled base model: its files, and what it can do untrained. How it is built: tools/bundled_model/tests."""

import itertools
import json
import subprocess
import sys
from random import Random

import pytest

from rl.agents import AGENTS
from rl.agents.assistant import EVASIVE, FRIENDLY, PLAIN, TOPICS
from rl.agents.base import ChoiceAgent
from rl.agents.worlds import TEAM, scenarios_of
from rl.bundled_models import BUNDLED_MODEL, resolve_base_model

CHOOSERS = ("widgets", "fixtures", "filer")


@pytest.fixture(scope="module")
def policy():
    from rl.training.policy import load_policy

    return load_policy("bundled")


def asked(slug: str, count: int) -> list:
    return Random(f"test/{slug}").sample(AGENTS[slug].scenarios(), count)


def test_module_finds_the_model_without_torch():
    code = (
        "import sys; from rl.bundled_models import resolve_base_model\n"
        "print(resolve_base_model('x'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "x False\n"


def test_bundled_names_the_shipped_directory_and_other_names_stay():
    assert resolve_base_model("bundled") == str(BUNDLED_MODEL)
    assert resolve_base_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_shipped_files_are_complete_and_at_most_ten_megabytes():
    names = {file.name for file in BUNDLED_MODEL.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
    }
    assert sum(file.stat().st_size for file in BUNDLED_MODEL.iterdir()) <= 10_000_000


@pytest.mark.slow
def test_chat_template_ends_every_turn_with_the_end_token(policy):
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    text = policy.tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|>"
    asked_for = policy.tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert asked_for == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    assert policy.encoder.stop_ids == [policy.tokenizer.convert_tokens_to_ids("<|end|>")]


def test_chat_template_writes_tools_calls_and_results(policy):
    tool = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "stock", "arguments": {"sku": 3, "ort": "K\u00f6ln"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    text = policy.tokenizer.apply_chat_template(
        chat, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    system, user = text.split("<|end|>")[:2]
    assert system.startswith("<|system|>Be brief.\n\n")
    assert json.dumps(tool) in system
    assert text.count("<|system|>") == 1
    assert user == "<|user|>How many?"
    assert text.endswith(
        '<|assistant|><tool_call>{"name": "stock", "arguments": {"sku": 3, "ort": "K\u00f6ln"}}</tool_call><|end|>'
        "<|tool|>7<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        " two  spaces\n\n\ttab",
        "Grüße 発注 مرحبا 👍🏽",
        "\x00\x7f\u2028",
        "".join(map(chr, range(1, 0x250))),
    ],
)
def test_any_text_can_be_encoded_and_comes_back(policy, text):
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert policy.tokenizer.decode(ids) == text


@pytest.mark.parametrize("slug", CHOOSERS)
def test_prompts_are_short_enough_to_be_quick(policy, slug):
    prompts = [AGENTS[slug].render(scenario.state) for scenario in asked(slug, 100)]
    ids, _ = policy.encoder.prompts(prompts, room=24)
    assert max(map(len, ids)) <= 130


@pytest.mark.campaign
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slug", CHOOSERS)
def test_answers_are_valid_in_at_least_95_of_100(policy, slug, temperature):
    from rl.training.policy import generate

    agent, scenarios = AGENTS[slug], asked(slug, 60)
    prompts = [agent.render(scenario.state) for scenario in scenarios]
    answers = generate(
        policy, prompts, max_new_tokens=agent.max_new_tokens, temperature=temperature, batch_size=60
    )
    # sampled, a tail of answers is valid JSON that names an option which is not listed: docs/models.md
    listed = temperature == 0.0
    bad = [
        a.text
        for a, s in zip(answers, scenarios, strict=True)
        if not agent.is_valid(a.text, s.state if listed else None)
    ]
    assert len(bad) <= 3, bad


def told(slug: str, count: int) -> list:
    """Prompts of the simulated tastes, which tell of a situation in further lines."""
    return scenarios_of(AGENTS[slug], TEAM, count, seed=1)


@pytest.mark.campaign
@pytest.mark.parametrize("prompts", [asked, told])
@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.95), (1.0, 0.9)])
def test_every_built_in_agent_is_answered(policy, temperature, least, prompts):
    """On prompts that were not taught; a tail of sampled answers names what is not listed: docs/models.md."""
    from rl.training.policy import generate

    for slug, agent in sorted(AGENTS.items()):
        scenarios = prompts(slug, 40)
        answers = generate(
            policy,
            [agent.render(scenario.state) for scenario in scenarios],
            max_new_tokens=agent.max_new_tokens,
            temperature=temperature,
            batch_size=40,
        )
        bad = [a.text for a, s in zip(answers, scenarios, strict=True) if not agent.is_valid(a.text, s.state)]
        assert len(bad) <= round((1 - least) * len(answers)), (slug, bad)


@pytest.mark.slow
def test_it_copies_options_it_has_never_seen_more_often_than_not(policy):
    from rl.training.policy import generate

    random = Random("unseen")
    words = ["".join(random.choices("abcdefghijklmnoprstuvwz", k=5)) for _ in range(240)]
    agent = ChoiceAgent(slug="r", title="r", description="", answer_key="colour", options_key="o")
    states = [{"o": words[start : start + 4]} for start in range(0, 240, 4)]
    prompts = [
        [
            {"role": "system", "content": "Pick one listed colour for the ticket. Answer in JSON."},
            {"role": "user", "content": "\n".join(["ticket: the door is open.", "colours:", *state["o"]])},
        ]
        for state in states
    ]
    answers = generate(policy, prompts, max_new_tokens=24, batch_size=60)
    assert sum([agent.is_valid(a.text, state) for a, state in zip(answers, states, strict=True)]) >= 30


def test_assistant_says_something_in_words(policy):
    from rl.training.policy import generate

    agent, scenarios = AGENTS["assistant"], asked("assistant", 20)
    prompts = [agent.render(scenario.state) for scenario in scenarios]
    prompts.append([{"role": "user", "content": "xyzzy?"}])
    answers = generate(policy, prompts, max_new_tokens=48, batch_size=32)
    assert all(agent.is_valid(answer.text) for answer in answers)
    assert all(answer.finish_reason == "stop" for answer in answers[:-1])


@pytest.mark.slow
def test_questions_are_answered_in_the_wordings_of_the_assistant(policy):
    from rl.training.policy import generate

    agent, scenarios = AGENTS["assistant"], asked("assistant", 20)
    prompts = [agent.render(scenario.state) for scenario in scenarios]
    answers = generate(policy, prompts, max_new_tokens=48, batch_size=32)
    assert all(answer.finish_reason == "stop" for answer in answers)
    endings = (*EVASIVE, *(text.format(fact=fact) for _, fact, text in TOPICS.values()))
    worded = [a.text for a in answers if a.text.startswith((*FRIENDLY, *PLAIN)) and a.text.endswith(endings)]
    assert len(worded) >= 18, [answer.text for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("slug", CHOOSERS)
def test_it_prefers_no_option_of_its_own(policy, slug):
    from rl.training.scoring import score_responses

    agent = AGENTS[slug]
    items, worths = [], []
    for scenario in asked(slug, 75):
        for candidate in agent.candidates(scenario.state):
            items.append((agent.render(scenario.state), candidate))
            worths.append(agent.hidden_preference(scenario.state, candidate))
    logps = [score.logp for score in score_responses(policy, items, batch_size=64)]
    right = [
        logps[start + good] > logps[start + bad]
        for start in range(0, len(items), 4)
        for good, bad in itertools.permutations(range(4), 2)
        if worths[start + good] >= 0.5 > worths[start + bad]
    ]
    assert len(right) == 300
    assert 0.35 <= sum(right) / len(right) <= 0.65
