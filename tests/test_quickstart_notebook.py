"""The quickstart notebook, executed from its first cell to its last by a kernel of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.migrated_database import template_copy

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"


def printed(cell: Any) -> str:
    """Text a cell printed; tables come as rich shows them in a notebook."""
    shown = [
        output.get("text", "") if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
        if output.get("name") != "stderr"
    ]
    return "".join(shown)


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_the_notebook_goes_from_a_log_to_a_champion_that_answers(
    ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template_copy(ratchet_home / "ratchet.sqlite3")
    monkeypatch.setenv("RATCHET_HOME", str(ratchet_home))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    recorded, planned, promoted, judged, answered, rated = [
        printed(cell) for cell in notebook.cells if cell.cell_type == "code"
    ][-6:]
    assert "135 decisions, 135 ratings, 90 corrections imported" in recorded
    assert re.search(r"gate needs 30|30 held-out", planned)
    assert "is champion" in promoted
    champion = judged.splitlines()[-1].split()[0]
    assert answered.split() == ["delivery", "by", champion]
    assert rated.split() == ["201", "up"]


def test_the_notebook_is_kept_without_what_a_run_of_it_printed() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []
