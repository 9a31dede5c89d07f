"""Pairs and imports in a real browser: by keyboard alone and with scripts blocked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from feedback.models import Decision, ImportBatch
from rl.models import PairJudgement
from tests.support.browser import Opener, browser, compared, comparisons, opener, record_pairs
from tests.support.judging import round_of

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_pairs_are_compared_by_keyboard_alone(opener: Opener) -> None:
    record_pairs(5)
    page = opener("/rate/pairs/")
    said = []
    keys = {"ArrowLeft": "left", "ArrowRight": "right", "=": "tie", "0": "both_bad"}
    for number, key in enumerate(keys):
        expect(page.locator("#stage[data-ahead]")).to_be_attached()
        sides = page.locator(".side-text").all_inner_texts()
        page.keyboard.press(key)
        compared(page, number + 1)
        said.append((sides, keys[key]))
    assert [([row.left.response, row.right.response], row.preference) for row in comparisons()] == said
    page.keyboard.press("u")
    compared(page, 3)
    assert len(comparisons()) == 3
    page.keyboard.press("n")
    page.keyboard.type("= 0 s u")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    compared(page, 4)
    assert (comparisons()[-1].preference, comparisons()[-1].notes) == ("right", "= 0 s u")
    page.keyboard.press("s")
    expect(page.locator("h1")).to_have_text("Only those you skipped are left")
    assert page.complaints == []  # type: ignore[attr-defined]


def test_a_judging_round_is_judged_by_keyboard_alone_and_stays_blind(opener: Opener) -> None:
    judging = round_of(6)
    page = opener(f"/rate/pairs/?round={judging.pk}")
    said = []
    for number, key in enumerate(("ArrowLeft", "ArrowRight", "=", "0")):
        expect(page.locator("#stage[data-ahead]")).to_be_attached()
        sides = page.locator(".side-text").all_inner_texts()
        assert judging.policy.name not in page.content()
        page.keyboard.press(key)
        compared(page, number + 1)
        liked = sides[key == "ArrowRight"]
        side = "policy" if "candidate" in liked else "opponent"
        said.append({"=": "tie", "0": "both_bad"}.get(key, side))
    given = PairJudgement.objects.order_by("pk").values_list("preference", flat=True)
    assert list(given) == said
    page.keyboard.press("u")
    compared(page, 3)
    page.keyboard.press("ArrowRight")
    compared(page, 4)
    assert list(given.all())[:3] == said[:3]
    assert list(given.all())[3] in ("policy", "opponent")
    assert comparisons() == []  # evidence, never training data
    assert page.complaints == []  # type: ignore[attr-defined]


def test_pairs_are_compared_with_scripts_blocked(opener: Opener) -> None:
    record_pairs(2)
    page = opener("/rate/pairs/", java_script_enabled=False)
    page.locator("textarea[name=notes]").fill("Clearer")
    page.locator("button[value=left]").click()
    expect(page.locator(".said")).to_have_text("Saved: A is better")
    page.get_by_role("button", name="Skip").click()
    page.get_by_role("button", name="Bring them back").click()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".said")).to_have_text("Undone")
    page.locator("button[value=tie]").click()
    page.locator("button[value=both_bad]").click()
    expect(page.locator("h1")).to_have_text("All compared")
    assert [row.preference for row in comparisons()] == ["tie", "both_bad"]


def test_a_file_is_imported_by_keyboard_with_scripts_blocked(opener: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "", "rejected": "b"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = opener(java_script_enabled=False)
    page.goto(page.url.split("/rate/")[0] + "/import/")
    page.set_input_files("input[name=file]", str(file))
    page.focus("input[name=agent]")
    page.keyboard.type("from-a-file")
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 row cannot be read")).to_be_visible()
    page.get_by_role("button", name="Import without this row").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 decisions, 1 comparison imported")).to_be_visible()
    number = ImportBatch.objects.get().pk  # the numbers of a database grow on from test to test
    expect(page.get_by_text(f"(import {number}); 1 row left out.")).to_be_visible()
    assert Decision.objects.filter(agent="from-a-file").count() == 2
