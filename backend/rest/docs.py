"""Page of the REST API's description: the OpenAPI schema, readable and to be tried, in the frame of all pages."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe


@require_safe
def api_docs(request: HttpRequest) -> HttpResponse:
    """Swagger UI on /api/schema/, open to everyone as the schema is; who is signed in tries calls as themselves."""
    return render(request, "api_docs.html")
