"""Masks as an operator writes them: names of patterns that Ratchet brings, or patterns of one's own."""

from __future__ import annotations

import re
from collections.abc import Mapping

PATTERNS = {
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b",
    "card": r"(?<![\w-])\d(?:[ -]?\d){12,18}(?![\w-])",
    "phone": r"(?<![\w+-])(?:\+|0)\d[\d ()/.-]{6,18}\d(?![\w-])",
}
"""Patterns with a name of their own."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
LONGEST_PATTERN = 500


class MaskError(ValueError):
    """A mask is invalid. The message says what was expected."""


def masks_read(given: object) -> list[tuple[str, re.Pattern[str]]]:
    """(name, pattern) of each mask: a name of PATTERNS, or {"name", "pattern"}. Raises MaskError."""
    if not isinstance(given, list):
        raise MaskError('expected a list such as ["email", {"name": "order", "pattern": "A-[0-9]+"}]')
    found = []
    for one in given:
        one = {"name": one, "pattern": PATTERNS.get(one)} if isinstance(one, str) else one
        name, pattern = (one.get("name"), one.get("pattern")) if isinstance(one, Mapping) else (None, None)
        if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(pattern, str):
            raise MaskError(
                f"expected one of {', '.join(PATTERNS)}, or a name and a pattern; found {one!r:.80}"
            )
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise MaskError(f"{name}: {error}") from error
        if len(pattern) > LONGEST_PATTERN or compiled.search("") or compiled.search(f"<{name.upper()}_1>"):
            fault = (
                f"expected at most {LONGEST_PATTERN} characters that match no empty text and no placeholder"
            )
            raise MaskError(f"{name}: {fault}")
        found.append((name, compiled))
    return found
