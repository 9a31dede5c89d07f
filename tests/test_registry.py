"""The registry: one champion, moves that are allowed, history that stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from rl.gates.rules import alpha_of_attempt
from rl.models import Evaluation, GateSettings, Policy, PolicyEvent, PromptSplit
from rl.registry import service as registry
from rl.registry.gate_evidence import attempt_of, holdout_prompts, order_facts
from tests.support.evaluations import judged
from tests.support.registry_rows import make_run, registered

pytestmark = pytest.mark.django_db


def policy(name: str = "widgets-v1", *, against: str | None = "base", **counts: int) -> Policy:
    made = registered(make_run(base_model_hash="b" * 64), name, Path("/nowhere"))
    if against is not None:
        judged(made, against, **counts)
    return made


def test_a_promoted_policy_replaces_the_champion() -> None:
    first = promote(policy("widgets-v1"))
    second = registry.policy_promote(policy("widgets-v2", against="widgets-v1"), actor="ann")
    first.refresh_from_db()
    assert (first.stage, second.stage) == ("retired", "champion")
    assert registry.champion_of("widgets") == second


def test_the_database_keeps_one_champion_per_agent() -> None:
    promote(policy("widgets-v1"))
    other = policy("widgets-v2")
    with pytest.raises(IntegrityError), transaction.atomic():
        Policy.objects.filter(pk=other.pk).update(stage="champion")


def test_no_gain_no_promotion() -> None:
    candidate = policy(both=30, wins=6, losses=4, neither=0)
    with pytest.raises(
        registry.RegistryRefused, match=r"not shown to be better: \+5\.0 points.*against base"
    ):
        registry.policy_promote(candidate, actor="ann")
    candidate.refresh_from_db()
    assert candidate.stage == "candidate"


def promote(made: Policy, **more: Any) -> Policy:
    return registry.policy_promote(made, actor="ann", **more)


def reject_and_promote() -> None:
    rejected = registry.policy_reject(policy("widgets-v2"), actor="ann", reason="worse on phones")
    promote(rejected, force=True, reason="please")


def promote_with_bounds_of_its_own() -> None:
    GateSettings.objects.create(agent="widgets", min_evidence=41)
    promote(policy("widgets-v2", against="widgets-v1"))


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (lambda: promote(policy("widgets-v2", against=None)), "--policy widgets-v2 --compare widgets-v1"),
        (lambda: promote(policy("widgets-v2", against="base")), "--compare widgets-v1"),
        (lambda: registry.policy_rollback("widgets", actor="bob"), "no predecessor"),
        (reject_and_promote, "can move to nowhere"),
        (promote_with_bounds_of_its_own, "40 held-out prompts, at least 41 are needed"),
        (lambda: registry.policy_get("widgets-v9"), "there are widgets-v1"),
    ],
    ids=["unjudged", "judged against another", "no predecessor", "rejected", "own bounds", "unknown"],
)
def test_what_is_refused_beside_a_champion(move: Callable[[], object], says: str) -> None:
    promote(policy("widgets-v1"))
    with pytest.raises(registry.RegistryRefused, match=says):
        move()


def test_without_a_champion_the_base_is_to_beat() -> None:
    with pytest.raises(registry.RegistryRefused, match="evaluate_model --policy widgets-v1 --compare-base"):
        promote(policy(against=None))


def test_force_needs_a_reason_and_stays_on_record() -> None:
    candidate = policy(against=None)
    with pytest.raises(registry.RegistryRefused, match="needs a reason"):
        registry.policy_promote(candidate, actor="ann", force=True)
    registry.policy_promote(candidate, actor="ann", force=True, reason="the old one is offensive")
    event = candidate.events.get(kind="promoted")
    assert (event.forced, event.reason, event.actor) == (True, "the old one is offensive", "ann")


def test_rollback_puts_the_previous_champion_back() -> None:
    first = promote(policy("widgets-v1"))
    second = registry.policy_promote(policy("widgets-v2", against="widgets-v1"), actor="ann")
    assert registry.policy_rollback("widgets", actor="bob") == first
    second.refresh_from_db()
    assert second.stage == "retired"
    assert registry.champion_of("widgets") == first


def test_history_is_neither_changed_nor_deleted() -> None:
    event = policy().events.latest("id")
    event.reason = "rewritten"
    with pytest.raises(ValidationError):
        event.save()
    with pytest.raises(ValidationError):
        event.delete()
    assert PolicyEvent.objects.filter(pk=event.pk).exists()


def test_the_same_feedback_count_gets_a_numbered_name() -> None:
    policy("widgets-v1")
    policy("widgets-v1.2")
    assert registry.policy_name_next("widgets", 1) == "widgets-v1.3"
    assert registry.policy_name_next("widgets", 2) == "widgets-v2"


def test_a_promotion_keeps_the_report_it_was_made_by() -> None:
    report = registry.policy_promote(policy(), actor="ann").events.get(kind="promoted").verdicts
    assert (report["passed"], report["against"], report["to"]) == (True, "base", "champion")
    accuracy = next(verdict for verdict in report["verdicts"] if verdict["rule"] == "accuracy")
    expected = (15, 0, 40)
    assert (accuracy["figures"]["wins"], accuracy["figures"]["losses"], accuracy["figures"]["n"]) == expected


def test_a_gate_that_refuses_puts_its_report_on_record_and_moves_nothing() -> None:
    candidate = policy(wins=15, kl=7.5)
    report = registry.policy_gated(candidate, "champion", actor="loop")
    event = candidate.events.get(kind="gated")
    assert [verdict.rule for verdict in report.refusals] == ["kl"]
    assert event.reason == report.reason
    assert (
        next(verdict for verdict in event.verdicts["verdicts"] if verdict["rule"] == "kl")["figures"]["value"]
        == 7.5
    )
    candidate.refresh_from_db()
    assert candidate.stage == "candidate"


def test_every_look_at_a_holdout_counts_as_an_attempt_even_where_nothing_was_compared() -> None:
    looks = [judged(policy(f"widgets-v{number}", against=None)) for number in range(1, 4)]
    assert [attempt_of(look) for look in looks] == [1, 2, 3]
    # shown alone, or beside another policy than the one to beat: somebody may pick by it all the same
    judged(policy("widgets-v4", against=None), "")
    judged(policy("widgets-v5", against=None), "widgets-v1")
    again = judged(Policy.objects.get(name="widgets-v4"))
    assert attempt_of(again) == 5  # the same policy on the same prompts is one look
    assert attempt_of(judged(policy("widgets-v6", against=None), both=60)) == 6
    assert sum(alpha_of_attempt(0.05, number) for number in range(1, 1000)) < 0.05
    Evaluation.objects.filter(pk=judged(policy("widgets-v7", against=None)).pk).update(split="file")
    assert (
        attempt_of(judged(policy("widgets-v8", against=None))) == 7
    )  # v1 to v6 and itself: a file is no holdout


def marked(evaluation: Evaluation, **more: Any) -> Evaluation:
    """The evaluation with figures beside its own."""
    evaluation.figures |= more
    evaluation.save()
    return evaluation


def test_a_part_of_the_holdout_or_another_judge_is_a_look_of_its_own() -> None:
    """Else one policy could be judged on 30, 40, 50 ... prompts until it passes."""
    one = policy("widgets-v1", against=None)
    judged(one, both=5, wins=5)
    assert attempt_of(judged(one, both=6, wins=5)) == 2
    assert attempt_of(marked(judged(one, both=6, wins=5), order={"rewards": "format"})) == 3
    assert attempt_of(marked(judged(one, both=6, wins=5), order={"rewards": "format"})) == 3


def test_other_weights_in_the_same_folder_are_another_look(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    evaluations = []
    for content in (b"one", b"two", b"two"):
        weights.write_bytes(content)
        found = marked(
            judged(policy(f"w{len(evaluations)}", against=None)), order=order_facts({}, weights, None)
        )
        Evaluation.objects.filter(pk=found.pk).update(policy=None, checkpoint="runs/1/checkpoint")
        evaluations.append(found)
    assert [attempt_of(one) for one in evaluations] == [1, 2, 2]


def test_a_file_with_held_out_prompts_is_a_look() -> None:
    hashes = [f"{number:064x}" for number in range(3)]
    for name, split in zip(hashes, ("train", "holdout", "holdout"), strict=True):
        PromptSplit.objects.create(prompt_hash=name, agent="widgets", split=split)
    assert holdout_prompts("widgets", hashes) == 2
    assert holdout_prompts("filer", hashes) == 0
    for number, count in ((1, 2), (2, 0)):
        file = marked(judged(policy(f"widgets-v{number}", against=None)), holdout_prompts=count)
        Evaluation.objects.filter(pk=file.pk).update(split="file")
    assert attempt_of(judged(policy("widgets-v3", against=None))) == 2


def test_classifiers_that_were_shown_are_paid_for_when_a_linear_policy_is_put_up() -> None:
    for number in range(1, 4):
        found = judged(policy(f"widgets-v{number}", against=None))
        marked(found, baseline={"trained_on": {"rows": 100 * number, "of": f"snapshot {number}"}})
        assert attempt_of(found) == number  # nobody can promote what was shown beside
    linear = judged(policy("widgets-linear", against=None))
    Evaluation.objects.filter(pk=linear.pk).update(base_model="")
    assert attempt_of(linear) == 4 + 3
    assert attempt_of(judged(policy("widgets-v4", against=None))) == 5 + 3


def test_a_new_champion_begins_a_new_count_and_its_own_figures_pick_nobody() -> None:
    judged(policy("widgets-v0", against=None), "")
    judged(promote(policy("widgets-v1")), "")
    assert attempt_of(judged(policy("widgets-v2", against=None), "widgets-v1")) == 1
    judged(policy("widgets-v3", against=None), "")
    judged(policy("widgets-v4", against=None), "base")
    assert attempt_of(judged(policy("widgets-v5", against=None), "widgets-v1")) == 4
