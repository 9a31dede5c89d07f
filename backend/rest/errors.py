"""Error responses of every address: JSON of one shape for endpoints, {"error": {"code", "message", "fields"}}, without
a traceback; for pages, one that can be read while the database is away."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, UnreadablePostError
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.template.loader import get_template
from django.utils.timezone import now
from django.views import defaults
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions
from rest_framework.response import Response

from backend.logs import OutageLog

logger = logging.getLogger("backend.rest")
outage = OutageLog(logger)

RETRY_S = 2
"""Seconds a client is asked to wait when the database cannot be reached."""

API_PATHS = ("/api/", "/v1/", "/mcp")
"""Addresses that answer JSON, whatever happens."""

STATUSES = {"invalid": 400, "not_found": 404, "conflict": 409, "pending": 503}
"""Codes of a service's refusal -> HTTP status."""


class BodyTooLarge(exceptions.APIException):
    status_code = 413
    default_code = "too_large"


class LengthRequired(exceptions.APIException):
    status_code = 411
    default_code = "length_required"
    default_detail = "expected a Content-Length header, found a chunked body; send the body in one piece"


class RequestRefused(exceptions.APIException):
    """A refusal with a code, a status and faults per field."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid",
        status: int | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """status: by default that of the code."""
        super().__init__(message, code)
        self.status_code = status or STATUSES[code]
        self.fields = dict(fields or {})


def not_found(message: str, field: str) -> RequestRefused:
    """404 for what a field of the request names."""
    return RequestRefused(message, code="not_found", fields={field: "does not exist"})


def error_body(code: str, message: str, fields: Mapping[str, str] | None = None) -> dict[str, object]:
    shown = {_sendable(name): _sendable(fault) for name, fault in (fields or {}).items()}
    return {"error": {"code": code, "message": _sendable(message), "fields": shown}}


OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""HTTP status -> the type of an error under /v1/; other refusals are invalid_request_error, faults server_error."""


def openai_body(status: int, message: str, *, param: str = "", code: str = "") -> dict[str, object]:
    """An error as OpenAI's clients read it: what every address under /v1/ answers."""
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": _sendable(message), "type": kind, "param": param or None, "code": code or None}
    return {"error": error}


def openai_answer(status: int, body: dict[str, Any]) -> dict[str, object]:
    """An error body of ours as OpenAI's clients read it."""
    error = body["error"]
    return openai_body(status, error["message"], param=next(iter(error["fields"]), ""), code=error["code"])


def _sendable(text: str) -> str:
    """Text that may repeat what a client sent, without what no answer can carry."""
    return text.encode("utf-8", "replace").decode()


def refusal_of(error: Exception) -> tuple[int, dict[str, object]] | None:
    """Status and body of a service's refusal: an error with a code of STATUSES, and perhaps faults per field."""
    code, fields = getattr(error, "code", None), getattr(error, "fields", {})
    if not isinstance(error, ValueError) or code not in STATUSES:
        return None
    return STATUSES[code], error_body(code, str(error), fields)


def exception_handler(error: Exception, context: dict[str, Any]) -> Response:
    """Any exception of a view as an answer. What nobody expected is logged with its traceback, and answers 500."""
    if (refusal := refusal_of(error)) is not None:
        wait_s = getattr(error, "retry_after_s", None)
        return Response(
            refusal[1], status=refusal[0], headers=None if wait_s is None else {"Retry-After": str(wait_s)}
        )
    if isinstance(error, exceptions.APIException):
        return _api_exception(error, context.get("view"))
    for kind, status, code, message in EXPECTED_ERRORS:
        if isinstance(error, kind):
            return Response(error_body(code, message), status=status)
    request = context.get("request")
    where = f"{request.method} {request.path}" if request is not None else "a request"
    if away := what_is_away(error):
        response = Response(error_body("unavailable", unreachable(away)), status=503)
        _outage_log(where, away, error, response)
        return response
    logger.error("%s failed", where, exc_info=error)
    return Response(error_body("internal", INTERNAL), status=500)


def _outage_log(where: str, away: str, error: BaseException, response: HttpResponse) -> None:
    """Log an outage, once per interval, and have its answer say when to come again."""
    outage.report(f"{where}: {away} cannot be reached", error, logging.ERROR)
    response["Retry-After"] = str(RETRY_S)
    response._has_been_logged = True  # type: ignore[attr-defined]  # or Django adds a line for each of them


OUTAGES = (OperationalError, InterfaceError)
"""A database that is away, too busy, or whose disk takes nothing."""


def what_is_away(error: BaseException | None) -> str:
    """What an error says cannot be reached: the database, or Redis where it is the queue; empty for other errors."""
    if isinstance(error, OUTAGES):
        return "the database"
    redis = sys.modules.get("redis.exceptions")  # imported by whoever uses it
    return "the queue" if redis is not None and isinstance(error, redis.RedisError) else ""


def unreachable(away: str) -> str:
    return f"{away} cannot be reached; send it again in {RETRY_S} s, with the same id"


INTERNAL = "internal error; it was logged with its cause. Sending the request again with the same id is safe"

EXPECTED_ERRORS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (Http404, 404, "not_found", "nothing is at this address"),
    (PermissionDenied, 403, "forbidden", "you do not have permission for this"),
    (RequestDataTooBig, 413, "too_large", "the body is too large"),
    (SuspiciousOperation, 400, "invalid", "the request cannot be read"),
    (UnreadablePostError, 400, "invalid", "the body ended before the length in Content-Length"),
)

CODES = {
    "not_authenticated": "unauthorized",
    "authentication_failed": "unauthorized",
    "permission_denied": "forbidden",
    "parse_error": "invalid",
    "unsupported_media_type": "unsupported_media_type",
    "method_not_allowed": "method_not_allowed",
    "throttled": "throttled",
    "not_found": "not_found",
}
"""DRF's codes -> ours, where they differ or are promised to clients."""


def _api_exception(error: exceptions.APIException, view: Any) -> Response:
    headers = {}
    if header := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = header
    wait = getattr(error, "wait", None)
    if wait is not None:
        headers["Retry-After"] = str(math.ceil(wait))
    code = error.get_codes() if isinstance(error.detail, str) else error.default_code
    message = str(error.detail)
    if isinstance(error, exceptions.NotAuthenticated):
        message = "expected an Authorization: Bearer <key> header, or a signed-in session; found neither"
    elif isinstance(error, exceptions.UnsupportedMediaType):
        wanted = view.parser_classes[0].media_type
        message = f"expected a body of type {wanted} in UTF-8; set the Content-Type header to it"
    return Response(
        error_body(CODES.get(str(code), str(code)), message, getattr(error, "fields", None)),
        status=error.status_code,
        headers=headers,
    )


# --- Where no view of ours was reached ----------------------------------------------------------------------


@csrf_exempt
def no_such_address(request: HttpRequest) -> HttpResponse:
    """The end of the list of API addresses."""
    hint = "" if request.path.endswith("/") else " (most end with a slash)"
    message = f"nothing is at {request.path[:200]}{hint}; see /api/docs/"
    return _json(request, 404, error_body("not_found", message))


def no_such_page(request: HttpRequest) -> HttpResponse:
    """An address at which there is nothing on purpose."""
    raise Http404


def _json(request: HttpRequest, status: int, body: dict[str, object]) -> HttpResponse:
    """An error in the shape of the address it was found at."""
    if request.path.startswith("/v1/"):
        body = openai_answer(status, body)
    return JsonResponse(body, status=status)


def _instead_of(
    page: Callable[..., HttpResponse], status: int, code: str, message: str
) -> Callable[..., HttpResponse]:
    """A root error handler: JSON under an API address, Django's page elsewhere."""

    def handler(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        if request.path.startswith(API_PATHS):
            return _json(request, status, error_body(code, message))
        return page(request, *args, **kwargs)

    return handler


handler400 = _instead_of(defaults.bad_request, 400, "invalid", "the request cannot be read")
handler403 = _instead_of(defaults.permission_denied, 403, "forbidden", "you do not have permission for this")
handler404 = _instead_of(defaults.page_not_found, 404, "not_found", "nothing is at this address")


def _server_error(request: HttpRequest) -> HttpResponse:
    """The page of an unexpected fault, rendered without the request: it may be the database that fails."""
    return HttpResponse(get_template("500.html").render({"at": now()}), status=500)


_fault = _instead_of(_server_error, 500, "internal", INTERNAL)


class MethodPages:
    """Middleware that gives 405, which Django answers without a text, a page for people. An address with a NUL, which
    PostgreSQL cannot look for, is 404.

    An address of a button is opened by its link when somebody reloads or bookmarks what a form has sent.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if "\x00" in request.path:
            return handler404(request, Http404())
        response = self.get_response(request)
        if response.status_code != 405 or request.path.startswith(API_PATHS):
            return response
        if isinstance(response, HttpResponse) and not response.content:
            page = render(
                request, "405.html", {"sent_by_button": request.method in ("GET", "HEAD")}, status=405
            )
            page["Allow"] = response["Allow"]
            return page
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """404 for a NUL in a query, which no row has and PostgreSQL refuses to look for."""
        is_nul = isinstance(exception, DataError) and any("\x00" in value for value in request.GET.values())
        return handler404(request, Http404()) if is_nul else None


def handler500(request: HttpRequest) -> HttpResponse:
    """An error nobody caught, in a view, in a template or in a middleware: 503 where it is a database that is away.

    The page for people is rendered without the request: who is signed in stands in the database too.
    """
    error = sys.exception()  # Django calls this where it caught the error
    away = what_is_away(error)
    if not away or error is None:
        return _fault(request)
    if request.path.startswith(API_PATHS):
        response = _json(request, 503, error_body("unavailable", unreachable(away)))
    else:
        response = HttpResponse(
            get_template("503.html").render({"retry_s": RETRY_S, "away": away}), status=503
        )
        response["Cache-Control"] = "no-store"
    _outage_log(f"{request.method} {request.path}", away, error, response)
    return response
