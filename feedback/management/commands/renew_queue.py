"""Apply an agent's collection settings to decisions recorded earlier."""

from __future__ import annotations

from typing import Annotated

from django.core.management.base import CommandError

from backend.command import NEEDED, CommandOptions, RatchetCommand, Result
from feedback.models import Decision
from feedback.storage.sampling import ratings_wanted_refresh


class Options(CommandOptions):
    agent: Annotated[str, NEEDED]
    """Agent whose decisions are updated. Example: --agent support-bot"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Apply the agent's present collection settings (ratings wanted, overlap) to decisions recorded "
        "earlier. Saving the settings does this itself for agents with up to 20,000 decisions. Example: "
        "manage.py renew_queue --agent support-bot"
    )

    def work(self, options: Options) -> Result:
        agent = options.agent
        if not Decision.objects.filter(agent=agent).exists():
            raise CommandError(
                f"no decision of agent {agent!r} is recorded; give the slug of an agent with decisions"
            )
        return {"agent": agent, "changed": ratings_wanted_refresh(agent)}

    def show(self, result: Result) -> None:
        self.stdout.write(f"{result['changed']:,} decisions have a new number of wanted ratings.")
