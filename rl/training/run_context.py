"""Context of one training run, passed to functions in place of a trainer: recipe, hardware, listener, notes, folders.

Every method's trainer is made from the same arguments (`run_context`), loads its base the same way (`base_load`) and
keeps its caches in the same place; those functions stand here once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Required, TypedDict, TypeVar

from packed_forward.row_cache import RowCache
from rl.recipes import Recipe
from rl.training.hardware import Hardware, detect
from rl.training.policy import LoadedPolicy, load_policy
from rl.training.progress import Silent, TrainListener

RecipeT = TypeVar("RecipeT", bound=Recipe)


class RunOptions(TypedDict, total=False):
    """Keyword arguments that every trainer takes beside its recipe and its base model."""

    output_dir: Required[str | Path]
    """Folder of the run: `checkpoints/` while it works, `adapter/` when it has finished."""
    agent: str
    hardware: Hardware | None
    """None: detected."""
    listener: TrainListener | None
    resume: bool
    """Go on from the newest whole checkpoint in the folder."""
    cache_dir: str | Path | None
    """Folder where the next run finds tokens, reference log-probabilities and self-tests; None keeps nothing."""
    deadline: float | None
    """Time on the monotonic clock at which training ends with the weights it has; None: after its last step."""


@dataclass
class RunContext(Generic[RecipeT]):
    """One run of one recipe on one machine, with its listener."""

    recipe: RecipeT
    base_model: str
    """`bundled`, a Hugging Face name or a path."""
    output_dir: Path
    agent: str = ""
    hardware: Hardware = field(default_factory=detect)
    listener: TrainListener = field(default_factory=Silent)
    resume: bool = False
    cache_dir: Path | None = None
    deadline: float | None = None
    notes: list[str] = field(default_factory=list)
    """Notes for readers of the result, in the order in which they came up."""
    details: list[str] = field(default_factory=list)
    """Sentences on how it was computed, which nobody needs to act on: for the log and the run's record."""
    main_process: bool = True
    """True if this process of a launch reports to the listener and writes the files."""

    def note(self, text: str) -> None:
        """Record a sentence; the main process passes it on to the listener."""
        self.notes.append(text)
        if self.main_process:
            self.listener.on_note(text)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Tell the listener what begins now, or how far it is; the main process alone.

        Raises KeyboardInterrupt where a stop was requested.
        """
        if self.main_process:
            self.listener.on_phase(name, done, total)
            if self.listener.should_stop():
                raise KeyboardInterrupt

    def detail(self, text: str) -> None:
        """Record how something was computed; the main process writes it into the log."""
        self.details.append(text)
        if self.main_process:
            self.listener.on_note(text)

    def note_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(text)


def run_context(
    recipe: RecipeT,
    base_model: str,
    *,
    output_dir: str | Path,
    agent: str = "",
    hardware: Hardware | None = None,
    listener: TrainListener | None = None,
    resume: bool = False,
    cache_dir: str | Path | None = None,
    deadline: float | None = None,
) -> RunContext[RecipeT]:
    """The context of a run from a trainer's arguments (`RunOptions`), with hardware detected where none is given."""
    return RunContext(
        recipe=recipe,
        base_model=base_model,
        output_dir=Path(output_dir),
        agent=agent,
        hardware=hardware or detect(),
        listener=listener or Silent(),
        resume=resume,
        cache_dir=Path(cache_dir) if cache_dir is not None else None,
        deadline=deadline,
    )


def base_load(context: RunContext[Any]) -> LoadedPolicy:
    """The run's base model and tokenizer, with its caches. Raises PolicyLoadError."""
    context.phase("loading the model")
    hardware = training_hardware(context.hardware, context.recipe)
    if hardware.dtype != context.hardware.dtype:
        context.detail("full fine-tuning trains float32 weights: the base is loaded in float32")
    return load_policy(
        context.base_model,
        hardware=hardware,
        quantization=context.recipe.quantization,
        cache_dir=context.cache_dir,
    )


def training_hardware(hardware: Hardware, recipe: Recipe) -> Hardware:
    """The hardware as a run uses it: in full fine-tuning with float32. The copy of the weights is trained in float32,
    and computes together with the base's embeddings and head, which must be of the same type where it answers."""
    return dataclasses.replace(hardware, dtype="float32") if recipe.whole else hardware


def reference_cache(context: RunContext[Any]) -> RowCache | None:
    """Log-probabilities under the base model that earlier runs computed; None where the run keeps no cache."""
    return RowCache(context.cache_dir / "reference.sqlite3") if context.cache_dir is not None else None
