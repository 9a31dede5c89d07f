"""OpenAI's graders as rewards: what they compare, what they refuse, and a job that learns from one."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.models import TrainingRun
from rl.online import pipeline
from rl.reward_models.service import SCORE, rewards_located
from rl.rewards.base import RewardSample
from rl.rewards.catalogue import RewardRefused, reward_named
from rl.rewards.graders import GraderError, GraderReward, grader_read, similarity
from rl.rewards.sandbox import isolation_fault
from rl.serving.base import BackendFailed
from tests.support.api_client import ApiClient, error_of
from tests.support.serving import Parrot, parrot_only, policy_made  # noqa: F401
from tests.support.tiny_models import tiny_model
from tests.test_fine_tuning import created, lines, ordered, runs_wait, uploaded  # noqa: F401

ANSWER = "{{ sample.output_text }}"
RIGHT = {
    "type": "string_check",
    "name": "right",
    "input": ANSWER,
    "reference": "{{ item.reference }}",
    "operation": "eq",
}
ASKED = [{"role": "user", "content": f"How good is {ANSWER}, of 5?"}]
LENGTH = "def grade(sample, item):\n    return len(sample['output_text']) / item['most']\n"


def reward_of(told: object, response: str, **item: Any) -> float | None:
    sample = RewardSample([{"role": "user", "content": "q"}], response, "assistant", {"state": None, **item})
    (value,) = GraderReward(grader_read(told)).score([sample])
    return value.raw


@pytest.mark.parametrize(
    ("operation", "response", "raw"),
    [
        ("eq", "Rome", 2.0),
        ("eq", "rome", -2.0),
        ("ne", "rome", 2.0),
        ("like", "It is Rome.", 2.0),
        ("like", "It is rome.", -2.0),
        ("ilike", "It is rome.", 2.0),
    ],
)
def test_a_string_check_earns_all_or_nothing(operation: str, response: str, raw: float) -> None:
    assert reward_of(RIGHT | {"operation": operation}, response, reference="Rome") == raw


def test_a_row_without_the_field_has_no_reward() -> None:
    assert reward_of(RIGHT, "Rome") is None
    inner = RIGHT | {"input": "{{ sample.output_json.city }}", "reference": "{{ item.place.city }}"}
    assert reward_of(inner, '{"city": "Rome"}', place={"city": "Rome"}) == 2.0
    assert reward_of(inner, "Rome", place={"city": "Rome"}) is None


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("fuzzy_match", 2 * 20 / (22 + 22)),
        ("rouge_1", 5 / 6),
        ("rouge_2", 3 / 5),
        ("rouge_l", 5 / 6),
        ("gleu", (5 + 3 + 1) / 18),
        ("bleu", (5 / 6 * 3 / 5 * 1 / 4 * 0.5 / 3) ** 0.25),
    ],
)
def test_similarities_are_those_of_their_papers(metric: str, expected: float) -> None:
    found, wanted = "the cat sat on the mat", "the cat lay on the mat"
    assert similarity(metric, found, wanted) == pytest.approx(expected)
    assert similarity(metric, wanted, wanted) == pytest.approx(1.0)
    assert similarity(metric, "dog", "") == 0.0


def test_multi_computes_a_formula_of_its_graders() -> None:
    close = {"type": "text_similarity", "input": ANSWER, "reference": "Rome", "evaluation_metric": "rouge_1"}
    both = {"type": "multi", "graders": {"right": RIGHT, "close": close}}
    formula = both | {"calculate_output": "0.75 * right + 0.25 * max(close, 0)"}
    assert reward_of(formula, "rome", reference="Rome") == pytest.approx(-1.0)  # close alone: a quarter
    assert reward_of(formula, "Rome", reference="Rome") == pytest.approx(2.0)
    assert reward_of(both | {"calculate_output": "right / (close - close)"}, "Rome", reference="Rome") is None


@pytest.mark.parametrize(
    "formula",
    ["__import__('os').system('true')", "right.real", "other + 1", "2 ** 9", "right if 1 else 0", "(", "'a'"],
)
def test_a_formula_is_arithmetic_alone(formula: str) -> None:
    with pytest.raises(GraderError, match="calculate_output"):
        grader_read({"type": "multi", "graders": {"right": RIGHT}, "calculate_output": formula})


@pytest.mark.skipif(bool(isolation_fault()), reason="code cannot be isolated here")
@pytest.mark.slow
def test_python_runs_in_the_sandbox() -> None:
    assert reward_of({"type": "python", "source": LENGTH}, "abcd", most=8) == 0.0
    assert reward_of({"type": "python", "source": LENGTH}, "abcd" * 9, most=8) == 2.0  # at most 1
    for broken in ("def grade(", "def grade(sample, item):\n    return open('/etc/passwd').read()", "x = 1"):
        assert reward_of({"type": "python", "source": broken}, "a") is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("said", "raw"),
    [('{"result": 4}', 1.0), ("I say 5", 2.0), ("9", 2.0), ("good", None), ('{"result": true}', None)],
)
def test_a_score_model_is_a_policy_of_this_server(said: str, raw: float | None, parrot: Parrot) -> None:
    policy_made("bot-v1", agent="bot")
    parrot.said = said
    told = {"type": "score_model", "model": "bot", "input": ASKED, "range": [1, 5]}
    told |= {"sampling_params": {"temperature": 0.5}}
    assert reward_of(told, "a" * 9) == raw
    ask, model = parrot.asked[0]
    assert (model.name, ask.temperature) == ("bot-v1", 0.5)
    assert ask.messages == [{"role": "user", "content": "How good is aaaaaaaaa, of 5?"}]
    assert ask.response_schema == SCORE
    part = told | {"input": [{"role": "user", "content": {"type": "input_text", "text": ANSWER}}]}
    both = {"type": "multi", "graders": {"a": part, "b": RIGHT}, "calculate_output": "0.5 * (a + b)"}
    assert (reward_of(both, "x", reference="x") is None) is (raw is None)


@pytest.mark.django_db(transaction=True)
def test_a_score_model_that_is_away_gives_no_reward(parrot: Parrot) -> None:
    policy_made("bot-v1", agent="bot")
    parrot.failing = {name: BackendFailed("away") for name in ("bot-v1", "base")}
    assert reward_of({"type": "score_model", "model": "bot", "input": ASKED}, "x") is None
    assert reward_of({"type": "score_model", "model": "nobody", "input": ASKED}, "x") is None


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (
            {"type": "label_model", "model": "gpt-4o"},
            "string_check, text_similarity, python, score_model, multi",
        ),
        ({"type": "score_model", "model": "gpt-4o", "input": ASKED}, "no agent and no policy"),
        ({"type": "score_model", "model": "bot", "input": ASKED, "range": [1, 0]}, "range"),
        (
            {"type": "score_model", "model": "bot", "input": [{"role": "user", "content": "{{ no }}"}]},
            "{{ no }}",
        ),
        (RIGHT | {"operation": "is"}, "operation"),
        (RIGHT | {"input": "{{ smaple.output_text }}"}, "smaple.output_text"),
        ({"type": "python", "source": LENGTH}, "ENABLE_CODE_EXECUTION"),
    ],
)
@pytest.mark.usefixtures("unqueued")
def test_a_grader_that_cannot_be_used_is_refused(grader: dict[str, Any], said: str, settings: Any) -> None:
    settings.ENABLE_CODE_EXECUTION = False
    api = ApiClient("operate", "read")
    prompts = uploaded(api, PROMPTS)
    refused = error_of(ordered(api, training_file=prompts, method=reinforcement(grader)))
    assert refused["param"] == "grader"
    assert said in refused["message"]
    assert not TrainingRun.objects.exists()


PROMPTS = lines(
    [{"messages": [{"role": "user", "content": f"Say {n}."}], "reference": f"{n}"} for n in range(60)]
)


def reinforcement(grader: object, **hyperparameters: Any) -> dict[str, Any]:
    own = {"grader": grader, "hyperparameters": hyperparameters}
    return {"type": "reinforcement", "reinforcement": own}


@pytest.mark.django_db
@pytest.mark.usefixtures("unqueued")
def test_prompts_alone_are_a_file_for_reinforcement_and_nothing_else() -> None:
    api = ApiClient("operate", "read")
    prompts = uploaded(api, PROMPTS)
    assert error_of(ordered(api, training_file=prompts))["param"] == "training_file"
    job = created(api, training_file=prompts, method=reinforcement(RIGHT, batch_size=4, eval_samples=8))
    run = TrainingRun.objects.get()
    assert (run.method, run.recipe["batch_size"], run.recipe["eval_prompts"]) == ("grpo", 32, 8)
    assert job["method"]["reinforcement"]["grader"] == RIGHT
    assert reward_named(rewards_located(run.recipe["reward"], "assistant")).name == "grader"
    with pytest.raises(RewardRefused, match="hostname cannot be read"):
        rewards_located("grader:/etc/hostname", "assistant")


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("unqueued")
def test_a_job_learns_from_its_grader(settings: Any, tmp_path: Path) -> None:
    settings.FINE_TUNING_MODELS = {"o4-mini*": str(tiny_model(tmp_path / "tiny"))}
    settings.RATCHET_CONFIG = {"grpo": {"max_steps": 1, "max_new_tokens": 8, "allow_constant_reward": True}}
    close = {
        "type": "text_similarity",
        "input": ANSWER,
        "reference": "{{ item.reference }} and so on",
        "evaluation_metric": "fuzzy_match",
    }
    api = ApiClient("operate", "read")
    files = {"training_file": uploaded(api, PROMPTS), "validation_file": uploaded(api, held_out())}
    job = created(api, model="o4-mini-2025-04-16", **files, method=reinforcement(close, batch_size=1))
    run = TrainingRun.objects.get()
    pipeline.run_train(run.pk, actor="test")
    pipeline.run_follow(run.pk)
    done = api.get(f"/v1/fine_tuning/jobs/{job['id']}").json()
    assert (done["status"], done["error"]) == ("succeeded", None)
    run.refresh_from_db()
    assert run.snapshot.counts["train"] == 60
    events = api.get(f"/v1/fine_tuning/jobs/{job['id']}/events", limit=100).json()["data"]
    assert any("train_mean_reward" in event["data"] for event in events)
    assert json.dumps(done["method"]["reinforcement"]["grader"]["reference"])


def held_out() -> bytes:
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n} now."}], "reference": f"{n}"} for n in range(40)
    ]
    return lines(rows)
