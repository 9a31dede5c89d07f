"""The README's blocks run, in their order, against a server; and the wheel needs nothing but Python."""

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_server import ROOT, Ratchet
from ratchet_client import __version__

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)


def decided(path: str, body: dict[str, Any]) -> str | None:
    if path != "/api/decide/":
        return None
    names = ("policy", "arm", "action", "propensity")
    response = body.get("candidates", ["It leaves tomorrow."])[0]
    return json.dumps({"id": body["id"], "response": response, "recorded": True, **dict.fromkeys(names)})


@pytest.fixture
def ratchet() -> Iterator[Ratchet]:
    server = Ratchet()
    server.text = decided
    yield server
    server.stop()


def decisions(ratchet: Ratchet) -> list[tuple[str, str, str]]:
    """Prompt, response and policy of the decisions in the traces the server has, in the order they came."""
    return [
        (step["messages"][-1]["content"], step["response"], step.get("policy", ""))
        for path, _, body in ratchet.requests
        if path == "/api/traces/"
        for step in body["steps"]
        if step["kind"] == "decision"
    ]


@pytest.mark.parametrize("away", [False, True], ids=["the server answers", "the server cannot decide"])
def test_blocks_run(ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    monkeypatch.chdir(tmp_path)
    first, twins, offline, *recording = [b.replace("http://localhost:8000", ratchet.url) for b in BLOCKS]
    assert len(recording) == 3
    names: dict[str, Any] = {}
    exec(first, names)
    assert decisions(ratchet) == [("Can I pay by card?", "sales", "rules-v1")]
    exec(twins, names)
    assert asyncio.run(names["answer"]("Where is my order?")) == "It leaves tomorrow."
    of_decision = ["decide", "ratings", "outcomes"]
    assert [path.split("/")[-2] for path, _, _ in ratchet.requests] == ["traces", *of_decision, *of_decision]
    if away:
        ratchet.answer = lambda path, body: 503 if path == "/api/decide/" else None
        ratchet.text = lambda path, body: None
    exec(offline, names)
    for block in recording[:-1]:
        exec(block, names)
    names["choose_queue"]({"text": "refund", "user": "u7"})
    exec(recording[-1], names)
    assert names["collector"].status().refused == 0
    own = [("I was charged twice", "billing", "rules-v1")] if away else []
    assert decisions(ratchet)[1:] == [
        *own,
        ("Where is my order?", "It leaves tomorrow.", "rules-v1"),
        ("refund", "billing", ""),
        ("Where is my order?", "Found order 1138.", "agent-v1"),
    ]
    corrections = [body.get("correction") for path, _, body in ratchet.requests if "ratings" in path]
    assert corrections.count("sales") == 1


ISOLATED = """
import sys
sys.path.insert(0, sys.argv[1])
from ratchet_client import Client
import ratchet_client
assert ratchet_client.__file__.startswith(sys.argv[1]), ratchet_client.__file__
with Client("support-bot", sys.argv[2], "key", sys.argv[3]) as client:
    decision = client.decide("Where?", candidates=["There", "Here"])
    client.collector.decision("Why?", "Because.")
    client.rate(decision, thumb="up")
    assert client.flush(20)
outside = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__", "ratchet_client"}
assert not {name for name in outside if not name.startswith("_")}, outside
print(decision.response)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools builds the wheel")
def test_the_wheel_records_in_a_bare_python(ratchet: Ratchet, tmp_path: Path) -> None:
    source = tmp_path / "source"  # setuptools leaves folders behind, which are not to lie in the checkout
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    process = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    name = process.stdout.splitlines()[-1]
    assert name == f"ratchet_client-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        metadata = wheel.read(f"ratchet_client-{__version__}.dist-info/METADATA").decode()
        wheel.extractall(tmp_path / "installed")
    assert "Requires-Dist" not in metadata
    expected = {*{path.name for path in (ROOT / "src" / "ratchet_client").glob("*.py")}, "py.typed"}
    assert {path.name for path in (tmp_path / "installed" / "ratchet_client").iterdir()} == expected
    python = [sys.executable, "-I", "-S", "-c", ISOLATED]
    arguments = [str(tmp_path / "installed"), ratchet.url, str(tmp_path / "spool")]
    process = subprocess.run([*python, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "There\n"
    assert decisions(ratchet) == [("Why?", "Because.", "")]
    assert [path.split("/")[-2] for path, _, _ in ratchet.requests] == ["decide", "traces", "ratings"]
