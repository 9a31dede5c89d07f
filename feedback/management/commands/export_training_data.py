"""Write feedback to a file in one of the formats."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Annotated

from django.core.management.base import CommandParser

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from feedback.selectors import agent_slugs
from feedback.transfer import formats
from feedback.transfer.export import FeedbackExportRefused, file_export, filename
from feedback.transfer.export_views import RAW_HIGH, RAW_LOW, Selection


def _reward(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = RAW_LOW - 1
    if not RAW_LOW <= value <= RAW_HIGH:
        raise argparse.ArgumentTypeError(
            f"expected a number from {RAW_LOW:g} to {RAW_HIGH:g}, found {text!r}"
        )
    return value


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 for all, found {text!r}")
    return int(text)


class Options(CommandOptions):
    format: Annotated[str, BY_HAND]
    agent: Annotated[str | None, BY_HAND]
    limit: Annotated[int, BY_HAND]
    min_reward: Annotated[float, BY_HAND]
    output: str | None = None
    """F: The file, gzipped where it ends in .gz (default: AGENT.FORMAT.jsonl). Example: --output
    pairs.jsonl"""
    require_feedback: bool = False
    """Only decisions with a rating, comparison or outcome (default: all decisions)."""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Write decisions with their ratings, comparisons and outcomes to a file, in a format that "
        "import_feedback reads too. Example: manage.py export_training_data --agent widgets --format trl "
        "--output pairs.jsonl"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--format",
            default="ratchet",
            choices=list(formats.SHAPES),
            metavar="F",
            help="Format, by the names in docs/formats.md (default ratchet, which is lossless). "
            "Example: --format trl-unpaired",
        )
        parser.add_argument(
            "--agent-type",
            "--agent",
            dest="agent",
            metavar="SLUG",
            help="Agent whose feedback is written (default: all). Example: --agent widgets",
        )
        parser.add_argument(
            "--limit",
            type=_limit,
            default=1000,
            help="Write at most N samples, newest first; 0 for all (default 1000). Example: --limit 0",
        )
        parser.add_argument(
            "--min-reward",
            type=_reward,
            default=RAW_LOW,
            help="Only decisions with at least this raw reward, from -2 to 2; for pairs, that of the chosen "
            "response (default -2.0: also those without a reward). Example: --min-reward 0.5",
        )

    def work(self, options: Options) -> Result:
        agent, known = options.agent, agent_slugs()
        if agent is not None and agent not in known:
            there = f"known are {', '.join(known)}" if known else "no decisions are recorded yet"
            raise FeedbackExportRefused(f"no decision of agent {agent!r} is recorded; {there}")
        path = Path(options.output or filename(options.format, agent))
        limit = options.limit or None
        selection = Selection(
            agent=agent,
            min_reward=options.min_reward,
            require_feedback=options.require_feedback,
            newest_first=limit is not None,
        )
        report = file_export(path, options.format, selection, limit=limit)
        if report.truncated:
            self.note(f"--limit {limit} left some samples out; --limit 0 writes all")
        return report.as_dict()

    def show(self, result: Result) -> None:
        for file in result["files"]:
            self.stdout.write(
                f"{file['path']}: {file['samples']} samples as {file['format']}, {file['bytes']} bytes"
            )
        for reason, count in result["left_out"].items():
            self.stdout.write(f"  left out {count}: {reason}")

    def next_step(self, result: Result) -> str:
        paths = [file["path"] for file in result["files"]]
        if not paths:
            return ""
        second = f" --ratings-file {shlex.quote(paths[1])}" if len(paths) > 1 else ""
        return (
            f"read it elsewhere: python manage.py import_feedback {shlex.quote(paths[0])}{second} --dry-run"
        )
