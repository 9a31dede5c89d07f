"""Made-up agents nobody built in: other keys, other options, other ways to say both. Pure.

Each prompt says under which keys to answer and lists what may be answered, in one of many layouts, with fields and
sentences around it that matter to nobody. Answers are drawn evenly, but for prompts that ask for a field's value or
state a rule, where one answer is right: they teach to read the fields a taste may depend on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from tools.bundled_model import words
from tools.bundled_model.examples import (
    BaseExample,
    TargetAnswer,
    call_of,
    chat,
    choice,
    names_picked,
    object_of,
    one_answer,
)
from tools.bundled_model.layouts import (
    FIELDS,
    context_lines,
    field_value,
    fields_random,
    key_of,
    options_text,
    persona,
    prompt,
    schema_text,
    task_of,
)

FOREIGN_TASKS = (
    (
        "Wähle ein {key}.",
        "Welches {key} passt?",
        "Wähle ein {key} für {task}.",
        "Antworte in JSON.",
        "Nur JSON.",
    ),
    (
        "Elige un {key}.",
        "¿Qué {key} corresponde?",
        "Elige {key} para {task}.",
        "Responde en JSON.",
        "Solo JSON.",
    ),
    (
        "Choisis un {key}.",
        "Quel {key} convient ?",
        "Choisis {key} pour {task}.",
        "Réponds en JSON.",
        "JSON seulement.",
    ),
    ("Scegli un {key}.", "Quale {key}?", "Scegli {key} per {task}.", "Rispondi in JSON.", "Solo JSON."),
    ("Escolha um {key}.", "Qual {key}?", "Escolha {key} para {task}.", "Responda em JSON.", "Apenas JSON."),
    ("Kies een {key}.", "Welke {key}?", "Kies een {key} voor {task}.", "Antwoord in JSON.", "Alleen JSON."),
    ("Wybierz {key}.", "Który {key}?", "Wybierz {key} dla {task}.", "Odpowiedz w JSON.", "Tylko JSON."),
    ("Välj en {key}.", "Vilken {key}?", "Välj en {key} för {task}.", "Svara i JSON.", "Bara JSON."),
    ("Bir {key} seç.", "Hangi {key}?", "{task} için {key} seç.", "JSON ile yanıtla.", "Sadece JSON."),
    ("Выбери {key}.", "Какой {key}?", "Выбери {key} для {task}.", "Ответь в JSON.", "Только JSON."),
    ("{key}を一つ選ぶ。", "どの{key}？", "{task}の{key}を選ぶ。", "JSONで答える。", "JSONのみ。"),
    ("请选择一个{key}。", "哪个{key}？", "为{task}选择{key}。", "用JSON回答。", "只要JSON。"),
)
"""Three ways to ask for one of the options under a key, and two to ask for JSON, in a language each."""
FORMS = (
    "Answer in JSON.",
    "Answer in JSON.",
    "Reply with JSON.",
    "JSON only.",
    "Answer with a JSON object.",
    "Return JSON.",
    "Respond only with JSON.",
    "Output JSON only.",
    "",
)


def choice_stranger(random: Random) -> BaseExample:
    """One of the listed options, as JSON under some key, or on its own."""
    few = random.random() < 0.8
    options = words.options_named(random, 2 if few else 7, 6 if few else 14)
    key, task = key_of(random), task_of(random)
    if random.random() < 0.2:
        system = random.choice(
            (
                f"Answer with one of the listed {key}s, nothing else.",
                "Reply with one of these words only.",
                f"Choose one {key} for the {task}. Answer with its name.",
                f"Which {key}? Answer with exactly one of the options.",
                "Pick one of the options below.",
            )
        )
        return choice(random, prompt(random, system, key, task, options), options)
    ask = random.choice(ASKS)
    system = ask(random, key, task, options)
    return choice(
        random,
        prompt(
            random,
            system,
            key,
            task,
            options,
            listed=ask in (_one_schema, _one_within),
            # of a sentence in no language only the word that heads the list can be the key
            head=random.choice((key, key, f"{key}s")) if ask is _one_invented else "",
        ),
        [json.dumps({key: option}, ensure_ascii=False) for option in options],
    )


def _one_sentence(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    verb = random.choice(("Pick", "Choose", "Select", "Name", "Give"))
    which = random.choice(("listed ", "listed ", "", "of the listed "))
    ask = random.choice(
        (
            f"{verb} one {which}{key} for the {task}.",
            f"{verb} one {which}{key} for the {task}.",
            f"{verb} the {key} of this {task}.",
            f"Decide which {key} this {task} gets.",
            f"You choose the {key} for each {task}.",
        )
    )
    return f"{persona(random)}{ask} {random.choice(FORMS[:-1])}"


def _one_foreign(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    *asks, form, short = random.choice(FOREIGN_TASKS)
    shown = key.capitalize() if random.random() < 0.3 else key
    about = random.choice((words.word, words.phrase))(random)
    return f"{random.choice(asks).format(key=shown, task=about)} {random.choice((form, form, short))}"


def _one_invented(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    """A sentence of words nobody knows, the key among them, and a request for JSON in some language."""
    spell = random.choice((words.pseudoword, words.spelling(random)))
    drawn = [spell(random) for _ in range(random.randint(2, 7))]
    drawn.insert(random.randint(0, len(drawn)), key.capitalize() if random.random() < 0.3 else key)
    *_, form, short = random.choice(FOREIGN_TASKS)
    text = " ".join(drawn)
    return (
        f"{text[0].upper()}{text[1:]}{random.choice('..?:')} {random.choice((form, form, short, *FORMS[:4]))}"
    )


def _one_key(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    return random.choice(
        (
            f'{persona(random)}Choose one of the options. Respond with JSON under the key "{key}".',
            f'Choose one of the options for the {task}. Answer in JSON with the key "{key}".',
            f'Answer in JSON under "{key}".',
            f'{words.sentence(random)} Answer with a JSON object that has one key, "{key}".',
            f"Which {key} suits the {task}? Answer in JSON.",
            f"Decide the {key} of the {task}. Answer in JSON.",
            f"What {key} is it? Reply with JSON.",
        )
    )


def _one_like(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    shown = random.choice(("...", "...", f"<{key}>", "one of the options", "", random.choice(options)))
    like = json.dumps({key: shown}, ensure_ascii=False)
    return persona(random) + random.choice(
        (
            f"Choose one of the options. Reply like {like}",
            f"Pick one for the {task}. Answer: {like}",
            f"Format: {like}",
            f"Decide about the {task}. Respond only with JSON, for example {like}",
            f"Return JSON: {like}",
        )
    )


def _one_within(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    """The options stand in the sentence that asks."""
    choices = options_text(random, options)
    return random.choice(
        (
            f'Set "{key}" to {choices}. JSON only.',
            f'Is the {task} {choices}? Answer in JSON under "{key}".',
            f'{words.sentence(random)} Reply with JSON, "{key}" being one of {choices}.',
            f'What {key} has the {task}? Answer in JSON, "{key}": {choices}.',
            f'Judge the {task}: {choices}. Answer like {{"{key}": "..."}}',
            f'Answer with JSON. The key is "{key}", allowed are {choices}.',
            f'{persona(random)}Return JSON: {{"{key}": {choices}}}',
            f'Classify the {task}. Format: {{"{key}": {choices}}}',
            f"Answer in JSON.\n{key}: {choices}",
        )
    )


def _one_schema(random: Random, key: str, task: str, options: Sequence[str]) -> str:
    inner: dict[str, Any] = {"enum": list(options)}
    if random.random() < 0.5:
        inner = {"type": "string", **inner}
    return random.choice(("Answer in JSON: ", "Schema: ", "Reply with JSON that fits ")) + schema_text(
        random, {key: inner}
    )


ASKS = (
    _one_sentence,
    _one_sentence,
    _one_key,
    _one_like,
    _one_schema,
    _one_foreign,
    _one_invented,
    _one_within,
)
"""Ways to ask for one option under a key."""


def list_stranger(random: Random, *, ordered: bool = False) -> BaseExample:
    """Some of the listed names, or all of them in an order."""
    options = words.options_named(random, 2 if ordered else 3, 5 if ordered else 7)
    if random.random() < 0.3:
        start, sign = random.randint(1, 4), random.choice("abcdefgkmnpqrstwxyzABCDKPQRST")
        numbers = random.sample(range(start, start + 12), len(options))
        options = [f"{sign}{number}" for number in numbers]
    key, task = key_of(random), task_of(random)
    # under "tags" several are asked for as often as under "tag"
    key, several = (f"{key}s", f"{key}s") if random.random() < 0.5 else (key, f"{key}s")
    if ordered:
        sizes: Sequence[int] = [len(options)]
        opening = random.choice(
            (
                f"Put all listed {several} in order",
                "Put the options in order",
                "Order them all",
                f"Sort the {several}, best first",
                f"Rank every option for the {task}",
                "Rank the listed names, most pressing first",
                f"Return the {several} of this {task} in the right order",
                f"List every {key} once, in order",
                f"Sort these {several} for the {task}",
            )
        )
    else:
        sizes = range(1, min(len(options), 4) + 1)
        opening = random.choice(
            (
                f"Pick the listed {several} that fit the {task}",
                f"Pick the {several} of the {task}",
                "Choose one or more of the options",
                f"Which of the {several} belong to the {task}?",
                "Select all that apply",
                f"Tag the {task}",
                f"Return the {several} of the {task} as JSON",
                f"Give every {key} that applies",
                f"List the {several} this {task} needs",
                f"Which {several} are right here?",
            )
        )
    like = json.dumps({key: random.choice((["..."], ["...", "..."], options[:1]))}, ensure_ascii=False)
    if random.random() < 0.4:
        like = f'{{"{key}": {random.choice(("[...]", "[]", "[…]", f"[<{several}>]", f"list of {several}"))}}}'
    schema = schema_text(random, {key: {"type": "array", "items": {"enum": options}}})
    ask = random.choice(
        (
            f'. Answer in JSON with a list under "{key}".',
            f". Answer in JSON like {like}",
            f": {like}",
            f". Return {like}",
            f". Format: {like}",
            f'. Reply with JSON, key "{key}".',
            f'. Respond with a JSON object with one key, "{key}", an array.',
            ". " + schema,
        )
    )
    asked = opening + (ask.lstrip(".:") if opening.endswith("?") else ask)
    system = persona(random) + asked
    answers = [names_picked(random, key, options, sizes) for _ in range(4)]
    messages = prompt(random, system, key, task, options, listed=ask.endswith(schema), several=several)
    return BaseExample(messages, tuple(answers))


def drill_stranger(random: Random) -> BaseExample:
    """Many short names, few other words, and several answers: most of its tokens are learnt from.

    To copy a name, and to leave out what was written already, are learnt several times as fast as from whole prompts.
    """
    names = _short_names(random)
    key, kind = key_of(random), random.random()
    joint = random.choice((", ", ", ", "\n", "\n", " | ", "\n- "))
    head = random.choice((f"{key}s", key))
    user = f"{head}:{joint if joint.startswith(chr(10)) else ' '}{joint.join(names)}"
    form = random.choice((" JSON.", " Answer in JSON."))
    if kind < 0.2:
        system = random.choice((f"Pick one {key}.", "Choose one.", f"Which {key}?"))
        responses = [json.dumps({key: name}, ensure_ascii=False) for name in names]
        return choice(random, chat(system + form, user), responses, most=8)
    if kind < 0.5:
        system = random.choice((f"Pick the {key}s.", "Choose one or more.", "Some of them."))
        sizes: Sequence[int] = range(1, min(len(names), 4) + 1)
    else:
        system = random.choice((f"Rank all {key}s.", "Order all.", f"Sort every {key}.", "Put all in order."))
        sizes = [len(names)]
    answers = [names_picked(random, key, names, sizes) for _ in range(5)]
    return BaseExample(chat(system + form, user), tuple(answers))


def _short_names(random: Random) -> list[str]:
    """Two to twelve different names of at most eleven letters, spelt in one manner."""
    spell = random.choice((words.pseudoword, words.syllables, words.word, words.spelling(random)))
    count = random.choice((2, 3, 4, 5, 6, 8, 12))
    drawn = (spell(random) for _ in range(5 * count))
    names = list(dict.fromkeys(name for name in drawn if len(name) < 12))[:count]
    return names if len(names) > 1 else _short_names(random)


def order_stranger(random: Random) -> BaseExample:
    """All listed names in an order."""
    return list_stranger(random, ordered=True)


def object_stranger(random: Random) -> BaseExample:
    """An object of several keys, each with options, numbers of a range, or true and false."""
    fields: dict[str, tuple[list[Any], str, dict[str, Any]]] = {}
    for _ in range(random.choice((1, 2, 2, 3, 3, 4))):
        fields[key_of(random, FIELDS)] = _values(random)
    kind = random.random()
    if kind < 0.35:
        field_list = "\n".join(f"{key}: {said}" for key, (_, said, _) in fields.items())
    elif kind < 0.55:
        field_list = schema_text(random, {key: schema for key, (_, _, schema) in fields.items()})
    elif kind < 0.75:
        field_list = "{" + ", ".join(f'"{key}": {said}' for key, (_, said, _) in fields.items()) + "}"
    elif kind < 0.9:
        field_list = "\n".join(f"- {key} ({said})" for key, (_, said, _) in fields.items())
    else:
        field_list = ", ".join(f'"{key}" ({said})' for key, (_, said, _) in fields.items())
    task = task_of(random)
    opening = random.choice(
        (
            f"Describe the {task} in JSON",
            "Answer in JSON with these keys",
            f"Rate the {task}. JSON",
            "Fill in",
            "Answer in JSON",
            f"Extract the {task} as JSON",
            "Answer in this form",
            f"{persona(random)}Return JSON",
            f"Respond with JSON about the {task}",
            "Format",
            f"Judge the {task} and answer with",
        )
    )
    answers = [object_of(random, [(key, values) for key, (values, _, _) in fields.items()]) for _ in range(3)]
    asked = f"{opening}:{random.choice((' ', chr(10)))}{field_list}"
    about = "\n".join(context_lines(random, task, most=4))
    if random.random() < 0.6:
        return BaseExample(chat(asked, about), tuple(answers))
    system = random.choice(FORMS)
    return BaseExample(
        chat(system, random.choice((f"{about}\n{asked}", f"{asked}\n{about}"))), tuple(answers)
    )


def _values(random: Random) -> tuple[list[Any], str, dict[str, Any]]:
    """Values of a field, how a prompt says them, and their JSON schema."""
    kind = random.random()
    if kind < 0.5:
        options = words.options_named(random, 2, 5)
        return options, options_text(random, options), {"enum": options}
    if kind < 0.65:
        return [True, False], random.choice(("true or false", "true/false", "boolean")), {"type": "boolean"}
    low = random.choice((0, 0, 1, 1, 1, random.randint(-5, 20)))
    high = low + random.choice((1, 2, 4, 5, 9, 10, 100, random.randint(3, 50)))
    if kind < 0.9:
        said = random.choice(
            (f"{low} to {high}", f"{low}-{high}", f"integer from {low} to {high}", f"a number {low}..{high}")
        )
        every = list(range(low, high + 1))
        return (
            every if len(every) <= 16 else sorted(random.sample(every, 16)),
            said,
            {"type": "integer", "minimum": low, "maximum": high},
        )
    tenths = [number / 10 for number in range(11)]
    return (
        tenths,
        random.choice(("0 to 1", "0.0-1.0", "number from 0 to 1")),
        {"type": "number", "minimum": 0, "maximum": 1},
    )


def lookup_stranger(random: Random) -> BaseExample:
    """The value of a field that the prompt asks for: one answer is right."""
    fields = fields_random(random, random.randint(2, 6))
    key = random.choice(list(fields))
    system = random.choice(
        (
            f"What is the {key}? Answer in JSON.",
            f"Give the {key}. Answer in JSON.",
            f'Read "{key}". JSON only.',
        )
    )
    said = (
        json.dumps(fields, ensure_ascii=False)
        if random.random() < 0.3
        else "\n".join(f"{name}: {value}" for name, value in fields.items())
    )
    return one_answer(chat(system, said), json.dumps({key: fields[key]}, ensure_ascii=False))


def rule_stranger(random: Random) -> BaseExample:
    """A rule that says which option a field's value takes, and a case: one answer is right."""
    values, options = words.options_named(random, 2, 4), words.options_named(random, 2, 4)
    key, field = key_of(random), key_of(random, FIELDS)
    rule = {value: random.choice(options) for value in values}
    sign = random.choice((" -> ", ": ", " means ", " = "))
    others = [f"{key_of(random, FIELDS)}: {field_value(random)}" for _ in range(random.randint(0, 3))]
    value = random.choice(values)
    case = [f"{field}: {value}", *others]
    random.shuffle(case)
    system = random.choice(
        (
            f'Go by the {field}. Answer in JSON with the key "{key}".',
            f"Pick one listed {key}. Answer in JSON.",
        )
    )
    lines = [*(f"{name}{sign}{option}" for name, option in rule.items()), *case]
    return one_answer(chat(system, "\n".join(lines)), json.dumps({key: rule[value]}, ensure_ascii=False))


def tool_stranger(random: Random) -> tuple[list[dict[str, Any]], str, list[TargetAnswer]]:
    """Tools nobody built in, a goal that names values, and calls that can be made of it."""
    tools, calls = [], []
    values = [
        random.randint(1, 2000) if random.random() < 0.4 else words.word(random)
        for _ in range(random.randint(1, 3))
    ]
    for name in words.options_named(random, 2, 4):
        keys = list(dict.fromkeys(key_of(random, FIELDS) for _ in range(random.choice((0, 1, 1, 2, 2)))))
        schema = {"type": "object", "properties": {key: {} for key in keys}, "required": keys}
        tools.append({"name": name, "description": words.phrase(random, 4), "parameters": schema})
        calls.append((name, [(key, values) for key in keys]))
    goal = f"{random.choice(words.VERBS)} " + " ".join(
        f"{random.choice(words.NOUNS)} {value}" for value in values
    )
    return tools, goal, [call_of(random, calls) for _ in range(3)]
