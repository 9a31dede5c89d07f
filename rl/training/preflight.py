"""Preflight: greedy answers of the policy to a few prompts before training, and to the same prompts after it.

A training that begins with a policy whose answers the agent cannot act on mostly ends with one. The check takes
seconds. PPO and GRPO, which sample within the form of the answer, are checked so, and what they sample is probed
(`rl.training.rewarding`). An agent that chooses among listed responses is served by their probabilities: what it writes
freely is only told.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from rl.agents import get_agent
from rl.agents.base import Agent, InvalidResponse, Row
from rl.recipes import BASE, DPORecipe, KTORecipe, Recipe, RewardModelRecipe, SFTRecipe
from rl.statistics import wilson_interval
from rl.training.chat_template import prompt_messages
from rl.training.encoding import Encoder
from rl.training.hardware import Hardware
from rl.training.profiler import ASKABLE, MeasuredBase
from rl.training.result import TrainListener, TrainResult
from rl.training.rows import demonstrations_encoded, labels_encoded, pairs_encoded, rows_writable

if TYPE_CHECKING:
    from transformers import Trainer

    from rl.training.policy import LoadedPolicy

PROMPTS = 24
"""Prompts that are answered, spread over the rows: none valid of so many means less than 14 % are (95 %, Wilson)."""

QUICK = 50_000_000
"""Parameters up to which a plan asks a base model as many prompts as a training does."""

PLAN_PROMPTS = 8
"""The same for a training that is only planned, of a larger base model."""

LEAST_ROOM = 32
"""Fewest tokens that an answer is given."""

LOW_VALID_SHARE = 0.5
"""Share of valid answers below which a warning is shown."""

FORM_WEIGHT = 1.0
"""`sft_weight` of a preference training that begins with few valid answers and shows none by itself."""

MAX_FALL = 0.1
"""Fall of the share of valid answers over a training from which a note reports it."""

FREE, WITHIN, CHOICE = "written", "written within the form", "chosen"


@dataclass(frozen=True)
class AnswerCheck:
    """Answers of a policy to a few prompts, and whether its agent can act on them."""

    asked: int
    valid: int
    low: float | None
    high: float | None
    """95 % interval of the valid share (Wilson)."""
    served: str
    """`chosen` where the agent picks among listed responses, which are valid by themselves; `written within the form`
    where training samples them so; else `written`."""
    tokens: float
    """Mean length of an answer."""
    example: str = ""
    """The first answer that is not valid, shortened."""
    problem: str = ""
    """Problem of the answer by its agent."""

    @property
    def share(self) -> float:
        return self.valid / self.asked

    @property
    def few(self) -> bool:
        """True if less than half of the answers are valid."""
        return self.share < LOW_VALID_SHARE

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"share": self.share}

    def words(self) -> str:
        """`3 of 24 answers valid (13 %)`, with what is wrong with one that is not."""
        text = f"{self.valid} of {self.asked} answers valid ({100 * self.share:.0f} %)"
        return text + (f"; one says {self.example!r}: {self.problem}" if self.example else "")


def answer_check_of(
    answers: Sequence[tuple[str, Any]], agent: Agent, *, served: str = FREE, tokens: float = 0.0
) -> AnswerCheck:
    """Check of (answer, state of its prompt) pairs, at least one."""
    valid, example, problem = 0, "", ""
    for text, state in answers:
        try:
            agent.parse(text, state)
            valid += 1
        except InvalidResponse as error:
            if not problem:
                example, problem = text[:80], str(error)[:160]
    share = wilson_interval(valid, len(answers)).as_dict()
    return AnswerCheck(len(answers), valid, share["low"], share["high"], served, tokens, example, problem)


def answers_check(
    policy: LoadedPolicy,
    rows: Sequence[Row],
    agent: str,
    *,
    within: bool = False,
    prompts: int = PROMPTS,
) -> AnswerCheck | None:
    """Greedy answers to some of the rows' prompts, free or `within` the form that the agent serves; None for an agent
    of free text, or without a row. An answer is cut at twice the tokens of the longest that was recorded."""
    definition = get_agent(agent or "assistant")
    if not definition.discrete:
        return None
    rows, _ = policy.encoder.written(rows)
    if not rows:
        return None
    chosen = [rows[i] for i in sorted({len(rows) * i // prompts for i in range(prompts)})]
    from rl.training.policy import generate

    was_training = policy.model.training
    policy.model.eval()
    try:
        messages = [prompt_messages(row, number) for number, row in enumerate(chosen)]
        states = [row.get("state") for row in chosen]
        forms = [definition.form_served(state) for state in states] if within else None
        room = _room(policy, rows, definition)
        made = generate(policy, messages, max_new_tokens=room, forms=forms)
    finally:
        policy.model.train(was_training)
    listed = all(_has_options(definition, state) for state in states)
    return answer_check_of(
        list(zip((answer.text for answer in made), states, strict=True)),
        definition,
        served=CHOICE if listed else WITHIN if within else FREE,
        tokens=sum(answer.tokens for answer in made) / len(made),
    )


def _room(policy: LoadedPolicy, rows: Sequence[Row], agent: Agent) -> int:
    """Tokens that an answer is given: what its agent allows, or twice the longest answer that was recorded."""
    recorded = [row[side] for row in rows for side in ("completion", "chosen", "rejected") if side in row]
    if not recorded or not all(isinstance(said, str) for said in recorded):
        return agent.max_new_tokens
    longest = len(policy.tokenizer(max(recorded, key=len))["input_ids"])
    return min(agent.max_new_tokens, max(LEAST_ROOM, 2 * longest))


def _has_options(agent: Agent, state: Mapping[str, Any] | None) -> bool:
    """True if the agent chooses among listed responses in this state, or among the same few in any."""
    return bool(agent.choices(state))


def teaches_form(recipe: Recipe) -> bool:
    """True if a method shows answers to be imitated, and not only which of two is better."""
    knobs = recipe.as_dict()
    warms_up = "loss" in knobs and "reward" not in knobs and knobs["warm_up_steps"] > 0
    return "sources" in knobs or knobs.get("sft_weight", 0.0) > 0 or warms_up


def form_taught(recipe: Recipe, check: AnswerCheck | None) -> Recipe:
    """The recipe with supervised learning of the good responses beside the preference loss, where few answers are
    valid before it.

    DPO and KTO move what is likelier of answers that were given; an agent whose form the base model does not write
    would go on without a valid answer (0 of 20 through the gateway, docs/training-reference.md).
    """
    knobs = recipe.as_dict()
    if (
        check is None
        or check.share >= LOW_VALID_SHARE
        or check.served == CHOICE
        or "sft_weight" not in knobs
        or teaches_form(recipe)
    ):
        return recipe
    return recipe.with_knobs(sft_weight=FORM_WEIGHT)


def warning_of(check: AnswerCheck | None, recipe: Recipe) -> str:
    """Warning before a training; empty where at least half of the answers are valid."""
    if check is None or not recipe.makes_policy or check.share >= LOW_VALID_SHARE:
        return ""
    if check.served == CHOICE:
        return f"{check.words()}. Where the agent chooses among what is listed each answer is valid (/api/decide/)"
    shown = (
        f"; the good ones are shown too (sft_weight={FORM_WEIGHT:g})"
        if form_taught(recipe, check) != recipe
        else ""
    )
    return f"FEW VALID ANSWERS before training{shown}: {check.words()}"


def after_words(before: AnswerCheck | None, after: AnswerCheck | None) -> str:
    """Change of the share of valid answers by a training, in words; empty where it changed little and enough are
    valid."""
    if before is None or after is None:
        return ""
    figures = (
        f"{100 * before.share:.0f} % of {after.asked} answers valid before, {100 * after.share:.0f} % after"
    )
    if after.valid == 0 and after.served != CHOICE:
        return f"NO VALID ANSWER after training, {figures}: it cannot answer. {after.words()}"
    if after.share < before.share - MAX_FALL:
        return f"FEWER VALID ANSWERS: {figures}; {after.words()}"
    if after.share < LOW_VALID_SHARE and after.served != CHOICE:
        return f"FEW VALID ANSWERS after training: {figures}; {after.words()}"
    return ""


@contextlib.contextmanager
def start_policy(policy: LoadedPolicy, recipe: Recipe) -> Iterator[LoadedPolicy]:
    """Inside, the base answers with the adapter that training starts from, where it starts from one."""
    start = str(recipe.as_dict().get("start_from", BASE))
    if start == BASE or not Path(start).is_dir():
        yield policy
        return
    from peft import PeftModel

    base = policy.model
    policy.model = PeftModel.from_pretrained(base, start, use_safetensors=True)
    try:
        yield policy
    finally:
        policy.model = policy.model.unload()


def base_check(
    base_model: str,
    rows: Sequence[Row],
    *,
    agent: str,
    hardware: Hardware,
    recipe: Recipe | None = None,
    quantization: str = "none",
    cache_dir: Path | None = None,
    phase: Callable[[str], None] | None = None,
) -> AnswerCheck | None:
    """Check of a base model, loaded for it, or of the adapter that a recipe starts from; None as `answers_check`."""
    if not get_agent(agent or "assistant").discrete or not rows:
        return None
    from rl.training.policy import load_policy

    say = phase or (lambda name: None)
    say("loading the model")
    policy = load_policy(base_model, hardware=hardware, quantization=quantization, cache_dir=cache_dir)
    say("asking the model a few prompts")
    if recipe is None:
        return answers_check(policy, rows, agent)
    with start_policy(policy, recipe):
        return answers_check(policy, rows, agent, within=recipe.constrains)


def plan_check(
    base: MeasuredBase,
    recipe: Recipe,
    rows: Sequence[Row],
    *,
    agent: str,
    phase: Callable[[str], None],
) -> AnswerCheck | None:
    """Check for a training that is only planned; None for free text, a reward model, and a base of more than
    ASKABLE parameters, which would take longer to load than a plan may.

    What the base answered to the same prompts before is taken from its cache.
    """
    definition = get_agent(agent or "assistant")
    if not recipe.makes_policy or not definition.discrete or not rows:
        return None
    if base.parameters > ASKABLE:
        return None
    prompts = PROMPTS if base.parameters <= QUICK else PLAN_PROMPTS
    start = str(recipe.as_dict().get("start_from", BASE))
    asked = json.dumps(
        [rows, agent, agent_identity(definition), start, recipe.constrains, prompts], default=str
    )
    key = base.key("answers", asked)
    known = base.find(key) if start == BASE else None
    if known is not None:
        check: AnswerCheck | None = AnswerCheck(**known)
    else:
        phase("loading the model")
        policy = base.policy
        phase("asking the model a few prompts")
        with start_policy(policy, recipe):
            check = answers_check(policy, rows, agent, within=recipe.constrains, prompts=prompts)
        if check is not None:
            base.store(key, asdict(check))
    return check


def agent_identity(agent: Agent) -> str:
    """What makes two agents equal, as text: the same in every process, so without its functions."""
    return f"{type(agent).__qualname__} {[getattr(agent, one.name) for one in fields(agent) if one.compare]}"


def tokens_check(
    base: MeasuredBase, recipe: Recipe, rows: Sequence[Row], eval_rows: Sequence[Row] = ()
) -> tuple[dict[str, int], dict[str, int]]:
    """Rows of each split that are left once they are tokens, and why others of the train split are not, by the code
    that the training runs.

    Only the tokenizer is loaded, and tokens that an earlier plan or run has made are read from the cache. Raises
    TrainingRefused as the training would: labels of one kind alone, pairs that encode alike, nothing that the base
    model's chat template can render.
    """
    if not rows or (isinstance(recipe, RewardModelRecipe) and recipe.is_linear):
        return {"train": len(rows), "eval": len(eval_rows)}, {}
    count = _counter(recipe)
    kept, left_out = count(base.encoder, rows, True)
    return {"train": kept, "eval": count(base.encoder, eval_rows, False)[0] if eval_rows else 0}, left_out


def _counter(recipe: Any) -> Callable[[Encoder, Sequence[Any], bool], tuple[int, dict[str, int]]]:
    """Function of (encoder, rows, whether any are needed) that counts what a method keeps, and what it leaves out."""

    def pairs(encoder: Encoder, rows: Sequence[Row], needed: bool) -> tuple[int, dict[str, int]]:
        found = pairs_encoded(encoder, rows, recipe, needed=needed)
        return len(found.rows), found.left_out.counts

    def labels(encoder: Encoder, rows: Sequence[Row], needed: bool) -> tuple[int, dict[str, int]]:
        items, left_out = labels_encoded(encoder, rows, recipe, needed=needed)
        return len(items), left_out.counts

    def demonstrations(encoder: Encoder, rows: Sequence[Row], needed: bool) -> tuple[int, dict[str, int]]:
        found = demonstrations_encoded(encoder, rows, recipe, needed=needed)
        return len(found.items), found.left_out.counts

    def written(encoder: Encoder, rows: Sequence[Row], needed: bool) -> tuple[int, dict[str, int]]:
        kept, left_out = rows_writable(encoder, rows, needed=needed)
        return len(kept), left_out.counts

    kinds = ((DPORecipe, pairs), (KTORecipe, labels), (SFTRecipe, demonstrations))
    return next((count for kind, count in kinds if isinstance(recipe, kind)), written)


def train_with_checks(
    trainer: Trainer,
    recipe: Recipe,
    rows: Sequence[Row],
    eval_rows: Sequence[Row],
    *,
    agent: str,
    listener: TrainListener,
) -> TrainResult:
    """Train, with a check of the policy's answers before and after, on prompts of the eval split where it has enough.

    Both are stored in the result, and their warnings in its notes.
    """
    asked_recipe = recipe
    check_rows = eval_rows if len(eval_rows) >= PROMPTS else [*eval_rows, *rows]
    checks: dict[str, AnswerCheck | None] = {"before": None, "after": None}
    notes = []
    if recipe.makes_policy:
        policy = trainer.load_base_model()
        listener.on_phase("asking the model a few prompts")
        with start_policy(policy, recipe):
            checks["before"] = answers_check(policy, check_rows, agent, within=recipe.constrains)
        trainer.recipe = recipe = form_taught(recipe, checks["before"])
        if warning := warning_of(checks["before"], asked_recipe):
            notes.append(warning)
            listener.on_note(warning)
    listener.on_phase("getting the rows ready")
    result: TrainResult = trainer.train(rows, eval_rows)
    alone = not distributed.is_initialized()  # what is spread over processes is judged by evaluate_model
    if recipe.makes_policy and checks["before"] is not None and result.status == "succeeded" and alone:
        listener.on_phase("asking the trained model the same prompts")
        within = recipe.constrains
        checks["after"] = answers_check(trainer.load_base_model(), check_rows, agent, within=within)
        if warning := after_words(checks["before"], checks["after"]):
            notes.append(warning)
            listener.on_note(warning)
    result.notes[:0] = notes
    result.preflight = {name: check.as_dict() for name, check in checks.items() if check is not None}
    return result
