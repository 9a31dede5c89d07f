"""The machine: processor, cores, memory, GPUs, and how a training uses them."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import psutil

PROBE_VERSION = 1
"""Version of the probe; a change invalidates cached results."""

MAX_RELATIVE_ERROR = 1e-4
"""Largest error of a faster float32 product, relative to the largest entry of the exact one, still called float32."""

MIN_GAIN = 1.15
"""A faster setting is taken only when it beats the plain one by this factor: below, the difference is noise."""


class Gpu(TypedDict):
    """An accelerator that PyTorch sees; kind: cuda, rocm or mps."""

    name: str
    kind: str
    memory_gb: float
    capability: NotRequired[str]


@dataclass(frozen=True)
class Hardware:
    """One machine as training sees it. `reasons` says for each derived setting why it is so."""

    device: str
    """`cuda` (ROCm's cards too), `mps` or `cpu`."""
    device_name: str
    memory_gb: float
    """Of the accelerator, or RAM where there is none; 1 GB = 1e9 bytes."""
    ram_gb: float
    cores: int
    cpu_model: str
    dtype: str
    """`float32`, `bfloat16` or `float16`: what frozen weights are loaded and multiplied in."""
    matmul_precision: str
    """`highest` or `medium`: argument of torch.set_float32_matmul_precision while a training runs."""
    supports_4bit: bool
    preset: str
    """`default`, `small_gpu`, `high_quality` or `cpu`."""
    reasons: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    """Measurements of the probe: GFLOP/s per setting (`float32`, `float32_medium`, `bfloat16`) and the
    relative error."""
    profile: str = "auto"
    """One of PROFILES; `auto` stands for one of the others once it is detected."""
    threads: int = 0
    """For products on a CPU; 0 leaves PyTorch's own number."""
    physical_cores: int = 0
    """Of `cores`, those that are not the second thread of another."""
    gpus: list[Gpu] = field(default_factory=list)
    """Every accelerator that was seen."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


PROFILES = ("auto", "cpu_only", "desktop_cpu", "gpu")
"""`auto` takes what is there; `cpu_only` leaves an accelerator alone; `desktop_cpu` is for processors of many cores, a
thread to each; `gpu` refuses a machine without an accelerator."""

MANY_CORES = 8
"""Physical cores from which a processor without an accelerator beside it gets the profile `desktop_cpu`."""


class HardwareRefused(ValueError):
    """A profile that does not exist or that this machine cannot have."""


def detect(cache_dir: str | Path | None = None, profile: str = "auto") -> Hardware:
    """Look at this machine. On a CPU a short probe (below a second) decides the dtype; `cache_dir` keeps its outcome.

    CUDA is seen as PyTorch sees it, so CUDA_VISIBLE_DEVICES is honoured and the first visible card described; ROCm
    cards come as CUDA. Raises HardwareRefused for a profile this machine cannot have.
    """
    import torch

    if profile not in PROFILES:
        raise HardwareRefused(f"a profile is one of {', '.join(PROFILES)}; found {profile!r}")
    reasons: dict[str, str] = {}
    speeds: dict[str, float] = {}
    matmul_precision, threads = "highest", 0
    cards = gpus_seen()
    if profile == "gpu" and not cards:
        raise HardwareRefused(
            f"profile gpu needs an accelerator, and PyTorch {torch.__version__} sees none: install its build for "
            "CUDA or ROCm, look at CUDA_VISIBLE_DEVICES, or take another profile"
        )
    profile, reasons["profile"] = _profile(profile, cards)
    cpu, ram = cpu_model(), ram_gb()
    card = cards[0] if profile == "gpu" else None
    if card is None:
        device, name, memory_gb = "cpu", cpu, ram
        left = f"; {cards[0]['name']} is not used" if cards else ""
        reasons["device"] = (
            f"no CUDA or MPS seen by PyTorch {torch.__version__}" if not cards else f"{profile}{left}"
        )
        threads, reasons["threads"] = threads_fit(torch.get_num_threads())
        speeds = _probe(cache_dir)
        dtype, reasons["dtype"] = _cpu_dtype(speeds)
        matmul_precision, reasons["matmul_precision"] = _cpu_matmul_precision(speeds)
    elif card["kind"] == "mps":
        device, name, memory_gb, dtype = "mps", cpu, card["memory_gb"], "float32"
        reasons["device"] = f"no CUDA; Metal (MPS) found, {memory_gb} GB of its memory recommended for use"
        reasons["dtype"] = "float32: half precision on MPS is not measured by this project"
    else:
        device, name, memory_gb = "cuda", card["name"], card["memory_gb"]
        kind = "ROCm" if card["kind"] == "rocm" else "CUDA"
        more = f"; {len(cards)} cards in all" if len(cards) > 1 else ""
        reasons["device"] = f"PyTorch {torch.__version__} sees {kind}: {name}, {memory_gb} GB{more}"
        # emulated bf16 is reported as supported too, and is slower than fp16
        if torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = "bfloat16"
            reasons["dtype"] = (
                f"{name} multiplies bfloat16 natively (compute capability {card['capability']})"
            )
        else:
            dtype = "float16"
            reasons["dtype"] = (
                f"{name} (compute capability {card['capability']}) has no native bfloat16: float16, loss scaled"
            )
    reasons.setdefault("matmul_precision", "only measured on CPU")
    reasons.setdefault("threads", "PyTorch's default: matrix products run on the accelerator")
    supports_4bit, reasons["supports_4bit"] = _supports_4bit(device)
    preset, reasons["preset"] = _preset(device, memory_gb)
    return Hardware(
        device=device,
        device_name=name,
        memory_gb=memory_gb,
        ram_gb=ram,
        cores=cores_usable(),
        cpu_model=cpu,
        dtype=dtype,
        matmul_precision=matmul_precision,
        supports_4bit=supports_4bit,
        preset=preset,
        reasons=reasons,
        measured=speeds,
        profile=profile,
        threads=threads,
        physical_cores=cores_physical(),
        gpus=cards,
    )


def _profile(asked: str, seen: list[Gpu]) -> tuple[str, str]:
    """Profile in force and the reason for it."""
    if asked != "auto":
        return asked, "asked for"
    if seen:
        return "gpu", f"auto: {seen[0]['name']} found"
    physical = cores_physical()
    if physical >= MANY_CORES:
        return "desktop_cpu", f"auto: no accelerator and {physical} physical cores, at least {MANY_CORES}"
    return "cpu_only", f"auto: no accelerator and {physical} physical cores, below {MANY_CORES}"


def threads_settle(hardware: Hardware) -> None:
    """Let products on the CPU use the threads that fit; for a process that trains and then ends."""
    import torch

    if 0 < hardware.threads != torch.get_num_threads():
        torch.set_num_threads(hardware.threads)


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
        return "highest", f"`medium` is not faster here ({seen})"
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

    facts = (
        cpu_model(),
        cores_usable(),
        torch.get_num_threads(),
        torch.__version__,
        PROBE_VERSION,
    )
    host = "|".join(map(str, facts))
    cache = None
    if cache_dir is not None:
        digest = hashlib.sha256(host.encode()).hexdigest()[:16]
        cache = Path(cache_dir) / f"hardware-{digest}.json"
        measured = _cache_read(cache)
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


def _cache_read(path: Path) -> dict[str, float] | None:
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
    precision = torch.get_float32_matmul_precision()

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
        torch.set_float32_matmul_precision(precision)
    return {"float32": plain, "float32_medium": medium, "bfloat16": half, "medium_relative_error": error}


GB = 1e9
"""Bytes; decimal, so that a card sold as 24 GB counts as 24."""

CPUINFO = Path("/proc/cpuinfo")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CFS = Path("/sys/fs/cgroup/cpu")


def cpu_model() -> str:
    """The processor's own name, as far as the system tells it."""
    try:
        lines = CPUINFO.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # not Linux
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cores_usable() -> int:
    """Logical cores this process may use (a container's or taskset's share), not those of the whole machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_physical() -> int:
    """Of the cores this process may use, how many are not the second thread of another; at least 1."""
    logical, physical = psutil.cpu_count() or 1, psutil.cpu_count(logical=False)
    if not physical:
        return cores_usable()  # the system does not say
    return max(1, round(cores_usable() * physical / max(logical, physical)))


def cores_quota() -> float | None:
    """Cores' worth of time that a control group allows this process, or None where nothing limits it."""
    try:
        quota, period = CPU_MAX.read_text("utf-8").split()
    except (OSError, ValueError):
        try:  # the first version of control groups
            quota = (CFS / "cpu.cfs_quota_us").read_text("utf-8").strip()
            period = (CFS / "cpu.cfs_period_us").read_text("utf-8").strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # "max", or -1
    return int(quota) / int(period)


def threads_fit(asked: int) -> tuple[int, str]:
    """Threads for products on a CPU, and why: PyTorch's number, cut to the physical cores and the time allowed."""
    physical, quota = cores_physical(), cores_quota()
    limits = {"PyTorch's own number": asked, "physical cores this process may use": physical}
    if quota is not None:
        limits[f"the {quota:g} cores' worth of time its control group allows"] = max(1, math.ceil(quota))
    why = min(limits, key=lambda name: limits[name])
    threads = max(1, limits[why])
    return threads, f"{why}, of {cores_usable()} logical cores: two threads of one core share its multipliers"


def gpus_seen() -> list[Gpu]:
    """Each accelerator PyTorch sees: name, kind (cuda, rocm, mps), memory_gb; for cards their capability."""
    import torch

    if torch.cuda.is_available():
        kind = "rocm" if torch.version.hip else "cuda"
        cards = [torch.cuda.get_device_properties(i) for i in range(max(1, torch.cuda.device_count()))]
        return [
            {
                "name": card.name,
                "kind": kind,
                "memory_gb": round(card.total_memory / GB, 1),
                "capability": f"{card.major}.{card.minor}",
            }
            for card in cards
        ]
    if torch.backends.mps.is_available():
        memory = round(torch.mps.recommended_max_memory() / GB, 1)
        return [{"name": cpu_model(), "kind": "mps", "memory_gb": memory}]
    return []


def ram_gb() -> float:
    return round(psutil.virtual_memory().total / GB, 1)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""


def allocator_settle() -> bool:
    """Keep freed memory in the process instead of giving it back to the system after every tensor.

    By default glibc maps each block above 32 MB anew and unmaps it when freed, so that every layer of every step
    pays for fresh pages: half of TRL's time on a CPU was that. For a process that trains and then ends. Returns
    whether it was done; only glibc is known.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    settings = ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 256 << 20))
    taken = [library.mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(taken)
