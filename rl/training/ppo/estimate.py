"""What a PPO run would take here, before it is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl.recipes import PPORecipe
from rl.training.encoding import prompt_messages
from rl.training.hardware import Estimate, Hardware, detect, memory_estimate, trial_step
from rl.training.policy import load_shape

ANSWER_SHARE = 0.5
"""Share of `max_new_tokens` that a response is taken to use; what it really uses is known only afterwards."""

DECODING_PRICE = 4.0
"""Cost of a token that is decoded, one row at a time, against one of many in a long row, measured on the bundled
model on a CPU."""


def estimate(
    base_model: str, recipe: PPORecipe, rows: Sequence[Any], *, hardware: Hardware | None = None
) -> Estimate:
    """Steps, minutes and peak memory of `PPOTrainer.train(rows)`, training nothing and loading no weights.

    Lengths come from up to 256 prompts; time from a trial step through one and three random layers here and now. What
    the rewards take is not counted. Raises PolicyLoadError, ValueError for rows of another shape.
    """
    hardware = hardware or detect()
    config, encoder, parameters = load_shape(base_model)
    sample = list(rows)[:: max(1, len(rows) // 256)]
    ids, _ = encoder.prompts(
        [prompt_messages(row, number) for number, row in enumerate(sample)],
        recipe.max_new_tokens,
        recipe.max_length,
    )
    if not ids:
        return Estimate(0, 0.0, 0.0, {"steps": "there is no prompt to train on"})
    prompt = sum(map(len, ids)) / len(ids)
    answer = ANSWER_SHARE * recipe.max_new_tokens
    per_epoch = len(rows) * recipe.samples_per_prompt / recipe.batch_size
    steps = recipe.max_steps if recipe.max_steps > 0 else max(1, math.ceil(recipe.epochs * per_epoch))
    text = config.get_text_config()
    layers = int(text.num_hidden_layers)
    one, three = (trial_step(config, recipe, hardware, n, round(prompt + answer)) for n in (1, 3))
    per_layer = max((three - one) / 2, 0.0)
    per_token = max(one - per_layer, 0.0) + per_layer * layers
    # in passes forward and backward over one response with its prompt; forward alone is a third
    networks = 2 if recipe.value_backbone == "adapter" else 1
    shared = (prompt / recipe.samples_per_prompt + answer) / (prompt + answer)
    passes = shared * (networks + 1) / 3 + shared * recipe.ppo_epochs * networks * (
        4 / 3 if recipe.gradient_checkpointing else 1
    )
    sampling = (prompt / recipe.samples_per_prompt + DECODING_PRICE * answer) / 3
    tokens = recipe.batch_size * (passes * (prompt + answer) + sampling)
    micro = recipe.mini_batch_size // recipe.gradient_accumulation
    widest = max(map(len, ids)) + recipe.max_new_tokens
    memory, how = memory_estimate(
        text, recipe, hardware, parameters, micro * widest, round(recipe.max_new_tokens)
    )
    return Estimate(
        steps=steps,
        minutes=steps * tokens * per_token / 60,
        memory_gb=memory,
        reasons={
            "steps": f"{len(rows)} prompts, {recipe.batch_size} responses a step, {steps / per_epoch:.3g} epochs",
            "minutes": (
                f"{prompt:.0f} tokens a prompt and half of max_new_tokens an answer; {passes:.1f} passes over each, at "
                f"{1 / per_token:,.0f} tokens/s measured forward and backward; rewards not counted"
            ),
            "memory_gb": how,
        },
    )
