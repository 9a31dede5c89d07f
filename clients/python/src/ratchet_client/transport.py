"""HTTP transport: connections to one server that are kept open, JSON in, status and text out."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ratchet_client.processes import renew_after_fork
from ratchet_client.version import __version__

LONGEST_RETRY_AFTER_S = 600.0
MAX_RESPONSE_BYTES = 65_536
"""Most bytes read of a response to a record. The sender needs only the status and the reason."""
MAX_IDLE_CONNECTIONS = 32


@dataclass(frozen=True)
class HttpResponse:
    """Response to a request: HTTP status, body text, seconds that the server asked to wait."""

    status: int
    text: str
    retry_after_s: float | None


class HttpConnection:
    """One kept-alive HTTP connection to `url`. Not thread-safe. Raises ValueError for an invalid url."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"expected a url such as http://localhost:8000, found {url!r}")
        self.url = url
        self._prefix = parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "User-Agent": f"ratchet-client/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, *, max_bytes: int = MAX_RESPONSE_BYTES) -> HttpResponse:
        """POST JSON. Raises OSError or http.client.HTTPException without a response.

        max_bytes: most bytes read of the response; the rest is dropped.
        """
        reused = self._connection is not None
        try:
            return self._post(path, body, max_bytes)
        except (ConnectionError, http.client.BadStatusLine, http.client.CannotSendRequest):
            # A server may close a kept-alive connection at any time. On a new connection the error is real.
            self.close()
            if not reused:
                raise
            return self._post(path, body, max_bytes)
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def _post(self, path: str, body: bytes, max_bytes: int) -> HttpResponse:
        if self._connection is None:
            self._connection = (
                http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=ssl.create_default_context()
                )
                if self._secure
                else http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            )
        self._connection.request("POST", self._prefix + path, body, self._headers)
        response = self._connection.getresponse()
        text = response.read(max_bytes).decode("utf-8", "replace")
        if not response.isclosed():
            self.close()  # The rest of the response was not read, so the connection cannot be used again.
        return HttpResponse(response.status, text, _seconds(response.getheader("Retry-After")))

    def close(self) -> None:
        """Close the socket; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def forget(self) -> None:
        """Use a new connection in the child: the old one belongs to the parent."""
        self._connection = None


class HttpPool:
    """Kept-alive connections to one server for many threads, one per open request."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        self._api_key, self._timeout_s = api_key, timeout_s
        self._idle = [HttpConnection(url, api_key, timeout_s)]
        renew_after_fork(self)

    def post(self, path: str, body: bytes, *, max_bytes: int) -> HttpResponse:
        """POST JSON as HttpConnection.post does. Thread-safe."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = HttpConnection(self.url, self._api_key, self._timeout_s)
        try:
            return connection.post(path, body, max_bytes=max_bytes)
        finally:
            if len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def after_fork(self) -> None:
        """Use new connections in the child: the old ones belong to the parent."""
        for connection in self._idle:
            connection.forget()


def _seconds(retry_after: str | None) -> float | None:
    # The header may hold a date. The client's own delays apply then.
    if retry_after is None or not retry_after.strip().isdigit():
        return None
    return min(float(retry_after), LONGEST_RETRY_AFTER_S)


# --- Exceptions of the client. A message names the fault and the next step ---


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
