"""A browser window that is used by mouse: clicks, pasted text, seconds of each step, pictures."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

WIDTHS = {"wide": {"width": 1280, "height": 860}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
CHROMIUM_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class Walk:
    """A window that is used with the mouse alone; text is pasted. Notes seconds and takes pictures of each step."""

    def __init__(self, page: Page, pictures: Path | None) -> None:
        self.page, self.pictures = page, pictures
        self.steps: list[dict[str, Any]] = []
        self.clicks = 0
        self._began = time.monotonic()
        self._photographing = 0.0
        self._clicks_before = 0
        self.overflows: list[str] = []

    def click(self, role: Any, name: str) -> None:
        self.click_at(self.page.get_by_role(role, name=name, exact=True).first)

    def click_at(self, target: Locator) -> None:
        target.click()  # scrolls to it, moves the mouse there and presses its button
        self.clicks += 1

    def paste(self, label: str, text: str) -> None:
        self.click_at(self.page.get_by_label(label, exact=True).first)
        self.page.keyboard.insert_text(text)

    def done(self, step: str) -> None:
        """End a step: its seconds, those of the pictures left out."""
        now = time.monotonic()
        seconds = now - self._began - self._photographing
        self.steps.append(
            {"step": step, "seconds": round(seconds, 1), "clicks": self.clicks - self._clicks_before}
        )
        sys.stderr.write(f"{seconds:7.1f} s  {step}\n")
        self._began, self._photographing, self._clicks_before = time.monotonic(), 0.0, self.clicks

    def photograph(self, name: str, showing: str = "main") -> None:
        """The page as it stands in both widths and schemes; the window is as before afterwards. `showing` is what its
        frame for the film strip is about."""
        if self.pictures is None:
            return
        began = time.monotonic()
        for scheme, (width, size) in itertools.product(SCHEMES, WIDTHS.items()):
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            self.page.set_viewport_size(size)  # type: ignore[arg-type]
            # charts follow the window by their observers, a frame or two later
            self.page.evaluate("() => new Promise(done => setTimeout(done, 300))")
            beyond = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if beyond > 0:
                self.overflows.append(f"{name} {width}: {beyond} px")
            if (width, scheme) == ("wide", "light"):
                self.page.evaluate("scrollTo(0, 0)")
                if showing != "main":
                    self.page.locator(showing).evaluate("part => part.scrollIntoView({block: 'end'})")
                self.page.screenshot(path=self.pictures / f"{name}-frame.png")
            # as high as the page: what sticks to the lower edge of a window would lie over the middle of a longer one
            height = self.page.evaluate("document.documentElement.scrollHeight")
            self.page.set_viewport_size({"width": size["width"], "height": max(size["height"], height)})
            self.page.screenshot(path=self.pictures / f"{name}-{width}-{scheme}.png")
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(WIDTHS["wide"])  # type: ignore[arg-type]
        self._photographing += time.monotonic() - began
