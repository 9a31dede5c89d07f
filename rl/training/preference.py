"""What preference losses are measured against: the base, or the base warmed up on the responses that were judged.

Preference losses measure a response against a reference, which is meant to be the policy that wrote it. Responses that
were recorded elsewhere were not written by the base model, which may put dozens of nats between two of them for no
reason that has to do with anybody's taste. Rafailov et al. 2023 (arXiv 2305.18290, section 4) estimate the unknown
reference by maximum likelihood before DPO starts; so does this, for DPO and KTO. Where the paper takes preferred
responses alone, all of them are taken here: a reference that likes what people like would leave less to learn.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, Unpack

from accelerate import PartialState
from transformers import TrainingArguments

from packed_forward.row_cache import RowCache
from rl.agents.base import Row
from rl.recipes import BASE, AdapterRecipe, SFTRecipe
from rl.recipes.base import DROP, AnswerRecipe
from rl.training.adapter_trainer import AdapterTrainer, Outcome, SplitT, TrainRows
from rl.training.encoding import EncodedResponse
from rl.training.loading import ADAPTER_FILES
from rl.training.policy import REFERENCE, LoadedPolicy, load_policy
from rl.training.result import Forwarding
from rl.training.run import RunContext, RunOptions, reference_cache
from rl.training.sft import SFTTrainer
from rl.training.trl_trainer import TRAINING

AnswerT = TypeVar("AnswerT", bound=AnswerRecipe)


class PreferenceTrainer(AdapterTrainer[AnswerT, SplitT]):
    """A training whose loss has a reference."""

    judged: Sequence[Row] = ()
    """The responses that were judged, which a warm-up shows: rows {"prompt", "completion"}."""

    def __init__(self, recipe: AnswerT, base_model: str = "bundled", **options: Unpack[RunOptions]) -> None:
        super().__init__(recipe, base_model, **options)
        self.warm_up: WarmUp | None = None

    def fit(self, policy: LoadedPolicy, rows: TrainRows[SplitT], checkpoint: Path | None) -> Outcome:
        self.warm_up = warm_up(self.context, self.judged)
        if self.warm_up is not None:
            self.context.note(self.warm_up.note)
        return super().fit(policy, rows, checkpoint)

    @property
    def start_recipe(self) -> AdapterRecipe:
        recipe = self.recipe
        return recipe if self.warm_up is None else self.warm_up.start_recipe(recipe)

    def reference(
        self, policy: LoadedPolicy, arguments: TrainingArguments, items: Sequence[EncodedResponse]
    ) -> list[float]:
        """Log-probabilities under the reference, nats: the base, or its warm-up until that is released."""
        cache = reference_cache(self.context)
        if self.warm_up is not None:
            assert self.warm_up.reference is not None  # until the rows of both splits are made
            policy, cache = self.warm_up.reference, self.warm_up.cache
        return self.reference_logps(policy, arguments, items, cache)

    def trl_arguments(self, policy: LoadedPolicy, arguments: TrainingArguments) -> dict[str, object]:
        if self.warm_up is not None:
            self.warm_up.release()  # the rows of both splits are made
        return super().trl_arguments(policy, arguments)

    def save(self, policy: LoadedPolicy, outcome: Outcome) -> Path:
        path = super().save(policy, outcome)
        if self.warm_up is not None and self.processes.main:
            self.warm_up.store(path)
        return path


PHASE = "warm-up on the responses that were judged"


@dataclass
class WarmUp:
    """Outcome of a warm-up."""

    reference: LoadedPolicy | None
    """The base with the adapter of the warm-up: what the preference loss measures against; None once released."""
    adapter: Path
    note: str
    cache: RowCache
    """Log-probabilities under the reference, for a run that is stopped while they are computed."""

    def store(self, adapter: Path) -> None:
        """Copy the reference into the folder of the policy that was measured against it."""
        shutil.copytree(self.adapter, adapter / REFERENCE, dirs_exist_ok=True)

    def release(self) -> None:
        """Free the second copy of the base, once the reference log-probabilities are known."""
        self.reference = None
        gc.collect()

    def start_recipe(self, recipe: AdapterRecipe) -> AdapterRecipe:
        """The recipe, starting from the warm-up where it would start from the base."""
        return (
            dataclasses.replace(recipe, start_from=str(self.adapter)) if recipe.start_from == BASE else recipe
        )


def warm_up(context: RunContext[AnswerT], rows: Sequence[Row]) -> WarmUp | None:
    """Fine-tune the base on the responses of `rows` ({"prompt", "completion"}) for the recipe's `warm_up_steps`, or
    take what an interrupted run has finished; None where the recipe asks for none.

    Loads the base once more beside the policy that is trained. Stopped, it keeps a checkpoint for the resumed run and
    raises KeyboardInterrupt.
    """
    recipe: AdapterRecipe = context.recipe
    if recipe.warm_up_steps == 0 or not rows:
        return None
    folder = context.output_dir / "warm_up"
    steps = recipe.warm_up(len(rows))
    note = f"warmed up on the {len(rows):,} responses that were judged, {steps} steps: they are the reference"
    adapter = folder / "adapter"
    processes = PartialState()  # of one process or several
    done = (adapter / ADAPTER_FILES[1]).is_file()
    processes.wait_for_everyone()  # all have looked before one of them begins to write
    if not done:
        begun = context.resume and (folder / "run.json").is_file()
        processes.wait_for_everyone()
        if processes.is_main_process and not begun:
            shutil.rmtree(folder, ignore_errors=True)
        processes.wait_for_everyone()
        context.phase(PHASE)
        trainer = SFTTrainer(
            _recipe(recipe, steps),
            context.base_model,
            output_dir=folder,
            agent=context.agent,
            hardware=context.hardware,
            listener=_WarmUpListener(context.listener),
            resume=begun,
            cache_dir=context.cache_dir,
            deadline=_deadline(context),
        )
        trainer.measures_distance = False
        result = trainer.train(list(rows))
        if result.status == "cancelled":
            raise KeyboardInterrupt
        adapter = Path(result.checkpoint)
        del trainer
        gc.collect()  # its model, before the reference is loaded
        processes.wait_for_everyone()  # the main process has written it
        if processes.is_main_process:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    reference = load_policy(
        context.base_model,
        adapter,
        hardware=context.hardware,
        quantization=recipe.quantization,
        cache_dir=context.cache_dir,
    )
    return WarmUp(reference, adapter, note, RowCache(folder / "reference.sqlite3"))


class _WarmUpListener(Forwarding):
    """Passes a warm-up's phases and steps on as phases of its run, whose own steps and metrics come later."""

    def on_step(self, step: int, total: int) -> None:
        self.listener.on_phase(PHASE, step, total)

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        super().on_phase(PHASE if name == TRAINING else f"{PHASE}, {name}", done, total)


def _deadline(context: RunContext[AnswerT]) -> float | None:
    """The deadline of a warm-up: half of the time that the run has left."""
    now = time.monotonic()
    return None if context.deadline is None else now + (context.deadline - now) / 2


def _recipe(recipe: AdapterRecipe, steps: int) -> SFTRecipe:
    shared = {field.name for field in dataclasses.fields(AdapterRecipe)} - {
        "start_from",
        "warm_up_steps",
        "warm_up_learning_rate",
    }
    knobs = {name: getattr(recipe, name) for name in shared}
    knobs["reasoning"] = getattr(recipe, "reasoning", DROP)
    knobs["general_weight"] = getattr(recipe, "general_weight", 0.0)
    knobs["learning_rate"] = recipe.warm_up_learning_rate or recipe.learning_rate
    knobs |= {
        "max_steps": steps,
        "patience": 0,
        "eval_steps": 0,
        "checkpoints": "newest",
    }
    return SFTRecipe(**knobs)
