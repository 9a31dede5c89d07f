"""Template tags available in every template."""

from __future__ import annotations

from django import template

from backend import installation

register = template.Library()


@register.simple_tag
def program() -> str:
    """What users type before a command's name."""
    return installation.PROGRAM
