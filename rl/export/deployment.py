"""Deploys a policy: its GGUF file becomes a model of an Ollama server, with an alias."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings

from rl.checksums import FileDamaged, file_check
from rl.export.service import ExportOrder, ExportOrderRefused, export, ollama_register
from rl.models import Artifact, Policy
from rl.registry import service as registry
from rl.registry.integrity import damage_notify, files_check
from rl.serving.routing import serving_settings


def policy_register(
    policy: Policy,
    *,
    promote: bool = False,
    system: str | None = None,
    actor: str = "deploy",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Makes a policy's newest GGUF file (written now if there is none) a model of the server at OLLAMA_HOST.

    promote: point the alias to it, OLLAMA_MODEL_FAST or else the agent's name. Raises the writers' ExportRefused.
    """
    files_check(policy, "deploy")
    if policy.kind == Policy.Kind.LINEAR:
        raise ExportOrderRefused(
            f"{policy.name} is a linear policy, which Ollama cannot run; apps ask this server for it (docs/gateway.md)"
        )
    whole = policy.artifacts.filter(format="gguf").order_by("-created_at", "-pk")
    there = [_path(file.path) for file in whole if _is_sound(file)]
    if not there:
        export(ExportOrder(policy=policy.name, format="gguf", actor=actor), progress)
        there = [_path(whole.values_list("path", flat=True)[0])]
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
    path = _path(file.path)
    try:
        file_check(path, file.sha256, "it is exported again")
    except FileDamaged as damage:
        if damage.found:
            damage_notify(damage, f"policy {file.policy}")
        return False
    return path.is_file()


def _path(stored: str) -> Path:
    return registry.home_path(stored)
