"""Quick runs of DPO on a tiny model: recipe, hardware, pairs, and a listener that notes what a run tells it."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from rl.agents.base import ChoiceAgent
from rl.recipes import DPORecipe
from rl.training.dpo import DPOTrainer
from rl.training.result import Silent
from tests.support.tiny_models import HARDWARE as HARDWARE

QUICK = DPORecipe(
    batch_size=4,
    learning_rate=5e-3,
    lora_r=4,
    lora_alpha=8,
    max_length=96,
    max_completion_length=32,
    logging_steps=1,
    save_steps=100,
    warmup_ratio=0.0,
)


class ListenerCallback(Silent):
    """Writes down what a run tells it; stops or dies after a given step."""

    def __init__(self, stop_after: int = 10**9, die_after: int = 10**9) -> None:
        self.stop_after, self.die_after = stop_after, die_after
        self.total = 0
        self.steps: list[int] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.notes: list[str] = []

    def on_start(self, total_steps: int) -> None:
        self.total = total_steps

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    def on_step(self, step: int, total: int) -> None:
        self.steps.append(step)
        if step >= self.die_after:
            raise ConnectionError("the machine went away")

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def should_stop(self) -> bool:
        return bool(self.steps) and self.steps[-1] >= self.stop_after


def some_pairs(
    count: int, prefer: Callable[[Random], bool] = lambda _: True, seed: int = 0
) -> list[dict[str, Any]]:
    """Prompts of random words; where `prefer` says so the chart is chosen over the table, else the reverse."""
    random = Random(seed)
    rows = []
    for _ in range(count):
        words = " ".join(
            random.choice(("how", "did", "revenue", "change", "over", "week"))
            for _ in range(random.randint(2, 9))
        )
        good, bad = ("line_chart", "table") if prefer(random) else ("table", "line_chart")
        rows.append(
            {
                "prompt": [{"role": "user", "content": words}],
                "chosen": f'{{"widget": "{good}"}}',
                "rejected": f'{{"widget": "{bad}"}}',
            }
        )
    return rows


def a_trainer(base: str, folder: Path, recipe: DPORecipe = QUICK, **more: Any) -> DPOTrainer:
    return DPOTrainer(recipe, base, output_dir=folder, hardware=HARDWARE, **more)


WIDGETS = ChoiceAgent(
    slug="widgets",
    title="Widgets",
    description="",
    answer_key="widget",
    options_key="widgets",
    max_new_tokens=12,
)
