"""Clusters of near-identical prompts: by trace, by words without their numbers, and by MinHash over the words that tell
an agent's prompts apart. Pure.

Broder 1997 (On the resemblance and containment of documents); signatures and their index are datasketch's.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feedback.explorer.bulk_readers import prompts_named
from feedback.storage.sql import IDS
from rl.datasets.holdout import largest_cluster
from rl.models import Evaluation

MIN_SIMILARITY = 0.85
"""Share of words and pairs of words in common (Jaccard) from which two prompts are near-identical: of twenty words one
may differ."""

NEAR_WITHIN_UNIT = 0.5
"""The same for two prompts of one unit: a person who asks again asks in other words."""

COMMON = 0.5
"""Share of the prompts from which a word or pair of words is the agent's template and tells no prompt from another."""

MIN_PROMPTS = 10
"""Prompts below which no template can be told."""

MOST_ALIKE = 5
"""Prompts on average up to which those that differ in numbers alone are one question asked again, and those of one
unit one session. Where more share a text or a unit, numbers are what tells prompts apart (an amount, a room) and a unit
is a customer: then neither says that two prompts are alike. A number that many prompts share is never left out."""

LONGEST_SESSION = 50
"""Prompts of a unit from which it is a customer's, whatever the others are; also what comparing them costs."""

PERMUTATIONS = 64
"""Of a signature; an estimate only chooses whom to compare, and candidates are compared exactly."""

WORD = re.compile(r"\w+")

NUMBER = "0"
"""Token in place of one or several words in a row that have a digit: a number, a date, the id of an order."""


@dataclass(frozen=True, slots=True)
class ClusteredPrompt:
    """A prompt with what is compared for near-identity: its words, and the trace and unit of its decision."""

    text: str
    trace: str = ""
    unit: str = ""


def clusters_of(prompts: Mapping[str, ClusteredPrompt]) -> dict[str, str]:
    """Prompt -> the prompt its cluster is named after, the first of it in the order given; "" for one like no other.

    Prompts of one trace are one cluster. Of the others those that differ in numbers alone are (MOST_ALIKE says where),
    and a prompt joins the cluster whose first prompt it is most like, so clusters do not grow by chains: all members
    are near-identical to the first. The same prompts in the same order give the same clusters.
    """
    max_size = largest_cluster(len(prompts))
    leaders = dict(_first_of_groups({name: prompt.trace for name, prompt in prompts.items()}, max_size))
    leader_names = set(leaders.values())
    rest = {
        name: prompt for name, prompt in prompts.items() if name not in leaders and name not in leader_names
    }
    words = {name: WORD.findall(prompt.text.lower()) for name, prompt in rest.items()}
    values = _frequent_numbers(words, max_size)
    texts = {name: " ".join(_without_numbers(found, values)) for name, found in words.items()}
    repeats: dict[str, str] = {}
    if _are_few(texts.values()):
        repeats = dict(_first_of_groups(texts, max_size))
        sizes = Counter(texts.values())
        # of a text that many share the numbers tell, so its prompts keep them
        words = {
            name: texts[name].split() if sizes[texts[name]] <= max_size else found
            for name, found in words.items()
            if name not in repeats
        }
        leaders |= repeats
    units = {name: rest[name].unit for name in words}
    near = _near_prompts(_distinctive_words(words), units if _are_few(units.values()) else {})
    leaders |= near
    # who repeats a prompt goes where that one went
    leaders |= {name: near.get(first, first) for name, first in repeats.items()}
    leader_names = set(leaders.values())
    return {name: leaders.get(name, name if name in leader_names else "") for name in prompts}


def _is_number(word: str) -> bool:
    return any(map(str.isdigit, word))


def _frequent_numbers(words: Mapping[str, Iterable[str]], max_size: float) -> set[str]:
    """Return the numbers in more than `max_size` prompts: values to choose by (a year), not one prompt's own."""
    count = Counter(word for found in words.values() for word in set(found) if _is_number(word))
    return {word for word, prompts in count.items() if prompts > max_size}


def _without_numbers(words: Iterable[str], values: Container[str]) -> Iterator[str]:
    """The words, with NUMBER in place of those with a digit that are no values; several that follow each other are
    one."""
    masked = (NUMBER if _is_number(word) and word not in values else word for word in words)
    for word, same in itertools.groupby(masked):
        yield from [NUMBER] if word == NUMBER else same


def _are_few(values: Iterable[str]) -> bool:
    """True where at most MOST_ALIKE prompts, on average, share a value; prompts without one share none."""
    found = list(filter(None, values))
    return len(found) >= MIN_PROMPTS and len(found) <= MOST_ALIKE * len(set(found))


def _first_of_groups(values: Mapping[str, str], most: float) -> Iterator[tuple[str, str]]:
    """(prompt, first prompt of the same value) of groups of two to `most` prompts, each but the first."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            groups.setdefault(value, []).append(name)
    for first, *others in groups.values():
        if len(others) < most:
            yield from ((name, first) for name in others)


def _near_prompts(parts: Mapping[str, frozenset[str]], units: Mapping[str, str]) -> dict[str, str]:
    """Prompt -> the first prompt that it is most like, for those that are near enough to one.

    parts: prompt -> its distinctive words and pairs; units: prompt -> its unit, where units are sessions.
    """
    from datasketch import MinHash, MinHashLSH  # takes half a second that most commands need not wait for

    index = MinHashLSH(threshold=MIN_SIMILARITY - 0.1, num_perm=PERMUTATIONS)
    count = Counter(part for features in parts.values() for part in features)
    sessions = Counter(filter(None, units.values()))
    # whoever has more parts to itself than two near-identical prompts may differ in is like no other
    alone = {name: sum(count[part] == 1 for part in features) for name, features in parts.items()}
    compared = [
        name
        for name, features in parts.items()
        if features and alone[name] <= (1 - MIN_SIMILARITY) * len(features) + 1e-9
    ]
    signatures = MinHash.generator(
        ([part.encode() for part in parts[name]] for name in compared),
        num_perm=PERMUTATIONS,
        hashfunc=_number,
    )
    signature_of = dict(zip(compared, signatures, strict=True))
    leaders: dict[str, str] = {}
    of_unit: dict[str, list[str]] = {}
    for name, features in parts.items():
        if not features:
            continue
        unit = units.get(name, "")
        candidates = (
            [
                (_similarity(features, parts[other]), MIN_SIMILARITY, other)
                for other in index.query(signature_of[name])
            ]
            if name in signature_of
            else []
        )
        candidates += [
            (_similarity(features, parts[other]), NEAR_WITHIN_UNIT, other) for other in of_unit.get(unit, ())
        ]
        enough = [(similarity, other) for similarity, least, other in candidates if similarity >= least]
        if enough:
            leaders[name] = max(enough)[1]
            continue
        if name in signature_of:
            index.insert(name, signature_of[name], check_duplication=False)
        if 1 < sessions[unit] <= LONGEST_SESSION:
            of_unit.setdefault(unit, []).append(name)
    return leaders


LISTED_CLUSTERS, EXAMPLES = 5, 3
"""Largest clusters of a report, and prompts named of each."""


def cluster_report(clusters: Mapping[str, str], sides: Mapping[str, str]) -> dict[str, Any]:
    """Counts of an agent's near-identical prompts, and the largest clusters with examples; JSON-serialisable.

    clusters: prompt -> its cluster as `clusters_of` names it; sides: prompt -> train, eval or holdout.
    {"prompts", "clusters" (of two or more prompts), "clustered" (prompts in them), "on_two_sides" (clusters with
    prompts in the holdout and elsewhere), "left_out" (held-out prompts of these, which judge nobody), "largest":
    [{"prompts", "sides": {side: count}, "examples": prompts}]}. No words: whoever erases them must not miss a copy.
    """
    members: dict[str, list[str]] = {}
    for name, cluster in clusters.items():
        if cluster:
            members.setdefault(cluster, []).append(name)
    counts = {name: Counter(sides.get(one, "") for one in group) for name, group in members.items()}
    torn = [name for name, count in counts.items() if 0 < count["holdout"] < len(members[name])]
    largest = sorted(members, key=lambda name: (-len(members[name]), name))[:LISTED_CLUSTERS]
    return {
        "prompts": len(clusters),
        "clusters": len(members),
        "clustered": sum(map(len, members.values())),
        "on_two_sides": len(torn),
        "left_out": sum(counts[name]["holdout"] for name in torn),
        "largest": [
            {
                "prompts": len(members[name]),
                "sides": dict(counts[name]),
                "examples": members[name][:EXAMPLES],
            }
            for name in largest
        ],
    }


def cluster_text(report: Mapping[str, Any]) -> str:
    """A report's counts in a sentence; empty where no two prompts are near-identical."""
    if not report.get("clusters"):
        return ""
    words = (
        f"{report['clustered']:,} of {report['prompts']:,} prompts are near-identical to another and count as "
        f"{report['clusters']:,}"
    )
    if report["left_out"]:
        return f"{words}; {report['left_out']:,} held-out ones are left out, as others like them were not held out"
    return words


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The words of a prompt, whoever says them."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def _distinctive_words(words: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """Per prompt its words and pairs of neighbouring words, without those of the agent's template."""
    found = {
        name: frozenset([*each, *(f"{a} {b}" for a, b in itertools.pairwise(each))])
        for name, each in words.items()
    }
    if len(found) < MIN_PROMPTS:
        return found
    count = Counter(part for parts in found.values() for part in parts)
    template = {part for part, n in count.items() if n > COMMON * len(found)}
    return {name: parts - template for name, parts in found.items()}


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def _number(part: bytes) -> int:
    return zlib.crc32(part)


EXAMPLE_CHARS = 200
"""Characters shown of a prompt."""


@dataclass(frozen=True)
class NearIdenticalPrompts:
    """Report on the near-identical prompts that an evaluation found."""

    words: str
    largest: list[dict[str, Any]]
    """Of each of the largest clusters: how many prompts, on which sides, some of them."""


def prompt_words(agent: str, prompt_hashes: Sequence[str]) -> dict[str, str]:
    """The words of prompts of an agent's decisions, by hash; erased ones are missing."""
    found: dict[str, str] = {}
    for start in range(0, len(prompt_hashes), IDS):
        named = prompts_named(agent, prompt_hashes[start : start + IDS])
        found |= {name: prompt_text(messages) for name, messages in named.items()}
    return found


def near_identical_prompts(evaluation: Evaluation) -> NearIdenticalPrompts | None:
    """The report of an evaluation; None where no two prompts were near-identical, or none was looked for."""
    report = evaluation.figures.get("clusters") or {}
    words = cluster_text(report)
    if not words:
        return None
    names = [name for one in report["largest"] for name in one["examples"]]
    texts = prompt_words(evaluation.agent, names)
    largest = [
        {**one, "examples": [texts[name][:EXAMPLE_CHARS] for name in one["examples"] if name in texts]}
        for one in report["largest"]
    ]
    return NearIdenticalPrompts(words, largest)
