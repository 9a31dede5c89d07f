"""Diff of two policies: what they learnt from, how, what they score, what they answer."""

from __future__ import annotations

from typing import Any

from rl.gates.evidence_kinds import PAIRS
from rl.gates.headlines import headline_of, share_of
from rl.models import Evaluation, Policy, TrainingRun

EXAMPLES = 8
"""Prompts whose answers are shown side by side."""


def policy_diff(left: Policy, right: Policy) -> dict[str, Any]:
    """Data, recipe and figures where they differ, and answers of both to the same held-out prompts.

    {"left", "right", "data": {name: [left, right]}, "recipe": {...}, "figures": {...}, "answers": [{prompt, left,
    right}]}; answers are there where both were evaluated on the same prompts.
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
    left: dict[str, Any], right: dict[str, Any], *, same_too: bool = False
) -> dict[str, list[Any]]:
    names = [*left, *(name for name in right if name not in left)]
    return {
        name: [left.get(name), right.get(name)]
        for name in names
        if same_too or left.get(name) != right.get(name)
    }


def _data(policy: Policy, run: TrainingRun | None) -> dict[str, Any]:
    snapshot = run.snapshot if run else None
    facts: dict[str, Any] = {"ratings and comparisons": policy.feedback_count}
    if snapshot is not None:
        facts |= {f"{snapshot.kind}, {split}": count for split, count in snapshot.counts.items()}
        facts |= {
            f"left out, {reason.replace('_', ' ')}": count for reason, count in snapshot.left_out.items()
        }
        facts["simulated"] = f"{100 * snapshot.simulated_share:.1f} %"
        facts["snapshot"] = snapshot.pk
    return facts


def _recipe(run: TrainingRun | None) -> dict[str, Any]:
    if run is None:
        return {}
    return {"method": run.method, "preset": run.config, "base model": run.base_model, **run.recipe}


def _figures(policy: Policy) -> dict[str, Any]:
    figures: dict[str, Any] = {}
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


def _evidence(policy: Policy) -> dict[str, Any]:
    newest = Evaluation.objects.filter(policy=policy).exclude(evidence={}).order_by("-pk").first()
    return newest.evidence if newest else {}


def _answers(left: Policy, right: Policy) -> list[dict[str, Any]]:
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
                    "left_reward": one.get("reward"),
                    "right_reward": other.get("reward"),
                    "same": one["answer"].strip() == other["answer"].strip(),
                }
            )
    # where they differ first: that is what one looks for
    return sorted(examples, key=lambda row: row["same"])[:EXAMPLES]
