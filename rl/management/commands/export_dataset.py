"""Write a training dataset to a file, with its statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from rl.datasets import prepare_training_dataset
from rl.datasets.builder import FORMATS, dataset_write
from rl.datasets.rows import RowRules
from rl.datasets.stats import example_stats, pair_stats
from rl.jobs.estimates import agent_for
from rl.models import Snapshot
from rl.recipes.base import ORDERS


class Command(RatchetCommand):
    help = (
        "Write the dataset that a training method would read (pairs, labels, scores, corrections, groups "
        "or prompts), split by prompt, with its statistics. Example: manage.py export_dataset --agent "
        "widgets --kind labels --format datasets"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--agent", metavar="SLUG", help="Agent (default: the only one). Example: --agent widgets")
        add(
            "--kind",
            choices=[str(kind) for kind in Snapshot.Kind.values],
            default="pairs",
            help="pairs for DPO and reward models, labels for KTO, corrections for SFT, scores for regression, "
            "groups and prompts for GRPO and PPO (default pairs). Example: --kind labels",
        )
        add(
            "--format",
            choices=FORMATS,
            default="jsonl",
            help="JSON lines, one JSON object, or a folder for Hugging Face datasets (default jsonl). "
            "Example: --format json",
        )
        add(
            "--output",
            type=Path,
            metavar="PATH",
            help="File or folder (default: AGENT.KIND.FORMAT). Example: --output labels.jsonl",
        )
        add(
            "--order",
            choices=ORDERS,
            default="none",
            help="Sort training rows from easy to hard, by margin, length or number of steps (default "
            "none: by hash). Example: --order length",
        )
        add(
            "--balance",
            action="store_true",
            help="Labels only: downsample the more frequent label to at most 4:3 (default: keep all).",
        )
        add(
            "--max-samples",
            type=int,
            metavar="N",
            help="Write at most N rows, sampled by hash (default: all). Example: --max-samples 500",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        agent, kind = agent_for(options["agent"], from_file=False), options["kind"]
        dataset = prepare_training_dataset(
            agent,
            kind=kind,
            rules=RowRules(balance=options["balance"]),
            max_samples=options["max_samples"],
            for_training=False,
            dry_run=True,
            binding=True,
        )
        ending = "" if options["format"] == "datasets" else f".{options['format']}"
        path = options["output"] or Path(f"{agent}.{kind}{ending}")
        files = dataset_write(dataset, path, options["format"], order=options["order"])
        stats = pair_stats(dataset.rows()) if kind == "pairs" else example_stats(dataset.rows())
        return {
            "agent": agent,
            "kind": kind,
            "format": options["format"],
            "path": str(path),
            "files": [{"path": str(file), "bytes": file.stat().st_size} for file in files],
            "samples": dataset.counts,
            "left_out": dataset.left_out,
            "unreadable": dataset.unreadable,
            "stats": stats,
        }

    def next_step(self, result: dict[str, Any]) -> str:
        method = {"labels": "kto", "corrections": "sft", "prompts": "grpo", "groups": "grpo"}.get(
            result["kind"], "dpo"
        )
        return f"train on it elsewhere, or here: python manage.py train_{method} --agent {result['agent']} --dry-run"

    def show(self, result: dict[str, Any]) -> None:
        samples = ", ".join(f"{count:,} {split}" for split, count in result["samples"].items())
        self.stdout.write(f"{result['path']}: {result['kind']} of {result['agent']}, {samples}")
        for reason, count in result["left_out"].items():
            self.stdout.write(f"  left out {count:,}: {reason}")
        for decision, why in result["unreadable"].items():
            self.stdout.write(f"  decision {decision} cannot be read and is left out: {why}")
        for name in ("balance", "scores", "group_sizes", "duplicates", "length_chars"):
            if name in result["stats"]:
                self.stdout.write(f"  {name.replace('_', ' ')}: {result['stats'][name]}")
