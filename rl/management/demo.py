"""The `demo` command: the whole loop once, on the bundled base model or another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rl.agents import AGENTS
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.export.service import ExportOrder, export
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.management import simulation
from rl.serving.base import Ask
from rl.serving.llama import LlamaPolicy

ACTOR = "demo"


class ProgressReporter(Protocol):
    """Progress bar of one step."""

    def update(self, done: int, total: int, suffix: str = "") -> None: ...


Bar = Callable[[str], AbstractContextManager[ProgressReporter]]
"""Label of a step -> its progress bar."""


class DemoStopped(Exception):
    """The training was stopped; the message says how to resume it."""


AGENT, BUNDLED = "widgets", "bundled"
SCENARIOS, NOISE, RATERS = 500, 0.1, 3
MAX_PAIRS = 1000
"""Enough pairs to learn the simulated taste; more would only take longer."""
QUANTIZATION = "q4_k_m"
MINUTES = 15.0
"""Default time limit of the training of another model."""


def demo(bar: Bar, base_model: str = BUNDLED, *, minutes: float = MINUTES) -> dict[str, Any]:
    """Simulate, train, evaluate, export and answer. The ratings are SIMULATED.

    The bundled model is trained without a time limit. Raises DemoStopped, and what the steps raise.
    """
    with bar(f"1/5 {SCENARIOS} scenarios, decided and rated (simulated)") as progress:
        simulated = simulation.simulate(
            AGENT,
            scenarios=SCENARIOS,
            rated=True,
            raters=RATERS,
            noise=NOISE,
            seed=0,
            progress=progress.update,
        )
    order = TrainOrder(
        agent=AGENT,
        config="cpu" if base_model == BUNDLED else None,
        base_model=base_model,
        knobs={"seed": 0} | ({} if base_model == BUNDLED else {"minutes": minutes}),
        max_samples=MAX_PAIRS,
        actor=ACTOR,
    )
    with bar("2/5 training with DPO") as progress:
        training = train.train(order, progress.update)
    if training["status"] != "succeeded":
        raise DemoStopped(f"stopped; resume with: python manage.py train_dpo --resume {training['run']}")
    policy = training["policy"]
    with bar("3/5 evaluating on held-out prompts, against the base model") as progress:
        evaluation = evaluate(EvaluationOrder(policy=policy, compare_base=True, actor=ACTOR), progress.update)
    with bar(f"4/5 exporting to GGUF, {QUANTIZATION}") as progress:
        exported = export(
            ExportOrder(policy=policy, format="gguf", quantization=QUANTIZATION, actor=ACTOR), progress.update
        )
    with bar("5/5 answering through llama.cpp") as progress:
        answer = _scenario_answered(Path(exported["files"][0]["path"]))
        progress.update(1, 1)
    return {
        "simulation": asdict(simulated),
        "training": training,
        "evaluation": evaluation,
        "export": exported,
        "answer": answer,
    }


def _scenario_answered(gguf: Path) -> dict[str, Any]:
    """An unrated scenario, answered by the exported file."""
    agent = AGENTS[AGENT]
    scenario = agent.scenarios()[-1]
    with LlamaPolicy(gguf) as policy:
        answer = policy.answer(Ask(agent.render(scenario.state), agent.max_new_tokens))
    valid = agent.is_valid(answer.text, scenario.state)
    return {
        "state": dict(scenario.state),
        "response": answer.text,
        "valid": valid,
        "liked": valid and agent.hidden_preference(scenario.state, answer.text) >= 0.5,
        "latency_ms": answer.latency_ms,
    }
