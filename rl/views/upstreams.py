"""Connecting: the page of upstreams, and the first step of the guided start. API keys are typed here, never shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from backend.http import button
from feedback.accounts.authentication import key_create
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.messages import ChatMessage
from feedback.models import ApiKey, Decision
from feedback.selectors import SLUG_PATTERN
from feedback.services import agent_set_up
from rl.models import Policy, Upstream
from rl.registry.service import champion_of
from rl.serving.routing import AgentUnknown, agent_check
from rl.serving.upstream_test import upstream_test
from rl.upstreams import (
    UpstreamRefused,
    hosted_policy_create,
    key_place,
    upstream_add,
    upstream_change,
    upstream_fill,
    upstream_get,
    upstream_remove,
    url_fault,
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
@button(OPERATE)
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


def _page(request: HttpRequest, *, status: int = 200, **more: object) -> HttpResponse:
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


# --- First step of the guided start ----------------------------------------------------------------------------


MAKE_KEYS = "feedback.add_apikey"
APP, OTHER = "app", "url"
"""Choices beside the providers: the app calls its model itself, or a server of its own answers."""
QUESTION = "My parcel is late. What can I do?"


class Provider(NamedTuple):
    """A provider that the page offers."""

    key: str
    title: str
    url: str
    dialect: str
    model: str
    """Example of a model's id."""
    key_env: str


PROVIDERS = (
    Provider("openai", "OpenAI", "https://api.openai.com/v1", "openai", "gpt-5-mini", "OPENAI_API_KEY"),
    Provider(
        "anthropic",
        "Anthropic",
        "https://api.anthropic.com/v1",
        "anthropic",
        "claude-sonnet-4-5",
        "ANTHROPIC_API_KEY",
    ),
)


def connecting_agent(request: HttpRequest) -> str:
    """The agent of the address where it was set up and decided nothing yet; empty for another."""
    slug = request.GET.get("agent", "")
    if not re.fullmatch(SLUG_PATTERN, slug):
        return ""
    try:
        agent_check(slug)
    except AgentUnknown:
        return ""
    return slug


def connect_context(request: HttpRequest, slug: str) -> dict[str, object]:
    """Context of the step: the choices, or an agent's snippets and its newest decision."""
    champion = champion_of(slug) if slug else None
    hosted = champion is not None and champion.kind == Policy.Kind.HOSTED
    arrived = Decision.objects.filter(agent=slug).order_by("-created_at").first() if slug else None
    return {
        "connected": bool(slug) and request.GET.get("again") is None,
        "hosted": champion if hosted else None,
        "providers": PROVIDERS,
        "present": list(Upstream.objects.all()),
        "dialects": Upstream.Dialect.choices,
        "server": request.build_absolute_uri("/").rstrip("/"),
        "base_url": request.build_absolute_uri("/v1"),
        "question": QUESTION,
        "app_key": "",
        "may_make_keys": request.user.has_perm(MAKE_KEYS),
        "arrived": arrived,
        "asked": ChatMessage.model_validate(arrived.messages[-1]).text
        if arrived and arrived.messages
        else "",
    }


def agent_connect(given: Mapping[str, str], key: str, *, actor: str) -> Policy | None:
    """Set an agent up: an upstream answers for it from now on, or its app calls its model itself (None).

    A new upstream is asked once first. Raises UpstreamRefused.
    """
    agent, answers = given.get("agent", "").lower(), given.get("answers", "")
    if not re.fullmatch(SLUG_PATTERN, agent):
        fault = "expected a short name such as support-bot"
        raise UpstreamRefused(f"agent: {fault}", {"agent": fault})
    if answers == APP:
        agent_set_up(agent)
        return None
    upstream = _upstream(answers, given, key)
    with transaction.atomic():
        upstream.save()
        return hosted_policy_create(agent, upstream, actor=actor)


def app_key_create(agent: str) -> str:
    """A new key for an agent's app, which may record and rate. Raises KeyRefused."""
    number = ApiKey.objects.filter(name__startswith=f"{agent} app").count()
    return key_create(f"{agent} app{f' {number + 1}' if number else ''}", ["ingest", "rate"])[1]


def _upstream(answers: str, given: Mapping[str, str], key: str) -> Upstream:
    """The upstream that was chosen: one that is there, or a new one that answered. Raises UpstreamRefused."""
    if answers.startswith("upstream:"):
        return upstream_get(answers.removeprefix("upstream:"))
    provider = next((one for one in PROVIDERS if one.key == answers), None)
    if provider is None and answers != OTHER:
        raise UpstreamRefused("Choose what answers today")
    url = provider.url if provider else given.get("url", "")
    if fault := url_fault(url):
        raise UpstreamRefused(f"url: {fault}", {"url": fault})
    values = {
        "name": _name_free(provider.key if provider else (urlsplit(url).hostname or "upstream")),
        "url": url,
        "dialect": provider.dialect if provider else given.get("dialect") or Upstream.Dialect.OPENAI,
        "model": given.get("model", ""),
        "key_env": "" if key else given.get("key_env", ""),
    }
    upstream = upstream_fill(Upstream(), values, key)
    if given.get("untested") != "on":
        upstream_test(upstream)
    return upstream


def _name_free(host: str) -> str:
    """A name for an upstream that no other has: api.example.com becomes example, then example-2."""
    parts = [
        part
        for part in re.split(r"[^a-z0-9-]+", host.lower())
        if part not in ("", "api", "www", "com", "org")
    ]
    name = ("-".join(parts).strip("-") or "upstream")[:50]
    taken = set(Upstream.objects.filter(name__startswith=name).values_list("name", flat=True))
    return next(one for one in (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3))) if one not in taken)
