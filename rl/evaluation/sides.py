"""What stands beside a policy in its evaluation: a hosted opponent, checks of answers, a classifier, a quantised base.

A hosted policy's upstream is asked each held-out prompt once per request. Torch is imported in functions alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings

from feedback.messages import response_of
from rl.agents import get_agent
from rl.agents.base import Agent, Row
from rl.datasets import DatasetRefused, prepare_training_dataset, snapshot_rows
from rl.jobs.linear import fitted_by
from rl.jobs.method_selection import method_chosen
from rl.jobs.trainer import hardware_detect
from rl.linear.model import WEIGHTS as LINEAR_WEIGHTS
from rl.linear.model import LinearPolicy
from rl.linear.rows import LinearRefused
from rl.models import Policy, Snapshot
from rl.recipes import LinearRecipe
from rl.reward_models.service import rewards_located
from rl.rewards import answers as right_answers
from rl.rewards.answers import rows_rewarded
from rl.rewards.base import RewardFunction
from rl.rewards.catalogue import LEARNED_REWARD, MODEL, rewards_named
from rl.serving.base import BASE, Answer, Ask, BackendFailed, Endpoint, Model, ServingRefused
from rl.serving.decision_facts import cost_usd
from rl.serving.fallback import upstream_backend
from rl.serving.files import base_file, model_of
from rl.serving.llama import LlamaPolicy
from rl.serving.routing import budget_reached, cost_keep, serving_settings

if TYPE_CHECKING:
    from rl.training.held_out import HeldOutPrompt
    from rl.training.policy import Generation, LoadedPolicy
    from rl.training.sides import LinearSide

    Answerer = Callable[[HeldOutPrompt], Generation]

AT_ONCE = 8
"""Requests at once."""
TRIES = 4
LONGEST_PAUSE_S = 60.0
"""Longest wait for an upstream that is busy, before one of the TRIES."""


class HostedFailed(ValueError):
    """An upstream that did not answer a held-out prompt; the message says why and what to do."""


def cache_file() -> Path:
    """Answers of hosted models by request. Removed where anything is erased: an answer may repeat its prompt."""
    home: Path = settings.RATCHET_HOME
    return home / "cache" / "hosted-answers.sqlite3"


def is_linear(folder: Path) -> bool:
    """True of a folder that holds a linear policy, false of one with an adapter."""
    return (folder / LINEAR_WEIGHTS).is_file()


def side_load(
    adapter: Path | None, base_model: str, agent: Agent, *, quantization: str = "none"
) -> LoadedPolicy | LinearSide:
    """A policy's files as a side of an evaluation, on this machine; None: the base model alone.

    Raises the training package's PolicyLoadError.
    """
    from rl.training.policy import load_policy
    from rl.training.sides import LinearSide

    if adapter is not None and is_linear(adapter):
        return LinearSide(LinearPolicy.load(adapter), agent, adapter=str(adapter))
    cache_dir = settings.RATCHET_HOME / "cache"
    hardware = hardware_detect()
    return load_policy(base_model, adapter, hardware=hardware, quantization=quantization, cache_dir=cache_dir)


@dataclass(frozen=True)
class HostedSide:
    """A hosted policy: it gives answers and no log-probabilities."""

    policy: Policy
    progress: Callable[[str], None] = lambda line: None

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def title(self) -> str:
        return self.policy.title

    def answers(self, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        """The answer to each prompt, as the gateway would ask for it; None where the upstream refuses it. Raises
        HostedFailed, also where it refuses all."""
        from rl.training.policy import Generation
        from rl.training.run import RowCache

        model = model_of(self.policy)
        endpoint = model.endpoint
        assert endpoint is not None
        asks = [self._ask(prompt) for prompt in prompts]
        keys = [_key(endpoint, model, ask) for ask in asks]
        cache = RowCache(cache_file())
        known = cache.get(keys)
        missing = {key: ask for key, ask in zip(keys, asks, strict=True) if key not in known}
        if missing and budget_reached(self.policy.agent):
            raise HostedFailed(
                f"agent {self.policy.agent} has spent its budget of this month: raise it in its settings"
            )
        if missing:
            self.progress(f"asking {self.name} {len(missing)} of {len(keys)} held-out prompts")
        refusals: list[ServingRefused] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for key, answer in zip(
                missing, pool.map(partial(_answer, endpoint, model), missing.values()), strict=True
            ):
                if isinstance(answer, ServingRefused):
                    refusals.append(answer)
                    continue
                cost_keep(self.policy.agent, cost_usd(answer, model))
                text = response_of([answer.message]).value
                said = text if isinstance(text, str) else json.dumps(text)
                found = [said, answer.tokens_out or 0, answer.finish_reason or "stop"]
                known[key] = json.dumps(found).encode()
                cache.put({key: known[key]})
        if refusals and not known:
            raise HostedFailed(f"{model.name} refused every held-out prompt: {refusals[0]}") from refusals[0]
        if refusals:
            self.progress(f"{self.name} refused {len(refusals)} held-out prompts, such as: {refusals[0]}")
        return [Generation(*json.loads(known[key])) if key in known else None for key in keys]

    def _ask(self, prompt: HeldOutPrompt) -> Ask:
        agent, limits = get_agent(self.policy.agent), serving_settings(self.policy.agent)
        state = prompt.row.get("state")
        schema = agent.response_schema(state if isinstance(state, Mapping) else None)
        return Ask(
            prompt.messages,
            limits.max_tokens,
            temperature=limits.temperature,
            response_schema=schema if agent.structured else None,
        )


def _answer(endpoint: Endpoint, model: Model, ask: Ask) -> Answer | ServingRefused:
    """An answer, waited for where the upstream is busy, or its refusal. Raises HostedFailed."""
    timeout_s = endpoint.timeout_s or settings.SERVING_TIMEOUT_S
    for attempt in range(TRIES):
        try:
            return upstream_backend(endpoint).answer(ask, model, timeout_s)
        except ServingRefused as refusal:
            return refusal
        except BackendFailed as failure:
            if attempt == TRIES - 1 or failure.kind not in ("busy", "open", "failed", "timeout"):
                raise HostedFailed(
                    f"{model.name} did not answer a held-out prompt: {failure}. Answers so far are kept: try again "
                    "later, or compare with base"
                ) from failure
            time.sleep(min(failure.retry_after_s, LONGEST_PAUSE_S))
    raise AssertionError("the last attempt returns or raises")


def _key(endpoint: Endpoint, model: Model, ask: Ask) -> bytes:
    """SHA-256 of whatever an answer depends on."""
    asked = [
        endpoint.url,
        endpoint.dialect,
        endpoint.schemas,
        model.base_model,
        dict(model.parameters),
        list(ask.messages),
        ask.max_tokens,
        ask.temperature,
        ask.response_schema,
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).digest()


Check = Callable[[Sequence[Row], Sequence[str]], list[float | None]]
"""(held-out rows, one answer each) -> a value each, or None where nothing can be said."""

TRAINED_BY_REWARDS = ("ppo", "grpo", "rlhf")
"""Methods whose recipe names rewards."""


def tests_check(agent: str) -> Check:
    """1 where an answer passes its prompt's tests or is the right one, else 0; None where neither is known.

    Code is run only where ENABLE_CODE_EXECUTION says so, in the sandbox.
    """
    answer = rewards_named(["answer"])
    code = rewards_named(["code_execution"], code_execution=True) if settings.ENABLE_CODE_EXECUTION else []

    def check(rows: Sequence[Row], texts: Sequence[str]) -> list[float | None]:
        verdicts: list[float | None] = [None] * len(rows)
        answered = [
            i
            for i, row in enumerate(rows)
            if any((row.get("facts") or {}).get(n) for n in right_answers.COLUMNS)
        ]
        rest = [i for i in range(len(rows)) if i not in set(answered)]
        for functions, places in ((answer, answered), (code, rest)):
            if functions and places:
                given = rows_rewarded(
                    functions, [rows[i] for i in places], [texts[i] for i in places], agent=agent
                )
                for i, reward in zip(places, given, strict=True):
                    verdicts[i] = None if reward.passed is None else float(reward.passed)
        return verdicts

    return check


def rewards_check(specs: str, agent: str) -> Check:
    """The mean reward in [0, 1] of what applies, of located specs separated by commas; the models are loaded once."""
    from rl.training.rewarding import rewards_of

    functions: list[RewardFunction] = rewards_of(specs)

    def check(rows: Sequence[Row], texts: Sequence[str]) -> list[float | None]:
        return [reward.value for reward in rows_rewarded(functions, rows, texts, agent=agent)]

    return check


def rewards_of_training(policy: Policy | None) -> str:
    """The rewards a policy was trained on, as its recipe names them; empty where it was not trained on any."""
    if policy is None or policy.run is None or policy.run.method not in TRAINED_BY_REWARDS:
        return ""
    return str(policy.run.recipe.get("reward", ""))


def barred_reason(specs: str, policy: Policy | None, agent: str) -> str:
    """Reason why rewards may not carry the accuracy rule: a learnt one among them is what the policy was
    trained on, and every policy pleases the judge it was trained to please (Gao, Schulman & Hilton 2023,
    arXiv 2210.10760). It is named as in `specs`. Empty where none is."""
    trained = _reward_model_folders(rewards_of_training(policy), agent)
    same = [name for folder, name in _reward_model_folders(specs, agent).items() if folder in trained]
    return f"{same[0]} is the reward that {policy.name if policy else 'it'} was trained with" if same else ""


def _reward_model_folders(specs: str, agent: str) -> dict[str, str]:
    """The learnt rewards among specs: the folder each lies in, where that can be told -> how it is named."""
    found = {}
    for spec in (one.strip() for one in specs.split(",")):
        if spec.startswith((MODEL, LEARNED_REWARD)):
            try:
                found[rewards_located(spec, agent)] = spec
            except ValueError:
                found[spec] = spec  # its files are gone: the name has to do
    return found


logger = logging.getLogger("rl.linear")

ROWS_MOST = 5_000
"""Training rows that a baseline learns from, the first of the snapshot: fitting must not take longer than
evaluating."""


def baseline_of(policy: Policy | None, agent: Agent) -> tuple[LinearPolicy | None, dict[str, object]]:
    """The classifier and what its figures say beside themselves; a refusal says why there is none, and both are empty
    for agents whose answers are wordings, and for a folder whose training rows nobody knows.

    Of a run on prompts alone (PPO, GRPO) it learns from the feedback there is now, the training side of it.
    """
    snapshot = policy.run.snapshot if policy is not None and policy.run is not None else None
    if snapshot is None:
        return None, {}
    try:
        rows, whence = _rows(snapshot)
        found = fitted_by(LinearRecipe(), rows, agent)
    except (LinearRefused, DatasetRefused) as refusal:
        logger.info("no baseline for %s: %s", policy, refusal)
        return None, {"refused": str(refusal)} if agent.discrete else {}
    return found.policy, {
        "name": "linear classifier",
        "trained_on": {"rows": len(rows), "of": whence, "feedback": found.policy.facts["feedback"]},
        "seconds": round(found.seconds, 3),
    }


def _rows(snapshot: Snapshot) -> tuple[Sequence[Row], str]:
    if snapshot.kind != Snapshot.Kind.PROMPTS:
        return list(snapshot_rows(snapshot, "train"))[:ROWS_MOST], f"snapshot {snapshot.pk}"
    chosen = method_chosen(snapshot.agent, "linear")
    prepared = prepare_training_dataset(snapshot.agent, kind=chosen.knobs["feedback"], dry_run=True)
    return list(prepared.rows("train"))[:ROWS_MOST], "the feedback there is now"


class QuantisedBaseRefused(ValueError):
    """No GGUF file of the base model, or an adapter that none can hold; the message says what to do."""


@contextmanager
def quantised_answerer(base_model: str, adapter: Path, agent: Agent) -> Iterator[tuple[Answerer, Path]]:
    """A function that answers a held-out prompt as the agent is served, and the base's file that it answers on: the one
    that the base was made from, else the one that serving uses. Raises QuantisedBaseRefused, ExportRefused."""
    from rl.export.gguf_lora import lora_write
    from rl.export.gguf_names import layout_of
    from rl.export.source import base_identity, original_of, source_open

    source = source_open(base_model, adapter)
    original, note = original_of(source.base)
    identity = base_identity(base_model, source.base)
    file = original.file if original else base_file(Model(BASE, base_model, identity))
    if file is None:
        raise QuantisedBaseRefused(
            f"expected a GGUF file of {base_model}, found none{f' ({note})' if note else ''}; make one: "
            f"export_model --base-model {base_model} --format gguf --quantization q4_k_m"
        )
    layout = layout_of(source.weights.base.config)
    if layout is None or source.weights.replaced_names():
        raise QuantisedBaseRefused(
            f"expected an adapter that llama.cpp loads, found {adapter}; evaluate it without --quantization gguf"
        )
    with tempfile.TemporaryDirectory(prefix="ratchet-evaluate-") as folder:
        lora = Path(folder) / "adapter.gguf"
        lora_write(source, layout, lora, source.name)
        with LlamaPolicy(file) as llama:
            yield lambda prompt: _quantised_answer(llama, lora, agent, prompt), file


def _quantised_answer(llama: LlamaPolicy, lora: Path, agent: Agent, prompt: HeldOutPrompt) -> Generation:
    from rl.training.policy import Generation

    state = prompt.row.get("state")
    messages = [dict(message) for message in prompt.messages]
    if choices := list(agent.choices(state)):
        scores = llama.log_probabilities(messages, choices, lora)
        return Generation(choices[max(range(len(choices)), key=scores.__getitem__)], 1, "stop")
    asked = Ask(messages, agent.max_new_tokens, temperature=0, response_schema=agent.schema_served(state))
    found = llama.answer(asked, lora)
    return Generation(
        found.text, found.tokens_out or 0, "stop" if found.finish_reason == "stop" else "length"
    )


def unheard(done: int, total: int, text: str) -> None:
    """Progress that nobody listens to."""
