"""Parts that admin pages of rl share: the filter by agent, and a share with its interval."""

from __future__ import annotations

from feedback.admin import ByAgent as ByAgent


class ByAgentOfPolicy(ByAgent):
    path = "policy__agent"
