"""An agent's base model: who names it, what trains on it, what answers before there is a champion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from feedback.cache import forget_all
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
from rl.jobs.estimates import order_automatic
from rl.jobs.lifecycle import TrainOrder, base_model_for, base_model_settle, run_enqueue
from rl.models import AgentBase, Policy, TrainingRun
from rl.models.runs import LEARNER, RunRefused
from rl.serving.base import Model
from rl.serving.routing import target_of
from tests.support.api_client import ApiClient, person

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


def test_an_added_model_goes_by_its_short_name_everywhere() -> None:
    folder = an_added_model()
    for text in ("smollm2", str(folder)):
        found = base_model_resolve(text)
        assert (found.name, found.path, found.is_ready) == ("smollm2", str(folder), True)
    assert resolve_base_model("smollm2") == str(folder)
    assert resolve_base_model("another") == "another"


def test_a_source_that_was_not_added_yet_keeps_its_words_until_it_is() -> None:
    found = base_model_resolve("ollama:llama3.2:1b")
    assert (found.name, found.path, found.identity) == ("ollama:llama3.2:1b", "", "")
    folder = an_added_model("llama3.2-1b", "ollama:llama3.2:1b", "ollama")
    assert base_model_resolve("ollama:llama3.2:1b").path == str(folder)
    assert base_model_resolve("ollama:llama3.2:1b").name == "llama3.2-1b"


def test_a_folder_means_the_same_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert base_model_resolve("./model").name == str(tmp_path / "model")


@pytest.mark.parametrize("files", [(), ("adapter_config.json",)], ids=["nothing", "an adapter"])
def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
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
    Policy.objects.create(
        name="shop-v1", agent="shop", kind="linear", stage="champion", run=run, base_model="", feedback_count=9,
        adapter_path="policies/shop/v1", adapter_sha256="0" * 64,
    )  # fmt: skip
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


@pytest.mark.parametrize(
    "command",
    [
        ["train_sft", "--agent", "shop", "--model"],
        ["train", "--method", "dpo", "--agent", "shop", "--model"],
        ["run_pipeline", "--agent", "shop", "--model"],
        ["evaluate_model", "--policy", "shop-v1", "--base-model"],
        ["export_model", "--policy", "shop-v1", "--base-model"],
        ["auto_label", "--agent", "shop", "--base-model"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_refuses_a_wrong_name_before_it_reads_anything(command: list[str]) -> None:
    with pytest.raises(CommandError, match=r"expected a model folder or a GGUF file at nothing\.gguf"):
        call_command(*command, "nothing.gguf")


def test_rest_reads_and_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[Any, ...]] = []
    monkeypatch.setattr("rl.jobs.base_models.async_task", lambda *words, **more: queued.append(words))
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
    from rl.jobs.base_models import base_model_add, base_model_add_dispatch

    queued: list[tuple[Any, ...]] = []
    monkeypatch.setattr("rl.jobs.base_models.async_task", lambda *words, **more: queued.append(words))
    monkeypatch.setattr("rl.jobs.base_models.command_run", lambda words, log: 1)
    assert base_model_add("ollama:tiny") == "the process that added it ended with 1"
    base_model_add_dispatch("ollama:tiny")
    assert len(queued) == 1
    addition_note("ollama:tiny", "no such model", failed=True)
    assert base_model_add("ollama:tiny") == "no such model"
    found = addition_of("ollama:tiny")
    assert found is not None
    assert found.failed


def test_the_page_offers_it_to_operators_alone() -> None:
    an_added_model("mine", "/x/mine.gguf", "gguf")
    a_run("bundled")
    rater, operator = Client(), Client()
    rater.force_login(person("ada", "rater"))
    operator.force_login(person("bob", "operator"))
    address = "/agents/shop/base-model/"
    assert rater.post(address, {"base_model": "mine"}).status_code == 403
    assert "base-form" not in rater.get("/agents/shop/").content.decode()
    page = operator.get("/agents/shop/").content.decode()
    assert "<option>mine</option>" in page
    assert operator.post(address, {"base_model": "mine"}).status_code == 302
    assert agent_base_model("shop").name == "mine"
    answer = operator.post(address, {"other": "/nowhere"}, follow=True).content.decode()
    assert "/nowhere" in answer
    assert agent_base_model("shop").name == "mine"
