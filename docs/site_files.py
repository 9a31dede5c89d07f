"""MkDocs hook: the files of the site, at the addresses they have in the repository, so that links hold in both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = (
    "*.md LICENSE compose.yaml deploy/**/* docs/**/* examples/**/* clients/*/README.md "
    "rl/bundled_model/README.md packed/README.md packed/examples/* static/favicon.svg"
).split()
SUFFIXES = {".md", ".css", ".py", ".ipynb", ".json", ".yaml", ".yml", ".png", ".svg", ".gif", ".webp", ""}
LEFT_OUT = {"__pycache__", "var"}
"""Folders that running the examples leaves."""


def site_paths() -> Iterator[str]:
    """Paths of the site's files, relative to the repository."""
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT)
            if path.is_file() and path.suffix in SUFFIXES and not LEFT_OUT & set(place.parts):
                yield place.as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository; the theme's own stay."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in site_paths():
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
