"""Export of a linear policy: its JSON file with weights by name, copied and verified."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl.export.artifact import ExportedFile, ExportRefused, ExportResult, sha256_file
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError


def export_linear(policy: Path, output: Path) -> ExportResult:
    """Copies the file of a linear policy. output: a file name ending in `.json`, or a folder.

    Raises ExportRefused if there is no linear policy, or the copy differs.
    """
    target = output if output.suffix == ".json" else output / WEIGHTS
    try:
        LinearPolicy.load(policy)
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(policy / WEIGHTS, half)
        half.replace(target)
    except (LinearPolicyError, OSError) as error:
        raise ExportRefused(f"expected the linear policy {policy} to copy to {target}: {error}") from error
    found, expected = sha256_file(target), sha256_file(policy / WEIGHTS)
    if found != expected:
        raise ExportRefused(f"{target} has SHA-256 {found[:16]}, expected {expected[:16]}: is the disk full?")
    return ExportResult(
        "linear",
        [ExportedFile(target, target.stat().st_size, found)],
        {"same_bytes": True},
        [
            "a linear policy has no base model, so there is no merged model, LoRA, ONNX or GGUF of it; docs/linear.md "
            "says how another program reads its file"
        ],
    )
