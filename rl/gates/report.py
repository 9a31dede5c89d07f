"""Gate report: bounds, evidence on the same prompts, the result of each rule. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rl.gates.evidence_kinds import PAIRS
from rl.statistics import Difference
from rl.statistics.sequential import WinShare

PASSED, REFUSED, NOT_APPLICABLE = "passed", "refused", "not_applicable"


OLDER, NEWER = "feedback:older", "feedback:newer"
"""Slices of held-out prompts: the champion's time knew their feedback already, or not."""

RULE_TITLES = {
    "evidence": "Enough held-out prompts",
    "accuracy": "Better than what it replaces",
    "compared": "Answers were compared",
    "other_evidence": "Not worse by other kinds of evidence",
    "ratings": "Ratings are not only complaints",
    "raters": "Gain does not depend on one rater",
    "reward": "Reward does not fall",
    "fields": "As right as a simple classifier",
    "valid": "Answers stay valid",
    "kl": "Stays near its reference",
    "general": "Still answers general prompts",
    "slices": "No slice of prompts gets worse",
    "forgetting": "Not worse on older feedback",
    "golden": "Golden cases",
    "length": "Length of answers stays similar",
    "off_policy": "Off-policy estimate",
    "benchmarks": "Benchmarks",
}
"""Rule -> what it asks for, as pages name it."""


class GateError(ValueError):
    """A bound outside its range; the message names it and what is allowed."""


@dataclass(frozen=True)
class GateBounds:
    """Bounds a policy must meet. Differences are of shares in [0, 1], candidate minus champion."""

    min_evidence: int = 30
    """Held-out prompts on which both were judged."""
    alpha: float = 0.05
    """Chance that a policy no better than the champion is taken for better, over all attempts on one holdout."""
    margin: float = 0.0
    """The lower bound of the difference in preference accuracy must lie above it."""
    max_reward_loss: float = 0.2
    """A fall of the mean reward by more than this must be ruled out (one-sided interval, 90 %)."""
    max_invalid_gain: float = 0.1
    """A fall of the share of valid answers by more than this must be ruled out (one-sided interval, 90 %)."""
    max_kl: float = 2.0
    """Nats per token of its own answers, to the base model; where corrections lead, beyond what people wrote."""
    max_general_kl: float = 1.0
    """Nats per token to the base model on its answers to general prompts, which have nothing to do with the agent."""
    max_general_loss: float = 0.2
    """Share of the general prompts that the base answers in plain text and the policy may fail to."""
    max_slice_loss: float = 0.1
    """No slice may lose more than this in accuracy, where the loss is not chance."""
    min_slice: int = 10
    """Prompts a slice must have to be judged."""
    max_length_ratio: float = 1.5
    """Geometric mean of the lengths of its answers over the champion's; the inverse bounds it below."""
    max_rater_share: float = 0.2
    """A rater with a larger share of the held-out prompts must not be the only one who sees the gain."""
    max_off_policy_loss: float = 0.05
    """The off-policy estimate of the reward may be lower than the champion's by at most this."""
    benchmarks: str = ""
    """Benchmark tasks that must have been run, separated by commas; `name=0.02` gives one a bound of its own. Empty:
    none is asked."""
    max_benchmark_loss: float = 0.05
    """A fall of a listed benchmark below its base by more than this must be ruled out (one-sided interval, 90 %)."""

    def __post_init__(self) -> None:
        if self.min_evidence < 1 or self.min_slice < 1:
            raise GateError("min_evidence and min_slice must be at least 1")
        if not 0 < self.alpha < 0.5:
            raise GateError(f"alpha must be above 0 and below 0.5, found {self.alpha!r}")
        if not self.max_length_ratio >= 1:
            raise GateError(f"max_length_ratio must be at least 1, found {self.max_length_ratio!r}")
        for bound in dataclasses.fields(self):
            value = getattr(self, bound.name)
            if bound.name == "benchmarks":
                continue
            if not math.isfinite(value) or value < 0:
                raise GateError(f"{bound.name} must be a number of at least 0, found {value!r}")
        _ = self.benchmark_bounds

    @property
    def benchmark_bounds(self) -> dict[str, float]:
        """Listed task -> the loss it may show, in [0, 1]. Raises GateError."""
        limits: dict[str, float] = {}
        for entry in (one.strip() for one in self.benchmarks.split(",")):
            name, separator, text = (part.strip() for part in entry.partition("="))
            try:
                bound = float(text) if separator else self.max_benchmark_loss
            except ValueError:
                bound = math.nan
            if name and 0 <= bound <= 1:
                limits[name] = bound
            elif entry:
                raise GateError(
                    "benchmarks: expected names of tasks separated by commas, each with a bound of its own "
                    f"if wanted (ratchet_format, arc_easy=0.02); found {entry!r}"
                )
        return limits

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Case:
    """One held-out prompt judged on both sides: right or wrong, or a figure of which more is better."""

    policy_score: float
    reference_score: float
    slices: tuple[str, ...] = ()
    raters: tuple[str, ...] = ()
    parts: tuple[tuple[str, float, float], ...] = ()
    """Slices that only some of a prompt's pairs are in (the preferred answer is the longer one), with the figures of
    both sides on those."""

    def restrict_to_slice(self, name: str) -> Case:
        """The case by those of its pairs alone that are in a slice."""
        return next(
            (Case(own, other, (name,), self.raters) for part, own, other in self.parts if part == name), self
        )


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """One held-out answer with its value, in [0, 1], and how far the policy moved it.

    shift: log p(answer | prompt) of the policy minus that of its rival, per token. Not summed: a policy that only made
    every token less likely would then look better wherever people like short answers.
    """

    prompt: str
    value: float
    shift: float
    slices: tuple[str, ...] = ()
    raters: tuple[str, ...] = ()

    def restrict_to_slice(self, name: str) -> RatedAnswer:
        """The answer itself: it is in a slice as a whole."""
        return self


Item: TypeAlias = Case | RatedAnswer
"""One piece of held-out evidence of any kind."""


@dataclass(frozen=True)
class AnswerPair:
    """One prompt that both sides answered."""

    valid: bool
    other_valid: bool
    reward: float
    other_reward: float
    chars: int
    other_chars: int
    judged: bool = True
    """True if a reward can tell a good answer to this prompt from a bad one; what nobody judged shows form
    alone."""
    loops: bool = False
    """Repetition: the policy's answer is free text that says the same over and over."""
    written_valid: bool | None = None
    """Validity of the text it writes; None where no answer was chosen out of a list. Shown, asked by no rule."""
    other_written_valid: bool | None = None
    same: bool | None = None
    """True if both answers do the same; None of free text, and of prompts that are not held out."""
    said: bool = False
    """True if people, or the agent, said of any answer to the prompt that it is right or wrong."""
    other_said: bool = False
    """True if they said it of the other side's answer."""
    settled: bool = False
    """True if a right answer is known."""
    asked: bool = False
    """True if people said it because the queue asked, not by their own choice."""
    prompt_hash: str = ""


@dataclass(frozen=True)
class GoldenResult:
    """A decision an operator says must be right."""

    name: str
    passed: bool
    answer: str
    why: str = ""


@dataclass(frozen=True)
class BenchmarkCases:
    """A benchmark's items, each scored for the policy and for its base (as `other`), in [0, 1]."""

    metric: str = ""
    cases: Sequence[Case] = ()
    fault: str = ""
    """Reason that no result counts, with the command to run; empty where one does."""


@dataclass(frozen=True)
class GeneralAnswers:
    """Answers of a policy to general prompts (`rl.training.general`), beside those of its base."""

    kl: float
    """KL(policy || base), mean over the tokens of the base's answers, in nats."""
    plain_text: float
    """Share of the policy's answers that are plain text, in [0, 1]."""
    base_plain_text: float
    n: int
    """Prompts."""
    broken: Sequence[Mapping[str, str]] = ()
    """A few of the policy's answers that are not plain text though the base's are: {"prompt", "answer", "base"}."""

    @property
    def words(self) -> str:
        """The figures in a sentence."""
        return (
            f"Of {self.n} general prompts it answers {100 * self.plain_text:.0f} % in plain text, its base "
            f"{100 * self.base_plain_text:.0f} %; KL to the base {self.kl:.2f} nats per token."
        )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class JudgingEvidence:
    """Newest judging round of the policy against what it would replace."""

    round: int
    verdict: str
    share: WinShare
    words: str
    """The verdict in a sentence, with its figures."""
    ended: bool
    further: int | None
    """Answers of people until a verdict, about; None where the pairs that are left will not bring one."""
    minutes: int

    def as_dict(self) -> dict[str, Any]:
        """The figures of a report; value, low and high are the win share less one half."""
        share = self.share
        interval = {} if share.value is None else {
            "value": share.value - 0.5, "low": share.low - 0.5, "high": share.high - 0.5, "n": share.decided,
        }  # fmt: skip
        return {
            **interval, "round": self.round, "verdict": self.verdict, "ended": self.ended, "wins": share.wins,
            "losses": share.losses, "ties": share.ties, "confidence": share.confidence, "further": self.further,
            "minutes": self.minutes,
        }  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """Evidence of one evaluation: a policy and what it was compared to, on the same prompts."""

    against: str
    cases: Sequence[Case]
    """Pairs: whether each side held the preferred response for more likely."""
    answer_pairs: Sequence[AnswerPair] = ()
    kl: float | None = None
    """To the base model, nats per token of the policy's own greedy answers (k3); None where it was not measured."""
    written_gain: Difference | None = None
    """log p(policy) - log p(base) of what people wrote, nats per token, with its 95 % interval; None if not known."""
    good_chars: tuple[float, int] | None = None
    """Characters (geometric mean) of held-out answers that people wrote, chose or liked, and how many; None where there
    are none."""
    general: GeneralAnswers | None = None
    """Answers to general prompts; None where they were not asked: of the bundled model, of a linear policy."""
    golden: Sequence[GoldenResult] = ()
    off_policy: Difference | None = None
    """Estimated reward of the policy minus the champion's, from logged propensities; None where there are none."""
    attempt: int = 1
    """Number of this attempt on this holdout, from 1."""
    other_kinds: Mapping[str, Sequence[Item]] = field(default_factory=dict)
    """Evidence of the kinds beside pairs (rl.gates.evidence_kinds.KINDS)."""
    exclusions: Mapping[str, str] = field(default_factory=dict)
    """Kind -> why it may not carry the accuracy rule: a reward model judges what was trained on it."""

    near_identical: str = ""
    """Number of the agent's prompts that count as one with others, in words; empty where none do."""
    discrete: bool = False
    """True where two answers of the agent are the same or not; as it was when they were judged."""
    right_beside: tuple[float, float] | None = None
    """Shares of prompts that the policy and a classifier of each field answer as people wrote; None where answers have
    no fields or nobody knows."""
    fields: str = ""
    """Share of the fields that are right, in words; empty where answers have none."""
    judging: JudgingEvidence | None = None
    """Answers that people compared side by side; None without a round."""
    benchmarks: Mapping[str, BenchmarkCases] = field(default_factory=dict)
    """Listed task -> its newest result."""
    no_benchmarks: str = ""
    """Reason that benchmarks do not apply to this policy; empty where they do."""

    @property
    def open_prompts(self) -> list[str]:
        """Held-out prompts that both sides answer differently and whose right answer nobody knows: what would change
        the verdict."""
        return [one.prompt_hash for one in self.answer_pairs if one.same is False and not one.settled]

    def items(self, kind: str) -> Sequence[Item]:
        return self.cases if kind == PAIRS else self.other_kinds.get(kind, ())


@dataclass(frozen=True)
class RuleResult:
    """Result of one rule, and the figures it rests on."""

    rule: str
    outcome: str
    words: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    waits: bool = False
    """A refusal that more evidence may lift: it found nothing wrong beyond chance. The others found harm."""

    @property
    def passed(self) -> bool:
        return self.outcome != REFUSED

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "outcome": self.outcome,
            "words": self.words,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True)
class GateReport:
    """Every rule's verdict: the gate opens where none refuses."""

    stage: str
    against: str
    verdicts: tuple[RuleResult, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def refusals(self) -> list[RuleResult]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def harmful(self) -> bool:
        """True if a rule found harm, so that no more evidence is waited for."""
        return any(not verdict.waits for verdict in self.refusals)

    @property
    def reason(self) -> str:
        """The refusing rules' words; empty where the gate opens."""
        return "; ".join(verdict.words for verdict in self.refusals)

    def as_dict(self) -> dict[str, Any]:
        return {
            "to": self.stage,
            "against": self.against,
            "passed": self.passed,
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
        }
