"""The pages of the registry and of a run that is at work: what they show, who may move what."""

import re
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone
from django_q.models import OrmQ

from rl.api.loop import policy_represent
from rl.charts.intervals import report_lines
from rl.datasets import DatasetTooSmall
from rl.gates.report import RuleResult
from rl.jobs.lifecycle import run_claim, run_log_tail, run_refuse, run_resume
from rl.models import Evaluation, Policy, PolicyEvent, RunMetric, Snapshot, TrainingRun
from rl.models.runs import LEARNER, RunRefused, run_folder
from rl.registry import service as registry
from rl.registry.comparisons import policy_diff
from rl.registry.files import policies_prune, policies_retained
from rl.registry.model_card import policy_card
from tests.support.evaluations import evidence_stored, judged
from tests.support.registry_rows import make_run, registered
from tests.support.said import words

pytestmark = pytest.mark.django_db


def make_policy(number: int, **recipe: object) -> Policy:
    snapshot = Snapshot.objects.create(
        agent="widgets",
        kind="pairs",
        path=f"s{number}.jsonl",
        sha256=f"{number:064x}",
        counts={"train": 10 * number},
        feedback_count=number,
        simulated_share=0.5,
    )
    run = make_run(snapshot=snapshot, recipe={"beta": 0.1, **recipe})
    home = registry.home_path(f"policies/widgets/v{number}")
    home.mkdir(parents=True)
    (home / "adapter_model.safetensors").write_bytes(b"weights")
    return registered(run, f"widgets-v{number}", home, feedback_count=number)


def test_versions_stand_with_stage_interval_and_gain(operator: Client) -> None:
    first, second = make_policy(1), make_policy(2)
    judged(first)
    judged(second, wins=5)
    registry.policy_promote(first, actor="ann")
    text = words(operator.get("/policies/").text)
    assert "widgets-v1 champion 87.5" in text
    assert "Preference accuracy over 2 versions" in operator.get("/policies/").text
    assert "widgets-v2 candidate" in text


def test_the_verdict_stands_first_and_says_the_gain_alone(operator: Client) -> None:
    policy = make_policy(1)
    judged(policy)
    liked = {"value": 0.7, "low": 0.6, "high": 0.79, "n": 90, "of": 120, "least": 0.5, "most": 0.8}
    liked |= {
        "estimator": "rated answers",
        "assumes": "it is chance which were rated",
        "words": "People would like",
    }
    known = {"value": 0.61, "low": 0.51, "high": 0.7, "n": 100, "words": "Correct by the known answer"}
    liked["against"] = {"value": 0.3, "low": 0.2, "high": 0.4}
    known["difference"] = {"value": 0.41, "low": 0.31, "high": 0.5}
    policy.refresh_from_db()
    policy.metrics |= {"liked": liked, "known_answer": known, "against": "base"}
    policy.save()
    text = words(operator.get("/policies/widgets-v1/").text).replace("\u202f", " ")
    assert "Answers people would like 70.0 % 60.0 to 79.0 base 30.0 % 20.0 to 40.0" in text
    assert text.count("points") == 1
    assert text.index("Prefers the better answer in 35 of 40") < text.index("Answers people would like")
    assert "estimated from 90 of 120 rated answers, assuming that it is chance which were rated" in text
    assert "70.0 % 60.0 to 79.0" in words(operator.get("/policies/").text).replace("\u202f", " ")
    shown = policy_represent(policy)
    assert (shown["liked"], shown["known_answer"]) == (liked, known)


def test_the_report_names_every_rule_and_what_it_found(operator: Client) -> None:
    policy = make_policy(1)
    judged(policy, kl=7.5)
    registry.policy_gated(policy, "champion", actor="loop")
    text = words(operator.get("/policies/widgets-v1/").text)
    assert "it stayed closed" in text
    assert (
        "Stays near its reference ? refused KL to its reference 7.50 nats per token of its answers, at most"
        " 2 is allowed"
    ) in text
    assert "Golden cases ? not asked" in text


def test_only_a_champion_that_replaced_another_is_offered_to_be_rolled_back(operator: Client) -> None:
    first, second = make_policy(1), make_policy(2)
    registry.policy_promote(first, actor="ann", force=True, reason="a test")
    assert 'value="rollback"' not in operator.get("/policies/widgets-v1/").text
    registry.policy_promote(second, actor="ann", force=True, reason="a test")
    html = operator.get("/policies/widgets-v2/").text
    # it asks once: the button lies in a form of its own that is unfolded first
    asked = html[html.index("<summary>Roll back…</summary>") :]
    assert 'value="rollback"' in asked[: asked.index("</details>")]
    assert html.count('value="rollback"') == 1


def test_exported_files_are_downloads_with_the_lines_that_load_them(operator: Client) -> None:
    policy = make_policy(1)
    home = registry.home_path("exports/widgets-v1")
    (home / "merged").mkdir(parents=True)
    (home / "widgets-v1-Q4_K_M.gguf").write_bytes(b"GGUF")
    facts = {"actor": "ann", "bytes": 4, "sha256": "1e" * 32}
    one = registry.artifact_register(
        policy,
        path="exports/widgets-v1/widgets-v1-Q4_K_M.gguf",
        format="gguf",
        quantization="q4_k_m",
        **facts,
    )
    folder = registry.artifact_register(policy, path="exports/widgets-v1/merged", format="merged", **facts)
    html = operator.get("/policies/widgets-v1/").text
    assert "llama-server -m widgets-v1-Q4_K_M.gguf" in html
    assert "ollama create widgets-v1 -f Modelfile" in html
    address = f"/policies/widgets-v1/files/{one.pk}/"
    assert f'href="{address}"' in html
    assert f"/files/{folder.pk}/" not in html
    answer = operator.get(address)
    assert b"".join(answer.streaming_content) == b"GGUF"  # type: ignore[attr-defined]
    assert 'filename="widgets-v1-Q4_K_M.gguf"' in answer["Content-Disposition"]
    assert operator.get(f"/policies/widgets-v1/files/{folder.pk}/").status_code == 404
    assert operator.get(f"/policies/widgets-v2/files/{one.pk}/").status_code == 404


def test_a_promotion_by_form_goes_through_the_gate_and_by_force_is_marked(operator: Client) -> None:
    policy = make_policy(1)
    address = "/policies/widgets-v1/move/"
    refused = operator.post(address, {"move": "champion"}, follow=True).text
    assert "it was not compared with base yet" in refused
    forced = operator.post(
        address, {"move": "champion", "force": "on", "reason": "demo tomorrow"}, follow=True
    ).text
    assert "widgets-v1 is champion now." in forced
    assert "by force" in forced
    assert policy.events.get(kind="promoted").actor == "olga"


def test_two_versions_differ_in_data_recipe_and_answers() -> None:
    left, right = make_policy(1), make_policy(2, beta=0.3)
    for policy, answer in ((left, "a pie"), (right, "a line")):
        one = {"prompt_hash": "p", "messages": [{"role": "user", "content": "which?"}], "answer": answer}
        one |= {"other_answer": "", "valid": True, "other_valid": True, "reward": 1.0, "other_reward": 0.0}
        Evaluation.objects.create(
            agent="widgets",
            policy=policy,
            base_model="bundled",
            samples=1,
            figures={},
            evidence=evidence_stored() | {"answers": [one]},
        )
    diff = policy_diff(left, right)
    assert diff["recipe"] == {"beta": [0.1, 0.3]}
    assert diff["data"]["pairs, train"] == [10, 20]
    assert diff["answers"] == [
        {
            "prompt": "which?",
            "left": "a pie",
            "right": "a line",
            "left_reward": 1.0,
            "right_reward": 1.0,
            "same": False,
        }
    ]


def test_the_comparison_page_shows_both(operator: Client) -> None:
    make_policy(1)
    make_policy(2, beta=0.3)
    text = words(operator.get("/policies/compare/?left=widgets-v1&right=widgets-v2").text)
    assert "beta 0.1 0.3" in text
    assert operator.get("/policies/compare/?left=widgets-v1&right=nobody").status_code == 404


def test_answers_that_cannot_be_had_any_more_are_not_asked_for(operator: Client) -> None:
    first, second = make_policy(1), make_policy(2)
    judged(second)
    address = "/policies/compare/?left=widgets-v2&right=widgets-v1"
    assert 'action="/policies/widgets-v1/follow-up/"' in operator.get(address).text
    judged(first)
    both = operator.get("/policies/compare/?left=widgets-v1&right=widgets-v2").text
    assert "Evaluate widgets-v2 against widgets-v1" in words(both)
    PolicyEvent.objects.create(policy=first, kind="pruned", actor="pipeline")
    html = operator.get(address).text
    assert "the files of widgets-v1 were deleted" in html
    assert "evaluate_model" not in html


def test_the_newest_is_compared_with_the_champion_at_first(operator: Client) -> None:
    first = make_policy(1)
    judged(first)
    registry.policy_promote(first, actor="ann")
    make_policy(2)
    make_policy(3)
    chosen = re.findall(r"<option selected>([^<]*)<", operator.get("/policies/").text)
    assert chosen == ["widgets-v1", "widgets-v3"]


def test_a_report_draws_differences_and_lists_what_its_words_sum_up() -> None:
    topics = {"topic:a": {"value": 0.1, "n": 12}, "topic:b": {"value": -0.05, "n": 30}}
    accuracy, slices = report_lines(
        [
            RuleResult("passed", "better", {"value": 0.25, "low": 0.0, "high": 0.9}, rule="accuracy"),
            RuleResult("passed", "none", topics, rule="slices"),
        ]
    )
    # the scale ends at half of everything: 0.25 lies halfway between middle and end, 0.9 at the end
    assert (accuracy.drawing.dot, accuracy.drawing.start, accuracy.drawing.width) == (90, 60, 60)
    expected = [("topic:b", "-5.0 points over 30 prompts"), ("topic:a", "+10.0 points over 12 prompts")]
    assert slices.details == expected


def test_the_start_page_shows_the_job_at_work_and_asks_again(operator: Client) -> None:
    TrainingRun.objects.create(
        agent="widgets", method="dpo", status="running", base_model="bundled", steps_done=3, steps_total=12
    )
    page = operator.get("/").text
    assert "step 3 of 12" in words(page)
    assert 'data-live="on"' in page
    TrainingRun.objects.update(status="failed", reason="the disk was full", finished_at=timezone.now())
    page = operator.get("/").text
    assert "the disk was full" in page
    assert 'data-live="off"' in page


def test_a_run_at_work_shows_its_curves_time_to_go_and_log_and_asks_again(operator: Client) -> None:
    now = timezone.now()
    run = TrainingRun.objects.create(
        agent="widgets",
        method="dpo",
        base_model="bundled",
        status="running",
        worker="elsewhere:1:1",
        steps_total=100,
        steps_done=50,
        started_at=now,
        heartbeat_at=now,
    )
    RunMetric.objects.create(run=run, step=0, values={"loss": 0.7}, at=now - timezone.timedelta(seconds=30))
    folder = run_folder(run)
    folder.mkdir(parents=True)
    (folder / "train.log").write_text("warming up\nstep 50\n")
    html = operator.get(f"/runs/{run.pk}/").text
    # 50 steps took 30 s, 50 are left
    assert "about 30 s to go" in html
    assert "step 50" in html
    assert 'data-live="on"' in html
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in html


def test_what_a_worker_logged_is_shown_once_and_a_failure_with_its_traceback() -> None:
    run = TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled")
    folder = run_folder(run)
    folder.mkdir(parents=True)
    (folder / "worker.log").write_text("INFO warming up\ntraining: 3 of 24\nerror: no memory\n")
    (folder / "train.log").write_text(
        "INFO warming up\nat ERROR rl: training ended with\nTraceback\n  MemoryError\n"
    )
    assert run_log_tail(run).splitlines() == ["INFO warming up", "training: 3 of 24", "error: no memory"]
    run.status = "failed"
    expected = ["at ERROR rl: training ended with", "Traceback", "  MemoryError"]
    assert run_log_tail(run).splitlines()[3:] == expected


def test_a_run_that_is_over_is_left_alone(operator: Client) -> None:
    html = operator.get(f"/runs/{make_policy(1).run.pk}/").text
    assert "live.js" not in html
    assert "Cancel this run" not in html


def test_a_run_that_stopped_offers_a_way_out(operator: Client) -> None:
    run = make_run(
        agent="widgets",
        status="refused",
        reason="2 pairs found",
        next_step="rate more at /rate/?agent=widgets",
    )
    assert '<a class="button" href="/rate/?agent=widgets">Rate</a>' in operator.get(f"/runs/{run.pk}/").text
    failed = make_run(agent="widgets", status="failed", reason="no memory")
    assert f'action="/runs/{failed.pk}/resume/"' in operator.get(f"/runs/{failed.pk}/").text
    assert "/resume/" not in operator.get(f"/runs/{run.pk}/").text


def test_an_operator_cancels_a_run(operator: Client) -> None:
    run = TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled")
    assert operator.get(f"/runs/{run.pk}/cancel/").status_code == 405
    assert "is cancelled" in operator.post(f"/runs/{run.pk}/cancel/", follow=True).text
    run.refresh_from_db()
    assert (run.status, run.reason) == ("cancelled", "cancelled by olga")


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_an_operator_resumes_a_stopped_run(operator: Client, status: str) -> None:
    run = make_run(agent="widgets", status=status, reason="no memory", cancel_requested=True, steps_done=9)
    assert operator.get(f"/runs/{run.pk}/resume/").status_code == 405
    assert f"Run {run.pk} waits for a worker." in operator.post(f"/runs/{run.pk}/resume/", follow=True).text
    run.refresh_from_db()
    assert (run.status, run.reason, run.cancel_requested, run.finished_at) == ("queued", "", False, None)
    assert (run.dispatched_at is not None, OrmQ.objects.count()) == (True, 1)
    assert run_claim(run.pk).status == "running"


@pytest.mark.parametrize("status", ["succeeded", "refused", "queued"])
def test_other_runs_are_not_resumed(operator: Client, status: str) -> None:
    run = make_run(agent="widgets", status=status)
    assert f"run {run.pk} is {status}" in operator.post(f"/runs/{run.pk}/resume/", follow=True).text
    assert OrmQ.objects.count() == 0


def test_a_stage_is_resumed_by_its_run_and_the_learners_run_waits_for_the_next(operator: Client) -> None:
    stage = make_run(agent="widgets", status="failed", stage_of=make_run(agent="widgets", status="failed"))
    assert f'"/runs/{stage.pk}/resume/"' not in operator.get(f"/runs/{stage.pk}/").text
    with pytest.raises(RunRefused, match="no stage"):
        run_resume(stage)
    learners = make_run(agent="widgets", status="failed", asked_by=LEARNER)
    make_run(agent="widgets", status="queued", asked_by=LEARNER)
    with pytest.raises(RunRefused, match="trains widgets already"):
        run_resume(learners)


def test_a_run_whose_data_are_too_few_has_reason_and_next_step_apart(operator: Client) -> None:
    run = make_run(agent="widgets", status="running", worker="here:1:1")
    run_refuse(run, DatasetTooSmall("3 pairs found", "rate more at /rate/?agent=widgets"))
    assert (run.status, run.reason, run.next_step) == (
        "refused",
        "3 pairs found",
        "rate more at /rate/?agent=widgets",
    )
    assert run.reason_and_step == "3 pairs found: rate more at /rate/?agent=widgets"
    assert "Not started: 3 pairs found.<" in operator.get(f"/runs/{run.pk}/").text


def test_only_files_that_are_not_kept_go_and_rows_stay() -> None:
    policies = [make_policy(number) for number in range(1, 10)]
    judged(policies[0], wins=20, neither=0)  # the best
    registry.policy_promote(policies[1], actor="ann", force=True, reason="a test")
    kept = policies_retained("widgets")
    assert {policies[0].pk, policies[1].pk, *(p.pk for p in policies[4:])} <= set(kept)
    gone = policies_prune("widgets", actor="test")
    there = [
        p for p in policies if (registry.home_path(p.adapter_path) / "adapter_model.safetensors").exists()
    ]
    assert {p.pk for p in there} == set(kept)
    assert {p.pk for p in gone} == {p.pk for p in policies} - set(kept) != set()
    assert Policy.objects.count() == 9
    assert policies_prune("widgets", actor="test") == []


def test_what_a_run_starts_from_keeps_its_files_while_it_is_at_work() -> None:
    first, *_ = [make_policy(number) for number in range(1, 10)]
    Policy.objects.exclude(pk=first.pk).update(metrics={"preference_accuracy": 0.9})
    run = TrainingRun.objects.create(
        agent="widgets",
        method="dpo",
        base_model="bundled",
        status="running",
        worker="elsewhere:1:1",
        heartbeat_at=timezone.now(),
        recipe={"start_from": first.name},
    )
    assert policies_retained("widgets")[first.pk] == "a run starts from it"
    TrainingRun.objects.filter(pk=run.pk).update(status="succeeded", finished_at=timezone.now())
    assert first in policies_prune("widgets", actor="test")


def test_files_outside_the_data_folder_are_not_touched(tmp_path: Path) -> None:
    outside = tmp_path / "mine"
    outside.mkdir()
    for number in range(1, 8):
        make_policy(number)
    first = Policy.objects.order_by("pk")[0]
    Policy.objects.filter(pk=first.pk).update(adapter_path=str(outside))
    Policy.objects.exclude(pk=first.pk).update(metrics={"preference_accuracy": 0.9})
    assert first in policies_prune("widgets", actor="test")
    assert outside.is_dir()


def test_the_card_says_what_is_known_and_no_more() -> None:
    policy = make_policy(1)
    card = policy_card(policy)
    assert "1 ratings and comparisons were read, 50 % of them simulated" in card
    assert "Not evaluated yet." in card
    judged(policy)
    registry.policy_promote(policy, actor="ann", force=True, reason="demo tomorrow")
    policy.refresh_from_db()
    card = policy_card(policy)
    assert "preference accuracy: 87.5 %" in card
    assert "**Promoted by force** by ann: demo tomorrow" in card
    assert "Only 40 held-out prompts" in card


def test_a_run_shows_how_its_policy_was_judged(operator: Client) -> None:
    policy = make_policy(1)
    page = operator.get(f"/runs/{policy.run_id}/")
    assert "Not evaluated yet" in page.text
    judged(policy)
    page = operator.get(f"/runs/{policy.run_id}/")
    assert page.status_code == 200
    assert 'aria-label="Preference accuracy 87.5\u202f%, 95 % interval 73.9 to 94.5"' in page.text


def test_a_run_shows_a_policy_judged_by_what_is_no_share(operator: Client) -> None:
    policy = make_policy(1)
    difference = {"value": 0.1, "low": 0.0, "high": 0.2, "unit": "nats per token", "kind": "corrections"}
    policy.metrics = {
        "headline": {
            "kind": "corrections",
            "title": "Agreement with corrections",
            "unit": "nats per token",
            "value": -1.5,
            "low": -2.0,
            "high": -1.0,
            "n": 31,
            "against": {"value": -2.5},
        },
        "difference": difference | {"confidence": 0.95},
    }
    policy.save()
    page = operator.get(f"/runs/{policy.run_id}/").text
    assert "-1.500 nats per token" in page
    assert '<svg class="interval"' not in page
