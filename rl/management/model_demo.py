"""The whole loop once on a real language model: import, train, evaluate, promote, answer, export."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from feedback.transfer import import_
from rl.base_models.service import base_model_given
from rl.base_models.sources import AddedModel
from rl.bundled_models import ADDED_FILE
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.export.agreement import references_shared
from rl.export.service import ExportOrder, export
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.management.demo import ProgressReporter
from rl.management.triage import NEW, TAUGHT, Ticket, decision_rows, tickets
from rl.registry.service import RegistryRefused, policy_get, policy_promote
from rl.serving.base import BASE, Ask, Model
from rl.serving.chat_request import chat_request
from rl.serving.files import base_file
from rl.serving.gateway import complete
from rl.serving.llama import LlamaPolicy
from rl.serving.preparation import policy_prepare

AGENT = "triage"
DECISIONS = 300
MINUTES = 15.0
"""Default time limit of the training, on a machine without an accelerator."""
FRESH = 20
"""Messages nobody rated that are asked, in taught and in new wordings each."""
ANSWER_TOKENS = 24
QUANTIZATIONS = ("q4_k_m", "q8_0")
SEED = 7

Bar = Callable[[str], AbstractContextManager[ProgressReporter]]


@dataclass(frozen=True)
class DemoAnswers:
    """Right answers to fresh messages, and how long they took."""

    served_as: str
    taught: int
    """Right in wordings that training saw."""
    new: int
    """Right in wordings that it never saw."""
    of: int
    """Messages of each kind."""
    median_ms: float


@dataclass(frozen=True)
class ModelDemo:
    """What the loop came to."""

    model: str
    policy: str
    promoted: bool
    refusal: str
    """Why the gate kept the policy a candidate; empty where it was promoted."""
    training: dict[str, Any]
    evaluation: dict[str, Any]
    answers: list[DemoAnswers]
    files: list[dict[str, Any]]
    seconds: dict[str, float]
    """Of each step."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class DemoStopped(Exception):
    """The training was stopped before its end; the message names the run to resume."""


def model_demo(model: str, bar: Bar, *, decisions: int = DECISIONS, minutes: float = MINUTES) -> ModelDemo:
    """Turn the ratchet once with the base model that `--model` would name. The feedback is SIMULATED.

    Raises DemoStopped, and what each step raises.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, began: float) -> None:
        seconds[name] = round(time.monotonic() - began, 1)

    began = time.monotonic()
    with bar(f"1/6 {model} and {decisions} decisions") as progress:
        base = base_model_given(model, lambda line: progress.update(0, 0, line))
        _decisions_import(decisions)
    timed("import", began)
    began = time.monotonic()
    with bar("2/6 training on the corrections with SFT") as progress:
        training = train.train(
            TrainOrder(
                agent=AGENT,
                method="sft",
                base_model=base.name,
                knobs={"minutes": minutes, "seed": SEED},
                actor="demo",
            ),
            progress.update,
        )
    if training["status"] != "succeeded":
        raise DemoStopped(f"stopped; resume with: python manage.py train_sft --resume {training['run']}")
    timed("train", began)
    began = time.monotonic()
    with bar("3/6 evaluating on held-out prompts, against the app's own answers") as progress:
        order = EvaluationOrder(policy=training["policy"], compare="incumbent", actor="demo")
        evaluation = evaluate(order, progress.update)
    timed("evaluate", began)
    with references_shared():
        began = time.monotonic()
        with bar("4/6 the adapter on the base's own file") as progress:
            files = [_exported(training["policy"], "gguf-lora", "", progress)]
        adapter, original = Path(files[0]["path"]), _original(base.path)
        timed("adapter", began)
        began = time.monotonic()
        with bar("5/6 promoting, and answering through the gateway") as progress:
            refusal = _promoted(training["policy"])
            name = training["policy"] if refusal else AGENT
            answers = [
                _asked("the gateway", lambda ticket: _gateway_answer(name, ticket), progress),
                _file_asked(f"adapter on {original.name}", original, adapter, progress),
            ]
        timed("promote and answer", began)
        for quantization in QUANTIZATIONS:
            began = time.monotonic()
            with bar(f"6/6 exporting to GGUF, {quantization}") as progress:
                files.append(_exported(training["policy"], "gguf", quantization, progress))
                answers.append(_file_asked(quantization, Path(files[-1]["path"]), None, progress))
            timed(quantization, began)
    return ModelDemo(
        model, training["policy"], not refusal, refusal, training, evaluation, answers, files, seconds
    )  # fmt: skip


def _decisions_import(count: int) -> None:
    """Import the decisions of triage; those that are there already stay as they are."""
    with tempfile.TemporaryDirectory(prefix="ratchet-demo-") as scratch:
        path = Path(scratch) / "triage.jsonl"
        rows = decision_rows(count, seed=SEED)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        import_.order_import(import_.ImportOrder(path, agent=AGENT, simulated=True))


def _exported(policy: str, form: str, quantization: str, progress: ProgressReporter) -> dict[str, Any]:
    """The GGUF file of an export, and what its check found."""
    order = ExportOrder(policy=policy, format=form, quantization=quantization, actor="demo")
    made = export(order, progress.update)
    file = next(file for file in made["files"] if str(file["path"]).endswith(".gguf"))
    return {"form": quantization or "adapter", **file, "checked": made["checked"]}


def _promoted(name: str) -> str:
    """Promote a policy if its gate opens; the gate's reason where it does not."""
    try:
        policy_promote(policy_get(name), actor="demo")
    except RegistryRefused as refusal:
        policy_prepare(policy_get(name))
        return str(refusal)
    return ""


def _gateway_answer(name: str, ticket: Ticket) -> str:
    body = {"model": name, "messages": ticket.messages, "max_tokens": ANSWER_TOKENS}
    return str(complete(chat_request(body)).message.get("content") or "")


def _file_asked(served_as: str, file: Path, adapter: Path | None, progress: ProgressReporter) -> DemoAnswers:
    with LlamaPolicy(file) as llama:
        return _asked(
            served_as,
            lambda ticket: llama.answer(Ask(ticket.messages, ANSWER_TOKENS), adapter).text,
            progress,
        )


def _asked(served_as: str, answer: Callable[[Ticket], str], progress: ProgressReporter) -> DemoAnswers:
    known = {row["prompt"][-1]["content"] for row in decision_rows(DECISIONS, seed=SEED)}
    taught = (ticket for ticket in tickets(TAUGHT, seed=SEED + 1) if ticket.text not in known)
    times: list[float] = []

    def right(asked: Iterable[Ticket]) -> int:
        count = 0
        for ticket in islice(asked, FRESH):
            began = time.perf_counter()
            count += ticket.is_right(answer(ticket))
            times.append(1e3 * (time.perf_counter() - began))
            progress.update(len(times), 2 * FRESH, f"asking {served_as}")
        return count

    seen, unseen = right(taught), right(tickets(NEW, seed=SEED + 2))
    return DemoAnswers(served_as, seen, unseen, FRESH, round(statistics.median(times), 1))


def _original(folder: str) -> Path:
    """The GGUF file that a base was made from, else the one that serves it."""
    if (Path(folder) / ADDED_FILE).is_file() and (file := AddedModel.load(Path(folder)).gguf):
        return Path(folder) / file
    found = base_file(Model(BASE, folder))
    assert found is not None  # exporting the adapter wrote it
    return found
