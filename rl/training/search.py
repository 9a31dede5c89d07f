"""Search over recipes: several are trained on the same rows, and the one that is best on the eval split is kept.

The first try is the recipe as it stands; the others multiply its learning rate, its passes and, where the figure that
decides does not depend on it, its beta, by factors drawn without repetition from a grid (random search, Bergstra and
Bengio 2012, JMLR 13; a fixed seed). What decides is `eval_ranking_loss` for DPO, which has no scale and so no beta in
it, and `eval_loss` elsewhere. The best of N figures is an optimistic one, and is said to be. The holdout is not read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from accelerate import PartialState

from rl.agents.base import Row
from rl.recipes import AdapterRecipe, DPORecipe, KTORecipe
from rl.training.policy import LoadedPolicy, load_policy
from rl.training.result import (
    Forwarding,
    ResultError,
    TrainingFailed,
    TrainingRefused,
    TrainListener,
    TrainResult,
)
from rl.training.trl_trainer import EPOCHS, LOSS, RANKING_LOSS

FACTORS: dict[str, tuple[float, ...]] = {
    "learning_rate": (0.25, 0.5, 1.0, 2.0, 4.0),
    "epochs": (0.5, 1.0, 2.0),
    "beta": (0.3, 1.0, 3.0),
}
"""Knob -> what its value in the recipe is multiplied by."""


def figure_of(recipe: AdapterRecipe) -> str:
    """The metric of the eval split by which recipes are compared; the least is the best."""
    return RANKING_LOSS if isinstance(recipe, DPORecipe) else LOSS


def tries_of(recipe: AdapterRecipe, rows: int) -> list[dict[str, Any]]:
    """Knobs of each try on so many training rows, the recipe's own ({}) first; `recipe.search` of them, or all."""
    fit = recipe.fit_to_rows(rows)
    knobs = ["learning_rate"]
    if fit.max_steps < 0:
        knobs.append("epochs")
    # the log-loss of a thumb at a scale is a figure of that scale too; KTO's own loss is none of anything but itself
    if isinstance(fit, DPORecipe) or (isinstance(fit, KTORecipe) and fit.loss == "logistic"):
        knobs.append("beta")
    grid = [one for one in itertools.product(*(FACTORS[knob] for knob in knobs)) if set(one) != {1.0}]
    Random(recipe.seed).shuffle(grid)
    found: list[dict[str, Any]] = [{}]
    for factors in grid[: recipe.search - 1]:
        values = {
            knob: float(f"{getattr(fit, knob) * factor:.3g}")
            for knob, factor in zip(knobs, factors, strict=True)
            if factor != 1.0
        }
        found.append({**values, **({"min_steps": 0} if "epochs" in values else {})})
    return found


class SearchTrainer:
    """A trainer of its own constructor's kind that trains several recipes and comes back with the best of them."""

    def __init__(
        self,
        kind: Callable[..., Any],
        recipe: AdapterRecipe,
        base_model: str = "bundled",
        *,
        output_dir: str | Path,
        listener: TrainListener,
        resume: bool = False,
        **facts: Any,
    ) -> None:
        """kind: the class that trains one recipe; facts: what it is given besides (agent, hardware, cache_dir)."""
        self.kind, self.recipe, self.base_model = kind, recipe, base_model
        self.output_dir = Path(output_dir)
        self.listener, self.resume, self.facts = listener, resume, facts
        self.policy: LoadedPolicy | None = None

    def load_base_model(self) -> LoadedPolicy:
        """The base before training, the policy that was kept after it."""
        if self.policy is None:
            self.policy = load_policy(
                self.base_model,
                hardware=self.facts["hardware"],
                quantization=self.recipe.quantization,
                cache_dir=self.facts["cache_dir"],
            )
        return self.policy

    def train(self, rows: Sequence[Row], eval_rows: Sequence[Row]) -> TrainResult:
        """Train every try that is not trained yet, and return the best one's result with all figures in `search`.

        A try that diverges counts as one that failed. Raises TrainingRefused without eval rows and in a launch of
        several processes, and TrainingFailed where every try failed.
        """
        if not eval_rows:
            raise TrainingRefused(
                "a search compares recipes on the eval split, and it has no rows; rate more prompts, or train without"
            )
        if PartialState().num_processes > 1:
            raise TrainingRefused("a search runs in one process; start it without `accelerate launch`")
        self.policy = None  # each try loads its own
        tries = tries_of(self.recipe, len(rows))
        figure, entries, results = figure_of(self.recipe), [], {}
        progress = _Progress(self.listener, len(tries))
        for number, knobs in enumerate(tries, 1):
            recipe = dataclasses.replace(self.recipe, **knobs, search=0)
            entry = {
                "try": number,
                **{k: getattr(recipe, k) for k in FACTORS if hasattr(recipe, k)},
                "steps": 0,
            }
            progress.number = number
            try:
                result = self._train_one(number, recipe, rows, eval_rows, progress)
            except TrainingFailed as failure:
                entries.append({**entry, "value": None, "failed": str(failure)})
                self.listener.on_note(f"try {number} of {len(tries)} failed: {failure}")
                continue
            if result.status == "cancelled":
                steps = (number - 1) * result.total_steps + result.steps
                return dataclasses.replace(result, steps=steps, total_steps=len(tries) * result.total_steps)
            value = result.metrics.get(figure)
            value = value if value is not None and math.isfinite(value) else None
            entries.append({**entry, "steps": result.steps, "value": value})
            results[number] = result
            self.listener.on_note(f"try {number} of {len(tries)}: {_words(entry)}: {figure} {value}")
        finished = [one for one in entries if one["value"] is not None]
        if not finished:
            raise TrainingFailed(
                f"none of {len(tries)} recipes has a {figure}: {entries[0].get('failed', 'all failed')}"
            )
        best = min(finished, key=lambda one: (one["value"], one["try"]))
        return self._keep_best(results[best["try"]], best["try"], entries, figure, len(eval_rows))

    def _folder(self, number: int) -> Path:
        return self.output_dir / "search" / f"try-{number}"

    def _train_one(
        self,
        number: int,
        recipe: AdapterRecipe,
        rows: Sequence[Row],
        eval_rows: Sequence[Row],
        progress: _Progress,
    ) -> TrainResult:
        folder = self._folder(number)
        if self.resume:
            try:
                return TrainResult.load(folder / "result.json")
            except ResultError:
                pass  # this one was not finished
        trainer = self.kind(
            recipe,
            self.base_model,
            output_dir=folder,
            listener=progress,
            resume=self.resume and folder.exists(),
            **self.facts,
        )
        result: TrainResult = trainer.train(rows, eval_rows)
        if result.status == "succeeded":
            result.save(folder / "result.json")
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result

    def _keep_best(
        self, result: TrainResult, number: int, shown: list[dict[str, Any]], figure: str, eval_rows: int
    ) -> TrainResult:
        """The result of the best try, its files where a run without a search has them; the others' files go."""
        for name in ("adapter", EPOCHS):
            shutil.rmtree(self.output_dir / name, ignore_errors=True)
            if (self._folder(number) / name).is_dir():
                shutil.copytree(self._folder(number) / name, self.output_dir / name)
        shutil.rmtree(self.output_dir / "search", ignore_errors=True)
        checkpoint = self.output_dir / "adapter"
        columns = {name: values for name, values in result.history.items() if not name.startswith("eval_")}
        for row in zip(*columns.values(), strict=True):
            figures = dict(zip(columns, row, strict=True))
            self.listener.on_metrics(int(figures.pop("step")), figures)
        self.policy = load_policy(
            self.base_model,
            checkpoint,
            hardware=self.facts["hardware"],
            quantization=self.recipe.quantization,
            cache_dir=self.facts["cache_dir"],
        )
        for one in shown:
            one["kept"] = one["try"] == number
        note = (
            f"try {number} of {len(shown)} is kept, by the least {figure} on {eval_rows} eval rows. As the best of "
            f"{len(shown)} that figure is optimistic; the holdout was not looked at, and the gate judges by it alone"
        )
        return dataclasses.replace(
            result,
            checkpoint=str(checkpoint),
            seconds=result.seconds,
            recipe={**result.recipe, "search": self.recipe.search},
            notes=[note, *result.notes],
            search={"figure": figure, "eval_rows": eval_rows, "words": note, "tries": shown},
        )


def _words(entry: dict[str, Any]) -> str:
    return ", ".join(f"{knob} {entry[knob]:g}" for knob in FACTORS if knob in entry)


class _Progress(Forwarding):
    """Reports the steps of all tries together to a run's listener, and no try's metrics: the best one's follow."""

    def __init__(self, listener: TrainListener, tries: int) -> None:
        super().__init__(listener)
        self.tries, self.number, self.before = tries, 1, 0

    def on_start(self, total_steps: int) -> None:
        self.before = (self.number - 1) * total_steps
        self.listener.on_start(self.tries * total_steps)

    def on_step(self, step: int, total: int) -> None:
        self.listener.on_step(self.before + step, self.tries * total)

    def on_note(self, text: str) -> None:
        self.listener.on_note(f"try {self.number}: {text}")
