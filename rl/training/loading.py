"""Base models and adapters: their files on disk, checked for completeness, and their shapes, encoders and weights."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.utils import cached_file, logging

from rl.bundled_models import resolve_base_model
from rl.chat_templates import template_read
from rl.checksums import TEMPLATE_FILES, FileDamaged, sums_check
from rl.recipes.fit import ModelShape
from rl.training.encoding import Encoder
from rl.training.hardware import Hardware

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FINDINGS = "findings.sqlite3"
"""Name of the cache file of models. It keeps self-tests, measured speeds and the answers of base models."""

TOKENS = "tokens.sqlite3"
"""File in a cache folder with the tokens of texts."""


def load_shape(base_model: str, *, causal: bool = True) -> tuple[torch.nn.Module, Encoder, int]:
    """A base model's configuration, encoder and number of parameters, without its weights. Raises PolicyLoadError.

    With `causal` false it may be an encoder (BERT, DeBERTa), which answers nothing.
    """
    source = model_located(base_model)
    config, tokenizer = config_load(base_model, source), tokenizer_load(base_model, source)
    parameters = parameters_count(base_model, config, causal=causal)
    return config, encoder_made(base_model, tokenizer, *text_limits(config)), parameters


def model_shape(base_model: str, *, causal: bool = True) -> ModelShape:
    """The numbers of a base model that decide its memory, without its weights. Raises PolicyLoadError."""
    config = config_load(base_model, model_located(base_model))
    parameters = parameters_count(base_model, config, causal=causal)
    return ModelShape.of(config.get_text_config().to_dict(), parameters)


def parameters_count(base_model: str, config: PreTrainedConfig, *, causal: bool = True) -> int:
    """Number of parameters of a model with this configuration, without its weights. Raises PolicyLoadError."""
    from transformers import AutoModel, AutoModelForCausalLM  # they take seconds to import

    try:
        with torch.device("meta"):
            kind = AutoModelForCausalLM if causal else AutoModel
            return sum(p.numel() for p in kind.from_config(config).parameters())
    except ValueError as error:
        raise PolicyLoadError(f"{base_model} is no causal language model: {error}") from error


def load_encoder(base_model: str) -> Encoder:
    """A base model's encoder alone, without its weights. Raises PolicyLoadError."""
    source = model_located(base_model)
    limits = text_limits(config_load(base_model, source))
    return encoder_made(base_model, tokenizer_load(base_model, source), *limits)


def text_limits(config: PreTrainedConfig) -> tuple[int | None, int]:
    """Positions that a model can read, None without a limit, and rows of its embedding."""
    return context_of(config), int(config.get_text_config().vocab_size)


def encoder_made(
    base_model: str, tokenizer: PreTrainedTokenizerBase, context: int | None, rows: int
) -> Encoder:
    """A base model's encoder, by its `text_limits`. Raises PolicyLoadError where the tokenizer writes tokens without an
    embedding.

    Special tokens beyond the embeddings that no prompt or answer has are allowed: Gemma's stands for an image.
    """
    encoder = Encoder(tokenizer, context)
    if len(tokenizer) <= rows:
        return encoder
    used = {tokenizer.pad_token_id, tokenizer.bos_token_id, *encoder.stop_ids}
    unused = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} - used
    beyond = [token for token, id in tokenizer.get_vocab().items() if id >= rows and id not in unused]
    if beyond:
        raise PolicyLoadError(
            f"{base_model}: its tokenizer has {len(tokenizer):,} tokens and its embeddings {rows:,} rows, so "
            f"{len(beyond):,} tokens such as {beyond[0]!r} have none: give the tokenizer that belongs to the model, or "
            "resize its embeddings"
        )
    return encoder


def config_load(base_model: str, source: str) -> PreTrainedConfig:
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


def tokenizer_load(base_model: str, source: str, kind: str = "AutoTokenizer") -> PreTrainedTokenizerBase:
    """The tokenizer of a model, as `kind` of transformers. AutoTokenizer finds the kind, and takes a second for it.

    Raises PolicyLoadError.
    """
    try:
        loader = getattr(transformers, kind)
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(source, trust_remote_code=False)
        if not tokenizer.chat_template and (file := _template_file(source)) is not None:
            tokenizer.chat_template = template_read(file.parent)
        template = tokenizer.chat_template
        for one in template.values() if isinstance(template, dict) else [template] if template else []:
            if fault := template_fault(one):
                raise PolicyLoadError(f"{base_model}: its chat template is not used: {fault}")
        return tokenizer
    except OSError as error:
        raise PolicyLoadError(_unreachable(base_model, error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise PolicyLoadError(f"the tokenizer of {base_model} cannot be read: {error}") from error


def _template_file(source: str) -> Path | None:
    """`chat_template.json` of a model, which transformers reads for processors alone."""
    found = cached_file(
        source,
        TEMPLATE_FILES[1],
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _unreachable(base_model: str, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"expected a model named {base_model!r} in a local directory, in the Hugging Face cache or on the hub; "
        f"found none ({first_line}). Check the name and the network, or give a directory; `bundled` needs neither"
    )


def model_load(
    base_model: str, source: str, config: PreTrainedConfig, hardware: Hardware, quantized: object
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    extra: dict[str, object] = {}
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
    if (head := model.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(_contiguous)
    if quantized is None:
        return model.to(_device(hardware))
    for module in model.modules():
        # bitsandbytes 0.50 repacks a 4-bit weight for AVX512-BF16 at the first forward in eval mode, for good, and
        # the packed product has no gradient: layers below it would silently learn nothing
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _contiguous(_: torch.nn.Module, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Hidden states [B, T, width] in one piece. Of a slice such as the last position of each prompt, torch multiplies
    row by row with a copy of the head for each: 16 prompts copy 0.9 GB of SmolLM2's, in 4 s."""
    return (states[0].contiguous(), *states[1:])


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers draws no progress bars: the caller has its own."""
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


def context_of(config: PreTrainedConfig) -> int | None:
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(found) if found else None


def four_bit(hardware: Hardware) -> tuple[object, str]:
    """The 4-bit configuration, or None, and the note for the person either way."""
    if hardware.supports_4bit:
        from transformers import BitsAndBytesConfig

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


FACTS = "ratchet.json"
"""File beside an adapter's weights: its base, its agent, its method."""


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class PolicyLoadError(ValueError):
    """A model or adapter that cannot be used; the message says what was expected, what was found and what to do."""


def adapter_read(path: str | Path) -> dict[str, object]:
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
    _check_sums(path, "restore it from a backup, or train it again")
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


def base_check(
    what: str,
    facts: Mapping[str, object],
    base_model: str,
    found: str,
    files: Mapping[str, str] | None = None,
) -> None:
    """Raises PolicyLoadError where `what` was trained on another base than the one whose hash is `found`.

    The message names those of the base's `files` (`base_files`) that are others. What notes no hash passes.
    """
    expected = str(facts.get("base_model_hash") or "")
    if expected and expected != found:
        raise PolicyLoadError(
            f"{what} was trained on {facts.get('base_model')!r} ({expected[:19]}…), but {base_model!r} is "
            f"{found[:19]}…{base_changes(facts, files or {})}: it only works with its own base model. Give that one, "
            "or train it again"
        )


def base_changes(facts: Mapping[str, object], files: Mapping[str, str]) -> str:
    """Files in which a base differs from the one an adapter was trained on, as words to add to a message."""
    before = facts.get("base_files")
    if not isinstance(before, dict) or not before or not files:
        return ""
    changed = [name for name in sorted(before.keys() | files.keys()) if before.get(name) != files.get(name)]
    return f" (changed since: {', '.join(changed[:4])})" if changed else ""


def model_located(base_model: str) -> str:
    """A directory that holds a model, or a hub name."""

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
    _check_config(path / "config.json", tensors=sum(map(_check_safetensors, weights)))
    _check_sums(path, "copy or download the model again")
    return str(path)


CONFIG_BYTES = 4 << 20
"""Most bytes of a model's config.json."""

MOST_EXPERTS = 4096

SPARE_LAYERS = 64
"""Layers that a configuration may name beyond the tensors of its weights."""


def _check_config(file: Path, tensors: int) -> None:
    """Refuse a configuration whose model would be built for hours, before it is built. Raises PolicyLoadError."""
    if file.stat().st_size > CONFIG_BYTES:
        raise PolicyLoadError(
            f"{file} has more than {CONFIG_BYTES >> 20} MiB: it is no model's configuration"
        )
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PolicyLoadError(f"{file} is not JSON: {error}") from error
    parts = [config]
    while parts:
        part = parts.pop()
        for name, value in part.items() if isinstance(part, dict) else ():
            most = tensors + SPARE_LAYERS if "layer" in name else MOST_EXPERTS if "expert" in name else None
            if most is not None and isinstance(value, int) and value > most:
                raise PolicyLoadError(
                    f"{file}: expected {name} of at most {most:,}, as its weights have {tensors:,} tensors; "
                    f"found {value:,}"
                )
            parts.append(value)


TEMPLATE_CHARACTERS = 256 << 10
"""Most characters of a chat template."""

PROBE_S, PROBE_BYTES = 5, 1 << 30
"""CPU seconds and memory in which a chat template must write two short turns."""

_PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]), int(sys.argv[3])))
except (ImportError, ValueError, OSError):
    pass
from rl.chat_templates import TEMPLATE_ERRORS, ChatTemplate, TemplateRefused
turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
try:
    template = ChatTemplate(json.load(sys.stdin), {"bos_token": "<s>", "eos_token": "</s>"})
    written = [len(template.render(turns[:count])) for count in (1, 3)]
except (*TEMPLATE_ERRORS, TemplateRefused):
    written = [0]  # what a template refuses is said where it is used
except MemoryError:
    sys.exit(FAULT)
sys.exit(FAULT if max(written) > 1_000_000 else 0)
""".replace("FAULT", "77")


@functools.lru_cache(maxsize=64)
def template_fault(template: str) -> str:
    """Why a chat template is not used: it never ends, or fills the memory; empty where it does neither.

    It is tried in a process of its own, so that it can be ended.
    """
    if len(template) > TEMPLATE_CHARACTERS:
        return f"it has {len(template):,} characters, more than {TEMPLATE_CHARACTERS:,}"
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-I", "-c", _PROBE, root, str(PROBE_S), str(PROBE_BYTES)]
    try:
        done = subprocess.run(  # noqa: S603 (our own program)
            command,
            input=json.dumps(template),
            capture_output=True,
            text=True,
            timeout=6 * PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it does not end within {6 * PROBE_S} s"
    if done.returncode != 77 and done.returncode >= 0:
        return ""
    return f"it does not write two short turns within {PROBE_S} s and {PROBE_BYTES >> 30} GiB"


def _check_safetensors(file: Path) -> int:
    """Number of tensors in a file. Raises PolicyLoadError."""
    try:
        with safe_open(file, framework="pt") as opened:
            # the header names every tensor's place, so a cut file is noticed without reading the weights
            return len(opened.keys())
    except (SafetensorError, OSError) as error:
        raise PolicyLoadError(
            f"{file} is no whole safetensors file ({error}): copy or download it again"
        ) from error


def _check_sums(folder: Path, remedy: str) -> None:
    """Compare a folder with the sums recorded beside its files. Raises PolicyLoadError naming the file."""
    try:
        sums_check(folder, remedy)
    except FileDamaged as damage:
        raise PolicyLoadError(str(damage)) from damage


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if names
        else "nothing"
    )
