"""Responses sampled by a vLLM server: the policy's adapter is handed to it as it changes, tokens come back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import urllib3

from rl.training.constrained_generation import Sampling
from rl.training.policy import LoadedPolicy, adapter_save
from rl.training.ppo.rollout import Rollout, rollout_of
from rl.training.result import TrainingFailed

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
