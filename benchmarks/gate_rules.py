"""Error rates of the gate's rules about answers, in worlds whose truth is known. Prints JSON lines.

`valid`: shares of answers valid on both sides; `reward`: rewards of 0, 1/2 and 1; `kl`: token distributions of a base,
of people, and of policies that learnt from people or went astray. `--seeds` says how many worlds of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.gates.answers import rule_kl, rule_reward, rule_valid
from rl.gates.evidence_kinds import CORRECTIONS
from rl.gates.report import AnswerPair, Case, Evidence, GateBounds, RuleResult
from rl.statistics import Difference, mean_interval, wilson_interval

BOUNDS = GateBounds()
ANSWERS = (40, 64, 100, 200)
FALLS = (0.0, 0.05, 0.1, 0.2)

Draw = Callable[[np.random.Generator], RuleResult]


def valid(random: np.random.Generator, answers: int, fall: float, differ: float) -> RuleResult:
    """The rule about valid answers: both sides differ by luck on `differ` of the prompts each way, beside the fall."""
    draw = random.random(answers)
    wins, losses = draw < differ, draw > 1 - differ - fall
    given = [AnswerPair(not lost, not won, 1.0, 1.0, 40, 40) for won, lost in zip(wins, losses, strict=True)]
    return rule_valid(Evidence("champion", (), given), BOUNDS, "champion")


def reward(random: np.random.Generator, answers: int, fall: float, differ: float) -> RuleResult:
    """The rule about rewards: each side's answers earn 0, 1/2 or 1, and are alike on 1 - `differ` of the prompts."""
    other = random.choice([0.0, 0.5, 1.0], answers, p=[0.2, 0.4, 0.4])
    anew = random.choice([0.0, 0.5, 1.0], answers, p=[0.2, 0.4, 0.4])
    own = np.where(random.random(answers) < differ, anew, other)
    # a fall takes a whole point from a share of the answers that earned one: 0.4 of them do
    own = np.where((own == 1) & (random.random(answers) < fall / 0.4), 0.0, own)
    given = [AnswerPair(True, True, mine, theirs, 40, 40) for mine, theirs in zip(own, other, strict=True)]
    return rule_reward(Evidence("champion", (), given), BOUNDS, "champion")


@dataclass(frozen=True)
class Texts:
    """A world of texts: 12 tokens of a vocabulary of 200 in an answer, the base's distribution new in each place."""

    pull: float
    """How strongly people prefer words of their own, in logits: at 0 they speak as the base does."""
    astray: float = 0.0
    """How strongly the policy prefers words that neither base nor people do."""
    learnt: float = 1.0
    """How much of what people prefer the policy learnt."""
    prompts: int = 64

    def judged(self, random: np.random.Generator, *, lead: bool = True) -> RuleResult:
        """The rule about distance; `lead`: corrections are the evidence that leads."""
        shape = (self.prompts, 12, 200)
        base = log_softmax(1.5 * random.standard_normal(shape))
        people_like = random.random(shape) < 0.02
        junk = random.random(shape) < 0.02
        people = log_softmax(base + self.pull * people_like)
        policy = log_softmax(base + self.learnt * self.pull * people_like + self.astray * junk)
        said = policy.argmax(-1)[..., None]
        ratio = (np.take_along_axis(base, said, -1) - np.take_along_axis(policy, said, -1))[..., 0]
        kl = float((np.expm1(ratio) - ratio).mean())
        draws = (np.exp(people).cumsum(-1) > random.random((*shape[:2], 1))).argmax(-1)[..., None]
        gain = np.take_along_axis(policy, draws, -1) - np.take_along_axis(base, draws, -1)
        found = mean_interval(list(gain[..., 0].mean(1)))
        assert found.value is not None
        assert found.low is not None
        assert found.high is not None
        written = [Case(float(one), 0.0) for one in gain[..., 0].mean(1)]
        evidence = Evidence(
            "base",
            (),
            kl=kl,
            other_kinds={CORRECTIONS: written} if lead else {},
            written_gain=Difference(found.value, found.low, found.high),
        )
        return rule_kl(evidence, BOUNDS, "champion")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def worlds() -> Iterator[tuple[str, Draw]]:
    """Names of worlds, with a draw of a verdict in each."""
    for differ in (0.01, 0.03):
        for fall in FALLS:
            for n in ANSWERS:
                name = f"valid: {100 * fall:g} points lost, {100 * differ:g} % differ each way, {n} answers"
                yield name, lambda random, n=n, fall=fall, differ=differ: valid(random, n, fall, differ)
    for differ in (0.3, 0.8):
        for fall in FALLS:
            for n in ANSWERS:
                name = f"reward: {fall:g} lost, answers differ on {100 * differ:g} %, {n} answers"
                yield name, lambda random, n=n, fall=fall, differ=differ: reward(random, n, fall, differ)
    for pull in (0.0, 4.0, 6.0, 8.0, 12.0):
        for lead in (True, False):
            of = Texts(pull)
            name = f"kl: learnt from people with a pull of {pull:g}, corrections {'lead' if lead else 'do not lead'}"
            yield name, lambda random, of=of, lead=lead: of.judged(random, lead=lead)
    for pull, learnt in ((4.0, 0.2), (6.0, 0.2), (8.0, 0.2)):
        for astray in (8.0, 12.0):
            of = Texts(pull, astray, learnt)
            name = f"kl: astray by {astray:g}, a fifth of a pull of {pull:g} learnt, corrections lead"
            yield name, lambda random, of=of: of.judged(random)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="Worlds of each kind (default 1000)")
    parser.add_argument("--only", default="", metavar="TEXT", help="Only worlds whose name holds this text")
    options = parser.parse_args()
    for name, draw in worlds():
        if options.only not in name:
            continue
        # a world of texts holds 150,000 logits: a tenth of the seeds tells as much, its figures hardly vary
        seeds = max(options.seeds // 10, 1) if name.startswith("kl") else options.seeds
        found = [draw(np.random.default_rng(seed)) for seed in range(seeds)]
        refused = wilson_interval(sum(not one.passed for one in found), seeds).as_dict()
        harm = sum(not one.passed and not one.waits for one in found) / seeds
        figures = [one.figures.get("value") for one in found]
        print(
            json.dumps(
                {"world": name, "refused": refused, "for good": harm, "mean": float(np.mean(figures))}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
