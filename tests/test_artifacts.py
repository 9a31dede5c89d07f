"""Files of policies on several servers: the artefact store, its nodes, and what is not there yet."""

import csv
import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import boto3
import httpx
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.base import ContentFile
from django.core.management import call_command
from django.test import Client
from moto.server import ThreadedMotoServer

from backend.settings import _artifact_storage
from rl import artifacts
from rl.checksums import file_sum, sums_write
from rl.datasets.erasure import _runs_erase
from rl.linear.model import WEIGHTS
from rl.models import Policy, StoredFile, TrainingRun
from rl.registry import files as registry_files
from rl.registry import service as registry
from rl.registry.integrity import adapter_folder
from rl.serving import files as serving_files
from rl.serving.base import Ask, BackendFailed, Model
from rl.serving.fallback import NobodyAnswers, pieces
from rl.serving.files import model_of
from rl.serving.linear import linear_policy
from rl.serving.routing import Target
from tests.support.linear import QUEUES, asked, tickets, weighted
from tests.support.registry_rows import make_run, policy_of
from tests.support.server import Server, query

BUCKET = "ratchet-tests"


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    boto3.client("s3", **s3_options(address)).create_bucket(Bucket=BUCKET)
    yield address
    server.stop()


def s3_options(address: str) -> dict[str, Any]:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return {"endpoint_url": address, "region_name": "us-east-1", **keys}


@pytest.fixture(params=["folder", "s3"])
def node(
    request: pytest.FixtureRequest, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """RATCHET_HOME of this node, with a store."""
    place = str(tmp_path / "store")
    if request.param == "s3":
        place = f"s3://{BUCKET}/{tmp_path.name}"
        address = request.getfixturevalue("s3")
        for name, value in s3_options(address).items():
            variable = {"endpoint_url": "AWS_ENDPOINT_URL", "region_name": "AWS_DEFAULT_REGION"}.get(
                name, name
            )
            monkeypatch.setenv(variable.upper(), value)
    settings.STORAGES = {**settings.STORAGES, **_artifact_storage(place)}
    settings.RATCHET_HOME = tmp_path / "a"
    settings.RATCHET_HOME.mkdir()
    return Path(settings.RATCHET_HOME)


@pytest.fixture
def other(settings: Any, tmp_path: Path) -> Any:
    """Goes on as another node, which has no file."""

    def go() -> Path:
        settings.RATCHET_HOME = tmp_path / "b"
        settings.RATCHET_HOME.mkdir(exist_ok=True)
        return Path(settings.RATCHET_HOME)

    return go


def champion(home: Path, name: str = "tickets-v1") -> Policy:
    """A linear policy in service whose files are stored."""
    folder = home / "policies" / "tickets" / name
    folder.mkdir(parents=True)
    weighted().save(folder)
    (folder / "README.md").write_text("a card")
    sums_write(folder)
    facts = {"adapter_path": f"policies/tickets/{name}", "adapter_sha256": file_sum(folder / WEIGHTS)}
    policy = policy_of(name, Policy.Stage.CHAMPION, "tickets", kind=Policy.Kind.LINEAR, **facts)
    artifacts.put(folder)
    return policy


@pytest.mark.django_db(transaction=True)
def test_another_node_fetches_a_policy_and_answers_with_it(node: Path, other: Any) -> None:
    policy = champion(node)
    there = other()
    assert not (there / policy.adapter_path).exists()
    assert linear_policy(model_of(policy)).answers == ("a", "b")
    adapter_folder(policy)
    assert sorted(path.name for path in (there / policy.adapter_path).iterdir()) == sorted(
        path.name for path in (node / policy.adapter_path).iterdir() if path.name != "README.md"
    )
    assert Client().get("/readyz").json()["files"] == "ok"


@pytest.mark.django_db(transaction=True)
def test_a_damaged_copy_is_replaced_and_a_damaged_store_is_refused(node: Path, other: Any) -> None:
    policy = champion(node)
    there = other()
    model = model_of(policy)
    weights = there / model.adapter
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"torn")
    assert linear_policy(model).answers == ("a", "b")

    weights.unlink()
    storage, row = artifacts.store(), StoredFile.objects.get(path=model.adapter)
    storage.delete(artifacts._blob(row.sha256))
    storage.save(artifacts._blob(row.sha256), ContentFile(b"something else"))
    with pytest.raises(artifacts.StoreFailed, match="expected"):
        artifacts.fetch(policy.adapter_path)
    with pytest.raises(BackendFailed) as failed:
        linear_policy(model)
    assert failed.value.kind == "away"
    assert not weights.exists()
    answer = Client().get("/readyz")
    assert (answer.status_code, answer.json()["files"]) == (503, "away")


@pytest.mark.django_db(transaction=True)
def test_nothing_answers_in_place_of_a_policy_whose_file_is_elsewhere(node: Path, other: Any) -> None:
    policy = champion(node)
    other()
    storage = artifacts.store()
    assert storage is not None
    for row in StoredFile.objects.all():
        storage.delete(artifacts._blob(row.sha256))
    base = Model("base", "bundled")
    with pytest.raises(NobodyAnswers) as refused:
        pieces(Target("tickets", (model_of(policy), base)), Ask(asked("hot"), answers=("a", "b")))
    assert [tried.kind for tried in refused.value.fallbacks] == ["away"]
    assert refused.value.retry_after_s == 5.0


@pytest.mark.django_db(transaction=True)
def test_what_is_removed_is_removed_everywhere(node: Path, other: Any, settings: Any) -> None:
    policy = champion(node)
    there = other()
    adapter_folder(policy)
    assert (there / policy.adapter_path).is_dir()
    settings.RATCHET_HOME = node
    registry_files._remove(registry.home_path(policy.adapter_path))
    assert not StoredFile.objects.exists()
    settings.RATCHET_HOME = there
    artifacts.sweep()
    assert not [path for path in (there / policy.adapter_path).rglob("*") if path.is_file()]


@pytest.mark.django_db(transaction=True)
def test_what_broke_off_is_put_and_swept_anew(node: Path, other: Any) -> None:
    policy = champion(node)
    storage, row = artifacts.store(), StoredFile.objects.get(path__endswith=WEIGHTS)
    storage.delete(artifacts._blob(row.sha256))
    storage.save(artifacts._blob(row.sha256), ContentFile(b"half"))
    call_command("policy", "store")
    there = other()
    adapter_folder(policy)
    half = there / "cache" / "fetched" / "x.1.2.half"
    for age_s, stays in ((0, True), (artifacts.STALE_S + 1, False)):
        half.write_bytes(b"half")
        os.utime(half, (time.time() - age_s,) * 2)
        artifacts.sweep()
        assert half.exists() is stays
    assert not list((there / "policies").rglob(".*"))


@pytest.mark.django_db(transaction=True)
def test_a_disk_that_is_full_leaves_no_file_and_the_next_try_fetches_it(
    node: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = champion(node)
    there = other()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(artifacts.os, "fsync", full)
        with pytest.raises(artifacts.StoreFailed, match="No space left"):
            artifacts.fetch(policy.adapter_path)
    assert not [path for path in there.rglob("*") if path.is_file() and path.suffix != ".json"]
    artifacts.sweep()
    adapter_folder(policy)


@pytest.mark.django_db(transaction=True)
def test_readiness_does_not_wait_for_a_slow_store(
    node: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion(node)
    other()
    arrives = threading.Event()
    fetch = artifacts._fetch
    monkeypatch.setattr(artifacts, "_fetch", lambda *of: arrives.wait(60) and fetch(*of))
    began = time.monotonic()
    assert Client().get("/readyz").json()["files"] == "away"
    assert time.monotonic() - began < 5
    arrives.set()
    for thread in list(artifacts._transfers.values()):
        thread.join(30)
    assert Client().get("/readyz").json()["files"] == "ok"


@pytest.mark.django_db
def test_a_store_that_is_away_refuses_a_promotion_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(policy: Policy) -> None:
        raise artifacts.StoreFailed("the store is away")

    monkeypatch.setattr(serving_files, "policy_prepare", away)
    policy = policy_of("tickets-v1", Policy.Stage.CANDIDATE, "tickets")
    with pytest.raises(registry.PreparationRefused, match="the store is away"):
        serving_files.prepare_before_promotion(Policy, policy)


@pytest.mark.django_db(transaction=True)
def test_erasure_on_a_server_without_the_file_erases_the_stores_file(
    node: Path, other: Any, settings: Any
) -> None:
    policy = champion(node)
    run = make_run("tickets", method="linear")
    Policy.objects.filter(pk=policy.pk).update(run=run)
    other()
    before = StoredFile.objects.get(path__endswith=WEIGHTS).sha256
    _runs_erase(TrainingRun.objects.all(), lambda model: model.restrict(set(), set()), dry_run=False)
    policy.refresh_from_db()
    stored = StoredFile.objects.get(path__endswith=WEIGHTS).sha256
    assert before != stored == policy.adapter_sha256
    settings.RATCHET_HOME = node
    artifacts.fetch(policy.adapter_path)
    assert file_sum(node / policy.adapter_path / WEIGHTS) == stored


@pytest.mark.django_db(transaction=True)
def test_equal_files_are_stored_once_and_the_last_name_removes_them(node: Path) -> None:
    for name in ("x", "y"):
        (node / name).write_text("same")
        artifacts.put(node / name)
    blob = artifacts._blob(hashlib.sha256(b"same").hexdigest())
    storage = artifacts.store()
    artifacts.forget("x")
    assert storage.exists(blob)
    artifacts.forget("y")
    assert not storage.exists(blob)
    artifacts.put("/etc/hostname")
    assert not StoredFile.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_files_from_before_the_store_are_put_there_later(node: Path, other: Any) -> None:
    policy = champion(node)
    StoredFile.objects.all().delete()
    call_command("policy", "store")
    other()
    adapter_folder(policy)


def test_without_a_store_nothing_is_looked_up(django_assert_num_queries: Any, db: None) -> None:
    with django_assert_num_queries(0):
        artifacts.put("policies")
        artifacts.fetch("policies")
    assert "files" not in Client().get("/readyz").json()


@pytest.mark.parametrize("place", ["bucket", "s3://", "gs://bucket", "relative/folder"])
def test_an_unknown_place_is_refused(place: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="s3://bucket/prefix"):
        _artifact_storage(place)


KILLS = 20
PATIENCE_S = 180.0
"""Seconds a server may take to start and answer on a machine that does much else."""


@pytest.mark.campaign
def test_two_nodes_without_a_shared_folder_one_killed_at_random(tmp_path: Path, s3: str) -> None:
    database = f"sqlite:///{tmp_path / 'shared.sqlite3'}"
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
    first, second = (Server(database, home, workers=1) for home in homes)
    for server in (first, second):
        server.environment |= {
            "ARTIFACT_STORE": f"s3://{BUCKET}/nodes",
            "LOCAL_BACKENDS": "http://127.0.0.1:9/v1",
        }
        server.environment |= {"AWS_ENDPOINT_URL": s3, "AWS_DEFAULT_REGION": "us-east-1"}
        server.environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    first.migrate()
    rows = tmp_path / "rows.csv"
    random = Random(5)
    with rows.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "response", "rating"])
        for text, queue in tickets(90):
            answer = random.choice((queue, *QUEUES))
            table.writerow([text, answer, "up" if answer == queue else "down"])
    first.manage("import_feedback", str(rows), "--agent", "tickets")
    name = json.loads(first.manage("train_linear", "--agent", "tickets", "--json"))["policy"]
    first.manage("policy", "promote", name, "--force", "--reason", "test")
    key = {"Authorization": f"Bearer {first.key('ingest', 'rate', 'read')}"}
    questions = iter(tickets(10_000, seed=7))
    given: dict[str, str] = {}
    """Decision of each whole answer -> the thumb it earns."""

    def answered_by(server: Server) -> tuple[int, str]:
        text, queue = next(questions)
        body = {"model": "tickets", "messages": asked(text)}
        answer = httpx.post(
            f"{server.address}/v1/chat/completions", json=body, headers=key, timeout=PATIENCE_S
        )
        if answer.status_code == 200:
            said = answer.json()
            right = said["choices"][0]["message"]["content"] == queue
            given[said["id"]] = "up" if right else "down"
        return answer.status_code, answer.headers.get("X-Ratchet-Policy", "")

    def rate_all(server: Server) -> None:
        """Rate what was answered, anywhere, through one server. A decision that died with its node waits for it."""
        for decision, thumb in given.items():
            deadline = time.monotonic() + PATIENCE_S
            while True:
                path = f"/api/decisions/{decision}/ratings/"
                rated = httpx.post(
                    f"{server.address}{path}", json={"thumb": thumb}, headers=key, timeout=PATIENCE_S
                )
                if rated.status_code == 201:
                    break
                assert time.monotonic() < deadline, (rated.status_code, rated.text)
                time.sleep(0.5)

    def answers_in_time(server: Server) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            status, policy = answered_by(server)
            if status == 200:
                return policy == name
            time.sleep(0.5)
        return False

    with first:
        assert answers_in_time(first)
        for kill in range(KILLS):
            if kill == KILLS // 2:  # the turn: what was answered so far is rated and learnt from
                second.start()
                rate_all(first)
                second.kill()
                before = name
                name = json.loads(first.manage("train_linear", "--agent", "tickets", "--json"))["policy"]
                first.manage("policy", "promote", name, "--force", "--reason", "test")
            shutil.rmtree(homes[1] / "policies", ignore_errors=True)
            second.start()
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(answered_by, second)
                time.sleep(random.uniform(0, 2))
                second.kill()
            if asking.exception() is None:
                assert asking.result() in ((200, name), (503, ""))
            second.start()
            assert answers_in_time(second)
            assert {answered_by(second) for _ in range(3)} == {(200, name)}
            assert httpx.get(f"{second.address}/readyz", timeout=PATIENCE_S).json()["files"] == "ok"
            second.kill()
        second.start()
        rate_all(first)
        second.kill()
    assert name != before
    stored = query(
        first, "SELECT policy, count(*) FROM feedback_decision WHERE source = 'gateway' GROUP BY 1"
    )
    assert {policy for policy, _ in stored} == {before, name}
    assert sum(count for _, count in stored) >= len(given) >= 4 * KILLS
