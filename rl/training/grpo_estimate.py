"""What a GRPO run would take here, before it is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl.recipes import GRPORecipe
from rl.training.encoding import prompt_messages, response_text
from rl.training.hardware import Estimate, Hardware, detect, memory_estimate, trial_step
from rl.training.policy import load_shape
from rl.training.ppo.estimate import ANSWER_SHARE, DECODING_PRICE


def estimate(
    base_model: str, recipe: GRPORecipe, rows: Sequence[Any], *, hardware: Hardware | None = None
) -> Estimate:
    """Steps, minutes and peak memory of `GRPOTrainer.train(rows)`, training nothing and loading no weights.

    Lengths come from up to 256 rows; time from a trial step through one and three random layers here and now. What
    the rewards take is not counted. Raises PolicyLoadError, ValueError for rows of another shape.
    """
    hardware = hardware or detect()
    config, encoder, parameters = load_shape(base_model)
    sample = list(rows)[:: max(1, len(rows) // 256)]
    if not sample:
        return Estimate(0, 0.0, 0.0, {"steps": "there is no prompt to train on"})
    ids, _ = encoder.prompts(
        [prompt_messages(row, number) for number, row in enumerate(sample)],
        recipe.max_new_tokens,
        recipe.max_length,
    )
    prompt = sum(map(len, ids)) / len(ids)
    logged = recipe.mode == "logged"
    if logged:
        answers = [response_text({"a": said}, "a", 0) for row in sample for said in row["completions"]]
        lengths = [len(encoder.tokenizer.encode(answer)) + 1 for answer in answers]
        group, answer, longest = len(answers) / len(sample), sum(lengths) / len(lengths), max(lengths)
    else:
        group, longest = float(recipe.num_generations), recipe.max_new_tokens
        answer = ANSWER_SHARE * longest
    at_once = max(1, recipe.batch_size // recipe.num_generations)
    batches = (
        math.ceil(len(rows) / at_once)
        if logged
        else math.ceil(len(rows) / (at_once * recipe.gradient_accumulation))
        * recipe.gradient_accumulation
        * recipe.num_iterations
    )
    per_epoch = math.ceil(batches / recipe.gradient_accumulation)
    steps = recipe.max_steps if recipe.max_steps > 0 else math.ceil(recipe.epochs * per_epoch)
    text = config.get_text_config()
    width = round(prompt + group * answer)
    one, three = (trial_step(config, recipe, hardware, n, width) for n in (1, 3))
    per_layer = max((three - one) / 2, 0.0)
    per_token = max(one - per_layer, 0.0) + per_layer * int(text.num_hidden_layers)
    # in passes forward and backward over a prompt with its group; forward alone is a third
    packed = prompt + group * answer
    learning = packed * (4 / 3 if recipe.gradient_checkpointing else 1)
    reference = packed / 3 if logged or recipe.beta else 0.0
    sampling = 0.0 if logged else (prompt + DECODING_PRICE * group * answer) / 3
    groups = at_once * recipe.gradient_accumulation
    tokens = groups * (learning + (reference + sampling) / recipe.num_iterations)
    memory, how = memory_estimate(
        text, recipe, hardware, parameters, round(at_once * (max(map(len, ids)) + group * longest)), longest
    )
    return Estimate(
        steps=steps,
        minutes=steps * tokens * per_token / 60,
        memory_gb=memory,
        reasons={
            "steps": f"{len(rows)} prompts, {groups} a step, {steps / per_epoch:.3g} epochs",
            "minutes": (
                f"{prompt:.0f} tokens a prompt, {group:.3g} answers of {answer:.0f} behind it, at "
                f"{1 / per_token:,.0f} tokens/s measured forward and backward; rewards not counted"
            ),
            "memory_gb": how,
        },
    )
