"""Made-up held-out evidence of every kind, whose truth is known: log-probabilities and figures, judged by the real
rules."""

from dataclasses import dataclass, replace

import numpy as np
import scipy

from rl.datasets.pairs import HELD_OUT_PAIRS
from rl.gates.effects import one_per_cluster
from rl.gates.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS, REWARDS, TESTS
from rl.gates.report import PASSED, Case, Evidence, Item, RatedAnswer
from rl.gates.rules import CHAMPION, gate_judge, rule_accuracy
from tests.support.gate_worlds import BOUNDS

REPEATS = 0.3
"""Chance that a further pair of a prompt says what its first one says."""


@dataclass(frozen=True)
class KindWorld:
    """Difference of a candidate from its rival on held-out evidence of one kind."""

    kind: str
    prompts: int = 200
    gain: float = 0.0
    """True gain in points / 100: of accuracy, of concordance over a coin, or of the share of prompts on which it does
    better than its rival over one half."""
    liked: float = 0.6
    """Share of thumbs up; of scores, their mean."""
    levels: int = 2
    """Values a rating takes: 2 thumbs, 5 stars; 0 any number in [0, 1], most of them small."""
    answers: int = 1
    """Rated answers to each prompt, whose log-probabilities move together; of pairs and tests, pairs to each prompt, 0
    for heavy-tailed numbers of one to ten."""
    tails: float = 0.0
    """Degrees of freedom of Student's t for the log-ratios, 0 for the normal distribution."""
    spread: float = 1.0
    """How many times as far the log-ratios of liked answers spread."""
    skew: float = 0.0
    """Of figures: share of the prompts on which the candidate loses much; it gains a little on all the others."""
    groups: str = ""
    """Near-identical prompts: groups of so many ("3", "10"), of heavy-tailed sizes ("heavy"), or none."""
    alike: float = 0.9
    """Share of a group's prompts on which all is as on its first one."""
    told: bool = True
    """Whether the gate knows the groups."""


@dataclass(frozen=True)
class Drawn:
    """Evidence as columns: of rated answers values and shifts, of cases the figures of both sides."""

    first: np.ndarray
    second: np.ndarray
    prompts: np.ndarray
    rated: bool
    clusters: np.ndarray | None = None
    """Per item the number of its prompt's group; None where no prompt is like another."""

    @property
    def items(self) -> list[Item]:
        rows = zip(self.prompts.tolist(), self.first.tolist(), self.second.tolist(), strict=True)
        found: list[Item] = (
            [RatedAnswer(f"p{prompt}", value, shift) for prompt, value, shift in rows]
            if self.rated
            else [Case(own, other) for _, own, other in rows]
        )
        if self.clusters is None:
            return found
        return one_per_cluster(found, [f"c{number}" for number in self.clusters.tolist()])

    @property
    def hopeless(self) -> bool:
        """Whether no gate would see a gain: a mean difference of at most one standard error, or a correlation of 0.

        It spares the gate most evidence of policies that are no better; a test holds that nothing else is spared.
        """
        first, second = self.first, self.second
        if self.clusters is not None:
            sizes = np.bincount(self.clusters)
            first, second = (np.bincount(self.clusters, one) / sizes for one in (first, second))
        if self.rated:
            ranks = scipy.stats.rankdata(second)
            return bool(((first - first.mean()) * (ranks - ranks.mean())).sum() <= 0)
        differences = first - second
        return bool(differences.sum() <= np.sqrt((differences**2).sum()))


def noise(world: KindWorld, random: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
    return random.standard_t(world.tails, size) if world.tails else random.standard_normal(size)


def values_of(world: KindWorld, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What people or outcomes said of answers, in [0, 1]."""
    if world.levels == 0:
        return random.beta(0.4, 1.2, shape)
    if world.levels == 2:
        return (random.random(shape) < world.liked).astype(float)
    return random.binomial(world.levels - 1, world.liked, shape) / (world.levels - 1)


def rated(world: KindWorld, random: np.random.Generator) -> Drawn:
    """Values drawn by taste, shifts of log-probability by how the candidate was trained."""
    shape = (world.prompts, world.answers)
    values = values_of(world, random, shape)
    # a normal shift of this size makes P(liked higher) = 1/2 + gain
    size = np.sqrt(2) * scipy.special.ndtri(0.5 + world.gain)
    own = noise(world, random, shape)
    if world.answers > 1:
        own = (own + noise(world, random, (world.prompts, 1))) / np.sqrt(2)
    shifts = own * np.where(values > 0.5, world.spread, 1.0) + size * (values - 0.5)
    return Drawn(values.ravel(), shifts.ravel(), np.repeat(np.arange(world.prompts), world.answers), True)


def right_or_wrong(world: KindWorld, random: np.random.Generator) -> Drawn:
    """Both sides on the same prompts, differing on three in ten; of several pairs a prompt, its share of them."""
    shape = world.prompts if world.answers == 1 else (world.prompts, world.answers or HELD_OUT_PAIRS)
    discordant = max(0.3, world.gain)
    draw, same = random.random(shape), random.random(shape) < 0.6
    wins, losses = draw < (discordant + world.gain) / 2, draw > 1 - (discordant - world.gain) / 2
    own, other = wins | (~losses & same), losses | (~wins & same)
    if world.answers != 1:
        again = random.random(shape) < REPEATS
        again[:, 0] = True
        own, other = np.where(again, own[:, :1], own), np.where(again, other[:, :1], other)
        counts = np.full((world.prompts, 1), world.answers)
        if not world.answers:
            counts = np.minimum(1 + random.pareto(1.1, (world.prompts, 1)), HELD_OUT_PAIRS).astype(int)
        heard = np.arange(own.shape[1]) < counts
        own, other = ((side & heard).sum(axis=1) / counts[:, 0] for side in (own, other))
    return Drawn(own.astype(float), other.astype(float), np.arange(world.prompts), False)


def written(world: KindWorld, random: np.random.Generator) -> Drawn:
    """Log-likelihoods on both sides; the difference is above 0 on 1/2 + gain of the prompts, with skew 0 on average."""
    size = scipy.special.ndtri(0.5 + world.gain)
    theirs = random.standard_normal(world.prompts) - 3
    if world.skew:
        lost = random.random(world.prompts) < world.skew
        differences = np.where(lost, 1 - 1 / world.skew, 1.0) + 0.3 * noise(world, random, world.prompts)
    else:
        differences = noise(world, random, world.prompts) + size
    return Drawn(theirs + differences, theirs, np.arange(world.prompts), False)


def rewarded(world: KindWorld, random: np.random.Generator) -> Drawn:
    """Rewards of generated answers: 0, 1/2 or 1 on either side, half of them alike; `gain` in the mean reward.

    With `skew` the candidate earns a little more on most prompts and nothing on so many, and as much on average.
    """
    levels, shares = np.array([0.0, 0.5, 1.0]), [0.25, 0.5, 0.25]
    theirs = random.choice(levels, world.prompts, p=shares)
    if world.skew:
        lost = random.random(world.prompts) < world.skew
        theirs = np.full(world.prompts, 0.5)
        return Drawn(
            np.where(lost, 0.0, 0.5 + 0.5 * world.skew / (1 - world.skew)),
            theirs,
            np.arange(world.prompts),
            False,
        )
    same, anew = random.random(world.prompts) < 0.5, random.choice(levels, world.prompts, p=shares)
    own = np.where(same, theirs, anew)
    # a whole step of 1/2 more, where there is room: on three prompts in four
    raised = (own < 1) & (random.random(world.prompts) < world.gain / 0.5 / 0.75)
    return Drawn(np.where(raised, own + 0.5, own), theirs, np.arange(world.prompts), False)


DRAWN = {PAIRS: right_or_wrong, TESTS: right_or_wrong, LABELS: rated, OUTCOMES: rated, CORRECTIONS: written}
DRAWN |= {REWARDS: rewarded}
"""Kind -> how its evidence is drawn."""


def group_numbers(world: KindWorld, random: np.random.Generator) -> np.ndarray:
    """Per prompt the number of its group; heavy-tailed sizes are Pareto's of index 1.1, the largest a fifth of all."""
    if world.groups != "heavy":
        return np.arange(world.prompts) // int(world.groups)
    sizes: list[int] = []
    while sum(sizes) < world.prompts:
        sizes.append(int(min(1 + random.pareto(1.1), world.prompts / 5)))
    return np.repeat(np.arange(len(sizes)), sizes)[: world.prompts]


def drawn_of(world: KindWorld, random: np.random.Generator) -> Drawn:
    """Evidence of one candidate; in groups, most prompts say again what the first of their group said."""
    drawn = DRAWN[world.kind](world, random)
    if not world.groups:
        return drawn
    numbers = group_numbers(world, random)
    firsts = np.searchsorted(numbers, numbers)
    source = np.where(random.random(world.prompts) < world.alike, firsts, np.arange(world.prompts))
    return replace(
        drawn,
        first=drawn.first[source],
        second=drawn.second[source],
        clusters=numbers if world.told else None,
    )


def evidence_of(world: KindWorld, random: np.random.Generator, attempt: int = 1) -> Evidence:
    """One evaluation of a candidate in this world."""
    return evidence_from(world.kind, drawn_of(world, random), attempt)


def evidence_from(kind: str, drawn: Drawn, attempt: int = 1) -> Evidence:
    if kind == PAIRS:
        cases = [item for item in drawn.items if isinstance(item, Case)]
        return Evidence("base", cases, attempt=attempt)
    return Evidence("base", (), attempt=attempt, other_kinds={kind: drawn.items})


def shuffled(drawn: Drawn, random: np.random.Generator) -> Drawn:
    """The same evidence with what people said shuffled: values among answers, sides among prompts."""
    if drawn.rated:
        return replace(drawn, first=random.permutation(drawn.first))
    flip = random.random(len(drawn.first)) < 0.5
    return replace(
        drawn,
        first=np.where(flip, drawn.second, drawn.first),
        second=np.where(flip, drawn.first, drawn.second),
    )


def opens(kind: str, drawn: Drawn, attempt: int) -> bool:
    """Whether the gate opens; the rules beside accuracy are asked only where that one passes."""
    if drawn.hopeless:
        return False
    found = evidence_from(kind, drawn, attempt)
    return rule_accuracy(found, BOUNDS, CHAMPION).outcome == PASSED and gate_judge(found, BOUNDS).passed


def promoted_in(
    world: KindWorld, random: np.random.Generator, attempts: int = 20, *, shuffle: bool = False
) -> int | None:
    """The number, from 1, of the first of so many candidates of a world that gets through the gate.

    shuffle: what people said of the answers is shuffled before each is judged.
    """
    for k in range(1, attempts + 1):
        drawn = drawn_of(world, random)
        if shuffle:
            drawn = shuffled(drawn, random)
        if opens(world.kind, drawn, k):
            return k
    return None
