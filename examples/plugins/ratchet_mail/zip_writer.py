"""Writer of the exporter `adapter-zip`: the adapter's files, zipped, and each read back and compared."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from rl.export.artifact import (
    ExportRefused,
    ExportResult,
    Progress,
    exported_file,
    sha256_file,
    silent,
    staged_file,
)

SENT = ("adapter_config.json", "adapter_model.safetensors", "README.md")


def export_adapter_zip(
    base_model: str,
    adapter: Path,
    output: Path,
    *,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write `output/<model_name>.zip`. Raises ExportRefused where a file comes back otherwise; nothing is left then."""
    files = [adapter / name for name in SENT if (adapter / name).is_file()]
    if adapter / SENT[1] not in files:
        raise ExportRefused(f"expected {SENT[1]} in {adapter}, found none: is it the folder of an adapter?")
    target = output / f"{model_name or adapter.name}.zip"
    report = progress or silent
    with staged_file(target, sum(file.stat().st_size for file in files)) as staged:
        with zipfile.ZipFile(staged, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, file in enumerate(files, 1):
                archive.write(file, file.name)
                report("zipping", number, len(files))
        with zipfile.ZipFile(staged) as archive:
            for file in files:
                if hashlib.sha256(archive.read(file.name)).hexdigest() != sha256_file(file):
                    raise ExportRefused(f"expected {file.name} to come back as it was, found other bytes")
    return ExportResult(
        "adapter-zip",
        [exported_file(target)],
        {"files": len(files), "same_bytes": True},
        [f"an adapter of {base_model}: PEFT loads the unpacked folder on that base"],
    )
