"""Options that several commands share. Imports little, so that a wrong name fails at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.management.base import CommandError
from pydantic import Field

from backend.command import RatchetCommand
from rl.base_models import service
from rl.base_models.sources import SourceRefused

BASE_MODEL_HELP = (
    "a folder, a Hugging Face name, a GGUF file, ollama:NAME, package:NAME or smollm2 "
    "(default: {default}). Example: {option} smollm2"
)


def base_model_field(option: str, what: str, default: str) -> Any:
    """`--model` or `--base-model` as a field of a command's options; `what` says which model it is."""
    return Field(
        None, description=f"NAME_OR_PATH: {what}: {BASE_MODEL_HELP.format(default=default, option=option)}"
    )


def knobs_assigned(assignments: Iterable[str]) -> dict[str, object]:
    """Knobs of `--set KNOB=VALUE` options. Raises CommandError."""
    knobs: dict[str, Any] = {}
    for assignment in assignments:
        knob, separator, value = assignment.partition("=")
        if not separator:
            raise CommandError(f"expected --set KNOB=VALUE, found {assignment!r}")
        knobs[knob.strip()] = value.strip()
    return knobs


def verdict_lines(why: dict[str, Any]) -> list[str]:
    """A policy's verdict (`policy_verdict`) as lines: what is known, on what basis, what is next."""
    action = why["action"]
    lines = [why["words"], why["basis"], f"What is next: {action['words']}." if action else ""]
    return [line for line in lines if line]


def base_model_given(text: str | None, command: RatchetCommand) -> str | None:
    """Name of the base model in an option; adds a new source. Raises CommandError within 2 s for a wrong name."""
    if text is None:
        return None
    try:
        return service.base_model_given(text, lambda line: command.stderr.write(f"{text}: {line}")).name
    except SourceRefused as refusal:
        raise CommandError(str(refusal)) from refusal
