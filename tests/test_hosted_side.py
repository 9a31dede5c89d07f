"""A hosted policy in evaluations: its upstream is asked each held-out prompt once."""

from typing import Any

import pytest

from feedback.erasure.marks import Marks
from rl.datasets.erasure import copies_erase
from rl.evaluation import sides
from rl.evaluation.sides import HostedFailed, HostedSide, cache_file
from rl.training.held_out import HeldOutPrompt
from rl.training.sides import AnswersOnly
from tests.support.hosted import hosted, model_server  # noqa: F401
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db


def prompts(*texts: str) -> list[HeldOutPrompt]:
    return [HeldOutPrompt([{"role": "user", "content": text}], {}) for text in texts]


def test_each_prompt_is_asked_once_for_the_same_model_and_parameters(stub: ModelServer) -> None:
    policy = hosted(stub.url, parameters={"temperature": 0.0})
    first = HostedSide(policy).answers(prompts("a", "b", "a"))
    assert [(one.text, one.tokens, one.finish_reason) for one in first if one] == [
        ("hello there", 3, "stop")
    ] * 3
    assert len(stub.bodies) == 2
    assert all(body["temperature"] == 0.0 for body in stub.bodies)
    HostedSide(policy).answers(prompts("b", "c"))
    assert len(stub.bodies) == 3
    policy.parameters = {"temperature": 1.0}
    HostedSide(policy).answers(prompts("a"))
    assert len(stub.bodies) == 4


def test_a_hosted_policy_is_a_side_that_gives_answers_alone(stub: ModelServer) -> None:
    assert isinstance(HostedSide(hosted(stub.url)), AnswersOnly)


def test_answers_are_kept_where_it_fails_later(stub: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "AT_ONCE", 1)
    policy = hosted(stub.url)
    stub.statuses = [200, 401]
    with pytest.raises(HostedFailed, match="the stub says 401"):
        HostedSide(policy).answers(prompts("a", "b"))
    HostedSide(policy).answers(prompts("a"))
    assert len(stub.bodies) == 2


def test_a_refused_prompt_has_no_answer(stub: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "AT_ONCE", 1)
    said: list[str] = []
    policy = hosted(stub.url)
    stub.statuses = [400]
    found = HostedSide(policy, said.append).answers(prompts("a", "b"))
    assert [one is None for one in found] == [True, False]
    assert "refused 1 " in said[-1]
    stub.statuses = [400, 400]
    with pytest.raises(HostedFailed, match="the stub says 400"):
        HostedSide(policy).answers(prompts("c", "d"))


def test_an_upstream_that_is_busy_is_waited_for(stub: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(sides.time, "sleep", waits.append)
    stub.statuses, stub.retry_after = [429], "30"
    policy = hosted(stub.url)
    with pytest.raises(HostedFailed, match="left alone"):  # the clock stands still here
        HostedSide(policy).answers(prompts("a"))
    long = [wait for wait in waits if wait]  # the stub sleeps for 0 s
    assert len(long) == sides.TRIES - 1
    assert all(25 < wait <= 30 for wait in long)


def test_erasing_anything_removes_the_answers(stub: ModelServer, ratchet_home: Any) -> None:
    HostedSide(hosted(stub.url)).answers(prompts("a"))
    assert cache_file().exists()
    marks = Marks("ada", frozenset(), {}, frozenset(), frozenset(), ())
    copies_erase(marks, dry_run=True)
    assert cache_file().exists()
    copies_erase(marks, dry_run=False)
    assert not cache_file().exists()
