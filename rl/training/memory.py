"""Settings of glibc's allocator for training, which allocates the same large blocks in every step."""

from __future__ import annotations

import ctypes
import platform

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
