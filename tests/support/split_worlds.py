"""Made-up worlds in which rated prompts keep coming and no policy is better than its champion: what the split is tried
on, from the draw of the sides to the gate's verdict."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl.datasets.feedback_types import Split
from rl.datasets.holdout import Clusters, draw_splits
from rl.datasets.prompt_clusters import ClusteredPrompt, clusters_of
from rl.gates.effects import one_per_cluster
from rl.gates.report import Case, Evidence, GateBounds
from rl.gates.rules import gate_judge

BOUNDS = GateBounds()
DISCORDANT = 0.3
"""Share of the prompts on which a policy and the champion differ, where it was not trained on the prompt."""

Draw = Callable[[Mapping[str, Split], list[str], Clusters], dict[str, Split]]
"""Sides known, all prompts there are now, their clusters -> the sides of those that stand on none."""


@dataclass(frozen=True)
class Growth:
    """How rated prompts come: so many before each of the looks."""

    arrivals: Sequence[int]
    alike: bool = False
    """Whether a policy says of a prompt what the one before it said; otherwise nothing binds them."""
    group: int = 1
    """Near-identical prompts that come after one another: groups of so many, 0 for heavy-tailed sizes (Pareto, index
    1.1, at most a fifth of all). Nine in ten of a group go as its first one did."""
    worded: bool = False
    """Whether groups are not known but looked for, in short prompts that differ in a number alone within a group."""
    overlooked: bool = False
    """Whether neither the draw nor the verdict notices groups (the mistake)."""
    one_by_one: bool = False
    """Whether sides are drawn without regard to groups (the mistake)."""
    gain: float = 0.0
    """Points / 100 by which policies are better than the champion on prompts they were not trained on."""
    memory: bool = True
    """Whether policies know every prompt by heart that any of them was trained on, and so are always right there."""


def as_ratchet_does(known: Mapping[str, Split], prompts: list[str], clusters: Clusters) -> dict[str, Split]:
    return draw_splits(known, prompts, min_evidence=BOUNDS.min_evidence, clusters=clusters)


def forgetful(known: Mapping[str, Split], prompts: list[str], clusters: Clusters) -> dict[str, Split]:
    """The mistake: sides drawn anew each time, so that prompts change them."""
    again = {hashlib.sha256(f"{len(prompts)}:{name}".encode()).hexdigest(): name for name in prompts}
    drawn = draw_splits({}, again.keys(), min_evidence=BOUNDS.min_evidence)
    return {again[name]: split for name, split in drawn.items()}


def group_leaders(growth: Growth, random: np.random.Generator) -> np.ndarray:
    """Per prompt the number of the first prompt of its group."""
    total = sum(growth.arrivals)
    if growth.group:
        return np.arange(total) // growth.group * growth.group
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(int(min(1 + random.pareto(1.1), total / 5)))
    return np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)[:total]


THINGS = "bag hat dog key coat book ring phone scarf glove lamp purse".split()
PLACES = "track bus gate hall stairs ferry desk lift shop bench".split()
WISHES = "lost found broken stolen wet dirty sold left".split()


def short_prompt(group: int, number: int) -> str:
    """Five words and a number; groups differ in one to three words, prompts of a group in the number alone."""
    rest, thing = divmod(group, len(THINGS))
    rest, place = divmod(rest, len(PLACES))
    return f"my {THINGS[thing]} was {WISHES[rest % len(WISHES)]} at {PLACES[place]} {number}"


def promoted_at(growth: Growth, seed: int, draw: Draw = as_ratchet_does) -> int | None:
    """Which look, from 1, takes a policy for better; None where none does."""
    for look, evidence in enumerate(looks_at(growth, seed, draw), 1):
        if gate_judge(evidence, BOUNDS).passed:
            return look
    return None


def looks_at(growth: Growth, seed: int, draw: Draw = as_ratchet_does) -> Iterator[Evidence]:
    """What each look at the holdout shows: a case for each prompt or group that stands there whole."""
    random = np.random.default_rng(seed)
    known: dict[str, Split] = {}
    trained: set[str] = set()
    total = sum(growth.arrivals)
    names = [hashlib.sha256(f"{seed}:{i}".encode()).hexdigest() for i in range(total)]
    fate = random.random(total)
    leaders = np.arange(total) if growth.group == 1 else group_leaders(growth, random)
    cluster = {name: names[leader] for name, leader in zip(names, leaders.tolist(), strict=True)}

    texts = {
        name: ClusteredPrompt(short_prompt(int(leader), i))
        for i, (name, leader) in enumerate(zip(names, leaders, strict=True))
    }

    def clusters(those: Sequence[str]) -> dict[str, str]:
        if growth.worded:
            return clusters_of({name: texts[name] for name in those})
        if growth.overlooked:
            return dict.fromkeys(those, "")
        return {} if growth.one_by_one or growth.group == 1 else {name: cluster[name] for name in those}

    at = 0
    for look, more in enumerate(growth.arrivals, 1):
        at += more
        prompts = names[:at]
        known |= draw(known, prompts, clusters)
        trained |= {cluster[name] for name in prompts if known[name] == "train"}
        said = fate if growth.alike else random.random(total)
        if growth.group != 1:
            said = np.where(random.random(total) < 0.9, said[leaders], said)
        seen = clusters(prompts) if growth.worded or growth.overlooked else cluster
        elsewhere = {seen[name] for name in prompts if known[name] != "holdout"} - {""}
        cases, groups = [], []
        for name, luck in zip(prompts, said, strict=False):
            if known[name] != "holdout" or (growth.group != 1 and seen[name] in elsewhere):
                continue
            by_heart = growth.memory and cluster[name] in trained
            # right where the champion is, but for half of DISCORDANT lost, and as many won (more by the gain)
            won = 1 - luck < (DISCORDANT + growth.gain) / 2
            own = True if by_heart else luck < 0.7 - (DISCORDANT - growth.gain) / 2 or won
            cases.append(Case(float(own), float(luck < 0.7)))
            groups.append("" if growth.group == 1 else seen[name])
        found = [item for item in one_per_cluster(cases, groups) if isinstance(item, Case)]
        yield Evidence("base", found, attempt=look)
