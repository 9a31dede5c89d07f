"""Share of a policy's answers that people would like, estimated from their ratings of held-out answers.

Of a prompt to which somebody rated an answer that does what the policy's answer does, the verdict is known: the share
of its raters who liked it (chose it, wrote it, gave it a thumb up or a score above neutral). `rated answers` averages
these over clusters of near-identical prompts. It is the replay estimate of Li et al. 2011 (arXiv 1003.5956): without
bias where it is chance which answer to a prompt was shown and rated, too high where only good ones were. `least` and
`most` ask for no such assumption: every answer that nobody rated is disliked, or liked (Manski 1990).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl.gates.evidence_kinds import ASSUMPTIONS, RATED
from rl.statistics import mean_interval, wilson_interval
from rl.training.evaluate_answers import AnswerJudge, HeldOutPrompt

Verdicts = Mapping[int, float]
"""Number of a prompt -> share of raters who liked the answer to it, in [0, 1]; prompts without a verdict left out."""


def verdicts_on(prompts: Sequence[HeldOutPrompt], answers: Sequence[str], judge: AnswerJudge) -> Verdicts:
    """Verdicts of raters on the answers, or of ones that do the same."""
    found: dict[int, float] = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        done = judge.action(answer)
        liked = sum(judge.action(text) == done for text in [*prompt.liked, *prompt.demonstrations])
        disliked = sum(judge.action(text) == done for text in prompt.disliked)
        if liked + disliked:
            found[number] = liked / (liked + disliked)
    return found


def liked_share(prompts: Sequence[HeldOutPrompt], verdicts: Verdicts) -> dict[str, Any] | None:
    """{"value", "low", "high", "n", "of", "least", "most", "estimator", "assumes"}: the share with its 95 % interval
    over `n` clusters of prompts with a verdict, out of `of` that were answered; None without a verdict."""
    if not verdicts:
        return None
    known = _means(prompts, verdicts)
    everything = _means(prompts, dict.fromkeys(range(len(prompts)), 0.0))
    total, n = math.fsum(known.values()), len(known)
    if all(value in (0.0, 1.0) for value in known.values()):
        share = wilson_interval(round(total), n).as_dict()
    else:
        share = mean_interval(list(known.values()), bounds=(0.0, 1.0)).as_dict()
    of = len(everything)
    return {
        **share,
        "of": of,
        "least": total / of,
        "most": (total + of - n) / of,
        "estimator": RATED,
        "assumes": ASSUMPTIONS[RATED],
    }


def liked_difference(prompts: Sequence[HeldOutPrompt], own: Verdicts, other: Verdicts) -> dict[str, Any]:
    """Difference of the share to a rival's, over prompts on which both have a verdict: value, low, high, n."""
    both = {number: own[number] - other[number] for number in own.keys() & other.keys()}
    return mean_interval(list(_means(prompts, both).values()), bounds=(-1.0, 1.0)).as_dict()


def _means(prompts: Sequence[HeldOutPrompt], values: Mapping[int, float]) -> dict[str, float]:
    """The mean of each cluster of prompts; a prompt without a near-identical one is a cluster of its own."""
    groups: dict[str, list[float]] = {}
    for number, value in sorted(values.items()):
        name = prompts[number].row.get("cluster") or prompts[number].key
        groups.setdefault(name, []).append(value)
    return {name: math.fsum(group) / len(group) for name, group in groups.items()}
