"""GGUF files that llama.cpp answers with, and the child process that writes missing ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError
from django.db.models import Q

from backend.installation import command_arguments
from rl import artifacts
from rl.base_models.service import base_model_default
from rl.bundled_models import resolve_base_model
from rl.checksums import FileDamaged, base_fault, base_hash, file_check, sums_read
from rl.linear.model import LinearPolicy, LinearPolicyError
from rl.models import Artifact, Policy, ServingSettings, TrainingRun, Upstream
from rl.models.learning import IN_PROCESS
from rl.registry.integrity import adapter_folder, damage_notify, weights_name
from rl.registry.service import PreparationRefused
from rl.serving.base import BASE, BackendFailed, Endpoint, Model, Prices
from rl.upstreams import UpstreamKeyMissing, upstream_key

logger = logging.getLogger("rl.serving")

AUTO = "auto"
"""SERVING_QUANTIZATION of a base: quantised where that agrees with the base (`rl.export.gguf`), else f16."""

ASK_AGAIN_S = 60.0
"""Shortest time between two attempts of this process to have the same file made."""

_makers: dict[str, tuple[float, subprocess.Popen[bytes]]] = {}
"""Options of `export_model` -> when it was last started, and its process."""
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
    meanwhile. While the store's copy is on its way nothing else may answer: kind `away`."""
    files_ensure(model)
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


def files_ensure(model: Model, wait_s: float = artifacts.WAIT_S) -> None:
    """Fetch a model's files from the store where none are here. Raises BackendFailed while they are on their way."""
    if artifacts.store() is None or files_present(model) is not None:
        return
    places: list[str | Path] = [path for path in (model.adapter, model.merged_file) if path]
    if identity := model.base_model_hash:
        places.append(base_folder(identity))
    try:
        known = artifacts.fetch_wait(places, wait_s)
    except DatabaseError as error:
        raise BackendFailed(f"{model.name} has no file on this server: {error}", kind="away") from error
    if known and files_present(model) is None:
        raise BackendFailed(
            f"the files of {model.name} are not on this server yet; they are being fetched",
            kind="away",
            retry_after_s=5.0,
        )


def policies_ready() -> bool:
    """True if every policy in service has its files on this server. Has missing ones fetched and does not wait."""
    artifacts.sweep()
    kinds = [Policy.Kind.LINEAR, *([Policy.Kind.ADAPTER] if IN_PROCESS in settings.LOCAL_BACKENDS else [])]
    stages = (Policy.Stage.CHAMPION, Policy.Stage.CHALLENGER)
    ready = True
    routed = ServingSettings.objects.exclude(route_policy="").values("route_policy")
    for policy in Policy.objects.filter(Q(stage__in=stages) | Q(name__in=routed), kind__in=kinds):
        model = model_of(policy)
        try:
            files_ensure(model, wait_s=0)
            files_of(model)
        except BackendFailed as failure:
            logger.warning("%s", failure)
            ready = False
    return ready


def policy_files_make(policy: Policy) -> None:
    """Have a policy's files made where they are missing, so that its first question finds them."""
    if IN_PROCESS in settings.LOCAL_BACKENDS and policy.upstream is None:
        with suppress(BackendFailed):
            files_of(model_of(policy))


def base_prepare() -> None:
    """Have the base model's file made where there is none, so that the first question finds it."""
    if IN_PROCESS in settings.LOCAL_BACKENDS:
        with suppress(BackendFailed):  # says that it is being made, which is what is wanted
            files_of(Model(BASE, base_model_default().name))


def _missing_file_error(what: str, *, damaged: bool = False) -> BackendFailed:
    fault = f"the GGUF file of {what} is damaged" if damaged else f"there is no GGUF file of {what} yet"
    kind = "damaged" if damaged else "missing" if artifacts.store() is None else "away"
    return BackendFailed(f"{fault}; it is being exported now", kind=kind, retry_after_s=15.0)


def _make(*options: str) -> None:
    """Have `export_model` write a file: it needs torch, which this process must not load. Returns at once."""
    key = " ".join(options)
    with _lock:
        if key in _makers:
            started, process = _makers[key]
            if process.poll() is None or time.monotonic() - started < ASK_AGAIN_S:
                return
        log = settings.RATCHET_HOME / "serving-exports.log"
        logger.info("made in the background: export_model %s (its log: %s)", key, log)
        with log.open("ab") as log_file:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, *command_arguments("export_model", *options)],
                cwd=settings.BASE_DIR,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        _makers[key] = time.monotonic(), process


def adapter_make(policy: str) -> None:
    """Have a policy's adapter written as a GGUF file. Returns at once."""
    _make("--policy", policy, "--format", "gguf-lora")


# --- Preparation of a policy -----------------------------------------------------------------------------------


def model_of(policy: Policy) -> Model:
    """The model a policy is served as: its adapter file on its base, one whole file of both, a linear policy, or an
    upstream's model."""
    if policy.upstream is not None:
        return Model(
            policy.name,
            policy.base_model,
            endpoint=endpoint_of(policy.upstream),
            parameters=policy.parameters,
        )
    if policy.kind == Policy.Kind.LINEAR:
        path = f"{policy.adapter_path}/{weights_name(policy.kind)}"
        return Model(policy.name, "", adapter=path, adapter_sha256=policy.adapter_sha256, kind=policy.kind)
    files = list(policy.artifacts.filter(format__in=("gguf-lora", "gguf")).order_by("-pk"))
    adapter = next((file for file in files if file.format == "gguf-lora"), None)
    # of several whole files the one in the quantisation serving asks for, else the newest
    merged_files = sorted(
        (file for file in files if file.format == "gguf"),
        key=lambda file: file.quantization != whole_quantization(),
    )
    return Model(
        policy.name,
        policy.base_model,
        policy.base_model_hash,
        adapter=adapter.path if adapter else "",
        merged_file=merged_files[0].path if merged_files else "",
        adapter_sha256=adapter.sha256 if adapter else "",
        merged_sha256=merged_files[0].sha256 if merged_files else "",
    )


def endpoint_of(upstream: Upstream) -> Endpoint:
    """The endpoint of an upstream with its key, or with the reason why there is none."""
    key, fault = "", ""
    try:
        key = upstream_key(upstream)
    except UpstreamKeyMissing as missing:
        fault = str(missing)
    return Endpoint(
        upstream.name,
        upstream.url,
        dialect=upstream.dialect,
        schemas=upstream.schemas,
        key=key,
        fault=fault,
        timeout_s=upstream.timeout_s,
        connect_timeout_s=upstream.connect_timeout_s,
        concurrency=upstream.concurrency,
        context_tokens=upstream.context_tokens,
        forward_fields=upstream.forward_fields,
        prices=Prices(upstream.price_in, upstream.price_cached, upstream.price_out),
    )


def unaskable_words(name: str) -> str:
    """Words for a request that a recorded policy was to answer."""
    return f"{name} is known by its recorded answers alone and cannot be asked here: ask the app's own model"


def policy_prepare(policy: Policy) -> list[Artifact]:
    """Write what a policy needs to answer in process: its adapter as GGUF and its base where there is none.

    Returns the files written; none where they are there, or where `in-process` is no backend. A hosted policy needs its
    upstream's key. A family whose adapter
    has no converter is written as one whole file. Takes up to SERVING_PREPARE_TIMEOUT_S seconds. Raises
    PreparationRefused where nothing can be written and no other backend could answer.
    """
    if policy.upstream is not None and (fault := endpoint_of(policy.upstream).fault):
        raise PreparationRefused(fault)
    if policy.kind == Policy.Kind.LINEAR:
        _linear_check(policy)
    if policy.kind != Policy.Kind.ADAPTER or IN_PROCESS not in settings.LOCAL_BACKENDS:
        return []
    model = model_of(policy)
    if files_present(model) is not None:
        return []
    try:
        adapter_folder(policy)
    except FileDamaged as damage:
        raise PreparationRefused(str(damage)) from damage
    base_model = base_of(policy)
    deadline = time.monotonic() + settings.SERVING_PREPARE_TIMEOUT_S
    folder: Path = settings.RATCHET_HOME / "exports" / policy.name
    checkpoint = [
        "--checkpoint",
        str(settings.RATCHET_HOME / policy.adapter_path),
        "--model-name",
        policy.name,
    ]
    checkpoint += ["--base-model", base_model]
    try:
        if base_file(replace(model, name=BASE)) is None:
            if fault := base_fault(policy.base_model, base_source(base_model), policy.base_model_hash):
                raise PreparationRefused(fault)
            base = ["--base-model", base_model, "--format", "gguf"]
            _export([*base, "--quantization", settings.SERVING_QUANTIZATION], deadline)
        result = _export(
            [*checkpoint, "--format", "gguf-lora", "--output", str(folder / "gguf-lora")], deadline
        )
        return [_artifact_register(policy, "gguf-lora", "", result)]
    except PreparationRefused as refusal:
        logger.warning("%s has no adapter file (%s); its whole file is written instead", policy.name, refusal)
        quantization = whole_quantization()
        options = ["--format", "gguf", "--quantization", quantization, "--output", str(folder)]
        try:
            result = _export([*checkpoint, *options], deadline)
        except PreparationRefused:
            if len(settings.LOCAL_BACKENDS) > 1:
                logger.warning("%s cannot answer in process; the other backends may", policy.name)
                return []
            raise PreparationRefused(
                f"{policy.name} cannot answer: its file for llama.cpp could not be written ({refusal}). Fix "
                "that, add a server to LOCAL_BACKENDS, or promote it by force"
            ) from refusal
        return [_artifact_register(policy, "gguf", quantization, result)]


def base_of(policy: Policy) -> str:
    """The name of a policy's base model; where its folder moved, another name of the same identity that is known."""
    if not policy.base_model_hash.startswith("sha256:"):
        return policy.base_model
    runs = TrainingRun.objects.filter(base_model_hash=policy.base_model_hash).order_by("-pk")
    others = runs.values_list("base_model", flat=True).distinct()[:20]
    for name in (policy.base_model, base_model_default().name, *others):
        if not base_fault(name, base_source(name), policy.base_model_hash):
            return name
    return policy.base_model


def _linear_check(policy: Policy) -> None:
    """A linear policy is served from its own file, which has to be there, and whole."""
    try:
        LinearPolicy.load(adapter_folder(policy))
    except (FileDamaged, LinearPolicyError) as fault:
        raise PreparationRefused(str(fault)) from fault


def _export(options: list[str], deadline: float) -> dict[str, object]:
    """The report of `export_model` with these options, run in a child. Raises PreparationRefused with its last line."""
    try:
        process = subprocess.run(  # noqa: S603
            [sys.executable, *command_arguments("export_model", *options, "--json")],
            cwd=settings.BASE_DIR,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(deadline - time.monotonic(), 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PreparationRefused(
            f"not written within {settings.SERVING_PREPARE_TIMEOUT_S:.0f} s; raise SERVING_PREPARE_TIMEOUT_S"
        ) from error
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        raise PreparationRefused(lines[-1] if lines else f"export_model ended with {process.returncode}")
    report: dict[str, object] = json.loads(process.stdout)
    return report


def _artifact_register(policy: Policy, format: str, quantization: str, report: dict[str, Any]) -> Artifact:
    from rl.registry.service import artifact_register, home_relative

    (file,) = report["files"]
    return artifact_register(
        policy,
        actor="serving",
        format=format,
        quantization=quantization,
        path=home_relative(file["path"]),
        bytes=file["bytes"],
        sha256=file["sha256"],
        checked=report["checked"],
    )


def prepare_before_promotion(sender: object, policy: Policy, **_: object) -> None:
    """Receiver of `policy_promoting`. Raises PreparationRefused."""
    if policy.kind == Policy.Kind.RECORDED:
        raise PreparationRefused(unaskable_words(policy.name))
    try:
        policy_prepare(policy)
    except artifacts.StoreFailed as failure:
        raise PreparationRefused(str(failure)) from failure
