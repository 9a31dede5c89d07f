"""Exports for Hugging Face's libraries: the adapter merged into the base's weights, or the adapter alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl.agents.base import Message
from rl.bundled_models import BUNDLED, added_folder
from rl.export.agreement import ExportAgreement, measured
from rl.export.artifact import (
    ExportRefused,
    ExportResult,
    Progress,
    manifest_write,
    sha256_file,
    silent,
    staged_folder,
)
from rl.export.reference import (
    Reference,
    check_prompts,
    log_probabilities,
    original_model,
    reference_make,
)
from rl.export.source import Source, source_open
from rl.export.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rl.training.loading import FACTS

SHARD_BYTES = 512 * 1024**2
"""Largest size of a weight file, and memory needed beside one tensor."""

MERGED_BAR = {torch.float32: 1e-6, torch.float16: 0.002, torch.bfloat16: 0.02}
"""Type of the base's weights -> largest KL divergence from base + adapter, in nats per token."""


def export_merged(
    base_model: str | None,
    adapter: Path | None,
    output: Path,
    *,
    prompts: Sequence[Sequence[Message]] = (),
    progress: Progress | None = None,
) -> ExportResult:
    """Writes base + adapter as one safetensors folder in the base's dtype, with its tokenizer.

    base_model: `bundled`, a folder or a Hugging Face name; None uses the adapter's. output: a new or empty folder, or
    an earlier export to replace. prompts: held-out prompts, as in `export_gguf`. transformers then loads the folder,
    and it is compared with base + adapter under PEFT. Raises ExportRefused and leaves nothing behind.
    """
    progress = progress or silent
    source = source_open(base_model, adapter)
    test_prompts = check_prompts(source.tokenizer(), prompts)
    with staged_folder(output, source.weights.base.total_bytes) as folder:
        reference = reference_make(source, test_prompts, progress=progress)
        merged_write(source, folder, progress)
        progress("comparing with the original", 0, 0)
        checked = _check(folder, reference, source.weights.base.main_dtype)
        notes = (
            [f"log-probabilities were not compared: {reference.skip_reason}"] if reference.skip_reason else []
        )
        return manifest_write(folder, output, "merged", checked, notes)


def merged_write(source: Source, folder: Path, progress: Progress = silent) -> None:
    """Writes merged weights, configuration and tokenizer into an existing folder, without checks."""
    weights, base = source.weights, source.weights.base
    shards: list[list[str]] = [[]]
    size = 0
    for name in base.names:
        if shards[-1] and size + base.bytes(name) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += base.bytes(name)
    files = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    done = 0
    for file, names in zip(files, shards, strict=True):
        tensors = {}
        for name in names:
            tensors[name] = weights.tensor(name).to(base.dtype(name)).contiguous()
            done += base.bytes(name)
            progress("merging", done, base.total_bytes)
        _save(tensors, folder / file)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": base.total_bytes},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    source.copy_config(folder)
    source.copy_tokenizer(folder)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # its I/O errors have the errno in their text only
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    # safetensors writes files that only their owner reads; a server of another user must read this one
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _check(folder: Path, reference: Reference, dtype: torch.dtype) -> dict[str, object]:
    if reference.skip_reason:
        return {"loaded": False, "compared": False, "reason": reference.skip_reason}
    with original_model(source_open(str(folder), None)) as model:
        found = measured(reference.policy, partial(log_probabilities, model))
    bar = MERGED_BAR.get(dtype, MERGED_BAR[torch.bfloat16])
    if not found.texts.kl <= bar:
        raise ExportRefused(
            f"expected the merged model to answer like base + adapter (KL divergence at most {bar} nats per token), "
            f"found {found.texts.kl:.4f}; the export was thrown away, please report the model and adapter"
        )
    agreement = ExportAgreement(policy=found).as_dict()
    return {"loaded": True, "compared": True, "prompts": len(reference.prompts), "agreement": agreement}


# --- Adapter alone ---------------------------------------------------------------------------------------------


_README = """{card}

## How to load it

A LoRA adapter (PEFT) of rank {rank}, alpha {alpha}, {tensors} tensors. It changes the answers of one base model,
`{base}`, and is of no use without it.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

{bundled}folder = "."  # where this file lies
base = AutoModelForCausalLM.from_pretrained({load}, dtype="auto", use_safetensors=True)
model = PeftModel.from_pretrained(base, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

The SHA-256 of each file stands in `export.json`.
"""

CARD, CARD_TAG = "README.md", "preference-learning"
"""Model card beside an adapter, and the tag that tells ours from PEFT's template."""

_BUNDLED_IMPORT = "from rl.bundled_models import resolve_base_model  # the model that comes with Ratchet\n\n"


def export_lora(
    base_model: str | None, adapter: Path, output: Path, *, progress: Progress | None = None
) -> ExportResult:
    """Copies an adapter into its own folder with tokenizer and README; hashes of the copies are verified.

    base_model: as in `export_merged`; the adapter must fit it. output: a new or empty folder, or an earlier export to
    replace. Raises ExportRefused and leaves nothing behind.
    """
    progress = progress or silent
    source = source_open(base_model, adapter)
    assert source.adapter is not None
    origin = source.adapter.path
    wanted = [origin / ADAPTER_CONFIG, origin / ADAPTER_WEIGHTS]
    if (origin / FACTS).is_file():
        wanted.append(origin / FACTS)
    with staged_folder(output, sum(file.stat().st_size for file in wanted)) as folder:
        for number, file in enumerate(wanted):
            shutil.copyfile(file, folder / file.name)
            if sha256_file(folder / file.name) != sha256_file(file):
                raise ExportRefused(
                    f"expected a copy equal to {file}, found another hash; the disk or the file changed"
                )
            progress("copying", number + 1, len(wanted))
        source.copy_tokenizer(folder)
        checked = _adapter_check(source, folder)
        (folder / "README.md").write_text(_readme(source, checked), "utf-8")
        return manifest_write(folder, output, "lora", checked)


def _adapter_check(source: Source, folder: Path) -> dict[str, object]:
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt", device="cpu") as tensors:
        count = len(list(tensors.keys()))
    # source_open has already matched each of them to a tensor of the base
    return {"tensors": count, "hashes_equal": True, "fits_base": source.base_name}


def _readme(source: Source, checked: Mapping[str, object]) -> str:
    assert source.adapter is not None
    config = source.adapter.config
    card = source.adapter.path / CARD
    text = card.read_text("utf-8") if card.is_file() else ""
    ours = source.base_name == BUNDLED or added_folder(source.base_name) is not None
    return _README.format(
        # our card has the training data and the evaluation; PEFT's template has neither
        card=text.rstrip() if CARD_TAG in text else f"# {source.name}",
        base=source.base_name,
        load=f'resolve_base_model("{source.base_name}")' if ours else repr(source.base_name),
        rank=config.get("r"),
        alpha=config.get("lora_alpha"),
        tensors=checked["tensors"],
        bundled=_BUNDLED_IMPORT if ours else "",
    )
