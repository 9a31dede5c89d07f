"""The page of upstreams: list them, add, change, test and remove one. API keys are typed here and never shown."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from feedback.accounts.roles import SCOPE_PERMISSIONS
from rl.models import Upstream
from rl.serving.upstream_test import upstream_test
from rl.upstreams.service import (
    UpstreamRefused,
    key_place,
    upstream_add,
    upstream_change,
    upstream_get,
    upstream_remove,
    url_warning,
)

OPERATE = SCOPE_PERMISSIONS["operate"]
ASKED = ("name", "url", "model", "dialect", "key_env")
"""Fields of the page's forms; timeouts and prices are set in the admin."""


@sensitive_post_parameters("key")
@login_required
@permission_required(OPERATE, raise_exception=True)
@require_http_methods(["GET", "HEAD", "POST"])
def upstreams(request: HttpRequest) -> HttpResponse:
    """Every upstream, and a form that adds one."""
    if request.method != "POST":
        return _page(request)
    values = {name: request.POST.get(name, "").strip() for name in ASKED}
    try:
        upstream = upstream_add(values, request.POST.get("key", ""))
    except UpstreamRefused as refusal:
        return _page(request, status=400, given=values, fault=refusal.page_text, fields=refusal.fields)
    messages.success(request, f"{upstream.name} is added: test it.")
    return redirect("upstreams")


@sensitive_post_parameters("key")
@login_required
@permission_required(OPERATE, raise_exception=True)
@require_POST
def upstream_act(request: HttpRequest, name: str) -> HttpResponse:
    """Change, test or remove an upstream, as `act` says."""
    try:
        upstream = upstream_get(name)
    except UpstreamRefused as missing:
        raise Http404(str(missing)) from missing
    act = request.POST.get("act", "")
    try:
        if act == "remove":
            upstream_remove(upstream)
            messages.success(request, f"{name} is removed, with its API key.")
        elif act == "test":
            tested = upstream_test(upstream)
            messages.success(
                request,
                f"{name} answered {tested.answer!r} in {tested.latency_ms:,.0f} ms as {tested.model}. Form of JSON "
                f"answers: {tested.schemas}.",
            )
        else:
            # an empty field leaves what is stored as it is
            values = {field: text for field in ASKED[1:] if (text := request.POST.get(field, "").strip())}
            upstream_change(upstream, values, request.POST.get("key", ""))
            messages.success(request, f"{name} is changed.")
    except UpstreamRefused as refusal:
        messages.error(request, refusal.page_text)
    return redirect("upstreams")


def _page(request: HttpRequest, *, status: int = 200, **more: Any) -> HttpResponse:
    rows = [
        {
            "upstream": one,
            "key": key_place(one),
            "policies": list(one.policies.order_by("agent", "-pk")),
            "warning": url_warning(one.url),
        }
        for one in Upstream.objects.prefetch_related("policies")
    ]
    context = {"rows": rows, "given": {}, "fields": {}, "dialects": Upstream.Dialect.choices, **more}
    return render(request, "rl/upstreams.html", context, status=status)
