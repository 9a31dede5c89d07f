"""Record simulated decisions and, if asked, simulated ratings."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from backend.command import CommandOptions, RatchetCommand, Result
from rl.agents.worlds import TASTES, TEAM
from rl.management import simulation


class Options(CommandOptions):
    agent: str
    """Agent with scenarios: any of the built-in ones. Example: widgets"""
    scenarios: str = "all"
    """Number of scenarios, up to 5,000, or all (default: all built-in ones; 2,000 with --taste other than
    team). Example: --scenarios 100"""
    rate: Literal["human", "simulated"] = "human"
    """Who rates: people on /rate/ (the default), or simulated raters with a hidden preference."""
    taste: Annotated[str, tuple(TASTES)] = Field(
        TEAM,
        description="What simulated raters prefer by: "
        + "; ".join(f"{name}: {words}" for name, words in TASTES.items())
        + f" (default {TEAM}).",
    )
    noise: float = 0.1
    """Share of simulated ratings that are flipped, 0 to 0.5, where 0.5 is random (default 0.1). Example:
    --noise 0.2"""
    raters: int = 3
    """Simulated raters per decision (default 3). Example: --raters 1"""
    seed: int = 0
    """Seed of the scenarios and the flipped ratings (default 0). Example: --seed 1"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Record decisions from an agent's scenarios, to be rated on /rate/ or by simulated raters. "
        "Example: manage.py simulate widgets --scenarios 100 --rate human"
    )

    def work(self, options: Options) -> Result:
        scenarios = options.scenarios
        if scenarios != "all" and not scenarios.isdigit():
            raise simulation.SimulationRefused(
                f"expected --scenarios as a number or all, found {scenarios!r}"
            )
        with self.bar("simulating") as bar:
            simulated_feedback = simulation.simulate(
                options.agent,
                scenarios=None if scenarios == "all" else int(scenarios),
                taste=options.taste,
                rated=options.rate == "simulated",
                raters=options.raters,
                noise=options.noise,
                seed=options.seed,
                progress=bar.update,
            )
        return {
            **dataclasses.asdict(simulated_feedback),
            "simulated": True,
            "taste": options.taste,
            "noise": options.noise,
            "seed": options.seed,
        }

    def show(self, result: Result) -> None:
        self.stdout.write(
            f"{result['decisions']:,} decisions of {result['scenarios']:,} scenarios for agent {result['agent']} "
            f"({result['decisions_new']:,} new)."
        )
        if result["ratings"]:
            self.stdout.write(
                f"{result['ratings']:,} SIMULATED ratings by {result['raters']} simulated raters "
                f"({100 * result['noise']:.0f} % flipped, {100 * result['up_share']:.0f} % thumbs up)."
            )

    def next_step(self, result: Result) -> str:
        if result["ratings"]:
            return f"python manage.py train_dpo --agent {result['agent']}"
        return f"`make serve`, `python manage.py login_link`, then rate at /rate/?agent={result['agent']}"
