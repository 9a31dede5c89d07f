"""The `demo` command: the whole loop once, on the bundled base model or on a real language model."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from feedback.transfer import import_
from rl.agents import AGENTS
from rl.base_models.service import base_model_given
from rl.base_models.sources import AddedModel
from rl.bundled_models import ADDED_FILE
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.export.agreement import references_shared
from rl.export.service import ExportOrder, export
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.management import simulation
from rl.registry.service import RegistryRefused, policy_get, policy_promote
from rl.serving.base import BASE, Ask, Model
from rl.serving.chat_request import chat_request
from rl.serving.files import base_file, policy_prepare
from rl.serving.gateway import complete
from rl.serving.llama import LlamaPolicy

# --- A shop's triage: messages to queues ---

QUEUES = ("billing", "shipping", "returns", "technical", "account")
ITEMS = (
    "espresso machine",
    "rain jacket",
    "desk lamp",
    "road bike",
    "blender",
    "headphones",
    "kettle",
    "tent",
)
ANGER = ("This is the third time I write! ", "I am really angry. ", "Urgent: ", "I need an answer today. ")
GREETINGS = ("Hello, ", "Hi, this is Hana. ", "Good morning. ", "Dear team, ", "", "")
SYSTEM = (
    'You sort messages of customers of a shop. Answer with JSON: {"queue": one of billing, shipping, returns, '
    'technical, account, "urgent": true or false}. Urgent: anger or a loss of money.'
)
ERRORS = 0.41
"""Share of the app's answers that are wrong and corrected."""

Wordings = Mapping[str, tuple[str, ...]]

TAUGHT: Wordings = {
    "billing": (
        "I was charged twice for my {item}.",
        "The invoice for the {item} shows the wrong amount.",
        "Why is there a fee of {n} euros on my card?",
        "My credit card was declined when I paid for the {item}.",
        "The discount code was not taken off the price of the {item}.",
    ),
    "shipping": (
        "Where is my {item}? It should have arrived {n} days ago.",
        "The tracking number for the {item} does not work.",
        "Can you deliver the {item} to another address?",
        "My parcel with the {item} has been stuck for {n} days.",
        "How long does delivery of the {item} take?",
    ),
    "returns": (
        "I want to send the {item} back.",
        "The {item} is the wrong colour, can I exchange it?",
        "How do I return the {item} after {n} days?",
        "I would like my money back for the {item}, I do not like it.",
        "You sent me the wrong size of {item}, please swap it.",
    ),
    "technical": (
        "The {item} does not switch on.",
        "My {item} makes a strange noise after {n} minutes.",
        "The {item} broke after {n} weeks.",
        "How do I clean the filter of the {item}?",
        "There is an error E{n} on the display of the {item}.",
    ),
    "account": (
        "I cannot log in to the shop.",
        "Please change my email address.",
        "I forgot my password and the mail never comes.",
        "Delete all data you have about me.",
        "How do I unsubscribe from the newsletter?",
    ),
}
"""Wordings in the training data."""

NEW: Wordings = {
    "billing": ("Money for the {item} left my bank twice.", "You took {n} euros too much from me."),
    "shipping": ("Still waiting for the {item}, nothing came so far.", "My {item} seems lost on its way."),
    "returns": (
        "I changed my mind about the {item}, take it back.",
        "The {item} does not fit, I need a bigger one.",
    ),
    "technical": ("My {item} is dead, no light at all.", "Which button resets the {item}?"),
    "account": (
        "The site says my user does not exist.",
        "I have a new phone number, put it in my profile.",
    ),
}
"""Wordings that are not in the training data."""


@dataclass(frozen=True)
class Ticket:
    """A customer's message and the right answer to it."""

    text: str
    queue: str
    urgent: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]

    @property
    def answer(self) -> str:
        return json.dumps({"queue": self.queue, "urgent": self.urgent})

    def is_right(self, response: str) -> bool:
        """True for the right answer, with any white space."""
        try:
            return bool(json.loads(response) == json.loads(self.answer))
        except ValueError:
            return False


def tickets(wordings: Wordings, *, seed: int) -> Iterator[Ticket]:
    """Endless tickets without repeated texts."""
    drawn, known = random.Random(seed), set()
    while True:
        queue = drawn.choice(QUEUES)
        text = drawn.choice(wordings[queue]).format(item=drawn.choice(ITEMS), n=drawn.randint(2, 60))
        urgent = drawn.random() < 0.35
        text = drawn.choice(GREETINGS) + (drawn.choice(ANGER) if urgent else "") + text
        if text not in known:
            known.add(text)
            yield Ticket(text, queue, urgent)


def decision_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Decisions of an app whose model errs, with thumbs and corrections, as rows for `import_feedback`."""
    drawn, rows = random.Random(seed), []
    for number, ticket in zip(range(count), tickets(TAUGHT, seed=seed), strict=False):
        given = ticket
        if drawn.random() < ERRORS:
            other = [queue for queue in QUEUES if queue != ticket.queue]
            given = Ticket(ticket.text, drawn.choice(other), ticket.urgent)
        row: dict[str, object] = {
            "id": f"triage-{number}",
            "agent": "triage",
            "prompt": ticket.messages,
            "response": given.answer,
            "thumb": "up" if given == ticket else "down",
        }
        if given != ticket:
            row["correction"] = ticket.answer
        rows.append(row)
    return rows


ACTOR = "demo"


class ProgressReporter(Protocol):
    """Progress bar of one step."""

    def update(self, done: int, total: int, suffix: str = "") -> None: ...


Bar = Callable[[str], AbstractContextManager[ProgressReporter]]
"""Label of a step -> its progress bar."""


class DemoStopped(Exception):
    """The training was stopped; the message says how to resume it."""


def _train(label: str, order: TrainOrder, bar: Bar) -> dict[str, Any]:
    with bar(label) as progress:
        result = train.train(order, progress.update)
    if result["status"] != "succeeded":
        raise DemoStopped(
            f"stopped; resume with: python manage.py train_{order.method} --resume {result['run']}"
        )
    return result


# --- The bundled base model ---------------------------------------------------------------------------------

BUNDLED_AGENT = "widgets"
SCENARIOS, NOISE, RATERS = 500, 0.1, 3
MAX_PAIRS = 1000
"""Enough pairs to learn the simulated taste; more would only take longer."""
QUANTIZATION = "q4_k_m"


def demo(bar: Bar, *, seed: int = 0) -> dict[str, object]:
    """Simulate, train, evaluate, export and answer on the bundled base model. The ratings are SIMULATED."""
    with bar(f"1/5 {SCENARIOS} scenarios, decided and rated (simulated)") as progress:
        simulated = simulation.simulate(
            BUNDLED_AGENT,
            scenarios=SCENARIOS,
            rated=True,
            raters=RATERS,
            noise=NOISE,
            seed=seed,
            progress=progress.update,
        )
    order = TrainOrder(
        agent=BUNDLED_AGENT,
        config="cpu",
        base_model="bundled",
        knobs={"seed": seed},
        max_samples=MAX_PAIRS,
        actor=ACTOR,
    )
    training = _train("2/5 training with DPO", order, bar)
    policy = training["policy"]
    with bar("3/5 evaluating on held-out prompts, against the base model") as progress:
        evaluation = evaluate(EvaluationOrder(policy=policy, compare_base=True, actor=ACTOR), progress.update)
    with bar(f"4/5 exporting to GGUF, {QUANTIZATION}") as progress:
        exported = export(
            ExportOrder(policy=policy, format="gguf", quantization=QUANTIZATION, actor=ACTOR), progress.update
        )
    with bar("5/5 answering through llama.cpp") as progress:
        answer = _scenario_answered(Path(exported["files"][0]["path"]))
        progress.update(1, 1)
    return {
        "simulation": asdict(simulated),
        "training": training,
        "evaluation": evaluation,
        "export": exported,
        "answer": answer,
    }


def _scenario_answered(gguf: Path) -> dict[str, object]:
    """An unrated scenario, answered by the exported file."""
    agent = AGENTS[BUNDLED_AGENT]
    scenario = agent.scenarios()[-1]
    with LlamaPolicy(gguf) as policy:
        answer = policy.answer(Ask(agent.render(scenario.state), agent.max_new_tokens))
    valid = agent.is_valid(answer.text, scenario.state)
    return {
        "state": dict(scenario.state),
        "response": answer.text,
        "valid": valid,
        "liked": valid and agent.hidden_preference(scenario.state, answer.text) >= 0.5,
        "latency_ms": answer.latency_ms,
    }


# --- A real language model ----------------------------------------------------------------------------------

TRIAGE = "triage"
DECISIONS = 300
MINUTES = 15.0
"""Default time limit of the training, on a machine without an accelerator."""
FRESH = 20
"""Unrated messages that are asked, in wordings of the training and in new ones each."""
ANSWER_TOKENS = 24
QUANTIZATIONS = ("q4_k_m", "q8_0")
SEED = 7


@dataclass(frozen=True)
class DemoAnswers:
    """Right answers to fresh messages, and their latency."""

    served_as: str
    taught: int
    """Right in wordings of the training."""
    new: int
    """Right in new wordings."""
    of: int
    """Messages of each kind."""
    median_ms: float


@dataclass(frozen=True)
class ModelDemo:
    """Result of the loop."""

    model: str
    policy: str
    promoted: bool
    refusal: str
    """Why the gate refused the policy; empty if it was promoted."""
    training: Mapping[str, object]
    evaluation: dict[str, object]
    answers: list[DemoAnswers]
    files: list[dict[str, object]]
    seconds: dict[str, float]
    """Step -> duration."""


def model_demo(model: str, bar: Bar, *, decisions: int = DECISIONS, minutes: float = MINUTES) -> ModelDemo:
    """Import, train, evaluate, promote, answer and export with a base model named as for `--model`.

    The feedback is SIMULATED. Raises DemoStopped, and what the steps raise.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds[name] = round(time.monotonic() - began, 1)

    with timed("import"), bar(f"1/6 {model} and {decisions} decisions") as progress:
        base = base_model_given(model, lambda line: progress.update(0, 0, line))
        _decisions_import(decisions)
    order = TrainOrder(
        agent=TRIAGE,
        method="sft",
        base_model=base.name,
        knobs={"minutes": minutes, "seed": SEED},
        actor=ACTOR,
    )
    with timed("train"):
        training = _train("2/6 training on the corrections with SFT", order, bar)
    policy = training["policy"]
    with timed("evaluate"), bar("3/6 evaluating on held-out prompts, against the app's answers") as progress:
        evaluation = evaluate(
            EvaluationOrder(policy=policy, compare="incumbent", actor=ACTOR), progress.update
        )
    with references_shared():
        with timed("adapter"), bar("4/6 the adapter on the base's own file") as progress:
            files = [_exported(policy, "gguf-lora", "", progress)]
        adapter, original = Path(files[0]["path"]), _original(base.path)
        with (
            timed("promote and answer"),
            bar("5/6 promoting, and answering through the gateway") as progress,
        ):
            refusal = _promoted(policy)
            name = policy if refusal else TRIAGE
            answers = [
                _asked("the gateway", lambda ticket: _gateway_answer(name, ticket), progress),
                _file_asked(f"adapter on {original.name}", original, adapter, progress),
            ]
        for quantization in QUANTIZATIONS:
            with timed(quantization), bar(f"6/6 exporting to GGUF, {quantization}") as progress:
                files.append(_exported(policy, "gguf", quantization, progress))
                answers.append(_file_asked(quantization, Path(files[-1]["path"]), None, progress))
    return ModelDemo(model, policy, not refusal, refusal, training, evaluation, answers, files, seconds)


def _decisions_import(count: int) -> None:
    """Import the triage decisions; existing ones stay."""
    with tempfile.TemporaryDirectory(prefix="ratchet-demo-") as scratch:
        path = Path(scratch) / "triage.jsonl"
        rows = decision_rows(count, seed=SEED)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        import_.order_import(import_.ImportOrder(path, agent=TRIAGE, simulated=True))


def _exported(policy: str, form: str, quantization: str, progress: ProgressReporter) -> dict[str, Any]:
    """The GGUF file of an export, with its check."""
    order = ExportOrder(policy=policy, format=form, quantization=quantization, actor=ACTOR)
    made = export(order, progress.update)
    file = next(file for file in made["files"] if str(file["path"]).endswith(".gguf"))
    return {"form": quantization or "adapter", **file, "checked": made["checked"]}


def _promoted(name: str) -> str:
    """Promote a policy; returns the gate's refusal or ""."""
    try:
        policy_promote(policy_get(name), actor=ACTOR)
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
    """The GGUF file that a base model was made from, else the one that serves it."""
    if (Path(folder) / ADDED_FILE).is_file() and (file := AddedModel.load(Path(folder)).gguf):
        return Path(folder) / file
    found = base_file(Model(BASE, folder))
    assert found is not None, "exporting the adapter writes it"
    return found
