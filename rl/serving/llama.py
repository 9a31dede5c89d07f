"""Answer with a GGUF file in this process, through llama.cpp. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl.agents.base import Message


class ServingRefused(ValueError):
    """A model file that is missing or that llama.cpp cannot read."""


@dataclass(frozen=True)
class Answer:
    """One answer, and what it took."""

    text: str
    tokens_in: int
    tokens_out: int
    latency_ms: float


class LlamaPolicy:
    """One GGUF file, loaded once; answers chat prompts through its own chat template. Use as a context manager."""

    def __init__(self, path: Path, *, context: int = 2048, threads: int | None = None) -> None:
        from llama_cpp import Llama

        if not path.is_file():
            raise ServingRefused(
                f"expected a GGUF file at {path}, found none; make one with `manage.py export_model`"
            )
        try:
            self._llama = Llama(str(path), n_ctx=context, n_threads=threads, verbose=False)
        except ValueError as error:
            raise ServingRefused(f"llama.cpp cannot read {path}: {error}") from error

    def answer(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        response_schema: dict[str, Any] | None = None,
    ) -> Answer:
        """Answer a prompt; with a JSON schema, decoding is constrained to it."""
        started = time.perf_counter()
        completion: Any = self._llama.create_chat_completion(
            messages=[dict(message) for message in messages],
            max_tokens=max_tokens,
            temperature=temperature,
            response_format={"type": "json_object", "schema": response_schema} if response_schema else None,
        )
        return Answer(
            text=completion["choices"][0]["message"]["content"] or "",
            tokens_in=completion["usage"]["prompt_tokens"],
            tokens_out=completion["usage"]["completion_tokens"],
            latency_ms=1000 * (time.perf_counter() - started),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llama.close()
