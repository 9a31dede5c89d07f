"""Every test gets a data folder of its own; nothing is written into the project."""

import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from whitenoise.middleware import WhiteNoiseMiddleware

# What is imported lives as long as the tests: looking through it for garbage took a quarter of their time.
gc.disable()

# Before Django reads its settings: the secret key and the default database lie in RATCHET_HOME. What a developer has
# in the environment or in .env must not change what the tests see.
_HOME = tempfile.mkdtemp(prefix="ratchet-tests-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
for name in (
    "DATABASE_URL RATCHET_BASE_MODEL RATCHET_CONFIG RATCHET_AGENTS ENABLE_ONLINE_LEARNING REDIS_URL DEBUG"
).split():
    os.environ[name] = ""
# Tiny models gain nothing from threads, and busy-waiting OpenMP threads on a shared machine cost seven times as much.
os.environ.update(RATCHET_HOME=_HOME, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")


collect_ignore = [] if os.environ.get("RATCHET_ATTACK") else ["attacks"]
"""Only the campaign (`benchmarks/attack.py`) runs what stops databases and kills servers for minutes."""


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings: None) -> None:
    """SQLite in a file: in memory all threads share one connection, so that a page's two requests at once, which a
    browser sends, would meet in one transaction."""
    from django.db import connections

    default = connections["default"].settings_dict
    if default["ENGINE"] == "django.db.backends.sqlite3":
        default["TEST"]["NAME"] = str(Path(_HOME) / "tests.sqlite3")


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> None:
    """The tests' database, and a copy of it for servers and commands that run beside: migrating takes seconds."""
    from django.db import connection

    from tests.support.migrated_database import template_write

    if connection.vendor == "sqlite":
        with django_db_blocker.unblock():
            template_write(Path(_HOME) / "migrated.sqlite3")


@pytest.fixture(scope="session", autouse=True)
def static_files_are_listed_once() -> Iterator[None]:
    """Every test client starts the middleware anew, and listing the static files took a third of a test's time."""
    listing, listed = WhiteNoiseMiddleware.add_files_from_finders, {}

    def add_files(middleware: Any) -> None:
        key = (middleware.static_prefix, middleware.autorefresh, middleware.static_root)
        if key not in listed:
            listing(middleware)
            listed[key] = dict(middleware.files)
        middleware.files.update(listed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WhiteNoiseMiddleware, "add_files_from_finders", add_files)
        yield


@pytest.fixture(autouse=True)
def ratchet_home(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """RATCHET_HOME of this test."""
    # a thread beside the test would not see what the test's own transaction has changed
    settings.FEEDBACK_RENEW_AHEAD = False
    # a third of a second for each password is what a guesser is to pay, not the tests
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.RATCHET_HOME = tmp_path / "home"
    settings.RATCHET_HOME.mkdir()
    # each test is an installation where nothing was erased before, and none waits for its first erasure
    monkeypatch.setattr("feedback.storage.tombstones.ABSENCE_S", 0.0)
    return settings.RATCHET_HOME


@pytest.fixture(autouse=True)
def files_for_serving_are_not_written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registry rows of tests mostly have no weights behind them; tests marked `prepares` write the files for real."""
    if request.node.get_closest_marker("prepares") is None:
        monkeypatch.setattr("rl.serving.files.policy_prepare", lambda policy: [])


@pytest.fixture(autouse=True)
def no_signs_of_life(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that beats beside a training writes on a connection of its own, which would wait half a minute for the
    test's transaction, and the training for the thread."""
    marker = request.node.get_closest_marker("django_db")
    if marker is None or not marker.kwargs.get("transaction"):
        monkeypatch.setattr("rl.jobs.progress.HEARTBEAT_S", 3600.0)


@pytest.fixture(autouse=True)
def the_same_salts_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets which arm of an experiment follows from its salt, which is drawn: of a dozen units of a test all were in
    one arm in one run of thirty."""
    numbers = itertools.count(1)
    drawn = SimpleNamespace(token_hex=lambda size: f"{next(numbers):0{2 * size}x}")
    monkeypatch.setattr("rl.models.experiments.secrets", drawn)


@pytest.fixture(autouse=True)
def the_recorder_ends_with_its_test() -> Iterator[None]:
    """The gateway's recorder writes on a thread: one that outlives its test asks for a database it may not have."""
    yield
    gateway = sys.modules.get("rl.serving.gateway")
    if gateway is not None and gateway.recorder._thread is not None:
        gateway.recorder.stop()
        gateway.recorder._queue.clear()
        gateway.recorder._stopping = False


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    """What the process remembers of keys and agents' settings belongs to the test before."""
    from backend.rest.access import ScopeThrottle
    from feedback.cache import forget_all

    ScopeThrottle._counts.clear()  # keys of other tests, with the same number, may have used up this minute's requests
    forget_all()


def pytest_collection_finish() -> None:
    """From here on garbage is collected among what the tests make."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones first: what trains or drives a browser comes last, in the order it was found."""
    items.sort(
        key=lambda item: sum(
            item.get_closest_marker(m) is not None for m in ("training", "browser", "postgres")
        )
    )


@pytest.fixture
def operator() -> Any:
    """A browser in which olga is signed in."""
    from tests.support.api_client import signed_in

    return signed_in("olga", "operator")


@pytest.fixture
def rater() -> Any:
    """A browser in which ada is signed in."""
    from tests.support.api_client import signed_in

    return signed_in("ada", "rater")


@pytest.fixture(scope="session")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random base model, which no test changes."""
    from tests.support.tiny_models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def base(base_path: Path) -> str:
    return str(base_path)
