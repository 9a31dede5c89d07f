"""A policy: base model, LoRA adapter and tokenizer. Loading, generation, and saving an adapter that can be checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from packed_forward.logps import causal_model
from packed_forward.row_cache import RowCache, SelftestCache, row_key
from rl.agents.base import Message
from rl.chat_templates import template_read
from rl.checksums import TEMPLATE_FILES, TOKENIZER_FILES, base_files, base_hash, sums_write
from rl.decoding.constraint import Constraint, GrammarVocabulary, SchemaRefused
from rl.recipes import Recipe
from rl.training.constrained_generation import (
    AnswerConstraints,
    AnswerForm,
    AnswerForms,
    Sampling,
    SchemaMask,
    generate_tokens,
    is_answered_by_position,
    vocabulary_of,
)
from rl.training.encoding import Encoder, batches_within
from rl.training.hardware import Hardware, cpu_model, detect
from rl.training.loading import (
    ADAPTER_FILES,
    FACTS,
    FINDINGS,
    TOKENS,
    PolicyLoadError,
    adapter_read,
    base_check,
    config_load,
    encoder_made,
    four_bit,
    model_load,
    model_located,
    text_limits,
    tokenizer_load,
)


@dataclass
class LoadedPolicy:
    """A model ready to score and to answer, on its device."""

    model: torch.nn.Module
    """A transformers causal model, or a PeftModel around one."""
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    base_model: str
    """Base model as it was named: `bundled`, a hub name or a path."""
    base_model_hash: str
    """Identity of the base (`rl.checksums.base_hash`)."""
    device: torch.device
    hardware: Hardware
    quantization: str = "none"
    """Quantization in use: `none` or `4bit`."""
    adapter: str | None = None
    base_files: dict[str, str] = field(default_factory=dict)
    """Files of the base that its identity covers, and their sums; none of a model from the hub."""
    notes: list[str] = field(default_factory=list)
    strategy: str | None = None
    """Strategy by which rows that share a prompt are computed (`packed.strategies.Strategy`); None before the
    self-test."""
    strategy_max_tokens: int = 0
    """Tokens of the longest row it was tried on."""
    selftest_cache: SelftestCache | None = None
    """Results of earlier self-tests of this model (`packed_forward.row_cache`); None stores
    nothing."""
    answers_cache: RowCache | None = None
    """The base's own answers; None stores nothing."""
    scored: dict[tuple[object, ...], torch.Tensor] | None = None
    """Log-probabilities that were computed before, by adapter, form and tokens; None keeps none, as where the
    weights still change."""
    is_base: bool = False
    """True inside `without_adapter`."""

    @property
    def pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @property
    def context(self) -> int | None:
        return self.encoder.context

    @functools.cached_property
    def vocabulary(self) -> GrammarVocabulary | None:
        """Vocabulary as grammars read it; None where its tokenizer does not say what its tokens write."""
        return vocabulary_of(self.tokenizer, self._vocabulary_size, self.encoder.stop_ids)

    def constraint(self, form: AnswerForm) -> Constraint | None:
        """Constraint of one answer by its form; None for free text, and with a note where it cannot be enforced."""
        if form is None:
            return None
        fault = "the tokenizer does not say which bytes its tokens write"
        try:
            if self.vocabulary is not None:
                if isinstance(form, Mapping):
                    return Constraint.of_schema(self.vocabulary, form)
                return Constraint.of_answers(self.vocabulary, form)
        except SchemaRefused as error:
            fault = str(error)
        note = f"answers were written without their JSON schema: {fault}"
        if note not in self.notes:
            self.notes.append(note)
        return None

    def constraints(self, forms: Sequence[AnswerForm]) -> AnswerConstraints:
        """Constraints of a batch of answers by their forms, as `constraint`."""
        return AnswerConstraints(
            [self.constraint(form) for form in forms], self.encoder.stop_ids, self._vocabulary_size
        )

    def answer_forms(self) -> AnswerForms:
        """Forms of answers by prompt, none yet."""
        return AnswerForms(self.constraint, self.encoder.stop_ids, self._vocabulary_size)

    @property
    def _vocabulary_size(self) -> int:
        """Tokens that the model gives logits of."""
        return int(self.model.config.get_text_config().vocab_size)

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the base model answers."""
        before, self.is_base = self.is_base, True
        try:
            with (
                self.model.disable_adapter()
                if isinstance(self.model, PeftModel)
                else contextlib.nullcontext()
            ):
                yield
        finally:
            self.is_base = before

    @functools.cached_property
    def reference(self) -> LoadedPolicy | None:
        """The reference that the adapter was trained against, from its folder, loaded once; None where that is the
        base. It is the same model but for its adapter, and is computed as this one is."""
        reference = reference_load(self)
        if reference is not None:
            reference.selftest_cache = self.selftest_cache
            reference.scored = None if self.scored is None else {}
        return reference


@dataclass(frozen=True)
class Generation:
    """One answer."""

    text: str
    tokens: int
    """Tokens generated, the turn end included."""
    finish_reason: str
    """`stop`, or `length` where max_new_tokens ended it."""
    unforced: bool = False
    """True where its form took no token away: written without the form, it would be the same."""


def load_policy(
    base_model: str,
    adapter: str | Path | None = None,
    *,
    hardware: Hardware | None = None,
    quantization: str = "none",
    trainable: bool = False,
    recipe: Recipe | None = None,
    cache_dir: str | Path | None = None,
) -> LoadedPolicy:
    """Load a base model (`bundled`, a Hugging Face name or a local directory) and, on it, an adapter.

    `trainable` adds a fresh LoRA of the recipe's rank on all linear layers, or opens the given adapter for training.
    `quantization="4bit"` loads the frozen base in NF4 where the machine can; where not, a note says so and it is
    loaded as it is. Weights are read from safetensors only and no code of a repository is ever run. `cache_dir` keeps
    what later runs need not find out again: tokens of texts, and how rows of this model can be computed.
    Raises PolicyLoadError.
    """
    hardware = hardware or detect()
    facts = adapter_read(adapter) if adapter is not None else {}
    source = model_located(base_model)
    notes: list[str] = []
    config, tokenizer = config_load(base_model, source), tokenizer_load(base_model, source)
    if adapter is not None and (template := template_read(Path(adapter))):
        tokenizer.chat_template = template
    four_bit_config = None
    if quantization == "4bit":
        four_bit_config, note = four_bit(hardware)
        notes.append(note)
    encoder = encoder_made(base_model, tokenizer, *text_limits(config))
    model = model_load(base_model, source, config, hardware, four_bit_config)
    notes += encoder.notes
    policy = LoadedPolicy(
        model=model,
        tokenizer=tokenizer,
        encoder=encoder,
        base_model=base_model,
        base_model_hash=base_hash(source, getattr(model.config, "_commit_hash", None)),
        base_files=base_files(Path(source)) if Path(source).is_dir() else {},
        device=model.device,
        hardware=hardware,
        quantization="4bit" if four_bit_config else "none",
        adapter=str(adapter) if adapter is not None else None,
        notes=notes,
    )
    if cache_dir is not None:
        encoder.cache = RowCache(Path(cache_dir) / TOKENS)
        policy.selftest_cache = SelftestCache(
            RowCache(Path(cache_dir) / FINDINGS, max_rows=10_000),
            policy.base_model_hash,
            policy.quantization,
            cpu_model(),
        )
        policy.answers_cache = RowCache(Path(cache_dir) / "answers.sqlite3", max_rows=10_000)
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


REFERENCE = "reference"
"""Folder in a policy's adapter that holds the reference it was trained against, where that is not the base."""


def reference_load(policy: LoadedPolicy) -> LoadedPolicy | None:
    """The reference a policy was trained against, from its own folder; None where that is the base itself."""
    folder = Path(policy.adapter) / REFERENCE if policy.adapter is not None else None
    if folder is None or not (folder / ADAPTER_FILES[1]).is_file():
        return None
    return load_policy(policy.base_model, folder, hardware=policy.hardware, quantization=policy.quantization)


PADDED_TOKENS = 8192
"""Most tokens of prompts that a CPU answers together, padding included: a few long ones do not widen the others."""


def generate(
    policy: LoadedPolicy,
    prompts: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 32,
    forms: Sequence[AnswerForm] | None = None,
) -> list[Generation]:
    """Answer each prompt, in the order given. Temperature 0 is greedy.

    forms: of the answer to each prompt, a JSON schema or a closed set, enforced token by token; None: free text. A form
    that cannot be enforced constrains nothing, and a note of the policy says so.

    Prompts of similar length are answered together, padded on the left; one that leaves no room for
    `max_new_tokens` in the model's context loses its oldest tokens. The answers of a base come from its cache where
    they are there. The caller's random state is left as it was.
    """
    prompt_ids, _ = policy.encoder.prompts(prompts, max_new_tokens)
    sampling = Sampling(max_new_tokens, temperature)
    served = list(forms) if forms else [None] * len(prompt_ids)
    answers, keys = _answers_known(policy, prompt_ids, served, f"{sampling} {seed}")
    order = sorted((i for i in range(len(prompt_ids)) if i not in answers), key=lambda i: len(prompt_ids[i]))
    model, stop = causal_model(policy.model), set(policy.encoder.stop_ids)
    was_training = policy.model.training
    policy.model.eval()
    devices = [policy.device] if policy.device.type == "cuda" else []
    generator = torch.Generator(policy.device).manual_seed(seed)
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(), matmul(policy.hardware):
            torch.manual_seed(seed)
            lengths = [len(ids) for ids in prompt_ids]
            at_once = PADDED_TOKENS if policy.device.type == "cpu" else 0
            for rows in batches_within(order, lengths, batch_size, at_once):
                constraints = policy.constraints([served[i] for i in rows])
                asked = [prompt_ids[i] for i in rows]
                if is_answered_by_position(model):
                    found = generate_tokens(
                        model, asked, 1, sampling, sorted(stop), policy.pad_token_id, generator, constraints
                    ).tolist()
                else:
                    found = _generated(policy, asked, sampling, constraints)
                for row, (i, tokens) in enumerate(zip(rows, found, strict=True)):
                    answers[i] = _generation(
                        policy.tokenizer, tokens, stop, unforced=row not in constraints.forced
                    )
    finally:
        policy.model.train(was_training)
    if keys and policy.answers_cache is not None:
        fresh = {keys[i]: json.dumps(dataclasses.astuple(answers[i])).encode() for i in order}
        policy.answers_cache.put(fresh)
    return [answers[i] for i in range(len(prompt_ids))]


def _answers_known(
    policy: LoadedPolicy, prompt_ids: Sequence[Sequence[int]], forms: Sequence[AnswerForm], sampling: str
) -> tuple[dict[int, Generation], list[bytes]]:
    """Answers that this base gave before, by the number of their prompt, and the keys of all; none of a policy."""
    is_base = policy.is_base or not isinstance(policy.model, PeftModel)
    if policy.answers_cache is None or not is_base:
        return {}, []
    base = f"{policy.base_model_hash} {policy.quantization} {policy.hardware.dtype} {policy.encoder.identity}"
    keys = [
        row_key(base, sampling, json.dumps(form, sort_keys=True), ids)
        for form, ids in zip(forms, prompt_ids, strict=True)
    ]
    known = policy.answers_cache.get(keys)
    return {i: Generation(*json.loads(known[key])) for i, key in enumerate(keys) if key in known}, keys


def _generated(
    policy: LoadedPolicy, prompts: Sequence[Sequence[int]], sampling: Sampling, constraints: AnswerConstraints
) -> list[list[int]]:
    """Tokens of answers by transformers, of an architecture that takes no positions."""
    width, draws = max(len(ids) for ids in prompts), sampling.temperature > 0
    ids = torch.full((len(prompts), width), policy.pad_token_id)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = policy.model.generate(
        input_ids=ids.to(policy.device),
        attention_mask=mask.to(policy.device),
        generation_config=GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=draws,
            temperature=sampling.temperature if draws else None,
            top_p=sampling.top_p if draws else None,
            top_k=sampling.top_k if draws else None,
            eos_token_id=sorted(policy.encoder.stop_ids) or None,
            pad_token_id=policy.pad_token_id,
        ),
        logits_processor=[SchemaMask(constraints)] if constraints else None,
    )
    found: list[list[int]] = out[:, width:].tolist()
    return found


def _generation(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: set[int], *, unforced: bool
) -> Generation:
    end = next((i for i, token in enumerate(tokens) if token in stop), None)
    answer_tokens = tokens if end is None else tokens[:end]
    text = tokenizer.decode(answer_tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Generation(
        text, len(tokens) if end is None else end + 1, "length" if end is None else "stop", unforced
    )


@contextlib.contextmanager
def matmul(hardware: Hardware) -> Iterator[None]:
    """Inside, float32 products run at the precision this machine was found to be exact and quick with."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(hardware.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def lora_config(recipe: Recipe, model: torch.nn.Module) -> LoraConfig:
    """LoRA on every linear layer except the output head; GPT-2's transposed Conv1D counts as linear."""
    return LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )


def _with_adapter(
    policy: LoadedPolicy, path: Path, facts: Mapping[str, object], trainable: bool
) -> PeftModel:
    adapter_check(policy, path, facts)
    try:
        return PeftModel.from_pretrained(policy.model, path, is_trainable=trainable, use_safetensors=True)
    except (ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise PolicyLoadError(f"the adapter {path} does not fit {policy.base_model}: {error}") from error


_CARD = """---
library_name: peft
base_model: {base_model}
tags: [ratchet, preference-learning, lora]
---
# LoRA adapter for {purpose}

- base model: `{base_model}` ({base_model_hash})
- trained with: {method}

A checkpoint of a training run. It is not evaluated: its figures, data and limits stand in the card of the policy it
becomes.
"""


def adapter_save(
    policy: LoadedPolicy,
    path: str | Path,
    *,
    agent: str = "",
    method: str = "",
    weights: dict[str, torch.Tensor] | None = None,
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
    """Make a directory with a PEFT adapter complete: tokenizer, chat template, ratchet.json and a model card.

    The card replaces PEFT's template; neither it nor adapter_config.json names the path of the base model on this
    machine, but the base as it was asked for. The registry writes a fuller card once the adapter is a policy
    (`rl.registry.model_card`).
    """
    config = path / "adapter_config.json"
    if config.is_file():
        named = json.loads(config.read_text("utf-8")) | {"base_model_name_or_path": policy.base_model}
        config.write_text(json.dumps(named, indent=2) + "\n", "utf-8")
    policy.tokenizer.save_pretrained(path)
    facts = {
        "base_model": policy.base_model,
        "base_model_hash": policy.base_model_hash,
        "base_files": policy.base_files,
        "agent": agent,
        "method": method,
        "trained_on": policy.quantization,
    }
    (path / FACTS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    (path / "README.md").write_text(
        _CARD.format(**facts, purpose=f"agent `{agent}`" if agent else "no agent"), "utf-8"
    )
    beside = [file for name in (*TEMPLATE_FILES, *TOKENIZER_FILES) for file in path.glob(name)]
    sums_write(path, [*ADAPTER_FILES, FACTS, *(str(file.relative_to(path)) for file in beside)])


def adapter_check(policy: LoadedPolicy, path: Path, facts: Mapping[str, object]) -> None:
    """Raises PolicyLoadError for an adapter of another base than the one that is loaded."""
    expected = facts.get("base_model_hash")
    if expected:
        base_check(f"the adapter {path}", facts, policy.base_model, policy.base_model_hash, policy.base_files)
    if not expected:
        policy.notes.append(
            f"{path.name} has no {FACTS}: whether it belongs to this base could not be checked"
        )
