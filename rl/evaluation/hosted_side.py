"""A hosted policy in an evaluation: its upstream is asked the held-out prompts, each once for the same request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings

from feedback.messages import response_of
from rl.agents import get_agent
from rl.models import Policy
from rl.serving.base import Answer, Ask, BackendFailed, Endpoint, Model, ServingRefused
from rl.serving.fallback import upstream_backend
from rl.serving.preparation import model_of
from rl.serving.routing import serving_settings

if TYPE_CHECKING:
    from rl.training.evaluate_answers import HeldOutPrompt
    from rl.training.policy import Generation

AT_ONCE = 8
"""Requests at once."""
TRIES = 4
LONGEST_PAUSE_S = 60.0
"""Longest wait for an upstream that is busy, before one of the TRIES."""


class HostedFailed(ValueError):
    """An upstream that did not answer a held-out prompt; the message says why and what to do."""


def cache_file() -> Path:
    """Answers of hosted models by request. Removed where anything is erased: an answer may repeat its prompt."""
    home: Path = settings.RATCHET_HOME
    return home / "cache" / "hosted-answers.sqlite3"


@dataclass(frozen=True)
class HostedSide:
    """A hosted policy: it gives answers and no log-probabilities."""

    policy: Policy
    progress: Callable[[str], None] = lambda line: None

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def title(self) -> str:
        return self.policy.title

    def answers(self, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        """The answer to each prompt, as the gateway would ask for it; None where the upstream refuses it. Raises
        HostedFailed, also where it refuses all."""
        from rl.training.policy import Generation
        from rl.training.run import RowCache

        model = model_of(self.policy)
        endpoint = model.endpoint
        assert endpoint is not None
        asks = [self._ask(prompt) for prompt in prompts]
        keys = [_key(endpoint, model, ask) for ask in asks]
        cache = RowCache(cache_file())
        known = cache.get(keys)
        missing = {key: ask for key, ask in zip(keys, asks, strict=True) if key not in known}
        if missing:
            self.progress(f"asking {self.name} {len(missing)} of {len(keys)} held-out prompts")
        refusals: list[ServingRefused] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for key, answer in zip(
                missing, pool.map(partial(_answer, endpoint, model), missing.values()), strict=True
            ):
                if isinstance(answer, ServingRefused):
                    refusals.append(answer)
                    continue
                text = response_of([answer.message]).value
                said = text if isinstance(text, str) else json.dumps(text)
                found = [said, answer.tokens_out or 0, answer.finish_reason or "stop"]
                known[key] = json.dumps(found).encode()
                cache.put({key: known[key]})
        if refusals and not known:
            raise HostedFailed(f"{model.name} refused every held-out prompt: {refusals[0]}") from refusals[0]
        if refusals:
            self.progress(f"{self.name} refused {len(refusals)} held-out prompts, such as: {refusals[0]}")
        return [Generation(*json.loads(known[key])) if key in known else None for key in keys]

    def _ask(self, prompt: HeldOutPrompt) -> Ask:
        agent, limits = get_agent(self.policy.agent), serving_settings(self.policy.agent)
        state = prompt.row.get("state")
        schema = agent.response_schema(state if isinstance(state, Mapping) else None)
        return Ask(
            prompt.messages,
            limits.max_tokens,
            temperature=limits.temperature,
            response_schema=schema if agent.structured else None,
        )


def _answer(endpoint: Endpoint, model: Model, ask: Ask) -> Answer | ServingRefused:
    """An answer, waited for where the upstream is busy, or its refusal. Raises HostedFailed."""
    timeout_s = endpoint.timeout_s or settings.SERVING_TIMEOUT_S
    for attempt in range(TRIES):
        try:
            return upstream_backend(endpoint).answer(ask, model, timeout_s)
        except ServingRefused as refusal:
            return refusal
        except BackendFailed as failure:
            if attempt == TRIES - 1 or failure.kind not in ("busy", "open", "failed", "timeout"):
                raise HostedFailed(
                    f"{model.name} did not answer a held-out prompt: {failure}. Answers so far are kept: try again "
                    "later, or compare with base"
                ) from failure
            time.sleep(min(failure.retry_after_s, LONGEST_PAUSE_S))
    raise AssertionError("the last attempt returns or raises")


def _key(endpoint: Endpoint, model: Model, ask: Ask) -> bytes:
    """SHA-256 of whatever an answer depends on."""
    asked = [
        endpoint.url, endpoint.dialect, endpoint.schemas, model.base_model, dict(model.parameters), list(ask.messages),
        ask.max_tokens, ask.temperature, ask.response_schema,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).digest()
