"""Run benchmark tasks for a policy and its base model."""

from __future__ import annotations

from typing import Annotated, Literal

from django.core.management.base import CommandParser

from backend import command
from backend.command import BY_HAND, NEEDED, CommandOptions, RatchetCommand, Result
from rl.evaluation import benchmarks
from rl.recipes.benchmark_tasks import BENCHMARKS, bundled_names
from rl.registry.gate_evidence import gate_bounds


class Options(CommandOptions):
    policy: Annotated[str, NEEDED]
    """NAME: A registered policy. Example: --policy widgets-v312"""
    tasks: Annotated[str | None, BY_HAND]
    limit: int | None = None
    """N: Only the first N items of each task (default: all). Example: --limit 100"""
    fewshot: int | None = None
    """N: Solved examples before each item (default: what the task defines, else 0). Example: --fewshot
    5"""
    batch_size: int = 16
    """N: Items per batch (default 16). Example: --batch-size 4"""
    no_chat_template: bool = False
    """Send items as plain text, as published results of base models do (default: as chat messages, as the
    policy is served)."""
    hub: bool = False
    """Download data sets that are not in the Hugging Face cache (default: no downloads)."""
    quantization: Literal["none", "4bit"] = "none"
    """Load the base model in 4-bit (default none). Example: --quantization 4bit"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Run benchmark tasks (lm-evaluation-harness) for a policy and its base model on the same "
        "items, and store the results with the policy. Example: manage.py benchmark_model --policy "
        "widgets-v312 --tasks ratchet_format"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--tasks",
            metavar="LIST",
            help=f"Tasks, separated by commas: bundled ones ({', '.join(bundled_names())}: the default)"
            + (f", of installed packages ({', '.join(BENCHMARKS)})" if BENCHMARKS else "")
            + ", paths of task folders, or tasks of the harness. "
            "Example: --tasks ratchet_options,./tasks/billing",
        )

    def work(self, options: Options) -> Result:
        tasks = options.tasks if options.tasks is not None else ",".join(bundled_names())
        order = benchmarks.BenchmarkOrder(
            policy=options.policy,
            tasks=tuple(spec for one in tasks.split(",") if (spec := one.strip())),
            limit=options.limit,
            fewshot=options.fewshot,
            batch_size=options.batch_size,
            chat_template=not options.no_chat_template,
            hub=options.hub,
            quantization=options.quantization,
        )
        with self.bar("benchmarking") as bar:
            return benchmarks.benchmark_policy(order, bar.update)

    def show(self, result: Result) -> None:
        rows = []
        for one in result["benchmarks"]:
            found = one["difference"]
            shares = (
                f"{100 * side['value']:.1f} % ± {100 * side['stderr']:.1f}"
                for side in (one["own"], one["base"])
            )
            difference = (
                f"{100 * found['value']:+.1f} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
            )
            rows.append((one["task"], one["metric"], f"{one['n']:,}", *shares, difference))
        self.table(rows, ("task", "metric", "items", result["policy"], "base", "difference, points [95 %]"))
        first = result["benchmarks"][0]
        self.stdout.write(
            f"± is one standard error. Measured with {first['harness']}, "
            f"{'as chat messages' if first['chat_template'] else 'in plain text'}; stored with the policy."
        )
        for note in result["notes"]:
            self.stdout.write(note)

    def next_step(self, result: Result) -> str:
        listed = gate_bounds(result["agent"]).benchmark_bounds
        all_listed = all(one["task"] in listed for one in result["benchmarks"])
        return command.after_benchmark(result["policy"], result["agent"], asked=all_listed)
