"""Responses of the policy: sampled in this process, or by a vLLM server."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import urllib3
from torch import Tensor

from rl.training.constrained_generation import AnswerForms, Sampling, generate_tokens
from rl.training.encoding import EncodedResponse
from rl.training.policy import LoadedPolicy, adapter_save
from rl.training.ppo_formulas import truncate_at_stop
from rl.training.result import TrainingFailed


@dataclass(frozen=True)
class Rollout:
    """One sampled response."""

    prompt: int
    """Index of the prompt."""
    item: EncodedResponse
    """Prompt and response as tokens; the response has at least one."""
    ended: bool
    """True if it ended its turn; False if the length limit did."""
    text: str


@torch.no_grad()
def sample_responses(
    model: Any,
    encoder: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    generator: torch.Generator,
    forms: AnswerForms | None = None,
) -> list[Rollout]:
    """Answer each prompt `samples` times; those of one prompt stand side by side, in the prompts' order.

    `model` is the causal model, in the role that is to speak; `generator` lives on its device and alone decides what
    is drawn, `forms` among which tokens. Prompts are padded on the left, so that all responses begin in one column.
    """
    tokens = generate_tokens(
        model, prompts, samples, sampling, encoder.stop_ids, encoder.tokenizer.pad_token_id, generator,
        forms.start([prompt for prompt in prompts for _ in range(samples)]) if forms else None,
    )  # fmt: skip
    return [
        rollout_of(encoder, n // samples, prompts[n // samples], ids)
        for n, ids in enumerate(responses_cut(tokens, encoder))
    ]


def responses_cut(tokens: Tensor, encoder: Any) -> list[list[int]]:
    """Rows of sampled tokens, each up to and with its first stop token."""
    _, mask = truncate_at_stop(tokens, encoder.stop_ids, encoder.tokenizer.pad_token_id)
    return [row[:length] for row, length in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]


def rollout_of(encoder: Any, prompt: int, prompt_ids: Sequence[int], ids: list[int]) -> Rollout:
    """A response's tokens as what is judged: its words, and whether it ended its turn."""
    ended = ids[-1] in encoder.stop_ids
    text = encoder.tokenizer.decode(
        ids[:-1] if ended else ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return Rollout(prompt, EncodedResponse(list(prompt_ids), ids), ended, text)


def draw_seed(seed: int, purpose: str, number: int) -> int:
    """A seed of its own for each purpose and step of a run: what a resumed run draws needs no random state."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()[:6])


TIMEOUT = urllib3.Timeout(connect=10.0, read=600.0)


class VllmServer:
    """A server of the base model that takes LoRA adapters while it runs.

    Started as `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank 64`. It must see
    the run's folder under the same path. The probabilities PPO learns from are computed here, from the tokens it
    sampled.
    """

    def __init__(self, url: str, policy: LoadedPolicy, folder: Path, name: str) -> None:
        """`folder` is where adapters lie for the server to read; `name` tells this run's from others'."""
        self.url, self.policy, self.folder, self.name = url.rstrip("/"), policy, folder, name
        self.http = urllib3.PoolManager(timeout=TIMEOUT, retries=False)
        self.loaded = ""
        """Name of the adapter the server answers with; empty before the first."""

    def adapter_send(self, version: int) -> None:
        """Have the server answer with the policy as it is now, its `version`; one it has already is not sent again."""
        name = f"{self.name}-{version}"
        if name == self.loaded:
            return
        path = adapter_save(self.policy, self.folder / name)
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path.resolve())})
        before, self.loaded = self.loaded, name
        if before:
            self._post("/v1/unload_lora_adapter", {"lora_name": before})
            shutil.rmtree(self.folder / before)

    def sample(
        self, prompts: Sequence[Sequence[int]], samples: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """Sample responses like `rollout.sample_responses`; the draw is a function of `seed` as far as the
        server keeps to it."""
        body = {
            "model": self.loaded,
            "prompt": [list(prompt) for prompt in prompts],
            "n": samples,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": seed % 2**31,
            "stop_token_ids": sorted(self.policy.encoder.stop_ids),
            "return_token_ids": True,
        }
        choices = sorted(self._post("/v1/completions", body).get("choices", []), key=lambda c: c["index"])
        if len(choices) != len(prompts) * samples:
            raise TrainingFailed(
                f"expected {len(prompts) * samples} responses from {self.url}, found {len(choices)}"
            )
        return [
            rollout_of(self.policy.encoder, n // samples, prompts[n // samples], self._tokens(choice))
            for n, choice in enumerate(choices)
        ]

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        """A response's tokens with the one that ended it, which some versions leave out."""
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise TrainingFailed(
                f"expected token_ids in the answers of {self.url}, found {sorted(choice)}: vLLM 0.10.2 has them"
            )
        stops = self.policy.encoder.stop_ids
        if choice.get("finish_reason") == "stop" and (not ids or ids[-1] not in stops):
            reason = choice.get("stop_reason")
            ids = [*ids, reason if reason in stops else min(stops)]
        return [int(token) for token in ids]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self.http.request("POST", self.url + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            raise TrainingFailed(
                f"expected a vLLM server at {self.url}, found none that answers ({error}): start it as docs/cluster.md "
                f"says, then resume"
            ) from error
        if answer.status != 200:
            raise TrainingFailed(
                f"{self.url}{path} refused with {answer.status}: {answer.data[:300].decode('utf-8', 'replace')}"
            )
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = {}  # adapters are acknowledged in words
        return found if isinstance(found, dict) else {}
