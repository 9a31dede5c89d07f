"""Policy, value and reward model on one frozen base, and the checkpoint of their training."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packed_forward.forward import graphs_use, packed_hidden
from packed_forward.logps import causal_model, collate, head_logps, spread
from packed_forward.packing import NO_CHOICE, AllowedTokens, PackedBatch, Strategy, pack
from packed_forward.selection import strategy_select
from rl.recipes import PPORecipe
from rl.training.adapter_trainer import lora_config_of, weights_begin
from rl.training.encoding import EncodedResponse
from rl.training.policy import LoadedPolicy, adapter_save, lora_config
from rl.training.result import TrainingRefused, checkpoint_seal

if TYPE_CHECKING:
    from peft import PeftModel

POLICY = "default"
"""Adapter of the policy. PEFT's own name for the one that is written at the top of a saved folder."""
VALUE = "value"
REWARD = "reward"


@dataclass(frozen=True)
class MicroBatch:
    """N responses computed in one forward, always the same ones: cut once, used for old and new log-probabilities.

    A forward over other neighbours or other padding rounds differently. Cut once, the ratio of an untouched policy is
    1 to the last bit, on any device and in any dtype.
    """

    rows: list[int]
    """Row indices of the responses in their batch of rollouts."""
    packed: PackedBatch
    """One row per prompt, its responses behind it; `targets` and `target_mask` are [N, C]."""
    padded: dict[str, Tensor] | None
    """The same as plain padded rows, for a model that cannot be computed packed."""

    @property
    def mask(self) -> Tensor:
        """[N, C] bool: the tokens of the responses."""
        return self.packed.target_mask

    @property
    def action_mask(self) -> Tensor:
        """[N, C] bool: the tokens that were chosen, which is all of them but those that the form of an answer left no
        choice of. A forced token is no action: nothing can be learnt at it, and no step of time passes."""
        allowed = self.packed.token_sets
        return self.mask if allowed is None else spread(allowed.index != NO_CHOICE, self.mask)

    @classmethod
    def of(
        cls,
        rows: list[int],
        items: Sequence[EncodedResponse],
        pad_token_id: int,
        strategy: Strategy,
        device: torch.device | str,
        allowed: AllowedTokens | None = None,
    ) -> Self:
        packed = pack(
            [item.prompt_ids for item in items],
            [item.response_ids for item in items],
            pad_token_id=pad_token_id,
            allowed=allowed,
        )
        padded = None
        if strategy is Strategy.STOCK:
            padded = {name: tensor.to(device) for name, tensor in collate(items, pad_token_id).items()}
        return cls(rows, packed.to(device), padded)


class SharedBase:
    """A loaded base with the policy's adapter, the value's adapter and its head.

    `value_backbone="adapter"` gives the value a LoRA of its own: the critic learns what it likes about the text, and
    the policy is moved by its own loss alone. `"shared"` puts the value's head
    on the policy's trunk, which saves a forward and a backward and is another algorithm: the value loss then moves the
    policy's weights too.

    With `start_from` the policy has that adapter's weights and shape, and so has the reference unless the recipe says
    `base`; the value begins at zero. Raises TrainingRefused for an adapter that does not belong to this base.
    """

    def __init__(self, policy: LoadedPolicy, recipe: PPORecipe) -> None:
        self.policy = policy
        self.recipe = recipe
        self.strategy = Strategy.STOCK
        self.forms = policy.answer_forms()
        """Forms that answers are sampled within; none until they are given."""
        base = policy.model
        with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
            torch.manual_seed(recipe.seed)
            self.model: nn.Module = get_peft_model(base, lora_config_of(recipe, policy), adapter_name=POLICY)
            self.notes = weights_begin(recipe, self.model)
            if recipe.has_adapter_reference:
                reference_add(self.model, POLICY)
            if recipe.value_backbone == "adapter":
                self.model.add_adapter(VALUE, lora_config(recipe, base))
        policy.model = self.model
        self.value_head = nn.Linear(base.config.get_text_config().hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.value_head.weight)  # before the first step every state is worth nothing
        nn.init.zeros_(self.value_head.bias)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(adapter_of(name) in (POLICY, VALUE))
        silence_dropout(self.model)
        if recipe.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train(recipe.gradient_checkpointing)
        self.settle()

    def settle(self) -> None:
        """Look for layers with adapters again, after one was added from outside."""
        self._layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]

    # --- Who speaks -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def speaking_as(self, adapter: str | None) -> Iterator[PeftModel]:
        """Inside, the causal model computes with this adapter, or as the bare base for None; yields the model.

        PEFT's own switches also change which parameters are trained: `set_adapter` and `disable_adapter` freeze the
        others, and an optimiser that holds them would silently stop. This one changes what is computed, nothing else.
        """
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        for layer in self._layers:
            layer._disable_adapters = adapter is None
            if adapter is not None:
                layer._active_adapter = [adapter]
        try:
            yield causal_model(self.model)
        finally:
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def parameters_of(self, adapter: str) -> dict[str, nn.Parameter]:
        """Trained parameters of a role, by name; the value's head belongs to the value."""
        own = {name: p for name, p in self.model.named_parameters() if adapter_of(name) == adapter}
        if adapter == VALUE:
            own |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return own

    # --- What each says -------------------------------------------------------------------------------------

    def strategy_find(self, items: Sequence[EncodedResponse]) -> str:
        """Find out how this model can be computed packed, on real responses; returns it with its reason."""
        with self.speaking_as(POLICY):
            choice = strategy_select(self.policy, items, gradients=True)
        self.strategy = choice.strategy
        graphs_use(causal_model(self.policy.model))
        return f"forward {choice.strategy}: {choice.reason}"

    def micro_batch(self, rows: list[int], items: Sequence[EncodedResponse]) -> MicroBatch:
        pad = self.policy.tokenizer.pad_token_id
        allowed = self.forms.allowed_tokens(items)
        return MicroBatch.of(rows, items, pad, self.strategy, self.policy.device, allowed)

    def policy_tokens(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """The policy's log-probability of each response token and its entropy there, float32 [N, C]. Differentiable.

        Of the policy as it is served: temperature 1, no top_k, no top_p, among the tokens that the form of the answer
        allows.
        """
        with self.speaking_as(POLICY) as model:
            return self._logps(model, self._hidden_states(model, micro), micro, entropy=True)

    @torch.no_grad()
    def reference_logps(self, micro: MicroBatch, *, bare: bool = False) -> Tensor:
        """The reference's log-probability of each response token, float32 [N, C]: of the policy that training started
        from where the recipe holds it to that and not `bare`, else of the bare base."""
        with self.speaking_as(REFERENCE if self.recipe.has_adapter_reference and not bare else None) as model:
            return self._logps(model, self._hidden_states(model, micro), micro, entropy=False)[0]

    def values(self, micro: MicroBatch) -> Tensor:
        """V of the state before each response token, float32 [N, C]. Differentiable."""
        with self.speaking_as(VALUE if self.recipe.value_backbone == "adapter" else POLICY) as model:
            return self._value(self._hidden_states(model, micro), micro)

    def policy_and_values(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values from one forward of the shared trunk, each float32 [N, C]."""
        with self.speaking_as(POLICY) as model:
            hidden = self._hidden_states(model, micro)
            return *self._logps(model, hidden, micro, entropy=True), self._value(hidden, micro)

    def _hidden_states(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        """The hidden states that predict the response tokens, in the mask's order: [tokens, width]."""
        if micro.padded is None:
            hidden = packed_hidden(model, micro.packed, self.strategy)
            return hidden.reshape(-1, hidden.shape[-1])[micro.packed.sources[micro.mask]]
        ids, attention = micro.padded["input_ids"], micro.padded["attention_mask"]
        hidden = model.base_model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        return hidden[:, :-1][micro.padded["completion_mask"][:, 1:].bool()]

    def _logps(
        self, model: nn.Module, hidden: Tensor, micro: MicroBatch, *, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        targets = micro.packed.targets[micro.mask]
        found = head_logps(
            model, hidden, targets, ("entropy",) if entropy else (), allowed=micro.packed.token_sets
        )
        logps = spread(found[0], micro.mask)
        return logps, spread(found[1], micro.mask) if entropy else torch.zeros_like(logps)

    def _value(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        return spread(self.value_head(hidden.float())[:, 0], micro.mask)


def adapter_of(parameter: str) -> str | None:
    """The adapter a parameter's name belongs to; None for the base's own."""
    found = re.search(r"\.lora_\w+\.(\w+)(?:\.|$)", parameter)
    return found[1] if found else None


def silence_dropout(model: nn.Module) -> None:
    """Dropout would make the same policy give two probabilities for one token, and the ratio differ from 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


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
        moments: dict[str, torch.Tensor] = optimizer.state.get(parameter, {})
        for kind, moment in moments.items():
            tensors[f"{kind}/{name}"] = moment.detach().contiguous()
    return tensors


REFERENCE = "ref"
"""Adapter of a reference that is not the base; TRL's own name for it."""


def reference_add(model: nn.Module, policy_adapter: str = "default") -> None:
    """Give a PEFT model a frozen copy of its policy's adapter, as the policy's own weights go on to change."""
    with torch.random.fork_rng():  # its first weights are drawn, and then replaced
        model.add_adapter(REFERENCE, model.peft_config[policy_adapter])
    for name, parameter in model.named_parameters():
        if f".{policy_adapter}." in name:
            copy = model.get_parameter(name.replace(f".{policy_adapter}.", f".{REFERENCE}."))
            copy.data = parameter.data.clone()
    model.set_adapter(policy_adapter)
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in name:
            parameter.requires_grad_(False)
