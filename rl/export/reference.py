"""Reference of an export: outputs of base + adapter, and of the base alone, in transformers."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psutil
import torch
from peft.utils.other import ModulesToSaveWrapper
from transformers.utils import logging as transformers_logging

from rl.agents.base import Message
from rl.export.agreement import Expected, FloatArray, references_kept
from rl.export.artifact import ExportRefused, Progress, silent
from rl.export.source import Source
from rl.training.encoding import Encoder, NotRenderable
from rl.training.hardware import detect
from rl.training.loading import PolicyLoadError
from rl.training.policy import load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
"""Fixed check prompts: ASCII and other scripts, digits, white space, code."""

CHECK_TOKENS = 256
"""Most tokens of a prompt that are compared."""

SMALL_BYTES = 64 * 1024**2
"""Smaller weights are computed on one core."""

LOOK_S = 0.2
"""Time for which the cores are watched to see how many are idle."""

POSITIONS_BYTES = 512 * 1024**2
"""Memory for log-probabilities; with a large vocabulary only the last positions of each prompt are kept."""

HELD_OUT_TOKENS = 512
"""Longer held-out prompts are not compared: their logits would not fit small machines."""

ANSWER_TOKENS = 48
"""Most tokens of an answer to a held-out prompt that are compared."""

ANSWERED_TOGETHER = 24
"""Held-out prompts answered per batch."""


@dataclass(frozen=True)
class CheckPrompt:
    """A rendered prompt, and its token ids in transformers."""

    text: str
    ids: list[int]
    framed: bool
    """True if the tokenizer added its own bos and eos; a chat template writes them itself."""
    held_out: bool = False
    """True for a held-out prompt, whose answer is compared."""


@dataclass(frozen=True)
class Reference:
    """The original's outputs on the check prompts."""

    prompts: list[CheckPrompt]
    policy: list[Expected] = field(default_factory=list)
    """Of base + adapter; empty if it was not loaded."""
    base: list[Expected] = field(default_factory=list)
    """Of the base alone; empty if not requested, or without an adapter."""
    skip_reason: str = ""
    """Why the original was not run; else empty."""


def check_prompts(
    tokenizer: PreTrainedTokenizerBase, held_out: Sequence[Sequence[Message]] = ()
) -> list[CheckPrompt]:
    """CHECK_TEXTS and held-out prompts, in the chat template if there is one.

    Held-out prompts that the template cannot render, or longer than HELD_OUT_TOKENS, are left out.
    """
    framed = not tokenizer.chat_template
    texts = [[{"role": "user", "content": text}] for text in CHECK_TEXTS]
    found = []
    for number, turns in enumerate([*texts, *held_out]):
        try:
            text = (
                "\n\n".join(turn["content"] for turn in turns) if framed else Encoder(tokenizer).render(turns)
            )
        except NotRenderable:
            if number < len(texts):
                raise
            continue
        ids = tokenizer(text, add_special_tokens=framed)["input_ids"]
        if number < len(texts) or len(ids) <= HELD_OUT_TOKENS:
            found.append(CheckPrompt(text, ids, framed, held_out=number >= len(texts)))
    return found


def reference_make(
    source: Source,
    prompts: Sequence[CheckPrompt],
    *,
    with_base: bool = False,
    progress: Progress = silent,
) -> Reference:
    """Runs the original; with_base: also the base alone.

    Memory: one copy of the weights as stored, and one module in float32. If free memory does not suffice, nothing is
    loaded and `skip_reason` says so. Within `references_shared` the original runs once.
    """
    base, kept = source.weights.base, references_kept()
    with_base = with_base and source.adapter is not None
    key = (source.base, source.adapter and source.adapter.path, with_base, repr(prompts))
    if kept is not None and key in kept:
        found: Reference = kept[key]
        return found
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
        positions = positions_retained(model, len(prompts) * (1 + with_base))
        policy = _expected(model, prompts, positions, "asking the original", progress)
        of_base = []
        if with_base:
            with model.disable_adapter():
                of_base = _expected(model, prompts, positions, "asking the base model", progress)
    found = Reference(list(prompts), policy, of_base)
    if kept is not None:
        kept[key] = found
    return found


def _expected(
    model: PreTrainedModel, prompts: Sequence[CheckPrompt], kept: int, stage: str, progress: Progress
) -> list[Expected]:
    """kept: positions of each text whose log-probabilities are kept."""
    progress(stage, 0, len(prompts))
    asked = [prompt.ids for prompt in prompts if prompt.held_out]
    batches = [asked[at : at + ANSWERED_TOGETHER] for at in range(0, len(asked), ANSWERED_TOGETHER)]
    answers = iter([answer for batch in batches for answer in greedy_answers(model, batch, ANSWER_TOKENS)])
    found = []
    for number, prompt in enumerate(prompts):
        if prompt.held_out:
            answer = next(answers)
            ids, positions = prompt.ids + answer[:-1], len(answer)
        else:
            ids = prompt.ids[:CHECK_TOKENS]
            positions = min(kept, len(ids))
        rows = log_probabilities(model, ids, positions)
        # a copy: a view would keep every row in memory
        found.append(Expected(ids, rows.argmax(-1).tolist(), rows[-kept:].copy(), prompt.held_out))
        progress(stage, number + 1, len(prompts))
    return found


@contextmanager
def original_model(source: Source) -> Iterator[PreTrainedModel]:
    """Base + adapter in transformers and PEFT, computing in float32.

    In bfloat16 the original would differ from itself more than an export may. Weights are held in float32 if a quarter
    of the free memory suffices, else as stored and widened one module at a time.
    """
    base = source.weights.base
    fits = 4 * base.parameters < psutil.virtual_memory().available / 4
    held = "float32" if fits else str(base.main_dtype).removeprefix("torch.")
    hardware = replace(_machine(), device="cpu", dtype=held)
    try:
        with transformers_quiet():
            adapter = source.adapter.path if source.adapter is not None else None
            model = load_policy(str(source.base), adapter, hardware=hardware).model
    except PolicyLoadError as error:
        raise ExportRefused(str(error)) from error
    whole_weights_rounded(model, base.main_dtype)
    for module in model.modules():
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters(recurse=False)):
            _compute_in_float32(module)
    try:
        with torch_cores(cores_for(base.total_bytes)):
            yield model
    finally:
        del model
        gc.collect()


def whole_weights_rounded(model: PreTrainedModel, served: torch.dtype) -> None:
    """Rounds fully trained weights in place to the base's precision, as they are served and merged."""
    for copies in (
        module.modules_to_save for module in model.modules() if isinstance(module, ModulesToSaveWrapper)
    ):
        for weight in copies.parameters():
            weight.data = weight.data.to(served).to(weight.dtype)


_machine = functools.cache(detect)


def cores_available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_for(weights_bytes: int) -> int:
    """Cores to compare a model on: one for small weights, else the idle ones.

    Threads synchronise at every layer: on a busy machine, or with little work, two are slower than one. The load
    average would count what this process itself computed in the last minute.
    """
    if weights_bytes < SMALL_BYTES:
        return 1
    busy = psutil.cpu_percent(LOOK_S) / 100 * (psutil.cpu_count() or 1)
    return max(1, cores_available() - round(busy))


@contextmanager
def torch_cores(count: int) -> Iterator[None]:
    """Inside the block torch uses at most `count` cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, count))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compute_in_float32(module: torch.nn.Module) -> None:
    held: dict[str, torch.Tensor] = {}

    def widen(module: torch.nn.Module, _: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            held[name] = parameter.data
            parameter.data = parameter.data.float()

    def narrow(module: torch.nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = held.pop(name)

    module.register_forward_pre_hook(widen)
    module.register_forward_hook(narrow)


def positions_retained(model: PreTrainedModel, prompts: int) -> int:
    """Positions per prompt that fit POSITIONS_BYTES; at least one."""
    return max(1, POSITIONS_BYTES // (4 * int(model.config.vocab_size) * max(prompts, 1)))


def log_probabilities(model: PreTrainedModel, ids: Sequence[int], positions: int) -> FloatArray:
    """Log-probabilities of the next token after each of the last `positions` tokens: (positions, vocabulary)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -positions:]
        found: FloatArray = torch.log_softmax(logits.float(), dim=-1).numpy()
    return found


def greedy_answers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Greedy continuation of each prompt, at most `tokens` long, including its end token."""
    settings, width = copy.deepcopy(model.generation_config), max(len(ids) for ids in prompts)
    settings.do_sample, settings.max_new_tokens = False, tokens
    stop = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    ids = torch.full((len(prompts), width), int(settings.pad_token_id))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    answers = []
    for answer in out[:, width:].tolist():
        end = next((place for place, token in enumerate(answer) if token in stop), len(answer) - 1)
        answers.append(answer[: end + 1])
    return answers


@contextmanager
def transformers_quiet() -> Iterator[None]:
    """Silences transformers' progress bars and warnings."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
