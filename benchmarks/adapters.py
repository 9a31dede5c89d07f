"""Answers a second of llama.cpp in process: one adapter for good, against another adapter for every question.

    python benchmarks/adapters.py [--questions 200] [--adapters 4,20] [--rounds 5] [--threads 1]

On the bundled base at float16, agent `widgets`: answers in free words and within its schema, and choices among the
candidates it lists. So many adapters take turns; up to four have a context each. Rounds of both ways take turns, so
that what else the machine does falls on both; the median is told. The adapters are random ones of rank 8 on every
linear layer. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.agents import AGENTS  # noqa: E402
from rl.serving.base import Ask  # noqa: E402
from rl.serving.llama import LlamaPolicy  # noqa: E402

BUNDLED = ROOT / "rl" / "bundled_model"
AGENT = AGENTS["widgets"]


def files_made(folder: Path, adapters: int) -> tuple[Path, list[Path]]:
    """The base as GGUF, and so many adapters on it."""
    from rl.export.gguf_lora import lora_write
    from rl.export.gguf_names import layout_of
    from rl.export.gguf_write import writer_for
    from rl.export.source import source_open
    from tests.tiny import tiny_adapter

    writer_for(source_open(str(BUNDLED), None), None, None).write(
        folder / "base.gguf", "f16", "base", lambda *_: None
    )
    made = []
    for seed in range(adapters):
        source = source_open(str(BUNDLED), tiny_adapter(BUNDLED, folder / f"lora{seed}", seed=seed))
        layout = layout_of(source.weights.base.config)
        assert layout is not None
        made.append(folder / f"lora{seed}.gguf")
        lora_write(source, layout, made[-1], f"lora{seed}")
    return folder / "base.gguf", made


def seconds_per_question(ask: Callable[[Any, Path], None], states: list[Any], adapters: list[Path]) -> float:
    began = time.perf_counter()
    for number, state in enumerate(states):
        ask(state, adapters[number % len(adapters)])
    return (time.perf_counter() - began) / len(states)


def compared(
    ask: Callable[[Any, Path], None], states: list[Any], adapters: list[Path], rounds: int
) -> dict[str, Any]:
    seconds_per_question(ask, states[:20], adapters)  # adapters are loaded then
    one, many = [], []
    for _ in range(rounds):
        one.append(seconds_per_question(ask, states, adapters[:1]))
        many.append(seconds_per_question(ask, states, adapters))
    ratios = [b / a for a, b in zip(one, many, strict=True)]
    return {
        "one_adapter_per_second": round(1 / statistics.median(one), 1),
        "switched_per_second": round(1 / statistics.median(many), 1),
        "switched_takes": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--adapters", default="4,20", help="How many take turns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    scenarios = AGENT.scenarios()
    states = [scenarios[i * len(scenarios) // options.questions].state for i in range(options.questions)]
    with TemporaryDirectory(prefix="ratchet-bench-") as folder:
        numbers = [int(number) for number in options.adapters.split(",")]
        base, adapters = files_made(Path(folder), max(numbers))
        with LlamaPolicy(base, threads=options.threads) as llama:

            def free(state: Any, adapter: Path) -> None:
                llama.answer(Ask(AGENT.render(state), AGENT.max_new_tokens), adapter)

            def constrained(state: Any, adapter: Path) -> None:
                schema = AGENT.response_schema(state)
                llama.answer(Ask(AGENT.render(state), AGENT.max_new_tokens, response_schema=schema), adapter)

            def chosen(state: Any, adapter: Path) -> None:
                llama.log_probabilities(AGENT.render(state), AGENT.candidates(state), adapter)

            found = {
                f"{number}_adapters": {
                    name: compared(ask, states, adapters[:number], options.rounds)
                    for name, ask in (("free", free), ("constrained", constrained), ("chosen_of_4", chosen))
                }
                for number in numbers
            }
    print(
        json.dumps(
            {
                "benchmark": "adapters",
                "machine": {
                    "processor": platform.processor() or platform.machine(),
                    "threads": options.threads,
                },
                "questions": options.questions,
                **found,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
