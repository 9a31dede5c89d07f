"""Estimates of a run that samples its own answers, before it is started: PPO and GRPO."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model

from packed_forward.logps import causal_model
from rl.recipes import GRPORecipe, PPORecipe
from rl.rewards.catalogue import AUTO, MODEL
from rl.training.constrained_generation import Sampling
from rl.training.encoding import EncodedResponse, Encoder, prompt_messages, response_text
from rl.training.estimates import (
    HELD_OUT_SHARE,
    SAMPLE,
    Estimate,
    ExtraWork,
    batches,
    estimate_from_profile,
    estimate_zero,
    evaluations,
)
from rl.training.hardware import Hardware, detect
from rl.training.loading import load_shape
from rl.training.policy import lora_config, matmul
from rl.training.ppo.prompts import Prompts, answer_forms
from rl.training.ppo.rollout import sample_responses
from rl.training.profiler import ASKABLE, GenerationLoad, MeasuredBase
from rl.training.run_context import training_hardware

ANSWER_SHARE = 0.5
"""Share of `max_new_tokens` that an answer of a model too large to ask is taken to use."""

TRIAL_BATCHES = 16
"""Batches of prompts that are answered, at most: the longest answer decides how long a batch takes, and one is luck."""

TRIED_S = 3.0
"""Seconds after which no further batch is."""


@dataclass(frozen=True)
class _SampledBatches:
    """Answers to a few batches of prompts, as tokens, and the seconds of a batch; None: left to the profiler."""

    items: list[EncodedResponse]
    sample_s: float | None
    generation: GenerationLoad


def ppo(
    base_model: str,
    recipe: PPORecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    agent: str = "",
    base: MeasuredBase | None = None,
) -> Estimate:
    """Steps, minutes and peak memory of `PPOTrainer.train(rows)`, training nothing.

    A base of at most ASKABLE parameters is loaded and answers one step's prompts; of a larger one nothing is loaded and
    half of `max_new_tokens` taken for an answer. What rewards take that are not models is not counted. Raises
    PolicyLoadError, ValueError for rows of another shape.
    """
    hardware = training_hardware(hardware or detect(), recipe)
    shape = load_shape(base_model)
    prompts = _prompts(shape[1], rows, recipe)
    if not prompts.ids:
        return estimate_zero("prompt")
    samples = recipe.samples_per_prompt
    answers = _answers(
        base_model, shape, recipe, prompts, recipe.batch_size // samples, samples, hardware, agent, base
    )
    size = recipe.mini_batch_size // recipe.gradient_accumulation
    micros = batches(answers.items, size)
    steps = recipe.steps(len(rows))
    networks = 2 if recipe.value_backbone == "adapter" else 1
    per_step = recipe.batch_size / size
    looked_at = _held_out_answers(recipe, len(rows), steps)
    models = sum(spec.strip().startswith((MODEL, AUTO)) for spec in recipe.reward.split(","))
    work = ExtraWork(
        rows=len(rows),
        steps=steps,
        micros=steps * per_step * recipe.ppo_epochs * networks,
        forwards=steps * per_step * (networks + 1 + models) + looked_at / size * (2 + models),
        samplings=steps + looked_at / recipe.batch_size,
        note="rewards that are no models not counted",
    )
    return _estimate(shape, recipe, hardware, micros, work, answers, base)


def grpo(
    base_model: str,
    recipe: GRPORecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    agent: str = "",
    base: MeasuredBase | None = None,
) -> Estimate:
    """The same of `GRPOTrainer.train(rows)`, of both modes."""
    hardware = training_hardware(hardware or detect(), recipe)
    shape = load_shape(base_model)
    prompts = _prompts(shape[1], rows, recipe)
    if not prompts.ids:
        return estimate_zero("prompt")
    steps = recipe.steps(len(rows))
    micro_count = steps * recipe.gradient_accumulation
    if recipe.mode == "logged":
        sample, _ = shape[1].written(list(rows)[:SAMPLE])
        texts = [
            [(prompt_messages(row, n), response_text({"a": said}, "a", n)) for said in row["completions"]]
            for n, row in enumerate(sample)
        ]
        encoded = [
            shape[1].responses(group, recipe.max_length, recipe.max_completion_length) for group in texts
        ]
        micros = [[item for group in batch for item in group] for batch in batches(encoded, recipe.groups)]
        # the base's pass, once for each micro-batch
        return estimate_from_profile(
            shape, recipe, hardware, micros, ExtraWork(len(rows), steps, micro_count), packed=True, base=base
        )
    at_once = recipe.groups * recipe.gradient_accumulation
    answers = _answers(
        base_model, shape, recipe, prompts, at_once, recipe.num_generations, hardware, agent, base
    )
    micros = batches(answers.items, recipe.batch_size)
    looked_at = _held_out_answers(recipe, len(rows), steps)
    models = sum(spec.strip().startswith((MODEL, AUTO)) for spec in recipe.reward.split(","))
    fresh = micro_count / recipe.num_iterations
    alone = sum(len(i.prompt_ids) + len(i.response_ids) for i in micros[0])
    packed = sum(map(len, {tuple(i.prompt_ids) for i in micros[0]})) + sum(
        len(i.response_ids) for i in micros[0]
    )
    work = ExtraWork(
        rows=len(rows),
        steps=steps,
        forwards=fresh * ((recipe.beta > 0) + (recipe.num_iterations > 1) + models * alone / packed)
        + looked_at / recipe.batch_size * (2 + models) * alone / packed,
        samplings=steps / recipe.num_iterations
        + looked_at / (recipe.batch_size * recipe.gradient_accumulation),
        note="rewards that are no models not counted",
    )
    return _estimate(shape, recipe, hardware, micros, work, answers, base)


def _held_out_answers(recipe: PPORecipe | GRPORecipe, rows: int, steps: int) -> float:
    """Held-out prompts answered over a run: before the first step too."""
    return (1 + evaluations(recipe, steps, rows)) * min(recipe.eval_prompts, rows * HELD_OUT_SHARE)


def _prompts(encoder: Encoder, rows: Sequence[Any], recipe: PPORecipe | GRPORecipe) -> Prompts:
    some, _ = encoder.written(list(rows)[:SAMPLE])
    messages = [prompt_messages(row, number) for number, row in enumerate(some)]
    ids = encoder.prompts(messages, recipe.max_new_tokens, recipe.max_length)[0] if messages else []
    return Prompts(some, ids, truncated=0, duplicates=0)


def _answers(
    base_model: str,
    shape: tuple[Any, Encoder, int],
    recipe: PPORecipe | GRPORecipe,
    asked: Prompts,
    at_once: int,
    samples: int,
    hardware: Hardware,
    agent: str,
    base: MeasuredBase | None,
) -> _SampledBatches:
    """Answers of the base to `at_once` prompts at a time, `samples` to each, with an adapter as a run has it."""
    order = itertools.cycle(random.Random(recipe.seed).sample(asked.ids, len(asked.ids)))
    batches = [list(itertools.islice(order, at_once)) for _ in range(TRIAL_BATCHES)]
    sampling = Sampling(recipe.max_new_tokens, recipe.temperature, recipe.top_k, recipe.top_p)
    if shape[2] > ASKABLE:
        length = max(1, round(ANSWER_SHARE * recipe.max_new_tokens))
        items = [EncodedResponse(prompt, [0] * length) for prompt in batches[0] for _ in range(samples)]
        half = Sampling(length, recipe.temperature, recipe.top_k, recipe.top_p)
        return _SampledBatches(items, None, GenerationLoad(batches[0], samples, half))
    base = base or MeasuredBase(base_model, hardware, quantization=recipe.quantization)
    policy = base.policy
    if not isinstance(policy.model, PeftModel):
        policy.model = get_peft_model(policy.model, lora_config(recipe, policy.model))
    model = policy.model.eval()
    forms = answer_forms(policy, agent, asked) if recipe.constrains else None
    generator = torch.Generator(policy.device).manual_seed(recipe.seed)
    sampled_items: list[EncodedResponse] = []
    seconds: list[float] = []
    with matmul(hardware):
        # the first one wakes it
        sample_responses(causal_model(model), policy.encoder, batches[0], 1, sampling, generator, forms)
        for prompts in batches:
            began = time.perf_counter()
            rollouts = sample_responses(
                causal_model(model), policy.encoder, prompts, samples, sampling, generator, forms
            )
            seconds.append(time.perf_counter() - began)
            sampled_items += [rollout.item for rollout in rollouts]
            if sum(seconds) > TRIED_S:
                break
    return _SampledBatches(
        sampled_items, statistics.fmean(seconds), GenerationLoad(batches[0], samples, sampling)
    )


def _estimate(
    shape: tuple[Any, Encoder, int],
    recipe: PPORecipe | GRPORecipe,
    hardware: Hardware,
    micros: list[list[EncodedResponse]],
    work: ExtraWork,
    answers: _SampledBatches,
    base: MeasuredBase | None,
) -> Estimate:
    generation = answers.generation if answers.sample_s is None else None
    return estimate_from_profile(
        shape,
        recipe,
        hardware,
        micros,
        work,
        packed=True,
        generation=generation,
        sample_s=answers.sample_s,
        base=base,
    )
