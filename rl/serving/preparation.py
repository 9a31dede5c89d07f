"""Preparation of a policy for serving: the files llama.cpp answers with are written before a promotion says done.

The export needs torch, which a web process must not load, so each file is written by a child process. The child is
given the adapter's folder and writes files alone; the row in the registry is written here, inside the caller's own
transaction if there is one.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings

from backend.installation import command_arguments
from rl.base_models.service import base_model_default
from rl.checksums import FileDamaged, base_fault
from rl.linear.model import LinearPolicy, LinearPolicyError
from rl.models import Artifact, Policy, TrainingRun, Upstream
from rl.models.learning import IN_PROCESS
from rl.registry.integrity import adapter_folder, weights_name
from rl.registry.service import PreparationRefused
from rl.serving.base import BASE, Endpoint, Model, Prices
from rl.serving.files import base_file, base_source, files_present, whole_quantization
from rl.upstreams.keys import UpstreamKeyMissing, upstream_key

logger = logging.getLogger("rl.serving")


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


def _export(options: list[str], deadline: float) -> dict[str, Any]:
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
    report: dict[str, Any] = json.loads(process.stdout)
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


def prepare_before_promotion(sender: object, policy: Policy, **_: Any) -> None:
    """Receiver of `policy_promoting`. Raises PreparationRefused."""
    if policy.kind == Policy.Kind.RECORDED:
        raise PreparationRefused(unaskable_words(policy.name))
    policy_prepare(policy)
