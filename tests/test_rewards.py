"""Reward functions by worked cases, and the engine that sums them."""

import ast
from typing import Any

import pytest

from rl.agents import get_agent
from rl.rewards.answers import AgentReward, FormatComplianceReward, SyntaxValidationReward
from rl.rewards.base import Component, RewardEngine, RewardSample, RewardValue, combine, reward_normalise
from rl.rewards.catalogue import FunctionReward, RewardRefused, rewards_named
from rl.rewards.code_execution import CodeExecutionDisabled, CodeExecutionReward, code_of
from rl.rewards.traces import EfficiencyReward, TaskCompletionReward, ToolSuccessReward


def sample(response: str = "", agent: str = "widgets", **facts: Any) -> RewardSample:
    return RewardSample([{"role": "user", "content": "?"}], response, agent, facts)


def raws(function: Any, *samples: RewardSample) -> list[float | None]:
    return [value.raw for value in function.score(list(samples))]


def test_ranges_and_code() -> None:
    # the range maps onto 0 to 1 and nothing lies outside
    assert [reward_normalise(raw) for raw in (-2, -1, 0, 2)] == [0.0, 0.25, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"found 2\.5"):
        RewardValue(2.5)
    with pytest.raises(RewardRefused, match=r"too_much gave 7\.0"):
        FunctionReward(lambda one: 7.0, "too_much").score([sample()])
    # code is parsed and not run
    good, bad = sample("```python\nraise SystemExit(1)\n```"), sample("```python\ndef f(:\n```")
    assert raws(SyntaxValidationReward(), good, bad, sample("x = 1"), sample("")) == [2, -2, 2, -2]
    assert raws(SyntaxValidationReward("json"), sample('{"a": 1}'), sample("{a}")) == [2, -2]
    # what would break the parser is a fault, not a crash
    deep = sample("(" * 5000 + ")" * 5000)
    assert raws(SyntaxValidationReward(), deep, sample("x" * 100_001)) == [-2, -2]


def test_a_parser_that_another_thread_disturbed_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, faults = ast.parse, [SystemError("AST constructor recursion depth mismatch"), None]

    def disturbed(text: str) -> ast.Module:
        if (fault := faults.pop(0)) is not None:
            raise fault
        return parse(text)

    monkeypatch.setattr("rl.rewards.answers.ast.parse", disturbed)
    assert raws(SyntaxValidationReward(), sample("x = 1")) == [2]
    assert not faults


def step(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, **more}


def test_tool_calls_and_tasks_earn_the_share_that_worked() -> None:
    steps = [step("tool_call", name="a"), step("tool_call", name="b", error="no"), step("step")] * 2
    assert raws(ToolSuccessReward(), sample(steps=steps)) == [0.0]
    assert raws(ToolSuccessReward(), sample(steps=[step("step")]), sample()) == [None, None]
    steps = [step("task", status="completed")] * 3 + [step("task", status="failed")]
    assert raws(TaskCompletionReward(), sample(steps=steps), sample()) == [1.0, None]
    # efficiency falls straight from half the budget
    reward = EfficiencyReward(token_budget=100, call_budget=4)
    assert raws(reward, *(sample(tokens=n) for n in (0, 50, 75, 100, 150, 900))) == [2, 2, 1, 0, -2, -2]
    assert raws(reward, sample(tokens=10, steps=[step("tool_call")] * 4)) == [0]


def widget_state() -> Any:
    return get_agent("widgets").scenarios()[0].state


def test_a_form_the_agent_can_act_on_is_rewarded() -> None:
    state = widget_state()
    listed = get_agent("widgets").candidates(state)[0]
    good, unlisted, text = (
        sample(listed, state=state),
        sample('{"widget": "nothing_of_the_kind"}', state=state),
        sample("a line chart", state=state),
    )
    assert raws(FormatComplianceReward(), good, unlisted, text) == [2, -2, -2]
    assert raws(FormatComplianceReward(), sample("Hello.", "assistant"), sample(" ", "assistant")) == [2, -2]


def test_the_agent_knows_invalid_from_valid_and_right_from_wrong() -> None:
    for slug in ("widgets", "filer"):
        agent = get_agent(slug)
        state = agent.scenarios()[0].state
        right = agent.ground_truth(state)
        for candidate in agent.candidates(state):
            expected = 1.0 if right is None else 2.0 if candidate in right else -1.0
            assert raws(AgentReward(), sample(candidate, slug, state=state)) == [expected]
        assert raws(AgentReward(), sample("nonsense", slug, state=state)) == [-2]


def test_the_first_block_in_a_known_language_is_the_code() -> None:
    assert code_of("Look:\n```text\nno\n```\n```py\nx = 1\n```") == ("python", "x = 1\n")
    assert code_of("```bash\nls\n```") == ("shell", "ls\n")
    assert code_of("x = 1") == ("python", "x = 1")
    assert code_of("```rust\nfn main() {}\n```") is None


def test_running_code_is_off_unless_it_is_switched_on() -> None:
    with pytest.raises(CodeExecutionDisabled, match="ENABLE_CODE_EXECUTION=true"):
        CodeExecutionReward()
    with pytest.raises(RewardRefused, match="ENABLE_CODE_EXECUTION=true"):
        rewards_named(["code_execution"])


def shorter_is_better(one: RewardSample) -> float:
    return 2.0 if len(one.response) < 5 else -2.0


def test_names_and_dotted_paths_become_functions_once_each() -> None:
    here = f"{__name__}.shorter_is_better"
    found = rewards_named(["agent", "format", "agent", "model:3", here, f"{__name__}.Own"])
    assert [f.name for f in found] == ["agent", "format", here, "own"]
    assert raws(found[2], sample("yes"), sample("certainly")) == [2, -2]
    for spec, said in (
        ("speed", "known are agent"),
        ("nowhere.at_all", "imported"),
        ("math.pi", "a function"),
    ):
        with pytest.raises(RewardRefused, match=said):
            rewards_named([spec])


class Own:
    name = "own"

    def score(self, samples: Any) -> list[RewardValue]:
        return [RewardValue(0.5) for _ in samples]


class Fixed:
    def __init__(self, name: str, *values: float | None) -> None:
        self.name, self.values = name, values

    def score(self, samples: Any) -> list[RewardValue]:
        return [RewardValue(value) for value in self.values]


def test_rewards_are_summed_by_weight_and_reported_in_parts() -> None:
    engine = RewardEngine([Component(Fixed("a", 2.0, None), 3.0), Component(Fixed("b", -2.0, 1.0), 1.0)])
    first, second = engine.reward([sample(), sample()])
    assert (first.raw, first.value) == pytest.approx(((3 * 2 - 2) / 4, 0.75))
    assert second.raw == 1.0  # what does not apply leaves its weight to the others
    assert second.components["a"]["raw"] is None
    binary = RewardEngine([Component(Fixed("a", 0.4, 0.6), binary=True, threshold=0.5)])
    assert [r.raw for r in binary.reward([sample(), sample()])] == [-2.0, 2.0]
    (nothing,) = RewardEngine([Component(Fixed("a", None))]).reward([sample()])
    assert (nothing.raw, nothing.value) == (None, None)
    with pytest.raises(ValueError, match="a name of its own"):
        RewardEngine([Component(Fixed("a", 1.0)), Component(Fixed("a", 1.0))])


def test_horizons_that_are_known_share_the_weight() -> None:
    weights = {"immediate": 1.0, "delayed": 3.0, "strategic": 0.0}
    assert combine({"immediate": 2.0, "delayed": -2.0, "strategic": 2.0}, weights) == pytest.approx(-1.0)
    assert combine({"immediate": 2.0, "delayed": None}, weights) == 2.0
    assert combine({"strategic": 2.0}, weights) is None
