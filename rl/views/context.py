"""Template context of every page: whether the guided start still stands in the navigation."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from feedback.cache import TTLCache
from rl.selectors import loop_closed

_closed_cache: TTLCache[bool] = TTLCache()


def guided_start(request: HttpRequest) -> dict[str, Any]:
    """`loop_open`, asked of the database only where a template reads it: true until an agent has had a champion."""
    return {"loop_open": lambda: not _closed_cache.get("closed", loop_closed)}
