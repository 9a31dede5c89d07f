"""Train a LoRA policy on rewards with proximal policy optimisation."""

from __future__ import annotations

from rl.management.rewarded import RewardedCommand


class Command(RewardedCommand):
    method = "ppo"
    kl_knob = "init_kl_coef"
    help = (
        "Answer prompts, have the answers rewarded, and learn to earn more with proximal policy optimisation; enter "
        "the result in the registry. Example: manage.py train_ppo --agent filer --reward agent"
    )
    own_knobs = {
        "mini_batch_size": (int, "Responses per optimiser step. Example: --mini-batch-size 4"),
        "ppo_epochs": (int, "Passes over each batch of responses. Example: --ppo-epochs 4"),
        "samples_per_prompt": (int, "Responses to each prompt of a batch. Example: --samples-per-prompt 4"),
        "max_new_tokens": (int, "Most tokens of a response. Example: --max-new-tokens 64"),
        "temperature": (float, "Temperature of sampling, above 0. Example: --temperature 0.9"),
    }
