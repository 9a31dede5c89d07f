"""Errors of the client: each says what was expected, what was found and what to do next."""

from __future__ import annotations

from collections.abc import Mapping


class RatchetError(Exception):
    """Base of everything a call of `Client` raises beside ValueError, which is a fault of its arguments."""


class ServerUnavailable(RatchetError):
    """No usable response came: the server is away, busy or failing.

    The call may be repeated; with `id=error.id` it is the same write, however often it arrives.

    status: HTTP status, None where there was no response. retry_after_s: seconds the server asked to wait, None where
    it did not say.
    """

    def __init__(
        self, message: str, *, id: str, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.id, self.status, self.retry_after_s = id, status, retry_after_s


class RequestRefused(RatchetError):
    """The server refuses the request; repeated unchanged, it will be refused again.

    status: HTTP status (400 invalid, 401 and 403 the key, 404 no such decision, 409 the id was used for another
    write). code: the server's word for it, such as `not_found`. fields: field of the request -> its fault.
    """

    def __init__(self, message: str, *, status: int, code: str, fields: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status, self.code, self.fields = status, code, dict(fields)
