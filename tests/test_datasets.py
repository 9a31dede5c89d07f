"""Feedback in the database becomes immutable snapshots; what cannot is refused and leaves nothing."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Decision, Rating
from feedback.services import comparison_submit, decision_record, rating_submit, rating_withdraw
from rl.datasets import (
    DatasetRefused,
    get_training_stats,
    messages_plain,
    prepare_training_dataset,
    snapshot_rows,
)
from rl.datasets.feedback_types import Spellings, same_response
from rl.datasets.rows import FeedbackFile, RowRules
from rl.models import Snapshot
from tests.support.dataset_feedback import decide, feed, prompts_in, rate

pytestmark = pytest.mark.django_db


# --- From the database ------------------------------------------------------------------------------------


def test_rated_answers_become_pairs_in_their_splits() -> None:
    feed(train=12, eval=2, holdout=3)
    prepared = prepare_training_dataset("helper")
    assert prepared.counts == {"train": 12, "eval": 2, "holdout": 3}
    assert prepared.samples == 17
    assert prepared.sources == {"ratings": 17}
    assert prepared.feedback_count == 34
    assert prepared.simulated_share == 0.0


def test_a_row_holds_what_the_furnace_needs() -> None:
    prompt = prompts_in("train", 1)[0]
    good = decide(prompt, "yes", state={"mood": "fine"}, tags=["polite"])
    bad = decide(prompt, "no")
    comparison_submit(left=good, right=bad, preference="left", rater="ann", tags=["clear"])
    (row,) = prepare_training_dataset("helper", min_samples=1).rows()
    assert row == {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": "yes",
        "rejected": "no",
        "prompt_hash": good.prompt_hash,
        "agent": "helper",
        "source": "comparison",
        "margin": 1.0,
        "votes": 1,
        "split": "train",
        "tags": ["clear", "polite"],
        "state": {"mood": "fine"},
        "simulated": False,
    }


def test_a_superseded_rating_and_a_withdrawn_one_count_for_nothing() -> None:
    prompt = prompts_in("train", 1)[0]
    changed, undone, stays = decide(prompt, "a"), decide(prompt, "b"), decide(prompt, "c")
    rating_submit(decision=changed, rater="ann", thumb="down")
    rating_submit(decision=changed, rater="ann", thumb="up")
    rating_withdraw(rating_submit(decision=undone, rater="ann", thumb="down").row)
    rating_submit(decision=stays, rater="ann", thumb="down")
    (row,) = prepare_training_dataset("helper", min_samples=1).rows()
    assert (row["chosen"], row["rejected"]) == ("a", "c")


def test_reasoning_is_in_the_rows_only_where_it_is_asked_for() -> None:
    prompt = prompts_in("train", 1)[0]
    rate(prompt, "a", "up", reasoning="I think.")
    rate(prompt, "b", "down")
    (row,) = prepare_training_dataset("helper", min_samples=1).rows()
    assert (row["chosen"], row["rejected"]) == ("a", "b")
    (row,) = prepare_training_dataset("helper", min_samples=1, rules=RowRules(keep_reasoning=True)).rows()
    assert row["chosen"] == [{"role": "assistant", "content": "a", "reasoning": "I think."}]
    assert row["rejected"] == [{"role": "assistant", "content": "b"}]


def test_calls_that_differ_in_ids_or_white_space_are_no_preference() -> None:
    keys = []
    for arguments, call_id in (
        ('{"sku": 1, "n": 2}', "c0"),
        ('{ "n":2, "sku":1}', "c1"),
        ('{"sku": 2}', "c0"),
    ):
        call = {"id": call_id, "type": "function", "function": {"name": "stock", "arguments": arguments}}
        keys.append([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert same_response(keys[0], keys[1])
    assert not same_response(keys[0], keys[2])
    spellings = Spellings()
    assert spellings.key(keys[0]) == spellings.key(keys[1])


def test_another_agents_feedback_stays_out() -> None:
    prompt = prompts_in("train", 1)[0]
    rate(prompt, "yes", "up")
    rate(prompt, "no", "down")
    rate(prompt, "yes", "up", agent="other")
    rate(prompt, "no", "down", agent="other")
    prepared = prepare_training_dataset("helper", min_samples=1)
    assert [row["agent"] for row in prepared.rows()] == ["helper"]
    assert prepared.feedback_count == 2


def test_a_correction_an_agent_could_not_act_on_is_left_out() -> None:
    state = {"question": "how many", "widgets": ["table", "gauge"]}
    for number, correction in enumerate(
        ['{"widget": "gauge"}', '{"widget": "unheard_of"}', "a gauge please"]
    ):
        decision = decide(f"q{number}", '{"widget": "table"}', agent="widgets", state=state)
        rating_submit(decision=decision, rater="ann", correction=correction)
    stats = get_training_stats("widgets")
    assert stats["left_out"] == {"correction_invalid": 2}
    assert stats["sources"] == {"correction": 1}


def test_scored_candidates_of_unrated_decisions_are_evidence() -> None:
    prompt = prompts_in("train", 1)[0]
    decide(prompt, "a", candidates=[{"response": "a", "score": 0.9}, {"response": "b", "score": 0.1}])
    (row,) = prepare_training_dataset("helper", min_samples=1).rows()
    assert (row["chosen"], row["source"], row["margin"], row["votes"]) == ("a", "candidates", 0.8, 0)


def test_the_share_of_simulated_feedback_is_told_and_every_row_marked() -> None:
    prompt = prompts_in("train", 1)[0]
    rating_submit(decision=decide(prompt, "a"), rater="robot", thumb="up", rater_kind="simulated")
    for response, thumb in (("b", "down"), ("c", "up"), ("d", "down")):
        rate(prompt, response, thumb)
    prepared = prepare_training_dataset("helper", min_samples=1)
    assert prepared.simulated_share == 0.25
    assert {(r["chosen"], r["simulated"]) for r in prepared.rows()} == {("a", True), ("c", False)}


def test_lists_of_text_parts_are_joined_and_images_left_out() -> None:
    texts = [
        {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now?"}]}
    ]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]}]
    assert messages_plain(texts) == [{"role": "user", "content": "what now?"}]
    assert messages_plain(image) is None
    for messages in (texts, image):
        for response, thumb in (("yes", "up"), ("no", "down")):
            decision = decision_record(agent="helper", messages=messages, response=response).row
            rating_submit(decision=decision, rater="ann", thumb=thumb)
    assert get_training_stats("helper")["left_out"] == {"not_text": 1}


# --- The snapshot -----------------------------------------------------------------------------------------


def test_the_file_is_named_after_its_hash_and_read_only(ratchet_home: Path) -> None:
    feed()
    prepared = prepare_training_dataset("helper")
    assert prepared.path
    sha256 = hashlib.sha256(prepared.path.read_bytes()).hexdigest()
    assert prepared.path == ratchet_home / "snapshots" / "helper" / f"{sha256[:16]}.jsonl"
    assert stat.S_IMODE(prepared.path.stat().st_mode) == 0o444
    assert prepared.snapshot
    assert prepared.snapshot.sha256 == sha256
    assert prepared.snapshot.path == f"snapshots/helper/{sha256[:16]}.jsonl"
    assert prepared.snapshot.counts == {"train": 12, "eval": 2, "holdout": 3}
    assert prepared.snapshot.feedback_count == 34


def test_the_same_feedback_gives_the_same_snapshot() -> None:
    feed()
    first, second = prepare_training_dataset("helper"), prepare_training_dataset("helper")
    assert first.snapshot == second.snapshot
    assert Snapshot.objects.count() == 1


def test_more_feedback_gives_another_snapshot_and_leaves_the_first() -> None:
    feed()
    first = prepare_training_dataset("helper")
    before = list(first.rows())
    prompt = prompts_in("train", 13)[-1]
    rate(prompt, "yes", "up")
    rate(prompt, "no", "down")
    second = prepare_training_dataset("helper")
    assert second.snapshot != first.snapshot
    assert second.counts["train"] == 13
    assert list(first.rows()) == before


def test_the_order_in_which_feedback_arrived_does_not_change_the_file() -> None:
    said = [
        (p, r, t) for p in prompts_in("train", 6) for r, t in (("yes", "up"), ("no", "down"), ("eh", "up"))
    ]
    files = []
    for order in (said, said[::-1]):
        Rating.objects.all().delete()
        Decision.objects.all().delete()
        for prompt, response, thumb in order:
            rate(prompt, response, thumb)
        files.append(prepare_training_dataset("helper").path)
    assert files[0] == files[1]


def test_rows_of_one_split_are_read_from_the_snapshot() -> None:
    feed()
    prepared = prepare_training_dataset("helper")
    assert prepared.snapshot
    assert len(list(snapshot_rows(prepared.snapshot))) == 17
    assert [row["split"] for row in snapshot_rows(prepared.snapshot, "eval")] == ["eval"] * 2
    assert list(prepared.rows("holdout")) == list(snapshot_rows(prepared.snapshot, "holdout"))


def test_a_changed_file_is_refused_before_its_first_row() -> None:
    feed()
    prepared = prepare_training_dataset("helper")
    assert prepared.path
    assert prepared.snapshot
    prepared.path.chmod(0o644)
    prepared.path.write_bytes(prepared.path.read_bytes().replace(b"yes", b"yEs", 1))
    with pytest.raises(DatasetRefused, match=f"snapshot {prepared.snapshot.pk} was changed"):
        next(snapshot_rows(prepared.snapshot))


def test_a_snapshot_whose_file_is_gone_is_refused() -> None:
    feed()
    prepared = prepare_training_dataset("helper")
    assert prepared.path
    assert prepared.snapshot
    prepared.path.unlink()
    with pytest.raises(DatasetRefused, match="cannot be read"):
        next(snapshot_rows(prepared.snapshot))


def test_preparing_again_heals_a_changed_file() -> None:
    feed()
    prepared = prepare_training_dataset("helper")
    assert prepared.path
    prepared.path.chmod(0o644)
    prepared.path.write_bytes(b"{}\n")
    again = prepare_training_dataset("helper")
    assert again.snapshot == prepared.snapshot
    assert len(list(again.rows())) == 17


def test_a_dry_run_writes_nothing_and_counts_the_same(ratchet_home: Path) -> None:
    feed()
    dry = prepare_training_dataset("helper", dry_run=True)
    assert list(ratchet_home.rglob("*.jsonl")) == []
    assert Snapshot.objects.count() == 0
    wet = prepare_training_dataset("helper")
    assert (dry.counts, dry.left_out, dry.sources) == (wet.counts, wet.left_out, wet.sources)
    assert list(dry.rows("train")) == list(wet.rows("train"))


def test_a_held_out_prompt_tells_which_answers_people_prefer() -> None:
    prompt = prompts_in("holdout", 1)[0]
    for response, stars in (("best", 5), ("good", 4), ("bad", 1)):
        rating_submit(decision=decide(prompt, response), rater="ann", stars=stars)
    feed(train=10, eval=0, holdout=0)
    prepared = prepare_training_dataset("helper")
    assert prepared.snapshot
    asked, *others = snapshot_rows(prepared.snapshot, "holdout")
    assert [(row["chosen"], row["rejected"]) for row in others] == [("good", "bad"), ("best", "good")]
    assert asked["prompt"] == [{"role": "user", "content": prompt}]
    assert (asked["preferred"], asked["dispreferred"]) == (["best"], ["bad"])


def test_a_sample_is_always_the_same() -> None:
    feed(train=30, eval=3, holdout=3)
    first = prepare_training_dataset("helper", max_samples=20)
    second = prepare_training_dataset("helper", max_samples=20)
    assert first.samples == 20
    assert first.left_out["over_max_samples"] == 16
    assert first.snapshot == second.snapshot


# --- Refusals ---------------------------------------------------------------------------------------------


def test_too_few_pairs_say_how_many_and_what_to_do(ratchet_home: Path) -> None:
    feed(train=3, eval=1, holdout=0)
    with pytest.raises(DatasetRefused) as refusal:
        prepare_training_dataset("helper", min_samples=50)
    assert str(refusal.value).startswith("4 pairs found for agent helper, 50 needed")
    assert "/rate/?agent=helper" in str(refusal.value)
    assert "--min-samples" in str(refusal.value)
    assert list(ratchet_home.rglob("*.jsonl")) == []
    assert Snapshot.objects.count() == 0


def test_a_refusal_for_too_few_says_what_was_left_out() -> None:
    feed(train=1, eval=0, holdout=0)
    rate("another question", "yes", "up")
    with pytest.raises(DatasetRefused, match="left out: 1 single_response"):
        prepare_training_dataset("helper")


def test_held_out_pairs_alone_cannot_be_trained_on() -> None:
    feed(train=0, eval=2, holdout=2)
    with pytest.raises(DatasetRefused, match="none of them in the train split"):
        prepare_training_dataset("helper", min_samples=1)
    held = prepare_training_dataset("helper", min_samples=1, for_training=False)
    assert held.counts == {"train": 0, "eval": 2, "holdout": 2}


def test_an_agent_nobody_heard_of_is_refused_with_those_known() -> None:
    decide("q", "a", agent="filer")
    decide("q", "a", agent="widgets")
    with pytest.raises(DatasetRefused, match="known are filer, widgets"):
        prepare_training_dataset("helper")


def test_with_no_decisions_at_all_it_says_so() -> None:
    with pytest.raises(DatasetRefused, match="no decisions are recorded yet"):
        prepare_training_dataset("helper")


@pytest.mark.parametrize("agent", ["../../etc", "a/b", "UPPER", "", ".."])
def test_an_agent_that_is_no_slug_reaches_no_folder(agent: str) -> None:
    with pytest.raises(DatasetRefused, match="slug"):
        prepare_training_dataset(agent, source=FeedbackFile(Path("x.jsonl")))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"kind": "poems"}, "kind is one of pairs"),
        ({"max_samples": 0}, "max_samples"),
        ({"source": "net"}, "source is db or file"),
        ({"source": "file"}, "expected data_file"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    feed()
    with pytest.raises(DatasetRefused, match=named):
        prepare_training_dataset("helper", **asked)


def test_a_folder_that_cannot_be_made_is_refused(ratchet_home: Path) -> None:
    feed()
    (ratchet_home / "snapshots").write_text("a file where a folder should be")
    with pytest.raises(DatasetRefused, match="RATCHET_HOME"):
        prepare_training_dataset("helper")
    assert Snapshot.objects.count() == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused(ratchet_home: Path) -> None:
    feed()
    (ratchet_home / "snapshots" / "helper").mkdir(parents=True)
    (ratchet_home / "snapshots" / "helper").chmod(0o555)
    with pytest.raises(DatasetRefused, match="make the folder writable"):
        prepare_training_dataset("helper")


def test_a_full_disk_is_refused_and_leaves_nothing(
    ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DatasetRefused, match="No space left on device"):
        prepare_training_dataset("helper")
    assert [p for p in ratchet_home.rglob("*") if p.is_file()] == []
    assert Snapshot.objects.count() == 0
