"""What tests of serving answer with: GGUF files of the bundled base and two adapters, and a backend that parrots."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import openai
import pytest

from feedback.accounts.authentication import key_create
from feedback.recording.ingest import decision_ingest
from feedback.recording.recorder import Recorder, Storage
from rl.checksums import base_hash
from rl.models import Artifact, Policy
from rl.serving import fallback
from rl.serving.base import Ask, BackendFailed, Model, Piece, SentMessage

BUNDLED = Path(__file__).resolve().parents[2] / "rl" / "bundled_model"


COUNTS: dict[str, Any] = {"tokens_in": 7, "tokens_out": 3, "log_probability": -0.5, "confidence": 0.8}


class Files(NamedTuple):
    """The base and two adapters, as GGUF and as folders."""

    base: Path
    one: Path
    two: Path
    one_folder: Path
    two_folder: Path


@functools.cache
def gguf_files() -> Files:
    """Made unchecked: what the exporters check is tested with them."""
    from rl.export.gguf import writer_for
    from rl.export.gguf_lora import lora_write
    from rl.export.gguf_names import layout_of
    from rl.export.source import source_open
    from tests.support.tiny_models import tiny_adapter

    home = Path(mkdtemp(prefix="ratchet-gguf-"))
    plain = source_open(str(BUNDLED), None)
    writer_for(plain).write(home / "base.gguf", "f16", "base", lambda *_: None)
    for name, seed in (("one", 1), ("two", 2)):
        source = source_open(str(BUNDLED), tiny_adapter(BUNDLED, home / name, seed=seed))
        layout = layout_of(source.weights.base.config)
        assert layout is not None
        lora_write(source, layout, home / f"{name}.gguf", name)
    return Files(home / "base.gguf", home / "one.gguf", home / "two.gguf", home / "one", home / "two")


class Parrot:
    """A backend that says what it was told to say, at once; or fails as it was told to."""

    name = "parrot"

    def __init__(self, said: str = "hello there") -> None:
        self.said = said
        self.tool_calls: list[dict[str, Any]] = []
        self.asked: list[tuple[Ask, Model]] = []
        self.failing: dict[str, Exception] = {}
        """Policy -> what is raised for it."""

    def _asked(self, ask: Ask, model: Model) -> None:
        self.asked.append((ask, model))
        if model.name in self.failing:
            raise self.failing[model.name]

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        self._asked(ask, model)
        reason = "stop"
        if self.tool_calls and not ask.stream:
            yield Piece({"tool_calls": [{"index": n, **call} for n, call in enumerate(self.tool_calls)]})
            reason = "tool_calls"
        else:
            for word in self.said.split(" ") if ask.stream else [self.said]:
                yield Piece.of_text(word + " " if ask.stream else word)
        if ask.stream and "broken" in self.said:
            raise BackendFailed("the line went dead")
        yield Piece(end=True, finish_reason=reason, **COUNTS)

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        self._asked(Ask(messages), model)
        return [-float(len(response)) for response in responses]


@pytest.fixture(name="parrot")
def parrot_only(monkeypatch: pytest.MonkeyPatch) -> Parrot:
    """The only backend of this test."""
    parrot = Parrot()
    monkeypatch.setattr(fallback, "backends", lambda: [parrot])
    return parrot


@pytest.fixture(name="written_at_once")
def written_by_the_asking_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are recorded by the thread that asks, inside the test's transaction."""

    def record(self: Recorder, facts: Any, *, hold: bool = True) -> Storage:
        decision_ingest(**facts, reserved=True)
        return Storage.DATABASE

    monkeypatch.setattr(Recorder, "record", record)
    monkeypatch.setattr(Recorder, "note", record)


def policy_made(name: str, agent: str = "widgets", stage: str = "champion") -> Policy:
    """A policy in the registry with a GGUF adapter on record."""
    policy = Policy.objects.create(
        name=name,
        agent=agent,
        stage=stage,
        base_model="bundled",
        base_model_hash=base_hash(str(BUNDLED)),
        adapter_path="nowhere",
        adapter_sha256="",
        feedback_count=1,
    )
    Artifact.objects.create(
        policy=policy, format="gguf-lora", path=f"exports/{name}-LoRA.gguf", bytes=1, sha256="0"
    )
    return policy


@pytest.fixture(name="client")
def openai_client(live_server: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's own client against the running gateway, with a key that may ask, read and rate."""
    key = key_create("app", ["ingest", "read", "rate"])[1]
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=key, max_retries=0) as made:
        yield made


@pytest.fixture(name="support_bot")
def support_bot_allowed(settings: Any) -> None:
    """`support-bot` may be asked although it decided nothing yet."""
    settings.GATEWAY_NEW_AGENTS = ["support-bot"]
