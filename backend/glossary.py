"""Glossary page: the terms of docs/glossary.md and the gate's rules of docs/gates.md, which every `?` leads to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.text import slugify

from backend.http import page
from backend.installation import bundled_folder

ROW = re.compile(
    r"^\| \*\*(?P<term>[^|]+)\*\* \| (?P<meaning>[^|]+) \| \[[^\]]+\]\((?P<page>[^)#]+)(?:#[^)]*)?\) \|$",
    re.MULTILINE,
)
"""Row of the table in docs/glossary.md: | **term** | meaning | [text](page.md#anchor) |"""


SEEN_ON = {
    "start": "agents api models",
    "rate": "rating",
    "decisions": "datasets gateway imports",
    "runs": "methods online-learning rewards",
    "policies": "evaluate flywheel gates registry",
    "experiments": "experiments",
}
"""Page of the app -> the pages of docs/ whose terms are seen on it."""

RULE = re.compile(r"^\| (?P<rule>[a-z_]+) \| (?P<refuses>[^|]+) \| (?P<bound>[^|]+) \|$", re.MULTILINE)
"""Row of the table of rules in docs/gates.md: | rule | refuses if | bound |"""


@dataclass(frozen=True)
class Term:
    """A term, its meaning, and the page of docs/ about it."""

    name: str
    meaning: str
    page: str

    @property
    def address(self) -> str:
        """Address of the app's page on which it is seen; empty if it is seen on none."""
        name = self.page.removeprefix("docs/").removesuffix(".md")
        return next((reverse(page) for page, docs in SEEN_ON.items() if name in docs.split()), "")

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


@cache
def rules() -> tuple[Term, ...]:
    """Rules of the gate, as terms whose anchors begin with `rule-`."""
    text = (
        (bundled_folder("docs") / "gates.md")
        .read_text("utf-8")
        .partition("## The rules")[2]
        .partition("\n## ")[0]
    )
    return tuple(
        Term(
            f"rule {row['rule'].replace('_', ' ')}",
            f"Refuses if {_plain(row['refuses'])}. Bound: {_plain(row['bound'])}.",
            "docs/gates.md",
        )
        for row in RULE.finditer(text)
        if row["rule"] != "rule"
    )


def _plain(text: str) -> str:
    """Markdown without links and code marks."""
    return re.sub(r"\[([^\[\]]+)\]\([^()]*\)", r"\1", text).replace("`", "")


def explained(name: str, kind: str) -> Term | None:
    """The term of this name, or the rule for the kind "rule"; None for another."""
    wanted = f"rule {name.replace('_', ' ')}" if kind == "rule" else name
    return next((term for term in (rules() if kind == "rule" else terms()) if term.name == wanted), None)


@page("feedback.add_rating")
def glossary(request: HttpRequest) -> HttpResponse:
    """Terms and rules, with `?q=` those whose name or meaning has the text."""
    q = request.GET.get("q", "").strip()
    found = {
        name: [term for term in every if q.lower() in f"{term.name} {term.meaning}".lower()]
        for name, every in (("terms", terms()), ("rules", rules()))
    }
    return render(request, "glossary.html", {**found, "q": q})
