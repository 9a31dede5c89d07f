"""The README's film strip and pictures of docs, made of what `pages` photographed."""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.nursery.server import ROOT
from benchmarks.nursery.walk import CHROMIUM_ARGUMENTS
from docs.screenshots import picture_shrink

STRIP = ROOT / "docs" / "images" / "newcomer.webp"
FRAMES = {
    "1-connect": "Connect the model you have",
    "1-arrived": "See its first answer arrive",
    "2-rate": "Rate in place",
    "3-train": "Train, by a button",
    "5-judged": "Compare with it, promote",
    "6-answer": "Ask the new champion",
}
"""Picture -> the words below it."""
DOCS_PICTURES = {
    "connect": "1-connect",
    "start": "3-train",
    "answers": "5-answers",
    "run": "7-run",
    "gate": "7-policy",
    "judging": "8-judging",
}
"""Pictures of docs/ that this way takes: name there -> name here."""
STRIP_PAGE = """<style>
body {{ margin: 0; padding: 20px; background: #f4f2ee; font: 600 19px system-ui, sans-serif; color: #1b2430;
  display: grid; grid-template-columns: repeat(3, 1fr); gap: 18px 20px; width: 1560px; }}
figure {{ margin: 0; }}
img {{ width: 100%; display: block; border: 1px solid #cfcac0; border-radius: 10px; }}
figcaption {{ padding: 8px 2px 0; }}
b {{ color: #0f6e66; margin-right: 6px; }}
</style>{figures}"""


def _base64_text(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def strip(pictures: Path, chromium: str) -> dict[str, Any]:
    """One picture of six frames that `pages` took, for the README."""

    from PIL import Image

    figures = "".join(
        f"<figure><img src='data:image/png;base64,{_base64_text(pictures / f'{name}-frame.png')}'><figcaption>"
        f"<b>{number}</b>{words}</figcaption></figure>"
        for number, (name, words) in enumerate(FRAMES.items(), 1)
    )
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1600, "height": 800})
        page.set_content(STRIP_PAGE.format(figures=figures))
        page.wait_for_load_state("load")
        page.screenshot(path=Path(folder) / "strip.png", full_page=True)
        browser.close()
        Image.open(Path(folder) / "strip.png").convert("RGB").save(STRIP, quality=80, method=6)
    for name, picture in DOCS_PICTURES.items():
        target = STRIP.with_name(f"{name}.png")
        shutil.copy(pictures / f"{picture}-frame.png", target)
        picture_shrink(target)
    return {"strip": str(STRIP.relative_to(ROOT)), "bytes": STRIP.stat().st_size}
