"""Exports a policy for other programs and deploys it: entry point to the writers, and the record in the registry."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from django.conf import settings
from pydantic_core import to_jsonable_python

from backend.installation import file_replace
from ratchet_client.processes import exclusive
from rl import artifacts
from rl.agents.base import Message
from rl.checksums import FileDamaged, file_check, sums_write
from rl.datasets import DatasetRefused, snapshot_rows
from rl.export.artifact import ADAPTER, EXPORTERS, LINEAR, ExportResult, exported_file, exporters_of
from rl.jobs.lifecycle import follow_up_place
from rl.linear.model import WEIGHTS as LINEAR_WEIGHTS
from rl.models import Artifact, Policy, TrainingRun
from rl.models.runs import RunRefused
from rl.registry import service as registry
from rl.registry.integrity import adapter_folder, damage_notify, files_check
from rl.serving.base import BASE, Model
from rl.serving.files import AUTO, base_file, base_file_is_whole, base_folder, serving_file
from rl.serving.routing import serving_settings

logger = logging.getLogger("rl.export")

QUANTIZATIONS = (
    "q2_k",
    "q3_k_s",
    "q3_k_m",
    "q3_k_l",
    "q4_0",
    "q4_k_s",
    "q4_k_m",
    "q5_k_s",
    "q5_k_m",
    "q6_k",
    "q8_0",
    "f16",
    "bf16",
    "f32",
)


OLLAMA = "ollama"
"""Export that ends as a model of an Ollama server."""


class ExportOrderRefused(ValueError):
    """A contradictory order; the message says what was expected."""


@dataclass(frozen=True)
class ExportOrder:
    """What to export (a registered policy, a checkpoint folder, or a base model alone), as what, and where to."""

    policy: str | None = None
    checkpoint: Path | None = None
    format: str = ""
    """One of EXPORTERS; empty: `linear` for a linear policy, else `merged`."""
    quantization: str = "q4_k_m"
    output: Path | None = None
    model_name: str | None = None
    base_model: str | None = None
    system_prompt: str | None = None
    actor: str = "export_model"


def export_forms(policy: Policy) -> dict[str, list[tuple[str, str]]]:
    """Export formats of a policy for buttons, by heading: (`gguf:q8_0`, its title)."""
    if not policy.has_files:
        return {}
    if policy.kind == Policy.Kind.LINEAR:
        return {"Its own file": [(LINEAR, "JSON with its weights")]}
    quantized = [name for name in exporters_of(ADAPTER) if "quantization" in EXPORTERS[name].options]
    forms = {
        f"{name.upper()}: {EXPORTERS[name].title}": [
            (f"{name}:{q}", f"{name.upper()} {q}") for q in QUANTIZATIONS
        ]
        for name in quantized
    }
    forms["Other programs"] = [
        (name, f"{name}: {EXPORTERS[name].title}") for name in exporters_of(ADAPTER) if name not in quantized
    ]
    if settings.OLLAMA_HOST:
        forms["A server"] = [(OLLAMA, f"a model of Ollama at {settings.OLLAMA_HOST}")]
    return forms


def export_form_check(policy: Policy, form: str) -> None:
    """Raises ExportOrderRefused for a format that `export_forms` does not list."""
    if form not in (known := [name for forms in export_forms(policy).values() for name, _ in forms]):
        raise ExportOrderRefused(f"expected one of {', '.join(known)}; found {form!r:.40}")


def opponents(policy: Policy) -> list[str]:
    """Whom an evaluation can compare a policy with: `incumbent` where another answers now, `base`, other policies."""
    champion = registry.champion_of(policy.agent)
    others = Policy.objects.filter(agent=policy.agent).exclude(pk=policy.pk).order_by("-pk")
    named = [] if champion in (None, policy) else ["incumbent"]
    return [*named, "base", *others.values_list("name", flat=True)]


POLICY_JOBS = {"judge": TrainingRun.FollowUp.JUDGE, "export": TrainingRun.FollowUp.EXPORT}
"""Jobs for a policy that a button gives to the workers."""


def policy_job_place(policy: Policy, job: str, *, export_as: str = "", compare: str = "") -> TrainingRun:
    """Queues a job for a policy (POLICY_JOBS). `export_as`: a format; empty: its usual files. `compare`: the opponent
    of an evaluation.

    Raises RunRefused and ExportOrderRefused.
    """
    wanted = POLICY_JOBS.get(job)
    if wanted is None:
        raise RunRefused(f"expected one of {', '.join(POLICY_JOBS)}; found {job!r:.40}")
    if policy.run is None:
        raise RunRefused(f"{policy.name} was made by no run of this server; use the command instead")
    form = export_as if wanted == TrainingRun.FollowUp.EXPORT else ""
    if form:
        export_form_check(policy, form)
    if wanted == TrainingRun.FollowUp.JUDGE and compare not in ("", *(known := opponents(policy))):
        raise RunRefused(f"compare: expected one of {', '.join(known)}; found {compare!r:.40}")
    return follow_up_place(policy.run, wanted, export_as=form, compare=compare)


def export(order: ExportOrder, progress: Callable[[int, int, str], None] | None = None) -> dict[str, Any]:
    """Writes an export, checks it against the original and records it; leaves nothing half-made.

    Raises ExportOrderRefused, RegistryRefused, the writers' ExportRefused and the training package's PolicyLoadError.
    """
    if order.policy is None and order.checkpoint is None and order.base_model and order.format == "gguf":
        return base_export(order.base_model, order.quantization, progress)
    if (order.policy is None) == (order.checkpoint is None):
        raise ExportOrderRefused(
            "expected either --policy NAME or --checkpoint DIR, and not both; or --base-model alone with --format gguf"
        )
    policy = registry.policy_get(order.policy) if order.policy else None
    adapter = adapter_folder(policy, "export") if policy else order.checkpoint
    assert adapter is not None  # one of the two was given
    order = _format_settled(order, adapter)
    base_model = ""
    if EXPORTERS[order.format].policy_kind == ADAPTER:
        base_model = order.base_model or (policy.base_model if policy else base_of(adapter))
    name = order.model_name or (policy.name if policy else adapter.resolve().name)
    output = order.output or _place(name, order)
    prompts = _held_out_prompts(policy) if "prompts" in EXPORTERS[order.format].options else []
    result = _write(order, base_model, adapter, output, name, prompts, progress)
    report = _export_register(order, policy, adapter, base_model, result)
    if policy is not None and order.format == "gguf-lora" and base_file(_base_of(policy)) is None:
        base_export(order.base_model or policy.base_model, settings.SERVING_QUANTIZATION, progress)
    return report


HELD_OUT_PROMPTS = 24
"""Most held-out prompts whose answers are compared."""


def _held_out_prompts(policy: Policy | None) -> list[list[Message]]:
    """Distinct held-out prompts of a policy's dataset; none for a checkpoint, and if the dataset's file is gone."""
    snapshot = policy.run.snapshot if policy is not None and policy.run is not None else None
    if snapshot is None:
        return []
    prompts: dict[str, list[Message]] = {}
    try:
        for row in snapshot_rows(snapshot, "holdout"):
            prompts.setdefault(row["prompt_hash"], row["prompt"])
            if len(prompts) == HELD_OUT_PROMPTS:
                break
    except DatasetRefused as refusal:
        logger.warning("the answers to held-out prompts are not compared: %s", refusal)
    return list(prompts.values())


def _format_settled(order: ExportOrder, folder: Path) -> ExportOrder:
    """The order with its format. Raises ExportOrderRefused if this kind of policy does not have it."""
    kind = LINEAR if (folder / LINEAR_WEIGHTS).is_file() else ADAPTER
    format = order.format or (LINEAR if kind == LINEAR else "merged")
    if format not in EXPORTERS:
        raise ExportOrderRefused(f"no format {format!r}; there are {', '.join(EXPORTERS)}")
    if EXPORTERS[format].policy_kind != kind:
        whose, able = order.policy or folder, ", ".join(exporters_of(kind))
        why = (
            f"{whose} is a linear policy: it has no base model, so there is no {format} of it; expected --format {able}"
            if kind == LINEAR
            else f"{whose} is an adapter; expected one of {able}, found {format}"
        )
        raise ExportOrderRefused(why)
    return replace(order, format=format)


def _export_register(
    order: ExportOrder, policy: Policy | None, adapter: Path, base_model: str, result: ExportResult
) -> dict[str, object]:
    """Records the files in the registry, and reports them."""
    is_quantized = "quantization" in EXPORTERS[order.format].options
    if policy is not None:
        for file in result.files:
            registry.artifact_register(
                policy,
                actor=order.actor,
                format=result.format,
                quantization=order.quantization if is_quantized else "",
                path=registry.home_relative(file.path),
                bytes=file.bytes,
                sha256=file.sha256,
                checked=result.checked,
            )
    return {
        "policy": policy.name if policy else None,
        "checkpoint": str(adapter),
        "base_model": base_model,
        "quantization": order.quantization if is_quantized else None,
        **to_jsonable_python(result),
    }


def _base_of(policy: Policy) -> Model:
    return Model(BASE, policy.base_model, policy.base_model_hash)


LIBRARIES = "loading the libraries"
"""Phase before the first of an export: half a minute on a busy machine, mostly importing torch."""


def base_export(
    base_model: str, quantization: str, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, object]:
    """Writes a base model as GGUF to where serving looks for it; one process at a time per base."""
    if progress:
        progress(0, 0, LIBRARIES)
    from rl.export import source
    from rl.export.gguf import export_gguf
    from rl.export.source import base_identity

    folder = base_folder(base_identity(base_model, source.base_folder(base_model)))
    folder.mkdir(parents=True, exist_ok=True)
    report = (lambda stage, done, total: progress(done, total, stage)) if progress else None
    with exclusive(folder / "making.lock"):
        # another process may have written it while this one waited: the folder is named by the identity of the base
        present = serving_file(folder) if quantization == AUTO else folder / f"base-{quantization}.gguf"
        if present is not None and present.is_file() and base_file_is_whole(present):
            result = ExportResult("gguf", [exported_file(present)], {}, ["it was there already"])
            quantization = present.stem.removeprefix("base-")
        elif quantization == AUTO:
            from rl.export.gguf import serving_file_write

            quantization, result = serving_file_write(base_model, folder, progress=report)
        else:
            result = export_gguf(
                base_model,
                None,
                folder / f"base-{quantization}.gguf",
                quantization=quantization,
                progress=report,
            )
        target = result.files[0].path
        facts = json.dumps({"base_model": base_model, "quantization": quantization})
        file_replace(folder / "base.json", facts)
        sums_write(folder, [target.name])
        artifacts.put(folder)
    return {
        "policy": None,
        "checkpoint": None,
        "base_model": base_model,
        "quantization": quantization,
        **to_jsonable_python(result),
    }


def ollama_register(
    file: Path,
    name: str,
    *,
    system: str | None = None,
    alias: str | None = None,
    parameters: Mapping[str, object] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, object]:
    """Makes a GGUF file a model of the server at OLLAMA_HOST. Raises the export package's ExportRefused."""
    from rl.export.ollama import export_to_ollama

    report = (lambda stage, done, total: progress(done, total, stage)) if progress else None
    made = export_to_ollama(
        file,
        name,
        host=settings.OLLAMA_HOST or None,
        system=system,
        alias=alias,
        parameters=parameters,
        progress=report,
    )
    return asdict(made)


def _place(name: str, order: ExportOrder) -> Path:
    folder: Path = settings.RATCHET_HOME / "exports" / name
    # the export names a GGUF file by the specification
    return folder if EXPORTERS[order.format].names_file else folder / order.format


def _write(
    order: ExportOrder,
    base_model: str,
    adapter: Path,
    output: Path,
    name: str,
    prompts: list[list[Message]],
    progress: Callable[[int, int, str], None] | None,
) -> ExportResult:
    """Runs an exporter and checks that its files exist. Raises ExportOrderRefused if it cannot be imported or returns
    something else, and what its writer raises."""
    if progress:
        progress(0, 0, LIBRARIES)

    exporter = EXPORTERS[order.format]
    module, _, function = exporter.writer.partition(":")
    try:
        writer = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ExportOrderRefused(
            f"format {exporter.name}: expected its writer {exporter.writer}, which cannot be imported "
            f"({type(error).__name__}: {error}); correct the package that brings it"
        ) from error
    if exporter.policy_kind == LINEAR:
        result = writer(adapter, output)
    else:
        report = (lambda stage, done, total: progress(done, total, stage)) if progress else None
        values = {
            "quantization": order.quantization,
            "model_name": name,
            "system_prompt": order.system_prompt,
            "prompts": prompts,
        }
        options = {option: values[option] for option in exporter.options}
        result = writer(base_model, adapter, output, progress=report, **options)
    if not isinstance(result, ExportResult) or not result.files:
        raise ExportOrderRefused(
            f"format {exporter.name}: expected an ExportResult with files of {exporter.writer}, found {result!r:.80}"
        )
    if missing := [str(file.path) for file in result.files if not file.path.exists()]:
        raise ExportOrderRefused(
            f"format {exporter.name}: expected the files that it names, found none at {', '.join(missing)}"
        )
    return replace(result, format=exporter.name)


def base_of(adapter: Path) -> str:
    """The base model an adapter folder names. Raises PolicyLoadError."""
    from rl.training.loading import PolicyLoadError, adapter_read

    facts = adapter_read(adapter)
    if "base_model" in facts:
        return str(facts["base_model"])
    # an adapter trained elsewhere names its base in PEFT's adapter_config.json
    named = json.loads((adapter / "adapter_config.json").read_text("utf-8")).get("base_model_name_or_path")
    if not named:
        raise PolicyLoadError(f"{adapter} does not name its base model; give it with --base-model")
    return str(named)


# --- Deployment ------------------------------------------------------------------------------------------------


def policy_register(
    policy: Policy,
    *,
    promote: bool = False,
    system: str | None = None,
    actor: str = "deploy",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, object]:
    """Makes a policy's newest GGUF file (written now if there is none) a model of the server at OLLAMA_HOST.

    promote: point the alias to it, OLLAMA_MODEL_FAST or else the agent's name. Raises the writers' ExportRefused.
    """
    files_check(policy, "deploy")
    if policy.kind == Policy.Kind.LINEAR:
        raise ExportOrderRefused(
            f"{policy.name} is a linear policy, which Ollama cannot run; apps ask this server for it (docs/gateway.md)"
        )
    whole = policy.artifacts.filter(format="gguf").order_by("-created_at", "-pk")
    there = [registry.home_path(file.path) for file in whole if _is_sound(file)]
    if not there:
        export(ExportOrder(policy=policy.name, format="gguf", actor=actor), progress)
        there = [registry.home_path(whole.values_list("path", flat=True)[0])]
    temperature = serving_settings(policy.agent).temperature
    return ollama_register(
        there[0],
        policy.name,
        system=system,
        alias=(settings.OLLAMA_MODEL_FAST or policy.agent) if promote else None,
        parameters={"temperature": temperature} if temperature is not None else None,
        progress=progress,
    )


def _is_sound(file: Artifact) -> bool:
    """True if an exported file exists and is unchanged."""
    path = registry.home_path(file.path)
    try:
        file_check(path, file.sha256, "it is exported again")
    except FileDamaged as damage:
        if damage.found:
            damage_notify(damage, f"policy {file.policy}")
        return False
    return path.is_file()
