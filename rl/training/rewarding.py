"""Rewards of sampled answers: prompts as tokens, the functions and models that judge, the probe before a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, Unpack

import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file

from packed_forward.logps import collate
from rl.agents.base import Agent, Row
from rl.recipes.base import SampledRecipe
from rl.recipes.reward_model import CAUSAL, FACTS
from rl.rewards.answers import INSIST, inapplicable_reason, reward_with_validity, row_sample
from rl.rewards.base import RewardFunction, RewardSample
from rl.rewards.catalogue import AUTO, LEARNED_REWARD, MODEL, rewards_named
from rl.training.adapter_trainer import AdapterTrainer, SplitT, TrainRows
from rl.training.chat_template import prompt_messages
from rl.training.constrained_generation import AnswerForms
from rl.training.encoding import EncodedResponse, Encoder
from rl.training.policy import LoadedPolicy, matmul
from rl.training.result import TrainingFailed, TrainingRefused
from rl.training.reward_scores import RewardModel
from rl.training.rollout import Rollout
from rl.training.run import RunOptions
from rl.training.shared_base import REWARD, SharedBase


@dataclass(frozen=True)
class Prompts:
    """Prompts as tokens, each once, and the rows they came from."""

    rows: list[Row]
    ids: list[list[int]]
    truncated: int
    duplicates: int
    not_written: dict[str, int] = field(default_factory=dict)
    """Rows whose prompt the template cannot write, by reason."""

    @property
    def left_out(self) -> dict[str, int]:
        return self.not_written | ({"repeated prompts": self.duplicates} if self.duplicates else {})


def answer_forms(policy: LoadedPolicy, agent: Agent, *prompts: Prompts) -> AnswerForms:
    """Forms of the answers to these prompts, as the agent serves them; of no agent, and of one of free text, none."""
    forms = policy.answer_forms()
    for some in prompts:
        for row, ids in zip(some.rows, some.ids, strict=True):
            forms.add(ids, agent.form_served(row.get("state")))
    forms.start(prompts[0].ids[:1])  # a form that cannot be enforced is noted before training
    return forms


def prompts_encoded(
    encoder: Encoder,
    rows: Sequence[Row],
    recipe: SampledRecipe,
    say: Callable[[str], None],
    most: int | None = None,
) -> Prompts:
    """Each prompt of the rows once, at most `most` of them, without those that the template cannot write. Raises
    TrainingRefused for rows of another shape."""
    try:
        rows, left_out = encoder.written(rows)
        messages = [prompt_messages(row, number) for number, row in enumerate(rows)]
        first: dict[str, int] = {}
        for number, row in enumerate(rows):
            first.setdefault(
                json.dumps([messages[number], messages[number].tools, row.get("state")], sort_keys=True),
                number,
            )
        kept = list(first.values())[:most]
        ids, cut = encoder.prompts([messages[i] for i in kept], recipe.max_new_tokens, recipe.max_length)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    for note in left_out.notes("prompts"):
        say(note)
    if cut:
        say(f"{cut} prompts were cut (oldest tokens): max_length is {recipe.max_length}")
    return Prompts([rows[i] for i in kept], ids, cut, len(rows) - len(first), left_out.counts)


PROMPTS, SAMPLES = 8, 8
"""Prompts that are asked, and answers to each. A reward that one answer in 20 earns is missed in 4 of 100 probes."""

FORM_PROMPTS = 4
"""Prompts with two different valid answers from which "valid answers earn the same" is reported."""


@dataclass(frozen=True)
class RewardProbe:
    """One sampled answer."""

    prompt: int
    text: str
    score: float
    valid: bool
    """True if the agent could act on it."""


def probe_fault(probed: Sequence[RewardProbe]) -> str:
    """Reason why these answers teach nothing; empty where they may.

    Answers compete with other answers to the same prompt, so what is looked for is one prompt with two scores.
    """
    prompts = sorted({one.prompt for one in probed})
    groups = [[one for one in probed if one.prompt == prompt] for prompt in prompts]
    sample = f"{len(probed)} sampled answers to {len(prompts)} prompts"
    low, high = (pick(one.score for one in probed) for pick in (min, max))
    if not any(one.valid for one in probed):
        return (
            f"none of {sample} is one the agent can act on (one says {probed[0].text[:60]!r}), so each earns the worst "
            "reward: nothing can be learnt from it. Show the form first: train_sft on answers people wrote or liked, "
            f"then --set start_from=POLICY here; or take a larger base model; {INSIST}"
        )
    if all(len({one.text for one in group}) == 1 for group in groups):
        fault = f"the policy gave the same answer each time ({sample}): nothing can be compared"
        return f"{fault}. Raise temperature; {INSIST}"
    if all(_is_uniform(group) for group in groups):
        spread = f"all {low:g}" if _close(low, high) else f"{low:g} to {high:g}, the same within each prompt"
        return (
            f"the reward is constant on a probe of {sample} ({spread}): nothing can be learnt from it. Where no answer "
            "is good enough yet, begin with easier prompts, train_sft on solutions, or a larger base model; where all "
            f"are, give a reward that tells them apart; {INSIST}"
        )
    several = [
        group
        for group in ([one for one in group if one.valid] for group in groups)
        if len({one.text for one in group}) > 1
    ]
    if len(several) >= FORM_PROMPTS and all(_is_uniform(group) for group in several):
        return (
            f"the reward is constant over valid answers on a probe of {sample} (each earned {several[0][0].score:g}): "
            f"only form can be learnt. Give a reward that tells right from wrong; {INSIST}"
        )
    return ""


def _is_uniform(group: Sequence[RewardProbe]) -> bool:
    return all(_close(one.score, group[0].score) for one in group)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


@dataclass(frozen=True)
class Judgement:
    """Scores of a batch, one per response, and each function's own mean over the responses it applied to."""

    scores: list[float]
    parts: dict[str, float]


class Judge:
    """Reward functions and reward models with one voice: their plain mean, and the worst reward for an answer that an
    agent with a schema cannot act on."""

    def __init__(self, functions: Sequence[RewardFunction], agent: Agent) -> None:
        if not functions:
            raise TrainingRefused(
                "expected at least one reward, found none: give --reward agent, a reward model (model:RUN) or the "
                "dotted path of a function"
            )
        self.functions, self.agent = list(functions), agent

    def judge(self, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> Judgement:
        """`rows[rollout.prompt]` is the prompt a response answers: its messages under `prompt`, its `state`.

        Raises TrainingRefused where no function applies to a response, TrainingFailed for a value that is not finite.
        """
        samples = [self._sample(rows[rollout.prompt], rollout) for rollout in rollouts]
        reward_values: list[list[float]] = [[] for _ in rollouts]
        parts: dict[str, float] = {}
        why = ""
        for function in self.functions:
            values = function.score(samples)
            found = [value.raw for value in values]
            why = next((f"{function.name}: {dict(v.detail)}" for v in values if v.raw is None), why)
            self._add(function.name, found, reward_values, parts)
        if not all(reward_values):
            missing = sum(not values for values in reward_values)
            raise TrainingRefused(
                f"no reward applies to {missing} of {len(rollouts)} responses ({why}): give another reward, "
                "or prompts that it applies to"
            )
        means = [math.fsum(values) / len(values) for values in reward_values]
        return Judgement(
            [reward_with_validity(mean, one) for mean, one in zip(means, samples, strict=True)], parts
        )

    def _sample(self, row: Row, rollout: Rollout) -> RewardSample:
        return row_sample(
            row, rollout.text, self.agent.slug, tokens=len(rollout.item.response_ids), ended=rollout.ended
        )

    @staticmethod
    def _add(
        name: str, found: Sequence[float | None], given: list[list[float]], parts: dict[str, float]
    ) -> None:
        if len(found) != len(given):
            raise TrainingFailed(
                f"reward {name} gave {len(found)} values for {len(given)} responses: it must give one for each"
            )
        own = [value for value in found if value is not None]
        broken = next((value for value in own if not math.isfinite(value)), None)
        if broken is not None:
            raise TrainingFailed(f"reward {name} gave {broken!r}: expected a finite number")
        for values, value in zip(given, found, strict=True):
            if value is not None:
                values.append(value)
        if own:
            parts[name] = math.fsum(own) / len(own)


NO_REWARD = "no reward applies"
"""Reason why a prompt was left out."""


def rewardable_prompts(
    prompts: Prompts,
    functions: Sequence[RewardFunction],
    agent: str,
    note: Callable[[str], None],
    *,
    held_out: bool,
) -> Prompts:
    """The prompts that at least one reward can judge answers to. Raises TrainingRefused for none to train on."""
    positions, reason = [], ""
    for i, row in enumerate(prompts.rows):
        reasons = [inapplicable_reason(function, row, agent) for function in functions]
        if all(reasons):
            reason = reasons[0]
        else:
            positions.append(i)
    if not prompts.rows or len(positions) == len(prompts.rows):
        return prompts
    if not positions and not held_out:
        raise TrainingRefused(f"no reward applies to any of {len(prompts.rows)} prompts: {reason}")
    note(
        f"{len(prompts.rows) - len(positions)} of {len(prompts.rows)} prompts left out, as {NO_REWARD}: {reason}"
    )
    return dataclasses.replace(
        prompts, rows=[prompts.rows[i] for i in positions], ids=[prompts.ids[i] for i in positions]
    )


def rewards_probe(
    prompts: Prompts, judge: Judge, answer: Callable[[list[list[int]], int], list[Rollout]], at_once: int
) -> str:
    """Reason why the rewards teach nothing on a few sampled answers; empty where they may.

    `answer` gives so many answers to each of some prompts (tokens), side by side; `at_once` of them at a time.
    """
    size = len(prompts.ids)
    chosen = sorted({size * i // PROMPTS for i in range(min(PROMPTS, size))})
    samples = max(2, min(SAMPLES, at_once))
    probes: list[RewardProbe] = []
    share = max(1, at_once // samples)
    for start in range(0, len(chosen), share):
        asked = chosen[start : start + share]
        rows = [prompts.rows[i] for i in asked]
        rollouts = answer([prompts.ids[i] for i in asked], samples)
        scores = judge.judge(rows, rollouts).scores
        probes += [
            RewardProbe(
                asked[rollout.prompt],
                rollout.text,
                score,
                judge.agent.is_valid(rollout.text, rows[rollout.prompt].get("state")),
            )
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
    return probe_fault(probes)


def valid_share(rollouts: Sequence[Rollout], prompts: Sequence[object], agent: Agent) -> float:
    """Share of answers that the agent can act on; `prompts[rollout.prompt]` is the row an answer belongs to."""
    states = [row.get("state") if isinstance(row, dict) else None for row in prompts]
    return sum(agent.is_valid(one.text, states[one.prompt]) for one in rollouts) / len(rollouts)


HEAD = "base_model.model.score.weight"
"""Name of the score head in a causal reward model's checkpoint."""


class SharedRewardModel(RewardModel):
    """A `RewardModel` that computes on the policy's own frozen base instead of a second copy of it."""

    def __init__(self, base: SharedBase, path: str | Path) -> None:
        """`path`: a checkpoint that `fits` said yes to. Raises TrainingRefused for one that is not whole."""
        path = Path(path)
        facts = json.loads((path / FACTS).read_text("utf-8"))
        super().__init__(base.model, base.policy.encoder, facts, base.policy.hardware)
        self.base = base
        config = LoraConfig.from_pretrained(path)
        tensors = load_file(path / "adapter_model.safetensors", device=str(base.policy.device))
        head = tensors.pop(HEAD, None)
        if head is None:
            raise TrainingRefused(f"expected a score head ({HEAD}) in {path}, found none: train it again")
        config.modules_to_save, config.task_type, config.inference_mode = None, "CAUSAL_LM", True
        base.model.add_adapter(REWARD, config)
        loaded = set_peft_model_state_dict(base.model, tensors, adapter_name=REWARD)
        missing = [name for name in loaded.missing_keys if f".{REWARD}." in name]
        if missing or loaded.unexpected_keys:
            raise TrainingRefused(
                f"the reward model {path} does not fit {base.policy.base_model}: "
                f"{len(missing)} weights missing, {len(loaded.unexpected_keys)} unknown"
            )
        base.settle()
        self.head = head

    def scores_encoded(self, items: Sequence[EncodedResponse], batch_size: int = 16) -> list[float]:
        """The head's number for each response, read at its last token."""
        order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_ids) + len(items[i].response_ids))
        score_list = [0.0] * len(items)
        with torch.no_grad(), matmul(self.hardware), self.base.speaking_as(REWARD) as model:
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = collate([items[i] for i in rows], self.encoder.tokenizer.pad_token_id)
                mask = batch["attention_mask"].to(self.base.policy.device)
                hidden = model.base_model(
                    input_ids=batch["input_ids"].to(mask.device), attention_mask=mask, use_cache=False
                ).last_hidden_state
                last = hidden[torch.arange(len(rows), device=mask.device), mask.sum(1) - 1]
                scores = (last.to(self.head.dtype) @ self.head.t())[:, 0].tolist()
                for i, value in zip(rows, scores, strict=True):
                    score_list[i] = value
        return score_list


def fits(path: str | Path, base: SharedBase) -> bool:
    """True if a reward model's checkpoint is a LoRA on just this base, in the precision it is loaded in."""
    try:
        facts = json.loads((Path(path) / FACTS).read_text("utf-8"))
        if facts.get("architecture") != CAUSAL:
            return False
        LoraConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError):
        return False  # RewardModel.load says what is wrong with it
    same = facts.get("base_model") == base.policy.base_model
    return same and base.policy.quantization == "none"


def rewards_of(specs: str, base: SharedBase | None = None) -> list[RewardFunction]:
    """The reward functions and reward models of specs separated by commas, in their order.

    The first reward model that was trained on the base in memory becomes one more role on it; any other, and all where
    no base is given, is loaded beside it.

    Raises TrainingRefused for a name nobody knows, and for a model that cannot be used.
    """
    functions: list[RewardFunction] = []
    for name in (spec.strip() for spec in specs.split(",")):
        try:
            if name.startswith(MODEL):
                path = name.removeprefix(MODEL)
                taken = any(isinstance(f, SharedRewardModel) for f in functions)
                if base is not None and not taken and fits(path, base):
                    functions.append(SharedRewardModel(base, path))
                else:
                    functions.append(RewardModel.load(path))
            elif name in (AUTO, LEARNED_REWARD):
                raise TrainingRefused(
                    f"reward {name} is the agent's reward model: run the training by command, which finds it, or "
                    "name a folder with model:FOLDER"
                )
            elif name:
                # whoever names code_execution here means it; the commands ask the settings first
                functions += rewards_named([name], code_execution=True)
        except ValueError as error:
            raise TrainingRefused(str(error)) from error
    return functions


SampledT = TypeVar("SampledT", bound=SampledRecipe)


class RewardedTrainer(AdapterTrainer[SampledT, SplitT]):
    """A training of answers that the policy samples and reward functions judge: GRPO and PPO.

    Rows are {"prompt": messages, "state": what rewards may need, optional}. Rewards are given as functions (a reward
    model is one), or named in the recipe.
    """

    needs = "prompt"
    evaluated = "eval_reward"

    def __init__(
        self,
        recipe: SampledT,
        base_model: str = "bundled",
        *,
        rewards: Sequence[RewardFunction] = (),
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(recipe, base_model, **options)
        self.rewards = list(rewards)

    def encode_prompts(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[Prompts]:
        """The prompts of both splits as tokens, those alone to whose answers a reward applies."""
        recipe = self.recipe
        note, agent = self.context.note, self.context.agent
        train, held_out = (
            rewardable_prompts(
                prompts_encoded(policy.encoder, rows, recipe, note, most),
                self.rewards,
                agent,
                note,
                held_out=most is not None,
            )
            for rows, most in ((train_rows, None), (eval_rows, recipe.eval_prompts))
        )
        return TrainRows(
            train,
            held_out,
            facts=[train.ids, held_out.ids],
            samples={"train": len(train.ids), "eval": len(held_out.ids)},
            truncated={"prompts": train.truncated, "completions": 0},
            left_out=train.left_out,
        )
