"""An agent's base model, who names it and what uses it; and the page of an agent."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from feedback.cache import forget_all
from feedback.services import decision_record, rating_submit
from rl.base_models.service import (
    addition_note,
    addition_of,
    agent_base_model,
    base_model_resolve,
    base_model_set,
    models_home,
)
from rl.base_models.sources import AddedModel, SourceRefused
from rl.bundled_models import BUNDLED_MODEL, resolve_base_model
from rl.datasets.reward_records import rewards_calculate
from rl.jobs.estimates import order_automatic
from rl.jobs.lifecycle import TrainOrder, base_model_for, base_model_settle, run_enqueue
from rl.models import AgentBase, LearnerSettings, Policy, RewardSettings, TrainingRun
from rl.models.runs import LEARNER, RunRefused
from rl.registry import service as registry
from rl.serving.base import Model
from rl.serving.routing import target_of
from tests.support.api_client import ApiClient, person
from tests.support.registry_rows import make_policy

pytestmark = pytest.mark.django_db


def an_added_model(name: str = "smollm2", source: str = "smollm2", kind: Any = "package") -> Path:
    folder = models_home() / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    AddedModel(name, source, kind).save(folder)
    return folder


def a_run(base_model: str, **facts: Any) -> TrainingRun:
    return TrainingRun.objects.create(
        **{
            "agent": "shop",
            "method": "sft",
            "base_model": base_model,
            "status": "succeeded",
            "finished_at": timezone.now(),
            **facts,
        }
    )


def test_an_added_model_goes_by_its_short_name_and_a_source_keeps_its_words_until_then() -> None:
    folder = an_added_model()
    for text in ("smollm2", str(folder)):
        found = base_model_resolve(text)
        assert (found.name, found.path, found.is_ready) == ("smollm2", str(folder), True)
    assert (resolve_base_model("smollm2"), resolve_base_model("another")) == (str(folder), "another")
    source = "ollama:llama3.2:1b"
    found = base_model_resolve(source)
    assert (found.name, found.path, found.identity) == (source, "", "")
    folder = an_added_model("llama3.2-1b", source, "ollama")
    found = base_model_resolve(source)
    assert (found.name, found.path) == ("llama3.2-1b", str(folder))


def test_a_folder_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert base_model_resolve("./model").name == str(tmp_path / "model")
    for file in ("nothing.txt", "adapter_config.json"):
        (tmp_path / file).write_text("{}")
        with pytest.raises(SourceRefused, match=str(tmp_path)):
            base_model_resolve(str(tmp_path))


def test_the_order_of_those_who_name_a_base(settings: Any) -> None:
    settings.RATCHET_BASE_MODEL = "org/installation"
    assert agent_base_model("shop").name == "org/installation"
    a_run("org/first")
    a_run("org/second")
    a_run("org/broken", status="failed")
    a_run("org/judge", method="reward_model")
    a_run("", method="linear")
    assert agent_base_model("shop").name == "org/second"
    assert agent_base_model("another").name == "org/installation"
    settings.RATCHET_BASE_MODELS = {"dpo": "org/of-dpo"}
    assert agent_base_model("shop", sections=("dpo",)).name == "org/of-dpo"
    base_model_set("shop", "org/set")
    assert agent_base_model("shop", sections=("dpo",)).name == "org/set"
    assert agent_base_model("shop", given="org/given").name == "org/given"
    base_model_set("shop", "")
    assert agent_base_model("shop").name == "org/second"


def test_every_training_takes_the_base_of_its_agent(settings: Any) -> None:
    base_model_set("shop", "org/set")
    assert base_model_for(TrainOrder("shop", "dpo")) == "org/set"
    assert base_model_for(TrainOrder("shop", "linear")) == ""
    assert run_enqueue(order_automatic("shop", "sft")).base_model == "org/set"
    settings.RATCHET_BASE_MODELS = {"continuous_learning": "org/online", "reward_model": "org/judge"}
    assert base_model_for(TrainOrder("shop", "dpo", actor=LEARNER)) == "org/set"
    assert base_model_for(TrainOrder("other", "dpo", actor=LEARNER)) == "org/online"
    assert base_model_for(TrainOrder("shop", "reward_model")) == "org/judge"


def test_a_training_adds_a_base_that_was_not_added_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    base_model_set("shop", "ollama:tiny")
    monkeypatch.setattr(
        "rl.base_models.service.model_add",
        lambda text, progress: AddedModel.load(an_added_model("tiny", text, "ollama")),
    )
    assert base_model_settle(TrainOrder("shop", "sft"), print).base_model == "tiny"


def test_a_base_that_is_gone_is_refused_with_who_named_it(tmp_path: Path) -> None:
    AgentBase.objects.create(agent="shop", base_model=str(tmp_path / "gone"))
    with pytest.raises(RunRefused, match=r"base model \(the agent's setting\): expected a model folder"):
        base_model_settle(TrainOrder("shop", "sft"), print)


def test_an_agent_without_a_champion_is_answered_by_its_own_base() -> None:
    an_added_model()
    a_run("smollm2")
    assert target_of("shop").models == (Model("base", "smollm2"),)
    assert target_of("shop:base").models == (Model("base", "smollm2"),)
    base_model_set("shop", "bundled")
    forget_all()
    assert target_of("shop").models == (Model("base", "bundled"),)


def test_a_linear_champion_falls_back_to_the_agents_base() -> None:
    run = a_run("", method="linear")
    base_model_set("shop", "org/set")
    champion = {"kind": "linear", "stage": "champion", "run": run, "base_model": "", "feedback_count": 9}
    files = {"adapter_path": "policies/shop/v1", "adapter_sha256": "0" * 64}
    Policy.objects.create(name="shop-v1", agent="shop", **champion, **files)
    assert [model.base_model for model in target_of("shop").models] == ["", "org/set"]


def test_the_command_sets_shows_and_removes_it(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> Any:
        call_command("agent", "set", "shop", *words, "--json")
        return json.loads(capsys.readouterr().out)

    an_added_model()
    assert run()["base_model"] == "bundled"
    assert run("--base-model", "smollm2")["origin"] == "the agent's setting"
    assert agent_base_model("shop").name == "smollm2"
    assert run("--base-model", "none")["base_model"] == "bundled"
    with pytest.raises(CommandError, match=r"nothing\.gguf"):
        run("--base-model", "nothing.gguf")


def test_every_command_refuses_a_wrong_name_before_it_reads_anything() -> None:
    for words in (
        "train_sft --agent shop --model",
        "train --method dpo --agent shop --model",
        "run_pipeline --agent shop --model",
        "evaluate_model --policy shop-v1 --base-model",
        "export_model --policy shop-v1 --base-model",
    ):
        with pytest.raises(CommandError, match=r"a GGUF file at nothing\.gguf"):
            call_command(*words.split(), "nothing.gguf")


def test_rest_reads_and_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[Any, ...]] = []
    monkeypatch.setattr("rl.jobs.child_process.async_task", lambda *words, **more: queued.append(words))
    api, address = ApiClient("read", "operate"), "/api/agents/shop/base-model/"
    assert api.get(address).json()["baseModel"] == "bundled"
    assert api.get(address).json()["path"] == str(BUNDLED_MODEL)
    for _ in range(2):
        shown = api.post(address, {"baseModel": "smollm2"}).json()
        assert (shown["baseModel"], shown["path"]) == ("smollm2", "")
        assert shown["adding"] == "waits for a worker"
    assert queued == [("rl.tasks.base_model_add", "smollm2")]
    refused = api.post(address, {"baseModel": "/nowhere"})
    assert refused.status_code == 400
    assert "/nowhere" in refused.json()["error"]["message"]


def test_an_addition_that_failed_says_why_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl.jobs.child_process import base_model_add, base_model_add_dispatch

    queued: list[tuple[Any, ...]] = []
    monkeypatch.setattr("rl.jobs.child_process.async_task", lambda *words, **more: queued.append(words))
    monkeypatch.setattr("rl.jobs.child_process.command_run", lambda words, log: 1)
    assert base_model_add("ollama:tiny") == "the process that added it ended with 1"
    base_model_add_dispatch("ollama:tiny")
    assert len(queued) == 1
    addition_note("ollama:tiny", "no such model", failed=True)
    assert base_model_add("ollama:tiny") == "no such model"
    assert addition_of("ollama:tiny").failed


def test_the_page_offers_it_to_operators_alone() -> None:
    an_added_model("mine", "/x/mine.gguf", "gguf")
    a_run("bundled")
    rater, operator = Client(), Client()
    rater.force_login(person("ada", "rater"))
    operator.force_login(person("bob", "operator"))
    address = "/agents/shop/base-model/"
    assert rater.post(address, {"base_model": "mine"}).status_code == 403
    assert "base-form" not in rater.get("/agents/shop/").content.decode()
    assert "<option>mine</option>" in operator.get("/agents/shop/").content.decode()
    assert operator.post(address, {"base_model": "mine"}).status_code == 302
    assert agent_base_model("shop").name == "mine"
    assert "/nowhere" in operator.post(address, {"other": "/nowhere"}, follow=True).content.decode()
    assert agent_base_model("shop").name == "mine"


def test_a_built_in_agent_shows_how_it_is_asked_before_it_decided_anything(operator: Client) -> None:
    assert Client().get("/agents/filer/").status_code == 302
    for slug in ("nobody", "Not-A-Slug", "a" * 70):
        assert operator.get(f"/agents/{slug}/").status_code == 404
    html = operator.get("/agents/librarian/").text
    facts = (
        "rl.agents.librarian.Librarian",
        "Pick the listed subjects",
        "a subject is missing",
        "uniqueItems",
    )
    for said in (*facts, "/agents/librarian/rewards/", "subject_changed", "No champion"):
        assert said in html, said


def test_the_champion_leads_and_a_newer_candidate_stands_below(operator: Client) -> None:
    champion = make_policy("support", preference_accuracy={"value": 0.875, "low": 0.7, "high": 0.96, "n": 40})
    registry.policy_promote(champion, "champion", actor="eve", force=True, reason="a test")
    candidate = make_policy("support")
    page = operator.get("/agents/support/")
    assert page.context["policy"] == champion
    assert page.text.index(f"/policies/{champion.name}/") < page.text.index(f"/policies/{candidate.name}/")
    assert page.context["newer"].state == "not compared"


def test_enough_ratings_have_a_train_button_and_fewer_do_not(operator: Client, rater: Client) -> None:
    train = 'href="/start/?agent=support&amp;step=train"'
    for number in range(10):
        row = decision_record(agent="support", messages=f"q{number}", response="r").row
        if number == 9:
            assert train not in operator.get("/agents/support/").text
        rating_submit(decision=row, rater="ada", thumb="down")
        forget_all()
    assert operator.get("/agents/support/").text.count(train) == 1
    assert train not in rater.get("/agents/support/").text
    assert 'href="/start/?agent="' in operator.get("/").text  # a new agent


def test_it_shows_counts_rewards_runs_and_the_champion(operator: Client) -> None:
    row = decision_record(agent="support", messages="q", response="r").row
    rating_submit(decision=row, rater="ada", thumb="down")
    rewards_calculate()
    accuracy = {"preference_accuracy": {"value": 0.8, "low": 0.7, "high": 0.9, "n": 50}}
    files = {"base_model": "b", "base_model_hash": "h", "adapter_path": "p", "adapter_sha256": "s"}
    made = {"name": "support-v1", "agent": "support", "stage": "champion", "feedback_count": 1}
    Policy.objects.create(metrics=accuracy, **made, **files)
    TrainingRun.objects.create(
        agent="support", method="dpo", status="failed", base_model="b", finished_at=timezone.now()
    )
    html = operator.get("/agents/support/").text
    figures = ("<dd>1</dd>", "-1.25", "-2.00", "no data", "support-v1")
    for said in ("no definition: free text", *figures, "It answers now.", "status-failed"):
        assert said in html, said


def test_what_was_set_otherwise_is_shown_and_changed_by_who_may(operator: Client) -> None:
    LearnerSettings.objects.create(agent="filer", min_samples_to_retrain=77)
    worth = {"solved": {"good": 1.0, "bad": 0.0}}
    row = RewardSettings.objects.create(agent="filer", delayed_weight=3, outcomes=worth)
    html = operator.get("/agents/filer/").text
    assert '<dd class="words">solved (good 1, bad 0)</dd>' in html
    assert '<dd class="words">77</dd>' in html
    assert f"/admin/rl/rewardsettings/{row.pk}/change/" in html
    assert "/admin/rl/gatesettings/add/?agent=filer" in html
    operator.force_login(person("rita", "rater"))
    html = operator.get("/agents/filer/").text
    assert "/admin/rl/" not in html
    assert "/decisions/?agent=filer" not in html
