"""Ready-made content blocks of an app: one sketch per kind, `DRAWERS` by fixture name."""

from __future__ import annotations

from collections.abc import Callable

from django.utils.safestring import SafeString

from feedback.drawings.canvas import Canvas, short

WIDTH = 340

Drawer = Callable[[str, str], Canvas]
"""(fixture's name in words, description) -> drawing"""
DRAWERS: dict[str, Drawer] = {}


def fixture_drawing(name: str, description: str) -> SafeString | None:
    """The fixture as SVG, or None for one we have no sketch of."""
    drawer = DRAWERS.get(name.strip().lower().replace("-", "_"))
    return None if drawer is None else drawer(name.replace("_", " "), description).svg()


def draws(*names: str) -> Callable[[Drawer], Drawer]:
    def register(drawer: Drawer) -> Drawer:
        DRAWERS.update(dict.fromkeys(names, drawer))
        return drawer

    return register


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _block(height: int, label: str) -> Canvas:
    canvas = Canvas(WIDTH, height, label)
    canvas.rect(0.5, 0.5, WIDTH - 1, height - 1, "panel", round=8)
    return canvas


def _button(canvas: Canvas, x: float, y: float, words: str) -> None:
    wide = 24 + 7 * len(words)
    canvas.rect(x, y, wide, 30, "d-1", round=6)
    canvas.text(x + wide / 2, y + 20, words, "on-1", size=13, anchor="middle")


def _lines(canvas: Canvas, x: float, y: float, count: int, wide: float) -> None:
    """Text too small to read, as grey bars."""
    for index in range(count):
        canvas.rect(x, y + index * 14, wide * (0.6 if index == count - 1 and count > 1 else 1.0), 7, "grey")


@draws("hint_line", "plan_line", "spell_hint", "blank_note", "reset_link")
def line(name: str, description: str) -> Canvas:
    canvas = Canvas(WIDTH, 40, name)
    canvas.circle(12, 20, 9, "soft")
    canvas.text(12, 24, "i", "t strong", size=12, anchor="middle")
    canvas.text(30, 25, short(_sentence(description), 42), "t link", size=14)
    return canvas


@draws("add_button", "home_button")
def button(name: str, description: str) -> Canvas:
    canvas = Canvas(WIDTH, 40, name)
    _button(canvas, 0, 4, _sentence(name.removesuffix(" button")))
    return canvas


@draws("retry_bar", "thin_bar")
def bar(name: str, description: str) -> Canvas:
    canvas = _block(56, name)
    canvas.text(16, 33, _sentence(description), "t", size=13)
    if name == "retry bar":
        _button(canvas, WIDTH - 84, 13, "Retry")
    else:
        canvas.rect(1, 46, WIDTH - 2, 6, "soft")
        canvas.rect(1, 46, WIDTH * 0.6, 6, "d-1")
    return canvas


@draws("toast")
def toast(name: str, description: str) -> Canvas:
    canvas = Canvas(WIDTH, 56, name)
    canvas.rect(60, 8, 220, 40, "case", round=20)
    canvas.text(170, 33, _sentence(description), "on-case", size=13, anchor="middle")
    return canvas


@draws("red_label")
def red_label(name: str, description: str) -> Canvas:
    canvas = Canvas(WIDTH, 74, name)
    canvas.rect(1, 1, WIDTH - 2, 36, "field-bad", round=6)
    canvas.rect(14, 15, 120, 7, "grey")
    canvas.text(2, 60, f"▲ {_sentence(description)}", "t bad-ink", size=13)
    return canvas


@draws("spinner", "dots")
def waiting(name: str, description: str) -> Canvas:
    canvas = Canvas(WIDTH, 80, name)
    if name == "dots":
        for index in range(3):
            canvas.circle(146 + index * 24, 40, 7, "d-1" if index == 1 else "soft")
    else:
        canvas.slice(170, 40, 24, 0, 0.72, "d-1", hole=18)
    return canvas


@draws("blue_dot", "menu_badge", "ribbon", "lock_icon")
def marker(name: str, description: str) -> Canvas:
    canvas = _block(56, name)
    canvas.rect(16, 18, 20, 20, "soft", round=5)
    _lines(canvas, 48, 24, 1, 130)
    if name == "blue dot":
        canvas.circle(196, 28, 6, "d-1")
    elif name == "menu badge":
        canvas.rect(196, 17, 30, 22, "bad", round=11)
        canvas.text(211, 33, "1", "on-1 strong", size=13, anchor="middle")
    elif name == "ribbon":
        canvas.rect(WIDTH - 80, 1, 79, 24, "d-1", round=6)
        canvas.text(WIDTH - 40, 18, "New", "on-1 strong", size=13, anchor="middle")
    else:
        canvas.rect(198, 26, 18, 14, "case", round=3)
        canvas.path("M201 26 V21 A6 6 0 0 1 213 21 V26", "shackle")
    return canvas


@draws("starter_tour", "step_list", "walkthrough", "repair_guide", "search_guide")
def steps(name: str, description: str) -> Canvas:
    canvas = _block(158, name)
    canvas.text(16, 30, f"{_sentence(name)}: {description}", "t strong", size=14)
    for index in range(3):
        y = 60 + index * 34
        canvas.circle(28, y, 11, "d-1" if index == 0 else "soft")
        canvas.text(28, y + 4, str(index + 1), "on-1" if index == 0 else "t", size=12, anchor="middle")
        _lines(canvas, 52, y - 8, 2, 170)
        if name in ("starter tour", "walkthrough"):
            canvas.rect(WIDTH - 76, y - 13, 60, 27, f"d-{index + 1} see-through")
    return canvas


@draws("video_card", "release_card", "demo_box", "error_page")
def media(name: str, description: str) -> Canvas:
    canvas = _block(190, name)
    canvas.rect(12, 12, WIDTH - 24, 104, "soft", round=6)
    if name == "video card":
        canvas.circle(170, 64, 24, "d-1")
        canvas.path("M163 53 L182 64 L163 75 Z", "on-1")
    elif name == "error page":
        canvas.text(170, 78, "Oh no", "t strong", size=34, anchor="middle")
    elif name == "demo box":
        _button(canvas, 136, 50, "Try it")
    else:
        canvas.path("M30 108 L110 46 L168 92 L220 60 L312 108 Z", "d-1 see-through")
        canvas.circle(272, 40, 14, "d-3 see-through")
    canvas.text(16, 142, _sentence(description), "t strong", size=14)
    _lines(canvas, 16, 156, 2, 240)
    return canvas


@draws("sample_data", "plan_table")
def sheet(name: str, description: str) -> Canvas:
    canvas = _block(166, name)
    canvas.text(16, 28, _sentence(description), "t strong", size=14)
    wide = (WIDTH - 32) / 3
    for column in range(3):
        x = 16 + column * wide
        canvas.rect(x + 2, 42, wide - 4, 24, "d-1 see-through" if column == 1 else "soft")
        for row in range(4):
            _lines(canvas, x + 12, 78 + row * 20, 1, wide - 36 - (row * 7) % 20)
    return canvas


@draws("support_form", "ask_panel", "cost_helper")
def form(name: str, description: str) -> Canvas:
    canvas = _block(176, name)
    canvas.text(16, 28, _sentence(description), "t strong", size=14)
    for index, high in enumerate((26, 52)):
        canvas.rect(16, 42 + index * 36, WIDTH - 32, high, "field", round=5)
    _lines(canvas, 26, 52, 1, 110)
    _button(canvas, 16, 138, {"cost helper": "Work it out"}.get(name, "Send"))
    return canvas


@draws("preview_frame")
def skeleton(name: str, description: str) -> Canvas:
    canvas = _block(150, name)
    canvas.circle(40, 40, 22, "grey")
    _lines(canvas, 78, 30, 2, 200)
    canvas.rect(16, 78, WIDTH - 32, 56, "grey", round=6)
    return canvas


@draws("tips_panel", "advice_panel")
def panel(name: str, description: str) -> Canvas:
    canvas = _block(136, name)
    canvas.rect(1, 1, 5, 134, "d-1", round=2)
    canvas.text(22, 30, _sentence(description), "t strong", size=14)
    for index in range(3):
        canvas.circle(28, 56 + index * 26, 3, "d-1")
        _lines(canvas, 42, 52 + index * 26, 1, 240 - index * 34)
    return canvas


@draws("meter")
def meter(name: str, description: str) -> Canvas:
    canvas = _block(76, name)
    canvas.text(16, 28, _sentence(description), "t", size=13)
    canvas.text(WIDTH - 16, 28, "9 of 10", "t strong", size=13, anchor="end")
    canvas.rect(16, 42, WIDTH - 32, 14, "soft", round=7)
    canvas.rect(16, 42, (WIDTH - 32) * 0.9, 14, "warn", round=7)
    return canvas


@draws("similar_grid")
def grid(name: str, description: str) -> Canvas:
    canvas = _block(170, name)
    canvas.text(16, 28, _sentence(description), "t strong", size=14)
    for index in range(6):
        x, y = 16 + (index % 3) * 104, 44 + (index // 3) * 60
        canvas.rect(x, y, 96, 50, "soft", round=6)
        _lines(canvas, x + 10, y + 30, 1, 60)
    return canvas
