"""Fast forward over packed rows: one row per prompt with all its completions behind it. See README.md beside this file.

    packed = pack(prompts, completions, pad_token_id=tokenizer.pad_token_id)
    choice = prepare(model, prompts, completions, pad_token_id=tokenizer.pad_token_id)
    logps = completion_logps(model, packed.to(model.device))

`packed.dpo_trainer.PackedDPOTrainer` is the same inside TRL. Nothing here imports anything else of this project.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packed_forward.packing import PackedBatch, Strategy, StrategyChoice, TokenizedCompletion, pack

__all__ = ["PackedBatch", "Strategy", "StrategyChoice", "completion_logps", "pack", "prepare"]


def prepare(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    gradients: bool = True,
) -> StrategyChoice:
    """Test which packed forward is exact for a model, and install the fastest one that is.

    `model` is a transformers causal model or a PeftModel around one; `prompts[n]` and `completions[n]` are token ids of
    the rows to come, the longest among them. `gradients=False` for a model that only scores. STOCK in the choice means
    that none is exact; `completion_logps` then computes unpacked rows.
    """
    # transformers and trl take seconds to import; who only packs rows does not wait for them
    from packed_forward.selection import strategy_select
    from packed_forward.selftest import PackableModel

    rows = [TokenizedCompletion(list(p), list(c)) for p, c in zip(prompts, completions, strict=True)]
    return strategy_select(PackableModel(model, pad_token_id), rows, gradients=gradients)


def completion_logps(model: torch.nn.Module, packed: PackedBatch) -> torch.Tensor:
    """Log-probability in nats of each completion token, float32 [N, C], 0 where there is none. Differentiable.

    The model must have been given to `prepare`, or it computes the rows one by one with its own forward.
    """
    from packed_forward.forward import packed_logps, strategy_of
    from packed_forward.logps import causal_model, collate, token_logps

    causal = causal_model(model)
    strategy = strategy_of(causal)
    if strategy is not Strategy.STOCK:
        logps: torch.Tensor = packed_logps(causal, packed, strategy)[0]
        return logps
    rows = packed.unpack()
    batch = {name: tensor.to(packed.targets.device) for name, tensor in collate(rows, 0).items()}
    flat = token_logps(causal, **batch)[batch["completion_mask"][:, 1:].bool()]
    return flat.new_zeros(packed.target_mask.shape).masked_scatter(packed.target_mask, flat)
