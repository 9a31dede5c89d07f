"""GGUF files that llama.cpp answers with, and the child process that writes missing ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from django.conf import settings

from backend.installation import command_arguments
from rl.base_models.service import base_model_default
from rl.bundled_models import resolve_base_model
from rl.checksums import FileDamaged, base_fault, base_hash, file_check, sums_read
from rl.models.learning import IN_PROCESS
from rl.registry.integrity import damage_notify
from rl.serving.base import BASE, BackendFailed, Model

logger = logging.getLogger("rl.serving")

AUTO = "auto"
"""SERVING_QUANTIZATION of a base: quantised where that agrees with the base (`rl.export.gguf`), else f16."""

ASK_AGAIN_S = 60.0
"""Between two times this process has the same file made."""

_request_times: dict[str, float] = {}
_lock = threading.Lock()


def bases_folder() -> Path:
    """One folder per base model, named by its hash: `base.json` and its GGUF files, one per quantisation."""
    folder: Path = settings.RATCHET_HOME / "exports" / "bases"
    return folder


def base_folder(base_model_hash: str) -> Path:
    return bases_folder() / base_model_hash.replace(":", "-")[:40]


def base_source(base_model: str) -> str:
    """The folder of a base model; of one from the hub its name."""
    return str(Path(resolve_base_model(base_model)).expanduser())


def base_file(model: Model) -> Path | None:
    """The GGUF file of a base model by its identity, of one from the hub whose commit is not known by its name; None
    where there is none."""
    identity = model.base_model_hash
    if not identity and Path(source := base_source(model.base_model)).is_dir():
        identity = base_hash(source)
    if identity:
        return _file_in(base_folder(identity))
    for facts in sorted(bases_folder().glob("*/base.json"), key=lambda path: -path.stat().st_mtime):
        try:
            named = json.loads(facts.read_text("utf-8")).get("base_model")
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s", facts, error)
            continue
        if named == model.base_model and (found := _file_in(facts.parent)) is not None:
            return found
    return None


def _file_in(folder: Path) -> Path | None:
    wanted = serving_file(folder)
    if settings.SERVING_QUANTIZATION != AUTO:
        wanted = folder / f"base-{settings.SERVING_QUANTIZATION}.gguf"
    files = [
        *([wanted] if wanted else []),
        *sorted(file for file in folder.glob("base-*.gguf") if file != wanted),
    ]
    return next((file for file in files if file.is_file() and base_file_is_whole(file)), None)


def serving_file(folder: Path) -> Path | None:
    """The file that was chosen to serve a base, or written last by hand; None where none was."""
    try:
        facts = json.loads((folder / "base.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s cannot be read: %s", folder / "base.json", error)
        return None
    return folder / f"base-{facts['quantization']}.gguf" if "quantization" in facts else None


def whole_quantization() -> str:
    """Quantisation of a policy's one whole file, which nobody compared with another one."""
    wanted: str = settings.SERVING_QUANTIZATION
    return "f16" if wanted == AUTO else wanted


def base_file_is_whole(file: Path) -> bool:
    """True if a base's GGUF file is the one that was written; one made before sums were recorded passes."""
    try:
        expected = sums_read(file.parent).get(file.name, "")
    except FileDamaged as damage:
        damage_notify(damage, "a base model's file")
        return True  # the record is damaged, not the weights
    return _is_whole(file, expected, "a base model's file")


def _is_whole(file: Path, expected: str, whose: str) -> bool:
    """Compare a file with its sum, once per process and state of the file. A damaged one counts as not there: it is
    made anew from the adapter and the base, which are checked themselves."""
    try:
        file_check(file, expected, "it is exported again")
    except FileDamaged as damage:
        damage_notify(damage, whose)
        return False
    return True


def files_present(model: Model) -> tuple[Path, Path | None] | None:
    """Base and adapter of a model, or its one whole file and None, as a linear policy has; None where one is not there,
    or is damaged."""
    if model.kind == "linear":
        file = settings.RATCHET_HOME / model.adapter
        whole = file.is_file() and _is_whole(file, model.adapter_sha256, f"policy {model.name}")
        return (file, None) if whole else None
    base = base_file(model)
    if model.name == BASE:
        return None if base is None else (base, None)
    adapter = settings.RATCHET_HOME / model.adapter if model.adapter else None
    whose = f"policy {model.name}"
    if base and adapter and adapter.is_file() and _is_whole(adapter, model.adapter_sha256, whose):
        return base, adapter
    merged = settings.RATCHET_HOME / model.merged_file if model.merged_file else None
    if merged is not None and merged.is_file() and _is_whole(merged, model.merged_sha256, whose):
        return merged, None
    return None


def files_of(model: Model) -> tuple[Path, Path | None]:
    """Files of a model, checked. Raises BackendFailed where a file is missing or damaged, and has it made
    meanwhile."""
    if (present := files_present(model)) is not None:
        return present
    base = base_file(model)
    if base is None and (
        fault := base_fault(model.base_model, base_source(model.base_model), model.base_model_hash)
    ):
        raise BackendFailed(f"{model.name} cannot answer: {fault}", kind="missing", retry_after_s=60.0)
    if base is None:
        _make(
            "--base-model",
            model.base_model,
            "--format",
            "gguf",
            "--quantization",
            settings.SERVING_QUANTIZATION,
        )
        raise _missing_file_error(f"the base model {model.base_model}")
    _make("--policy", model.name, "--format", "gguf-lora")
    damaged = any(
        path and (settings.RATCHET_HOME / path).is_file() for path in (model.adapter, model.merged_file)
    )
    raise _missing_file_error(f"the policy {model.name}", damaged=damaged)


def base_prepare() -> None:
    """Have the base model's file made where there is none, so that the first question finds it."""
    if IN_PROCESS in settings.LOCAL_BACKENDS:
        with suppress(BackendFailed):  # says that it is being made, which is what is wanted
            files_of(Model(BASE, base_model_default().name))


def _missing_file_error(what: str, *, damaged: bool = False) -> BackendFailed:
    fault = f"the GGUF file of {what} is damaged" if damaged else f"there is no GGUF file of {what} yet"
    return BackendFailed(
        f"{fault}; it is being exported now", kind="damaged" if damaged else "missing", retry_after_s=15.0
    )


def _make(*options: str) -> None:
    """Have `export_model` write a file: it needs torch, which this process must not load. Returns at once."""
    key = " ".join(options)
    with _lock:
        last = _request_times.get(key)
        if last is not None and time.monotonic() - last < ASK_AGAIN_S:
            return
        _request_times[key] = time.monotonic()
    log = settings.RATCHET_HOME / "serving-exports.log"
    logger.info("made in the background: export_model %s (its log: %s)", key, log)
    with log.open("ab") as log_file:
        subprocess.Popen(  # noqa: S603
            [sys.executable, *command_arguments("export_model", *options)],
            cwd=settings.BASE_DIR,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
