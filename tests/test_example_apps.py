"""The apps of examples/, run against a live server: what they send arrives, and what is learnt from it comes back."""

import http.cookiejar
import os
import re
import runpy
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from feedback.accounts.authentication import key_create
from feedback.models import Decision, Rating, Trace
from rl.models import Policy
from rl.serving.gateway import recorder
from tests.support.server import free_port
from tests.support.serving import Parrot, parrot_only  # noqa: F401
from tests.support.stub_openai import ModelServer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(monkeypatch: pytest.MonkeyPatch, script: Path, *arguments: str) -> None:
    """Run a script of examples/ in this process as Python would run it."""
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [script.name, *arguments])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.campaign
@pytest.mark.django_db(transaction=True)
def test_the_support_router_is_answered_by_what_its_tickets_taught(
    live_server: Any, settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.GATEWAY_NEW_AGENTS = ["support-router"]
    _, key = key_create("router", ["ingest", "rate"])
    script = EXAMPLES / "support_router" / "support_router.py"
    with ModelServer() as stub:
        stub.said = '{"team": "billing"}'
        settings.LOCAL_BACKENDS = [stub.url]
        run(monkeypatch, script, "--url", live_server.url, "--key", key, "--tickets", "60")
        base, right = capsys.readouterr().out.splitlines()[-1].split(": ")
        assert base == "base"
        assert recorder.drain(10)
        moved = Rating.objects.filter(thumb="down").exclude(correction="")
        assert Rating.objects.filter(thumb="up", decision__response=stub.said).count() == int(
            right.split()[0]
        )
        assert moved.count() == 60 - int(right.split()[0])
        knobs = ["--feedback", "corrections", "--features", "words", "--penalty", "10"]
        call_command("train_linear", "--agent", "support-router", *knobs)
        champion = Policy.objects.get(agent="support-router").name
        call_command("policy", "promote", champion, "--force", "--reason", "in place of a judgement")
        capsys.readouterr()
        settings.FEEDBACK_REMEMBER_S = 0.0  # the promotion is seen at once
        run(monkeypatch, script, "--url", live_server.url, "--key", key, "--tickets", "20", "--seed", "1")
    policy, right = capsys.readouterr().out.splitlines()[-1].split(": ")
    assert policy == champion
    assert int(right.split()[0]) >= 15  # of 20; 5 by chance
    assert recorder.drain(10)
    assert Decision.objects.filter(policy=policy, unit__startswith="customer-").count() == 20


def page_at(browser: urllib.request.OpenerDirector, url: str) -> str:
    """A page, asked for until its server has started."""
    deadline = time.monotonic() + 240
    while True:
        try:
            body: bytes = browser.open(url, timeout=240).read()
            return body.decode()
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_help_desk_thumb_rates(live_server: Any, settings: Any, tmp_path: Path, parrot: Parrot) -> None:
    settings.GATEWAY_NEW_AGENTS = ["helpdesk"]
    _, key = key_create("helpdesk", ["ingest", "rate", "rate_as"])
    project, port = EXAMPLES / "django_helpdesk", free_port()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(EXAMPLES.parent / "clients/python/src")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HELPDESK_HOME": str(tmp_path / "desk")}
    environment |= {"RATCHET_URL": live_server.url, "RATCHET_KEY": key, "RATCHET_TIMEOUT_S": "120"}
    manage = [sys.executable, "-W", "ignore", "manage.py"]
    subprocess.run([*manage, "migrate", "-v", "0"], cwd=project, env=environment, check=True)
    serve = [*manage, "runserver", "--noreload", str(port)]
    with (tmp_path / "log").open("wb") as log:
        desk = subprocess.Popen(serve, cwd=project, env=environment, stdout=log, stderr=log)
    try:
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        browser = urllib.request.build_opener(cookies)
        home = f"http://localhost:{port}"
        page = page_at(browser, home)
        assert "No suggestions" not in page
        token = re.search(r'csrfmiddlewaretoken" value="(\w+)"', page)
        second = re.findall(r'action="(/tickets/\d+/thumb/)"', page)[1]
        assert token, page
        form = urllib.parse.urlencode({"csrfmiddlewaretoken": token[1], "thumb": "down"}).encode()
        after = browser.open(f"{home}{second}", form, timeout=240).read().decode()
        assert after.count('aria-pressed="true"') == 1
        deadline = time.monotonic() + 120
        while not Rating.objects.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        desk.terminate()
        desk.wait(30)
    (rating,) = Rating.objects.select_related("decision")
    assert (rating.thumb, rating.rater, rating.decision.unit) == ("down", "clerk-1", "Bob")
    suggested = Decision.objects.filter(agent="helpdesk")
    assert suggested.count() == 3
    assert all(decision.response in page.replace("&#x27;", "'") for decision in suggested)
    assert rating.decision.propensity is not None


@pytest.mark.django_db(transaction=True)
def test_the_tool_agents_runs_are_traces_with_what_failed_in_them(
    live_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, key = key_create("shop", ["ingest"])
    server = ["--url", live_server.url, "--key", key, "--outbox", str(tmp_path)]
    run(
        monkeypatch,
        EXAMPLES / "tool_agent" / "tool_agent.py",
        "Where is my order 1043?",
        "And 1045?",
        "And mine?",
        *server,
    )
    printed = capsys.readouterr().out
    assert "not sent yet" not in printed
    found, lost, unknown = Trace.objects.order_by("created_at")
    assert [
        step["kind"] for step in found.steps
    ] == "reasoning tool_call reasoning tool_call decision task".split()
    expected = ["completed", "failed", "completed"]
    assert [step.get("status") for trace in (found, lost, unknown) for step in trace.steps[-1:]] == expected
    assert "TimeoutError" in lost.steps[3]["error"]
    answers = list(Decision.objects.filter(agent="shop-assistant").order_by("created_at"))
    assert [decision.policy for decision in answers] == ["rules"] * 3
    assert answers[0].response == "Your order is out for delivery, tomorrow 09:00 to 12:00."
    assert all(f"/decisions/{decision.pk}/" in printed for decision in answers)


class ToolCallingModel(ModelServer):
    """A model that asks for an order first, and then says something."""

    def completion(self) -> dict[str, Any]:
        look = {"name": "find_order", "arguments": '{"number": "1044"}'}
        first = len(self.bodies) == 1
        self.tool_calls = [{"id": "c1", "type": "function", "function": look}] if first else []
        return super().completion()


@pytest.mark.django_db(transaction=True)
def test_the_tool_agent_uses_tools(live_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = key_create("shop", ["ingest"])
    with ToolCallingModel() as stub:
        stub.said = "It is being packed."
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        server = ["--url", live_server.url, "--key", key, "--outbox", str(tmp_path)]
        run(monkeypatch, EXAMPLES / "tool_agent" / "tool_agent.py", "--model", "m", "Where is 1044?", *server)
        assert (
            stub.bodies[1]["messages"][-1]["content"]
            == '{"result": {"state": "being packed", "tracking": ""}}'
        )
    decision = Decision.objects.get(agent="shop-assistant")
    assert (decision.policy, decision.response) == ("m", "It is being packed.")
    assert decision.trace.steps[1]["result"] == {"state": "being packed", "tracking": ""}
