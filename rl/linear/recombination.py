"""Prompts made of recorded ones by exchanging their fields, or their sentences where they have none. Pure."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rl.linear.features import field_spans, message_text

Messages = Sequence[Mapping[str, Any]]

MOST_SENTENCES = 24
"""Sentences of a text that are compared with each other; their pairs grow with the square."""

_SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]*\s*")


def recombined_prompts(prompts: Sequence[Messages], count: int, *, seed: int) -> list[list[dict[str, Any]]]:
    """New prompts, at most `count`, none of them a given one; fewer where the given ones allow fewer.

    Each is a given prompt whose last message has other values in its fields (JSON members or lines `name: value`),
    drawn from those that field has anywhere; a text without fields has other sentences, drawn from those that have
    stood beside each of the text's others: two that say the same thing of a prompt never stand together.
    """
    random = Random(f"recombined/{seed}")
    texts = [message_text(prompt[-1]) for prompt in prompts if prompt]
    spans = {text: field_spans(text) for text in texts}
    fields: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        for name, start, end in spans[text]:
            fields[name].append(text[start:end])
    sentences = _Sentences(texts if not fields else ())
    seen, made = set(texts), []
    for _ in range(4 * count if texts else 0):
        prompt = random.choice(prompts)
        text = message_text(prompt[-1])
        mixed = _exchange(text, spans[text], fields, random) if fields else sentences.exchange(text, random)
        if mixed not in seen:
            seen.add(mixed)
            made.append([*map(dict, prompt[:-1]), {**prompt[-1], "content": mixed}])
        if len(made) == count:
            break
    return made


def _exchange(
    text: str, spans: Sequence[tuple[str, int, int]], fields: Mapping[str, Sequence[str]], random: Random
) -> str:
    """The text with each field's value drawn from those seen of that field."""
    parts, end = [], 0
    for name, start, stop in spans:
        parts += [text[end:start], random.choice(fields[name])]
        end = stop
    return "".join([*parts, text[end:]])


class _Sentences:
    """Sentences of some texts, and which of them have stood in one text; two that differ in digits alone are one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.wordings: dict[str, list[str]] = defaultdict(list)
        self.partners: dict[str, set[str]] = defaultdict(set)
        for text in texts:
            parts = _split(text)[:MOST_SENTENCES]
            for part in parts:
                self.wordings[_key(part)].append(part)
            for one, other in itertools.permutations(set(map(_key, parts)), 2):
                self.partners[one].add(other)

    def exchange(self, text: str, random: Random) -> str:
        """The text with each sentence, one after the other, drawn anew given the others (Gibbs sampling). A text with a
        sentence that no other has stays as it is: nothing tells what may stand beside that one."""
        parts = _split(text)
        keys = list(map(_key, parts))
        if len(parts) > MOST_SENTENCES or any(len(self.wordings[key]) < 2 for key in keys):
            return text
        for place in random.sample(range(len(parts)), len(parts)):
            others = [self.partners[key] for at, key in enumerate(keys) if at != place]
            candidates = sorted(set.intersection(*others) | {keys[place]}) if others else [keys[place]]
            keys[place] = random.choices(candidates, [len(self.wordings[key]) for key in candidates])[0]
            parts[place] = random.choice(self.wordings[keys[place]])
        return " ".join(parts)


def _split(text: str) -> list[str]:
    return [part.strip() for part in _SENTENCE.findall(text) if part.strip()]


def _key(sentence: str) -> str:
    return re.sub(r"\d+", "0", sentence)
