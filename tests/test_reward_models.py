"""The registry of reward models, and the champion that is rolled back when people rate it worse."""

import random
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from feedback.services import decision_record, rating_submit
from rl.checksums import file_sum
from rl.models import LearnerSettings, Policy, RewardModelVersion, TrainingRun
from rl.models.runs import RunRefused
from rl.online import champion_monitor
from rl.registry import service as registry
from rl.reward_models import service as reward_models
from rl.reward_models.service import (
    RewardModelRefused,
    ranking_of,
    ranking_text,
    ranks_above_chance,
    reward_model_judge,
    reward_model_valid,
    rewards_located,
)
from rl.rewards.catalogue import RewardRefused, reward_named
from tests.support.figures import figures_of
from tests.test_registry import policy

pytestmark = pytest.mark.django_db


HIGH = {"value": 0.9, "low": 0.8, "high": 0.95, "n": 60, "what": "labels", "compared": 800}
COIN = {"value": 0.6, "low": 0.45, "high": 0.74, "n": 20, "what": "pairs", "compared": 20}


def version(home: Path, name: str = "bot-rm-v20", **facts: Any) -> RewardModelVersion:
    folder = home / "reward_models" / "bot" / name
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(name.encode())
    return RewardModelVersion.objects.create(
        **{
            "name": name,
            "agent": "bot",
            "base_model": "bundled",
            "path": f"reward_models/bot/{name}",
            "sha256": file_sum(folder / "adapter_model.safetensors"),
            "objective": "binary",
            "feedback_count": 20,
            **facts,
        }
    )


def single(label: bool, prompt: str) -> dict[str, Any]:
    return {"label": label, "prompt_hash": prompt}


def test_rankings_by_hand() -> None:
    # pairs are ranked by hand
    rows = [{"chosen": "a", "rejected": "b"}] * 4
    found = ranking_of(rows, [[2, 1], [3, 1], [0, 1], [1, 1]])
    assert (found["value"], found["n"], found["what"]) == (0.5, 4, "pairs")


def test_thumbs_are_ranked_by_concordance() -> None:
    rows = [single(True, "a"), single(False, "b"), single(True, "c")]
    found = ranking_of(rows, [[0.9], [0.2], [0.1]])
    assert (found["value"], found["compared"], found["what"]) == (0.5, 2, "labels")


def test_no_rows_are_no_ranking() -> None:
    found = ranking_of([], [])
    assert not ranks_above_chance(found)
    assert figures_of(ranking_text(found)) == [0]
    # the figures in words
    assert figures_of(ranking_text(COIN)) == [60, 45, 74, 20]


def test_what_ranks_like_a_coin_is_not_used(ratchet_home: Path) -> None:
    good = version(ratchet_home, ranking=HIGH)
    version(ratchet_home, "bot-rm-v40", ranking=COIN)
    assert reward_model_valid("bot", "bundled") == good
    best = version(ratchet_home, "bot-rm-v50", ranking=HIGH)
    assert reward_model_valid("bot", "bundled") == best


def test_judging_stores_how_it_ranks(ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [single(n % 2 == 0, f"q{n}") for n in range(40)]
    scores = [[float(row["label"]) + n / 100] for n, row in enumerate(rows)]
    monkeypatch.setattr(reward_models, "_held_out", lambda model: (rows, None))
    monkeypatch.setattr(reward_models, "_scores", lambda model, rows, hardware: scores)
    judged = reward_model_judge(version(ratchet_home))
    judged.refresh_from_db()
    assert (judged.ranking["value"], judged.ranking["n"]) == (1.0, 40)
    assert ranks_above_chance(judged.ranking)


def test_a_valid_one_is_reused(ratchet_home: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = version(ratchet_home, ranking=HIGH)
    assert reward_model_valid("bot", "bundled") == model
    assert reward_model_valid("bot", "another/base") is None
    settings.RATCHET_BASE_MODELS = {"reward_model": "bundled"}
    assert reward_model_valid("bot", "another/base") == model
    (ratchet_home / model.path / "adapter_model.safetensors").write_bytes(b"other weights")
    assert reward_model_valid("bot", "bundled") is None
    with pytest.raises(RewardModelRefused, match="not the file that was registered"):
        rewards_located(f"model:{model.name}", "bot")


def test_feedback_that_outgrew_it_asks_for_a_new_one(ratchet_home: Path) -> None:
    from tests.test_training_api import rate

    version(ratchet_home, ranking=HIGH)
    rate(24, agent="bot")
    assert reward_model_valid("bot", "bundled") is not None
    rate(26, agent="bot", pairs=False)
    assert reward_model_valid("bot", "bundled") is None


def test_a_reward_is_named_by_its_version_or_its_run(ratchet_home: Path) -> None:
    run = TrainingRun.objects.create(
        agent="bot",
        method="reward_model",
        base_model="bundled",
        status="succeeded",
        finished_at=timezone.now(),
    )
    model = version(ratchet_home, run=run)
    located = f"model:{ratchet_home / model.path}"
    assert rewards_located(f"model:{model.name}", "bot") == located
    assert rewards_located(f"model:{run.pk},format", "bot") == f"{located},format"
    with pytest.raises(RewardModelRefused, match="no reward model is named 'nobody'; there are bot-rm-v20"):
        rewards_located("model:nobody", "bot")
    with pytest.raises(RunRefused, match="trained no reward model"):
        rewards_located(f"model:{run.pk + 1}", "bot")


def test_the_learned_reward_is_the_newest_that_beats_chance(ratchet_home: Path) -> None:
    with pytest.raises(RunRefused, match="train_reward_model --agent bot"):
        rewards_located("agent,learned", "bot")
    older = version(ratchet_home, "bot-rm-v20", ranking=HIGH)
    version(ratchet_home, "bot-rm-v40", ranking=COIN)
    assert rewards_located("agent,learned", "bot") == f"agent,model:{ratchet_home / older.path}"
    with pytest.raises(RewardRefused, match="works in training alone"):
        reward_named("learned")


def rated(name: str, ups: int, downs: int, seed: int = 0) -> None:
    """Decisions of a policy, so many of them liked and not, in a shuffled order."""
    thumbs = ["up"] * ups + ["down"] * downs
    random.Random(seed).shuffle(thumbs)
    for number, thumb in enumerate(thumbs):
        decision = decision_record(
            agent="widgets", messages=f"{name} {seed} {number}", response="r", policy=name
        ).row
        rating_submit(decision=decision, rater="ada", thumb=thumb)


@pytest.fixture
def champion() -> Policy:
    """The second champion of widgets; of the first one's 40 rated decisions 30 were liked."""
    registry.policy_promote(policy("widgets-v1"), actor="ann")
    rated("widgets-v1", 30, 10)
    return registry.policy_promote(policy("widgets-v2", against="widgets-v1"), actor="ann")


def test_a_worse_one_is_rolled_back(champion: Policy, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(champion_monitor, "notify", lambda event, text, **_: sent.append(event))
    rated("widgets-v2", 4, 16)
    (line,) = champion_monitor.champions_watch()
    assert line.startswith(
        "widgets-v2 was rolled back to widgets-v1: 20 rated decisions average 0.200, widgets-v1's 40 averaged 0.750"
    )
    assert registry.champion_of("widgets").name == "widgets-v1"
    assert champion.events.filter(kind="rolled_back", actor="online learner").count() == 1
    assert sent == ["policy_rolled_back"]
    # put back by a rollback, it is not rolled back to what was worse
    rated("widgets-v1", 0, 40, seed=1)
    assert champion_monitor.champions_watch() == []


def test_a_champion_that_is_no_worse_stays_and_each_look_is_taken_once(champion: Policy) -> None:
    rated("widgets-v2", 14, 6)
    assert champion_monitor.champions_watch() == champion_monitor.champions_watch() == []
    looks = champion.events.filter(kind="watched")
    assert [look.verdicts["look"] for look in looks] == [1]
    rated("widgets-v2", 15, 5, seed=1)
    champion_monitor.champions_watch()
    assert [look.verdicts["decisions"] for look in looks.all()] == [40, 20]
    assert registry.champion_of("widgets") == champion


def test_too_few_rated_decisions_say_nothing(champion: Policy) -> None:
    rated("widgets-v2", 0, 19)
    assert champion_monitor.champion_look(champion) is None


def test_the_first_champion_has_nobody_to_be_rolled_back_to() -> None:
    first = registry.policy_promote(policy("widgets-v1"), actor="ann")
    rated("widgets-v1", 0, 40)
    assert champion_monitor.champion_look(first) is None


def test_who_wants_no_rollback_gets_none(champion: Policy) -> None:
    LearnerSettings.objects.create(agent="widgets", auto_rollback=False)
    rated("widgets-v2", 0, 20)
    assert champion_monitor.champions_watch() == []
    assert registry.champion_of("widgets") == champion


def test_verdicts_without_spread_are_alike_or_surely_not() -> None:
    assert champion_monitor.worse_by_chance([1.0] * 20, [1.0] * 20) == 1.0
    assert champion_monitor.worse_by_chance([0.0] * 20, [1.0] * 20) == 0.0


@pytest.mark.campaign
def test_no_worse_is_seldom_rolled_back_over_five_looks() -> None:
    # made-up thumbs, both liked seven times in ten: at most 5 % of 400 worlds, and their spread
    rolled = 0
    for seed in range(400):
        draw = random.Random(seed)
        before = [float(draw.random() < 0.7) for _ in range(200)]
        own = [float(draw.random() < 0.7) for _ in range(320)]
        rolled += any(
            champion_monitor.worse_by_chance(own[: 20 * 2**k], before)
            <= champion_monitor.alpha_of_look(0.05, k + 1)
            for k in range(5)
        )
    assert rolled <= 28  # 20 expected at most, standard deviation 4.4
