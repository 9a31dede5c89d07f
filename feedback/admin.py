"""Admin of feedback: settings of agents, people (Django's own pages in this theme), and keys, which are shown once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.views.decorators.http import require_POST
from unfold.admin import ModelAdmin
from unfold.decorators import display
from unfold.forms import AdminPasswordChangeForm, UserChangeForm
from unfold.widgets import UnfoldAdminTextInputWidget

from backend.installation import PROGRAM
from feedback.accounts.authentication import KeyRefused, key_create, key_revoke
from feedback.models import AgentSettings, ApiKey, Decision
from feedback.storage.sampling import ratings_wanted_refresh

RENEWED_AT_ONCE = 20_000
"""Decisions of an agent that follow its changed settings while a page waits."""


@admin.register(AgentSettings)
class AgentSettingsAdmin(ModelAdmin):
    """Settings of an agent, which an operator may change at any time."""

    list_display = [
        "agent",
        "ratings_wanted",
        "overlap_share",
        "overlap_ratings",
        "collection_rate",
    ]
    search_fields = ["agent"]

    def save_model(self, request: HttpRequest, obj: AgentSettings, form: Any, change: bool) -> None:
        """Decisions recorded before follow, where there are not too many for a page to wait for."""
        super().save_model(request, obj, form, change)
        if not {"agent", "ratings_wanted", "overlap_share", "overlap_ratings"} & set(form.changed_data):
            return
        many = Decision.objects.filter(agent=obj.agent).order_by()[: RENEWED_AT_ONCE + 1].count()
        if many > RENEWED_AT_ONCE:
            messages.warning(
                request,
                "The new number of wanted ratings applies to new decisions. To apply it to the more than "
                f"{RENEWED_AT_ONCE:,} earlier ones run: {PROGRAM} renew_queue --agent {obj.agent}",
            )
        elif changed := ratings_wanted_refresh(obj.agent):
            messages.info(
                request, f"{changed:,} decisions recorded earlier now have another number of wanted ratings."
            )


SCOPE_WORDS = {
    "ingest": "record decisions, traces and outcomes",
    "rate": "rate and compare, as itself",
    "rate_as": "and on behalf of others, whom it names as `rater`",
    "read": "find, read and export",
    "operate": "train, promote and roll back",
}


class KeyForm(forms.Form):
    name = forms.CharField(
        max_length=100,
        widget=UnfoldAdminTextInputWidget(),
        help_text="What it is for, such as: the shop's backend",
    )
    scopes = forms.MultipleChoiceField(
        choices=[(scope, f"{scope}: {what}") for scope, what in SCOPE_WORDS.items()],
        widget=forms.CheckboxSelectMultiple(),
    )


@admin.register(ApiKey)
class ApiKeyAdmin(ModelAdmin):
    """Keys are made and revoked, never edited; what a key is stands on one page, once."""

    list_display = ["name", "begins", "scopes", "state", "last_used_at", "created_at"]
    search_fields = ["name", "prefix"]
    ordering = ["name"]
    fields = [
        "name",
        "prefix",
        "scopes",
        "agent",
        "origin",
        "budget_usd",
        "created_at",
        "last_used_at",
        "revoked_at",
    ]
    readonly_fields = fields
    change_form_outer_before_template = "admin/feedback/apikey/revoke.html"

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("feedback.add_apikey")

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def may_revoke(self, request: HttpRequest) -> bool:
        return request.user.has_perm("feedback.change_apikey")

    @display(description="begins with")
    def begins(self, key: ApiKey) -> str:
        return f"{key.prefix}…"

    @display(description="state", label={"in use": "success", "revoked": "danger"})
    def state(self, key: ApiKey) -> str:
        return "revoked" if key.revoked_at else "in use"

    def get_urls(self) -> list[URLPattern]:
        revoke = path(
            "<path:object_id>/revoke/",
            self.admin_site.admin_view(self.revoke_view),
            name="feedback_apikey_revoke",
        )
        return [revoke, *super().get_urls()]

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: Mapping[str, object] | None = None
    ) -> HttpResponse:
        """The key is shown in the answer to the form and nowhere else: not in a message, which a cookie would keep.
        `?name=&scopes=rate,read` fills the form in."""
        if not self.has_add_permission(request):
            raise PermissionDenied
        wanted = {"name": request.GET.get("name", ""), "scopes": request.GET.get("scopes", "").split(",")}
        form = KeyForm(request.POST if request.method == "POST" else None, initial=wanted)
        secret = ""
        if request.method == "POST" and form.is_valid():
            try:
                _, secret = key_create(form.cleaned_data["name"], form.cleaned_data["scopes"])
            except KeyRefused as refusal:
                form.add_error("name", str(refusal))
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": "Make an API key",
            "form": form,
            "secret": secret,
            "media": self.media,
        }
        return TemplateResponse(request, "admin/feedback/apikey/make.html", context)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: Mapping[str, object] | None = None,
    ) -> HttpResponse:
        context = {**(extra_context or {}), "may_revoke": self.may_revoke(request)}
        return super().change_view(request, object_id, form_url, context)

    @method_decorator(require_POST)
    def revoke_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        if not self.may_revoke(request):
            raise PermissionDenied
        key = self.get_object(request, unquote(object_id))
        if key is None:
            raise Http404(f"no key {object_id}")
        key_revoke(key.name)
        messages.success(request, f"{key.name} is revoked.")
        return redirect("admin:feedback_apikey_change", key.pk)


# --- People: Django's own pages in this admin's clothes -----------------------------------------------------

# one page to sign in on, for the admin too
admin.site.login_template = "login.html"
admin.site.unregister(User)
admin.site.unregister(Group)


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):
    form = UserChangeForm
    change_password_form = AdminPasswordChangeForm
    list_display = ["username", "is_active", "is_staff", "is_superuser", "last_login"]

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        """People are invited on a page of their own, with a role and a sign-in link in place of a password."""
        if not self.has_add_permission(request):
            raise PermissionDenied
        return redirect("people")


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, ModelAdmin):
    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Rows that a deletion takes along: the groups by name, not each of their permissions as a row."""
        deleted, counts, forbidden, protected = super().get_deleted_objects(objs, request)
        own = {name: count for name, count in counts.items() if "relationship" not in str(name)}
        return [row for row in deleted if not isinstance(row, list)], own, forbidden, protected
