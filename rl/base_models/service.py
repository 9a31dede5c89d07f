"""Entry point to base models: add one, name one with `--model`, ask one a question."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from rl.base_models import sources
from rl.base_models.sources import AddedModel, Progress, SourceRefused

QUESTION = "What is the capital of Italy?"
"""Asked by `model test`: a model that knows English answers it in a few words."""


@dataclass(frozen=True)
class ModelTest:
    """A base model loaded as training does, and its answer to QUESTION."""

    model: str
    answer: str
    load_seconds: float
    tokens_per_second: float
    notes: list[str]
    question: str = QUESTION


def models_home() -> Path:
    """Folder of the models that were added."""
    return Path(settings.RATCHET_HOME) / "models"


def model_add(text: str, progress: Progress, name: str = "") -> AddedModel:
    """`sources.model_add` with this installation's folders. Raises SourceRefused."""

    def convert(file: Path, target: Path, say: Progress) -> tuple[str, int]:
        from rl.base_models.dequantise import ConversionRefused, gguf_to_folder

        try:
            return gguf_to_folder(file, target, say)
        except ConversionRefused as refusal:
            raise SourceRefused(str(refusal)) from refusal

    return sources.model_add(
        text, models_home(), convert, name=name, ollama_home=settings.OLLAMA_MODELS, progress=progress
    )


def base_model_given(text: str, progress: Progress) -> str:
    """The base model that `--model` names, as training takes it: a folder, a hub name, or a bundled one.

    A GGUF file, a model in Ollama's store and a package are added first. Raises SourceRefused.
    """
    source = sources.source_of(text, models_home())
    return str(models_home() / model_add(text, progress).name) if source.is_converted else source.place


def model_test(text: str, progress: Progress) -> ModelTest:
    """Load a base model and ask it QUESTION. Raises SourceRefused, PolicyLoadError."""
    source = sources.source_of(text, models_home())
    if source.is_converted:
        raise SourceRefused(f"{text} was not added yet: `model add {text}`")
    from rl.training.hardware import detect
    from rl.training.policy import generate, load_policy

    progress("loading the model")
    began = time.monotonic()
    policy = load_policy(source.place, hardware=detect())
    loaded = time.monotonic()
    progress("asking a question")
    (answer,) = generate(policy, [[{"role": "user", "content": QUESTION}]], max_new_tokens=24)
    seconds = max(time.monotonic() - loaded, 1e-3)
    return ModelTest(
        text,
        answer.text.strip(),
        round(loaded - began, 1),
        round(answer.tokens / seconds, 1),
        list(policy.notes),
    )
