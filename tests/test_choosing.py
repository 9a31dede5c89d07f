"""`auto`: which method fits what people said, and why."""

from __future__ import annotations

from typing import Any

import pytest

from feedback.services import decision_record, rating_submit
from rl import online
from rl.choosing import method_chosen
from rl.models import TrainingRun
from rl.orders import TrainOrder
from rl.recipes import RecipeError

pytestmark = pytest.mark.django_db


def say(prompts: range, response: str, **said: Any) -> None:
    for number in prompts:
        row = decision_record(agent="widgets", messages=f"prompt {number}", response=response).row
        rating_submit(decision=row, rater="ada", **said)


def test_two_answers_to_a_prompt_are_compared_by_dpo() -> None:
    say(range(30), "good", thumb="up")
    say(range(30), "bad", thumb="down")
    chosen = method_chosen("widgets")
    assert chosen.method == "dpo"
    assert "pairs to train on, on 2" in chosen.why, chosen.why


def test_thumbs_on_single_answers_are_weighed_by_kto() -> None:
    say(range(20), "good", thumb="up")
    say(range(20, 40), "bad", thumb="down")
    chosen = method_chosen("widgets")
    assert chosen.method == "kto"
    assert "no pairs enough" in chosen.why


def test_a_few_pairs_among_many_thumbs_do_not_silence_the_thumbs() -> None:
    say(range(20), "good", thumb="up")
    say(range(20), "bad", thumb="down")
    say(range(100, 180), "good", thumb="up")
    say(range(180, 200), "bad", thumb="down")
    chosen = method_chosen("widgets")
    assert chosen.method == "kto"
    assert "pairs only on" in chosen.why


def test_liked_answers_alone_are_shown_to_sft() -> None:
    say(range(40), "good", thumb="up")
    assert method_chosen("widgets").method == "sft"


def test_corrections_make_pairs_too_and_go_to_dpo() -> None:
    for number in range(30):
        row = decision_record(agent="widgets", messages=f"prompt {number}", response="bad").row
        rating_submit(decision=row, rater="ada", correction="better")
    assert method_chosen("widgets").method == "dpo"


def test_too_little_of_everything_is_left_to_dpo_to_refuse() -> None:
    say(range(2), "good", thumb="up")
    assert "no method has samples enough" in method_chosen("widgets").why


def test_a_method_that_was_asked_for_is_taken_and_an_unknown_one_refused() -> None:
    assert method_chosen("widgets", "grpo").method == "grpo"
    with pytest.raises(RecipeError, match="no method 'magic'"):
        method_chosen("widgets", "magic")


def test_a_retrain_by_the_learner_keeps_why(settings: Any) -> None:
    settings.ENABLE_ONLINE_LEARNING = True
    say(range(20), "good", thumb="up")
    say(range(20, 40), "bad", thumb="down")
    run = online.OnlineLearner("widgets").trigger_retrain(force=True)
    assert run.method == "kto"
    assert TrainingRun.objects.get(pk=run.pk).result["notes"] == [method_chosen("widgets").why]
    assert TrainOrder("widgets").said == {}
