"""A policy learnt from anything but pairs is judged, gated, and promoted or refused: own agents, end to end."""

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
from django.core.management import call_command
from django.utils import timezone

from feedback.selectors import prompt_hash
from feedback.services import decision_record, rating_submit
from rl.agents import get_agent
from rl.checksums import file_sum
from rl.datasets import prepare_training_dataset
from rl.datasets.feedback_types import Split
from rl.datasets.held_out_evidence import evidence_counts
from rl.datasets.rows import FeedbackFile
from rl.evaluation.service import EvaluationOrder, EvaluationRefused, evaluate
from rl.evaluation.sides import barred_reason, rewards_of_training
from rl.gates.evidence_kinds import KNOWN
from rl.models import AgentDefinition, Policy, PromptSplit, Snapshot, TrainingRun
from rl.recipes import KTORecipe, SFTRecipe
from rl.registry import service as registry
from rl.registry.gate_evidence import comparison_newest, policy_judge
from rl.rewards.base import RewardSample
from rl.training.evaluate import evaluate_policy
from rl.training.kto import KTOTrainer
from rl.training.policy import load_policy
from rl.training.scoring import kl_to_reference, score_encoded, written_gain
from rl.training.sft import SFTTrainer
from tests.support.split_prompts import stand
from tests.support.tiny_models import HARDWARE, tiny_model

pytestmark = pytest.mark.django_db


KIND, RUDE = "Gladly, here is how that works.", "Find out for yourself."
KNOBS: dict[str, Any] = {"batch_size": 8, "learning_rate": 5e-3, "lora_r": 4, "lora_alpha": 8}
KNOBS |= {"max_length": 96, "max_completion_length": 32, "warmup_ratio": 0.0, "max_steps": 24}


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
        decision = decision_record(agent=agent, messages=messages, response=answer, source="simulation").row
        rating_submit(decision=decision, rater="ann" if number % 3 else "bob", thumb="up" if up else "down")
        rows.append({"prompt": messages, "completion": answer, "label": up})
    return rows


def registered(
    agent: str, base: Path, adapter: Path, method: str = "kto", recipe: dict[str, Any] | None = None
) -> Policy:
    run = TrainingRun.objects.create(
        agent=agent,
        method=method,
        recipe=recipe or {},
        base_model=str(base),
        status="succeeded",
        finished_at=timezone.now(),
    )
    return registry.policy_register(
        run,
        name=registry.policy_name_next(agent, 1),
        adapter=adapter,
        adapter_sha256=file_sum(weights)
        if (weights := adapter / "adapter_model.safetensors").is_file()
        else "",
        feedback_count=1,
        actor="test",
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "base", "llama")


def learnt(base: Path, rows: list[dict[str, Any]], folder: Path) -> Path:
    trainer = KTOTrainer(KTORecipe(**KNOBS), str(base), output_dir=folder, hardware=HARDWARE)
    return Path(trainer.train(rows).checkpoint)


@pytest.mark.campaign
@pytest.mark.training
def test_thumbs_alone_promote(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rated("own-bot", questions(48, "train"))
    rated("own-bot", questions(40, "holdout"))
    policy = registered("own-bot", base, learnt(base, rows, tmp_path / "run"))
    call_command("evaluate_model", policy=policy.name, compare_base=True, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["carried_by"] == "known"
    assert found["preference_accuracy"] is None
    labels = found["evidence"]["labels"]
    assert labels["prompts"] == labels["responses"] == found["samples"] == 40
    assert labels["concordance"]["value"] > 0.9
    assert found["evidence"]["known"]["own"] == {**found["evidence"]["known"]["own"], "value": 1.0, "n": 40}
    # what a tiny model of random weights writes says nothing; the gate's other rules are not this test's
    assert comparison_newest(policy).snapshot.kind == Snapshot.Kind.SCORES
    verdicts = {verdict.rule: verdict for verdict in policy_judge(policy).verdicts}  # type: ignore[union-attr]
    assert (verdicts["evidence"].figures["prompts"], verdicts["evidence"].figures["kind"]) == (40, KNOWN)
    assert verdicts["accuracy"].outcome == "passed"
    # one lower bound everywhere
    policy.refresh_from_db()
    bound = verdicts["accuracy"].figures["low"]
    assert policy.metrics["difference"]["low"] == found["comparison"]["gate"]["low"] == bound
    call_command("evaluate_model", policy=policy.name, compare_base=True)
    said = capsys.readouterr().out
    assert said.startswith("Right in 40 of 40 held-out prompts; the base model in 0")
    assert "40 held-out prompts" in said
    assert "Ready to promote." in said


@pytest.mark.training
def test_shuffled_thumbs_promote_nothing(base: Path, tmp_path: Path) -> None:
    rows = rated("own-bot", questions(48, "train"), shuffled=True)
    rated("own-bot", questions(40, "holdout"), shuffled=True)
    policy = registered("own-bot", base, learnt(base, rows, tmp_path / "run"))
    evaluate(EvaluationOrder(policy=policy.name, compare_base=True))
    with pytest.raises(registry.RegistryRefused, match=r"not shown to be better: .* in right answers"):
        registry.policy_promote(policy, actor="test")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter that learnt from demonstrations to answer kindly."""
    folder = tmp_path_factory.mktemp("taught")
    base = tiny_model(folder / "base", "llama")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Could you explain point {i} {of}to me?"}],
            "completion": KIND,
        }
        for i in range(100, 112)
        for of in ("", "of the holdout list ")
    ]
    recipe = SFTRecipe(**{**KNOBS, "max_steps": 30})
    trainer = SFTTrainer(recipe, str(base), output_dir=folder / "run", hardware=HARDWARE)
    return base, Path(trainer.train(rows).checkpoint)


def corrected(agent: str, asks: list[str]) -> None:
    for ask in asks:
        decision = decision_record(
            agent=agent, messages=[{"role": "user", "content": ask}], response=RUDE, source="simulation"
        ).row
        rating_submit(decision=decision, rater="ann", correction=KIND)


@pytest.mark.campaign
@pytest.mark.training
def test_what_people_wrote_is_evidence_beside_the_pairs_it_makes(taught: tuple[Path, Path]) -> None:
    base, adapter = taught
    AgentDefinition.objects.create(
        slug="own-bot", title="Own bot"
    )  # free text, however often it says the same
    corrected("own-bot", questions(34, "holdout"))
    policy = registered("own-bot", base, adapter, method="sft")
    found = evaluate(EvaluationOrder(policy=policy.name, compare_base=True))
    assert found["carried_by"] == "pairs"  # a correction beats what it corrects
    written = found["evidence"]["corrections"]
    assert (written["prompts"], written["unit"]) == (34, "nats per token")
    assert written["difference"]["low"] > 1
    assert written["value"] == pytest.approx(written["own"]["value"])
    verdicts = {verdict.rule: verdict for verdict in policy_judge(policy).verdicts}
    assert verdicts["other_evidence"].outcome == "passed"
    assert "nats per token in agreement with what people wrote" in verdicts["other_evidence"].words


@pytest.mark.training
def test_demonstrations_alone_carry_the_judgement(taught: tuple[Path, Path]) -> None:
    base, adapter = taught
    rows = [
        {"prompt": [{"role": "user", "content": f"Would you explain item {i}?"}], "completion": text}
        for i in range(16)
        for text in (KIND, KIND + " Truly.")
    ]
    policy = load_policy(str(base), adapter, hardware=HARDWARE)
    found = evaluate_policy(
        policy, agent=get_agent("own-bot"), others={"corrections": rows}, against="base", generate_samples=2
    )
    assert found["carried_by"] == "corrections"
    assert (
        found["evidence"]["corrections"]["prompts"] == 16
    )  # two texts to one prompt are one piece of evidence
    assert found["comparison"]["difference"]["low"] > 0
    assert found["preference_accuracy"] is None
    # against the base, what is gained over the base is the very difference
    gain = written_gain(policy, rows)
    assert gain.value == pytest.approx(found["comparison"]["difference"]["value"], rel=1e-4)
    assert 0 < gain.low < gain.value < gain.high
    assert written_gain(load_policy(str(base), hardware=HARDWARE), rows) is None
    alone = evaluate_policy(
        policy, agent=get_agent("own-bot"), others={"corrections": rows}, generate_samples=2
    )
    assert alone["evidence"]["corrections"]["own"] == found["evidence"]["corrections"]["own"]


@pytest.mark.training
def test_distances_within_a_form_are_of_what_is_served(taught: tuple[Path, Path]) -> None:
    base, adapter = taught
    policy = load_policy(str(base), adapter, hardware=HARDWARE)
    prompts = [[{"role": "user", "content": f"Would you explain item {i}?"}] for i in range(4)]
    answers = [(prompt, KIND) for prompt in prompts]
    forms = [(KIND, RUDE)] * len(prompts)
    free, within = kl_to_reference(policy, answers), kl_to_reference(policy, answers, forms)
    assert free is not None
    assert within is not None
    # of two answers no distance is more than what tells them apart at the base, however strange both are to it
    items = policy.encoder.responses([(prompt, text) for prompt, text in answers])
    told_apart = policy.answer_forms()
    for item, form in zip(items, forms, strict=True):
        told_apart.add(item.prompt_ids, form)
    with policy.without_adapter():
        least = min(score_encoded(policy, items, forms=told_apart))
    assert 0 <= within <= -least / min(len(item.response_ids) for item in items)
    assert within < free / 10
    # an answer that its form forbids is as far from the base as free text
    assert kl_to_reference(policy, answers, [("Yes", "No")] * len(prompts)) == pytest.approx(free)
    # what a form forbids is no evidence of how far people lie away
    rows = [{"prompt": prompt, "completion": KIND} for prompt in prompts]
    assert written_gain(policy, rows, [("Yes", "No")] * 4) is None
    assert written_gain(policy, rows, forms).value < 1


@pytest.mark.training
def test_a_structured_agent_agrees_where_its_greedy_answer_does_the_same(taught: tuple[Path, Path]) -> None:
    base, adapter = taught
    agent = get_agent("filer")
    rows = [
        {"prompt": [{"role": "user", "content": f"Could you explain point {i} to me?"}], "completion": KIND}
        for i in range(4)
    ]
    policy = load_policy(str(base), adapter, hardware=HARDWARE)
    found = evaluate_policy(
        policy, agent=agent, others={"corrections": rows}, against="base", generate_samples=1
    )
    written = found["evidence"]["corrections"]
    assert (written["prompts"], written["unit"]) == (4, "points")
    assert written["value"] >= written["against_value"] == 0.0


@pytest.mark.training
def test_right_answers_judge_an_unrated_policy(taught: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = taught
    for number in range(32):
        ask = f"Could you explain point {number} to me?"
        stand("own-bot", [{"role": "user", "content": ask}], "holdout")
        decision_record(
            agent="own-bot",
            messages=[{"role": "user", "content": ask}],
            response=RUDE,
            metadata={"answer": KIND},
            source="simulation",
        )
    assert evidence_counts("own-bot")[0]["tests"] == 32
    begun = registered("own-bot", base, adapter, method="sft")
    assert begun.run is not None
    begun.run.snapshot = demonstrations("own-bot", tmp_path / "shown.jsonl")
    begun.run.save()
    recipe = {"reward": "answer", "start_from": begun.name}
    policy = registered("own-bot", base, adapter, method="grpo", recipe=recipe)
    found = evaluate(EvaluationOrder(policy=policy.name, compare_base=True))
    assert found["carried_by"] == "tests"
    # nobody wrote an answer to these prompts; what was shown to the policy it began with is how far people lie away
    assert 0 < found["written_gain"]["low"] < found["written_gain"]["value"]
    tests = found["evidence"]["tests"]
    assert tests["prompts"] == 32
    # whether so few steps teach the very words differs between machines; a random base never says them
    assert tests["value"] >= tests["against_value"] == 0.0
    assert " points in tests passed against base" in policy_judge(policy).verdicts[1].words


def demonstrations(agent: str, path: Path) -> Snapshot:
    """The dataset of a file with 4 answers to train on and 4 held out."""
    rows = []
    for side in ("train", "holdout"):
        for number in range(4):
            ask = f"Please explain item {number} of the {side} list."
            stand(agent, [{"role": "user", "content": ask}], cast(Split, side))
            rows.append({"prompt": ask, "response": KIND})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = prepare_training_dataset(agent, "corrections", source=FeedbackFile(path), min_samples=1)
    assert made.snapshot is not None
    return made.snapshot


@pytest.mark.training
def test_prompts_and_a_reward_judge_alone(taught: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = taught
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Could you explain point {i} to me?", "answer": KIND} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate(
        EvaluationOrder(
            checkpoint=adapter,
            base_model=str(base),
            agent="own-bot",
            test_data=path,
            compare_base=True,
            rewards="tests.test_gate_evidence.shortness",
        )
    )
    assert found["evidence"]["tests"]["prompts"] == found["evidence"]["rewards"]["prompts"] == 8
    assert found["evidence"]["rewards"]["judge"] == "tests.test_gate_evidence.shortness"
    # a file of its own shows nothing of the holdout, and so not what the held-out log says
    assert (found["holdout_prompts"], "look" in found) == (0, False)
    assert "each use of it counts" in found["off_policy"]["refused"]
    assert found["order"]["rewards"] == "tests.test_gate_evidence.shortness"
    PromptSplit.objects.create(
        prompt_hash=prompt_hash("own-bot", [{"role": "user", "content": rows[0]["prompt"]}]),
        agent="own-bot",
        split="holdout",
    )
    again = evaluate(
        EvaluationOrder(checkpoint=adapter, base_model=str(base), agent="own-bot", test_data=path)
    )
    assert (again["holdout_prompts"], again["look"]) == (1, 1)
    assert 0 < found["evidence"]["rewards"]["value"] < 1


def shortness(sample: RewardSample) -> float:
    """A user's own reward."""
    return max(2 - len(sample.response) / 100, -2)


def test_a_learnt_reward_does_not_judge_what_was_trained_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrainingRun.objects.create(
        agent="own-bot",
        method="ppo",
        base_model="bundled",
        status="succeeded",
        finished_at=timezone.now(),
        recipe={"reward": "model:/somewhere/judge, agent"},
    )
    policy = Policy(name="own-bot-v1", agent="own-bot", run=run)
    assert {"model:/somewhere/judge", "own-bot-v1"} <= set(
        barred_reason("model:/somewhere/judge", policy, "own-bot").split()
    )
    assert barred_reason("model:/somewhere/other", policy, "own-bot") == ""
    assert barred_reason("agent", policy, "own-bot") == ""  # a rule is what it is, whoever was trained on it
    assert rewards_of_training(policy) == "model:/somewhere/judge, agent"
    # by its registered name it is the same judge, and no folder of ours stands in the reason
    folders = {"model:own-bot-rm-v9": "model:/somewhere/judge"}
    monkeypatch.setattr("rl.evaluation.sides.rewards_located", lambda spec, agent: folders.get(spec, spec))
    reason = barred_reason("model:own-bot-rm-v9", policy, "own-bot")
    assert {"model:own-bot-rm-v9", "own-bot-v1"} <= set(reason.split())
    assert "/somewhere" not in reason


def test_without_any_evidence_the_refusal_says_what_to_do() -> None:
    decision_record(agent="own-bot", messages="hello", response="hi")
    policy = registered("own-bot", Path("bundled"), Path("nowhere"))
    with pytest.raises(
        EvaluationRefused, match=r"no held-out evidence for agent own-bot: .* rate more at /rate/"
    ):
        evaluate(EvaluationOrder(policy=policy.name, compare_base=True))
