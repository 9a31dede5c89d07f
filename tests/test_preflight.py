"""Preflight: answers looked at before and after a training, what is refused, what is said."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.agents import AGENTS, agent_resolve, get_agent
from rl.agents.inference import agent_inferred
from rl.recipes import DPO_CONFIG, KTO_CONFIG, SFT_CONFIG
from rl.rewards.answers import reward_with_validity
from rl.rewards.base import RewardSample
from rl.training import preflight
from rl.training.policy import load_policy
from rl.training.preflight import (
    AnswerCheck,
    after_words,
    answer_check_of,
    form_taught,
    start_policy,
    warning_of,
)
from rl.training.result import Silent, TrainResult
from rl.training.rewarding import RewardProbe, probe_fault
from tests.support.tiny_models import HARDWARE, tiny_adapter, tiny_model

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


@pytest.mark.parametrize("preset", [KTO_CONFIG["cpu"], DPO_CONFIG["default"]])
def test_a_preference_training_shows_the_form_where_few_answers_have_it(preset: Any) -> None:
    plain = preset.with_knobs(sft_weight=0, warm_up_steps=0)
    assert form_taught(plain, look(11)) == plain.with_knobs(sft_weight=1)
    assert "the good ones are shown too (sft_weight=1)" in warning_of(look(11), plain)
    for unchanged in (look(12), look(0, served=preflight.CHOICE), None):
        assert form_taught(plain, unchanged) == plain
    shown = plain.with_knobs(warm_up_steps=20)
    assert form_taught(shown, look(0)) == shown
    assert form_taught(SFT_CONFIG["cpu"], look(0)) == SFT_CONFIG["cpu"]


def test_what_looks_say() -> None:
    # under one half is said loudly
    recipe = SFT_CONFIG["default"]
    assert warning_of(look(12), recipe) == ""
    assert warning_of(look(11), recipe).startswith(
        "FEW VALID ANSWERS before training: 11 of 24 answers valid"
    )
    assert "chooses among what is listed" in warning_of(look(0, served=preflight.CHOICE), recipe)
    # what a training did to the form is said
    assert after_words(look(20), look(24)) == ""
    assert after_words(look(24), look(22)) == ""  # 8 points: luck
    assert "FEWER VALID ANSWERS: 100 % of 24 answers valid before, 62 % after" in after_words(
        look(24), look(15)
    )
    assert after_words(look(0), look(0)).startswith("NO VALID ANSWER after training, 0 % of 24 answers valid")
    assert after_words(look(2), look(10)).startswith("FEW VALID ANSWERS after training")


def test_sampled_answers_of_which_none_is_valid_are_refused_with_one_of_them() -> None:
    fault = probe_fault([RewardProbe(n % 2, f"answer {n}", -2.0, False) for n in range(8)])
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


ROWS = [
    {"prompt": [{"role": "user", "content": f"where does letter {n} go"}], "state": None} for n in range(30)
]


def looked(trainer: Trainer, recipe: Any, agent: str = "filer", **more: Any) -> TrainResult:
    return preflight.train_with_checks(
        trainer, recipe, ROWS, ROWS[:4], agent=agent, listener=Silent(), **more
    )


def test_looks_stand_in_the_result_and_what_they_say_comes_first(base: str, tmp_path: Path) -> None:
    result = looked(Trainer(base), SFT_CONFIG["cpu"])
    expected = {"before": (24, 0), "after": (24, 0)}
    assert {name: (one["asked"], one["valid"]) for name, one in result.preflight.items()} == expected
    assert result.notes[0].startswith("FEW VALID ANSWERS before training")
    assert result.notes[1].startswith("NO VALID ANSWER after training")
    assert result.notes[2] == "trained"
    assert TrainResult.load(result.save(tmp_path / "result.json")).preflight == result.preflight


@pytest.mark.training
def test_a_look_at_the_policy_that_a_run_starts_from_leaves_the_base_as_it_was(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama")
    policy = load_policy(str(base), hardware=HARDWARE)
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    recipe = SFT_CONFIG["cpu"].with_knobs(start_from=str(tiny_adapter(base, tmp_path / "adapter")))
    with start_policy(policy, recipe):
        assert set(policy.model.state_dict()) != set(before)
    after = policy.model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())


PLAN = """
import json, sys
from pathlib import Path
from rl.recipes import DPO_CONFIG, KTO_CONFIG, SFT_CONFIG
from rl.training import estimates, preflight, profiler
from rl.training.hardware import detect

base, cache = sys.argv[1:]
hardware = detect(cache, "cpu_only")
profiler.QUIET_SHARE = 0.0  # other tests run beside this one
prompt = [{"role": "user", "content": "Where does a letter go?"}]
good, bad = '{"folder": "Mail"}', '{"folder": "Office"}'
said = {"chosen": good, "rejected": bad, "completion": good}
state = {"document": "a letter", "folders": ["Mail", "Office"]}
rows = [{"prompt": prompt, **said, "label": n % 2 == 0, "state": state} for n in range(8)]
found = []
for name, presets in (("dpo", DPO_CONFIG), ("kto", KTO_CONFIG), ("sft", SFT_CONFIG)):
    recipe = presets["cpu"]
    measured = profiler.MeasuredBase(base, hardware, cache_dir=Path(cache))
    found.append(preflight.tokens_check(measured, recipe, rows))
    look = preflight.plan_check(measured, recipe, rows, agent="filer", phase=lambda name: None)
    found.append(look.as_dict())
    expected = getattr(estimates, name)(base, recipe, rows, hardware=hardware, base=measured)
    found.append([expected.steps, expected.minutes, expected.memory_gb, expected.reasons])
heavy = ("peft", "trl", "datasets", "accelerate", "bitsandbytes", "transformers.modeling_utils", "sympy")
print(json.dumps([found, [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.training
def test_a_second_dry_run_gives_the_same_figures_and_loads_no_trainer(tmp_path: Path) -> None:
    base = str(tiny_model(tmp_path / "base", "llama"))
    figures, loaded = [], []
    for _ in range(2):
        command = [sys.executable, "-c", PLAN, base, str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found, heavy = json.loads(done.stdout)
        figures.append(found)
        loaded.append(heavy)
    assert figures[0] == figures[1]
    assert "peft" in loaded[0]
    assert loaded[1] == []


def test_an_agent_is_known_by_the_same_text_in_every_process() -> None:
    """A function's repr holds its address, with which no answer of an earlier process was found."""
    texts = {slug: preflight.agent_identity(agent) for slug, agent in AGENTS.items()}
    assert [slug for slug, text in texts.items() if " at 0x" in text] == []
    assert len(set(texts.values())) == len(AGENTS)


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
