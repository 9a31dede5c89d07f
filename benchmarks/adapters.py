"""Answers a second of llama.cpp in process: one adapter for good, against another adapter for every question.

    python benchmarks/adapters.py [--questions 120] [--adapters 4,20,100] [--rounds 7] [--threads 1]
                                  [--cache-mb 1024]

On the bundled base at float16, agent `widgets`: answers in free words and within its schema, and choices among the
candidates it lists. So many adapters take turns; as many as the memory for caches holds have a context each. Rounds of
both ways take turns; `switched_takes` is the median ratio of their processor time, which what else the machine does
falls on least. The adapters are random ones of rank 8 on every linear layer. Prints one JSON object.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.agents import AGENTS  # noqa: E402
from rl.serving.base import Ask  # noqa: E402
from rl.serving.llama import LlamaPolicy  # noqa: E402

BUNDLED = ROOT / "rl" / "bundled_model"
AGENT = AGENTS["widgets"]


def files_made(folder: Path, adapters: int) -> tuple[Path, list[Path]]:
    """The base as GGUF, and so many adapters on it."""
    from rl.export.gguf import writer_for
    from rl.export.gguf_lora import lora_write
    from rl.export.gguf_names import layout_of
    from rl.export.source import source_open
    from tests.support.tiny_models import tiny_adapter

    writer_for(source_open(str(BUNDLED), None)).write(folder / "base.gguf", "f16", "base", lambda *_: None)
    made = []
    for seed in range(adapters):
        source = source_open(str(BUNDLED), tiny_adapter(BUNDLED, folder / f"lora{seed}", seed=seed))
        layout = layout_of(source.weights.base.config)
        assert layout is not None
        made.append(folder / f"lora{seed}.gguf")
        lora_write(source, layout, made[-1], f"lora{seed}")
    return folder / "base.gguf", made


class Spent(NamedTuple):
    """Seconds a question took on the clock, and of the processor; others on the machine lengthen the first."""

    clock: float
    processor: float


def spent_per_question(
    ask: Callable[[Any, Path], None], states: list[Any], adapters: list[Path], turn: int
) -> Spent:
    """turn: no adapter is asked the question again that it was asked in the round before."""
    clock, processor = time.perf_counter(), time.process_time()
    for number, state in enumerate(states):
        ask(state, adapters[(number + turn) % len(adapters)])
    return Spent((time.perf_counter() - clock) / len(states), (time.process_time() - processor) / len(states))


def compared(
    ask: Callable[[Any, Path], None], states: list[Any], adapters: list[Path], rounds: int
) -> dict[str, Any]:
    for adapter in adapters:  # all are loaded then
        ask(states[0], adapter)
    one, many = [], []
    for turn in range(1, rounds + 1):
        one.append(spent_per_question(ask, states, adapters[:1], turn))
        many.append(spent_per_question(ask, states, adapters, turn))
    ratios = [b.processor / a.processor for a, b in zip(one, many, strict=True)]
    return {
        "one_adapter_per_second": round(1 / statistics.median(s.clock for s in one), 1),
        "switched_per_second": round(1 / statistics.median(s.clock for s in many), 1),
        "one_adapter_cpu_ms": round(1e3 * statistics.median(s.processor for s in one), 2),
        "switched_cpu_ms": round(1e3 * statistics.median(s.processor for s in many), 2),
        "switched_takes": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in sorted(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--adapters", default="4,20,100", help="How many take turns")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-mb", type=int, default=1024)
    options = parser.parse_args()
    scenarios = AGENT.scenarios()
    states = [scenarios[i * len(scenarios) // options.questions].state for i in range(options.questions)]
    with TemporaryDirectory(prefix="ratchet-bench-") as folder:
        numbers = [int(number) for number in options.adapters.split(",")]
        base, adapters = files_made(Path(folder), max(numbers))
        with LlamaPolicy(base, threads=options.threads, cache_bytes=options.cache_mb * 1024**2) as llama:
            seats = llama.context.max_slots

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
                "cache_mb": options.cache_mb,
                "seats": seats,
                **found,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
