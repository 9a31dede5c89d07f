"""From a hosted model to your own: where an agent stands, and the next step."""

from __future__ import annotations

from dataclasses import asdict

from backend.command import CommandOptions, RatchetCommand, Result
from feedback.selectors import agent_slugs
from rl.flywheel import FlywheelWaits, flywheel, flywheel_step

MARKS = {"done": "[x]", "now": "[>]", "open": "[ ]"}


class Options(CommandOptions):
    agent: str
    """Agent, a slug. Example: support-bot"""
    step: bool = False
    """Take the next step that needs no person (default: only say it)."""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Walk from a hosted model to your own: record, train, prove, ramp, save. Says where the agent stands and what "
        "each step waits for; leave it and come back at any time. Example: manage.py flywheel support-bot --step"
    )

    def work(self, options: Options) -> Result:
        if options.agent not in agent_slugs():
            known = ", ".join(agent_slugs()[:5]) or "none yet"
            raise FlywheelWaits(f"no decision of agent {options.agent!r} is recorded; there are: {known}")
        did = flywheel_step(options.agent, actor="flywheel") if options.step else ""
        stations = [asdict(one) for one in flywheel(options.agent).stations]
        return {"agent": options.agent, "did": did, "stations": stations}

    def show(self, result: Result) -> None:
        if result["did"]:
            self.stdout.write(f"{result['did']}\n\n")
        for one in result["stations"]:
            self.stdout.write(f"{MARKS[one['state']]} {one['title']}")
            if one["found"]:
                self.stdout.write(f"    {one['found']}")
            if one["waits_for"]:
                self.stdout.write(f"    waits for {one['waits_for']}")

    def next_step(self, result: Result) -> str:
        at = next((one for one in result["stations"] if one["state"] == "now"), None)
        if at is None:
            return f"/savings/?agent={result['agent']} (make serve)"
        return (
            f"python manage.py flywheel {result['agent']} --step" if at["automatic"] else str(at["command"])
        )
