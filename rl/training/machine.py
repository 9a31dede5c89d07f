"""Facts about a machine: its processor, what that can do, the cores and memory this process may use, its GPUs."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import psutil

GB = 1e9
"""Bytes; decimal, so that a card sold as 24 GB counts as 24."""

INSTRUCTIONS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "svebf16", "i8mm",
)  # fmt: skip
"""Instruction sets that matter for products of matrices, as the kernel calls them."""

CPUINFO = Path("/proc/cpuinfo")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CFS = Path("/sys/fs/cgroup/cpu")


def cpu_model() -> str:
    """The processor's own name, as far as the system tells it."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets among INSTRUCTIONS that the processor has; elsewhere than on Linux what PyTorch was
    built to find."""
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = set(value.split())
            return tuple(name for name in INSTRUCTIONS if name in found)
    import torch

    return (str(torch.backends.cpu.get_cpu_capability()).lower(),)


def _cpuinfo() -> list[str]:
    try:
        return CPUINFO.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []  # not Linux


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


def gpus() -> list[dict[str, Any]]:
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
