"""Clusters of near-identical prompts, by MinHash over the words that tell an agent's prompts apart. Pure.

Broder 1997 (On the resemblance and containment of documents); signatures and their index are datasketch's.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

NEAR = 0.85
"""Share of words and pairs of words in common (Jaccard) from which two prompts are near-identical: of twenty words one
may differ."""

COMMON = 0.5
"""Share of the prompts from which a word or pair of words is the agent's template and tells no prompt from another."""

FEW = 10
"""Prompts below which no template can be told."""

PERMUTATIONS = 64
"""Of a signature; an estimate only chooses whom to compare, and candidates are compared exactly."""

WORD = re.compile(r"\w+")


def clusters_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Prompt -> the prompt its cluster is named after, the first of it in the order given; "" for one like no other.

    A prompt joins the cluster whose first prompt it is most like, so clusters do not grow by chains: all members are
    near-identical to the first. The same prompts in the same order give the same clusters.
    """
    from datasketch import MinHash, MinHashLSH  # takes half a second that most commands need not wait for

    parts = _distinctive_words(texts)
    index = MinHashLSH(threshold=NEAR - 0.1, num_perm=PERMUTATIONS)
    leaders: dict[str, str] = {}
    count = Counter(part for found in parts.values() for part in found)
    # whoever has more parts to itself than two near-identical prompts may differ in is like no other
    alone = {name: sum(count[part] == 1 for part in found) for name, found in parts.items()}
    names = [name for name, found in parts.items() if found and alone[name] <= (1 - NEAR) * len(found) + 1e-9]
    signatures = MinHash.generator(
        ([part.encode() for part in parts[name]] for name in names), num_perm=PERMUTATIONS, hashfunc=_number
    )
    for name, signature in zip(names, signatures, strict=True):
        near = [(_similarity(parts[name], parts[other]), other) for other in index.query(signature)]
        best = max(near, default=(0.0, ""))
        if best[0] >= NEAR:
            leaders[name] = best[1]
        else:
            index.insert(name, signature, check_duplication=False)
    led = set(leaders.values())
    return {name: leaders.get(name, name if name in led else "") for name in texts}


SHOWN, EXAMPLES = 5, 3
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
    largest = sorted(members, key=lambda name: (-len(members[name]), name))[:SHOWN]
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


def _distinctive_words(texts: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Per prompt its words and pairs of neighbouring words, without those of the agent's template."""
    found = {}
    for name, text in texts.items():
        words = WORD.findall(text.lower())
        found[name] = frozenset([*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))])
    if len(found) < FEW:
        return found
    count = Counter(part for parts in found.values() for part in parts)
    template = {part for part, n in count.items() if n > COMMON * len(found)}
    return {name: parts - template for name, parts in found.items()}


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def _number(part: bytes) -> int:
    return zlib.crc32(part)
