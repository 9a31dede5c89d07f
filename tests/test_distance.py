"""How far the gate is, whether a training can teach, what comes next: said from the first rating on, in figures."""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries

from backend import command
from feedback import selectors
from feedback.cache import StampedCache, forget_all
from feedback.models import Decision
from feedback.selectors import feedback_counts
from feedback.services import decision_record, rating_submit
from rl.datasets import prepare_training_dataset
from rl.datasets.gate_distance import distance_of, gate_distance, gate_distances_cached
from rl.datasets.holdout import SplitCounts
from rl.jobs.teachability import STILL, optimiser_steps, rate_sum, teachability_warning
from rl.models import GateSettings
from rl.recipes import RECIPES
from tests.support.api_client import person
from tests.support.dataset_feedback import rate
from tests.support.evaluations import judged
from tests.support.figures import figures_of
from tests.support.registry_rows import make_policy
from tests.support.said import printed as run

pytestmark = pytest.mark.django_db

CPU = RECIPES["dpo"]["cpu"].with_knobs(min_steps=0, epochs=1.0, learning_rate=4e-4)


def thumbs(count: int, agent: str = "helper") -> None:
    """Single thumbs, one answer to each prompt."""
    for number in range(count):
        rate(f"question {number}", "yes", "up" if number % 2 else "down", agent=agent)


def test_the_distance_counts_the_prompts_that_are_missing_by_the_share_in_force() -> None:
    # a third is held out: 19 of 57 more
    said = distance_of({"labels": 11}, SplitCounts(33, 3, 11), 30)
    expected = (11, 30, "labels", 60, False)
    assert (said.found, said.needed, said.kind, said.further, said.reached) == expected
    assert figures_of(said.words) == [11, 30, 60]
    assert distance_of({}, SplitCounts(), 30).further == 90
    enough = distance_of({"labels": 44}, SplitCounts(140, 14, 44), 30)
    assert (enough.further, enough.reached) == (0, True)
    assert figures_of(enough.words) == [44, 30]


def test_prompts_that_make_no_evidence_are_reckoned_with() -> None:
    # of 20 held-out prompts half have a pair: 20 more pairs are 40 more held-out prompts, 120 prompts at a third, of
    # which 60 are to come before 40 are held out and the rest at shares that fall
    assert distance_of({"pairs": 10}, SplitCounts(60, 6, 20), 30).further > 120


def test_the_distance_of_an_agent_is_that_of_the_datasets() -> None:
    assert gate_distance("helper").further == 90
    thumbs(33)
    said = gate_distance("helper")
    prepared = prepare_training_dataset("helper", "labels", dry_run=True)
    assert (said.kind, said.found) == ("labels", prepared.counts["holdout"])
    assert 40 <= said.further <= 80
    GateSettings.objects.create(agent="helper", min_evidence=said.found)
    assert gate_distance("helper").reached


def test_the_start_page_the_agent_page_and_the_learner_say_the_same(client: Client) -> None:
    client.force_login(person("rae", "rater"))
    thumbs(33)
    said = gate_distance("helper")
    figures = re.compile(rf"<strong>{said.found}</strong>[^<]* 30 [^<]* {said.further} ")
    assert figures.search(client.get("/").text)
    assert figures.search(client.get("/agents/helper/").text)
    status = json.loads(run("online_learner", "status", "--agent", "helper", "--json"))
    assert status["evidence"] == said.model_dump()
    assert said.words in run("online_learner", "status", "--agent", "helper")
    assert said.words in run("online_learner", "status")


def test_unchanged_agents_are_not_counted_again(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    for agent in ("one", "two", "three"):
        thumbs(3, agent)
    counts = {agent: feedback_counts(agent) for agent in ("one", "two", "three")}
    first = gate_distances_cached(counts)
    with django_assert_num_queries(1):  # what gates ask for
        assert gate_distances_cached(counts) == first
    forget_all()
    rate("another", "yes", "up", agent="two")
    assert gate_distances_cached({"two": feedback_counts("two")})["two"].further <= first["two"].further


def test_unrated_prompts_are_read_for_right_answers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.force_login(person("ada", "operator"))
    read: list[int] = []
    prompt_facts = selectors.prompt_facts

    def counted(ids: Sequence[uuid.UUID]) -> Iterator[Any]:
        read.append(len(ids))
        return prompt_facts(ids)

    monkeypatch.setattr(selectors, "prompt_facts", counted)

    def queries(decisions: int) -> int:
        """Queries of the page's first load in a process."""
        for number in range(Decision.objects.count(), decisions):
            decision_record(agent="helper", messages=f"question {number}", response="yes")
        forget_all()
        with CaptureQueriesContext(connection) as captured:
            assert client.get("/start/?agent=helper").status_code == 200
            assert gate_distance("helper").further == 90
        return len(captured)

    queries(3)  # what a process reads once
    assert queries(12) == queries(24)
    assert read == []
    rate("rated", "yes", "up")
    gate_distance("helper")
    assert sum(read) <= 2  # for clusters and for facts
    decision_record(agent="helper", messages="1 + 1", response="2", metadata={"answer": "2"})
    gate_distance("helper")
    assert sum(read) > 2


def test_what_changed_is_made_anew_unless_it_was_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("feedback.cache.time.monotonic", lambda: clock[0])
    kept: StampedCache[int] = StampedCache()

    def make(value: int, seconds: float) -> Any:
        def made() -> int:
            clock[0] += seconds
            return value

        return made

    assert kept.get_unless("a", "s", make(1, 0.5)) == 1
    clock[0] += 300
    assert kept.get_unless("a", "s", make(2, 0.0)) == 1  # the stamp is the same
    assert kept.get_unless("a", "t", make(3, 0.5)) == 3  # 10 s for half a second are over
    clock[0] += 8
    assert kept.get_unless("a", "u", make(4, 0.0)) == 3
    clock[0] += 3
    assert kept.get_unless("a", "u", make(6, 0.5)) == 6
    assert kept.get_unless("a", "v", make(7, 0.0), fresh=True) == 7
    clock[0] += 601
    assert kept.get_unless("a", "t", make(5, 0.0)) == 5


def test_learning_rates_add_up_over_warm_up_and_decay() -> None:
    # two steps, one of them warm-up: 0 and the peak
    assert rate_sum(CPU, 2) == pytest.approx(CPU.learning_rate)
    # ten steps: 0, then half a cosine over nine: 1 + 0.970 + 0.883 + 0.75 + 0.587 + 0.413 + 0.25 + 0.117 + 0.030
    assert rate_sum(CPU, 10) == pytest.approx(5.0 * CPU.learning_rate)
    constant = CPU.with_knobs(lr_scheduler="constant")
    assert rate_sum(constant, 10) == pytest.approx(10 * CPU.learning_rate)
    linear = CPU.with_knobs(lr_scheduler="linear", warmup_ratio=0.0)
    assert rate_sum(linear, 4) == pytest.approx((1 + 0.75 + 0.5 + 0.25) * CPU.learning_rate)


def test_seventeen_pairs_and_two_steps_teach_nothing_and_say_so() -> None:
    said = teachability_warning(CPU, 17, "pairs")
    assert said.startswith(
        "17 pairs and 2 optimiser steps: too little training to change what the policy answers "
    )
    assert "give --epochs" in said
    longer = CPU.with_knobs(epochs=float(said.rsplit(" ", 1)[1]))
    assert rate_sum(longer, longer.steps(17)) * CPU.lora_alpha / CPU.lora_r >= STILL
    assert "too little" not in teachability_warning(longer, 17, "pairs")


def test_doubts_of_short_runs() -> None:
    # few rows are learnt by heart and many raise no doubt
    assert "memorise" in teachability_warning(CPU.with_knobs(epochs=20.0), 17, "pairs")
    assert teachability_warning(CPU, 400, "pairs") == ""
    assert teachability_warning(RECIPES["kto"]["cpu"], 90, "labels") == ""
    # a run that was cut short on purpose is told of its steps
    assert "give --max-steps" in teachability_warning(CPU.with_knobs(max_steps=1), 400, "pairs")
    # ppo makes several updates of a step
    recipe = RECIPES["ppo"]["cpu"]
    knobs = recipe.as_dict()
    each = knobs["ppo_epochs"] * knobs["batch_size"] // knobs["mini_batch_size"]
    assert optimiser_steps(recipe, 200) == recipe.steps(200) * each


def test_a_hundred_thumbs_up_are_no_distance_covered_where_people_wrote_answers() -> None:
    for number in range(100):
        rate(f"question {number}", "yes", "up")
    assert gate_distance("helper").kind == "labels"  # there is nothing else yet
    for number in range(100, 110):
        shown = decision_record(agent="helper", messages=f"question {number}", response="yes").row
        rating_submit(decision=shown, rater="ada", correction="no")
    said = gate_distance("helper")
    assert (said.kind, said.reached) == ("pairs", False)
    assert 0 < said.found <= 10


@pytest.mark.slow
def test_a_dry_run_says_the_distance_the_doubt_and_the_next_step() -> None:
    for number in range(20):
        rate(f"question {number}", "yes", "up")
        rate(f"question {number}", "no", "down")
    plan = json.loads(run("train_dpo", "--config", "cpu", "--dry-run", "--json"))
    assert plan["estimated_steps"] == RECIPES["dpo"]["cpu"].steps(plan["samples"]["train"]) >= 12
    assert plan["doubt"].startswith(f"{plan['samples']['train']} pairs and ")
    assert plan["evidence"] == gate_distance("helper").model_dump()
    assert plan["next"] == "python manage.py train_dpo --agent helper --config cpu"
    short = ("--epochs", "1", "--learning-rate", "4e-4")
    said = " ".join(run("train_dpo", "--config", "cpu", *short, "--dry-run").split())
    assert "too little training to change what the policy answers" in said
    assert f"{plan['samples']['holdout']} of the 30 held-out prompts" in said
    assert said.endswith(
        "Next: python manage.py train_dpo --agent helper --config cpu --epochs 1.0 --learning-rate 0.0004"
    )


def test_each_stage_of_a_policy_names_the_next_command() -> None:
    policy = make_policy()
    assert f"Next: {command.after_training(policy.name)}" in run("policy", "show", policy.name)
    with pytest.raises(CommandError, match=r"evaluate_model --policy .* --compare-base"):
        run("policy", "promote", policy.name)
    judged(policy)
    assert (
        run("policy", "show", policy.name)
        .strip()
        .endswith(f"Next: python manage.py policy promote {policy.name}")
    )
    shown = json.loads(run("policy", "promote", policy.name, "--force", "--reason", "a test", "--json"))
    assert shown["stage"] == "champion"
    assert '"model": "widgets"' in shown["next"]
    assert f"export_model --policy {policy.name} --format gguf" in shown["next"]


def test_an_empty_registry_says_how_a_policy_comes_to_be() -> None:
    assert run("policy", "list").strip().endswith("Next: python manage.py train_dpo --agent SLUG --dry-run")


@pytest.mark.parametrize("format", ["gguf", "gguf-lora", "merged", "lora", "onnx"])
def test_every_export_says_what_serves_it(format: str) -> None:
    said = command.after_export(format, "/files/support-v1.gguf")
    assert "docs/export.md" not in said
    assert "/files" in said


def test_commands_that_show_or_move_things_name_the_next_step_too(tmp_path: Path) -> None:
    def following(*arguments: str) -> str:
        return str(json.loads(run(*arguments, "--json"))["next"])

    assert following("imports") == "python manage.py import_feedback FILE --agent SLUG"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b", "thumb": "up"}))
    number = json.loads(run("import_feedback", str(path), "--agent", "helper", "--json"))["batch"]
    assert following("imports").startswith(f"python manage.py undo_import {number} --dry-run")
    out = tmp_path / "out.jsonl"
    assert following("export_training_data", "--agent", "helper", "--output", str(out)).endswith(
        f"python manage.py import_feedback {out} --dry-run"
    )
    assert following("undo_import", str(number), "--dry-run") == f"python manage.py undo_import {number}"
    assert following("agent", "delete", "helper", "--dry-run") == "python manage.py agent delete helper"
    assert following("undo_import", str(number)) == "python manage.py imports"
    assert "experiment start NAME" in following("experiment", "list")
