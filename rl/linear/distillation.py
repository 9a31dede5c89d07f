"""Demonstrations by a linear classifier: what a language model is taught where it cannot read the feedback itself.

A small base model knows nothing of an agent's fields, and learns little from which of two answers was preferred, or
from one thumb; from an answer to each prompt it learns much. The classifier hears the feedback and says the answer
(distillation with hard labels, after Hinton, Vinyals and Dean 2015). Pure: no Django, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.agents.base import Agent
from rl.linear.fit import fit
from rl.linear.model import LinearPolicy, LinearPolicyError
from rl.linear.rows import choices_of


@dataclass(frozen=True)
class DistilledDemonstrations:
    """Demonstrations for both sides of a training, and how they came about."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    note: str


def rows_taught(
    train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]], agent: Agent, *, seed: int = 42
) -> DistilledDemonstrations:
    """The answer of a classifier to each prompt of some pairs or scored answers.

    train: rows whose prompts the language model is taught. held_out: rows of the eval split, on which its training is
    watched; the classifier learns from both, as what is watched is how well its answers are learnt, and holds its own
    choice of features by cross-validation. Raises LinearRefused for answers that are no choice.
    """
    found = fit([*train, *held_out], agent, seed=seed)
    shown = list(_classifier_demonstrations(train, found.policy, agent))
    right = found.metrics.get("cv_accuracy")
    sure = "" if right is None else f", right about {right:.0%} of those it was not shown"
    learnt = f"{found.policy.facts['rows']:,} {found.policy.facts['feedback']}"
    return DistilledDemonstrations(
        shown,
        list(_classifier_demonstrations(held_out, found.policy, agent)),
        f"taught by a linear classifier that learnt from {learnt}{sure}: its answer to each of "
        f"{len(shown):,} prompts is the demonstration",
    )


def _classifier_demonstrations(
    rows: Iterable[Mapping[str, Any]], policy: LinearPolicy, agent: Agent
) -> Iterable[dict[str, Any]]:
    """One demonstration for each prompt; none where the classifier knows no answer that the prompt allows."""
    seen: set[str] = set()
    for row in rows:
        choices = choices_of([row], agent).rows
        if not choices or choices[0].group in seen:
            continue
        seen.add(choices[0].group)
        try:
            options = list(choices[0].options) or policy.options(row["prompt"])
        except LinearPolicyError:
            continue
        scores = policy.scores(row["prompt"], options)
        best = options[max(range(len(options)), key=scores.__getitem__)]
        yield {**{name: row[name] for name in ROW_COLUMNS if name in row}, "completion": best}


ROW_COLUMNS = ("prompt", "prompt_hash", "state", "facts")
"""Columns of a row that its demonstration has too."""
