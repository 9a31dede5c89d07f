"""Template tags that every template knows without loading them."""

from __future__ import annotations

from django import template

from backend import installation

register = template.Library()


@register.simple_tag
def program() -> str:
    """Words typed before the name of a command: `python manage.py`, or `ratchet` where it is installed."""
    return installation.PROGRAM
