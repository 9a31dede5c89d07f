"""Whole files: what is damaged on disk is named when it is loaded, stepped in for, and never judged or served."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command

from backend import notifications
from rl import checksums
from rl.bundled_models import BUNDLED_MODEL
from rl.checksums import SUMS, FileDamaged, base_hash, file_check, file_sum, sums_check, sums_write
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.export.artifact import manifest_write
from rl.export.service import ExportOrder, export
from rl.jobs import results
from rl.jobs.trainer import start_located
from rl.models import Artifact, Policy, TrainingRun
from rl.registry import integrity
from rl.registry.service import PreparationRefused, RegistryRefused, policy_promote, policy_rollback
from rl.serving import fallback, files
from rl.serving.base import BASE, Model
from rl.serving.fallback import InProcess
from rl.serving.files import model_of, policy_prepare
from rl.training.loading import PolicyLoadError, adapter_read, model_located
from rl.training.result import TrainResult, checkpoint_is_whole, checkpoint_last, checkpoint_seal
from tests.support.registry_rows import policy_of
from tests.support.serving import support_bot_allowed  # noqa: F401

pytestmark = pytest.mark.django_db

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""SHA-256 of `abc`: FIPS 180-4's own example."""


def flip(path: Path, at: int = -3) -> None:
    """Flip one byte, as a bad disk does; size and name stay."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notices that went out; nothing is remembered of other tests."""
    sent: list[str] = []
    monkeypatch.setattr(notifications, "notify", lambda event, text, **_: sent.append(f"{event}: {text}"))

    class Now:
        def __init__(self, target: Any, **_: Any) -> None:
            self.start = target

    monkeypatch.setattr(integrity.threading, "Thread", Now)
    monkeypatch.setattr(integrity, "_reported_faults", set())
    monkeypatch.setattr(checksums, "_sums", {})
    return sent


def adapter(folder: Path) -> Path:
    """A folder with the files of an adapter."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    save_file({"w": np.ones(64, dtype=np.float32)}, folder / "adapter_model.safetensors")
    return folder


def policy(home: Path, name: str = "widgets-v1", stage: str = "champion") -> Policy:
    folder = adapter(home / "policies" / "widgets" / name)
    sums_write(folder)
    sha256 = file_sum(folder / "adapter_model.safetensors")
    place = {"adapter_path": f"policies/widgets/{name}", "adapter_sha256": sha256}
    return policy_of(name, stage, "widgets", base_model_hash="", **place)


def test_a_sum_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    digests: list[str] = []
    digest = checksums.hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        digests.append(file.name)
        return digest(file, name)

    monkeypatch.setattr(checksums.hashlib, "file_digest", counted)
    assert [file_sum(path), file_sum(path)] == [ABC, ABC]
    assert len(digests) == 1
    file_check(path, ABC, "copy it again")
    os.utime(path, ns=(1, 1))
    assert file_sum(path) == ABC
    assert len(digests) == 2
    path.write_bytes(b"abd")
    with pytest.raises(FileDamaged, match=f"has SHA-256 .*, expected {ABC[:16]}.*copy it again"):
        file_check(path, ABC, "copy it again")
    path.unlink()
    with pytest.raises(FileDamaged, match="is not there"):
        file_check(path, ABC, "copy it again")


def test_a_folder_with_a_changed_or_lost_file_or_record_is_damaged(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    assert sums_check(folder, "x") == 0  # made before sums were recorded
    sums_write(folder)
    (folder / "README.md").write_text("a card is written again")
    assert sums_check(folder, "x") == 2
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("4", "8"))
    with pytest.raises(FileDamaged, match=r"adapter_config\.json is damaged"):
        sums_check(folder, "x")
    (folder / SUMS).write_text("{")
    with pytest.raises(FileDamaged, match=r"sha256\.json is damaged"):
        sums_check(folder, "x")


@pytest.mark.slow
def test_another_machine_checks_a_folder_as_the_docs_say(tmp_path: Path) -> None:
    """With Python's json and sha256sum alone, in the words of docs/export.md."""
    if shutil.which("sha256sum") is None:
        pytest.skip("needs sha256sum of GNU coreutils")
    page = (Path(__file__).parent.parent / "docs" / "export.md").read_text("utf-8")
    commands = [line for line in page.splitlines() if line.endswith("sha256sum -c")]
    assert len(commands) == 2
    for command in commands:
        folder = adapter(tmp_path / str(commands.index(command)))
        if SUMS in command:
            sums_write(folder)
        else:
            (folder / "README.md").write_text("a card")
            manifest_write(folder, folder, "merged", {})
            (folder / "README.md").write_text("a card, written again since")

        def run(command: str = command, folder: Path = folder) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )

        assert run().returncode == 0, run().stderr
        flip(folder / "adapter_model.safetensors")
        damaged = run()
        assert damaged.returncode == 1
        assert "adapter_model.safetensors: FAILED" in damaged.stdout


def test_a_manifest_checks_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A merged model that is trained on, an adapter that was exported, and the command for other programs."""
    base = shutil.copytree(integrity.BUNDLED_MODEL, tmp_path / "merged")
    (base / SUMS).unlink()
    files = [file for file in base.iterdir() if file.is_file() and file.name != "README.md"]
    (base / "README.md").write_text("a card")
    named = [{"path": file.name, "bytes": 1, "sha256": file_sum(file)} for file in files]
    named.append({"path": "README.md", "bytes": 1, "sha256": ABC})  # its words may change
    (base / "export.json").write_text(json.dumps({"format": "merged", "files": named}))
    assert model_located(str(base)) == str(base)
    assert checksums.main([str(base)]) == 0
    assert f"{len(files)} files are whole" in capsys.readouterr().out
    flip(base / "model.safetensors")
    with pytest.raises(PolicyLoadError, match=r"model\.safetensors is damaged"):
        model_located(str(base))
    assert checksums.main([str(base), str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "model.safetensors is damaged" in said
    assert "no checksums are recorded there" in said
    (base / "export.json").write_text('{"files": "of another program"}')
    assert sums_check(base, "x") == 0


def test_a_damaged_base_model_or_adapter_is_not_loaded(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    sums_write(folder)
    adapter_read(folder)
    flip(folder / "adapter_model.safetensors")
    with pytest.raises(PolicyLoadError, match=r"adapter_model\.safetensors is damaged"):
        adapter_read(folder)
    base = shutil.copytree(integrity.BUNDLED_MODEL, tmp_path / "base")
    assert model_located(str(base)) == str(base)
    flip(base / "model.safetensors")
    with pytest.raises(PolicyLoadError, match=r"model\.safetensors is damaged.*copy or download"):
        model_located(str(base))


def test_the_bundled_base_model_is_what_was_recorded() -> None:
    assert sums_check(integrity.BUNDLED_MODEL, "x") == 6


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "optimizer.pt").write_bytes(bytes(100))
        checkpoint_seal(folder)
    flip(tmp_path / "checkpoint-2" / "optimizer.pt")
    found, notes = checkpoint_last(tmp_path)
    assert found == tmp_path / "checkpoint-1"
    (note,) = notes
    assert note.startswith("checkpoint-2 ")
    (found / "complete.json").write_text('{"optimizer.pt": 100}')  # sealed by an earlier version
    assert checkpoint_is_whole(found)


def test_nobody_works_with_a_damaged_adapter(ratchet_home: Path, told: list[str], settings: Any) -> None:
    row = policy(ratchet_home)
    assert start_located(row.name) == str(ratchet_home / row.adapter_path)
    flip(ratchet_home / row.adapter_path / "adapter_model.safetensors")
    named = r"adapter_model\.safetensors is damaged.*restore it from a backup.*policy rollback widgets"
    settings.LOCAL_BACKENDS = ["in-process"]
    for work in (
        lambda: start_located(row.name),
        lambda: export(ExportOrder(policy=row.name, format="gguf-lora")),
        lambda: integrity.adapter_folder(row),
        lambda: policy_prepare(row),
    ):
        with pytest.raises((ValueError, PreparationRefused), match=named):
            work()
    assert len(told) == 1, "one notice, however many meet it"
    assert told[0].startswith("artifact_damaged: policy widgets-v1: ")


def test_a_damaged_policy_is_not_judged(ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = policy(ratchet_home)
    flip(ratchet_home / row.adapter_path / "adapter_model.safetensors")
    anything = SimpleNamespace(rows={}, min_evidence=1)
    for name in ("_held_out_rows", "_checks", "gate_bounds", "rewards_located", "barred_reason"):
        monkeypatch.setattr(f"rl.evaluation.service.{name}", lambda *_, **__: anything)
    monkeypatch.setattr("rl.evaluation.sides.hardware_detect", lambda: None)
    with pytest.raises(FileDamaged, match="is damaged"):
        evaluate(EvaluationOrder(policy=row.name, rewards="length"))
    assert not row.evaluations.exists()


def test_the_gateway_steps_in_for_a_damaged_file_which_is_made_again(
    ratchet_home: Path, settings: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = policy(ratchet_home)
    exported = ratchet_home / "exports" / "widgets-v1-LoRA.gguf"
    exported.parent.mkdir(parents=True)
    exported.write_bytes(b"GGUF adapter")
    base = files.base_folder(base_hash(str(BUNDLED_MODEL)))
    base.mkdir(parents=True)
    (base / "base.json").write_text('{"base_model": "bundled"}')
    (base / "base-f16.gguf").write_bytes(b"GGUF base")
    sums_write(base, ["base-f16.gguf"])
    Artifact.objects.create(
        policy=row,
        format="gguf-lora",
        path="exports/widgets-v1-LoRA.gguf",
        bytes=12,
        sha256=file_sum(exported),
    )
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(files, "_make", lambda *options: made.append(options))
    assert files.files_of(model_of(row)) == (base / "base-f16.gguf", exported)
    flip(exported)
    backend = InProcess()
    with pytest.raises(fallback.BackendFailed) as failed:
        next(iter(backend.pieces(fallback.Ask([], stream=True), model_of(row), 1.0)))
    assert failed.value.kind == "damaged"  # the next in line answers
    assert made == [("--policy", "widgets-v1", "--format", "gguf-lora")]
    assert len(told) == 1
    assert files.files_of(Model(BASE, "bundled")) == (base / "base-f16.gguf", None)
    flip(base / "base-f16.gguf")
    assert files.base_file(Model(BASE, "bundled")) is None


def test_flipped_files_are_seen(ratchet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer, template and facts, of the reference too. `sha256.json` and the card at the top are rewritten."""
    trained = adapter(tmp_path / "trained")
    for name in ("tokenizer.json", "chat_template.jinja", "ratchet.json", "README.md"):
        (trained / name).write_text('{"name": 1}')
    shutil.copytree(trained, trained / "reference")
    sums_write(trained / "reference")
    sums_write(trained, ["adapter_config.json", "adapter_model.safetensors"])
    run = TrainingRun.objects.create(
        agent="widgets", method="dpo", base_model="bundled", recipe={}, status="running"
    )
    monkeypatch.setattr(results, "incumbent_sync", lambda agent: None)
    row = results.policy_publish(
        run, TrainResult("dpo", "succeeded", str(trained), "bundled", "", 1, 1, 0.0), actor="x"
    )
    folder = ratchet_home / row.adapter_path
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "README.md"]
    files = [*(file for file in files if file != folder / SUMS), folder / "reference/README.md"]
    assert len(files) == 12
    unseen = []
    for file in files:
        whole = file.read_bytes()
        flip(file)
        (finding,) = integrity.verify([row])["findings"]
        unseen += [file] if finding["path"] != str(file) else []
        with pytest.raises(RegistryRefused, match="is damaged"):
            policy_promote(row, actor="x", reason="now", force=True)
        file.write_bytes(whole)
    assert unseen == []
    assert integrity.verify([row])["findings"] == []
    row.refresh_from_db()
    assert row.stage == "candidate"


def test_a_rollback_never_crowns_a_damaged_predecessor(ratchet_home: Path) -> None:
    before, present = policy(ratchet_home, stage="retired"), policy(ratchet_home, "widgets-v2", "champion")
    before.events.create(kind="promoted", to_stage="champion", actor="x")
    before.events.create(kind="retired", from_stage="champion", to_stage="retired", actor="x")
    flip(ratchet_home / before.adapter_path / "adapter_config.json")
    with pytest.raises(RegistryRefused, match="is damaged"):
        policy_rollback("widgets", actor="x")
    present.refresh_from_db()
    assert present.stage == "champion"


def test_policy_verify_ends_with_1(ratchet_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, other = policy(ratchet_home), policy(ratchet_home, "widgets-v2", "candidate")
    call_command("policy", "verify", "--json")
    report = json.loads(capsys.readouterr().out)
    # two adapters and the bundled base
    assert (report["checked"], report["damaged"], report["findings"]) == (3, 0, [])
    weights = ratchet_home / row.adapter_path / "adapter_model.safetensors"
    flip(weights)
    with pytest.raises(SystemExit) as ended:
        call_command("policy", "verify", row.name, other.name, "--json")
    assert ended.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["checked"], report["whole"], report["damaged"]) == (2, 1, 1)
    found = report["findings"][0]
    assert (found["path"], found["state"], found["expected"]) == (str(weights), "damaged", row.adapter_sha256)
    assert found["found"] == file_sum(weights)
    with pytest.raises(SystemExit):
        call_command("policy", "verify", "--agent", "widgets")
    assert "restore it from a backup" in capsys.readouterr().out
