"""Template tags available in every template."""

from __future__ import annotations

from django import template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from backend import glossary, installation

register = template.Library()


@register.simple_tag
def program() -> str:
    """What users type before a command's name."""
    return installation.program_of_checkout()


@register.simple_tag
def help(term: str, kind: str = "term") -> SafeString:
    """A `?` that leads to a term of the glossary, or to a rule of the gate; nothing for another term. Its tooltip has
    the explanation."""
    found = glossary.explained(term, kind)
    if found is None:
        return SafeString("")
    return format_html(
        '<a class="help" href="{}#{}" title="{}" aria-label="What {} means">?</a>',
        reverse("glossary"),
        found.anchor,
        found.meaning,
        term.replace("_", " "),
    )
