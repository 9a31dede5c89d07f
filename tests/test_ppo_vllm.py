"""PPO's rollouts from a server that speaks vLLM's protocol: adapters handed over as they change, tokens taken back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.recipes import PPORecipe
from rl.training.constrained_generation import Sampling
from rl.training.policy import load_policy
from rl.training.ppo import PPOTrainer
from rl.training.result import TrainingFailed
from rl.training.rollout import VllmServer
from tests.support.stub_server import Stub, StubHandler, StubServer
from tests.test_ppo_reward_model import HARDWARE, QUICK, asks


class FakeVllm(Stub):
    """Takes adapters that are whole, and answers with tokens 40, 41, ... and an end for every second response."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.with_stop = False
        self.broken: dict[str, Any] | None = None
        fake = self

        class Handler(StubHandler):
            def do_POST(self) -> None:
                body = json.loads(self.body())
                fake.calls.append((self.path, body))
                self.answer(*fake.answer(self.path, body))

        self.server = StubServer(Handler)
        self.url = self.server.address

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success: LoRA adapter added."
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success: LoRA adapter removed."
        if body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        if self.broken is not None:
            return 200, self.broken
        stop = body["stop_token_ids"][0]
        choices = []
        for index in range(len(body["prompt"]) * body["n"]):
            ids = [40 + index, 41 + index]
            ends = index % 2 == 0
            choices.append(
                {
                    "index": index,
                    "token_ids": [*ids, stop] if ends and self.with_stop else ids,
                    "finish_reason": "stop" if ends else "length",
                    "stop_reason": stop if ends else None,
                }
            )
        return 200, {"choices": choices[::-1]}


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with FakeVllm() as fake:
        yield fake


def recipe(**knobs: Any) -> PPORecipe:
    return QUICK.with_knobs(reward="format", allow_constant_reward=True, max_steps=2, **knobs)


@pytest.mark.slow
def test_adapters_are_handed_over_after_each_step(vllm: FakeVllm, base: str, tmp_path: Path) -> None:
    trainer = PPOTrainer(
        recipe(vllm_server=vllm.url), base, output_dir=tmp_path, agent="assistant", hardware=HARDWARE
    )
    assert trainer.train([{"prompt": asks(i)} for i in range(8)]).steps == 2
    asked = [body["model"] for path, body in vllm.calls if path == "/v1/completions"]
    assert len(set(asked)) == 2  # the adapter as it began, and as the first step left it
    assert len(vllm.adapters) == 1  # the older one is taken back
    assert [path.name for path in (tmp_path / "sampling" / "0").iterdir()] == list(vllm.adapters)


@pytest.mark.slow
@pytest.mark.parametrize("with_stop", [True, False])
def test_tokens_keep_their_order(vllm: FakeVllm, base: str, tmp_path: Path, with_stop: bool) -> None:
    vllm.with_stop = with_stop
    server = served(vllm, base, tmp_path)
    rollouts = server.sample([[5, 6], [7]], 2, Sampling(max_new_tokens=4), seed=1)
    stop = min(server.policy.encoder.stop_ids)
    assert [r.item.response_ids for r in rollouts] == [[40, 41, stop], [41, 42], [42, 43, stop], [43, 44]]
    expected = [(0, [5, 6], True), (0, [5, 6], False), (1, [7], True), (1, [7], False)]
    assert [(r.prompt, r.item.prompt_ids, r.ended) for r in rollouts] == expected


def served(vllm: FakeVllm, base: str, tmp_path: Path) -> VllmServer:
    policy = PPOTrainer(recipe(), base, output_dir=tmp_path, hardware=HARDWARE).load_base_model()
    from rl.training.shared_base import SharedBase

    SharedBase(policy, recipe())  # gives it an adapter
    server = VllmServer(vllm.url, policy, tmp_path / "sampling", "run")
    server.adapter_send(0)
    return server


@pytest.mark.slow
def test_unusable_answers_are_described(vllm: FakeVllm, base: str, tmp_path: Path) -> None:
    server = served(vllm, base, tmp_path)
    vllm.broken = {"choices": [{"index": 0, "text": "an old server", "finish_reason": "stop"}]}
    with pytest.raises(TrainingFailed, match=r"expected token_ids.*0\.10\.2"):
        server.sample([[5]], 1, Sampling(max_new_tokens=4), seed=1)
    vllm.broken = {"choices": []}
    with pytest.raises(TrainingFailed, match="expected 1 responses"):
        server.sample([[5]], 1, Sampling(max_new_tokens=4), seed=1)
    vllm.broken = None
    vllm.adapters.clear()
    with pytest.raises(TrainingFailed, match=r"refused with 404.*does not exist"):
        server.sample([[5]], 1, Sampling(max_new_tokens=4), seed=1)


def test_a_server_that_is_not_there_is_named(base: str, tmp_path: Path) -> None:
    nobody = VllmServer("http://127.0.0.1:1", load_policy(base, hardware=HARDWARE), tmp_path, "run")
    with pytest.raises(TrainingFailed, match=r"expected a vLLM server at http://127\.0\.0\.1:1"):
        nobody.sample([[5]], 1, Sampling(max_new_tokens=4), seed=1)
