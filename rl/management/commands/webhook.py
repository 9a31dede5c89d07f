"""Test the webhook, print its signing secret, list undelivered events and send them again."""

from __future__ import annotations

from typing import Literal

from django.conf import settings
from django.core.management.base import CommandError

from backend.command import CommandOptions, RatchetCommand, Result
from backend.notifications import notify, webhook_fault, webhook_outbox, webhook_secret, webhooks_send


class Options(CommandOptions):
    action: Literal["secret", "test", "list", "replay"]
    """secret: print the signing secret; test: send a test event; list: show undelivered events; replay: send them
    again. Example: test"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Test the webhook (NOTIFY_WEBHOOK), which receives promotions, refusals, rollbacks and failed runs. List its "
        "undelivered events and send them again. Examples: manage.py webhook test; manage.py webhook replay"
    )

    def work(self, options: Options) -> Result:
        if options.action == "secret":
            return {"secret": webhook_secret()}
        outbox = webhook_outbox()
        if options.action == "list":
            rows = [{"id": one.body["id"], "tries": one.tries} for one in outbox.pending()]
            return {"waiting": rows, "refused": outbox.refused()}
        if not settings.NOTIFY_WEBHOOK:
            raise CommandError(
                "webhook: expected an address in NOTIFY_WEBHOOK, found none (see docs/settings.md)"
            )
        if options.action == "test":
            if "webhook" not in notify("test", "A test of the webhook."):
                fault = webhook_fault() or "see the warning above; the event waits in the outbox"
                raise CommandError(f"webhook test: {settings.NOTIFY_WEBHOOK} did not take the event: {fault}")
            return {"sent": 1, "waiting": outbox.pending_count()}
        outbox.retry_refused()
        sent = sum(bool(webhooks_send(only=one.body["id"])) for one in outbox.pending())
        return {"sent": sent, "waiting": outbox.pending_count()}

    def show(self, result: Result) -> None:
        for event in result["waiting"] if "refused" in result else ():
            self.stdout.write(f"{event['id']}  tried {event['tries']} times, will be tried again")
        for event in result.get("refused", ()):
            self.stdout.write(f"{event['record']['id']}  {event['reason']}")
        if result.get("refused") == result.get("waiting") == []:
            self.stdout.write("The webhook has taken every event.")
        if "secret" in result:
            self.stdout.write(result["secret"])
        if "sent" in result:
            self.stdout.write(f"{result['sent']} events taken, {result['waiting']} wait")
