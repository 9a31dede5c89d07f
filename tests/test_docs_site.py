"""The documentation as a site: it builds without a warning, from the repository as it lies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_docs_page_has_a_place_in_the_navigation() -> None:
    placed = re.findall(r"(?m)^ +- (?:[\w ]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert len(placed) == len(set(placed))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    missing = sorted(pages - set(placed))
    assert missing == [], "give each a place below `nav` in mkdocs.yml"


@pytest.mark.slow
def test_the_site_builds_with_every_link_leading_somewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert 'href="docs/gates/"' in home
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
    pages = list((tmp_path / "site").rglob("index.html"))
    assert len(pages) > 50
    # nothing is loaded from elsewhere
    loaded = re.findall(r'(?:src|href)="(https?:[^"]+\.(?:js|css|woff2?|png|svg))"', home)
    assert loaded == []
