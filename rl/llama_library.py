"""llama.cpp's library without the processor's AMX units."""

from __future__ import annotations

import functools
from pathlib import Path

PROCESSOR = Path("/proc/cpuinfo")


def amx_avoid() -> None:
    """Load models from now on so that they compute without AMX units.

    With these units, llama.cpp (llama-cpp-python 0.3.36) ends the process at the first prompt on a quantised file.
    """
    import llama_cpp

    library = llama_cpp.llama_cpp
    stock = library.llama_model_default_params
    if hasattr(stock, "ratchet_stock") or not has_amx():
        return

    @functools.wraps(stock)
    def params() -> llama_cpp.llama_model_params:
        found = stock()
        found.use_extra_bufts = False
        return found

    params.ratchet_stock = stock  # type: ignore[attr-defined]
    library.llama_model_default_params = llama_cpp.llama_model_default_params = params


def has_amx() -> bool:
    """True if the processor has AMX units; False where that is not known."""
    try:
        return "amx_tile" in PROCESSOR.read_text("utf-8")
    except OSError:
        return False
