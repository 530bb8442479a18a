"""Page-aligned anonymous memory, touched only when used and given back when freed."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np

from headrace.kernels.device import Bytes

ALIGN = 4096
HUGE = 8 << 20  # from here on 2 MiB pages are asked for: weights then read up to 1.7 times as fast (docs/log.md)


def round_up(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


def allocate(nbytes: int) -> Bytes:
    """Zeroed uint8 [nbytes], aligned to a page; the system gives the memory as it is first written."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(-1, round_up(nbytes)), np.uint8, nbytes)
    memory = mmap.mmap(-1, round_up(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def address(buffer: Bytes) -> int:
    return int(buffer.ctypes.data)
