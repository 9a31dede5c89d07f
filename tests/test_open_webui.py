"""A thumb that a person gives in a real Open WebUI rates the answer that the gateway recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from feedback.accounts.authentication import key_create
from feedback.models import Decision, Rating
from rl.serving.gateway import recorder
from tests.support.browser import browser  # noqa: F401
from tests.support.server import ROOT, free_port
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)
GUIDE = (ROOT / "docs" / "feedback-anywhere.md").read_text("utf-8").partition("## Open WebUI")[2]


@contextmanager
def open_webui(home: Path, ratchet: str, key: str) -> Iterator[str]:
    """Its address, connected to the gateway as the guide says."""
    program, port = os.environ["OPEN_WEBUI"], free_port()
    headers = json.loads(re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)[0])
    calm = {
        "DATA_DIR": str(home),
        "ENABLE_OLLAMA_API": "false",
        "OPENAI_API_BASE_URLS": f"{ratchet}/v1",
        "OPENAI_API_KEYS": key,
        "OPENAI_API_CONFIGS": json.dumps({"0": {"enable": True, "headers": headers}}),
        "RAG_EMBEDDING_ENGINE": "openai",
        "OFFLINE_MODE": "true",
        "WEBUI_SECRET_KEY": "of-a-server-that-lives-for-a-minute",
        **{f"ENABLE_{name}_GENERATION": "false" for name in ("TITLE", "TAGS", "FOLLOW_UP", "AUTOCOMPLETE")},
    }
    address = f"http://127.0.0.1:{port}"
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={name: os.environ[name] for name in ("PATH", "HOME")} | calm,
            cwd=home,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 300
    try:
        while not _is_up(address):
            assert process.poll() is None, (home / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (home / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_thumb_given_in_open_webui_rates_the_recorded_answer(
    browser: Browser,  # noqa: F811
    live_server: Any,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OPEN_WEBUI: the program `open-webui` of an environment that has it."""
    if not os.environ.get("OPEN_WEBUI"):
        pytest.skip("OPEN_WEBUI names no Open WebUI")
    key = key_create("open webui", ["ingest", "read"])[1]
    with ModelServer() as stub, open_webui(tmp_path, live_server.url, key) as address:
        settings.LOCAL_BACKENDS = [stub.url]
        person = {"name": "Ada", "email": "ada@example.com", "password": "a-Long-1-password"}
        token = httpx.post(f"{address}/api/v1/auths/signup", json=person, timeout=60).json()["token"]
        window = browser.new_context(viewport={"width": 1280, "height": 900})
        window.add_init_script(f"localStorage.token = {json.dumps(token)}")
        page = window.new_page()
        page.goto(f"{address}/?model=assistant&q=Where%20is%20my%20parcel%3F")
        page.get_by_text("Okay, Let's Go!").click(timeout=60_000)
        page.locator("#send-message-button").click()
        with page.expect_response(re.compile(r"/api/v1/evaluations/feedback$")):
            page.get_by_label("Good Response").first.click(timeout=60_000)
        window.close()
        monkeypatch.setenv("OPENWEBUI_URL", address)
        monkeypatch.setenv("OPENWEBUI_KEY", token)
        monkeypatch.setenv("RATCHET_URL", live_server.url)
        monkeypatch.setenv("RATCHET_KEY", key)
        assert recorder.drain(10)
        relay = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
        for _ in range(2):
            exec(compile(relay, "docs/feedback-anywhere.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "{'ratings': 1, 'decisions': 0}",
        "{'ratings': 0, 'decisions': 0}",
    ]
    given = Decision.objects.get()
    assert (given.source, given.response.strip()) == ("gateway", "hello there")
    assert given.unit
    rating = Rating.objects.get()
    assert (rating.decision, rating.thumb) == (given, "up")
