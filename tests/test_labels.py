"""The label model: calibrated on labels it never saw, refused with too few, and what it becomes as a reward."""

from __future__ import annotations

import hashlib
import io
import json
import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from sklearn.linear_model import LogisticRegression

from feedback.models import Decision, Suggestion
from feedback.rating.suggestions import suggestion_of, suggestion_resolve
from feedback.services import decision_record, rating_submit
from rl.agents import widgets
from rl.jobs.label import REWARD_MODEL, LabelRow, LabelsRefused, _stack, auto_label, rated_rows
from rl.models import LabelRun
from rl.models.runs import RunRefused
from rl.reward_models.service import rewards_located
from rl.rewards.base import RewardSample
from rl.rewards.catalogue import RewardRefused, reward_named
from rl.training.labels import LabelModel, LearnedReward, embeddings, figures_of, label_fit, margins
from rl.training.policy import load_policy
from rl.training.result import TrainingRefused
from rl.training.rewarding import rewards_of
from rl.training.scoring import score_responses
from tests.support.split_prompts import split_by_hash
from tests.support.tiny_models import tiny_adapter, tiny_model


def made_up(n: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and their true probabilities: only the first feature says anything."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, width))
    true = 1 / (1 + np.exp(-2 * x[:, 0]))
    return x, random.random(n) < true, true


def names(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def test_figures_by_hand() -> None:
    found = figures_of(np.array([0.9, 0.9, 0.2, 0.2]), np.array([True, False, False, False]))
    assert (found.accuracy, found.good_share, found.brier_base) == (0.75, 0.25, 0.1875)
    assert found.brier == pytest.approx((0.01 + 0.81 + 0.04 + 0.04) / 4)
    # bins: 0.9 stated and 0.5 observed, 0.2 stated and 0 observed, two labels each
    assert found.calibration_error == pytest.approx((2 * 0.4 + 2 * 0.2) / 4)
    assert found.curve == [{"stated": 0.2, "observed": 0.0, "n": 2}, {"stated": 0.9, "observed": 0.5, "n": 2}]


@pytest.mark.campaign
def test_stated_probabilities_come_true_where_a_plain_classifier_is_too_sure() -> None:
    # as many features as a small model's embedding has, and few labels: the plain fit learns its noise by heart
    x, good, _ = made_up(400, 150)
    ours = label_fit(x, good, names(400)).figures
    fresh, fresh_good, true = made_up(4000, 150, seed=1)
    plain = LogisticRegression(C=1e3, max_iter=500).fit(x, good).predict_proba(fresh)[:, 1]
    control = figures_of(plain, fresh_good)
    stated = label_fit(x, good, names(400)).model.probabilities(fresh)
    later = figures_of(stated, fresh_good)
    assert control.calibration_error > 0.2
    assert later.calibration_error < 0.08
    assert ours.calibration_error < 0.1
    # the figures it gave of itself are those that came out later
    assert ours.brier == pytest.approx(later.brier, abs=0.04)
    assert later.brier < later.brier_base
    assert np.corrcoef(stated, true)[0, 1] > 0.6


@pytest.mark.slow
def test_responses_to_one_prompt_are_never_parted() -> None:
    # the label is the prompt's alone, so a model that saw another answer to it would know; one that did not cannot
    random = np.random.default_rng(0)
    prompts = np.repeat(random.normal(size=(40, 36)), 8, axis=0)
    good = np.repeat(random.random(40) < 0.5, 8)
    groups = [str(i // 8) for i in range(320)]
    assert label_fit(prompts, good, groups).figures.accuracy < 0.75
    assert label_fit(prompts, good, names(320)).figures.accuracy > 0.85


@pytest.mark.parametrize(("n", "bad", "prompts"), [(39, 15, 39), (80, 9, 80), (80, 72, 80), (80, 40, 9)])
def test_too_few_labels_are_refused_with_what_there_is(n: int, bad: int, prompts: int) -> None:
    good = np.arange(n) >= bad
    with pytest.raises(TrainingRefused, match=f"found {n - bad} good and {bad} bad on {prompts}: rate more"):
        label_fit(np.zeros((n, 2)), good, [str(i % prompts) for i in range(n)])


@pytest.mark.slow
def test_a_saved_model_says_the_same(tmp_path: Path) -> None:
    x, good, _ = made_up(120, 6)
    model = label_fit(x, good, names(120)).model
    model.save(tmp_path / "m", {"base_model": "b"})
    again, facts = LabelModel.load(tmp_path / "m")
    assert np.array_equal(again.probabilities(x), model.probabilities(x))
    assert facts == {"base_model": "b"}
    with pytest.raises(TrainingRefused, match="expected a label model"):
        LabelModel.load(tmp_path)


@pytest.mark.training
def test_a_margin_is_what_the_adapter_adds_per_token(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    items = [([{"role": "user", "content": f"number {n}?"}], "yes it is " * n) for n in (1, 2, 5)]
    plain = load_policy(str(base))
    assert margins(plain, items) == pytest.approx(np.zeros((3, 1)))
    tuned = load_policy(str(base), tiny_adapter(base, tmp_path / "adapter"))
    own, without = score_responses(tuned, items), score_responses(plain, items)
    expected = [[(one.logp - other.logp) / one.tokens] for one, other in zip(own, without, strict=True)]
    assert margins(tuned, items) == pytest.approx(np.array(expected), abs=1e-3)
    assert np.abs(margins(tuned, items)).min() > 1e-3
    # the embedding is the base model's, whatever adapter lies on it
    assert embeddings(tuned, items) == pytest.approx(embeddings(plain, items), abs=1e-4)
    assert embeddings(plain, items).shape == (3, 64)


# --- From ratings to suggestions ----------------------------------------------------------------------------

AGENT = widgets.AGENT


def decide(number: int, scenario: Any, response: str) -> Decision:
    row: Decision = decision_record(
        agent="widgets", messages=AGENT.render(scenario.state), response=response, state=dict(scenario.state)
    ).row
    return row


@pytest.mark.django_db
def test_it_learns_from_people_alone_and_not_from_what_was_suggested() -> None:
    scenarios = AGENT.scenarios()[:6]
    rows = [decide(i, s, AGENT.candidates(s.state)[0]) for i, s in enumerate(scenarios)]
    rating_submit(decision=rows[0], rater="ada", thumb="up")
    rating_submit(decision=rows[1], rater="sim", thumb="up", rater_kind="simulated")
    rating_submit(decision=rows[2], rater="ada", notes="no verdict")
    rating_submit(decision=rows[3], rater="ada", stars=3)
    rating_submit(decision=rows[4], rater="ada", stars=1)
    rating_submit(decision=rows[4], rater="bob", thumb="up")
    rating_submit(decision=rows[4], rater="eva", score=0.1)
    Suggestion.objects.create(decision=rows[5], labeller="x", good=0.9)
    suggestion_resolve(rows[5], rating_submit(decision=rows[5], rater="ada", thumb="up").row, accepted=True)
    assert {row.pk: row.good for row in rated_rows("widgets")} == {rows[0].pk: True, rows[4].pk: False}


@pytest.mark.django_db
def test_what_cannot_be_labelled_is_refused() -> None:
    with pytest.raises(LabelsRefused, match="no decision of agent 'nobody'"):
        auto_label("nobody")
    scenario = AGENT.scenarios()[0]
    decide(0, scenario, AGENT.candidates(scenario.state)[0])
    with pytest.raises(CommandError, match="found 0 good and 0 bad on 0: rate more"):
        call_command("auto_label", "--agent", "widgets")
    with pytest.raises(RunRefused, match="auto_label --agent widgets"):
        rewards_located("agent,learned", "widgets")
    with pytest.raises(RewardRefused, match="works in training alone"):
        reward_named("learned")
    with pytest.raises(TrainingRefused, match="learned:FOLDER"):
        rewards_of("learned")


def stacked(judge: Any, rows: int = 900) -> tuple[Any, dict[str, str], np.ndarray]:
    """What `_stack` makes of ratings whose embedding says a little, and of what a trained model says besides."""
    draw = np.random.default_rng(2)
    good = draw.random(rows) < 0.5
    x = np.where(good, 0.5, -0.5)[:, None] + draw.normal(size=(rows, 4))
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(rows)]
    first = label_fit(x, good, hashes)
    rated = [LabelRow(uuid.uuid4(), key, [], "r", bool(side)) for key, side in zip(hashes, good, strict=True)]
    asked = first.model.probabilities(x[:50])
    left_out: dict[str, str] = {}
    said = judge(good, draw, hashes)
    more = {REWARD_MODEL: np.concatenate([said, said[:50]])[:, None]}
    splits = {key: split_by_hash(key) for key in hashes}
    return _stack(first, rated, splits, asked, more, good, left_out, 42), left_out, good


@pytest.mark.slow
def test_a_reward_model_that_helps_on_held_out_prompts_is_stacked_on_top() -> None:
    found, left_out, good = stacked(
        lambda good, draw, _: np.where(good, 1.0, -1.0) + draw.normal(size=len(good))
    )
    assert found is not None
    assert left_out == {}
    figures, stated = found
    assert figures.brier < 0.16
    assert ((stated > 0.5) == good[:50]).mean() > 0.75


@pytest.mark.campaign
def test_a_reward_model_that_only_knows_its_own_prompts_is_not_believed() -> None:
    def by_heart(good: np.ndarray, draw: Any, hashes: list[str]) -> np.ndarray:
        trained = np.array([split_by_hash(key) == "train" for key in hashes])
        return np.where(trained, np.where(good, 2.0, -2.0), draw.normal(size=len(good)))

    found, left_out, _ = stacked(by_heart)
    assert found is None
    assert left_out[REWARD_MODEL].startswith("no improvement: Brier")


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_ratings_become_suggestions_that_are_mostly_right_and_a_reward(ratchet_home: Path) -> None:
    draw = random.Random(3)
    liked: dict[Any, bool] = {}
    for number, scenario in enumerate(draw.sample(AGENT.scenarios(), 330)):
        response = draw.choice(AGENT.candidates(scenario.state))
        row = decide(number, scenario, response)
        liked[row.pk] = AGENT.hidden_preference(scenario.state, response) >= 0.5
        if number < 250:
            flipped = draw.random() < 0.1
            rating_submit(decision=row, rater="ada", thumb="up" if liked[row.pk] != flipped else "down")
    out = io.StringIO()
    call_command("auto_label", "--agent", "widgets", "--json", stdout=out)
    said = json.loads(out.getvalue())
    assert (said["ratings"], said["suggested"], said["open"]) == (250, 80, 80)
    assert set(said["left_out"]) == {"policy margin", "reward model"}
    # one in ten ratings is wrong, so nobody can be right in more than nine of ten; a coin is right in half
    assert said["figures"]["accuracy"] > 0.65
    assert said["figures"]["brier"] < said["figures"]["brier_base"] - 0.03
    assert said["figures"]["calibration_error"] < 0.15
    right = [(s.thumb == "up") == liked[s.decision_id] for s in Suggestion.objects.all()]
    assert sum(right) / len(right) > 0.65
    waiting = Decision.objects.filter(suggestion__isnull=False).first()
    assert waiting is not None
    assert waiting.ratings_human == 0  # a suggestion counts for nothing
    assert suggestion_of(waiting)

    run = LabelRun.objects.get()
    folder = ratchet_home / run.path
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".png"}
    (reward,) = rewards_of(rewards_located("learned", "widgets"))
    assert isinstance(reward, LearnedReward)
    rows = list(Decision.objects.filter(pk__in=liked))
    values = [
        v.raw or 0.0 for v in reward.score([RewardSample(r.messages, r.response, "widgets") for r in rows])
    ]
    assert -2 <= min(values) < 0 < max(values) <= 2
    means = {
        side: np.mean([v for v, r in zip(values, rows, strict=True) if liked[r.pk] == side])
        for side in (0, 1)
    }
    assert means[1] > 0 > means[0]
