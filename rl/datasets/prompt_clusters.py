"""Clusters of near-identical prompts: by trace, by text without numbers, by MinHash over distinctive words.

MinHash: Broder 1997 (On the resemblance and containment of documents), by datasketch.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from feedback.explorer.bulk_readers import prompts_named
from feedback.messages import Message
from feedback.storage.sql import chunks
from rl.datasets.holdout import largest_cluster
from rl.models import Evaluation

MIN_SIMILARITY = 0.85
"""Least Jaccard similarity, over words and word pairs, of near-identical prompts: one of twenty words may differ."""

NEAR_WITHIN_UNIT = 0.5
"""MIN_SIMILARITY within one unit, because a person who asks again rephrases."""

COMMON = 0.5
"""Words and word pairs in more than this share of prompts are the agent's template and do not count."""

MIN_PROMPTS = 10
"""Fewest prompts for recognising a template."""

MOST_ALIKE = 5
"""Most prompts per text (without numbers) or per unit, on average, for texts and units to define clusters.

Up to this, prompts that differ only in numbers repeat one question, and a unit is one session. Beyond it, numbers tell
prompts apart (an amount, a room) and a unit is a customer. A number that many prompts share is always kept."""

LONGEST_SESSION = 50
"""A unit with more prompts is a customer, not a session; also bounds the cost of comparing within a unit."""

PERMUTATIONS = 64
"""Permutations per signature. Signatures only find candidates; these are compared exactly."""

WORD = re.compile(r"\w+")

NUMBER = "0"
"""Replaces consecutive words with digits: a number, a date, an id."""


@dataclass(frozen=True, slots=True)
class ClusteredPrompt:
    """What is compared of a prompt: its text, and its decision's trace and unit."""

    text: str
    trace: str = ""
    unit: str = ""


def clusters_of(prompts: Mapping[str, ClusteredPrompt]) -> dict[str, str]:
    """Prompt -> first prompt of its cluster, which names it; "" without near-identical prompts. Deterministic.

    Prompts of one trace form a cluster. Of the others, prompts that differ only in numbers do (see MOST_ALIKE), and a
    prompt joins the cluster whose first prompt it is most similar to. Every member is near-identical to the first, so
    clusters do not grow by chains.
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
        # Prompts whose text many share keep their numbers.
        words = {
            name: texts[name].split() if sizes[texts[name]] <= max_size else found
            for name, found in words.items()
            if name not in repeats
        }
        leaders |= repeats
    units = {name: rest[name].unit for name in words}
    near = _near_prompts(_distinctive_words(words), units if _are_few(units.values()) else {})
    leaders |= near
    # A repeated prompt follows the one it repeats.
    leaders |= {name: near.get(first, first) for name, first in repeats.items()}
    leader_names = set(leaders.values())
    return {name: leaders.get(name, name if name in leader_names else "") for name in prompts}


def _is_number(word: str) -> bool:
    return any(map(str.isdigit, word))


def _frequent_numbers(words: Mapping[str, Iterable[str]], max_size: float) -> set[str]:
    """Numbers in more than `max_size` prompts: shared values such as a year."""
    count = Counter(word for found in words.values() for word in set(found) if _is_number(word))
    return {word for word, prompts in count.items() if prompts > max_size}


def _without_numbers(words: Iterable[str], values: Container[str]) -> Iterator[str]:
    """The words, with NUMBER for each run of words with digits that are not in `values`."""
    masked = (NUMBER if _is_number(word) and word not in values else word for word in words)
    for word, same in itertools.groupby(masked):
        yield from [NUMBER] if word == NUMBER else same


def _are_few(values: Iterable[str]) -> bool:
    """True if at most MOST_ALIKE prompts, on average, share a value; empty values do not count."""
    found = list(filter(None, values))
    return len(found) >= MIN_PROMPTS and len(found) <= MOST_ALIKE * len(set(found))


def _first_of_groups(values: Mapping[str, str], most: float) -> Iterator[tuple[str, str]]:
    """(prompt, first prompt with the same value), for groups of two to `most` prompts, without the first."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            groups.setdefault(value, []).append(name)
    for first, *others in groups.values():
        if len(others) < most:
            yield from ((name, first) for name in others)


def _near_prompts(parts: Mapping[str, frozenset[str]], units: Mapping[str, str]) -> dict[str, str]:
    """Prompt -> most similar first prompt, for prompts that are similar enough to one.

    parts: prompt -> its distinctive words and pairs. units: prompt -> unit, if units are sessions.
    """
    if not parts:
        return {}
    from datasketch import MinHash, MinHashLSH  # The import takes 0.5 s.

    index = MinHashLSH(threshold=MIN_SIMILARITY - 0.1, num_perm=PERMUTATIONS)
    count = Counter(part for features in parts.values() for part in features)
    sessions = Counter(filter(None, units.values()))
    # A prompt with more parts of its own than near-identical prompts may differ in has no match.
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
"""Largest clusters in a report, and prompts listed of each."""


def cluster_report(clusters: Mapping[str, str], sides: Mapping[str, str]) -> dict[str, object]:
    """Counts of near-identical prompts, and the largest clusters; JSON-serialisable.

    clusters: prompt -> cluster, from `clusters_of`. sides: prompt -> split.
    Returns {"prompts", "clusters" (of two or more prompts), "clustered" (prompts in them), "on_two_sides" (clusters in
    the holdout and elsewhere), "left_out" (their held-out prompts), "largest": [{"prompts", "sides": {split: count},
    "examples": prompt hashes}]}. It holds no texts, so that an erasure has no further copy to find.
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


def cluster_text(report: Mapping[str, object]) -> str:
    """A report's counts in a sentence; empty without near-identical prompts."""
    if not report.get("clusters"):
        return ""
    words = (
        f"{report['clustered']:,} of {report['prompts']:,} prompts are near-identical to another and count as "
        f"{report['clusters']:,}"
    )
    if report["left_out"]:
        return f"{words}; {report['left_out']:,} held-out prompts are left out: near-identical ones are not held out"
    return words


def prompt_text(messages: Sequence[Message]) -> str:
    """Texts of all messages."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def _distinctive_words(words: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """Prompt -> its words and neighbouring pairs, without those of the template."""
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
"""Most characters shown of a prompt."""


@dataclass(frozen=True)
class NearIdenticalPrompts:
    """Near-identical prompts of an evaluation, for pages."""

    words: str
    largest: list[dict[str, object]]
    """`largest` of `cluster_report`, with texts as examples."""


def prompt_words(agent: str, prompt_hashes: Sequence[str]) -> dict[str, str]:
    """Hash -> text of these prompts; erased ones are missing."""
    found: dict[str, str] = {}
    for chunk in chunks(prompt_hashes):
        named = prompts_named(agent, chunk)
        found |= {name: prompt_text(messages) for name, messages in named.items()}
    return found


def near_identical_prompts(evaluation: Evaluation) -> NearIdenticalPrompts | None:
    """None without near-identical prompts."""
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
