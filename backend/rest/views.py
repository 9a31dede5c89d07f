"""What every endpoint is built on."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.request import Request
from rest_framework.views import APIView

from backend.rest.errors import LengthRequired

CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")


class ApiView(APIView):
    """An endpoint. `scopes` says per HTTP method what a caller must have been granted; there is no other method."""

    scopes: ClassVar[dict[str, str]] = {}

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # before anything is read: Django decodes the query with whatever codec a client names here
        charset = (request._request.content_params or {}).get("charset", "").lower()
        if charset not in CHARSETS:
            raise UnsupportedMediaType(request.content_type, f"expected UTF-8, found charset {charset[:40]!r}")
        super().initial(request, *args, **kwargs)
        if "chunked" in request.headers.get("Transfer-Encoding", "") and "Content-Length" not in request.headers:
            raise LengthRequired()
