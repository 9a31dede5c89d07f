"""Preflight: answers looked at before and after a training, what is refused, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.agents import AGENTS, agent_resolve, get_agent
from rl.agents.inference import agent_inferred
from rl.recipes import DPO_CONFIG, GRPO_CONFIG, KTO_CONFIG, SFT_CONFIG, RewardModelRecipe
from rl.rewards.base import RewardSample
from rl.rewards.formats import reward_with_validity
from rl.training import preflight
from rl.training.policy import load_policy
from rl.training.preflight import (
    AnswerCheck,
    after_words,
    answer_check_of,
    form_taught,
    refusal_of,
    teaches_form,
    warning_of,
)
from rl.training.result import Silent, TrainingRefused, TrainResult
from rl.training.rewarding import RewardProbe, probe_fault
from tests.support.tiny_models import HARDWARE, tiny_model

STATE = {"document": "a letter", "folders": ["Mail", "Office"]}
VALID, UNLISTED = '{"folder": "Mail"}', '{"folder": "Elsewhere"}'


def look(valid: int, asked: int = 24, served: str = preflight.FREE) -> AnswerCheck:
    answers = [(VALID, STATE)] * valid + [(UNLISTED, STATE)] * (asked - valid)
    return answer_check_of(answers, get_agent("filer"), served=served)


def test_an_answer_that_is_not_listed_is_not_valid_and_one_is_shown() -> None:
    found = look(6)
    assert (found.valid, found.asked, found.share) == (6, 24, 0.25)
    assert (found.low, found.high) == (pytest.approx(0.120, abs=1e-3), pytest.approx(0.449, abs=1e-3))
    assert found.example == UNLISTED
    assert "which was not listed" in found.problem
    assert "6 of 24 answers valid (25 %)" in found.words()


@pytest.mark.parametrize(
    ("recipe", "refused"),
    [
        (KTO_CONFIG["default"].with_knobs(warm_up_steps=0), True),
        (KTO_CONFIG["default"].with_knobs(warm_up_steps=20), False),  # it shows the answers first
        (DPO_CONFIG["default"].with_knobs(warm_up_steps=0, sft_weight=0), True),
        (DPO_CONFIG["default"].with_knobs(warm_up_steps=0, sft_weight=1), False),
        (SFT_CONFIG["default"], False),
        (GRPO_CONFIG["cpu"].with_knobs(mode="logged"), True),
        (GRPO_CONFIG["cpu"].with_knobs(mode="logged", allow_constant_reward=True), False),
        (GRPO_CONFIG["cpu"], False),  # its probe looks at the answers it samples
        (RewardModelRecipe(), False),
    ],
)
def test_no_valid_answer_is_refused_where_the_method_cannot_teach_the_form(
    recipe: Any, refused: bool
) -> None:
    said = refusal_of(look(0), recipe, "filer")
    assert bool(said) == refused
    if refused:
        assert said.startswith("0 of 24 answers valid (0 %)")
        assert "train_sft" in said
        assert not teaches_form(recipe)
    assert refusal_of(look(1), recipe, "filer") == ""
    assert refusal_of(None, recipe, "filer") == ""
    # an agent that chooses among listed responses never needs the form
    assert refusal_of(look(0, served=preflight.CHOICE), recipe, "filer") == ""


@pytest.mark.parametrize("preset", [KTO_CONFIG["cpu"], DPO_CONFIG["default"]])
def test_a_preference_training_shows_the_form_where_few_answers_have_it(preset: Any) -> None:
    plain = preset.with_knobs(sft_weight=0, warm_up_steps=0)
    assert form_taught(plain, look(11)) == plain.with_knobs(sft_weight=1)
    assert "the good ones are shown too (sft_weight=1)" in warning_of(look(11), plain)
    assert refusal_of(look(0), form_taught(plain, look(0)), "filer") == ""
    for unchanged in (look(12), look(0, served=preflight.CHOICE), None):
        assert form_taught(plain, unchanged) == plain
    shown = plain.with_knobs(warm_up_steps=20)
    assert form_taught(shown, look(0)) == shown
    assert form_taught(SFT_CONFIG["cpu"], look(0)) == SFT_CONFIG["cpu"]


def test_under_one_half_is_said_loudly() -> None:
    recipe = SFT_CONFIG["default"]
    assert warning_of(look(12), recipe) == ""
    assert warning_of(look(11), recipe).startswith(
        "FEW VALID ANSWERS before training: 11 of 24 answers valid"
    )
    assert "chooses among what is listed" in warning_of(look(0, served=preflight.CHOICE), recipe)


def test_what_a_training_did_to_the_form_is_said() -> None:
    assert after_words(look(20), look(24)) == ""
    assert after_words(look(24), look(22)) == ""  # 8 points: luck
    assert "FEWER VALID ANSWERS: 100 % of 24 answers valid before, 62 % after" in after_words(
        look(24), look(15)
    )
    assert after_words(look(0), look(0)).startswith("NO VALID ANSWER after training, 0 % of 24 answers valid")
    assert after_words(look(2), look(10)).startswith("FEW VALID ANSWERS after training")


def test_sampled_answers_of_which_none_is_valid_are_refused_with_one_of_them() -> None:
    probed = [RewardProbe(n % 2, f"answer {n}", -2.0, False) for n in range(8)]
    fault = probe_fault(probed)
    assert "none of 8 sampled answers to 2 prompts is one the agent can act on (one says 'answer 0')" in fault
    assert "train_sft" in fault


class Trainer:
    """A trainer that answers as the base does, and trains nothing."""

    def __init__(self, base: str) -> None:
        self.policy = load_policy(base, hardware=HARDWARE)
        self.trained = 0

    def load_base_model(self) -> Any:
        return self.policy

    def train(self, rows: Any, eval_rows: Any) -> TrainResult:
        self.trained += 1
        return TrainResult("kto", "succeeded", "", "tiny", "sha256:0", 1, 1, 0.1, notes=["trained"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base") / "llama"))


ROWS = [
    {"prompt": [{"role": "user", "content": f"where does letter {n} go"}], "state": None} for n in range(30)
]


def looked(trainer: Trainer, recipe: Any, agent: str = "filer", **more: Any) -> TrainResult:
    return preflight.train_with_checks(
        trainer, recipe, ROWS, ROWS[:4], agent=agent, listener=Silent(), **more
    )


def test_looks_stand_in_the_result_and_what_they_say_comes_first(base: str, tmp_path: Path) -> None:
    trainer = Trainer(base)
    result = looked(trainer, SFT_CONFIG["cpu"])
    assert {name: (one["asked"], one["valid"]) for name, one in result.preflight.items()} == {
        "before": (24, 0),
        "after": (24, 0),
    }
    assert result.notes[0].startswith("FEW VALID ANSWERS before training")
    assert result.notes[1].startswith("NO VALID ANSWER after training")
    assert result.notes[2] == "trained"
    assert TrainResult.load(result.save(tmp_path / "result.json")).preflight == result.preflight


def test_a_refused_training_does_not_begin_and_a_resumed_one_goes_on(base: str) -> None:
    trainer, recipe = Trainer(base), GRPO_CONFIG["cpu"].with_knobs(mode="logged")
    with pytest.raises(TrainingRefused, match="0 of 24 answers valid"):
        looked(trainer, recipe)
    assert trainer.trained == 0
    looked(trainer, recipe, resume=True)
    assert trainer.trained == 1


def test_free_text_has_no_form_to_look_at(base: str) -> None:
    trainer = Trainer(base)
    assert looked(trainer, KTO_CONFIG["cpu"], agent="assistant").preflight == {}
    assert trainer.trained == 1


def test_an_agent_whose_form_was_inferred_is_meant_while_its_policy_is_trained() -> None:
    recorded = [(f"goal {n}", '{"tool": "mail"}' if n % 2 else '{"tool": "call"}') for n in range(40)]
    inferred = agent_inferred("desk", recorded)
    assert inferred is not None
    sample = RewardSample([], "a ladder", "desk", {})
    with agent_resolve(inferred):
        assert get_agent("desk") is inferred
        assert reward_with_validity(1.5, sample) == -2.0
        assert preflight._has_options(inferred, None), "one of the few answers there are is chosen"
    assert "desk" not in AGENTS
