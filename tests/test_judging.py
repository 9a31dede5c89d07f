"""A policy learnt from anything but pairs is judged, gated, and promoted or refused: own agents, end to end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from feedback.services import decision_record, rating_submit
from rl import registry
from rl.evaluations import EvaluationOrder, evaluate
from rl.judgements import Split
from rl.judging import comparison_newest, policy_judge
from rl.models import Policy, Snapshot, TrainingRun
from rl.recipes import KTORecipe
from rl.training.hardware import Hardware
from rl.training.kto import KTOTrainer
from tests.standing import stand
from tests.tiny import tiny_model

pytestmark = pytest.mark.django_db

HARDWARE = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")

KIND, RUDE = "Gladly, here is how that works.", "Find out for yourself, I am busy."
KNOBS: dict[str, Any] = {
    "batch_size": 8, "learning_rate": 5e-3, "lora_r": 4, "lora_alpha": 8, "max_length": 96,
    "max_completion_length": 32, "warmup_ratio": 0.0, "max_steps": 24,
}  # fmt: skip


def questions(count: int, split: Split, agent: str = "own-bot") -> list[str]:
    """Different questions that stand on that side for good."""
    asks = [f"Could you explain point {i} of the {split} list to me?" for i in range(count)]
    for ask in asks:
        stand(agent, [{"role": "user", "content": ask}], split)
    return asks


def rated(agent: str, asks: list[str], *, shuffled: bool = False) -> list[dict[str, Any]]:
    """One answer and one thumb for each question; people like kind ones, or nothing in particular."""
    rng, rows = random.Random(3), []
    for number, ask in enumerate(asks):
        answer = (KIND, RUDE)[number % 2]
        up = rng.random() < 0.5 if shuffled else answer == KIND
        messages = [{"role": "user", "content": ask}]
        decision = decision_record(agent=agent, messages=messages, response=answer).row
        rating_submit(decision=decision, rater="ann" if number % 3 else "bob", thumb="up" if up else "down")
        rows.append({"prompt": messages, "completion": answer, "label": up})
    return rows


def registered(agent: str, base: Path, adapter: Path) -> Policy:
    run = TrainingRun.objects.create(
        agent=agent, method="kto", base_model=str(base), status="succeeded", finished_at=timezone.now()
    )
    return registry.policy_register(
        run,
        name=registry.policy_name_next(agent, 1),
        adapter=adapter,
        adapter_sha256="0" * 64,
        feedback_count=1,
        actor="test",
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "base", "llama")


def learnt(base: Path, rows: list[dict[str, Any]], folder: Path) -> Path:
    trainer = KTOTrainer(KTORecipe(**KNOBS), str(base), output_dir=folder, hardware=HARDWARE)
    return Path(trainer.train(rows).checkpoint)


@pytest.mark.training
def test_thumbs_of_an_own_agent_make_a_policy_that_is_promoted(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rated("own-bot", questions(48, "train"))
    rated("own-bot", questions(40, "holdout"))
    policy = registered("own-bot", base, learnt(base, rows, tmp_path / "run"))
    call_command("evaluate_model", policy=policy.name, compare_base=True, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["carried_by"] == "labels"
    assert found["preference_accuracy"] is None
    labels = found["evidence"]["labels"]
    assert labels["prompts"] == labels["responses"] == found["samples"] == 40
    assert labels["concordance"]["value"] > 0.9
    assert labels["probability_liked"]["log_loss"] < labels["probability_liked"]["against_log_loss"]
    assert found["comparison"]["difference"]["low"] > 0.2
    # what a tiny model of random weights writes says nothing; the gate's other rules are not this test's
    evaluation = comparison_newest(policy)
    assert evaluation is not None
    assert evaluation.snapshot is not None
    assert evaluation.snapshot.kind == Snapshot.Kind.SCORES
    verdicts = {verdict.rule: verdict for verdict in policy_judge(policy).verdicts}  # type: ignore[union-attr]
    assert verdicts["evidence"].words == "40 held-out prompts with thumbs, stars or scores were judged"
    assert verdicts["accuracy"].outcome == "passed"
    # one lower bound everywhere
    policy.refresh_from_db()
    bound = verdicts["accuracy"].figures["low"]
    assert policy.metrics["difference"]["low"] == found["comparison"]["gate"]["low"] == bound
    call_command("evaluate_model", policy=policy.name, compare_base=True)
    said = capsys.readouterr().out
    assert said.startswith(
        "own-bot: no held-out prompt has two answers of which one is preferred, so there are no pairs to compare. "
        "Judged on labels instead, thumbs, stars and scores on single answers: 40 held-out prompts."
    )
    assert "Better than base: +" in said


@pytest.mark.training
def test_shuffled_thumbs_promote_nothing(base: Path, tmp_path: Path) -> None:
    rows = rated("own-bot", questions(48, "train"), shuffled=True)
    rated("own-bot", questions(40, "holdout"), shuffled=True)
    policy = registered("own-bot", base, learnt(base, rows, tmp_path / "run"))
    evaluate(EvaluationOrder(policy=policy.name, compare_base=True))
    with pytest.raises(
        registry.RegistryRefused, match=r"no gain beyond chance is shown: .* in concordance with"
    ):
        registry.policy_promote(policy, actor="test")
