"""The leading figure of an evaluation and its sentences, as pages, cards and commands show them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from rl.gates.evidence_kinds import (
    ASSUMPTIONS,
    CORRECTIONS,
    KNOWN,
    LABELS,
    OFF_POLICY,
    OUTCOMES,
    PAIRS,
    REWARDS,
    TESTS,
    Figures,
)

TITLES = {
    PAIRS: "Preference accuracy",
    LABELS: "Concordance with ratings",
    CORRECTIONS: "Agreement with what people wrote",
    TESTS: "Tests passed",
    KNOWN: "Correct by the known answer",
    OUTCOMES: "Concordance with outcomes",
    REWARDS: "Reward of its answers",
}
"""Kind of evidence -> name of its figure."""

EXPLANATIONS = {
    PAIRS: "share of held-out pairs whose chosen answer the policy finds more likely than the rejected one, "
    "each prompt with one vote",
    LABELS: (
        "of two held-out answers, how often it raised the probability of the better rated one more than "
        "the policy it is compared with; 50 % is chance"
    ),
    CORRECTIONS: "how well its answers agree with held-out answers that people wrote",
    TESTS: "share of held-out prompts whose tests its answers pass",
    KNOWN: "share of held-out prompts whose known answer it gives",
    OUTCOMES: "of two held-out answers, how often it raised the probability of the one with the higher "
    "reward more than the policy it is compared with; 50 % is chance",
    REWARDS: "mean reward of its answers to held-out prompts",
}
"""Kind of evidence -> meaning of its figure."""


def headline(figures: Figures) -> dict[str, Any] | None:
    """{"kind", "title", "unit", "value", "low", "high", "n", "against": {...}} of an evaluation's figures; None without
    any.

    unit: `points` for a share in [0, 1], else the figure's unit.
    """
    kind = figures.get("carried_by", PAIRS)
    comparison = figures.get("comparison") or {}
    evidence = (figures.get("evidence") or {}).get(kind, {})
    against: Figures | None
    if kind == PAIRS:
        figure, against = figures.get("preference_accuracy"), comparison.get("preference_accuracy")
    elif kind in (LABELS, OUTCOMES):
        figure, against = evidence.get("concordance"), {"value": 0.5} if comparison else None
    else:
        figure = evidence.get("own")
        against = {"value": evidence["against_value"]} if "against_value" in evidence else None
    if not isinstance(figure, Mapping) or figure.get("value") is None:
        return None
    return {
        "kind": kind,
        "title": TITLES[kind],
        "unit": evidence.get("unit", "points"),
        **figure,
        **({"against": dict(against)} if against else {}),
    }


def liked_of(figures: Figures) -> dict[str, Any] | None:
    """The share of its answers that people would like; None if nobody rated one of them.

    Keys: value, low, high, n, estimator, assumes, against, difference, words; for `rated answers` also of, least, most.
    The off-policy estimate if recorded propensities and ratings allow one without a warning; else the ratings of equal
    held-out answers (`rl.training.held_out`).
    """
    comparison = figures.get("comparison") or {}
    log = figures.get("off_policy") or {}
    best = log.get("doubly_robust") or {}
    if log.get("reward") == "score" and best.get("low") is not None and not log["overlap"]["warnings"]:
        theirs = (log.get("against") or {}).get("doubly_robust")
        shares = {
            **{part: best[part] for part in ("value", "low", "high")},
            "n": log["decisions"],
            "estimator": OFF_POLICY,
            "assumes": ASSUMPTIONS[OFF_POLICY],
            "against": theirs,
            "difference": log.get("difference"),
        }
    elif figures.get("liked"):
        shares = {
            **figures["liked"],
            "against": comparison.get("liked"),
            "difference": comparison.get("liked_difference"),
        }
    else:
        return None
    return shares | {"words": _liked_words(shares, comparison.get("against", "the other"))}


def _liked_words(found: Figures, against: str) -> str:
    words = f"People would like {_share(found)} of its answers"
    if (theirs := found.get("against")) and theirs.get("value") is not None:
        words += f", {_share(theirs)} of {against}'s"
    if found["estimator"] == OFF_POLICY:
        return (
            f"{words} (off-policy estimate from {found['n']:,} rated choices, assuming that "
            f"{found['assumes']})."
        )
    words += (
        f" ({found['n']:,} of its {found['of']:,} answers are rated; assuming that {found['assumes']}; "
        f"without that assumption {100 * found['least']:.1f} % to {100 * found['most']:.1f} %)"
    )
    return f"{words}."


def right_answer_figure(figures: Figures) -> dict[str, Any] | None:
    """Share of prompts with the known right answer: value, low, high, n, against, difference, words; None if none is
    known.

    Held-out prompts only, if the evidence kind `known` has any.
    """
    comparison = figures.get("comparison") or {}
    kind = (figures.get("evidence") or {}).get(KNOWN) or {}
    own = kind.get("own") or figures.get("ground_truth")
    if not own or own.get("value") is None:
        return None
    figure = dict(own)
    words = f"Correct by the known answer in {_share(own)} of {own['n']:,} prompts"
    theirs = {"value": kind["against_value"]} if "against_value" in kind else comparison.get("ground_truth")
    if comparison and theirs and theirs.get("value") is not None:
        figure |= {"against": theirs, "difference": kind.get("difference")}
        words += f", {comparison['against']} in {_share(theirs)}"
    if figure.get("difference"):
        gain = figure["difference"]
        words += (
            f", a paired difference of {100 * gain['value']:+.1f} points [{100 * gain['low']:+.1f}, "
            f"{100 * gain['high']:+.1f}]"
        )
    return figure | {"words": f"{words}."}


def coverage_text(figures: Figures) -> str:
    """Held-out prompts that the figures leave out, in a sentence; empty where they leave out none."""
    found = figures.get("coverage") or {}
    words = []
    if found.get("unanswered"):
        words.append(
            f"{found['unanswered']:,} of {found['of']:,} held-out prompts are left out: {found['side']} has no answer "
            "to them."
        )
    if found.get("unasked"):
        words.append(f"{found['unasked']:,} further prompts with a known answer were not asked.")
    return " ".join(words)


def fields_text(figures: Figures) -> str:
    """Share of right fields in a sentence; empty if answers have no fields."""
    fields = fields_of(figures)
    if not fields:
        return ""
    whole = ((figures.get("evidence") or {}).get(CORRECTIONS) or {}).get("own")
    words = f"Of the fields of what people wrote {_share(fields['own'])} are right"
    if "against" in fields:
        words += f", {_share(fields['against'])} of {(figures.get('comparison') or {}).get('against', 'the other')}'s"
    if whole:
        words += f"; all fields at once in {_share(whole)} of {whole['n']:,} prompts"
    return f"{words}."


def fields_of(figures: Figures) -> Figures:
    """An evaluation's figures of fields, by side; empty if answers have none."""
    return ((figures.get("evidence") or {}).get(CORRECTIONS) or {}).get("fields") or {}


def right_of_classifier(figures: Figures) -> tuple[float, float] | None:
    """Shares of prompts that a policy and a classifier of each field answer as people wrote; None if unknown."""
    baseline = ((figures.get("baseline") or {}).get("evidence") or {}).get(CORRECTIONS) or {}
    own = ((figures.get("evidence") or {}).get(CORRECTIONS) or {}).get("own")
    if not fields_of(figures) or not own or not baseline.get("own"):
        return None
    return own["value"], baseline["own"]["value"]


def _share(found: Figures) -> str:
    return _amount({**found, "unit": "points"})


def classifier_ahead(figures: Figures) -> str:
    """That a simple classifier of the same rows does better than the policy, with both figures; empty otherwise."""
    baseline = figures.get("baseline") or {}
    found = headline(baseline)
    own = headline(baseline.get("policy") or {}) or headline(figures)
    if found is None or own is None or own["kind"] != found["kind"] or own["value"] >= found["value"]:
        return ""
    other, mine = (_amount({**one, "low": None}) for one in (found, own))
    return f"a simple classifier of the same ratings does better ({other}, this policy {mine})"


def baseline_text(figures: Figures) -> str:
    """Result of a simple classifier of the same training rows, in a sentence; empty without one."""
    baseline = figures.get("baseline") or {}
    if "refused" in baseline:
        return f"No simple classifier to compare with: {baseline['refused']}."
    leading = headline(baseline)
    if leading is None or "trained_on" not in baseline:
        return ""
    rows = baseline["trained_on"]["rows"]
    words = (
        f"A simple classifier of the same {rows:,} training rows gets {_amount(leading)} "
        f"{TITLES[leading['kind']].lower()}"
    )
    if (own := headline(baseline.get("policy") or {})) is not None:
        words += f", the policy by the same measure {_amount(own)}"
    reward, apart = baseline.get("average_reward"), baseline.get("average_reward_difference")
    if reward and reward.get("low") is not None and apart and apart.get("low") is not None:
        words += (
            f". Average reward of the classifier's answers: {reward['value']:.3f} [{reward['low']:.3f}, "
            f"{reward['high']:.3f}] (1 liked, 0.5 not rated, 0 disliked); the policy's is "
            f"{abs(apart['value']):.3f} {'more' if apart['value'] >= 0 else 'less'} (difference "
            f"{apart['low']:+.3f} to {apart['high']:+.3f})"
        )
    return f"{words}."


def _amount(found: Figures) -> str:
    scale, form = (100.0, ".1f") if found["unit"] == "points" else (1.0, ".3f")
    unit = " %" if found["unit"] == "points" else ""
    value = f"{format(scale * found['value'], form)}{unit}"
    if found.get("low") is None:
        return value
    return f"{value} [{format(scale * found['low'], form)}, {format(scale * found['high'], form)}]"


# --- Figures for pages ---


BAR_WIDTH = 300
"""Width of a drawn interval, in drawing units."""


class IntervalBar(NamedTuple):
    """A share with its interval in units of BAR_WIDTH."""

    dot: float
    start: float
    width: float


@dataclass(frozen=True)
class Share:
    """A share from 0 to 1 with its 95 % interval, if known."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @property
    def percent(self) -> str:
        return f"{100 * self.value:.1f}\u202f%"  # a narrow space that does not break

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}"

    @property
    def bar(self) -> IntervalBar:
        """Value and interval on a scale of BAR_WIDTH from 0 to 1."""
        low, high = (self.low, self.high) if self.low is not None and self.high is not None else (0.0, 0.0)
        return IntervalBar(
            dot=round(BAR_WIDTH * self.value, 1),
            start=round(BAR_WIDTH * low, 1),
            width=round(BAR_WIDTH * (high - low), 1),
        )

    @property
    def points(self) -> str:
        """A difference of shares in percentage points, with its sign."""
        return f"{100 * self.value:+.1f}"

    @property
    def points_interval(self) -> str:
        """Its interval in percentage points, with signs."""
        if self.low is None or self.high is None:
            return ""
        return f"{100 * self.low:+.1f} to {100 * self.high:+.1f}"


def share_of(figures: Figures, name: str) -> Share | None:
    """A stored share, either a number or {value, low, high, n}; None if absent."""
    found = figures.get(name)
    if isinstance(found, Mapping):
        if not is_number(found.get("value")):
            return None
        return Share(found["value"], found.get("low"), found.get("high"), found.get("n"))
    return Share(float(found)) if is_number(found) else None


@dataclass(frozen=True)
class Headline:
    """The leading figure of an evaluation, and the policy's gain in it."""

    kind: str
    title: str
    explanation: str
    unit: str
    """`points` for a share, else the figure's unit."""
    figure: Share
    against: Share | None
    difference: Share | None
    confidence: float
    """Confidence of the difference's interval: the gate's."""

    @property
    def share(self) -> Share | None:
        """The figure if it is a share and can be drawn."""
        return self.figure if self.unit == "points" else None

    @property
    def text(self) -> str:
        return self._amount(self.figure.value)

    @property
    def of(self) -> str:
        return "held-out prompts"

    @property
    def interval(self) -> str:
        if self.figure.low is None or self.figure.high is None:
            return ""
        if self.unit == "points":
            return self.figure.interval
        return f"{self.figure.low:.3f} to {self.figure.high:.3f}"

    @property
    def against_text(self) -> str:
        return self._amount(self.against.value) if self.against else ""

    @property
    def gain(self) -> str:
        if self.difference is None:
            return ""
        if self.unit == "points":
            return f"{self.difference.points} points"
        return f"{self.difference.value:+.3f} {self.unit}"

    @property
    def gain_interval(self) -> str:
        """The interval of the gain, with its confidence unless that is 95 %."""
        found = self.difference
        if found is None or found.low is None or found.high is None:
            return ""
        both = found.points_interval if self.unit == "points" else f"{found.low:+.3f} to {found.high:+.3f}"
        if abs(self.confidence - 0.95) < 1e-9:
            return both
        return f"{both}, {100 * self.confidence:.1f}\u202f% interval"

    def _amount(self, value: float) -> str:
        return Share(value).percent if self.unit == "points" else f"{value:.3f} {self.unit}"


def headline_of(metrics: Figures) -> Headline | None:
    """The leading figure of a policy's metrics; the preference accuracy of metrics without a headline."""
    found = metrics.get("headline")
    entry = found if isinstance(found, Mapping) else {}
    kind = entry.get("kind", PAIRS)
    figure = share_of(metrics, "headline") or share_of(metrics, "preference_accuracy")
    if figure is None:
        return None
    against = share_of(entry, "against") if entry else share_of(metrics, "against_preference_accuracy")
    gated = metrics.get("difference")
    confidence = gated.get("confidence", 0.95) if isinstance(gated, Mapping) else 0.95
    return Headline(
        kind=kind,
        title=TITLES[kind],
        explanation=EXPLANATIONS[kind],
        unit=entry.get("unit", "points"),
        figure=figure,
        against=against,
        difference=share_of(metrics, "difference"),
        confidence=confidence,
    )


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
