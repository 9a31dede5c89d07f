"""Parts that admin pages of rl share: the filter by agent, and a share with its interval."""

from __future__ import annotations

from typing import Any

from feedback.admin import ByAgent as ByAgent
from rl.gates.figures import share_of


class ByAgentOfPolicy(ByAgent):
    path = "policy__agent"


def share_cell(figures: dict[str, Any], name: str) -> str:
    share = share_of(figures, name)
    if share is None:
        return "–"
    return f"{share.percent} [{share.interval}]" if share.interval else share.percent
