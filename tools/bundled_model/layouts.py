"""Layouts of made-up prompts: a case with its fields, the options and where they stand. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from tools.bundled_model import words
from tools.bundled_model.examples import chat

TASKS = (
    "request ticket question note case task message situation event step order guest reading call visit "
    "item job customer document patient"
).split()

KEYS = (
    "choice option action tool route label category answer item pick plan queue priority model template "
    "next team urgency status kind colour level result"
).split()

FIELDS = (
    "status since on from size kind hour mood place weather language amount id channel season tier age "
    "topic text subject reader load"
).split()


def task_of(random: Random) -> str:
    """Word for what is to be decided about: one of the usual, or any."""
    return random.choice(TASKS) if random.random() < 0.5 else words.word(random)


def key_of(random: Random, known: Sequence[str] = KEYS) -> str:
    """A key to answer under: one of the usual, or any."""
    return random.choice(known) if random.random() < 0.3 else words.key_name(random)


def persona(random: Random) -> str:
    """Now and then a sentence before what is asked."""
    kind = random.random()
    if kind < 0.7:
        return ""
    if kind < 0.85:
        role = random.choice(("a bot", "an assistant", "an agent", "a classifier", "a clerk", "the router"))
        return f"You are {role} for {words.phrase(random, 3)}. "
    return f"{words.sentence(random)} "


def schema_text(random: Random, properties: dict[str, Any]) -> str:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if random.random() < 0.7:
        schema["required"] = list(properties)
    if random.random() < 0.3:
        schema["additionalProperties"] = False
    return json.dumps(schema if random.random() < 0.7 else properties, ensure_ascii=False)


def options_text(random: Random, options: Sequence[str]) -> str:
    """Options in one line."""
    kind = random.random()
    if kind < 0.35:
        return ", ".join(options)
    if kind < 0.5:
        return ", ".join(options[:-1]) + random.choice((" or ", " and ", ", or ")) + options[-1]
    if kind < 0.65:
        return json.dumps(list(options), ensure_ascii=False)
    if kind < 0.75:
        return random.choice((", ", " | ", " or ", "/", "|")).join(f'"{option}"' for option in options)
    return random.choice((" | ", "|", "/", "; ", " / ")).join(options)


def prompt(
    random: Random,
    system: str,
    key: str,
    task: str,
    options: Sequence[str],
    *,
    listed: bool = False,
    head: str = "",
    several: str = "",
) -> tuple[Any, ...]:
    """A system prompt and a user's message that tells of a case and lists the options.

    listed: they stand in the system prompt already. head: the word above them; empty for any. several: the key's
    plural, where it is not the key with an s.
    """
    about = context_lines(random, task)
    if listed:
        return chat(system, "\n".join(about))
    several = several or f"{key}s"
    first = random.choice(("Available", "Known", "Allowed", "Possible", "All", "The"))
    head = head or random.choice(
        (
            several,
            several,
            several,
            key,
            key,
            "options",
            "options",
            "choices",
            "one of",
            "allowed",
            "listed",
            f"{first} {several}",
            several.capitalize(),
            f"{first.lower()} {several}",
            "Options",
        )
    )
    if random.random() < 0.06:
        state: dict[str, Any] = {
            line.partition(": ")[0]: line.partition(": ")[2] for line in about if ": " in line
        }
        return chat(system, json.dumps({**state, head: list(options)}, ensure_ascii=False))
    lines = _layout(random, head, options)
    where = random.random()
    if where < 0.12:
        return chat(f"{system}\n{lines}" if system else lines, "\n".join(about))
    if where < 0.2:
        return chat(system, "\n".join([lines, *about]))
    if where < 0.27:
        return chat("", "\n".join([system, *about, lines]))
    return chat(system, "\n".join([*about, lines]))


def _layout(random: Random, head: str, options: Sequence[str]) -> str:
    kind = random.random()
    title = head + ":"
    if kind < 0.40:
        return "\n".join([title, *options])
    if kind < 0.50:
        sign = random.choice(("- ", "- ", "* ", "• "))
        return "\n".join([title, *(sign + option for option in options)])
    if kind < 0.55:
        return "\n".join([title, *(f"{number}. {option}" for number, option in enumerate(options, 1))])
    if kind < 0.70 and not any(":" in option for option in options):
        if random.random() < 0.6:
            return "\n".join([title, *(f"{option}: {_about(random)}" for option in options)])
        return "\n".join([title, *(f"- {option}: {_about(random)}" for option in options)])
    return f"{title} {options_text(random, options)}"


def _about(random: Random) -> str:
    """Description of an option."""
    return words.sentence(random) if random.random() < 0.3 else words.phrase(random, 4)


def context_lines(random: Random, task: str, most: int = 4) -> list[str]:
    """Lines that tell of a case: fields, sentences, an object."""
    fields = fields_random(random, random.randint(0, most))
    kind = random.random()
    first = words.sentence(random) if random.random() < 0.6 else words.phrase(random)
    if kind < 0.45:
        return [f"{task}: {first}", *(f"{key}: {value}" for key, value in fields.items())]
    if kind < 0.6:
        return [
            f"{task.capitalize()} #{random.randint(1, 9999)}",
            *(f"{key}: {value}" for key, value in fields.items()),
        ]
    if kind < 0.8 and fields:
        return [json.dumps({**fields, "id": random.randint(1, 9999)}, ensure_ascii=False)]
    return [" ".join([first, *(words.sentence(random) for _ in range(random.randint(0, 1)))])]


def fields_random(random: Random, count: int) -> dict[str, str]:
    """At most `count` fields of a case with their values."""
    return {key_of(random, FIELDS): field_value(random) for _ in range(count)}


def field_value(random: Random) -> str:
    kind = random.random()
    return (
        str(random.randint(0, 999))
        if kind < 0.25
        else words.word(random)
        if kind < 0.85
        else words.phrase(random, 3)
    )
