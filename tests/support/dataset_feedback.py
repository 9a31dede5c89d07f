"""Rated answers to prompts that stand on a chosen side of the split."""

from typing import Any

from feedback.models import Decision, prompt_hash
from feedback.services import decision_record, rating_submit
from rl.datasets.feedback_types import Split
from tests.support.split_prompts import split_by_hash, stand


def decide(prompt: str, response: str, agent: str = "helper", **facts: Any) -> Decision:
    return decision_record(
        agent=agent, messages=[{"role": "user", "content": prompt}], response=response, **facts
    ).row


def rate(prompt: str, response: str, thumb: str, rater: str = "ann", **facts: Any) -> None:
    rating_submit(decision=decide(prompt, response, **facts), rater=rater, thumb=thumb)


def prompts_in(split: Split, count: int, agent: str = "helper") -> list[str]:
    """Prompts that stand there for good, always the same ones."""
    found = (
        f"question {i}"
        for i in range(10_000)
        if split_by_hash(prompt_hash(agent, [{"role": "user", "content": f"question {i}"}])) == split
    )
    prompts = [next(found) for _ in range(count)]
    for prompt in prompts:
        stand(agent, [{"role": "user", "content": prompt}], split)
    return prompts


def feed(train: int = 12, eval: int = 2, holdout: int = 3) -> None:
    """Two rated answers to each of so many prompts."""
    sides: dict[Split, int] = {"train": train, "eval": eval, "holdout": holdout}
    for split, count in sides.items():
        for prompt in prompts_in(split, count):
            rate(prompt, "yes", "up")
            rate(prompt, "no", "down")
