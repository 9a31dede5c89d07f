"""The operator's file of knobs: every key has an effect, and a key without one is refused by name."""

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.operator_file import (
    FEEDBACK,
    OperatorFileError,
    operator_file,
    operator_settings,
    section_checks,
)
from feedback.storage.sampling import is_collected
from rl.experiments.traffic import ArmOrder, experiment_create
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.models.learning import learner_config, learner_settings
from rl.recipes import AB_TESTING_KNOBS, ONLINE_LEARNING_CONFIG, RECIPES, recipe_named

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parent.parent


def example() -> dict[str, Any]:
    """The full example of docs/settings.md."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    found = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    (whole,) = [block for block in found if "rlhf" in block]
    return dict(whole["rlhf"])


def test_the_documented_example_is_taken_whole_and_names_every_key_that_is_no_recipes() -> None:
    whole = example()
    parsed = operator_settings({"rlhf": whole})
    assert set(parsed.sections) == set(section_checks())
    assert (parsed.enabled, parsed.base_model) == (True, "bundled")
    assert set(parsed.base_models) == {"reward_model", "continuous_learning"}
    assert set(whole["feedback"]) == set(FEEDBACK)
    assert set(whole["continuous_learning"]) == {*ONLINE_LEARNING_CONFIG, "base_model"}
    assert set(whole["ab_testing"]) == set(AB_TESTING_KNOBS)
    assert operator_settings(whole) == parsed  # below rlhf and at the top mean the same


MEANINGLESS: list[tuple[Any, str]] = [
    ([1], "expected sections"),
    ({"dopo": {}}, "'dopo'"),
    ({"rlhf": {"dpo": {}}, "dpo": {}}, "dpo is outside rlhf"),
    ({"dpo": {"beta_": 1}}, "dpo: no knob 'beta_'"),
    ({"dpo": {"beta": -1}}, "dpo: beta"),
    ({"dpo": 3}, "dpo: expected knobs"),
    ({"feedback": {"collection_rat": 0.5}}, "feedback: no knob 'collection_rat'"),
    ({"feedback": {"collection_rate": 2}}, "feedback.collection_rate"),
    ({"feedback": {"throttle_read": "fast"}}, "feedback.throttle_read"),
    ({"feedback": {"base_model": "x"}}, "feedback: no knob 'base_model'"),
    (
        {"continuous_learning": {"method": "banana"}},
        "continuous_learning.method: expected one of auto, distil, rlhf, dpo",
    ),
    ({"continuous_learning": {"auto_export": "maybe"}}, "continuous_learning.auto_export"),
    ({"continuous_learning": {"min_samples_to_retrain": 0}}, "min_samples_to_retrain"),
    ({"ab_testing": {"alhpa": 0.01}}, "ab_testing: no knob 'alhpa'"),
    ({"enabled": "on and off"}, "enabled: expected true or false"),
    ({"ppo": {"base_model": 7}}, "ppo.base_model"),
]


def test_what_means_nothing_is_refused_by_name() -> None:
    for found, named in MEANINGLESS:
        with pytest.raises(OperatorFileError, match=re.escape(named)):
            operator_settings(found)


def other_than(value: Any) -> list[Any]:
    """Values of the same type that may be allowed in its place."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, 2, 1]
    if isinstance(value, float):
        return [value / 2, value * 2, 0.5, 1.0]
    texts = "sigmoid hinge none 4bit linear cosine adaptive fixed k3 k1 shared adapter off on split weights downsample "
    return (
        texts
        + "batch group logged length regression encoder kto grpo champion agent server apo_zero_unpaired"
    ).split()


@pytest.mark.parametrize("method", list(RECIPES))
def test_every_knob_of_a_method_lies_over_its_presets(method: str) -> None:
    silent = []
    for knob, default in RECIPES[method]["default"].as_dict().items():
        refused = 0
        values = [value for value in other_than(default) if value != default]
        for value in values:
            try:
                sections = operator_settings({method: {knob: value}}).sections
                if getattr(recipe_named(method, "default", sections[method]), knob) == value:
                    break
            except ValueError as error:
                refused += knob in str(error)
        else:
            if refused < len(values):  # a knob that may only have its default says so: lora_dropout of PPO
                silent.append(knob)
    assert silent == []


def test_every_knob_of_the_learner_is_what_an_agent_without_a_row_has(settings: Any) -> None:
    whole = example()["continuous_learning"]
    settings.RATCHET_CONFIG = operator_settings({"continuous_learning": whole}).sections
    found = learner_settings("someone")
    for knob, default in ONLINE_LEARNING_CONFIG.items():
        assert whole[knob] != default, f"the example shows no effect of {knob}"
        stands = learner_config()[knob] if knob == "tick_seconds" else getattr(found, knob)
        assert stands == whole[knob]


def test_every_knob_of_experiments_is_what_a_new_one_is_made_with(settings: Any) -> None:
    arms = (ArmOrder("base", "control"), ArmOrder("base", "again"))
    usual = experiment_create("filer", "usual", arms, actor="ann")
    whole = example()["ab_testing"]
    settings.RATCHET_CONFIG = operator_settings({"ab_testing": whole}).sections
    made = experiment_create("filer", "configured", arms, actor="ann")
    for knob, value in whole.items():
        assert getattr(made, knob) == value
        assert getattr(usual, knob) != value, f"the example shows no effect of {knob}"


@pytest.mark.slow
def test_every_knob_of_feedback_is_what_an_agent_without_a_row_has() -> None:
    """Read by a process of its own: settings take the file once."""
    whole = example()
    code = (
        "import json, django; django.setup()\n"
        "from django.conf import settings as s\n"
        "from feedback.models import AgentSettings\n"
        "row = AgentSettings(agent='x', **s.FEEDBACK_AGENT_DEFAULTS)\n"
        "print(json.dumps({**{n: getattr(row, n) for n in s.FEEDBACK_AGENT_DEFAULTS},\n"
        "  'rates': s.REST_FRAMEWORK['DEFAULT_THROTTLE_RATES'], 'on': s.ENABLE_ONLINE_LEARNING,\n"
        "  'base': s.RATCHET_BASE_MODEL, 'bases': s.RATCHET_BASE_MODELS}))"
    )
    file = Path(os.environ["RATCHET_HOME"]) / "operator.yaml"
    file.write_text(yaml.safe_dump({"rlhf": {**whole, "base_model": "some/model"}}))
    environment = {**os.environ, "RATCHET_CONFIG": str(file), "DJANGO_SETTINGS_MODULE": "backend.settings"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    for knob, value in whole["feedback"].items():
        scope = knob.removeprefix("throttle_")
        assert (found["rates"][scope] if scope != knob else found[knob]) == value
    assert (found["on"], found["base"]) == (True, "some/model")
    assert found["bases"]["reward_model"] == whole["reward_model"]["base_model"]


def test_the_collection_rate_of_the_file_leaves_decisions_out(settings: Any) -> None:
    settings.FEEDBACK_AGENT_DEFAULTS = {"collection_rate": 0.25}
    collected = sum(is_collected("someone", uuid.uuid4()) for _ in range(400))
    assert 55 <= collected <= 150  # beyond five standard deviations of 100


def test_a_method_is_trained_on_the_base_model_of_its_section(settings: Any) -> None:
    settings.RATCHET_BASE_MODELS = {"kto": "some/model"}
    assert base_model_for(TrainOrder("a", "kto")) == "some/model"
    assert base_model_for(TrainOrder("a", "dpo")) == "bundled"
    assert base_model_for(TrainOrder("a", "kto", base_model="mine")) == "mine"


def test_a_missing_file_and_a_repeated_key_are_refused_and_an_empty_section_is_not(tmp_path: Path) -> None:
    with pytest.raises(OperatorFileError, match=r"nowhere\.yaml"):
        operator_file(str(tmp_path / "nowhere.yaml"))
    path = tmp_path / "knobs.yaml"
    path.write_text("dpo:\n  beta: 0.1\n  epochs: 2\n  beta: 0.3\n")
    with pytest.raises(OperatorFileError, match=r"knobs\.yaml\): beta is repeated in line 4"):
        operator_file(str(path))
    path.write_text("dpo:\n  beta: 0.1\nkto:\n  beta: 0.3\n")
    assert operator_file(str(path)).sections == {"dpo": {"beta": 0.1}, "kto": {"beta": 0.3}}
    path.write_text("rlhf:\n  dpo:\n  #  beta: 0.1\n  kto:\n    beta: 0.3\n")
    assert operator_file(str(path)).sections == {"dpo": {}, "kto": {"beta": 0.3}}
