"""The registry of reward models: judged on the holdout, promoted where they rank better, with their history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.utils import timezone

from rl.checksums import file_sum
from rl.models import RewardModelVersion, TrainingRun
from rl.models.runs import RunRefused
from rl.reward_models import service as reward_models
from rl.reward_models.service import (
    RewardModelRefused,
    ranking_of,
    ranking_text,
    ranks_above_chance,
    reward_model_judge,
    reward_model_promote,
    reward_model_retire,
    reward_model_valid,
    rewards_located,
)
from tests.support.figures import figures_of

pytestmark = pytest.mark.django_db

HIGH = {"value": 0.9, "low": 0.8, "high": 0.95, "n": 60, "what": "labels", "compared": 800}
COIN = {"value": 0.6, "low": 0.45, "high": 0.74, "n": 20, "what": "pairs", "compared": 20}


def version(home: Path, name: str = "bot-rm-v20", **facts: Any) -> RewardModelVersion:
    folder = home / "reward_models" / "bot" / name
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(name.encode())
    return RewardModelVersion.objects.create(
        **{
            "name": name, "agent": "bot", "base_model": "bundled", "path": f"reward_models/bot/{name}",
            "sha256": file_sum(folder / "adapter_model.safetensors"), "objective": "binary",
            "feedback_count": 20, **facts,
        }
    )  # fmt: skip


def single(label: bool, prompt: str) -> dict[str, Any]:
    return {"label": label, "prompt_hash": prompt}


def test_pairs_are_ranked_by_hand() -> None:
    rows = [{"chosen": "a", "rejected": "b"}] * 4
    found = ranking_of(rows, [[2, 1], [3, 1], [0, 1], [1, 1]], [[2, 1], [0, 1], [0, 1], [0, 1]])
    assert (found.share["value"], found.share["n"], found.share["what"]) == (0.5, 4, "pairs")
    assert found.difference is not None
    assert found.difference["value"] == pytest.approx(0.25)


def test_thumbs_are_ranked_by_concordance() -> None:
    rows = [single(True, "a"), single(False, "b"), single(True, "c")]
    found = ranking_of(rows, [[0.9], [0.2], [0.1]])
    assert (found.share["value"], found.share["compared"], found.share["what"]) == (0.5, 2, "labels")


def test_no_rows_are_no_ranking() -> None:
    found = ranking_of([], []).share
    assert not ranks_above_chance(found)
    assert figures_of(ranking_text(found)) == [0]


def test_the_figures_in_words() -> None:
    assert figures_of(ranking_text(COIN)) == [60, 45, 74, 20]


def test_what_ranks_like_a_coin_is_not_promoted(ratchet_home: Path) -> None:
    model = version(ratchet_home, ranking=COIN)
    with pytest.raises(RewardModelRefused, match="no better than chance: it ranks 60 %"):
        reward_model_promote(model, actor="test")
    with pytest.raises(RewardModelRefused, match="needs a reason"):
        reward_model_promote(model, actor="test", force=True)
    assert reward_model_promote(model, actor="test", force=True, reason="a demo").stage == "champion"
    assert model.events.get(kind="promoted").forced
    assert reward_model_valid("bot", "bundled") is None  # nobody learns from a coin, whoever promoted it


def test_the_next_one_must_rank_better_than_the_champion_on_the_same_rows(ratchet_home: Path) -> None:
    first = reward_model_promote(version(ratchet_home, ranking=HIGH), actor="test")
    second = version(ratchet_home, "bot-rm-v40", ranking={**HIGH, "against": first.name})
    with pytest.raises(RewardModelRefused, match="nothing to compare"):
        reward_model_promote(second, actor="test")
    second.ranking["difference"] = {"value": 0.02, "low": -0.03, "high": 0.07}
    with pytest.raises(RewardModelRefused, match=r"bot-rm-v20 on the same 60 rows: \+2 points \(-3 to \+7\)"):
        reward_model_promote(second, actor="test")
    second.ranking["difference"]["low"] = 0.01
    reward_model_promote(second, actor="test")
    first.refresh_from_db()
    assert (first.stage, second.stage) == ("retired", "champion")
    assert first.events.get(kind="retired").reason == "replaced by bot-rm-v40"


def test_judging_ranks_both_on_the_same_rows_and_keeps_the_reason(
    ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [single(n % 2 == 0, f"q{n}") for n in range(40)]
    right = [[float(row["label"]) + n / 100] for n, row in enumerate(rows)]
    wrong = [[n % 7 / 7] for n in range(40)]
    champion = reward_model_promote(version(ratchet_home, ranking=HIGH), actor="test")
    better = version(ratchet_home, "bot-rm-v40")
    found = {champion.name: wrong, better.name: right}
    monkeypatch.setattr(reward_models, "_held_out", lambda model: (rows, None))
    monkeypatch.setattr(reward_models, "_scores", lambda model, rows, hardware: found[model.name])
    reward_model_judge(better, actor="test")
    assert better.stage == "champion"
    assert better.ranking["value"] == 1.0
    assert better.ranking["against"] == champion.name
    champion.refresh_from_db()
    assert (champion.stage, ranks_above_chance(champion.ranking)) == ("retired", False)
    found["bot-rm-v50"] = wrong
    worse = reward_model_judge(version(ratchet_home, "bot-rm-v50"), actor="test")
    assert worse.stage == "candidate"
    assert "no better than chance" in worse.events.get(kind="refused").reason


def test_a_champion_is_used_again_until_something_about_it_no_longer_holds(
    ratchet_home: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reward_model_promote(version(ratchet_home, ranking=HIGH), actor="test")
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

    reward_model_promote(version(ratchet_home, ranking=HIGH), actor="test")
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


def test_history_is_never_changed(ratchet_home: Path) -> None:
    model = version(ratchet_home, ranking=HIGH)
    event = reward_model_promote(model, actor="test").events.get()
    with pytest.raises(ValidationError):
        event.delete()
    with pytest.raises(ValidationError):
        event.save()


def test_the_command_lists_shows_and_moves(ratchet_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = version(ratchet_home, ranking=HIGH)
    call_command("reward_model", "promote", model.name)
    call_command("reward_model", "list", "--agent", "bot")
    assert "champion   ranks 90 % (80 to 95) of 60 held-out thumbs as people did" in capsys.readouterr().out
    call_command("reward_model", "show", model.name)
    assert "promoted" in capsys.readouterr().out
    with pytest.raises(CommandError, match="is champion and cannot become champion"):
        call_command("reward_model", "promote", model.name)
    call_command("reward_model", "retire", model.name, "--reason", "a better one comes")
    model.refresh_from_db()
    assert model.stage == "retired"
    with pytest.raises(RewardModelRefused, match="cannot become retired"):
        reward_model_retire(model, actor="test")


def test_the_pages_show_what_it_ranks_and_who_learnt_from_it_and_move_it(ratchet_home: Path) -> None:
    from django.test import Client

    from tests.support.api_client import person

    model = version(ratchet_home, ranking=HIGH)
    facts = {"agent": "bot", "base_model": "bundled", "status": "succeeded", "finished_at": timezone.now()}
    stage = TrainingRun.objects.create(method="reward_model", **facts)
    RewardModelVersion.objects.filter(pk=model.pk).update(run=stage)
    run = TrainingRun.objects.create(method="ppo", recipe={"reward": f"format,model:{model.name}"}, **facts)
    TrainingRun.objects.create(method="ppo", recipe={"reward": f"model:{model.name}0"}, **facts)
    TrainingRun.objects.filter(pk=stage.pk).update(stage_of=run)
    operator, rater = Client(), Client()
    operator.force_login(person("olga", "operator"))
    rater.force_login(person("rita", "rater"))
    assert b"54 thumbs" not in operator.get("/reward-models/").content
    assert b"60 thumbs" in operator.get("/reward-models/?agent=bot").content
    page = operator.get(f"/reward-models/{model.name}/")
    assert page.status_code == 200
    assert f"/runs/{run.pk}/" in page.content.decode()
    assert len(page.context["learners"]) == 1
    assert f"/runs/{stage.pk}/" in operator.get(f"/runs/{run.pk}/").content.decode()
    assert f"/runs/{run.pk}/" in operator.get(f"/runs/{stage.pk}/").content.decode()
    for address in ("/reward-models/", f"/reward-models/{model.name}/"):
        assert rater.get(address).status_code == 403
    assert rater.post(f"/reward-models/{model.name}/move/", {"move": "champion"}).status_code == 403
    assert operator.post(f"/reward-models/{model.name}/move/", {"move": "champion"}).status_code == 302
    model.refresh_from_db()
    assert (model.stage, model.events.get(kind="promoted").actor) == ("champion", "olga")
    assert operator.get("/reward-models/nobody/").status_code == 404
