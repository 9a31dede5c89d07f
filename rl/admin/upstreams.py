"""The admin of upstreams: all their settings; an API key is typed and never shown."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.decorators import display
from unfold.widgets import UnfoldAdminPasswordWidget

from rl.models import Upstream
from rl.upstreams.service import SETTINGS, UpstreamRefused, key_place, upstream_fill


class UpstreamForm(forms.ModelForm):
    """The settings of an upstream, and a field for a new API key."""

    key = forms.CharField(
        required=False,
        strip=True,
        max_length=1000,
        widget=UnfoldAdminPasswordWidget(attrs={"autocomplete": "off"}, render_value=False),
        label="API key",
        help_text="Stored encrypted and never shown; empty: the present one stays",
    )

    class Meta:
        model = Upstream
        fields = [*SETTINGS]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        stored = Upstream.objects.filter(pk=self.instance.pk).first() or Upstream()
        values = {name: cleaned[name] for name in SETTINGS if name in cleaned}
        if values.get("key_env") == stored.key_env and cleaned.get("key"):
            values["key_env"] = ""  # the form sends the present variable along with a new key
        try:
            filled = upstream_fill(stored, values, cleaned.get("key") or "")
        except UpstreamRefused as refusal:
            for name, fault in refusal.fields.items():
                self.add_error(name if name in self.fields else None, fault)
            return cleaned
        self.instance.key_encrypted = filled.key_encrypted
        return cleaned | {"key_env": filled.key_env, "url": filled.url}


@admin.register(Upstream)
class UpstreamAdmin(ModelAdmin):
    """Endpoints of providers, with timeouts and prices."""

    form = UpstreamForm
    list_display = ["name", "url", "model", "dialect", "key_kept"]
    search_fields = ["name", "url", "model"]

    @display(description="API key")
    def key_kept(self, upstream: Upstream) -> str:
        return key_place(upstream)

    def get_readonly_fields(self, request: HttpRequest, obj: Upstream | None = None) -> list[str]:
        return ["name"] if obj else []
