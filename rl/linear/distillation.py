"""Demonstrations by a linear classifier, for base models that learn little from the feedback itself. Pure.

A small base model learns little from a preference or a thumb, and much from an answer to each prompt. A linear
classifier learns from the feedback and answers the recorded prompts (distillation with hard labels, after Hinton,
Vinyals and Dean 2015). If these are few, it also answers prompts recombined from their parts.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import Agent
from rl.linear.features import Message, Row, field_spans, message_text
from rl.linear.fit import fit
from rl.linear.model import CLOSED, FIELDS, LinearPolicy, LinearPolicyError
from rl.linear.rows import choices_of

SHOWN_PROMPTS = 1_000
"""Prompts after recombination. With 190 recorded prompts alone the base model was up to 8 points below its classifier,
with these it was not (docs/decisions/29)."""


@dataclass(frozen=True)
class DistilledDemonstrations:
    """Demonstrations for training and for the eval split, and a note on how they were made."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    note: str


def rows_taught(
    train: Sequence[Row], held_out: Sequence[Row], agent: Agent, *, seed: int = 42
) -> DistilledDemonstrations:
    """A classifier's answer to each prompt of some pairs or scored answers.

    train: rows whose prompts the language model is taught; held_out: rows of the eval split. The classifier learns from
    both, because the eval loss measures how well its answers are learnt. Raises LinearRefused for answers that are no
    choice.
    """
    classifier = fit([*train, *held_out], agent, seed=seed)
    demonstrations = list(_classifier_demonstrations(train, classifier.policy, agent))
    recorded = len(demonstrations)
    demonstrations += _recombined_demonstrations(demonstrations, classifier.policy, agent, seed)
    right = classifier.metrics.get("cv_accuracy")
    sure = "" if right is None else f", right about {right:.0%} of those it was not shown"
    learnt = f"{classifier.policy.facts['rows']:,} {classifier.policy.facts['feedback']}"
    made = (
        f" ({len(demonstrations) - recorded:,} of them recombined)" if len(demonstrations) > recorded else ""
    )
    return DistilledDemonstrations(
        demonstrations,
        list(_classifier_demonstrations(held_out, classifier.policy, agent)),
        f"taught by a linear classifier that learnt from {learnt}{sure}: its answer to each of "
        f"{len(demonstrations):,} prompts{made} is the demonstration",
    )


def rows_recombined(
    train: Sequence[Row], held_out: Sequence[Row], agent: Agent, *, seed: int = 42
) -> DistilledDemonstrations:
    """People's demonstrations, plus answers to recombined prompts by a classifier that learnt from them.

    The eval split (held_out) keeps only people's answers. Raises LinearRefused for answers that are no choice.
    """
    classifier = fit([*train, *held_out], agent, seed=seed)
    made = _recombined_demonstrations(train, classifier.policy, agent, seed)
    note = f"beside {len(train):,} responses that people wrote, a linear classifier that learnt from them answered "
    return DistilledDemonstrations(
        [*map(dict, train), *made], [*map(dict, held_out)], f"{note}{len(made):,} recombined prompts"
    )


def _recombined_demonstrations(
    recorded: Sequence[Row], policy: LinearPolicy, agent: Agent, seed: int
) -> list[dict[str, Any]]:
    """Its answers to recombined prompts, up to SHOWN_PROMPTS in all; none if the state lists the answers."""
    if policy.mode not in (CLOSED, FIELDS) or (
        not agent.answers and any(row.get("state") for row in recorded)
    ):
        return []
    count = max(0, SHOWN_PROMPTS - len(recorded))
    prompts = recombined_prompts([row["prompt"] for row in recorded], count, seed=seed)
    return [
        {"prompt": prompt, "prompt_hash": f"recombined-{number}", "completion": answer}
        for number, prompt in enumerate(prompts)
        if (answer := _likeliest(policy, prompt, ())) is not None
    ]


def _classifier_demonstrations(
    rows: Iterable[Row], policy: LinearPolicy, agent: Agent
) -> Iterable[dict[str, Any]]:
    """One demonstration per prompt, unless the classifier knows no answer the prompt allows."""
    seen: set[str] = set()
    for row in rows:
        choices = choices_of([row], agent).rows
        if not choices or choices[0].group in seen:
            continue
        seen.add(choices[0].group)
        best = _likeliest(policy, row["prompt"], choices[0].options)
        if best is not None:
            yield {**{name: row[name] for name in ROW_COLUMNS if name in row}, "completion": best}


def _likeliest(policy: LinearPolicy, prompt: Sequence[Message], listed: Sequence[str]) -> str | None:
    """The classifier's answer, among the listed ones or those it knows; None if it knows none."""
    try:
        options = list(listed) or policy.options(prompt)
    except LinearPolicyError:
        return None
    scores = policy.scores(prompt, options)
    return options[max(range(len(options)), key=scores.__getitem__)]


ROW_COLUMNS = ("prompt", "prompt_hash", "state", "facts")
"""Columns that a demonstration copies from its row."""


# --- Recombined prompts ---


Messages = Sequence[Message]

MOST_SENTENCES = 24
"""Longer texts are not recombined: pairs of sentences grow with the square."""

_SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]*\s*")


def recombined_prompts(prompts: Sequence[Messages], count: int, *, seed: int) -> list[list[dict[str, Any]]]:
    """At most `count` new prompts, none equal to a given one.

    Each is a given prompt whose last message has other values in its fields (JSON members or lines `name: value`),
    drawn from the values of that field anywhere. A text without fields gets other sentences, drawn from those that have
    occurred beside each of its others, so that two variants of one statement never occur together.
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
    """The text with each field's value drawn from that field's values."""
    parts, end = [], 0
    for name, start, stop in spans:
        parts += [text[end:start], random.choice(fields[name])]
        end = stop
    return "".join([*parts, text[end:]])


class _Sentences:
    """Sentences of some texts and which occurred together; sentences that differ only in digits are one."""

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
        """The text with each sentence redrawn given the others (Gibbs sampling). Unchanged if a sentence occurs only
        here: nothing tells what may be beside it."""
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
