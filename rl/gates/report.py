"""Gate report: bounds, evidence on the same prompts, result of each rule. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypeAlias, TypedDict

from feedback.messages import Message
from rl.gates.evidence_kinds import PAIRS, Figures
from rl.statistics import Difference
from rl.statistics.sequential import WinShare

PASSED, REFUSED, NOT_APPLICABLE = "passed", "refused", "not_applicable"

NO_FIGURES: Figures = {}


OLDER, NEWER = "feedback:older", "feedback:newer"
"""Slices of held-out prompts: with feedback older than the champion, or newer."""

RULE_TITLES = {
    "evidence": "Enough held-out prompts",
    "accuracy": "Better than what it replaces",
    "compared": "Answers were compared",
    "other_evidence": "Not worse by other kinds of evidence",
    "ratings": "Ratings are not only complaints",
    "raters": "Gain does not depend on one rater",
    "reward": "Reward does not fall",
    "fields": "Each field as right as a classifier",
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
"""Rule -> its title on pages."""


class GateError(ValueError):
    """A bound outside its range; the message names it and what is allowed."""


@dataclass(frozen=True)
class GateBounds:
    """Bounds of a gate. Differences are of shares in [0, 1], candidate minus champion."""

    min_evidence: int = 30
    """Fewest held-out prompts on which both were judged."""
    alpha: float = 0.05
    """Chance that a policy no better than the champion passes, over all attempts on one holdout."""
    margin: float = 0.0
    """The lower confidence bound of the gain must exceed this."""
    not_inferior: float = 0.0
    """A loss of this share of right answers or more must be excluded; no gain is asked for. 0: a gain is asked for."""
    max_reward_loss: float = 0.2
    """A larger fall of the mean reward must be excluded (one-sided interval, 90 %)."""
    max_invalid_gain: float = 0.1
    """A larger fall of the share of valid answers must be excluded (one-sided interval, 90 %)."""
    max_kl: float = 2.0
    """Nats per token of its own answers, to its reference, beyond what people wrote."""
    max_general_kl: float = 1.0
    """Nats per token to the base model on its answers to general prompts, unrelated to the agent."""
    max_general_loss: float = 0.2
    """Largest fall of the share of general prompts answered in plain text."""
    max_slice_loss: float = 0.1
    """Largest loss of accuracy in a slice, if it is beyond chance."""
    min_slice: int = 10
    """Fewest prompts of a slice that is judged."""
    max_length_ratio: float = 1.5
    """Largest ratio of mean answer lengths (geometric) to the champion's; its inverse is the smallest."""
    max_rater_share: float = 0.2
    """The gain must not depend on a rater with a larger share of the held-out prompts."""
    max_off_policy_loss: float = 0.05
    """Largest fall of the off-policy estimate of the reward below the champion's."""
    benchmarks: str = ""
    """Required benchmark tasks, separated by commas; `name=0.02` sets a task's own bound. Empty: none."""
    max_benchmark_loss: float = 0.05
    """A larger fall of a listed benchmark below its base must be excluded (one-sided interval, 90 %)."""

    def __post_init__(self) -> None:
        if self.min_evidence < 1 or self.min_slice < 1:
            raise GateError("min_evidence and min_slice must be at least 1")
        if not 0 < self.alpha < 0.5:
            raise GateError(f"alpha must be above 0 and below 0.5, found {self.alpha!r}")
        if not self.not_inferior < 0.5:
            raise GateError(f"not_inferior must be below 0.5, found {self.not_inferior!r}")
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
        """Listed task -> its bound, in [0, 1]. Raises GateError."""
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


@dataclass(frozen=True, slots=True)
class Case:
    """One held-out prompt judged on both sides: right (1) or wrong (0), or a figure where more is better."""

    policy_score: float
    reference_score: float
    slices: tuple[str, ...] = ()
    raters: tuple[str, ...] = ()
    parts: tuple[tuple[str, float, float], ...] = ()
    """(slice, policy_score, reference_score) of slices that hold only some of a prompt's pairs."""

    def restrict_to_slice(self, name: str) -> Case:
        """The case reduced to its pairs in a slice."""
        return next(
            (Case(own, other, (name,), self.raters) for part, own, other in self.parts if part == name), self
        )


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """One held-out answer with its rated value in [0, 1], and how far the policy moved it.

    shift: log p(answer | prompt) of the policy minus that of its rival, per token. A sum would reward a policy that
    made every token less likely wherever people like short answers.
    """

    prompt: str
    value: float
    shift: float
    slices: tuple[str, ...] = ()
    raters: tuple[str, ...] = ()

    def restrict_to_slice(self, name: str) -> RatedAnswer:
        """The answer itself: a slice holds it as a whole."""
        return self


Item: TypeAlias = Case | RatedAnswer
"""One piece of held-out evidence."""


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
    """True if a reward can tell good answers to this prompt from bad ones, beyond their form."""
    loops: bool = False
    """True if the policy's answer is repetitive free text."""
    written_valid: bool | None = None
    """Validity of its freely written text, shown only; None if no answer was chosen from a list."""
    other_written_valid: bool | None = None
    same: bool | None = None
    """True if both answers do the same; None for free text and prompts that are not held out."""
    said: bool = False
    """True if any answer to the prompt was called right or wrong, by people or the agent."""
    other_said: bool = False
    """True if the rival's answer was."""
    settled: bool = False
    """True if a right answer is known."""
    asked: bool = False
    """True if people rated it because the queue asked, not by choice."""
    prompt_hash: str = ""


@dataclass(frozen=True)
class GoldenResult:
    """Result of a golden case: a decision that an operator requires to be right."""

    name: str
    passed: bool
    answer: str
    why: str = ""


@dataclass(frozen=True)
class BenchmarkCases:
    """A benchmark's items, each scored in [0, 1] for the policy and for its base."""

    metric: str = ""
    cases: Sequence[Case] = ()
    fault: str = ""
    """Why no result counts, with the command to run; empty if one does."""


@dataclass(frozen=True)
class GeneralAnswers:
    """Answers of a policy and its base to general prompts (`rl.training.general`)."""

    kl: float
    """KL(policy || base), mean over the tokens of the base's answers, in nats."""
    plain_text: float
    """Share of the policy's answers that are plain text, in [0, 1]."""
    base_plain_text: float
    n: int
    """Number of prompts."""
    broken: Sequence[Mapping[str, str]] = ()
    """Some of its answers that are not plain text though the base's are: {"prompt", "answer", "base"}."""

    @property
    def words(self) -> str:
        return (
            f"Of {self.n} general prompts it answers {100 * self.plain_text:.0f} % in plain text, its base "
            f"{100 * self.base_plain_text:.0f} %; KL to the base {self.kl:.2f} nats per token."
        )


@dataclass(frozen=True)
class JudgingEvidence:
    """Newest judging round of the policy against its rival."""

    round: int
    verdict: str
    share: WinShare
    words: str
    """The verdict in a sentence, with its figures."""
    ended: bool
    further: int | None
    """About how many more answers bring a verdict; None if the remaining pairs cannot."""
    minutes: int

    def as_dict(self) -> dict[str, Any]:
        """The figures of a report; value, low and high are the win share minus 1/2."""
        share = self.share
        interval = (
            {}
            if share.value is None
            else {
                "value": share.value - 0.5,
                "low": share.low - 0.5,
                "high": share.high - 0.5,
                "n": share.decided,
            }
        )
        return {
            **interval,
            "round": self.round,
            "verdict": self.verdict,
            "ended": self.ended,
            "wins": share.wins,
            "losses": share.losses,
            "ties": share.ties,
            "confidence": share.confidence,
            "further": self.further,
            "minutes": self.minutes,
        }


@dataclass(frozen=True)
class Evidence:
    """Evidence of one evaluation: a policy and its rival on the same prompts."""

    against: str
    cases: Sequence[Case]
    """Pairs: whether each side found the preferred response more likely."""
    answer_pairs: Sequence[AnswerPair] = ()
    kl: float | None = None
    """KL to the reference, nats per token of the policy's greedy answers (k3); None if not measured."""
    written_gain: Difference | None = None
    """log p(policy) - log p(base) of what people wrote, nats per token, 95 % interval; None if unknown."""
    good_chars: tuple[float, int] | None = None
    """(geometric mean characters, count) of held-out answers that people wrote, chose or liked; None without any."""
    general: GeneralAnswers | None = None
    """Answers to general prompts; None if not asked (bundled model, linear policy)."""
    golden: Sequence[GoldenResult] = ()
    off_policy: Difference | None = None
    """Off-policy estimate of its reward minus the champion's; None without propensities."""
    attempt: int = 1
    """Number of this attempt on this holdout, from 1."""
    other_kinds: Mapping[str, Sequence[Item]] = field(default_factory=dict)
    """Kind -> evidence, of all kinds except pairs."""
    exclusions: Mapping[str, str] = field(default_factory=dict)
    """Kind -> why it may not lead, e.g. a reward model that judges its own training signal."""

    near_identical: str = ""
    """Number of the agent's prompts that count as one with others, in words; empty without any."""
    discrete: bool = False
    """True if the agent's answers were discrete when they were judged."""
    right_beside: tuple[float, float] | None = None
    """Shares of prompts that the policy and a classifier of each field answer as people wrote; None if unknown."""
    fields: str = ""
    """Share of right fields, in words; empty if answers have none."""
    judging: JudgingEvidence | None = None
    """Side-by-side comparisons by people; None without a round."""
    benchmarks: Mapping[str, BenchmarkCases] = field(default_factory=dict)
    """Listed task -> its newest result."""
    no_benchmarks: str = ""
    """Why benchmarks do not apply to this policy; empty if they do."""

    @property
    def open_prompts(self) -> list[str]:
        """Held-out prompts that both sides answer differently and whose right answer is unknown."""
        return [one.prompt_hash for one in self.answer_pairs if one.same is False and not one.settled]

    def items(self, kind: str) -> Sequence[Item]:
        return self.cases if kind == PAIRS else self.other_kinds.get(kind, ())


@dataclass(frozen=True)
class RuleResult:
    """Result of one rule, with its figures."""

    outcome: str
    words: str
    figures: Figures = field(default_factory=dict)
    waits: bool = False
    """True of a refusal that more evidence may lift; false if it found harm beyond chance."""
    rule: str = ""
    """Name of the rule; `gate_judge` fills it in."""

    @property
    def passed(self) -> bool:
        return self.outcome != REFUSED


def passed(words: str, figures: Figures = NO_FIGURES) -> RuleResult:
    return RuleResult(PASSED, words, figures)


def refused(words: str, figures: Figures = NO_FIGURES, *, waits: bool = False) -> RuleResult:
    return RuleResult(REFUSED, words, figures, waits)


def not_applicable(words: str) -> RuleResult:
    return RuleResult(NOT_APPLICABLE, words)


@dataclass(frozen=True)
class GateReport:
    """All rules' results: the gate opens if none refuses."""

    to: str
    """Stage that the gate opens to."""
    against: str
    verdicts: tuple[RuleResult, ...]

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> GateReport | None:
        """The report that a policy's event stores (`dump`); None where it stores none."""
        if "verdicts" not in stored:
            return None
        return cls(stored["to"], stored["against"], tuple(RuleResult(**one) for one in stored["verdicts"]))

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def refusals(self) -> list[RuleResult]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def harmful(self) -> bool:
        """True if a rule found harm, so that more evidence does not help."""
        return any(not verdict.waits for verdict in self.refusals)

    @property
    def reason(self) -> str:
        """The refusing rules' words; empty if the gate opens."""
        return "; ".join(verdict.words for verdict in self.refusals)

    def dump(self) -> dict[str, object]:
        """The report as JSON."""
        return {**dataclasses.asdict(self), "passed": self.passed}


class StoredItem(TypedDict):
    """One item of evidence: a case has `own` and `other`; a rated answer also has `value` and `shift`."""

    prompt_hash: str
    cluster: NotRequired[str]
    """Cluster of near-identical prompts; empty for a prompt of its own."""
    slices: list[str]
    raters: NotRequired[list[str]]
    own: float
    """Score of the policy; of a rated answer its shift from the policy's reference, nats per token."""
    other: float
    value: NotRequired[float]
    """Rating in [0, 1]."""
    shift: NotRequired[float]
    """own - other of a rated answer."""


class StoredAnswer(TypedDict):
    """Both sides' answers to one held-out prompt; fields as in `rl.gates.report.AnswerPair`."""

    prompt_hash: str
    messages: Sequence[Message]
    answer: str
    other_answer: str
    valid: bool
    other_valid: bool
    reward: float
    other_reward: float
    judged: NotRequired[bool]
    loops: NotRequired[bool]
    written_valid: NotRequired[bool]
    other_written_valid: NotRequired[bool]
    same: NotRequired[bool]
    said: NotRequired[bool]
    other_said: NotRequired[bool]
    settled: NotRequired[bool]


class StoredEvidence(TypedDict, total=False):
    """`Evaluation.evidence`; {} if nothing was compared."""

    discrete: bool
    cases: list[StoredItem]
    """Of pairs."""
    others: dict[str, list[StoredItem]]
    """Kind -> items, of all kinds except pairs."""
    barred: dict[str, str]
    answers: list[StoredAnswer]
    kl: float
    written_gain: dict[str, float]
    general: dict[str, Any]
    good_chars: Figures
    golden: list[dict[str, Any]]
    off_policy: dict[str, float]
