"""Answer with a linear policy in this process: numpy alone, no base model, each answer with its exact probability."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Lock

from django.conf import settings

from rl.agents.base import InvalidResponse
from rl.agents.template import answer_of_schema
from rl.checksums import FileDamaged, file_check
from rl.linear.model import LinearPolicy, LinearPolicyError
from rl.registry.integrity import damage_notify
from rl.serving.base import Ask, BackendFailed, BackendUnable, Model, Piece, SentMessage
from rl.serving.files import files_ensure

LINEAR = "linear"
"""Name of the backend, and kind of the models it answers for."""

MAX_POLICIES = 32
"""Policies held in memory; one takes a megabyte or two."""

_policies: OrderedDict[tuple[str, str], LinearPolicy] = OrderedDict()
_lock = Lock()


class LinearBackend:
    """Linear policies: the best answer, or one drawn at the temperature that was asked for."""

    name = LINEAR

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        if ask.extra.get("tools"):
            raise BackendUnable(
                "a linear policy chooses among listed answers and cannot call tools", param="tools"
            )
        policy = linear_policy(model)
        options = _options(policy, ask)
        logps = policy.log_probabilities(ask.messages, options)
        drawn = choose(
            logps,
            temperature=ask.temperature or 0.0,
            random=Random(ask.seed) if ask.seed is not None else None,
        )
        yield Piece.of_text(options[drawn.index])
        yield Piece(
            end=True,
            finish_reason="stop",
            log_probability=math.log(drawn.propensity),
            chosen=True,
            confidence=math.exp(logps[drawn.index]),
        )

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        """log p of each response among them, in nats."""
        return linear_policy(model).log_probabilities(messages, responses)


def linear_policy(model: Model) -> LinearPolicy:
    """The policy of a model, read once per file. Raises BackendFailed where its file is gone or damaged."""
    files_ensure(model)
    path = Path(settings.RATCHET_HOME / model.adapter)
    key = (str(path), model.adapter_sha256)
    with _lock:
        try:
            file_check(path, model.adapter_sha256, "restore it from a backup, or roll back")
            if key not in _policies:
                _policies[key] = LinearPolicy.load(path.parent)
                while len(_policies) > MAX_POLICIES:
                    _policies.popitem(last=False)
        except FileDamaged as damage:
            damage_notify(damage, f"policy {model.name}")
            raise BackendFailed(str(damage), kind="damaged" if damage.found else "missing") from damage
        except LinearPolicyError as fault:
            raise BackendFailed(str(fault), kind="missing") from fault
        _policies.move_to_end(key)
        return _policies[key]


def listed_answers(model: Model, messages: Sequence[SentMessage]) -> list[str]:
    """Answers a policy may give to a prompt that lists none; empty where it knows none, or its file is gone."""
    try:
        return linear_policy(model).options(messages)
    except (LinearPolicyError, BackendFailed):
        return []  # whoever steps in answers, and the try to answer says why


def _options(policy: LinearPolicy, ask: Ask) -> list[str]:
    """The answers that may be given: the closed set of the agent, else those learnt from that fit the schema."""
    if any(not _is_text(message.get("content")) for message in ask.messages):
        raise BackendUnable("a linear policy reads text only", param="messages")
    if ask.answers:
        return list(ask.answers)
    try:
        options = policy.options(ask.messages)
    except LinearPolicyError as fault:
        raise BackendUnable(str(fault), param="messages") from fault
    schema: Mapping[str, object] | None = ask.response_schema
    if schema is not None:
        options = [answer for answer in options if _fits(answer, schema)]
    if not options:
        raise BackendUnable(
            f"none of this linear policy's {len(policy.answers)} answers matches the requested schema",
            param="response_format",
        )
    return options


def _is_text(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)
    return content is None or isinstance(content, str)


def _fits(answer: str, schema: Mapping[str, object]) -> bool:
    try:
        answer_of_schema(answer, schema)
    except InvalidResponse:
        return False
    return True


# --- Choosing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CandidateChoice:
    """Response drawn among the listed ones, and from what distribution."""

    index: int
    probabilities: tuple[float, ...]
    """Of every response, in their order; sums to 1."""

    @property
    def propensity(self) -> float:
        return self.probabilities[self.index]


def choice_probabilities(
    log_probabilities: Sequence[float], *, temperature: float = 0.0, epsilon: float = 0.0
) -> tuple[float, ...]:
    """The distribution a choice is drawn from: (1 - epsilon) softmax(log p / temperature) + epsilon / K.

    log_probabilities: of K responses, in nats. temperature 0: the best one (the first of equals); 1: as the policy
    itself would answer among these. epsilon in [0, 1]: the share drawn evenly (Sutton and Barto 2018, 2.2).
    Raises ValueError on an empty list, a temperature below 0 or an epsilon outside [0, 1].
    """
    if not log_probabilities:
        raise ValueError("expected at least one response to choose from, found none")
    if temperature < 0 or not 0 <= epsilon <= 1:
        raise ValueError(
            f"expected a temperature of at least 0 and an epsilon in [0, 1], found {temperature} and {epsilon}"
        )
    best = max(log_probabilities)
    if temperature == 0:
        first = log_probabilities.index(best)
        shares = [float(i == first) for i in range(len(log_probabilities))]
    else:
        weights = [math.exp((value - best) / temperature) for value in log_probabilities]
        total = math.fsum(weights)
        shares = [weight / total for weight in weights]
    even = epsilon / len(shares)
    return tuple((1 - epsilon) * share + even for share in shares)


def choose(
    log_probabilities: Sequence[float],
    *,
    temperature: float = 0.0,
    epsilon: float = 0.0,
    random: Random | None = None,
) -> CandidateChoice:
    """Draw one of the responses from `choice_probabilities`."""
    shares = choice_probabilities(log_probabilities, temperature=temperature, epsilon=epsilon)
    drawn = (random or Random()).random()
    passed = 0.0
    for index, share in enumerate(shares):
        passed += share
        if drawn < passed:
            return CandidateChoice(index, shares)
    # the shares' sum may end a rounding error below 1: the last one that can be drawn at all
    return CandidateChoice(max(i for i, share in enumerate(shares) if share > 0), shares)
