"""A PPO checkpoint: the policy's adapter as any other, beside it all that is needed to go on with the same steps."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rl.training.policy import adapter_save
from rl.training.ppo.shared_base import POLICY, VALUE, SharedBase
from rl.training.progress import checkpoint_seal
from rl.training.result import TrainingRefused

TENSORS, STATE = "training.safetensors", "training.json"
CHECKPOINTS = 2
"""Checkpoints that stay; older ones go when a newer one is whole."""


@dataclass
class State:
    """Progress of a run. What is drawn is a function of seed and step, so no random state needs keeping."""

    step: int = 0
    optimiser_steps: int = 0
    kl_coef: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)
    """The metrics of every step so far."""


def checkpoint_write(
    folder: Path, base: SharedBase, optimizer: torch.optim.Optimizer, state: State, *, agent: str
) -> Path:
    """Write `checkpoint-<step>` into `folder`, whole: adapter, value, optimiser and state; returns its path."""
    path = adapter_save(base.policy, folder / f"checkpoint-{state.step}", agent=agent, method="ppo")
    save_file(_tensors(base, optimizer), path / TENSORS)
    (path / STATE).write_text(json.dumps(asdict(state)) + "\n", "utf-8")
    checkpoint_seal(path)
    older = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.removeprefix("checkpoint-")))
    for old in older[:-CHECKPOINTS]:
        shutil.rmtree(old)
    return path


def checkpoint_read(path: Path, base: SharedBase, optimizer: torch.optim.Optimizer) -> State:
    """Put a checkpoint back into models and optimiser. Raises TrainingRefused for one that is not of this run."""
    try:
        tensors = load_file(path / TENSORS, device=str(base.policy.device))
        state = State(**json.loads((path / STATE).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainingRefused(f"cannot resume from {path}: {error}") from error
    trained = _trainable_parameters(base)
    found = {name.removeprefix("weight/") for name in tensors if name.startswith("weight/")}
    if found != set(trained):
        raise TrainingRefused(
            f"cannot resume from {path}: expected the weights of this run's adapters, found others "
            f"({len(found ^ set(trained))} names differ)"
        )
    _tensors_restore(tensors, base, optimizer)
    return state


@dataclass(frozen=True)
class StepStart:
    """Weights, optimiser and state before a step, to go back to where the step is interrupted."""

    tensors: dict[str, torch.Tensor]
    state: State

    @classmethod
    def of(cls, base: SharedBase, optimizer: torch.optim.Optimizer, state: State) -> StepStart:
        tensors = {name: tensor.clone() for name, tensor in _tensors(base, optimizer).items()}
        return cls(tensors, replace(state, rows=list(state.rows)))

    def restore(self, base: SharedBase, optimizer: torch.optim.Optimizer) -> State:
        """Put everything back; returns the state."""
        _tensors_restore(self.tensors, base, optimizer)
        return self.state


def _tensors_restore(
    tensors: dict[str, torch.Tensor], base: SharedBase, optimizer: torch.optim.Optimizer
) -> None:
    trained = _trainable_parameters(base)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"weight/{name}"])
    for name, parameter in trained.items():
        moments = {
            kind: tensors[f"{kind}/{name}"]
            for kind in ("step", "exp_avg", "exp_avg_sq")
            if f"{kind}/{name}" in tensors
        }
        if moments:
            # Adam counts its steps on the CPU, and would be slowed down by a count elsewhere
            optimizer.state[parameter] = {**moments, "step": moments["step"].cpu()}


def _trainable_parameters(base: SharedBase) -> dict[str, torch.nn.Parameter]:
    return base.parameters_of(POLICY) | base.parameters_of(VALUE)


def _tensors(base: SharedBase, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in _trainable_parameters(base).items():
        tensors[f"weight/{name}"] = parameter.detach().contiguous()
        moments: dict[str, Any] = optimizer.state.get(parameter, {})
        for kind, moment in moments.items():
            tensors[f"{kind}/{name}"] = moment.detach().contiguous()
    return tensors
