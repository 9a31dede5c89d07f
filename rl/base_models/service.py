"""Entry point to base models: add one, name one with `--model`, ask one a question."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from django.conf import settings

from rl.base_models import sources
from rl.base_models.sources import AddedModel, Progress, SourceRefused
from rl.bundled_models import ADDED_FILE, BUNDLED, added_folder, resolve_base_model
from rl.checksums import base_hash
from rl.models import AgentBase, TrainingRun

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


@dataclass(frozen=True)
class Addition:
    """A base model that is being added, or could not be."""

    words: str
    """What is done now, or why it failed."""
    failed: bool = False


def addition_of(text: str) -> Addition | None:
    """The adding of a source under way, or failed; None where there is none."""
    try:
        return Addition(**json.loads(_addition_file(text).read_text("utf-8")))
    except FileNotFoundError:
        return None


def addition_note(text: str, words: str, *, failed: bool = False) -> Addition:
    """Note how far the adding of a source is."""
    file = _addition_file(text)
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(f".{os.getpid()}")
    noted = Addition(words, failed)
    half.write_text(json.dumps(asdict(noted)), "utf-8")
    half.replace(file)
    return noted


def _addition_file(text: str) -> Path:
    return models_home() / ".adding" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def model_add(text: str, progress: Progress, name: str = "") -> AddedModel:
    """`sources.model_add` with this installation's folders; how far it is can be read meanwhile (`addition_of`).

    Raises SourceRefused.
    """

    def heard(line: str) -> None:
        addition_note(text, line)
        progress(line)

    def convert(file: Path, target: Path, say: Progress) -> tuple[str, int]:
        from rl.base_models.dequantise import ConversionRefused, gguf_to_folder

        try:
            return gguf_to_folder(file, target, say)
        except ConversionRefused as refusal:
            raise SourceRefused(str(refusal)) from refusal

    try:
        added = sources.model_add(
            text, models_home(), convert, name=name, ollama_home=settings.OLLAMA_MODELS, progress=heard
        )
    except SourceRefused as refusal:
        addition_note(text, str(refusal), failed=True)
        raise
    _addition_file(text).unlink(missing_ok=True)
    return added


@dataclass(frozen=True)
class BaseModel:
    """A base model, resolved from what a person, a setting or a run named."""

    name: str
    """As rows and pages have it: `bundled`, `smollm2`, a hub name, a folder, or a source that was not added yet."""
    path: str
    """Folder or hub name that transformers loads; empty for a source that was not added yet."""
    origin: str
    """Who named it, in words."""

    @property
    def is_ready(self) -> bool:
        """False for a source that must be added first."""
        return bool(self.path)

    @property
    def identity(self) -> str:
        """`rl.checksums.base_hash`; empty for a source that was not added yet."""
        return base_hash(self.path) if self.path else ""


GIVEN, SET, LAST_RUN = "named in the order", "the agent's setting", "the base of its newest run"


def base_model_resolve(text: str, origin: str = GIVEN) -> BaseModel:
    """The base model that a text names. Reads names alone, so a wrong one fails at once. Raises SourceRefused."""
    source = sources.source_of(text, models_home())
    if source.is_converted:
        folder = models_home() / source.default_name
        if not (folder / ADDED_FILE).is_file() or AddedModel.load(folder).source != source.stated:
            return BaseModel(source.stated, "", origin)
        return BaseModel(folder.name, str(folder), origin)
    path = resolve_base_model(source.place)
    is_added = (
        source.kind == "folder" and Path(path).parent == models_home() and added_folder(Path(path).name)
    )
    name = Path(path).name if is_added else source.place
    return BaseModel(name, path, origin)


def base_model_given(text: str, progress: Progress) -> BaseModel:
    """The base model that `--model` names, ready to load: a GGUF file, a model in Ollama's store and a package are
    added first, and the hub is asked for a name it must know. Raises SourceRefused."""
    if (source := sources.source_of(text, models_home())).kind == "hub":
        sources.hub_check(source.place)
    found = base_model_resolve(text)
    if not found.is_ready:
        found = base_model_resolve(model_add(text, progress).name)
    return found


def agent_base_model(agent: str, *, given: str | None = None, sections: Sequence[str] = ()) -> BaseModel:
    """The base model of an agent: the one `given`, else its setting, else what RATCHET_CONFIG names in the first of
    `sections` that names one, else the base of its newest run, else RATCHET_BASE_MODEL.

    A setting that names no base model any more is returned as it stands, unready: whoever loads it refuses it.
    """
    if given:
        return _as_named(given, GIVEN)
    if wanted := AgentBase.objects.filter(agent=agent).values_list("base_model", flat=True).first():
        return _as_named(wanted, SET)
    for section in sections:
        if named := settings.RATCHET_BASE_MODELS.get(section):
            return _as_named(str(named), f"base_model of {section} in RATCHET_CONFIG")
    if last := _base_of_newest_run(agent):
        return _as_named(last, LAST_RUN)
    return base_model_default()


def base_model_default() -> BaseModel:
    """The base model of an agent for which nothing was named: RATCHET_BASE_MODEL."""
    return _as_named(settings.RATCHET_BASE_MODEL, "RATCHET_BASE_MODEL")


def _as_named(text: str, origin: str) -> BaseModel:
    try:
        return base_model_resolve(text, origin)
    except SourceRefused:
        return BaseModel(text, "", origin)


def _base_of_newest_run(agent: str) -> str:
    """The base that the agent's newest run trains or trained; a run that failed or was refused may name none there
    is."""
    status = TrainingRun.Status
    runs = TrainingRun.objects.filter(agent=agent).exclude(base_model="").exclude(method="reward_model")
    runs = runs.exclude(status__in=(status.FAILED, status.REFUSED)).order_by("-pk")
    return runs.values_list("base_model", flat=True).first() or ""


def base_model_set(agent: str, text: str) -> BaseModel:
    """Set the base model of an agent; an empty text removes the setting. Raises SourceRefused."""
    if not text:
        AgentBase.objects.filter(agent=agent).delete()
        return agent_base_model(agent)
    found = base_model_resolve(text, SET)
    AgentBase.objects.update_or_create(agent=agent, defaults={"base_model": found.name})
    return found


def base_model_choices() -> list[str]:
    """Names that a page offers: the bundled model, those that were added, those with a short name."""
    added = [model.name for model in sources.models_added(models_home())]
    return list(dict.fromkeys([BUNDLED, *sources.SHORT_NAMES, *added]))


def model_test(text: str, progress: Progress) -> ModelTest:
    """Load a base model and ask it QUESTION. Raises SourceRefused, PolicyLoadError."""
    found = base_model_resolve(text)
    if not found.is_ready:
        raise SourceRefused(f"{text} was not added yet: `model add {text}`")
    from rl.training.hardware import detect
    from rl.training.policy import generate, load_policy

    progress("loading the model")
    began = time.monotonic()
    policy = load_policy(found.path, hardware=detect())
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
