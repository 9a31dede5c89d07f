"""The guided start whole, by mouse in a real browser, against a server with workers: what docs/start.md measures."""

from pathlib import Path

import pytest

from benchmarks.nursery.pages import pages
from tests.support.browser import CHROMIUM


@pytest.mark.browser
@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="Chromium was not found")
def test_ten_answers_are_recorded_rated_trained_on_and_compared_with_the_apps_model(tmp_path: Path) -> None:
    found = pages(tmp_path, None, CHROMIUM)
    expected = ["promote by force, with a reason", "ask it", "rate its answer"]
    assert [step["step"] for step in found["steps"]][-3:] == expected
    assert found["verdict"].startswith("Not ready")
    assert "nursery-m-1" in found["verdict"]
    assert found["complaints"] == []
