"""Responses of the policy: sampled in this process, or by a vLLM server."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import urllib3
from torch import Tensor

from rl.agents.base import JsonObject
from rl.training.constrained_generation import AnswerForms, Sampling, generate_tokens
from rl.training.encoding import EncodedResponse, Encoder
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
    model: torch.nn.Module,
    encoder: Encoder,
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
        model,
        prompts,
        samples,
        sampling,
        encoder.stop_ids,
        encoder.tokenizer.pad_token_id,
        generator,
        forms.start([prompt for prompt in prompts for _ in range(samples)]) if forms else None,
    )
    return [
        rollout_of(encoder, n // samples, prompts[n // samples], ids)
        for n, ids in enumerate(responses_cut(tokens, encoder))
    ]


def responses_cut(tokens: Tensor, encoder: Encoder) -> list[list[int]]:
    """Rows of sampled tokens, each up to and with its first stop token."""
    _, mask = truncate_at_stop(tokens, encoder.stop_ids, encoder.tokenizer.pad_token_id)
    return [row[:length] for row, length in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]


def rollout_of(encoder: Encoder, prompt: int, prompt_ids: Sequence[int], ids: list[int]) -> Rollout:
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

    def _tokens(self, choice: JsonObject) -> list[int]:
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

    def _post(self, path: str, body: dict[str, object]) -> JsonObject:
        try:
            answer = self.http.request("POST", self.url + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            raise TrainingFailed(
                f"expected a vLLM server at {self.url}, found none that answers ({error}): start it as "
                "docs/hardware.md says, then resume"
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


# --- Detection of divergence in runs that sample or learn from rewards ---

PATIENCE = 3
"""Bad rows in a row that stop a run."""

FAR = 4.0
"""Times the allowed KL from which one row is enough."""

NATS_PER_TOKEN = 0.5
"""KL per token that is allowed to answers so long that `max_kl` nats would be too few for them."""

FELL = 0.2
"""The share of answers that end is bad below this part of what it was."""

VALID = 0.75
"""The share of answers the agent can act on is bad below this part of what it was: 16 answers of which 85 % are valid
look so three times in a row once in 2,000 steps."""

LONGER, SHORTER = 3.0, 0.2
"""Mean tokens of an answer are bad beyond, or below, these times what they began with."""

LONGER_TOKENS = 16
"""Tokens beyond where they began up to which answers are never called longer."""

REPEATS = 0.8
"""Share of repeated 4-grams from which answers are called repetitive, where they began below half of that."""


@dataclass
class Watch:
    """Reads the rows of a run's metrics in order. Names: `kl` (nats per response), `tokens`, `ended`, `valid`,
    `repetition` (shares); those that are missing are not watched."""

    max_kl: float
    """Nats per response beyond where the run began; 0 watches nothing."""
    from_base: bool = True
    """True if the run began as the base; else its first row says how far away it began."""
    bad: int = 0
    """Bad rows in a row so far."""
    last_good: int = 0
    """Step of the last row that was not bad."""
    first: dict[str, float] = field(default_factory=dict)
    """The first value of each."""
    high_marks: dict[str, float] = field(default_factory=dict)
    """Of the shares `ended` and `valid`: the highest that PATIENCE rows in a row reached, at least the first. A run
    that learnt the form and loses it again has lost something, wherever it began."""
    _newest: list[Mapping[str, float]] = field(default_factory=list)
    reason: str = ""
    """Reason why the run has to stop; empty while it may go on."""

    def see(self, step: int, row: Mapping[str, float]) -> str:
        """Read the row of a step; returns `reason`."""
        if not self.max_kl:
            return ""
        fault, at_once = self._fault(row)
        watched = ("ended", "valid", "repetition", "tokens")
        for name in watched if self.from_base else ("kl", *watched):
            if math.isfinite(value := row.get(name, math.nan)):
                self.first.setdefault(name, value)
        self._newest = [*self._newest, row][-PATIENCE:]
        for name in ("ended", "valid"):
            values = [one.get(name, math.nan) for one in self._newest]
            sustained = min(values) if len(values) == PATIENCE and all(map(math.isfinite, values)) else -1.0
            self.high_marks[name] = max(
                self.high_marks.get(name, -1.0), self.first.get(name, -1.0), sustained
            )
        if not fault:
            self.bad, self.last_good = 0, step
        else:
            self.bad += 1
            if at_once or self.bad >= PATIENCE:
                self.reason = f"diverged at step {step}: {fault}"
        return self.reason

    def _fault(self, row: Mapping[str, float]) -> tuple[str, bool]:
        tokens = row.get("tokens", math.nan)
        allowed = max(self.max_kl, NATS_PER_TOKEN * tokens) if math.isfinite(tokens) else self.max_kl
        kl = row.get("kl", 0.0)
        began = 0.0 if self.from_base else self.first.get("kl", kl)
        moved = kl - began
        if not moved <= allowed:
            beyond = f", {began:.0f} at first" if began else ""
            fault = f"KL to the reference {kl:.0f} nats per response{beyond}, {allowed:.0f} allowed (max_kl)"
            return fault, not moved <= FAR * allowed
        words = {
            "ended": (FELL, "{0:.0f} % of answers end, {1:.0f} % did before"),
            "valid": (VALID, "{0:.0f} % of answers are valid, {1:.0f} % were before"),
        }
        for name, (share, fault) in words.items():
            now, before = row.get(name, math.nan), self.high_marks.get(name, math.nan)
            if before >= 0.25 and now < share * before:
                return fault.format(100 * now, 100 * before), False
        first = self.first.get("tokens", math.nan)
        if tokens > max(LONGER * first, first + LONGER_TOKENS):
            return f"answers have {tokens:.0f} tokens, {first:.0f} at first", False
        if tokens < SHORTER * first and self.first.get("ended", 0.0) >= 0.5:
            return f"answers have {tokens:.1f} tokens, {first:.0f} at first", False
        now, began = row.get("repetition", math.nan), self.first.get("repetition", math.nan)
        if began <= REPEATS / 2 and now >= REPEATS:
            return f"{100 * now:.0f} % of what answers say they said before", False
        return "", False


def repetition_of(responses: Sequence[Sequence[int]]) -> float:
    """Mean share of 4-grams of tokens that stand in a response before; 0 where no response is that long."""
    shares = []
    for tokens in responses:
        grams = Counter(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        if grams:
            shares.append(1 - len(grams) / grams.total())
    return math.fsum(shares) / len(shares) if shares else 0.0
