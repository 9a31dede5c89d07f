"""The online learner: status, one tick, a loop, a retrain, its place in the workers' schedule."""

from __future__ import annotations

import logging
import time
from typing import Annotated, Literal

from django.db import InterfaceError, OperationalError, close_old_connections

from backend.command import CommandOptions, RatchetCommand, Result
from backend.logs import OutageLog
from feedback.selectors import agent_slugs
from rl.jobs import lifecycle
from rl.models import TrainingRun
from rl.models.learning import learner_config
from rl.models.runs import RunRefused
from rl.online import learner

outage = OutageLog(logging.getLogger("rl.online.learner"))


class Options(CommandOptions):
    action: Literal["status", "tick", "watch", "retrain", "cancel", "install"]
    """What to do. Example: status"""
    run: Annotated[int | None, "?"] = None
    """Number of the run to cancel. Example: cancel 17"""
    agent: str | None = None
    """SLUG: Agent (default: all; for retrain the only one). Example: --agent widgets"""
    every: float | None = None
    """S: Seconds between two checks of watch (default: tick_seconds in the settings). Example: --every
    5"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Online learning: retrain an agent when enough new feedback is there. status; tick: check "
        "once; watch: check until stopped; retrain: start one now; cancel RUN; install: add the check "
        "to the workers' schedule. Example: manage.py online_learner status --agent widgets"
    )

    def work(self, options: Options) -> Result:
        action, agent = options.action, options.agent
        if action == "status":
            agents = [agent] if agent else agent_slugs()
            found = {slug: learner.get_online_learner(slug).get_status() for slug in agents}
            return found[agent] if agent else {"agents": found}
        if action == "tick":
            return {"done": learner.tick()}
        if action == "watch":
            every = options.every or float(learner_config()["tick_seconds"])
            while True:
                try:
                    learner.tick()
                    learner.next_check_note(every)
                except (OperationalError, InterfaceError) as error:
                    outage.report(
                        f"the database cannot be reached; online learning checks again in {every:g} s",
                        error,
                    )
                    close_old_connections()
                except OSError as error:
                    outage.report("the time of the next check cannot be stored for the pages", error)
                time.sleep(every)
        if action == "retrain":
            run = learner.get_online_learner(agent).trigger_retrain(actor="online_learner", force=True)
            return {"run": run.pk, "agent": run.agent, "status": str(run.status)}
        if action == "cancel":
            found_run = TrainingRun.objects.filter(pk=options.run or 0).first()
            if found_run is None:
                raise RunRefused(f"there is no run {options.run}; the page /runs/ lists them")
            run = lifecycle.run_cancel(found_run, actor="online_learner")
            return {"run": run.pk, "status": str(run.status), "reason": run.reason}
        row = learner.schedule_install()
        return {"schedule": row.name, "minutes": row.minutes, "next_run": row.next_run}

    def next_step(self, result: Result) -> str:
        if result.get("status") in ("queued", "running"):
            return (
                "python manage.py serve --only training   (the worker that trains it; `make serve` runs one)"
            )
        agents = result.get("agents", {result.get("agent"): result} if "buffer_size" in result else {})
        due = [agent for agent, status in agents.items() if status["should_retrain"]]
        if due:
            return f"python manage.py online_learner retrain --agent {due[0]}"
        short = [agent for agent, status in agents.items() if (status["evidence"] or {}).get("further")]
        return f"rate at /rate/?agent={short[0]} (make serve)" if short else ""

    def show(self, result: Result) -> None:
        for agent, status in result.get("agents", {}).items():
            self.stdout.write(f"{agent}: {status['reason']}{_gate(status)}")
        for name, value in result.items():
            if name == "evidence" and value:
                value = value["words"]
            if name != "agents":
                self.stdout.write(f"{name}: {value}")


def _gate(status: Result) -> str:
    return f"; gate: {status['evidence']['words']}" if status["evidence"] else ""
