"""Adding a base model as a job: a download and a conversion of a minute, which no web request waits for."""

from __future__ import annotations

from django_q.tasks import async_task

from rl.base_models.service import addition_note, addition_of, models_home
from rl.jobs.child_process import command_run

WAITS = "waits for a worker"


def base_model_add_dispatch(text: str) -> None:
    """Hand the adding of a base model to the workers, once; again where it failed."""
    addition = addition_of(text)
    if addition is None or addition.failed:
        addition_note(text, WAITS)
        async_task("rl.tasks.base_model_add", text, task_name=f"add {text}"[:100])


def base_model_add(text: str) -> str:
    """Add a base model in a process of its own, which notes how far it is. Returns what it said last."""
    status = command_run(["model", "add", text], models_home() / ".adding" / "worker.log")
    addition = addition_of(text)
    if status and (addition is None or not addition.failed):
        addition = addition_note(text, f"the process that added it ended with {status}", failed=True)
    return addition.words if addition else "added"
