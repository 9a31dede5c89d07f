"""Files to import, the commands that take them, and all rows of all tables to compare."""

import io
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command

from feedback.models import ImportBatch
from tests.support.formats import written as written
from tests.support.postgres import postgres_url as postgres_url

PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


THUMB = {"prompt": "q", "completion": "a", "label": True}


def tables() -> dict[str, list[dict[str, Any]]]:
    """Every row of feedback and of what was made of it, but for the record of the imports themselves."""
    return {
        model.__name__: sorted(model._default_manager.order_by().values(), key=str)
        for app in ("feedback", "rl")
        for model in apps.get_app_config(app).get_models()
        if model.__name__ != "Tombstone"  # what was erased stays erased, whatever is undone
        if model is not ImportBatch
    }


def failing(name: str, *arguments: str) -> tuple[str, str]:
    """What a command that exits with 1 prints on stdout, and its one line on stderr."""
    out = io.StringIO()
    with pytest.raises(CommandError) as error:
        call_command(name, *arguments, stdout=out)
    assert error.value.returncode == 1
    assert "\n" not in str(error.value)
    return out.getvalue(), str(error.value)


def named(rater: str, **said: Any) -> dict[str, Any]:
    """A decision of Ratchet's own format that a rater rated."""
    return {
        "type": "decision",
        "id": "11111111-1111-4111-8111-111111111111",
        "agent": "helper",
        "response": "a",
        "messages": [{"role": "user", "content": "q"}],
        "ratings": [{"rater": rater, **said}],
    }
