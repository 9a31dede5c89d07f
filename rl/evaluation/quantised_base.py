"""Answers of a policy on its quantised base: llama.cpp in process, with the adapter on the base's own GGUF file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl.agents.base import Agent
from rl.serving.base import BASE, Ask, Model
from rl.serving.files import base_file
from rl.serving.llama import LlamaPolicy

if TYPE_CHECKING:
    from rl.training.evaluate_answers import HeldOutPrompt
    from rl.training.policy import Generation

    Answerer = Callable[[HeldOutPrompt], Generation]


class QuantisedBaseRefused(ValueError):
    """No GGUF file of the base model, or an adapter that none can hold; the message says what to do."""


@contextmanager
def quantised_answerer(base_model: str, adapter: Path, agent: Agent) -> Iterator[tuple[Answerer, Path]]:
    """A function that answers a held-out prompt as the agent is served, and the base's file that it answers on: the one
    that the base was made from, else the one that serving uses. Raises QuantisedBaseRefused, ExportRefused."""
    from rl.export.gguf_lora import lora_write
    from rl.export.gguf_names import layout_of
    from rl.export.source import base_identity, original_of, source_open

    source = source_open(base_model, adapter)
    original, note = original_of(source.base)
    identity = base_identity(base_model, source.base)
    file = original.file if original else base_file(Model(BASE, base_model, identity))
    if file is None:
        raise QuantisedBaseRefused(
            f"expected a GGUF file of {base_model}, found none{f' ({note})' if note else ''}; make one: "
            f"export_model --base-model {base_model} --format gguf --quantization q4_k_m"
        )
    layout = layout_of(source.weights.base.config)
    if layout is None or source.weights.replaced_names():
        raise QuantisedBaseRefused(
            f"expected an adapter that llama.cpp loads, found {adapter}; evaluate it without --quantization gguf"
        )
    with tempfile.TemporaryDirectory(prefix="ratchet-evaluate-") as folder:
        lora = Path(folder) / "adapter.gguf"
        lora_write(source, layout, lora, source.name)
        with LlamaPolicy(file) as llama:
            yield lambda prompt: _answer(llama, lora, agent, prompt), file


def _answer(llama: LlamaPolicy, lora: Path, agent: Agent, prompt: HeldOutPrompt) -> Generation:
    from rl.training.policy import Generation

    state = prompt.row.get("state")
    messages = [dict(message) for message in prompt.messages]
    if choices := list(agent.choices(state)):
        scores = llama.log_probabilities(messages, choices, lora)
        return Generation(choices[max(range(len(choices)), key=scores.__getitem__)], 1, "stop")
    asked = Ask(messages, agent.max_new_tokens, temperature=0, response_schema=agent.schema_served(state))
    found = llama.answer(asked, lora)
    return Generation(
        found.text, found.tokens_out or 0, "stop" if found.finish_reason == "stop" else "length"
    )
