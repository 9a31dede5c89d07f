"""What the bundled base is taught: shares of answers worked by hand, trees of tokens, and nothing that is measured."""

import itertools
import json
import re
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from rl.agents import AGENTS
from rl.agents.assistant import FRIENDLY, PLAIN, TOPICS
from tools.bundled_model import corpus, layouts, strangers, words
from tools.bundled_model.corpus import example_random
from tools.bundled_model.examples import (
    BaseExample,
    TargetAnswer,
    call_of,
    chat,
    names_picked,
    object_of,
    one_answer,
)
from tools.bundled_model.unseen import BLIND, ENUM, UNSEEN
from tools.bundled_model.words import options_named

END = 0


class Letters:
    """A stand-in tokenizer: every character is a token, and a prompt is its messages' texts."""

    eos_token_id = END

    @property
    def backend_tokenizer(self):
        return SimpleNamespace(
            encode=lambda text, add_special_tokens: SimpleNamespace(ids=[ord(sign) for sign in text])
        )

    def apply_chat_template(self, messages, **_):
        return "".join(message["content"] for message in messages)


def shares_of(answer: TargetAnswer) -> list[tuple[str, dict[str, float]]]:
    from tools.bundled_model.training import token_shares

    return [
        (chr(token), {chr(next_token): share for next_token, share in shares.items()})
        for token, shares in token_shares(Letters().backend_tokenizer, answer, END)
    ]


def test_a_choice_shows_how_many_options_are_left():
    every = (("tea", 0.25), ("ten", 0.25), ("t", 0.25), ("milk", 0.25))
    assert shares_of(TargetAnswer("tea", (every,))) == [
        ("t", {"t": 0.75, "m": 0.25}),
        ("e", {"e": pytest.approx(2 / 3), "\x00": pytest.approx(1 / 3)}),
        ("a", {"a": 0.5, "n": 0.5}),
        ("\x00", {"\x00": 1.0}),
    ]


def test_names_picked_tell_when_the_last_one_may_be_the_last():
    first = dict(names_picked(Random(0), "k", ["a", "b"], [1, 2]).choices[0])
    # either name, and with it either end: two sizes, alike likely
    assert first == {'{"k": ["a"]}': 0.25, '{"k": ["a",': 0.25, '{"k": ["b"]}': 0.25, '{"k": ["b",': 0.25}
    ordered = names_picked(Random(1), "k", ["a", "b", "c"], [3])
    assert sorted(json.loads(ordered.text)["k"]) == ["a", "b", "c"]
    assert [len(every) for every in ordered.choices] == [3, 2, 1]
    assert ordered.choices[2] == ((ordered.text, 1.0),)


@pytest.mark.parametrize(("first", "following"), [("a", "b"), ("b", "c"), ("c", "a")])
def test_half_of_the_answers_go_on_in_the_order_of_the_list(first: str, following: str) -> None:
    random = Random(0)
    while not (answer := names_picked(random, "k", ["a", "b", "c"], [3])).text.startswith(
        f'{{"k": ["{first}"'
    ):
        pass
    # the one below it in half of the answers, and an even share of the other half
    assert dict(answer.choices[1]) == {
        f'{{"k": ["{first}", "{name}",': 0.75 if name == following else 0.25
        for name in "abc"
        if name != first
    }


def test_each_name_is_as_likely_as_another_at_every_place_of_an_order() -> None:
    random = Random("places")
    counts = Counter(
        (place, name)
        for _ in range(3_000)
        for place, name in enumerate(json.loads(names_picked(random, "k", ["a", "b", "c"], [3]).text)["k"])
    )
    assert all(900 < count < 1_100 for count in counts.values())
    assert len(counts) == 9


def test_fields_of_an_object_are_drawn_one_by_one():
    answer = object_of(Random(3), [("a", ["x", "y"]), ("n", [1, 2, 3, 4])])
    found = json.loads(answer.text)
    assert list(found) == ["a", "n"]
    assert answer.choices[0] == (('{"a": "x",', 0.5), ('{"a": "y",', 0.5))
    assert answer.choices[1] == tuple((f'{{"a": "{found["a"]}", "n": {n}}}', 0.25) for n in (1, 2, 3, 4))


def test_calls_name_each_tool_alike_and_close_both_objects():
    for seed in range(8):
        answer = call_of(Random(seed), [("ask", []), ("send", [("to", ["ana", 7])])])
        said = json.loads(answer.text)
        assert said in (
            {"tool": "ask", "arguments": {}},
            {"tool": "send", "arguments": {"to": "ana"}},
            {"tool": "send", "arguments": {"to": 7}},
        )
        assert [share for _, share in answer.choices[0]] == [0.5, 0.5]
        for every in answer.choices[1:]:
            assert all(json.loads(text) for text, _ in every)


def test_a_tree_holds_the_prompt_once_and_branches_where_answers_part():
    from tools.bundled_model.training import tree_of

    every = (("ab", 0.5), ("ac", 0.5))
    example = BaseExample(chat("", "QQ"), (TargetAnswer("ab", (every,)), TargetAnswer("ac", (every,))))
    tree = tree_of(Letters(), example)
    assert [chr(token) for token in tree.tokens] == ["Q", "Q", "a", "b", "c"]
    assert tree.parents == [-1, 0, 1, 2, 2]
    assert tree.depths == [0, 1, 2, 3, 3]
    expected = {1: {ord("a"): 1.0}, 2: {ord("b"): 0.5, ord("c"): 0.5}, 3: {END: 1.0}, 4: {END: 1.0}}
    assert tree.targets == expected


def test_plain_text_is_taught_from_its_second_token_on():
    from tools.bundled_model.training import tree_of

    tree = tree_of(Letters(), one_answer((), "xyz"))
    assert [chr(token) for token in tree.tokens] == ["x", "y", "z"]
    assert sorted(tree.targets) == [0, 1, 2]


def test_a_branch_is_computed_as_if_it_stood_alone():
    """Loss of a tree of two answers is the mean over both, each read after the prompt by itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools.bundled_model.training import loss_of, tree_of

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        )
    messages = chat("", "prompt")
    both = BaseExample(messages, (TargetAnswer("one"), TargetAnswer("two!")))
    alone = [one_answer(messages, "one"), one_answer(messages, "two!")]
    with torch.no_grad():
        together, above = loss_of(model, [tree_of(Letters(), both)], 1)
        apart = [
            float(loss_of(model, [tree_of(Letters(), example), tree_of(Letters(), alone[1])], 1)[0])
            for example in alone
        ]
        ids = torch.tensor([[ord(sign) for sign in "prompttwo!"]])
        logp = model(input_ids=ids).logits[0, 5:].log_softmax(-1)
        by_hand = [-float(logp[place, token]) for place, token in enumerate([*map(ord, "two!"), END])]
    assert apart[1] == pytest.approx(sum(by_hand) / 5, abs=1e-5)
    # "one" has 4 taught places, "two!" 5; the first place is one and the same in the tree, taught as "one" begins
    one, two = (apart[0] * 9 - apart[1] * 5) / 4, apart[1]
    assert float(together) == pytest.approx((one * 4 + two * 5 - by_hand[0]) / 8, abs=1e-5)
    assert float(above) == pytest.approx(float(together), abs=1e-5)  # nothing was left open: no entropy


def test_examples_are_the_same_for_a_seed_and_others_for_another():
    def drawn(seed: int) -> list[BaseExample]:
        random = Random(seed)
        return [corpus.example_random(random) for _ in range(50)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_every_example_is_answered_by_one_of_its_own_alternatives():
    random = Random("alternatives")
    for _, make in corpus.MIXTURE:
        for _ in range(15):
            example = make(random)
            for answer in example.answers:
                for every in answer.choices:
                    assert sum(share for _, share in every) == pytest.approx(1.0)
                    assert any(answer.text.startswith(text) for text, _ in every), (make, answer)


MAKERS = {"widgets": corpus.widget_example, "fixtures": corpus.fixture_example, "filer": corpus.filer_example}
MAKERS |= {"storer": corpus.storer_example}


@pytest.mark.parametrize("slug", MAKERS)
def test_examples_teach_no_taste(slug):
    random = Random("taste")
    for _ in range(100):
        example = MAKERS[slug](random)
        lines = example.messages[1]["content"].split(f"{AGENTS[slug].options_key}:\n", 1)[1].splitlines()
        (every,) = {answer.choices for answer in example.answers}
        assert len({share for _, share in every[0]}) == 1
        for text, _ in every[0]:
            (option,) = json.loads(text).values()
            assert any(line == option or line.startswith(f"{option}: ") for line in lines)


@pytest.mark.parametrize("slug", ["librarian", "prioritizer", "retriever", "tool_agent"])
def test_examples_of_lists_and_tools_are_answers_their_agent_takes(slug):
    maker = {
        "librarian": corpus.librarian_example,
        "prioritizer": corpus.prioritizer_example,
        "retriever": corpus.retriever_example,
        "tool_agent": corpus.tool_example,
    }[slug]
    random = Random("lists")
    for _ in range(40):
        example = maker(random)
        assert example.messages[0]["content"] == AGENTS[slug].system_prompt
        assert all(AGENTS[slug].is_valid(answer.text) for answer in example.answers)


def test_no_prompt_of_a_built_in_scenario_is_taught():
    random = Random("kept aside")
    asked = {
        agent.render(scenario.state)[-1]["content"]
        for agent in AGENTS.values()
        for scenario in agent.scenarios()
    }
    drawn = [corpus.example_random(random) for _ in range(400)]
    assert not any(e.messages and e.messages[-1]["content"] in asked for e in drawn)


def test_an_example_that_asks_as_a_scenario_does_is_drawn_again():
    scenario, other = (one_answer(chat("", text), "x") for text in ("How do I reset my password?", "another"))
    left = [other, scenario]
    assert corpus.example_random(Random(0), ((1.0, lambda _: left.pop()),)) is other


def test_the_wordings_of_the_assistant_are_taught():
    """Its scenarios ask every question of every product, and examples that ask like a scenario are drawn again."""
    from tools.bundled_model.corpus import assistant_example

    random = Random(0)
    taught = [example_random(random, ((1.0, assistant_example),)) for _ in range(400)]
    wordings = [example for example in taught if example.response.startswith((*FRIENDLY, *PLAIN))]
    assert len(wordings) > 240
    sayings = {saying.partition("{")[0] for sayings, _, _ in TOPICS.values() for saying in sayings}
    asked = " ".join(example.messages[-1]["content"] for example in wordings)
    assert [saying for saying in sayings if saying not in asked] == []


def test_some_lists_of_names_keep_to_one_script():
    random = Random(0)
    lists = [options_named(random, 3, 5) for _ in range(300)]
    letters = [{ord(letter) >> 8 for name in names for letter in name if letter.isalpha()} for names in lists]
    assert len([scripts for scripts in letters if len(scripts) == 1 and scripts != {0}]) > 20


def test_invented_words_are_too_many_to_be_learnt_by_heart() -> None:
    random = Random("invented")
    invented = [words.pseudoword(random) for _ in range(4_000)]
    known = {*words.ENGLISH, *itertools.chain.from_iterable(words.FOREIGN)}
    assert len(set(invented)) > 2_000
    assert sum(word in known for word in invented) < 1_000
    assert all(1 < len(word) < 13 for word in invented)


def test_most_tokens_of_a_drill_are_learnt_from() -> None:
    from rl.training.loading import tokenizer_load
    from tools.bundled_model.model import BUNDLED_MODEL
    from tools.bundled_model.training import tree_of

    tokenizer, random = tokenizer_load("bundled", str(BUNDLED_MODEL)), Random("drills")
    trees = [tree_of(tokenizer, strangers.drill_stranger(random)) for _ in range(100)]
    assert sum(len(tree.targets) for tree in trees) > 0.5 * sum(len(tree.tokens) for tree in trees)


@pytest.mark.parametrize("ask", [strangers._one_invented, strangers._one_within])
def test_a_key_that_is_asked_for_can_be_read_in_the_prompt(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setattr(strangers, "ASKS", (ask,))
    random, seen = Random("keys"), 0
    while seen < 100:
        example = strangers.choice_stranger(random)
        if not example.response.startswith("{"):
            continue
        (key,) = json.loads(example.response)
        lines = "\n".join(message["content"] for message in example.messages).splitlines()
        # of a sentence in no language only the word above the list can be the key; else it stands in quotes
        heads = [line.partition(":")[0].removesuffix("s") for line in lines]
        quoted = json.dumps(key, ensure_ascii=False)
        assert key.removesuffix("s") in heads or any(quoted in line or f'"{key}s"' in line for line in lines)
        seen += 1


def test_no_name_of_the_agents_it_is_measured_on_is_taught():
    taught = {
        name.casefold()
        for names in (
            words.NOUNS,
            words.VERBS,
            words.ADJECTIVES,
            words.NAMES,
            words.ADVERBS,
            layouts.KEYS,
            layouts.FIELDS,
            layouts.TASKS,
            *words.FOREIGN,
        )
        for name in names
    }
    for unseen in UNSEEN:
        for name in (*unseen.pool, unseen.key, *unseen.fields):
            assert not taught & set(re.findall(r"\w+", name.casefold())), name


@pytest.mark.parametrize("unseen", [*UNSEEN, *BLIND], ids=lambda unseen: unseen.slug)
def test_strangers_can_be_answered(unseen):
    agent, state, options = unseen.prompt(Random(1))
    text = "\n".join(message["content"] for message in agent.render(state))
    assert f'"{unseen.key}"' in text or unseen.key in text
    assert all(option in text for option in options)
    right = {"enum": options[0], "list": options[:2], "order": options[::-1], "object": options[0]}[
        unseen.kind
    ]
    values = {"integer": 3, "boolean": False}
    more = {key: values[schema["type"]] for key, schema in unseen.properties}
    assert agent.is_valid(json.dumps({unseen.key: right, **more}), state)
    wrong = "elsewhere" if unseen.kind in (ENUM, "object") else [options[0]] * len(options)
    assert not agent.is_valid(json.dumps({unseen.key: wrong, **more}), state)


def test_names_to_choose_from_differ_and_come_in_many_scripts():
    random = Random("names")
    drawn = [words.options_named(random, 2, 6) for _ in range(300)]
    assert all(len(set(names)) == len(names) >= 1 for names in drawn)
    signs = "".join(name for names in drawn for name in names)
    for first, last in (("а", "я"), ("α", "ω"), ("あ", "ん"), ("가", "힣"), ("一", "龥"), ("ا", "ي")):
        assert any(first <= sign <= last for sign in signs), first


@pytest.mark.slow
def test_a_training_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rl.training.loading import tokenizer_load
    from tools.bundled_model import training
    from tools.bundled_model.model import BUNDLED_MODEL
    from tools.bundled_model.training import train

    tokenizer = tokenizer_load("bundled", str(BUNDLED_MODEL))

    def trained(state, stop_at: int = 0) -> tuple[list[float], torch.Tensor]:
        def progress(step: int, steps: int, loss: float) -> None:
            if step == stop_at:
                raise KeyboardInterrupt

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=16,
                    intermediate_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    tie_word_embeddings=True,
                )
            )
        losses = train(
            model,
            tokenizer,
            seed=0,
            steps=4,
            batch_size=2,
            learning_rate=1e-3,
            state=state,
            save_every=2,
            progress=progress,
        )
        return losses, model.model.embed_tokens.weight.detach()

    monkeypatch.setattr(training, "GROWING", 2)  # the longest example is another one with each step
    whole, weights = trained(None)
    state = tmp_path / "training.safetensors"
    with pytest.raises(KeyboardInterrupt):
        trained(state, stop_at=3)
    assert state.is_file()
    again, continued = trained(state)
    assert len(again) == 4
    assert again == whole
    assert torch.equal(continued, weights)
