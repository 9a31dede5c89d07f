"""Quick runs of PPO and GRPO on a tiny model: prompts, a reward, and trainers that end in a folder of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.rewards.base import RewardSample, RewardValue
from tests.support.tiny_models import HARDWARE

ROWS = [
    {"prompt": [{"role": "user", "content": f"how did revenue change over week {i}"}], "state": {"week": i}}
    for i in range(12)
]


class Length:
    """Likes short answers: 2 for one token, less with each."""

    name = "short"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(max(-2.0, 2.0 - 0.5 * sample.facts["tokens"])) for sample in samples]


def trainers(kind: Callable[..., Any], recipe: Any, base: Path, home: Path) -> Callable[..., Any]:
    """Makes trainers of a kind: `make("folder", reward=..., listener=..., resume=..., knob=value)`."""

    def make(folder: str = "run", *, reward: Any = None, **more: Any) -> Any:
        options = {name: more.pop(name) for name in ("listener", "resume") if name in more}
        return kind(
            recipe.with_knobs(**more),
            str(base),
            output_dir=home / folder,
            agent="assistant",
            hardware=HARDWARE,
            rewards=[reward or Length()],
            **options,
        )

    return make
