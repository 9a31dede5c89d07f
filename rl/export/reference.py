"""Reference of an export: log-probabilities and answers of base + adapter in transformers."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from transformers.utils import logging as transformers_logging

from rl.agents.base import Message
from rl.export.artifact import ExportRefused, Progress, silent
from rl.export.source import Source
from rl.training.encoding import Encoder
from rl.training.hardware import detect
from rl.training.model_files import PolicyLoadError
from rl.training.policy import load_policy

FloatArray = npt.NDArray[np.float32]

CHECK_TEXTS = (
    "question: how did revenue change over the last week\nwidgets: pie_chart, line_chart, table",
    "Where should this file go? invoice_2025-03_Müller.pdf\nfolders: taxes, invoices/2025, inbox",
    "I can't log in anymore; it's the 3rd time today and we've lost 1,250.75 €!",
    "Grüße aus Köln: das Café am Fluß ist schön, naïve Déjà-vu im Jahr 2024.",
    "Сколько будет двадцать один плюс двадцать один?",
    "今日は天気がいいです。東京の人口は何人ですか。你好,世界!",
    "كم عدد الألوان في قوس قزح؟",
    "Reply with an emoji only: 👍🏽 or 🚀",
    'Return JSON: {"a": [1, 22, 333, 4444], "b": "x\\ty"}',
    "def add(a, b):\n    return a + b   # sums\n\n\nprint(add(1, 2))",
)
"""Prompts used where the caller brings none: ASCII and not, digits, white space, code."""

CHECK_TOKENS = 256
"""Tokens of a prompt that are compared at most."""

SMALL_BYTES = 64 * 1024**2
"""Weights below this are multiplied by one core."""

POSITIONS_BYTES = 256 * 1024**2
"""Memory for the kept log-probabilities; a large vocabulary keeps fewer positions of each prompt, the last ones."""


@dataclass(frozen=True)
class CheckPrompt:
    """A text as the model will be asked it, and its token ids in transformers."""

    text: str
    ids: list[int]
    framed: bool
    """True if the tokenizer put its own bos and eos around it (a chat template writes them itself)."""


@dataclass(frozen=True)
class Reference:
    """Answers of the original to the check prompts."""

    prompts: list[CheckPrompt]
    log_probs: list[FloatArray] = field(default_factory=list)
    """Per prompt (positions, vocabulary), natural logarithm, of its last positions; empty where it was not loaded."""
    answers: list[list[int]] = field(default_factory=list)
    """Per prompt the greedy answer's token ids, its end token included; empty where none were asked for."""
    skip_reason: str = ""
    """Reason why the original was not run, else empty."""


def check_prompts(tokenizer: Any, prompts: Sequence[Sequence[Message]] = ()) -> list[CheckPrompt]:
    """The prompts to compare on: those given, else CHECK_TEXTS, in the chat template where there is one."""
    messages = prompts or [[{"role": "user", "content": text}] for text in CHECK_TEXTS]
    if tokenizer.chat_template:
        texts = [Encoder(tokenizer).render(turns) for turns in messages]
        framed = False
    else:
        texts = ["\n\n".join(turn["content"] for turn in turns) for turns in messages]
        framed = True
    return [
        CheckPrompt(text, tokenizer(text, add_special_tokens=framed)["input_ids"], framed) for text in texts
    ]


def reference_make(
    source: Source,
    prompts: Sequence[CheckPrompt],
    answer_tokens: int = 0,
    progress: Progress = silent,
) -> Reference:
    """Ask the original. Memory: one copy of the weights as stored, and one module's in float32.

    answer_tokens: length limit of greedy answers, in tokens; 0 asks for none. Where the machine's free memory would
    not hold the original, nothing is loaded and `skipped` says so.
    """
    base = source.weights.base
    largest = max(base.shape(name)[0] * base.shape(name)[-1] for name in base.names)
    needed = int(base.total_bytes * 1.1) + 8 * largest + POSITIONS_BYTES
    free = psutil.virtual_memory().available
    if needed > free:
        return Reference(
            list(prompts),
            skip_reason=f"comparing with the original needs {needed / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free",
        )
    progress("loading the original", 0, 0)
    with original_model(source) as model:
        log_probs, answers = [], []
        for number, prompt in enumerate(prompts):
            progress("asking the original", number, len(prompts))
            positions = positions_retained(model, len(prompts))
            log_probs.append(log_probabilities(model, prompt.ids[:CHECK_TOKENS], positions))
            if answer_tokens:
                answers.append(greedy_answer(model, prompt.ids, answer_tokens))
    return Reference(list(prompts), log_probs, answers)


@contextmanager
def original_model(source: Source) -> Iterator[Any]:
    """Base + adapter in transformers and PEFT: weights held as stored, every product computed in float32.

    float32 matters: computed in bfloat16, the original would differ from itself by more than an export may.
    """
    base = source.weights.base
    hardware = replace(_machine(), device="cpu", dtype=str(base.main_dtype).removeprefix("torch."))
    try:
        with transformers_quiet():
            adapter = source.adapter.path if source.adapter is not None else None
            model = load_policy(str(source.base), adapter, hardware=hardware).model
    except PolicyLoadError as error:
        raise ExportRefused(str(error)) from error
    for module in model.modules():
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters(recurse=False)):
            _compute_in_float32(module)
    try:
        with torch_cores(cores_for(base.total_bytes)):
            yield model
    finally:
        del model
        gc.collect()


_machine = functools.cache(detect)


def cores_available() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_for(weights_bytes: int) -> int:
    """Cores to compare a model on: one for small weights, else those that are not busy.

    Threads wait for each other at every layer: on a busy machine, or with little to do, two are slower than one.
    """
    if weights_bytes < SMALL_BYTES:
        return 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, cores_available() - round(load))


@contextmanager
def torch_cores(count: int) -> Iterator[None]:
    """Inside, torch multiplies on at most `count` cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, count))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compute_in_float32(module: torch.nn.Module) -> None:
    held: dict[str, torch.Tensor] = {}

    def widen(module: torch.nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            held[name] = parameter.data
            parameter.data = parameter.data.float()

    def narrow(module: torch.nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = held.pop(name)

    module.register_forward_pre_hook(widen)
    module.register_forward_hook(narrow)


def positions_retained(model: Any, prompts: int) -> int:
    """Number of positions of each prompt that fit POSITIONS_BYTES; at least one."""
    return max(1, POSITIONS_BYTES // (4 * int(model.config.vocab_size) * max(prompts, 1)))


def log_probabilities(model: Any, ids: Sequence[int], positions: int) -> FloatArray:
    """Log-probabilities of the next token after each of the last `positions` tokens: (positions, vocabulary)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -positions:]
        found: FloatArray = torch.log_softmax(logits.float(), dim=-1).numpy()
    return found


def greedy_answer(model: Any, ids: Sequence[int], tokens: int) -> list[int]:
    """The most likely continuation, at most `tokens` long, its end token included."""
    prompt = torch.tensor([list(ids)])
    with torch.no_grad():
        answer = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
        )  # fmt: skip
    return [int(token) for token in answer[0, len(ids) :]]


@contextmanager
def transformers_quiet() -> Iterator[None]:
    """No loading bars and no advice from transformers; both return afterwards."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
