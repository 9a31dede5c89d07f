"""Bit flips: one bit of each kind of artifact, anywhere in it, is noticed by whoever loads it."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.backups import archive
from backend.backups.archive import BackupRefused
from rl.checksums import FileDamaged, file_sum, sums_check, sums_write
from rl.datasets import DatasetRefused, prepare_training_dataset, snapshot_rows
from rl.models import Artifact, RewardModelVersion
from rl.registry import integrity
from rl.reward_models.service import fault_of
from rl.serving import files
from rl.serving.base import BASE, Model
from rl.serving.files import model_of
from rl.training.loading import PolicyLoadError, model_located
from rl.training.result import checkpoint_is_whole, checkpoint_seal
from tests.support.campaign_scale import scaled
from tests.test_backup import lite, write  # noqa: F401
from tests.test_erasure import world
from tests.test_integrity import adapter, policy, told  # noqa: F401

FLIPS = scaled("FLIPS", 2)
"""Flips in each file."""


def noticed(load: Callable[[], object]) -> bool:
    """True where loading refuses, or gives nothing."""
    try:
        return not load()
    except (FileDamaged, PolicyLoadError, DatasetRefused, BackupRefused):
        return True


def flips(file: Path, load: Callable[[], object], dice: random.Random) -> list[str]:
    """Flip one bit at a time; returns the flips nobody noticed. The file is whole again afterwards."""
    file.chmod(0o644)
    data, missed = file.read_bytes(), []
    assert not noticed(load), f"{file}: whole, and refused"
    for number in range(FLIPS):
        at, bit = dice.randrange(len(data)), dice.randrange(8)
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
        # what is computed once is computed again where the time of change differs: a disk's own flip comes with none,
        # and is noticed by the next process
        os.utime(file, ns=(number, number))
        if not noticed(load):
            missed.append(f"{file.name}: bit {bit} of byte {at}")
    file.write_bytes(data)
    return missed


@pytest.mark.django_db
def test_a_flipped_bit_is_noticed_wherever_it_is(
    ratchet_home: Path,
    tmp_path: Path,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    dice = random.Random(scaled("SEED", 0))
    row = policy(ratchet_home)
    folder = ratchet_home / row.adapter_path
    base = files.base_folder("sha256:0")
    base.mkdir(parents=True)
    (base / "base.json").write_text('{"base_model": "bundled"}')
    (base / "base-f16.gguf").write_bytes(dice.randbytes(9000))
    sums_write(base, ["base-f16.gguf"])
    exported = write(ratchet_home, "exports/widgets-v1-LoRA.gguf", dice.randbytes(5000))
    Artifact.objects.create(
        policy=row,
        format="gguf-lora",
        path="exports/widgets-v1-LoRA.gguf",
        bytes=5000,
        sha256=file_sum(exported),
    )
    row.base_model_hash = "sha256:0"
    row.save()
    judge = adapter(ratchet_home / "reward_models" / "judge")
    version = RewardModelVersion.objects.create(
        name="judge",
        agent="widgets",
        base_model="bundled",
        path="reward_models/judge",
        feedback_count=1,
        sha256=file_sum(judge / "adapter_model.safetensors"),
        objective="binary",
    )
    world()
    snapshot = prepare_training_dataset("helper").snapshot
    assert snapshot is not None
    checkpoint = write(tmp_path, "checkpoint-1/optimizer.pt", dice.randbytes(3000)).parent
    checkpoint_seal(checkpoint)
    bundled = tmp_path / "bundled"
    bundled.mkdir()
    for file in integrity.BUNDLED_MODEL.iterdir():
        if file.is_file():
            (bundled / file.name).write_bytes(file.read_bytes())
    merged = adapter(tmp_path / "merged")
    named = [{"path": f.name, "bytes": 1, "sha256": file_sum(f)} for f in merged.iterdir()]
    (merged / "export.json").write_text(json.dumps({"format": "merged", "files": named}))

    loads: list[tuple[Path, Callable[[], object]]] = [
        *(
            (file, lambda: integrity.adapter_folder(row))
            for file in folder.iterdir()
            if file.name != "sha256.json"
        ),
        (exported, lambda: files.files_present(model_of(row))),
        (base / "base-f16.gguf", lambda: files.base_file(Model(BASE, "bundled", "sha256:0"))),
        (judge / "adapter_model.safetensors", lambda: not fault_of(version)),
        (settings.RATCHET_HOME / snapshot.path, lambda: list(snapshot_rows(snapshot))),
        (checkpoint / "optimizer.pt", lambda: checkpoint_is_whole(checkpoint)),
        *(
            (file, lambda: model_located(str(bundled)))
            for file in sorted(bundled.iterdir())
            if file.name not in ("README.md", "sha256.json")
        ),
        *(
            (file, lambda: sums_check(merged, "x"))
            for file in sorted(merged.iterdir())
            if file.name != "export.json"
        ),
    ]
    missed = [miss for file, load in loads for miss in flips(file, load, dice)]
    record_property("tried", FLIPS * len(loads))
    assert missed == []


def test_a_flipped_bit_of_a_backup_is_noticed(
    lite: Path,  # noqa: F811
    ratchet_home: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    dice = random.Random(scaled("SEED", 0))
    write(ratchet_home, "policies/v1", dice.randbytes(2000))
    archive.backup(tmp_path / "b")
    kept = [file for file in sorted((tmp_path / "b").rglob("*")) if file.is_file() and file.stat().st_size]
    kept = [file for file in kept if file.name != archive.MANIFEST]
    missed = [miss for file in kept for miss in flips(file, lambda: archive.verify(tmp_path / "b"), dice)]
    record_property("tried", FLIPS * len(kept))
    assert missed == []
