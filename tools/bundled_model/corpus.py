"""Corpus of the bundled base model: prompts of the built-in agents and of strangers', and plain English. Pure.

Among the options of a prompt each answer is alike, so the model learns to name one of them and prefers none. Some
prompts of the built-in agents also list options that make no sense for the question; the answers are then the
sensible ones, so that the model has to understand what is asked. No prompt of a built-in agent's scenarios is taught.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any

from rl.agents import (
    AGENTS,
    assistant,
    filer,
    fixtures,
    librarian,
    prioritizer,
    retriever,
    storer,
    tool_agent,
    widgets,
)
from rl.agents.base import ChoiceAgent
from rl.agents.lists import ListAgent
from tools.bundled_model import layouts, strangers, words
from tools.bundled_model.examples import (
    BaseExample,
    TargetAnswer,
    call_of,
    chat,
    choice,
    names_picked,
    one_answer,
)

Mixture = tuple[tuple[float, Callable[[Random], BaseExample]], ...]
"""Shares of the examples, and their makers."""

GREETINGS = (
    (("Hello!", "Hi", "Good morning", "Hello, are you there?"), "Hello! How can I help you today?"),
    (
        ("Thank you!", "Thanks a lot", "That helped, thanks"),
        "You are welcome. Is there anything else I can do?",
    ),
    (
        ("Who are you?", "What are you?"),
        "I am a small assistant. I answer questions and choose among options.",
    ),
    (("Goodbye", "Bye!", "See you"), "Goodbye, and have a good day!"),
    (
        ("What can you do?", "How can you help me?"),
        "I can answer short questions and pick one option from a list.",
    ),
)


OPENINGS = ("Hello. ", "Hi! ", "One question: ", "Please help. ")


def example_random(random: Random, mixture: Mixture | None = None) -> BaseExample:
    """One made-up example, never a prompt of a built-in scenario; `mixture` holds the shares (default: `MIXTURE`)."""
    mixture = MIXTURE if mixture is None else mixture
    while True:
        example = random.choices([make for _, make in mixture], [share for share, _ in mixture])[0](random)
        if not example.messages or example.messages[-1]["content"] not in _reserved_prompts():
            return example


@functools.cache
def _reserved_prompts() -> frozenset[str]:
    """Words of users in the scenarios of the built-in agents: figures on them are of prompts never seen."""
    return frozenset(
        agent.render(scenario.state)[-1]["content"]
        for agent in AGENTS.values()
        for scenario in agent.scenarios()
    )


# --- Built-in agents ---------------------------------------------------------------------------------------------


def widget_example(random: Random) -> BaseExample:
    intent = random.choice(tuple(widgets.WIDGETS))
    state = widgets.AGENT.draw(random, intent)
    fitting = {name for group in widgets.WIDGETS[intent] for name in group}
    others = sorted({n for groups in widgets.WIDGETS.values() for g in groups for n in g if n not in fitting})
    return _choice_example(random, AGENTS["widgets"], state, list(state["widgets"]), others)


def fixture_example(random: Random) -> BaseExample:
    situation = random.choice(tuple(fixtures.SITUATIONS))
    state = fixtures.AGENT.draw(random, situation)
    every = {n: d for _, brief, guided in fixtures.SITUATIONS.values() for n, d in (brief | guided).items()}
    _, brief, guided = fixtures.SITUATIONS[situation]
    others = [name for name in every if name not in brief and name not in guided]
    return _choice_example(
        random, AGENTS["fixtures"], {**state, "descriptions": every}, list(state["fixtures"]), others
    )


def filer_example(random: Random) -> BaseExample:
    state = filer.AGENT.draw(random, random.choice(tuple(filer.TASTE)))
    # names of its own as well, so that the model copies a folder instead of knowing the ten partners by heart
    partner = state["partner"] if random.random() < 0.5 else words.syllables(random).capitalize()
    changes = {
        key: value.replace(state["partner"], partner)
        for key, value in state.items()
        if isinstance(value, str)
    }
    folders = [folder.replace(state["partner"], partner) for folder in state["folders"]]
    other = filer.AGENT.draw(random, random.choice(tuple(filer.TASTE)))
    others = (
        [folder for folder in other["folders"] if folder not in folders]
        if other["kind"] != state["kind"]
        else []
    )
    return _choice_example(random, AGENTS["filer"], {**state, **changes, "folders": folders}, folders, others)


def storer_example(random: Random) -> BaseExample:
    place = random.choice(tuple(storer.PLACES))
    fact = random.choice(storer.PLACES[place][1]).format(
        who=random.choice((*storer.PEOPLE, *words.NAMES)),
        place=random.choice((*storer.CITIES, *words.PLACES)),
        day=random.choice(storer.DAYS),
    )
    described = {name: what for name, (what, _) in storer.PLACES.items()}
    if random.random() < 0.4:
        described = {name: words.phrase(random) for name in words.options_named(random, 2, 6)}
    places = random.sample(tuple(described), len(described))
    state = {"fact": fact, "descriptions": described}
    return _choice_example(random, AGENTS["storer"], state, places, [])


CONTEXT_SHARE = 0.4
"""Share of the prompts that tell of a situation in further lines, as the worlds of simulated tastes do."""


def _with_context(random: Random, state: dict[str, Any]) -> dict[str, Any]:
    """The state, now and then with further lines of its prompt, which say nothing of the answer."""
    if random.random() >= CONTEXT_SHARE:
        return state
    lines = layouts.fields_random(random, random.randint(1, 3))
    return {**state, "context": {**(state.get("context") or {}), **lines}}


def _choice_example(
    random: Random, agent: Any, state: dict[str, Any], sensible: list[str], others: list[str]
) -> BaseExample:
    """Half of the time all listed options are sensible; else some are replaced by ones that are not, or all."""
    listed = list(sensible)
    kind = random.random()
    if others and kind < 0.3:
        kept = random.randint(1, 2)
        listed = random.sample(sensible, kept) + random.sample(others, min(len(others), random.randint(1, 3)))
        sensible = listed[:kept]
        random.shuffle(listed)
    elif others and kind < 0.5:
        listed = sensible = words.options_named(random, 2, 6)
    assert isinstance(agent, ChoiceAgent)
    messages = agent.render({**_with_context(random, state), agent.options_key: listed})
    return choice(random, messages, [agent.respond(option) for option in sensible])


def librarian_example(random: Random) -> BaseExample:
    subjects = random.sample(tuple(librarian.SUBJECTS), random.randint(3, 6))
    one, two = (random.choice(librarian.SUBJECTS[name]) for name in subjects[:2])
    if random.random() < 0.4:
        one, two = words.phrase(random), words.phrase(random)
        subjects = words.options_named(random, 3, 6)
    random.shuffle(subjects)
    state = {"text": random.choice(librarian.TEXTS).format(one=one, two=two), "subjects": subjects}
    return _list_example(random, AGENTS["librarian"], state, range(1, min(len(subjects), 3) + 1))


def prioritizer_example(random: Random) -> BaseExample:
    count = random.choice((2, 3, 4, 4, 4, 5))
    tasks, kind = random.sample(prioritizer.TASKS, count), random.random()
    if kind < 0.3:
        tasks = sorted({_task(random) for _ in range(count)})
    elif kind < 0.5:
        tasks = words.options_named(random, count, count)
    random.shuffle(tasks)
    goal = random.choice(prioritizer.GOALS) if random.random() < 0.7 else words.phrase(random)
    state: dict[str, Any] = {"goal": goal, "tasks": tasks}
    if random.random() < 0.9:
        state["descriptions"] = {task: random.choice(prioritizer.DUE) for task in tasks}
    return _list_example(random, AGENTS["prioritizer"], state, [len(tasks)])


def _task(random: Random) -> str:
    return f"{random.choice(words.VERBS)} the {random.choice(words.NOUNS)}"


def retriever_example(random: Random) -> BaseExample:
    count = random.choice((3, 4, 5, 5, 5, 6))
    texts = [random.choice(helping) for _, helping in retriever.TOPICS.values()]
    question = random.choice(random.choice(list(retriever.TOPICS.values()))[0])
    if random.random() < 0.4:
        texts = [words.sentence(random) for _ in range(6)]
        question = f"{random.choice(('how', 'when', 'where', 'why'))} {words.clause(random)}"
    random.shuffle(texts)
    sign, highest = ("p", 9) if random.random() < 0.7 else (random.choice("abcdefgknrstwxyzDPQ"), 30)
    names = [f"{sign}{number}" for number in random.sample(range(1, highest + 1), count)]
    state = {
        "question": random.choice(retriever.SAYINGS).format(question=question),
        "passages": names,
        "descriptions": dict(zip(names, texts, strict=False)),
    }
    return _list_example(random, AGENTS["retriever"], state, range(1, min(count, 3) + 1))


def _list_example(random: Random, agent: Any, state: dict[str, Any], sizes: Any) -> BaseExample:
    assert isinstance(agent, ListAgent)
    names = agent.options(state)
    answers = [names_picked(random, agent.answer_key, names, sizes) for _ in range(4)]
    return BaseExample(tuple(agent.render(_with_context(random, state))), tuple(answers))


def tool_example(random: Random) -> BaseExample:
    """The built-in tools, or others; arguments are taken from the goal."""
    agent = AGENTS["tool_agent"]
    if random.random() < 0.45:
        tools, goal, answers = strangers.tool_stranger(random)
        return BaseExample(tuple(agent.render({"goal": goal, "tools": tools})), tuple(answers))
    person = random.choice(tool_agent.PEOPLE) if random.random() < 0.5 else words.word(random).lower()
    order, amount = random.randint(100, 2099), random.randint(5, 90)
    goal, refund = random.choice(
        (
            (f"find what {person} bought, case {order}", False),
            (f"give {person} back {amount} euros for order {order}", True),
            (f"tell {person} that we write about order {order}", False),
        )
    )
    calls: list[tuple[str, list[tuple[str, list[Any]]]]] = [
        ("search_orders", [("customer", [person])]),
        ("send_mail", [("to", [person]), ("text", [f"About order {order}."])]),
    ]
    if refund:
        calls.append(("refund", [("order", [order]), ("amount", [amount])]))
    call_answers = [call_of(random, calls) for _ in range(3)]
    refusal = TargetAnswer('{"answer": "I cannot do that."}')
    # a call of some tool in five answers of six; else it declines
    answers = [
        TargetAnswer(
            call.text,
            (
                (*((text, share * 5 / 6) for text, share in call.choices[0]), (refusal.text, 1 / 6)),
                *call.choices[1:],
            ),
        )
        for call in call_answers
    ]
    answers.append(TargetAnswer(refusal.text, answers[0].choices[:1]))
    return BaseExample(tuple(agent.render({"goal": goal, "tools": tool_agent.TOOLS})), tuple(answers))


def assistant_example(random: Random) -> BaseExample:
    system = AGENTS["assistant"].system_prompt
    kind = random.random()
    if kind < 0.8:
        topic = random.choice(tuple(assistant.TOPICS))
        state = assistant.state_random(random, topic, _question(random, topic))
        return choice(random, chat(system, state["question"]), state["drafts"], most=1)
    if kind < 0.9:
        greetings, answer = random.choice(GREETINGS)
        return one_answer(chat(system, random.choice(greetings)), answer)
    n = random.randrange(len(words.PLACES))
    return one_answer(
        chat(system, f"What is the capital of {words.PLACES[n]}?"),
        f"The capital of {words.PLACES[n]} is {words.CAPITALS[n]}.",
    )


def _question(random: Random, topic: str) -> str:
    """A question on a topic as no scenario asks it: scenarios are every saying of every product."""
    saying = random.choice(assistant.TOPICS[topic][0])
    asked = saying.format(product=words.word(random).capitalize())
    if random.random() < 0.3:
        return f"{random.choice(tuple(assistant.LEADS))}{asked} (case {random.randint(100, 999)})"
    return asked if asked != saying else f"{random.choice(OPENINGS)}{asked}"


def repeat_example(random: Random) -> BaseExample:
    """Words to say again: the one skill all choices rest on, and here every token of the response needs it."""
    task = random.choice(("Repeat this.", "Say it again.", "Copy the lines."))
    said = random.choice(("\n", "\n", ", ", " ", '"')).join(words.options_named(random, 2, 8))
    if random.random() < 0.3:
        said = "".join(random.choices("".join(words.LETTERS), k=random.randint(5, 20)))
    return one_answer(chat(task, said), said)


def text_example(random: Random) -> BaseExample:
    """Plain English-like text, now and then with signs beyond ASCII so that no byte stays untrained."""
    text = " ".join(words.sentence(random) for _ in range(random.randint(2, 5)))
    if random.random() < 0.3:
        text += " " + "".join(random.choice(words.SIGNS) for _ in range(random.randint(1, 8)))
    return one_answer((), text)


def tokenizer_text(random: Random) -> str:
    """Text to learn the byte-pair merges from: an example as it is written, or words on their own."""
    if random.random() < 0.25:
        return " ".join(
            random.choice(random.choice((words.NOUNS, words.VERBS, words.ADJECTIVES, words.NAMES)))
            for _ in range(20)
        )
    kind = random.random()
    if kind < 0.08:
        return " ".join(random.choice(random.choice(words.FOREIGN)) for _ in range(20))
    if kind < 0.16:
        return " ".join(random.choice(words.LETTERS))
    if kind < 0.24:
        return " ".join(random.choice(words.PROMPT_WORDS) for _ in range(20))
    example = example_random(random)
    return "\n".join([*(message["content"] for message in example.messages), example.response])


MIXTURE: Mixture = (
    (0.04, widget_example),
    (0.03, fixture_example),
    (0.04, filer_example),
    (0.03, storer_example),
    (0.05, librarian_example),
    (0.07, prioritizer_example),
    (0.05, retriever_example),
    (0.05, tool_example),
    (0.03, assistant_example),
    (0.15, strangers.choice_stranger),
    (0.10, strangers.list_stranger),
    (0.08, strangers.order_stranger),
    (0.13, strangers.object_stranger),
    (0.01, strangers.lookup_stranger),
    (0.02, strangers.rule_stranger),
    (0.09, strangers.drill_stranger),
    (0.02, repeat_example),
    (0.01, text_example),
)
"""Shares of the examples."""

MIXTURE_OF_DRILLS: Mixture = ((0.85, strangers.drill_stranger), *MIXTURE)
"""Shares of the first steps: short names to copy, and to tell apart by what was written."""
