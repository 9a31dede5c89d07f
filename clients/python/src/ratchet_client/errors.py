"""Exceptions of the client. A message names the fault and the next step."""

from __future__ import annotations

from collections.abc import Mapping


class RatchetError(Exception):
    """Base of the errors that `Client` raises. Invalid arguments raise ValueError instead."""


class ServerUnavailable(RatchetError):
    """No usable response came: the server is unreachable, busy or failing.

    The call may be repeated. With `id=error.id` the server stores it once, however often it arrives.

    status: HTTP status; None without a response. retry_after_s: seconds to wait, as the server asked; None if it did
    not ask.
    """

    def __init__(
        self, message: str, *, id: str, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.id, self.status, self.retry_after_s = id, status, retry_after_s


class RequestRefused(RatchetError):
    """The server refused the request. The same request would be refused again.

    status: HTTP status (400 invalid, 401 and 403 the key, 404 no such decision, 409 the id was used for another
    record). code: the server's error code, such as `not_found`. fields: field of the request -> its fault.
    """

    def __init__(self, message: str, *, status: int, code: str, fields: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status, self.code, self.fields = status, code, dict(fields)
