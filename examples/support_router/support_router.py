"""Support router: Ratchet's gateway says which team a ticket goes to, and where it ended up teaches the next policy.

python support_router.py --tickets 150            # route tickets, then tell the gateway who solved each
python support_router.py --tickets 20 --seed 1    # other tickets: after a promotion the champion answers
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from openai import OpenAI
from tickets import TEAMS, Ticket, tickets

from ratchet_client import Client

AGENT = "support-router"
INSTRUCTIONS = f"Name the team that should solve the ticket, one of {', '.join(TEAMS)}. Answer in JSON."
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"team": {"type": "string", "enum": list(TEAMS)}},
    "required": ["team"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Route:
    """The team a ticket was sent to: by which policy, and as which decision."""

    ticket: Ticket
    team: str
    policy: str
    decision_id: str

    @property
    def right(self) -> bool:
        return self.team == self.ticket.solved_by


def route(gateway: OpenAI, ticket: Ticket) -> Route:
    """Ask the gateway for the ticket's team. The completion's id is the decision's."""
    completion = gateway.chat.completions.create(
        model=AGENT,
        messages=[{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": ticket.text}],
        response_format={"type": "json_schema", "json_schema": {"name": "team", "schema": ANSWER_SCHEMA}},
        user=ticket.customer,
    )
    team = json.loads(completion.choices[0].message.content or "{}").get("team", "")
    return Route(ticket, team, completion.model, completion.id)


def rate(ratings: Client, done: Route) -> None:
    """Thumb up where the first team solved the ticket; thumb down, with the right answer, where it was moved."""
    if done.right:
        ratings.rate(done.decision_id, thumb="up")
    else:
        ratings.rate(done.decision_id, thumb="down", correction=json.dumps({"team": done.ticket.solved_by}))


def report(routes: Iterable[Route]) -> str:
    """Number of tickets by the policy that answered, and of those it answered rightly."""
    routes = list(routes)
    by_policy = Counter(done.policy for done in routes)
    right = Counter(done.policy for done in routes if done.right)
    return "\n".join(f"{policy}: {right[policy]} of {count} right" for policy, count in by_policy.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Route support tickets through Ratchet's gateway")
    parser.add_argument("--url", default=os.environ.get("RATCHET_URL", "http://localhost:8000"))
    parser.add_argument(
        "--key", default=os.environ.get("RATCHET_KEY", ""), help="with scopes ingest and rate"
    )
    parser.add_argument("--tickets", type=int, default=150, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="which tickets are drawn")
    options = parser.parse_args()
    # a server that has just started makes its model file first, and answers 503 with Retry-After until it is there
    gateway = OpenAI(base_url=f"{options.url}/v1", api_key=options.key, max_retries=10)
    ratings = Client(AGENT, options.url, options.key)
    routes = []
    for ticket in tickets(options.tickets, options.seed):
        routes.append(done := route(gateway, ticket))
        rate(ratings, done)
        print(
            f"{done.team or '?':9} {'ok' if done.right else 'moved to ' + ticket.solved_by:19} {ticket.text}"
        )
    print(report(routes))


if __name__ == "__main__":
    main()
