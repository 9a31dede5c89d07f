"""Export of a policy as ONNX: one forward pass from tokens to logits for onnxruntime, without torch."""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import psutil
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_errors

from rl.agents.base import Message
from rl.checksums import sums_check
from rl.export.agreement import Expected, ExportAgreement, FloatArray, measured
from rl.export.artifact import (
    ExportRefused,
    ExportResult,
    Progress,
    manifest_write,
    silent,
    size_text,
    staged_folder,
)
from rl.export.reference import (
    Reference,
    check_prompts,
    cores_for,
    reference_make,
    torch_cores,
    transformers_quiet,
    whole_weights_rounded,
)
from rl.export.source import Source, source_open
from rl.training.hardware import detect
from rl.training.loading import PolicyLoadError
from rl.training.policy import load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL = "model.onnx"
OPSET = 18
"""Read by onnxruntime since 1.14 (2023). Newer sets write attention as one operator, which fewer programs know."""

ONE_FILE_BYTES = 1_500_000_000
"""Larger weights go to model.onnx.data: a protobuf message is limited to 2 GiB."""

LOG_PROBABILITY_BAR = 0.02
"""Largest difference of a log-probability from base + adapter's, in nats.

Both compute in float32; merging and the order of sums caused 1e-5 to 5e-4 in every family tried.
"""


def export_onnx(
    base_model: str | None,
    adapter: Path | None,
    output: Path,
    *,
    prompts: Sequence[Sequence[Message]] = (),
    progress: Progress | None = None,
) -> ExportResult:
    """Writes base + adapter as `model.onnx` (inputs `input_ids`, `attention_mask`; output `logits`), in float32.

    Inputs are int64 (batch, sequence) of any size, padded on either side; logits are float32 (batch, sequence,
    vocabulary). There is no key-value cache. base_model, output, prompts: as in `export_merged`. onnxruntime then runs
    the check prompts, alone and padded, and its log-probabilities are compared with those of base + adapter under PEFT.
    Raises ExportRefused and leaves nothing behind.
    """
    progress = progress or silent
    source = source_open(base_model, adapter)
    asked = check_prompts(source.tokenizer(), prompts)
    weights_bytes = 4 * source.weights.base.parameters
    _memory_check(weights_bytes)
    with staged_folder(output, weights_bytes) as folder:
        reference = reference_make(source, asked, progress=progress)
        if reference.skip_reason:
            raise ExportRefused(reference.skip_reason)
        progress("tracing", 0, 0)
        onnx_write(source, folder / MODEL)
        source.copy_config(folder)
        source.copy_tokenizer(folder)
        progress("comparing with the original", 0, 0)
        checked = _check(folder / MODEL, reference, cores_for(weights_bytes))
        return manifest_write(folder, output, "onnx", checked)


def session_open(folder: Path | str, cores: int = 1) -> onnxruntime.InferenceSession:
    """An onnxruntime session of an exported folder, after verifying every file's SHA-256.

    Raises FileDamaged, and ExportRefused if onnxruntime does not open it.
    """
    folder = Path(folder)
    sums_check(folder, "export it again, or copy it again")
    return _session(folder / MODEL, cores)


class _Forward(torch.nn.Module):
    """Tokens and mask to logits. Positions count over the mask, so that padding on the left changes nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.positioned = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        positions = {"position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)} if self.positioned else {}
        logits: torch.Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
        ).logits
        return logits


def onnx_write(source: Source, path: Path) -> None:
    """Traces the merged model and writes it, without checks; large weights go to a file beside it."""
    ids = torch.zeros(
        (2, 7), dtype=torch.int64
    )  # sizes other than 0 and 1, which tracing takes for constants
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with _merge_adapter(source) as model, _tracing_quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                _Forward(model),
                (ids, torch.ones_like(ids)),
                dynamo=True,
                dynamic_shapes=(axes, axes),
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise ExportRefused(
                f"expected a model that torch can trace to ONNX, found {source.weights.base.model_type!r}, where it "
                f"gave up ({str(error).strip().splitlines()[0]}); export it as merged instead"
            ) from error
        assert program is not None  # it is None for the exporter of TorchScript only
        program.save(path, external_data=4 * source.weights.base.parameters > ONE_FILE_BYTES)


@contextmanager
def _merge_adapter(source: Source) -> Iterator[object]:
    """The model in float32 with the adapter merged by PEFT: onnxruntime has few bfloat16 operators on CPUs."""
    adapter = source.adapter.path if source.adapter is not None else None
    hardware = replace(detect(), device="cpu", dtype="float32")
    try:
        with transformers_quiet():
            model = load_policy(str(source.base), adapter, hardware=hardware).model
    except PolicyLoadError as error:
        raise ExportRefused(str(error)) from error
    if adapter is not None:
        whole_weights_rounded(model, source.weights.base.main_dtype)
        model = model.merge_and_unload()
    try:
        with torch_cores(cores_for(source.weights.base.total_bytes)):
            yield model.eval()
    finally:
        del model
        gc.collect()


@contextmanager
def _tracing_quiet() -> Iterator[None]:
    """Silences torch's warnings while tracing."""
    chatter = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.setLevel(level)


def _memory_check(weights_bytes: int) -> None:
    # the traced model, plus the copy that onnxruntime or the writer of the file holds
    needed, free = int(weights_bytes * 2.2), psutil.virtual_memory().available
    if needed > free:
        raise ExportRefused(
            f"expected {size_text(needed)} of free memory to trace and compare a model of "
            f"{size_text(weights_bytes)} in float32, found {size_text(free)}; export on a larger machine, or as merged"
        )


def _check(path: Path, reference: Reference, cores: int) -> dict[str, object]:
    session = _session(path, cores)

    def log_probs(ids: Sequence[int], positions: int) -> FloatArray:
        return _log_softmax(_run(session, [ids])[0][-positions:])

    found = measured(reference.policy, log_probs)
    # the shortest and the longest in one batch: the shortest is padded
    texts = sorted((text for text in reference.policy if not text.held_out), key=lambda text: len(text.ids))
    pair = [texts[0], texts[-1]]
    padded = [_log_softmax(logits) for logits in _run(session, [text.ids for text in pair])]
    alone = [log_probs(text.ids, len(text.log_probs)) for text in texts]
    difference = _largest(alone, texts)
    padding_difference = _largest(padded, pair)
    if not max(difference, padding_difference) <= LOG_PROBABILITY_BAR:  # NaN is refused too
        raise ExportRefused(
            f"expected the ONNX model to compute what base + adapter does (log-probabilities apart by at most "
            f"{LOG_PROBABILITY_BAR:.2g} nats), found {difference:.3g}, and {padding_difference:.3g} where padded; the "
            "export was thrown away, export the policy as merged instead"
        )
    return {
        "prompts": len(reference.prompts),
        "logprob_max_abs_diff": difference,
        "logprob_max_abs_diff_padded": padding_difference,
        "opset": OPSET,
        "agreement": ExportAgreement(policy=found).as_dict(),
    }


def _session(path: Path, cores: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except (
        onnxruntime_errors.Fail,
        onnxruntime_errors.InvalidGraph,
        onnxruntime_errors.NotImplemented,
        onnxruntime_errors.InvalidProtobuf,
    ) as error:
        raise ExportRefused(
            f"expected an ONNX model that onnxruntime opens, found one it refuses ({str(error).splitlines()[0]}); "
            "export the policy as merged instead"
        ) from error


def _run(session: onnxruntime.InferenceSession, prompts: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Logits of each prompt's own tokens (tokens, vocabulary); prompts are padded on the left."""
    longest = max(len(ids) for ids in prompts)
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
    return [logits[row, longest - len(prompt) :] for row, prompt in enumerate(prompts)]


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: FloatArray = (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)
    return found


def _largest(found: Sequence[FloatArray], texts: Sequence[Expected]) -> float:
    return max(
        float(np.abs(rows[-len(text.log_probs) :] - text.log_probs).max())
        for rows, text in zip(found, texts, strict=True)
    )
