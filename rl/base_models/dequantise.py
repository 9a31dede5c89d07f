"""A GGUF file as a folder that transformers reads: config, safetensors in float16, tokenizer, chat template.

transformers maps the names and shapes of GGUF to its own. Tensors are de-quantised one after the other and held in
float16, so memory stays at about the size of the float16 model. (`save_pretrained` refuses a model that was loaded from
a GGUF file, because it counts as quantised.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    modeling_gguf_pytorch_utils,
)

from rl.checksums import sums_write
from rl.training.loading import template_fault

# transformers draws a progress bar here that no setting of its turns off; the caller has its own.
modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors

SHARD_BYTES = 4 * 1024**3


class ConversionRefused(ValueError):
    """A GGUF file that cannot be trained on; the message says why."""


def gguf_to_folder(file: Path, target: Path, progress: Callable[[str], None]) -> tuple[str, int]:
    """Write `file` to the folder `target`; returns architecture and number of parameters. Raises ConversionRefused."""
    template, size = _tokenizer_facts(file)
    if template and (fault := template_fault(template)):
        raise ConversionRefused(
            f"{file.name} cannot be trained on: its chat template is not used, as {fault}"
        )
    folder, name = str(file.parent), file.name
    progress("reading the configuration and the tokenizer")
    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, NotImplementedError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConversionRefused(f"{file.name} cannot be trained on: {first_line}") from error
    progress("de-quantising the weights")
    tensors = _tensors(file, empty)
    expected = {key for key, _ in empty.named_parameters()} - set(empty.all_tied_weights_keys or {})
    if missing := sorted(expected - tensors.keys()):
        raise ConversionRefused(
            f"{file.name} cannot be trained on: transformers finds no weights for {', '.join(missing[:4])}"
            f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}"
        )
    config.dtype = "float16"
    config.architectures = [type(empty).__name__]
    progress("writing the folder")
    _save(tensors, target)
    config.save_pretrained(target)
    _generation_config(tokenizer).save_pretrained(target)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    _added_tokens_cut(target / "tokenizer.json", size)
    sums_write(target)
    return str(config.model_type), sum(tensor.numel() for tensor in tensors.values())


def _tensors(file: Path, empty: object) -> dict[str, torch.Tensor]:
    """Weights by transformers' names, in float16."""
    try:
        found: dict[str, torch.Tensor] = modeling_gguf_pytorch_utils.load_gguf_checkpoint(
            str(file), return_tensors=True, model_to_load=empty, torch_dtype=torch.float16
        )["tensors"]
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConversionRefused(f"{file.name} cannot be de-quantised: {error}") from error
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _save(tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Write safetensors: one file, or several of SHARD_BYTES with the index that transformers reads."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], target / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, target / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")


def _generation_config(tokenizer: object) -> GenerationConfig:
    own = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**{name: value for name, value in own.items() if value is not None})


def _added_tokens_cut(file: Path, size: int) -> None:
    """Remove tokens beyond the first `size`: transformers adds special tokens that the GGUF file does not have."""
    facts = json.loads(file.read_text("utf-8"))
    facts["added_tokens"] = [token for token in facts["added_tokens"] if token["id"] < size]
    file.write_text(json.dumps(facts, ensure_ascii=False), "utf-8")


def _tokenizer_facts(file: Path) -> tuple[str, int]:
    """The chat template in a GGUF file, "" where it has none, and its number of tokens. Raises ConversionRefused for a
    damaged file."""
    try:
        reader = GGUFReader(str(file))
        fields = reader.fields
        for name, field in fields.items():
            layers = int(field.contents()) if name.endswith(".block_count") else 0
            if layers > len(reader.tensors):
                raise ConversionRefused(
                    f"{file.name} says that it has {layers:,} layers, and has {len(reader.tensors):,} tensors: "
                    "it is damaged, or made to do harm"
                )
        template, tokens = fields.get("tokenizer.chat_template"), fields.get("tokenizer.ggml.tokens")
        return "" if template is None else str(template.contents()), 0 if tokens is None else len(tokens.data)
    except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
        raise ConversionRefused(
            f"{file} is no whole GGUF file ({error}): copy or download it again"
        ) from error
