"""Filters of rl's admin pages: by a row's agent, or by the agent of its policy."""

from __future__ import annotations

from feedback.admin import ByAgent as ByAgent


class ByAgentOfPolicy(ByAgent):
    path = "policy__agent"
