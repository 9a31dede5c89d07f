"""Glossary page: the terms of docs/glossary.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.text import slugify

from backend.http import page
from backend.installation import bundled_folder

ROW = re.compile(
    r"^\| \*\*(?P<term>[^|]+)\*\* \| (?P<meaning>[^|]+) \| \[[^\]]+\]\((?P<page>[^)#]+)[^)]*\) \|$",
    re.MULTILINE,
)
"""Row of the table in docs/glossary.md: | **term** | meaning | [text](page.md#anchor) |"""


@dataclass(frozen=True)
class Term:
    """A term, its meaning, and the page of docs/ about it."""

    name: str
    meaning: str
    page: str

    @property
    def anchor(self) -> str:
        return slugify(self.name)


@cache
def terms() -> tuple[Term, ...]:
    text = (bundled_folder("docs") / "glossary.md").read_text("utf-8")
    return tuple(
        Term(row["term"], row["meaning"].replace("`", ""), f"docs/{row['page']}")
        for row in ROW.finditer(text)
    )


@page("feedback.add_rating")
def glossary(request: HttpRequest) -> HttpResponse:
    return render(request, "glossary.html", {"terms": terms()})
