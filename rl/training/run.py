"""One training run: its options and context, its folder, the processes it is spread over."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Required, TypedDict, TypeVar, Unpack

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor, nn

from packed_forward.row_cache import RowCache
from rl.agents import get_agent
from rl.agents.base import Agent
from rl.recipes import Recipe
from rl.training.hardware import Hardware, detect
from rl.training.policy import LoadedPolicy, load_policy
from rl.training.result import Silent, TrainingFailed, TrainingRefused, TrainListener, checkpoint_last

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
    method: str = ""
    """Its slug, for the files of the policy."""
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

    @cached_property
    def definition(self) -> Agent:
        return get_agent(self.agent)

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


def run_context(recipe: RecipeT, base_model: str, **options: Unpack[RunOptions]) -> RunContext[RecipeT]:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given |= {name: Path(given[name]) for name in ("output_dir", "cache_dir") if name in given}
    return RunContext(recipe, base_model, **given)


def base_load(context: RunContext[RecipeT], *, half: bool = True) -> LoadedPolicy:
    """The run's base model and tokenizer, with its caches; with `half` false never in float16. Raises
    PolicyLoadError."""
    context.phase("loading the model")
    hardware = context.hardware
    if not half and hardware.dtype == "float16":
        hardware = dataclasses.replace(hardware, dtype="float32")
        context.detail("float16 would lose small gradients: the base is loaded in float32")
    return load_policy(
        context.base_model,
        hardware=hardware,
        quantization=context.recipe.quantization,
        cache_dir=context.cache_dir,
    )


def reference_cache(context: RunContext[RecipeT]) -> RowCache | None:
    """Log-probabilities under the base model that earlier runs computed; None where the run keeps no cache."""
    return RowCache(context.cache_dir / "reference.sqlite3") if context.cache_dir is not None else None


def folder_prepare(context: RunContext[RecipeT]) -> tuple[Path | None, list[str]]:
    """Make the run's folder with its `checkpoints/`; return the checkpoint to go on from (None: start), and notes.

    Raises TrainingRefused for a folder that cannot be written, or holds an earlier run's checkpoints while the run does
    not resume.
    """
    output_dir = context.output_dir
    checkpoints = output_dir / "checkpoints"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / f".writable.{os.getpid()}"  # each process of a launch makes its own
        try:
            probe.write_bytes(bytes(4096))  # a full disk still takes names
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise TrainingRefused(
            f"expected a folder that can be written at {output_dir}, found {error.strerror}: "
            f"free some space, choose another or change its permissions"
        ) from error
    if context.resume:
        checkpoint, notes = checkpoint_last(checkpoints)
        begins = (
            f"resuming from {checkpoint.name}" if checkpoint else "no whole checkpoint: starting at step 0"
        )
        return checkpoint, [*notes, begins]
    if any(checkpoints.glob("checkpoint-*")):
        raise TrainingRefused(
            f"expected a folder without checkpoints at {checkpoints}, found those of an earlier run: "
            f"resume that run, or give another folder"
        )
    return None, []


def same_run_check(context: RunContext[RecipeT], now: Mapping[str, Any], *, resumed: bool) -> None:
    """A resumed run must be the one that was interrupted, or its steps and data order would not be.

    `now` says what the run is made of, its `recipe` as a dict of knobs; a new run's `main` process records it. Raises
    TrainingRefused naming what differs.
    """
    file = context.output_dir / "run.json"
    if not resumed:
        if context.main_process:
            file.write_text(json.dumps(now, indent=2) + "\n", "utf-8")
        return
    try:
        then = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingRefused(f"cannot resume: {file} is missing or broken ({error})") from error
    different = [name for name in now if then.get(name) != now[name]]
    if "recipe" in different and isinstance(then.get("recipe"), dict):
        different.remove("recipe")
        different += [
            f"{knob} ({then['recipe'].get(knob)!r}, now {value!r})"
            for knob, value in now["recipe"].items()
            if then["recipe"].get(knob) != value
        ]
    if different:
        raise TrainingRefused(
            f"cannot resume {context.output_dir}: it was started with other {', '.join(different)}; "
            f"start a new run, or give what it was started with"
        )


@contextlib.contextmanager
def failures_explained(context: RunContext[RecipeT]) -> Iterator[None]:
    """Inside, running out of memory or disk is a TrainingFailed that says what to do; other errors pass."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingFailed(
            f"the accelerator ran out of memory: lower batch_size (now {context.recipe.batch_size}) or max_length "
            f"(now {context.recipe.max_length}), or use the small_gpu preset"
        ) from error
    except (OSError, SafetensorError, RuntimeError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if not full and shutil.disk_usage(context.output_dir).free > 1 << 20:
            raise
        raise TrainingFailed(
            f"the disk of {context.output_dir} is full: free some space and resume; the last whole checkpoint is kept"
        ) from error


T = TypeVar("T")


class Processes:
    """The processes of a launch (`accelerate launch`), or this one alone.

    PPO's steps use the sums: each process samples and scores its own share of a step's prompts, losses are divided by
    the token count of all and gradients summed, so that the step is the one a single process would make of the whole
    batch. Trainers over TRL have theirs summed by accelerate.
    """

    def __init__(self, *, cpu: bool) -> None:
        self.state = PartialState(cpu=cpu)
        self.count: int = self.state.num_processes
        self.index: int = self.state.process_index

    @property
    def main(self) -> bool:
        return self.index == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes of a tensor of the same shape in each."""
        if self.count > 1:
            x = x.clone()
            torch.distributed.all_reduce(x)
        return x

    def gradients_sum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over the processes, in one message."""
        if self.count == 1:
            return
        graded = [p for p in parameters if p.grad is not None]
        flat = self.sum(torch.cat([p.grad.reshape(-1) for p in graded if p.grad is not None]))
        for p, summed in zip(graded, flat.split([p.numel() for p in graded]), strict=True):
            assert p.grad is not None
            p.grad.copy_(summed.view_as(p.grad))

    def agree(self, said: T) -> T:
        """The main process's value, on all processes."""
        values = [said]
        if self.count > 1:
            broadcast_object_list(values)
        return values[0]

    def maximum(self, count: int) -> int:
        """The greatest of the processes' counts."""
        if self.count == 1:
            return count
        greatest = torch.tensor(count, device=self.state.device)
        torch.distributed.all_reduce(greatest, op=torch.distributed.ReduceOp.MAX)
        return int(greatest)

    def wait(self) -> None:
        self.state.wait_for_everyone()


def run_facts(
    recipe: Recipe, policy: LoadedPolicy, rows: Sequence[object], processes: int
) -> dict[str, object]:
    """Facts that a resumed run must have in common with the one that began (`same_run_check`)."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return {
        "recipe": recipe.as_dict(),
        "base_model_hash": policy.base_model_hash,
        "rows": digest.hexdigest(),
        "processes": processes,
    }
