"""The whole loop once, on the bundled base model: simulate, train, judge, register, export, answer."""

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

AGENT = "widgets"
SCENARIOS = 500
NOISE = 0.1
RATERS = 3
MAX_PAIRS = 1000
"""Number of pairs that teach the simulated taste; more would only make people wait."""
QUANTIZATION = "q4_k_m"


class ProgressReporter(Protocol):
    """Progress bar that a step of the demo reports to."""

    def update(self, done: int, total: int, suffix: str = "") -> None: ...


def demo(bar: Callable[[str], AbstractContextManager[ProgressReporter]], *, seed: int = 0) -> dict[str, Any]:
    """Turn the ratchet once; `bar(label)` shows the progress of each step. The ratings are SIMULATED."""
    with bar(f"1/5 {SCENARIOS} scenarios, decided and rated (simulated)") as progress_bar:
        simulated = simulation.simulate(
            AGENT,
            scenarios=SCENARIOS,
            rated=True,
            raters=RATERS,
            noise=NOISE,
            seed=seed,
            progress=progress_bar.update,
        )
    with bar("2/5 training with DPO") as progress_bar:
        training = train.train(
            TrainOrder(
                agent=AGENT,
                config="cpu",
                base_model="bundled",
                knobs={"seed": seed},
                max_samples=MAX_PAIRS,
                actor="demo",
            ),
            progress_bar.update,
        )
    if training["status"] != "succeeded":
        return {"simulation": asdict(simulated), "training": training}
    with bar("3/5 evaluating on held-out prompts, against the base model") as progress_bar:
        evaluation = evaluate(
            EvaluationOrder(policy=training["policy"], compare_base=True, actor="demo"),
            progress_bar.update,
        )
    with bar(f"4/5 exporting to GGUF, {QUANTIZATION}") as progress_bar:
        export_result = export(
            ExportOrder(policy=training["policy"], format="gguf", quantization=QUANTIZATION, actor="demo"),
            progress_bar.update,
        )
    with bar("5/5 answering through llama.cpp") as progress_bar:
        answer = _answer(Path(export_result["files"][0]["path"]))
        progress_bar.update(1, 1)
    return {
        "simulation": asdict(simulated),
        "training": training,
        "evaluation": evaluation,
        "export": export_result,
        "answer": answer,
    }


def _answer(gguf: Path) -> dict[str, Any]:
    """One scenario nobody rated, answered by the exported file."""
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
