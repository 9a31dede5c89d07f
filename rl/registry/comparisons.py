"""Two policies side by side: data, recipe, figures, and answers to the same held-out prompts.

Answers come from stored evaluations, from which erasure removes what it must; no model is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feedback.messages import Message
from rl.gates.evidence_kinds import KNOWN, LABELS, OUTCOMES, PAIRS
from rl.gates.headlines import headline_of, share_of
from rl.gates.report import StoredAnswer, StoredEvidence, StoredItem
from rl.models import Evaluation, Policy, TrainingRun

EXAMPLES = 8
"""Prompts whose answers are shown side by side."""


def policy_diff(left: Policy, right: Policy) -> dict[str, Any]:
    """Differences in data and recipe, figures, and answers of both to the same held-out prompts.

    {"left", "right", "data": {name: [left, right]}, "recipe": {...}, "figures": {...}, "answers": [{prompt, left,
    right}]}. answers is empty unless both were evaluated on the same prompts.
    """
    runs = {
        run.policy.pk: run
        for run in TrainingRun.objects.select_related("snapshot", "policy").filter(policy__in=[left, right])
    }
    return {
        "left": left.name,
        "right": right.name,
        "data": _different(*(_data(policy, runs.get(policy.pk)) for policy in (left, right))),
        "recipe": _different(*(_recipe(runs.get(policy.pk)) for policy in (left, right))),
        "figures": _different(*(_figures(policy) for policy in (left, right)), same_too=True),
        "answers": _answers(left, right),
    }


def _different(
    left: Mapping[str, object], right: Mapping[str, object], *, same_too: bool = False
) -> dict[str, list[object]]:
    names = [*left, *(name for name in right if name not in left)]
    return {
        name: [left.get(name), right.get(name)]
        for name in names
        if same_too or left.get(name) != right.get(name)
    }


def _data(policy: Policy, run: TrainingRun | None) -> dict[str, object]:
    snapshot = run.snapshot if run else None
    facts: dict[str, object] = {"ratings and comparisons": policy.feedback_count}
    if snapshot is not None:
        facts |= {f"{snapshot.kind}, {split}": count for split, count in snapshot.counts.items()}
        facts |= {
            f"left out, {reason.replace('_', ' ')}": count for reason, count in snapshot.left_out.items()
        }
        facts["simulated"] = f"{100 * snapshot.simulated_share:.1f} %"
        facts["snapshot"] = snapshot.pk
    return facts


def _recipe(run: TrainingRun | None) -> dict[str, object]:
    if run is None:
        return {}
    return {"method": run.method, "preset": run.config, "base model": run.base_model, **run.recipe}


def _figures(policy: Policy) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name, title in (("liked", "liked answers"), ("known_answer", "correct by the known answer")):
        if (share := share_of(policy.metrics, name)) is not None:
            figures[title] = share.percent + (f" [{share.interval}]" if share.interval else "")
    if (leading := headline_of(policy.metrics)) is not None and leading.kind != PAIRS:
        figures[leading.title.lower()] = leading.text + (f" [{leading.interval}]" if leading.interval else "")
    for name in ("preference_accuracy", "valid_rate", "average_reward"):
        share = share_of(policy.metrics, name)
        words = None
        if share is not None and name == "average_reward":
            known = share.low is not None and share.high is not None
            words = f"{share.value:.3f}" + (f" [{share.low:.3f} to {share.high:.3f}]" if known else "")
        elif share is not None:
            words = f"{share.percent}{f' [{share.interval}]' if share.interval else ''}"
        figures[name.replace("_", " ")] = words
    if leading is not None and leading.gain:
        figures["gain in its evaluation"] = (
            f"{leading.gain} over {policy.metrics.get('against')} [{leading.gain_interval}]"
        )
    figures["stage"] = str(policy.stage)
    return figures


def _evidence(policy: Policy) -> StoredEvidence:
    newest = Evaluation.objects.filter(policy=policy).exclude(evidence={}).order_by("-pk").first()
    found: StoredEvidence = newest.evidence if newest else {}
    return found


def _answers(left: Policy, right: Policy) -> list[dict[str, object]]:
    mine = {one["prompt_hash"]: one for one in _evidence(left).get("answers", [])}
    examples = []
    for other in _evidence(right).get("answers", []):
        one = mine.get(other["prompt_hash"])
        if one is not None and one["prompt_hash"]:
            examples.append(
                {
                    "prompt": other["messages"][-1]["content"],
                    "left": one["answer"],
                    "right": other["answer"],
                    "left_reward": one["reward"],
                    "right_reward": other["reward"],
                    "same": one["answer"].strip() == other["answer"].strip(),
                }
            )
    # different answers first
    return sorted(examples, key=lambda row: row["same"])[:EXAMPLES]


# --- Answers to the same held-out prompts ---


WIN, LOSS, TIE = "win", "loss", "tie"

CLOSE = 1e-9
"""Smaller differences of figures count as equal."""


@dataclass(frozen=True)
class HeldOutAnswer:
    """One held-out prompt with both answers."""

    messages: Sequence[Message]
    answer: str
    reference_answer: str
    valid: bool
    other_valid: bool
    outcome: str
    """WIN, LOSS or TIE of the policy."""
    words: str
    """Reason for the outcome."""

    @property
    def same(self) -> bool:
        return self.answer.strip() == self.reference_answer.strip()


def evaluation_newest_paired(policy: Policy) -> Evaluation | None:
    """The policy's newest evaluation with another side's answers."""
    return policy.evaluations.exclude(against="").exclude(evidence={}).order_by("-pk").first()


def answers_compared(evaluation: Evaluation) -> list[HeldOutAnswer]:
    """Both answers to each prompt: wins, then losses, then ties; different answers first.

    If known answers led the comparison, a prompt is won if only the policy's answer is right, as in the verdict. Else
    validity, ratings, tests or rewards of the answers decide; else the likelihoods of what people preferred.
    """
    leanings = _leanings(evaluation)
    known = evaluation.figures.get("carried_by") == KNOWN
    stored: StoredEvidence = evaluation.evidence
    found = [
        _answer_pair(one, leanings.get(one["prompt_hash"]), known=known) for one in stored.get("answers", ())
    ]
    order = {WIN: 0, LOSS: 1, TIE: 2}
    return sorted(found, key=lambda one: (order[one.outcome], one.same))


def _answer_pair(stored: StoredAnswer, leaning: float | None, *, known: bool) -> HeldOutAnswer:
    own, other = stored["reward"], stored["other_reward"]
    outcome, words = TIE, "no rating, reward or right answer distinguishes the two"
    if known:
        if leaning:
            outcome = WIN if leaning > 0 else LOSS
            words = "only its answer is right" if leaning > 0 else "only the other answer is right"
    elif stored["valid"] != stored["other_valid"]:
        outcome = WIN if stored["valid"] else LOSS
        words = "only one of the answers is valid"
    elif stored.get("judged") and abs(own - other) > CLOSE:
        outcome = WIN if own > other else LOSS
        place = "higher" if own > other else "lower"
        words = f"its answer is rated {place}: a mean reward of {own:.2g} against {other:.2g}"
    elif leaning:
        outcome = WIN if leaning > 0 else LOSS
        words = (
            "it gives the chosen answer a higher probability than the other policy does"
            if leaning > 0
            else "the other policy gives the chosen answer a higher probability"
        )
    return HeldOutAnswer(
        messages=stored["messages"],
        answer=stored["answer"],
        reference_answer=stored["other_answer"],
        valid=stored["valid"],
        other_valid=stored["other_valid"],
        outcome=outcome,
        words=words,
    )


def _leanings(evaluation: Evaluation) -> dict[str, float]:
    """Prompt -> above 0 if the leading evidence favours the policy, below 0 if its rival; ties are left out."""
    kind = evaluation.figures.get("carried_by", PAIRS)
    stored: StoredEvidence = evaluation.evidence
    items = stored.get("cases", ()) if kind == PAIRS else stored.get("others", {}).get(kind, ())
    sums: dict[str, list[float]] = {}
    for item in items:
        sums.setdefault(item["prompt_hash"], []).append(_preference_strength(kind, item))
    found = {prompt: math.fsum(values) for prompt, values in sums.items()}
    return {prompt: value for prompt, value in found.items() if abs(value) > CLOSE}


def _preference_strength(kind: str, item: StoredItem) -> float:
    if kind in (LABELS, OUTCOMES):
        # above 0: moved towards a liked answer, or away from a disliked one
        return (float(item["value"]) - 0.5) * float(item["shift"])
    return float(item["own"]) - float(item["other"])


def counts_of(answers: Iterable[HeldOutAnswer]) -> dict[str, int]:
    counts = dict.fromkeys((WIN, LOSS, TIE), 0)
    for one in answers:
        counts[one.outcome] += 1
    return counts
