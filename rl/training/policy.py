"""A policy: base model, LoRA adapter and tokenizer. Load it, let it answer, save the adapter so it can be trusted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from rl.agents.base import Message
from rl.recipes import Recipe
from rl.training.encoding import Encoder
from rl.training.hardware import Hardware, detect

FACTS = "ratchet.json"
"""Beside an adapter's weights: which base it belongs to, for which agent, by which method."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class PolicyLoadError(ValueError):
    """A model or adapter that cannot be used; the message says what was expected, what was found and what to do."""


@dataclass
class LoadedPolicy:
    """A model ready to score and to answer, on its device."""

    model: Any
    """A transformers causal model, or a PeftModel around one."""
    tokenizer: Any
    encoder: Encoder
    base_model: str
    """As it was named: `bundled`, a hub name or a path."""
    base_model_hash: str
    device: torch.device
    hardware: Hardware
    quantization: str = "none"
    """What was really done: `none` or `4bit`."""
    adapter: str | None = None
    notes: list[str] = field(default_factory=list)
    rung: str | None = None
    """How rows that share a prompt are computed (`rl.training.prefix.Rung`); None until it was tried."""
    rung_longest: int = 0
    """Tokens of the longest row it was tried on."""

    @property
    def context(self) -> int | None:
        return self.encoder.context

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the base model answers."""
        with self.model.disable_adapter() if isinstance(self.model, PeftModel) else contextlib.nullcontext():
            yield


@dataclass(frozen=True)
class Generation:
    """One answer."""

    text: str
    tokens: int
    """Tokens generated, the turn end included."""
    finish_reason: str
    """`stop`, or `length` where max_new_tokens ended it."""


def load_policy(
    base_model: str,
    adapter: str | Path | None = None,
    *,
    hardware: Hardware | None = None,
    quantization: str = "none",
    trainable: bool = False,
    recipe: Recipe | None = None,
) -> LoadedPolicy:
    """Load a base model (`bundled`, a Hugging Face name or a local directory) and, on it, an adapter.

    `trainable` adds a fresh LoRA of the recipe's rank on all linear layers, or opens the given adapter for training.
    `quantization="4bit"` loads the frozen base in NF4 where the machine can; where not, a note says so and it is
    loaded as it is. Weights are read from safetensors only and no code of a repository is ever run.
    Raises PolicyLoadError.
    """
    hardware = hardware or detect()
    facts = adapter_read(adapter) if adapter is not None else {}
    source = model_located(base_model)
    notes: list[str] = []
    config, tokenizer = _config(base_model, source), _tokenizer(base_model, source)
    quantized = None
    if quantization == "4bit":
        quantized, note = _four_bit(hardware)
        notes.append(note)
    model = _model(base_model, source, config, hardware, quantized)
    encoder = Encoder(tokenizer, _context(config))
    notes += encoder.notes
    policy = LoadedPolicy(
        model=model,
        tokenizer=tokenizer,
        encoder=encoder,
        base_model=base_model,
        base_model_hash=base_hash(source, getattr(model.config, "_commit_hash", None)),
        device=model.device,
        hardware=hardware,
        quantization="4bit" if quantized else "none",
        adapter=str(adapter) if adapter is not None else None,
        notes=notes,
    )
    model.generation_config = GenerationConfig(
        eos_token_id=encoder.stop_ids or None,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    if adapter is not None:
        policy.model = _with_adapter(policy, Path(adapter), facts, trainable)
    elif trainable:
        policy.model = get_peft_model(model, lora_config(recipe or Recipe(), model))
    policy.model.train(trainable)
    return policy


def load_shape(base_model: str, *, causal: bool = True) -> tuple[Any, Encoder, int]:
    """A base model's configuration, encoder and number of parameters, without its weights. Raises PolicyLoadError.

    With `causal` false it may be an encoder (BERT, DeBERTa), which answers nothing.
    """
    source = model_located(base_model)
    config, tokenizer = _config(base_model, source), _tokenizer(base_model, source)
    try:
        with torch.device("meta"):
            kind = AutoModelForCausalLM if causal else AutoModel
            parameters = sum(p.numel() for p in kind.from_config(config).parameters())
    except ValueError as error:
        raise PolicyLoadError(f"{base_model} is no causal language model: {error}") from error
    return config, Encoder(tokenizer, _context(config)), parameters


def generate(
    policy: LoadedPolicy,
    prompts: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Generation]:
    """Answer each prompt, in the order given. Temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in.

    Prompts of similar length are answered together, padded on the left; one that leaves no room for
    `max_new_tokens` in the model's context loses its oldest tokens. The caller's random state is left as it was.
    """
    encoded, _ = policy.encoder.prompts(prompts, max_new_tokens)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    answers: list[Generation | None] = [None] * len(encoded)
    tokenizer, stop = policy.tokenizer, set(policy.encoder.stop_ids)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        top_p=top_p if temperature > 0 else None,
        top_k=top_k if temperature > 0 else None,
        eos_token_id=sorted(stop) or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    was_training = policy.model.training
    policy.model.eval()
    devices = [policy.device] if policy.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(), matmul(policy.hardware):
            torch.manual_seed(seed)
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                width = max(len(encoded[i]) for i in rows)
                ids = torch.full((len(rows), width), tokenizer.pad_token_id)
                mask = torch.zeros((len(rows), width), dtype=torch.long)
                for row, i in enumerate(rows):
                    ids[row, width - len(encoded[i]) :] = torch.tensor(encoded[i])
                    mask[row, width - len(encoded[i]) :] = 1
                out = policy.model.generate(
                    input_ids=ids.to(policy.device),
                    attention_mask=mask.to(policy.device),
                    generation_config=settings,
                )
                for i, tokens in zip(rows, out[:, width:].tolist(), strict=True):
                    answers[i] = _generation(tokenizer, tokens, stop)
    finally:
        policy.model.train(was_training)
    return [answer for answer in answers if answer is not None]


def _generation(tokenizer: Any, tokens: list[int], stop: set[int]) -> Generation:
    end = next((i for i, token in enumerate(tokens) if token in stop), None)
    kept = tokens if end is None else tokens[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Generation(text, len(tokens) if end is None else end + 1, "length" if end is None else "stop")


@contextlib.contextmanager
def matmul(hardware: Hardware) -> Iterator[None]:
    """Inside, float32 products run at the precision this machine was found to be exact and quick with."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(hardware.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def lora_config(recipe: Recipe, model: Any) -> LoraConfig:
    """LoRA on every linear layer except the output head; GPT-2's transposed Conv1D counts as linear."""
    return LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )


def adapter_save(
    policy: LoadedPolicy,
    path: str | Path,
    *,
    agent: str = "",
    method: str = "",
    weights: dict[str, Any] | None = None,
) -> Path:
    """Write adapter, tokenizer and ratchet.json into `path`, whole or not at all; an older one there is replaced.

    `weights`: the model's, where its own are spread over several processes.
    """
    if not isinstance(policy.model, PeftModel):
        raise ValueError("expected a policy with an adapter to save, found a base model alone")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    try:
        policy.model.save_pretrained(half, selected_adapters=["default"], state_dict=weights)
        adapter_describe(policy, half, agent=agent, method=method)
        if path.exists():
            shutil.rmtree(path)
        half.replace(path)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return path


def adapter_describe(policy: LoadedPolicy, path: Path, *, agent: str = "", method: str = "") -> None:
    """Make a directory with a PEFT adapter complete: tokenizer, chat template and ratchet.json."""
    policy.tokenizer.save_pretrained(path)
    facts = {
        "base_model": policy.base_model,
        "base_model_hash": policy.base_model_hash,
        "agent": agent,
        "method": method,
        "trained_on": policy.quantization,
    }
    (path / FACTS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def adapter_read(path: str | Path) -> dict[str, Any]:
    """The facts written beside an adapter ({} for one made elsewhere). Raises PolicyLoadError for anything else."""
    path = Path(path)
    if not path.is_dir():
        raise PolicyLoadError(
            f"expected an adapter directory at {path}, found {'a file' if path.exists() else 'none'}"
        )
    missing = [name for name in ADAPTER_FILES if not (path / name).is_file()]
    if missing:
        if (path / "adapter_model.bin").exists():
            raise PolicyLoadError(
                f"{path} holds its adapter as a pickle (adapter_model.bin), which can run code when read; "
                f"only safetensors are read: save it again with safe_serialization=True"
            )
        raise PolicyLoadError(
            f"{path} is no adapter: expected {' and '.join(ADAPTER_FILES)}, found {_listing(path)}"
        )
    _check_safetensors(path / ADAPTER_FILES[1])
    if not (path / FACTS).is_file():
        return {}
    try:
        facts = json.loads((path / FACTS).read_text("utf-8"))
    except ValueError as error:
        raise PolicyLoadError(
            f"{path / FACTS} is not readable JSON ({error}): copy the adapter again"
        ) from error
    if not isinstance(facts, dict):
        raise PolicyLoadError(f"expected an object in {path / FACTS}, found {type(facts).__name__}")
    return facts


def base_hash(source: str, commit: str | None = None) -> str:
    """What identifies a base: sha256 over config.json and every safetensors file, or the hub's commit hash."""
    if not Path(source).is_dir():
        return f"commit:{commit}" if commit else f"name:{source}"
    digest = hashlib.sha256()
    for file in [*sorted(Path(source).glob("*.safetensors")), Path(source) / "config.json"]:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def model_located(base_model: str) -> str:
    """A directory that holds a model, or a hub name."""
    from rl.training.base_model import resolve_base_model

    source = resolve_base_model(base_model)
    path = Path(source).expanduser()
    looks_like_path = (
        path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    )
    if not looks_like_path:
        return source
    if not path.is_dir():
        raise PolicyLoadError(
            f"expected a model directory at {path}, found {'a file' if path.exists() else 'none'}"
        )
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise PolicyLoadError(
            f"{path} is an adapter, not a base model: give its base model, and it as the adapter"
        )
    weights = list(path.glob("*.safetensors"))
    if not weights and (list(path.glob("*.bin")) or list(path.glob("*.pt"))):
        raise PolicyLoadError(
            f"{path} holds its weights as pickles ({_listing(path)}), which can run code when read; "
            f"only safetensors are read: convert it with model.save_pretrained(..., safe_serialization=True)"
        )
    if not weights or not (path / "config.json").is_file():
        raise PolicyLoadError(
            f"{path} is no model: expected config.json and *.safetensors, found {_listing(path)}"
        )
    for file in weights:
        _check_safetensors(file)
    return str(path)


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass  # the header names every tensor's place, so a cut file is noticed without reading the weights
    except (SafetensorError, OSError) as error:
        raise PolicyLoadError(
            f"{file} is no whole safetensors file ({error}): copy or download it again"
        ) from error


def _config(base_model: str, source: str) -> Any:
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise PolicyLoadError(_unreachable(base_model, error)) from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise PolicyLoadError(
                f"{base_model} needs Python code from its repository to be run, which is never done: choose a model "
                f"whose architecture transformers knows"
            ) from error
        raise PolicyLoadError(f"{base_model} has a configuration that is not understood: {error}") from error


def _tokenizer(base_model: str, source: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise PolicyLoadError(_unreachable(base_model, error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise PolicyLoadError(f"the tokenizer of {base_model} cannot be read: {error}") from error


def _unreachable(base_model: str, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"expected a model named {base_model!r} in a local directory, in the Hugging Face cache or on the hub; "
        f"found none ({first_line}). Check the name and the network, or give a directory; `bundled` needs neither"
    )


def _model(base_model: str, source: str, config: Any, hardware: Hardware, quantized: Any) -> Any:
    extra: dict[str, Any] = {}
    if quantized is not None:
        extra = {"quantization_config": quantized, "device_map": {"": _device(hardware)}}
    try:
        with without_bars() if Path(source).is_dir() else contextlib.nullcontext():
            model = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=getattr(torch, hardware.dtype),
                use_safetensors=True,
                trust_remote_code=False,
                **extra,
            )
    except OSError as error:
        if "safetensors" in str(error):
            raise PolicyLoadError(
                f"{base_model} has no safetensors weights, and no others are read: {error}"
            ) from error
        raise PolicyLoadError(_unreachable(base_model, error)) from error
    except (ValueError, KeyError, SafetensorError, RuntimeError) as error:
        # an encoder, a configuration that does not fit the weights, more weights than memory
        raise PolicyLoadError(f"{base_model} cannot be loaded as a causal language model: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if quantized is None:
        return model.to(_device(hardware))
    for module in model.modules():
        # bitsandbytes 0.50 repacks a 4-bit weight for AVX512-BF16 at the first forward in eval mode, for good, and
        # the packed product has no gradient: layers below it would silently learn nothing
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers draws no progress bars: reading a local file is no news, and the caller has its own bar."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _device(hardware: Hardware) -> torch.device:
    if hardware.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(hardware.device)


def _context(config: Any) -> int | None:
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(found) if found else None


def _four_bit(hardware: Hardware) -> tuple[Any, str]:
    """The 4-bit configuration, or None, and the note for the person either way."""
    if hardware.supports_4bit:
        compute = torch.float32 if hardware.dtype == "float32" else getattr(torch, hardware.dtype)
        try:
            _try_four_bit(_device(hardware), compute)
        except (ImportError, RuntimeError, NotImplementedError, AttributeError, OSError) as error:
            # whatever a half-installed bitsandbytes raises, the run goes on and says why it is not in 4 bits
            reason = (
                f"bitsandbytes failed its trial on {hardware.device}: {str(error).strip().splitlines()[0]}"
            )
        else:
            config = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=compute,
            )
            return config, "the frozen base is loaded in 4 bits (NF4)"
    else:
        reason = hardware.reasons.get("supports_4bit", "not supported here")
    return (
        None,
        f"4-bit was asked for but is not possible: {reason}. The base is loaded in {hardware.dtype} instead",
    )


def _try_four_bit(device: torch.device, compute: torch.dtype) -> None:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=compute, quant_type="nf4").to(device)
    out = layer(torch.ones(1, 64, device=device, dtype=compute))
    if not bool(torch.isfinite(out).all()):
        raise RuntimeError("a 4-bit product gave values that are not finite")


def adapter_check(policy: LoadedPolicy, path: Path, facts: dict[str, Any]) -> None:
    """Raises PolicyLoadError for an adapter of another base than the one that is loaded."""
    expected = facts.get("base_model_hash")
    if expected and expected != policy.base_model_hash:
        raise PolicyLoadError(
            f"the adapter {path} was trained on {facts.get('base_model')!r} ({expected[:19]}…), but "
            f"{policy.base_model!r} is {policy.base_model_hash[:19]}…: on another base it answers nonsense. "
            f"Give the base it was trained on"
        )
    if not expected:
        policy.notes.append(
            f"{path.name} has no {FACTS}: whether it belongs to this base could not be checked"
        )


def _with_adapter(policy: LoadedPolicy, path: Path, facts: dict[str, Any], trainable: bool) -> Any:
    adapter_check(policy, path, facts)
    try:
        return PeftModel.from_pretrained(policy.model, path, is_trainable=trainable, use_safetensors=True)
    except (ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise PolicyLoadError(f"the adapter {path} does not fit {policy.base_model}: {error}") from error


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if names
        else "nothing"
    )
