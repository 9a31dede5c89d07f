"""Calculate rewards of decisions that have none or have newer feedback."""

from __future__ import annotations

from typing import Annotated

from django.core.management.base import CommandParser

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from feedback.selectors import agent_slugs
from rl.datasets.reward_records import (
    RewardsRefused,
    outcome_value_set,
    outcomes_without_value,
    reward_labels,
    rewards_calculate,
)


class Options(CommandOptions):
    agent: Annotated[str | None, BY_HAND]
    everything: Annotated[bool, BY_HAND]
    outcome: tuple[str, ...] = ()
    """NAME=GOOD:BAD: Define an outcome's reward first: GOOD is the value with reward 1, BAD the one with
    reward 0, linear in between. Stored in the agent's reward settings; then all rewards are calculated
    again. Repeatable. Append :strategic for long-term outcomes. Example: --agent desk --outcome
    solved=1:0 --outcome minutes=5:60"""
    limit: int | None = None
    """N: Calculate at most N rewards (default: all). Example: --limit 1000"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Calculate the rewards of decisions that have none, or that got ratings or outcomes since. "
        "Earlier rewards stay as history. Example: manage.py calculate_rewards --agent-type filer"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--agent-type",
            "--agent",
            dest="agent",
            metavar="SLUG",
            help="Whose decisions (default: all agents'). Example: --agent-type filer",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            dest="everything",
            help="Calculate all again, after a change of weights or reward functions (default: only pending "
            "ones).",
        )

    def work(self, options: Options) -> Result:
        if options.limit is not None and options.limit < 1:
            raise RewardsRefused(f"expected --limit of at least 1, found {options.limit}")
        if options.outcome and not options.agent:
            raise RewardsRefused(
                "--outcome defines rewards for one agent: expected --agent SLUG too, found none"
            )
        for spec in options.outcome:
            outcome_value_set(options.agent or "", spec)
        with self.bar("rewards") as bar:
            found = rewards_calculate(
                options.agent,
                everything=options.everything or bool(options.outcome),
                limit=options.limit,
                progress=bar.update,
            )
        agents = [options.agent] if options.agent else agent_slugs()
        labels = {slug: reward_labels(slug) for slug in agents if slug not in found.refused}
        unvalued = {slug: outcomes_without_value(slug) for slug in agents if slug not in found.refused}
        return {
            **found.model_dump(),
            "agents": agents,
            "labels": {slug: made for slug, made in labels.items() if made["good"] + made["bad"]},
            "outcomes_without_worth": {slug: names for slug, names in unvalued.items() if names},
        }

    def next_step(self, result: Result) -> str:
        for agent, names in result["outcomes_without_worth"].items():
            return (
                f"python manage.py calculate_rewards --agent {agent} --outcome {next(iter(names))}=GOOD:BAD"
            )
        for agent in result["labels"]:
            return f"python manage.py train_kto --agent {agent} --dry-run"
        agents = result["agents"] if result["calculated"] else []
        return f"python manage.py train_ppo --agent {agents[0]} --dry-run" if agents else ""

    def show(self, result: Result) -> None:
        self.stdout.write(
            f"{result['calculated']:,} decisions processed, {result['written']:,} rewards new or changed; "
            f"{result['pending']:,} still pending."
        )
        for agent, why in result["refused"].items():
            self.stdout.write(f"No rewards for {agent}: {why}")
        for decision, why in result["unreadable"].items():
            self.stdout.write(f"Skipped decision {decision}: {why}")
        if result["unreadable_count"]:
            self.stdout.write(
                f"{result['unreadable_count']:,} decisions cannot be read: /problems/ lists them; withdraw one with "
                "python manage.py withdraw_decisions --id ID"
            )
        for agent, made in result["labels"].items():
            self.stdout.write(
                f"{agent}, unrated decisions: {made['good']:,} good and {made['bad']:,} bad by outcomes and traces "
                f"(good from a reward of {made['threshold']:g}, of 1)"
            )
        for agent, names in result["outcomes_without_worth"].items():
            for name, count in names.items():
                self.stdout.write(
                    f"{agent}: {name} was measured {count:,} times but has no reward yet; define it: "
                    f"python manage.py calculate_rewards --agent {agent} --outcome {name}=GOOD:BAD"
                )
