"""Container files, units, alerts and dashboard, checked without Docker: what they run and name exists."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import call_command, get_commands, load_command_class
from django.core.management.base import CommandError

from backend.command import TRAINING_PACKAGES, RatchetCommand
from rl.api.health import _gauges
from rl.serving import metrics
from tests.support.migrated_database import template_copy
from tests.support.server import free_port
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
FOR_COMPOSE = {"RATCHET_DOMAIN", "POSTGRES_PASSWORD"}
"""Variables of `.env` that the program does not read."""


def env_example(*, commented: bool) -> dict[str, str]:
    """Variables of .env.example; with `commented` also those that stand there with their default."""
    pattern = r"(?m)^(?:# )?([A-Z][A-Z_]+)=(.*)$" if commented else r"(?m)^([A-Z][A-Z_]+)=(.*)$"
    return dict(re.findall(pattern, (ROOT / ".env.example").read_text("utf-8")))


def production_environment() -> dict[str, str]:
    """The values of .env.example, filled in."""
    filled = {"SECRET_KEY": "k3y-" * 15 + "ABCdef", "POSTGRES_PASSWORD": "c0ffee"}
    return {**env_example(commented=False), **filled}


def stages() -> dict[str, tuple[str, list[str]]]:
    """Stage -> (what it is made from, its instructions, continued lines joined and comments left out)."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE).replace("\\\n", " ")
    found: dict[str, tuple[str, list[str]]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            instructions: list[str] = []
            found[start[2]] = (start[1], instructions)
        else:
            instructions.append(" ".join(line.split()))
    return found


def instructions(stage: str) -> list[str]:
    """All instructions a stage is made of, those of the stages below it first."""
    parent, own = stages()[stage]
    return [*(instructions(parent) if parent in stages() else []), *own]


def environment_of(stage: str) -> dict[str, str]:
    words = [
        word for line in instructions(stage) if line.startswith("ENV ") for word in shlex.split(line[4:])
    ]
    return dict(word.split("=", 1) for word in words)


def test_the_dockerfile_has_nothing_that_hadolint_finds() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, "--config", ".hadolint.yaml", "Dockerfile"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_web_image_installs_no_torch() -> None:
    (install,) = (line for line in stages()["build-web"][1] if "pip install" in line)
    assert re.findall(r"-r (\S+)", install) == ["requirements.txt", "requirements-llama.txt"]
    pattern = re.search(r"grep '(.+?)' requirements-rl.txt > requirements-llama.txt", install)
    assert pattern
    pins = (ROOT / "requirements-rl.txt").read_text("utf-8").splitlines()
    assert len([pin for pin in pins if re.match(pattern[1], pin)]) == 1
    assert stages()["web"][0] == stages()["trainer"][0] == "runtime"
    assert "COPY --from=build-web /opt/venv /opt/venv" in stages()["web"][1]
    assert "COPY --from=build-trainer /opt/venv /opt/venv" in stages()["trainer"][1]


@pytest.mark.parametrize("image", ["web", "trainer"])
def test_an_image_runs_as_nobody_who_owns_its_code(image: str) -> None:
    (user,) = (line.removeprefix("USER ") for line in instructions(image) if line.startswith("USER "))
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert any(f"useradd --uid {user.split(':')[0]} " in line for line in instructions(image))


def test_services_wait_for_what_can_tell_that_it_is_there() -> None:
    for name, service in SERVICES.items():
        for other, wish in service.get("depends_on", {}).items():
            if wish["condition"] == "service_healthy":
                target = SERVICES[other].get("build", {}).get("target", "")
                assert "healthcheck" in SERVICES[other] or any(
                    line.startswith("HEALTHCHECK") for line in instructions(target)
                ), (name, other)
            else:
                assert SERVICES[other]["restart"] == "no"


def test_volumes_and_files_that_services_name_are_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    shared = {
        service["volumes"][0] for name, service in SERVICES.items() if name in ("web", "worker", "trainer")
    }
    assert shared == {f"data:{environment_of('web')['RATCHET_HOME']}"}


def commands() -> Iterator[list[str]]:
    """Words of every command of ours that images and services run."""
    for service in SERVICES.values():
        command = service.get("command", [])
        if "manage.py" in command:
            yield command
            continue
        for part in command:
            for line in part.splitlines():
                yield shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line))
    for stage in stages():
        for line in stages()[stage][1]:
            if line.startswith("RUN") and "manage.py" in line:
                yield shlex.split(line.split(" && ")[0].removeprefix("RUN "))
            elif line.startswith("CMD"):
                yield json.loads(line.removeprefix("CMD "))


def test_commands_take_their_options_and_share_a_port() -> None:
    # every command is one and takes its options
    run = [words[words.index("manage.py") + 1 :] for words in commands() if "manage.py" in words]
    assert {words[0] for words in run} == {"check", "migrate", "online_learner", "export_model", "serve"}
    for words in run:
        app = get_commands()[words[0]]
        command = load_command_class(app, words[0]) if isinstance(app, str) else app
        command.create_parser("manage.py", words[0]).parse_args(words[1:])
    # the proxy the probe and the server agree on the port
    (serve,) = (words for words in commands() if words and words[0] == "gunicorn")
    port = serve[serve.index("--bind") + 1].split(":")[1]
    assert f"reverse_proxy web:{port} " in (ROOT / "deploy/Caddyfile").read_text("utf-8")
    assert SERVICES["web"]["expose"] == [port]
    assert f"EXPOSE {port}" in stages()["web"][1]
    assert f"http://localhost:{port}/readyz" in DOCKERFILE


def test_the_proxy_passes_on_whole_requests_alone() -> None:
    """A request that arrives slowly would hold a thread of the server; some hundreds of them hold all."""
    caddy = (ROOT / "deploy/Caddyfile").read_text("utf-8")
    assert re.findall(r"^\s*(read_header|read_body) (\w+)$", caddy, re.MULTILINE) == [
        ("read_header", "10s"),
        ("read_body", "2m"),
    ]
    (longest,) = re.findall(r"max_size (\w+)$", caddy, re.MULTILINE)
    assert re.findall(r"request_buffers (\w+)", caddy) == [longest]


def test_variables_of_services_are_settings() -> None:
    # every variable of the example is a setting
    page = (ROOT / "docs/settings.md").read_text("utf-8")
    named = set(env_example(commented=True)) - FOR_COMPOSE
    assert {"SECRET_KEY", "ALLOWED_HOSTS", "HTTPS_ONLY", "NUM_PROXIES", "DATABASE_URL"} <= named
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []
    # every variable compose reads is in the example
    text = (ROOT / "compose.yaml").read_text("utf-8") + (ROOT / "deploy/Caddyfile").read_text("utf-8")
    read = set(re.findall(r"\$\{?([A-Z_]+)", text))
    assert read >= FOR_COMPOSE
    assert read <= set(env_example(commented=True))
    # services and images set settings that there are
    page = (ROOT / "docs/settings.md").read_text("utf-8")
    ours = {name for name in SERVICES["web"]["environment"] if name not in FOR_COMPOSE}
    ours |= {name for name in environment_of("web") if name.startswith(("RATCHET", "PROMETHEUS"))}
    assert [name for name in sorted(ours) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("unit", sorted((ROOT / "deploy/systemd").iterdir()), ids=lambda unit: unit.stem)
def test_a_unit_starts_what_its_container_runs(unit: Path) -> None:
    parsed = RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(unit)
    service = parsed["Service"]
    assert service["WorkingDirectory"] == "/srv/ratchet"
    program, *words = service["ExecStart"].removeprefix("/srv/ratchet/.venv/bin/").split()
    name = unit.stem.removeprefix("ratchet-")
    stage = "web" if name == "web" else "trainer"
    (line,) = (line for line in stages()[stage][1] if line.startswith("CMD"))
    contained = SERVICES[name].get("command", json.loads(line.removeprefix("CMD ")))
    if name == "web":
        apart = {"0.0.0.0:8000", "127.0.0.1:8000", "--worker-tmp-dir", "/dev/shm"}
        assert program == contained[0]
        assert {*words} - apart == {*contained[1:]} - apart
    else:
        assert [program, *words] == contained


def in_context(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves a file in the build: the last pattern that meets it or a folder above decides."""
    parts = path.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    kept = True
    for pattern in patterns:
        wanted = pattern.lstrip("!")
        anywhere = wanted.removeprefix("**/")
        names = parts if anywhere != wanted else [p for p in above if p.count("/") == wanted.count("/")]
        if any(fnmatch.fnmatchcase(name, anywhere) for name in names):
            kept = pattern.startswith("!")
    return kept


def context_copy(target: Path) -> list[str]:
    """Copy what the image's `COPY . .` would; returns the paths."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.splitlines() if in_context(path, patterns)]
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target / path)
    return paths


WITHOUT = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""
"""A sitecustomize.py that hides packages."""


def not_in_the_web_image() -> set[str]:
    """Modules of requirements-rl.txt, less llama.cpp."""
    pins = re.findall(r"(?m)^([\w-]+)==", (ROOT / "requirements-rl.txt").read_text("utf-8"))
    modules = {"scikit-learn": "sklearn", "lm-eval": "lm_eval"}
    return {modules.get(pin, pin.replace("-", "_")) for pin in pins} - {"llama_cpp_python"}


def answer(request: urllib.request.Request) -> tuple[int, str]:
    class Stays(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        with urllib.request.build_opener(Stays).open(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers.get("Location", "")


def test_a_command_that_loads_models_says_where_it_runs() -> None:
    class Loads(RatchetCommand):
        def work(self, options: dict[str, Any]) -> dict[str, Any]:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

    with pytest.raises(CommandError, match=r"torch is not installed here: .*docker compose exec trainer"):
        call_command(Loads())
    assert set(TRAINING_PACKAGES) <= not_in_the_web_image()


@pytest.mark.campaign
def test_the_web_image_runs_behind_a_proxy_without_torch(tmp_path: Path) -> None:
    code, home = tmp_path / "code", tmp_path / "data"
    assert not [path for path in context_copy(code) if path.startswith((".", "tests/", "examples/"))]
    (tmp_path / "without").mkdir()
    hidden = not_in_the_web_image()
    assert {"torch", "transformers", "sklearn"} <= hidden
    (tmp_path / "without/sitecustomize.py").write_text(WITHOUT.format(names=hidden))
    home.mkdir(mode=0o700)
    database = f"sqlite:///{home / 'db.sqlite3'}"
    assert template_copy(home / "db.sqlite3")
    port = str(free_port())
    with ModelServer() as stub:
        environment = {
            **production_environment(),
            **environment_of("web"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path / "without"),
            "RATCHET_HOME": str(home),
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
            "DATABASE_URL": database,
            "LOCAL_BACKENDS": stub.url,
        }
        (check,) = (line for line in stages()["web"][1] if line.startswith("RUN"))
        step = check.removeprefix("RUN ").split(" && ")[0].replace("/tmp/check", str(tmp_path / "check"))
        checked = subprocess.run(
            ["bash", "-ec", f"{step} --deploy --fail-level WARNING"],
            cwd=code,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stderr
        serve = next(words for words in commands() if words and words[0] == "gunicorn")
        serve = [word.replace("0.0.0.0:8000", f"127.0.0.1:{port}") for word in serve]
        serve[serve.index("--workers") + 1] = "1"  # one shows as much as two
        with (tmp_path / "log").open("wb") as log:
            server = subprocess.Popen(serve, cwd=code, env=environment, stdout=log, stderr=log)
        try:
            base = f"http://localhost:{port}"
            deadline = time.monotonic() + 240
            while True:
                try:
                    status, body = answer(urllib.request.Request(f"{base}/readyz"))
                    break
                except OSError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            assert (status, json.loads(body)["status"]) == (200, "ready")
            site = {"Host": "ratchet.example.com"}
            away = answer(urllib.request.Request(f"{base}/accounts/login/", headers=site))
            assert away == (301, "https://ratchet.example.com/accounts/login/")
            secure = {**site, "X-Forwarded-Proto": "https"}
            for page in ("/accounts/login/", "/static/rl/admin.css"):
                assert answer(urllib.request.Request(base + page, headers=secure))[0] == 200
        finally:
            server.terminate()
            server.wait(60)


RULES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "deploy/prometheus/ratchet.rules.yml").read_text("utf-8")
)["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/ratchet.json").read_text("utf-8"))
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(
        variable["query"]["query"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ),
]


def series() -> dict[str, set[str]]:
    """Name of every series that /metrics gives -> its labels."""
    found: dict[str, set[str]] = {name: set() for name in _gauges()}
    counters = (metrics.REQUESTS, metrics.TOKENS, metrics.FALLBACKS, metrics.DECISIONS_RECORDED)
    found |= {f"{metric._name}_total": set(metric._labelnames) for metric in counters}
    labels = set(metrics.SECONDS._labelnames)
    return found | {
        "ratchet_gateway_seconds_bucket": labels | {"le"},
        "ratchet_gateway_seconds_count": labels,
        "ratchet_gateway_seconds_sum": labels,
    }


def test_alerts_and_panels_ask_for_metrics_and_labels_that_there_are() -> None:
    known = series()
    assert len(EXPRESSIONS) >= 15
    for expression in EXPRESSIONS:
        bare = re.sub(r'"[^"]*"', '""', expression)
        names = set(re.findall(r"\bratchet_\w+", bare))
        assert names <= set(known), expression
        labels = set(re.findall(r"(\w+)=~?\"\"", bare))
        labels |= {name.strip() for group in re.findall(r"by \(([^)]*)\)", bare) for name in group.split(",")}
        assert labels - set().union(*(known[name] for name in names)) <= {"job"}, expression


def test_every_metric_is_on_the_dashboard() -> None:
    shown = "\n".join(EXPRESSIONS)
    missing = [name for name in series() if name not in shown]
    assert missing == ["ratchet_gateway_seconds_count", "ratchet_gateway_seconds_sum"]


def test_alerts_are_explained_and_scraped() -> None:
    # every alert says what to do on the page of production
    page = (ROOT / "docs/operations.md").read_text("utf-8")
    assert re.findall(r"(?m)^\| `(Ratchet\w+)` \|", page) == [rule["alert"] for rule in RULES]
    assert {rule["labels"]["severity"] for rule in RULES} <= {"page", "ticket"}
    # prometheus scrapes the job that the alerts watch
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))
    (job,) = scrape["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}} == 0' in {rule["expr"] for rule in RULES}
    assert scrape["rule_files"] == ["ratchet.rules.yml"]
