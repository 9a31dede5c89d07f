"""Base class of every endpoint."""

from __future__ import annotations

from typing import ClassVar

from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.request import Request
from rest_framework.views import APIView

from backend.rest.access import SCOPES
from backend.rest.errors import LengthRequired

WRITES_AND_READS = ("GET", "POST", "PUT", "PATCH", "DELETE")
CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")


class ApiView(APIView):
    """An endpoint. `scopes` says per HTTP method what a caller must have been granted; there is no other method."""

    scopes: ClassVar[dict[str, str]] = {}
    http_method_names = ["get", "post", "put", "patch", "delete", "head"]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        open_to_all = [
            m for m in WRITES_AND_READS if hasattr(cls, m.lower()) and cls.scopes.get(m) not in SCOPES
        ]
        if open_to_all:
            raise TypeError(f"{cls.__name__} answers {', '.join(open_to_all)} and names no scope for it")

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        # before anything is read: Django decodes the query with whatever codec a client names here
        charset = (request._request.content_params or {}).get("charset", "").lower()
        if charset not in CHARSETS:
            raise UnsupportedMediaType(
                request.content_type, f"expected UTF-8, found charset {charset[:40]!r}"
            )
        super().initial(request, *args, **kwargs)
        if (
            "chunked" in request.headers.get("Transfer-Encoding", "")
            and "Content-Length" not in request.headers
        ):
            raise LengthRequired()
