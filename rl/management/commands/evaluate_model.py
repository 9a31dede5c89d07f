"""Judge a policy on held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser
from rich.table import Table

from backend.command import RatchetCommand
from rl import evaluations


class Command(RatchetCommand):
    help = (
        "How often does a policy prefer what people preferred, on prompts it never trained on? "
        "Example: manage.py evaluate_model --policy widgets-v312 --compare-base"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--policy", metavar="NAME", help="A registered policy. Example: --policy widgets-v312")
        add("--checkpoint", type=Path, metavar="DIR", help="An adapter folder instead of a policy.")
        add("--agent", metavar="SLUG", help="Whose held-out pairs to use (default: the policy's agent).")
        add(
            "--test-data",
            type=Path,
            metavar="F",
            help="Pairs from a file (any known format) instead of the holdout.",
        )
        add("--compare-base", action="store_true", help="Judge the base model on the same pairs too.")
        add("--compare", metavar="POLICY", help="Judge another policy on the same pairs too.")
        add(
            "--base-model",
            metavar="NAME_OR_PATH",
            help="Base model (default: the one the adapter was trained on).",
        )
        add(
            "--no-quantization",
            action="store_true",
            help="Load the base in full precision (the default here).",
        )
        add(
            "--quantization",
            choices=["none", "4bit"],
            default="none",
            help="Load the base in 4-bit (default none).",
        )
        add("--max-samples", type=int, metavar="N", help="At most so many pairs (default: all).")
        add(
            "--output",
            type=Path,
            metavar="F",
            help="Write the JSON there too. Example: --output results.json",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        order = evaluations.EvaluationOrder(
            policy=options["policy"],
            checkpoint=options["checkpoint"],
            agent=options["agent"],
            test_data=options["test_data"],
            compare_base=options["compare_base"],
            compare=options["compare"],
            base_model=options["base_model"],
            quantization="none" if options["no_quantization"] else options["quantization"],
            max_samples=options["max_samples"],
        )
        with self.bar("evaluating") as bar:
            result = evaluations.evaluate(order, bar.update)
        if options["output"]:
            options["output"].write_text(
                json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n", "utf-8"
            )
        return result

    def show(self, result: dict[str, Any]) -> None:
        comparison = result.get("comparison")
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("held out")
        table.add_column(result["policy"], justify="right")
        if comparison:
            table.add_column(comparison["against"], justify="right")
        for key, label in MEASURES.items():
            cells = [share_text(result.get(key))]
            if comparison:
                cells.append(share_text(comparison.get(key)))
            if any(cells):
                table.add_row(label, *cells)
        self.console.print(table)
        if result["simulated_share"]:
            self.stdout.write(
                f"{100 * result['simulated_share']:.0f} % of these pairs come from SIMULATED ratings."
            )
        if comparison:
            self.stdout.write(verdict(result))
        self.stdout.write(off_policy_text(result["off_policy"]))
        if result["seen_in_training"]:
            self.stdout.write(
                f"{result['seen_in_training']:,} pairs left out: their prompts were trained on."
            )


MEASURES = {
    "preference_accuracy": "preference accuracy",
    "preference_accuracy_normalised": "... per token",
    "valid_rate": "valid answers",
    "ground_truth": "agrees with the known answer",
    "average_reward": "average reward",
}


def share_text(figure: dict[str, Any] | None) -> str:
    if not figure or figure.get("value") is None:
        return ""
    return f"{100 * figure['value']:.1f} % [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}] n={figure['n']:,}"


def off_policy_text(found: dict[str, Any]) -> str:
    """What it would have earned on logged choices, in one sentence, or why nobody can say."""
    if "refused" in found:
        return f"No off-policy estimate: {found['refused']}."
    best = found["doubly_robust"]
    said = (
        f"On {found['decisions']:,} logged choices it would have earned {best['value']:.3f} "
        f"[{best['low']:.3f}, {best['high']:.3f}]; {found['logged']:.3f} was earned"
    )
    if difference := found.get("difference"):
        said += f"; {difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}] from the other's"
    warnings = found["overlap"]["warnings"]
    return f"{said}. {'Careful: ' + '; '.join(warnings) + '.' if warnings else ''}".strip()


def verdict(result: dict[str, Any]) -> str:
    """Whether the comparison shows a gain, in one sentence with its figures."""
    comparison = result["comparison"]
    difference = comparison["difference"]
    points = (
        f"{100 * difference['value']:+.1f} points [{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}], "
        f"exact McNemar p = {comparison['p_value']:.2g}"
    )
    if difference["low"] > 0:
        return f"Better than {comparison['against']}: {points}."
    if difference["high"] < 0:
        return f"WORSE than {comparison['against']}: {points}."
    return f"No gain over {comparison['against']} is shown: {points}; the interval includes zero."
