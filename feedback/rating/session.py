"""Ids that a rater's session keeps: skipped ones, and ratings that can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.http import HttpRequest

UNDO_LIMIT = 10
"""Ratings of a session that can be taken back one after another."""
SKIP_LIMIT = 500
"""Skipped decisions a session remembers; the oldest one comes back first."""


@dataclass(frozen=True)
class SessionIds:
    """A list of ids under a key of the session, the newest last; beyond `limit` the oldest are dropped."""

    key: str
    limit: int

    def read(self, request: HttpRequest) -> list[str]:
        ids: list[str] = request.session.get(self.key, [])
        return ids

    def write(self, request: HttpRequest, ids: Sequence[str]) -> None:
        request.session[self.key] = list(ids)

    def append(self, request: HttpRequest, added: str) -> None:
        """Put an id last, where it stood before or not."""
        ids = [pk for pk in self.read(request) if pk != added]
        self.write(request, [*ids, added][-self.limit :])
