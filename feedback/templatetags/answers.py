"""Template tag that shows an answer as the rating card does."""

from __future__ import annotations

from typing import Any

from django import template
from django.utils.text import Truncator

from feedback.explorer.previews import Block, text_blocks

register = template.Library()


@register.inclusion_tag("feedback/preview/_blocks.html")
def answer(text: str, characters: int = 0) -> dict[str, Any]:
    """An answer: a table of what its JSON holds, else its words and code, cut to so many characters where given."""
    blocks = text_blocks(text)
    if characters and len(text) > characters and not (blocks and blocks[0].structure):
        blocks = [Block(Truncator(text).chars(characters))]
    return {"blocks": blocks}
