"""The option `--model` or `--base-model` of a command. Imports little, so that a wrong name fails at once."""

from __future__ import annotations

from django.core.management.base import CommandError

from backend.command import RatchetCommand
from rl.base_models import service
from rl.base_models.sources import SourceRefused


def base_model_given(text: str | None, command: RatchetCommand) -> str | None:
    """Name of the base model that an option names; a source that was not added yet is added.

    Raises CommandError within two seconds for a name that is none.
    """
    if text is None:
        return None
    try:
        return service.base_model_given(text, lambda line: command.stderr.write(f"{text}: {line}")).name
    except SourceRefused as refusal:
        raise CommandError(str(refusal)) from refusal
