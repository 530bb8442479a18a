"""Page-aligned anonymous memory, touched only when used and given back when freed."""

from __future__ import annotations

import mmap

import numpy as np

from headrace.kernels.device import Bytes

ALIGN = 4096


def round_up(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


def allocate(nbytes: int) -> Bytes:
    """Zeroed uint8 [nbytes], aligned to a page; the system gives the memory as it is first written."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(-1, round_up(nbytes)), np.uint8, nbytes)


def address(buffer: Bytes) -> int:
    return int(buffer.ctypes.data)
