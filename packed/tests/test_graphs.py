"""Training steps as graphs: the same figures as launch by launch. On a CPU the code that a graph holds plays it."""

from typing import Any

import pytest
import torch

from packed_forward import forward, selftest
from packed_forward.graphs import Captured, Graphs, grid
from packed_forward.logps import causal_model
from packed_forward.packing import PackedBatch, pack
from random_models import SHAPES, a_policy, some_items

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


class Played:
    """What stands for a CUDA graph on a CPU."""

    def __init__(self, play: Any) -> None:
        self.replay = play


def captured(self: Graphs, rows: PackedBatch, parameters: list[torch.nn.Parameter]) -> Captured:
    output = self.run(rows).detach()
    output_grad = torch.zeros_like(output)
    found = torch.autograd.grad(self.run(rows), parameters, output_grad, allow_unused=True)
    gradients = [None if gradient is None else torch.zeros_like(gradient) for gradient in found]
    computed: list[torch.Tensor] = []

    def play_forward() -> None:
        with torch.enable_grad():
            computed[:] = [self.run(rows)]
        output.copy_(computed[0].detach())

    def play_backward() -> None:
        found = torch.autograd.grad(computed[0], parameters, output_grad, allow_unused=True)
        for own, gradient in zip(gradients, found, strict=True):
            if own is not None and gradient is not None:
                own.copy_(gradient)

    forward, backward = Played(play_forward), Played(play_backward)
    return Captured(rows, output, output_grad, parameters, gradients, forward, backward)  # type: ignore[arg-type]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "cpu":
        monkeypatch.setattr(Graphs, "_captured", captured)
    return str(request.param)


def test_widths_on_the_grid_are_few_and_near() -> None:
    widths = [grid(tokens) for tokens in range(1, 2049)]
    assert all(tokens <= width <= max(16, 1.25 * tokens + 16) for tokens, width in enumerate(widths, 1))
    assert len(set(widths)) < 28


class Pass:
    """Gradients of one pass over rows, by a model whose steps are graphs or are not."""

    def __init__(self, shape: str, dtype: str, device: str, *, graphs: bool) -> None:
        self.device = device
        wide = {key: value for key, value in WIDE.items() if key != "head_dim" or shape != "llama"}
        self.policy = a_policy(shape, DTYPES[dtype], device=device, **wide)
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator(device).manual_seed(1))
        selftest.install(self.policy, SHAPES[shape][2])
        self.model = causal_model(self.policy.model)
        self.said: list[str] = []
        if graphs:
            strategy = SHAPES[shape][2]
            self.model.ratchet_graphs = Graphs(
                self.model,
                lambda packed: forward._launched_hidden(self.model, packed, strategy),
                self.said.append,
            )

    def logps(self, *prompts: int, seed: int = 1) -> torch.Tensor:
        items = some_items(*prompts, seed=seed)
        packed = pack([i.prompt_ids for i in items], [i.response_ids for i in items], pad_token_id=0).to(
            self.device
        )
        found: torch.Tensor = forward.packed_logps(self.model, packed, forward.strategy_of(self.model))[0]
        return found

    def backward(self, *prompts: int, seed: int = 1) -> torch.Tensor:
        logps = self.logps(*prompts, seed=seed)
        (logps * torch.linspace(-1, 1, logps.numel(), device=self.device).view_as(logps)).sum().backward()
        return logps.detach()

    def gradients(self) -> torch.Tensor:
        grads = [p.grad.flatten() for p in self.policy.model.parameters() if p.grad is not None]
        self.policy.model.zero_grad(set_to_none=True)
        return torch.cat(grads)


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> bool:
    return float((found - wanted).norm() / wanted.norm()) < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["llama", "qwen3", "phi3", "smollm3"])
def test_a_graph_computes_what_its_launches_compute(device: str, shape: str, dtype: str) -> None:
    plain, graphed = Pass(shape, dtype, device, graphs=False), Pass(shape, dtype, device, graphs=True)
    for seed in range(5):  # of one shape, whose third is replayed
        a, b = plain.backward(40, 33, seed=seed), graphed.backward(40, 33, seed=seed)
        assert near(b, a, dtype), seed
        assert near(graphed.gradients(), plain.gradients(), dtype), seed
    assert not graphed.said
    assert len(graphed.model.ratchet_graphs.captured) == 1
    # micro-batches add up, of two shapes whose graphs share their memory
    for one in (plain, graphed):
        for seed in range(4):
            one.backward(40, 33, seed=seed)
            one.backward(90, 20, seed=seed)
    assert near(graphed.gradients(), plain.gradients(), dtype)
    assert len(graphed.model.ratchet_graphs.captured) == 2


def test_two_passes_under_way_do_not_share_a_graph(device: str) -> None:
    plain, graphed = (Pass("llama", "float32", device, graphs=graphs) for graphs in (False, True))
    for seed in range(3):
        graphed.backward(40, 33, seed=seed)
    graphed.gradients()
    for one in (plain, graphed):
        first, second = one.logps(40, 33, seed=7), one.logps(40, 33, seed=8)
        (first.sum() - 2 * second.sum()).backward()
    assert near(graphed.gradients(), plain.gradients(), "float32")
    graphed.logps(40, 33)  # its backward never comes
    graphed.backward(40, 33, seed=9)
    plain.backward(40, 33, seed=9)
    assert near(graphed.gradients(), plain.gradients(), "float32")


def test_weights_that_an_optimiser_changes_are_read_by_the_graph(device: str) -> None:
    plain, graphed = (Pass("llama", "float32", device, graphs=graphs) for graphs in (False, True))
    for one in (plain, graphed):
        optimizer = torch.optim.AdamW([p for p in one.policy.model.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(6):
            one.backward(40, 33, seed=seed)
            optimizer.step()
            optimizer.zero_grad()
    assert near(graphed.backward(40, 33), plain.backward(40, 33), "float32")


def test_another_adapter_has_a_graph_of_its_own(device: str) -> None:
    plain, graphed = (Pass("llama", "float32", device, graphs=graphs) for graphs in (False, True))
    for one in (plain, graphed):
        config = one.policy.model.peft_config["default"]
        with torch.random.fork_rng():
            torch.manual_seed(5)
            one.policy.model.add_adapter("second", config)
        for seed in range(3):
            one.backward(40, 33, seed=seed)
        one.policy.model.set_adapter("second")
        one.policy.model.zero_grad()
        for seed in range(3):
            one.backward(40, 33, seed=seed)
    assert len(graphed.model.ratchet_graphs.captured) == 2
    assert near(graphed.gradients(), plain.gradients(), "float32")


def test_what_cannot_be_captured_is_launched_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Graphs, rows: PackedBatch, parameters: object) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graphs, "_captured", refuse)
    plain, graphed = (Pass("llama", "float32", "cpu", graphs=graphs) for graphs in (False, True))
    for one in (plain, graphed):
        for seed in range(4):
            one.backward(40, 33, seed=seed)
    assert torch.equal(graphed.gradients(), plain.gradients())
    assert graphed.said == [
        "steps are launched kernel by kernel: they cannot be captured as a CUDA graph "
        "(operation not permitted when stream is capturing)"
    ]
