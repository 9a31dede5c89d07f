"""Glossary: the terms of docs/glossary.md on a page, so that pages can link to the word they use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.text import slugify
from django.views.decorators.http import require_safe

from backend.installation import bundled_folder

ROW = re.compile(
    r"^\| \*\*(?P<term>[^|]+)\*\* \| (?P<meaning>[^|]+) \| \[[^\]]+\]\((?P<page>[^)#]+)[^)]*\) \|$",
    re.MULTILINE,
)
"""A row of the table in docs/glossary.md: | **term** | meaning | [words](page.md#place) |"""


@dataclass(frozen=True)
class Term:
    """One term, what it means, and the page of docs/ that tells more."""

    name: str
    meaning: str
    page: str

    @property
    def anchor(self) -> str:
        """Its place on the page: /glossary/#off-policy-estimate."""
        return slugify(self.name)


@cache
def terms() -> tuple[Term, ...]:
    """The rows of docs/glossary.md, in its order."""
    text = (bundled_folder("docs") / "glossary.md").read_text("utf-8")
    return tuple(
        Term(row["term"], row["meaning"].replace("`", ""), f"docs/{row['page']}")
        for row in ROW.finditer(text)
    )


@login_required
@permission_required("feedback.add_rating", raise_exception=True)
@require_safe
def glossary(request: HttpRequest) -> HttpResponse:
    """Every term in one sentence."""
    return render(request, "glossary.html", {"terms": terms()})
