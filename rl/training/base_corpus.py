"""What the bundled base model is taught: made-up prompts with uniformly drawn answers, and plain English. Pure.

Among the options of a prompt the answer is drawn uniformly, so the model learns to name one of them and prefers
none. Some prompts also list options that make no sense for the question; the answer is then drawn among the
sensible ones, so that the model has to understand what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents import AGENTS, assistant, filer, fixtures, widgets
from rl.agents.base import ChoiceAgent, Message

LEARNT = ("assistant", "filer", "fixtures", "widgets")
"""Agents whose way of asking the bundled model is taught."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music table river garden road "
    "letter machine bird tree window street market paper picture song letter engine bridge field price plan report "
    "message computer phone screen model data network file error test code language answer example value customer "
    "product project user account order page list figure season summer winter rain wind light sound colour"
)
VERBS = _words(
    "find give tell ask use feel try leave call keep hold write bring show lead carry start build learn change "
    "follow create read spend open remember love buy send make see know take want need help move play run believe "
    "offer consider expect serve watch choose share explain check improve repair measure compare describe finish"
)
ADJECTIVES = _words(
    "good new first last long great little own other old right big high different small large next early young "
    "important few public bad same able free clear simple quick strong real whole sure cold warm quiet bright dark "
    "heavy easy hard happy careful friendly useful possible common modern local full empty open recent short deep"
)
NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida James Kate Leo Maria Noah Olivia Paul Rosa Sam Tom Vera"
)
PLACES = _words(
    "France Germany Italy Spain Japan Norway Egypt Kenya Brazil Canada India Greece Poland Portugal"
)
CAPITALS = _words(
    "Paris Berlin Rome Madrid Tokyo Oslo Cairo Nairobi Brasilia Ottawa Delhi Athens Warsaw Lisbon"
)
ADVERBS = _words(
    "often never always usually already slowly quickly carefully again together later soon today"
)
LINKS = ("because", "although", "while", "before", "after", "so that", "when", "if", "until")
SYLLABLES = _words(
    "an ar be ca co da de di do el en er fa fi go ha in is ka ko la le li lo ma me mi mo na ne no on or pa pe ra re "
    "ri ro sa se si so sta ta te ti to tra un va ve vi za bri clo dra flo gra pla sto tri"
)
ANSWER_KEYS = _words(
    "choice option action tool route label category answer item pick plan queue priority model template next team"
)
TASKS = ("request", "ticket", "question", "note", "case", "task", "message", "situation", "event", "step")
SIGNS = _words("é ü ñ ö å ç ß è – — … € £ ✓ → “ ” ’ 日 本 語 中 文 д а н е т م ر ح ب ا 한 글 😀 👍")

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


@dataclass(frozen=True)
class Example:
    """One chat to learn from: the prompt's messages and the response; plain text has no messages."""

    messages: tuple[Message, ...]
    response: str


def example_random(random: Random) -> Example:
    """One made-up example; the shares below are the mixture the shipped model was trained on."""
    makers: tuple[tuple[float, Callable[[Random], Example]], ...] = (
        (0.26, widget_example),
        (0.12, fixture_example),
        (0.12, filer_example),
        (0.16, synthetic_example),
        (0.16, repeat_example),
        (0.10, assistant_example),
        (0.08, text_example),
    )
    return random.choices([make for _, make in makers], [share for share, _ in makers])[0](random)


def widget_example(random: Random) -> Example:
    intent = random.choice(tuple(widgets.WIDGETS))
    state = widgets.state_random(random, intent)
    sensible = list(state["widgets"])
    fitting = {name for group in widgets.WIDGETS[intent] for name in group}
    others = [n for groups in widgets.WIDGETS.values() for g in groups for n in g if n not in fitting]
    return _choice_example(random, AGENTS["widgets"], state, sensible, others)


def fixture_example(random: Random) -> Example:
    situation = random.choice(tuple(fixtures.SITUATIONS))
    state = fixtures.state_random(random, situation)
    every = {n: d for _, brief, guided in fixtures.SITUATIONS.values() for n, d in (brief | guided).items()}
    _, brief, guided = fixtures.SITUATIONS[situation]
    others = [name for name in every if name not in brief and name not in guided]
    return _choice_example(
        random, AGENTS["fixtures"], {**state, "descriptions": every}, list(state["fixtures"]), others
    )


def filer_example(random: Random) -> Example:
    state = filer.state_random(random, random.choice(tuple(filer.TASTE)))
    # names of its own as well, so that the model copies a folder instead of knowing the ten partners by heart
    partner = state["partner"] if random.random() < 0.5 else _word(random).capitalize()
    renamed = {
        key: value.replace(state["partner"], partner)
        for key, value in state.items()
        if isinstance(value, str)
    }
    folders = [folder.replace(state["partner"], partner) for folder in state["folders"]]
    other = filer.state_random(random, random.choice(tuple(filer.TASTE)))
    others = (
        [folder for folder in other["folders"] if folder not in folders]
        if other["kind"] != state["kind"]
        else []
    )
    return _choice_example(random, AGENTS["filer"], {**state, **renamed, "folders": folders}, folders, others)


def _choice_example(
    random: Random, agent: Any, state: dict[str, Any], sensible: list[str], others: list[str]
) -> Example:
    """Three times in five all listed options are sensible; else some are replaced by ones that are not."""
    listed = list(sensible)
    if others and random.random() < 0.4:
        kept = random.randint(1, 2)
        listed = random.sample(sensible, kept) + random.sample(others, min(len(others), random.randint(1, 3)))
        sensible = listed[:kept]
        random.shuffle(listed)
    assert isinstance(agent, ChoiceAgent)
    messages = agent.render({**state, agent.options_key: listed})
    return Example(tuple(messages), agent.respond(random.choice(sensible)))


def synthetic_example(random: Random) -> Example:
    """A choice nobody built in: other key, other names, other number of options."""
    key = random.choice(ANSWER_KEYS)
    options = sorted({_option(random) for _ in range(random.randint(2, 6))})
    random.shuffle(options)
    task = random.choice(TASKS)
    answer = json.dumps({key: random.choice(options)}, ensure_ascii=False)
    system = random.choice(
        (
            f"Pick one listed {key} for the {task}. Answer in JSON.",
            f'Answer in JSON with the key "{key}".',
            f'Choose one of the options. Reply like {{"{key}": "..."}}.',
        )
    )
    lines = [f"{task}: {_sentence(random)}", f"{key}s:", *options]
    return Example(_chat(system, "\n".join(lines)), answer)


def repeat_example(random: Random) -> Example:
    """Words to say again: the one skill all choices rest on, and here every token of the response needs it."""
    task = random.choice(("Repeat this.", "Say it again.", "Copy the lines."))
    said = "\n".join(_option(random) for _ in range(random.randint(2, 8)))
    return Example(_chat(task, said), said)


def assistant_example(random: Random) -> Example:
    system = AGENTS["assistant"].system_prompt
    kind = random.random()
    if kind < 0.6:
        state = assistant.state_random(random, random.choice(tuple(assistant.TOPICS)))
        return Example(_chat(system, state["question"]), random.choice(state["drafts"]))
    if kind < 0.7:
        said, answer = random.choice(GREETINGS)
        return Example(_chat(system, random.choice(said)), answer)
    if kind < 0.8:
        n = random.randrange(len(PLACES))
        return Example(
            _chat(system, f"What is the capital of {PLACES[n]}?"),
            f"The capital of {PLACES[n]} is {CAPITALS[n]}.",
        )
    noun, adjective, verb = random.choice(NOUNS), random.choice(ADJECTIVES), random.choice(VERBS)
    return random.choice(
        (
            Example(_chat(system, f"Tell me something about the {noun}."), _sentence(random, noun)),
            Example(
                _chat(system, f"How do I {verb} a {adjective} {noun}?"),
                f"To {verb} a {adjective} {noun}, {random.choice(VERBS)} the {noun} first. "
                f"Then {random.choice(VERBS)} it {random.choice(ADVERBS)}.",
            ),
            Example(
                _chat(system, f"Why is the {noun} so {adjective}?"),
                f"The {noun} is {adjective} {random.choice(LINKS)} {_clause(random)}.",
            ),
            Example(_chat(system, f"Write a sentence with the word {noun}."), _sentence(random, noun)),
        )
    )


def text_example(random: Random) -> Example:
    """Plain English-like text, now and then with signs beyond ASCII so that no byte stays untrained."""
    text = " ".join(_sentence(random) for _ in range(random.randint(2, 5)))
    if random.random() < 0.3:
        text += " " + "".join(random.choice(SIGNS) for _ in range(random.randint(1, 8)))
    return Example((), text)


def tokenizer_text(random: Random) -> str:
    """Text to learn the byte-pair merges from: an example as it is written, or common words on their own."""
    if random.random() < 0.25:
        return " ".join(
            random.choice(random.choice((NOUNS, VERBS, ADJECTIVES, ADVERBS, NAMES))) for _ in range(20)
        )
    example = example_random(random)
    return "\n".join([*(message["content"] for message in example.messages), example.response])


def _chat(system: str, user: str) -> tuple[Message, ...]:
    return {"role": "system", "content": system}, {"role": "user", "content": user}


def _word(random: Random) -> str:
    return "".join(random.choice(SYLLABLES) for _ in range(random.randint(2, 3)))


def _option(random: Random) -> str:
    """A name to choose: words, made-up words, paths, codes; with any byte in it now and then."""
    parts = [
        random.choice(NOUNS) if random.random() < 0.6 else _word(random)
        for _ in range(random.choice((1, 1, 2, 2, 3)))
    ]
    name = random.choice(("_", "-", " ", "/", "")).join(parts)
    kind = random.random()
    if kind < 0.15:
        return name.upper() if kind < 0.05 else name.title()
    if kind < 0.25:
        return f"{name}{random.choice(('', '-', ' ', '/'))}{random.randint(1, 2030)}"
    if kind < 0.30:
        return name + random.choice(SIGNS)
    return name


def _clause(random: Random) -> str:
    who = random.choice((random.choice(NAMES), f"the {random.choice(NOUNS)}", "we", "they", "people", "you"))
    modal = random.choice(("can", "will", "should", "must", "may", "did", "could", "would"))
    what = random.choice(
        (
            f"the {random.choice(NOUNS)}",
            f"a {random.choice(ADJECTIVES)} {random.choice(NOUNS)}",
            f"the {random.choice(NOUNS)} of the {random.choice(NOUNS)}",
            f"{random.randint(2, 99)} {random.choice(ADJECTIVES)} {random.choice(NOUNS)}s",
        )
    )
    return f"{who} {modal} {random.choice(('', '', 'not '))}{random.choice(VERBS)} {what}"


def _sentence(random: Random, noun: str | None = None) -> str:
    noun = noun or random.choice(NOUNS)
    text = random.choice(
        (
            f"the {noun} is {random.choice(ADJECTIVES)} and {random.choice(ADJECTIVES)}",
            f"{_clause(random)} {random.choice(LINKS)} the {noun} is {random.choice(ADJECTIVES)}",
            f"there is a {random.choice(ADJECTIVES)} {noun} in the {random.choice(NOUNS)}",
            f"the {noun} did {random.choice(ADVERBS)} {random.choice(VERBS)} {random.choice(NAMES)}",
            f"this {noun} was {random.choice(ADVERBS)} {random.choice(ADJECTIVES)}",
            f"it is {random.choice(ADJECTIVES)} to {random.choice(VERBS)} a {noun} with a {random.choice(NOUNS)}",
        )
    )
    return text[0].upper() + text[1:] + "."
