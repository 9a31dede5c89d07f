"""Base of the admin pages of facts: rows are shown and searched there, never added, changed or deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib.admin import ModelAdmin as DjangoModelAdmin
from django.contrib.admin import SimpleListFilter
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.timezone import localtime
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.data import JsonLexer
from unfold import fields
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display
from unfold.paginator import InfinitePaginator


def page_context(request: HttpRequest) -> dict[str, Any]:
    """Context of every admin page, laid over Unfold's: no colours, which it would write into the page as a style.

    The Content-Security-Policy refuses styles in pages; the colours lie in static/rl/admin_colors.css.
    """
    return {"colors": {}}


def index_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Context of the admin's first page: the groups of its navigation, with the lists that this person may see."""
    groups = [
        {**group, "items": [item for item in group["items"] if item["has_permission"]]}
        for group in context["sidebar_navigation"]
    ]
    return {**context, "title": "Admin", "groups": [group for group in groups if group["items"]]}


def json_html(value: Any, encoder: type[json.JSONEncoder] | None) -> SafeString:
    """JSON as HTML whose colours come from classes, in place of Unfold's, which has a style at every word."""
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, cls=encoder)
    # pygments escapes what it is given
    return mark_safe(highlight(text, JsonLexer(), HtmlFormatter(cssclass="ratchet-json")))  # noqa: S308


fields.prettify_json = json_html


class ReadOnly:
    """Look, but do not touch: history would be lost."""

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    def has_change_permission(self, *_: Any, **__: Any) -> bool:
        return False

    def has_delete_permission(self, *_: Any, **__: Any) -> bool:
        return False


class FactAdmin(ReadOnly, ModelAdmin):
    """A list of facts. Pages are not counted, so that the list of a million rows opens as quickly as one of ten."""

    paginator = InfinitePaginator
    show_full_result_count = False
    list_per_page = 50
    list_filter_submit = False
    compressed_fields = True

    @display(description="created", ordering="created_at")
    def created(self, row: Any) -> SafeString:
        at = localtime(row.created_at)
        return format_html('<span class="ratchet-time">{}</span> {}', f"{at:%Y-%m-%d}", f"{at:%H:%M}")


class FactInline(ReadOnly, TabularInline):
    extra = 0
    can_delete = False
    show_change_link = False


class AgentFilter(SimpleListFilter):
    """By agent; `path` is the lookup from the listed model, `known` gives the slugs without scanning the list."""

    title = "agent"
    parameter_name = "agent"
    path: ClassVar[str] = "agent"
    known: ClassVar[Callable[[], list[str]]]

    def lookups(self, request: HttpRequest, model_admin: DjangoModelAdmin[Any]) -> list[tuple[str, str]]:
        return [(slug, slug) for slug in type(self).known()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset.filter(**{self.path: value}) if value else queryset


def admin_link(row: Model | None, words: str | None = None) -> SafeString | str:
    """A link to a row's admin page; a dash where there is no row."""
    if row is None:
        return "–"
    address = reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])
    return format_html('<a class="ratchet-link" href="{}">{}</a>', address, words or str(row))
