"""Scripts of benchmarks: what a pair costs, the newcomer's way, and the demo on a real base model."""

from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rl.management.demo import NEW, TAUGHT, model_demo, tickets
from rl.models import Policy
from tests.support.serving import written_by_the_asking_thread  # noqa: F401
from tests.support.tiny_models import tiny_model


def test_new_wordings_are_none_that_training_sees() -> None:
    assert not {text for texts in NEW.values() for text in texts} & {t for ts in TAUGHT.values() for t in ts}
    ticket = next(tickets(NEW, seed=1))
    assert ticket.is_right(ticket.answer.replace(" ", ""))
    assert not ticket.is_right("sorry")
    assert len({one.text for one in islice(tickets(TAUGHT, seed=2), 400)}) == 400


class Bar:
    def update(self, done: int, total: int, suffix: str = "") -> None:
        pass


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.prepares
@pytest.mark.usefixtures("written_at_once")
@pytest.mark.django_db
def test_the_loop_walks(tmp_path: Path, ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(ratchet_home))  # of the child that exports
    base = tiny_model(tmp_path / "base", "llama")

    @contextmanager
    def bar(label: str) -> Any:
        yield Bar()

    found = model_demo(str(base), bar, decisions=80, minutes=0.2)
    policy = Policy.objects.get(kind="adapter")
    assert (found.policy, policy.agent) == (policy.name, "triage")
    assert found.promoted == (policy.stage == Policy.Stage.CHAMPION) == (not found.refusal)
    expected = ["the gateway", "adapter on base-f16.gguf", "q4_k_m", "q8_0"]
    assert [one.served_as for one in found.answers] == expected
    assert [file["form"] for file in found.files] == ["adapter", "q4_k_m", "q8_0"]
    assert all(Path(file["path"]).stat().st_size == file["bytes"] for file in found.files)
