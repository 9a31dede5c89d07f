"""Feedback in the database becomes immutable snapshots of each kind; what cannot is refused and leaves nothing."""

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest

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


def test_the_file_is_named_after_its_hash_and_read_only_and_a_dry_run_writes_none(ratchet_home: Path) -> None:
    feed()
    dry = prepare_training_dataset("helper", dry_run=True)
    assert list(ratchet_home.rglob("*.jsonl")) == []
    assert not Snapshot.objects.exists()
    prepared = prepare_training_dataset("helper")
    assert (dry.counts, dry.left_out, dry.sources) == (prepared.counts, prepared.left_out, prepared.sources)
    assert list(dry.rows("train")) == list(prepared.rows("train"))
    snapshot = prepared.snapshot
    assert prepared.path
    assert snapshot
    sha256 = hashlib.sha256(prepared.path.read_bytes()).hexdigest()
    assert (snapshot.sha256, snapshot.path) == (sha256, f"snapshots/helper/{sha256[:16]}.jsonl")
    assert prepared.path == ratchet_home / snapshot.path
    assert stat.S_IMODE(prepared.path.stat().st_mode) == 0o444
    assert (snapshot.counts, snapshot.feedback_count) == ({"train": 12, "eval": 2, "holdout": 3}, 34)
    # the same feedback gives the same snapshot
    assert prepare_training_dataset("helper").snapshot == snapshot
    assert Snapshot.objects.count() == 1
    assert len(list(snapshot_rows(snapshot))) == 17
    assert [row["split"] for row in snapshot_rows(snapshot, "eval")] == ["eval"] * 2
    assert list(prepared.rows("holdout")) == list(snapshot_rows(snapshot, "holdout"))


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


def test_a_changed_or_missing_file_is_refused_before_its_first_row_and_prepared_again() -> None:
    feed()
    prepared = prepare_training_dataset("helper")
    assert prepared.path
    assert prepared.snapshot
    prepared.path.chmod(0o644)
    prepared.path.write_bytes(prepared.path.read_bytes().replace(b"yes", b"yEs", 1))
    with pytest.raises(DatasetRefused, match=f"snapshot {prepared.snapshot.pk} was changed"):
        next(snapshot_rows(prepared.snapshot))
    again = prepare_training_dataset("helper")
    assert again.snapshot == prepared.snapshot
    assert len(list(again.rows())) == 17
    prepared.path.unlink()
    with pytest.raises(DatasetRefused, match="cannot be read"):
        next(snapshot_rows(prepared.snapshot))


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


def test_too_few_pairs_say_how_many_what_was_left_out_and_what_to_do(ratchet_home: Path) -> None:
    with pytest.raises(DatasetRefused, match="no decisions are recorded yet"):
        prepare_training_dataset("helper")
    feed(train=3, eval=1, holdout=0)
    rate("another question", "yes", "up")
    with pytest.raises(DatasetRefused) as refusal:
        prepare_training_dataset("helper", min_samples=50)
    for said in (
        "4 pairs",
        "helper",
        "50 needed",
        "prompts with verdicts on one response only: nothing to compare (1)",
        "/rate/?agent=helper",
        "--min-samples",
    ):
        assert said in str(refusal.value)
    assert list(ratchet_home.rglob("*.jsonl")) == []
    assert not Snapshot.objects.exists()
    decide("q", "a", agent="filer")
    with pytest.raises(DatasetRefused, match="known are filer, helper"):
        prepare_training_dataset("nobody")
    for agent in ("../../etc", "a/b", "UPPER", "", ".."):
        with pytest.raises(DatasetRefused, match="slug"):
            prepare_training_dataset(agent, source=FeedbackFile(Path("x.jsonl")))
    asked: dict[str, dict[str, Any]] = {
        "kind is one of pairs": {"kind": "poems"},
        "max_samples": {"max_samples": 0},
        "source is db or file": {"source": "net"},
        "expected data_file": {"source": "file"},
    }
    for named, wish in asked.items():
        with pytest.raises(DatasetRefused, match=named):
            prepare_training_dataset("helper", **wish)


def test_held_out_pairs_alone_cannot_be_trained_on() -> None:
    feed(train=0, eval=2, holdout=2)
    with pytest.raises(DatasetRefused, match="train split"):
        prepare_training_dataset("helper", min_samples=1)
    held = prepare_training_dataset("helper", min_samples=1, for_training=False)
    assert held.counts == {"train": 0, "eval": 2, "holdout": 2}


def test_a_folder_that_cannot_be_made_is_refused(ratchet_home: Path) -> None:
    feed()
    (ratchet_home / "snapshots").write_text("a file where a folder should be")
    with pytest.raises(DatasetRefused, match="RATCHET_HOME"):
        prepare_training_dataset("helper")
    assert Snapshot.objects.count() == 0


def test_a_full_disk_leaves_nothing(ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DatasetRefused, match="No space left on device"):
        prepare_training_dataset("helper")
    assert [p for p in ratchet_home.rglob("*") if p.is_file()] == []
    assert Snapshot.objects.count() == 0


@pytest.fixture
def rated() -> None:
    """Thirty prompts answered well, with stars, and ten of them also badly."""
    for number in range(30):
        row = decision_record(agent="helper", messages=f"question {number}", response=f"good {number}").row
        rating_submit(decision=row, rater="ada", stars=5)
        if number < 10:
            bad = decision_record(agent="helper", messages=f"question {number}", response="no").row
            rating_submit(decision=bad, rater="bob", stars=2)


@pytest.mark.usefixtures("rated")
def test_every_kind_has_its_rows() -> None:
    rows = {"pairs": 10, "labels": 40, "scores": 40, "corrections": 30, "prompts": 30}
    found = {
        kind: prepare_training_dataset("helper", kind=kind, for_training=False, dry_run=True).samples
        for kind in rows
    }
    assert found == rows


@pytest.mark.usefixtures("rated")
def test_statistics_speak_of_every_kind() -> None:
    kinds = get_training_stats("helper")["kinds"]
    assert set(kinds) == {"labels", "scores", "corrections", "prompts"}
    labels = kinds["labels"]
    assert (labels["balance"]["good"], labels["balance"]["bad"]) == (30, 10)
    assert labels["duplicates"] == 9  # "no" ten times
    assert sum(labels["rows"].values()) == 40
    # five stars are 1, two are 0.25
    assert kinds["scores"]["scores"]["mean"] == pytest.approx((30 + 10 * 0.25) / 40)
    assert kinds["prompts"]["prompts"] == 30
    assert kinds["corrections"]["length_chars"]["completion"]["max"] == len("good 29")


def test_a_corrected_tool_call_stays_a_call() -> None:
    def called(parcel: int) -> list[dict[str, Any]]:
        function = {"name": "track", "arguments": f'{{"parcel": {parcel}}}'}
        calls = [{"id": "c0", "type": "function", "function": function}]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]

    prompts = prompts_in("train", 3)
    corrections = (json.dumps(called(8)), "Which parcel?", '[{"role": "assistant", "tool_calls": 8}')
    for prompt, correction in zip(prompts, corrections, strict=True):
        decision = decision_record(
            agent="helper", messages=[{"role": "user", "content": prompt}], response=called(7)
        ).row
        rating_submit(decision=decision, rater="ann", correction=correction)
    prepared = prepare_training_dataset("helper", kind="corrections", min_samples=1)
    rows = {row["prompt"][0]["content"]: row["completion"] for row in prepared.rows()}
    (answer,) = rows[prompts[0]]
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == ['{"parcel": 8}']
    assert rows[prompts[1]] == "Which parcel?"
    assert prompts[2] not in rows
    assert prepared.left_out["unreadable"] == 1
