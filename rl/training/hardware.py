"""What machine is this, and what follows from it: device, dtype, 4-bit, preset, each with its reason."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GB = 1e9
"""Bytes; decimal, so that a card sold as 24 GB counts as 24."""

PROBE_VERSION = 1
"""Raised when the probe measures something else, so that old cache files are not believed."""

MAX_RELATIVE_ERROR = 1e-4
"""Largest error of a faster float32 product, relative to the largest entry of the exact one, still called float32."""

MIN_GAIN = 1.15
"""A faster setting is taken only when it beats the plain one by this factor: below, the difference is noise."""


@dataclass(frozen=True)
class Hardware:
    """One machine as training sees it. `reasons` says for each derived setting why it is so."""

    device: str
    """`cuda`, `mps` or `cpu`."""
    device_name: str
    memory_gb: float
    """Of the accelerator, or RAM where there is none; 1 GB = 1e9 bytes."""
    ram_gb: float
    cores: int
    cpu_model: str
    dtype: str
    """`float32`, `bfloat16` or `float16`: what frozen weights are loaded and multiplied in."""
    matmul_precision: str
    """`highest` or `medium`: argument of torch.set_float32_matmul_precision while the furnace works."""
    supports_4bit: bool
    preset: str
    """`default`, `small_gpu`, `high_quality` or `cpu`."""
    reasons: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    """What the probe saw: GFLOP/s per setting (`float32`, `float32_medium`, `bfloat16`) and the relative error."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def detect(cache_dir: str | Path | None = None) -> Hardware:
    """Look at this machine. On a CPU a short probe (below a second) decides the dtype; `cache_dir` keeps its outcome.

    CUDA is seen as PyTorch sees it, so CUDA_VISIBLE_DEVICES is honoured and the first visible card described.
    """
    import torch

    reasons: dict[str, str] = {}
    measured: dict[str, float] = {}
    matmul_precision = "highest"
    ram_gb = round(psutil.virtual_memory().total / GB, 1)
    cpu = cpu_model()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device, name, memory_gb = "cuda", properties.name, round(properties.total_memory / GB, 1)
        reasons["device"] = f"PyTorch {torch.__version__} sees CUDA: {name}, {memory_gb} GB"
        # emulated bf16 is reported as supported too, and is slower than fp16
        if torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = "bfloat16"
            reasons["dtype"] = (
                f"{name} multiplies bfloat16 natively (compute capability {_capability(properties)})"
            )
        else:
            dtype = "float16"
            reasons["dtype"] = (
                f"{name} (compute capability {_capability(properties)}) has no native bfloat16: float16, loss scaled"
            )
    elif torch.backends.mps.is_available():
        device, name = "mps", cpu
        memory_gb = round(torch.mps.recommended_max_memory() / GB, 1)
        dtype = "float32"
        reasons["device"] = f"no CUDA; Metal (MPS) found, {memory_gb} GB of its memory recommended for use"
        reasons["dtype"] = "float32: half precision on MPS is not measured by this project"
    else:
        device, name, memory_gb = "cpu", cpu, ram_gb
        reasons["device"] = f"no CUDA or MPS seen by PyTorch {torch.__version__}"
        measured = _probe(cache_dir)
        dtype, reasons["dtype"] = _cpu_dtype(measured)
        matmul_precision, reasons["matmul_precision"] = _cpu_matmul_precision(measured)
    reasons.setdefault("matmul_precision", "only measured on CPU")
    supports_4bit, reasons["supports_4bit"] = _supports_4bit(device)
    preset, reasons["preset"] = _preset(device, memory_gb)
    return Hardware(
        device=device,
        device_name=name,
        memory_gb=memory_gb,
        ram_gb=ram_gb,
        cores=_cores(),
        cpu_model=cpu,
        dtype=dtype,
        matmul_precision=matmul_precision,
        supports_4bit=supports_4bit,
        preset=preset,
        reasons=reasons,
        measured=measured,
    )


def cpu_model() -> str:
    """The processor's own name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: ask Python
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores this process may use (a container's or taskset's share), not those of the whole machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _capability(properties: Any) -> str:
    return f"{properties.major}.{properties.minor}"


def _cpu_dtype(measured: dict[str, float]) -> tuple[str, str]:
    plain = max(measured["float32"], measured["float32_medium"] if _medium_ok(measured) else 0.0)
    gain = measured["bfloat16"] / plain
    figures = f"{measured['bfloat16']:.0f} against {plain:.0f} GFLOP/s"
    if gain >= BF16_MIN_GAIN:
        return "bfloat16", f"bfloat16 products run {gain:.1f}x as fast as float32 here ({figures}, measured)"
    return "float32", f"bfloat16 products run only {gain:.2g}x as fast as float32 here ({figures}, measured)"


BF16_MIN_GAIN = 1.7
"""bfloat16 products this much faster, or float32 stays. On a Zen 4 (2.0x) packed rows train 1.8 times as fast in
bfloat16 at 100 M parameters and 1.6 times at 4 M; the LoRA matrices and their optimiser stay float32."""


def _medium_ok(measured: dict[str, float]) -> bool:
    return measured["medium_relative_error"] <= MAX_RELATIVE_ERROR


def _cpu_matmul_precision(measured: dict[str, float]) -> tuple[str, str]:
    gain = measured["float32_medium"] / measured["float32"]
    error = measured["medium_relative_error"]
    seen = f"{gain:.1f}x as fast, relative error {error:.0e}, measured"
    if not _medium_ok(measured):
        return "highest", f"`medium` is not float32 any more here ({seen}; allowed {MAX_RELATIVE_ERROR:.0e})"
    if gain < MIN_GAIN:
        return "highest", f"`medium` brings nothing here ({seen})"
    return "medium", f"`medium` is faster and as exact here ({seen})"


def _supports_4bit(device: str) -> tuple[bool, str]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return False, "bitsandbytes is not installed"
    if device == "mps":
        return False, "bitsandbytes' 4-bit on MPS is not tested by this project"
    if device == "cpu" and platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return False, f"bitsandbytes has no CPU kernels for {platform.machine()}"
    return True, f"bitsandbytes has NF4 kernels for {device}"


def _preset(device: str, memory_gb: float) -> tuple[str, str]:
    if device == "cpu":
        return "cpu", "no accelerator"
    if memory_gb >= 24:
        return "high_quality", f"{memory_gb} GB of accelerator memory, at least 24"
    if memory_gb >= 16:
        return "default", f"{memory_gb} GB of accelerator memory, at least 16 and below 24"
    return "small_gpu", f"{memory_gb} GB of accelerator memory, below 16"


def _probe(cache_dir: str | Path | None) -> dict[str, float]:
    """GFLOP/s of one linear layer's product per setting; read from `cache_dir` where this host was measured before."""
    import torch

    host = f"{cpu_model()}|{_cores()}|{torch.get_num_threads()}|{torch.__version__}|{PROBE_VERSION}"
    cache = None
    if cache_dir is not None:
        digest = hashlib.sha256(host.encode()).hexdigest()[:16]
        cache = Path(cache_dir) / f"hardware-{digest}.json"
        measured = _cached(cache)
        if measured is not None:
            return measured
    measured = measure_products()
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        half = cache.with_name(f".{cache.name}.{os.getpid()}")
        half.write_text(json.dumps(measured), "utf-8")
        half.replace(cache)
    return measured


PROBE_KEYS = ("float32", "float32_medium", "bfloat16", "medium_relative_error")


def _cached(path: Path) -> dict[str, float] | None:
    try:
        measured = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None  # not measured yet, or cut off while writing: measure
    if isinstance(measured, dict) and all(isinstance(measured.get(key), float) for key in PROBE_KEYS):
        return {key: measured[key] for key in PROBE_KEYS}
    return None


def measure_products(rows: int = 512, width: int = 512, budget_s: float = 0.15) -> dict[str, float]:
    """Time [rows, width] @ [width, width] in float32 (`highest`, `medium`) and bfloat16: the best of several runs.

    The product is small on purpose: bfloat16 was reported 44 to 500 times slower than float32 on CPUs without
    AVX512-BF16 or AMX (pytorch issue 146508), and even then one run stays below a second.
    Returns GFLOP/s under `float32`, `float32_medium`, `bfloat16`, and `medium_relative_error`.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, width, generator=generator)
    b = torch.randn(width, width, generator=generator)
    before = torch.get_float32_matmul_precision()

    def rate(x: torch.Tensor, y: torch.Tensor) -> float:
        best, started = float("inf"), time.perf_counter()
        x @ y  # first use loads kernels and packs weights
        for _ in range(40):
            began = time.perf_counter()
            x @ y
            now = time.perf_counter()
            best = min(best, now - began)
            if now - started > budget_s:
                break
        return 2 * rows * width * width / best / 1e9

    try:
        with torch.inference_mode():
            torch.set_float32_matmul_precision("highest")
            plain = rate(a, b)
            torch.set_float32_matmul_precision("medium")
            medium = rate(a, b)
            exact = a.double() @ b.double()
            error = float(((a @ b).double() - exact).abs().max() / exact.abs().max())
            half = rate(a.bfloat16(), b.bfloat16())
    finally:
        torch.set_float32_matmul_precision(before)
    return {"float32": plain, "float32_medium": medium, "bfloat16": half, "medium_relative_error": error}
