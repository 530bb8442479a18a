"""Small layers, rows and caches for kernel tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.kernels.cpu import CpuDevice
from headrace.kernels.device import F32, PAGE, Bytes, KVShape, Rows
from headrace.kernels.ops import Op

RNG = np.random.default_rng
PATHS = ("portable", "avx2", "avx512")


def cpu(threads: int = 1, path: str = "") -> CpuDevice:
    try:
        return CpuDevice(threads, path)
    except ValueError:
        pytest.skip(f"this CPU has no {path}")


@cache
def paths() -> tuple[str, ...]:
    """Those of PATHS that this CPU has."""

    def there(path: str) -> bool:
        try:
            return CpuDevice(1, path).path == path
        except ValueError:
            return False

    return tuple(filter(there, PATHS))


def every_device() -> Iterator[CpuDevice]:
    """All paths (those there are), one and two threads."""
    for path in paths():
        for threads in (1, 2):
            yield CpuDevice(threads, path)


def aligned(nbytes: int) -> Bytes:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def pack(device: Any, fmt: str, n: int, k: int, raw: Bytes) -> Any:
    out = aligned(device.packed_nbytes(fmt, n, k))
    device.pack(fmt, n, k, np.ascontiguousarray(raw).view(np.uint8).reshape(-1), out)
    return device.weight(fmt, n, k, out)


def floats(device: Any, values: F32) -> Any:
    """[n, k] or [k] as an F32 weight."""
    matrix = np.atleast_2d(values).astype(np.float32)
    return pack(device, "F32", *matrix.shape, matrix)


def random_q4_1(rng: np.random.Generator, n: int, k: int) -> Bytes:
    """File bytes of a [n, k] Q4_1 tensor with weights about 1 / sqrt(k)."""
    blocks = np.zeros((n * k // 32, 20), np.uint8)
    d = rng.uniform(0.5, 1, n * k // 32).astype(np.float16) / np.float16(5 * k**0.5)
    blocks[:, :2] = d.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:4] = (d * np.float16(-7.5)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    blocks[:, 4:] = rng.integers(0, 256, (n * k // 32, 16))
    return blocks.reshape(-1)


@dataclass
class Cache:
    """Pages of one layer on a device; ``scatter`` lays the pages out in a random order."""

    device: Any
    shape: KVShape
    pages: int
    scatter: bool = False
    buffer: Bytes = field(init=False)
    layer: Any = field(init=False)

    def __post_init__(self) -> None:
        size = self.device.page_nbytes(self.shape)
        self.buffer = aligned(size * self.pages)
        order = RNG(9).permutation(self.pages) if self.scatter else np.arange(self.pages)
        self.layer = self.device.kv_layer(self.shape, (self.buffer.ctypes.data + order * size).astype(np.uint64))


@dataclass(frozen=True)
class Seq:
    """Rows of one sequence in a run: its committed slots, and per row (committed length, ancestors + own slots)."""

    slots: Sequence[int]
    rows: Sequence[tuple[int, Sequence[int]]]


def prompt(slots: Sequence[int], start: int, end: int) -> Seq:
    """Plain rows at positions start .. end - 1 of a sequence whose slots are already committed."""
    return Seq(slots[:end], [(p + 1, ()) for p in range(start, end)])


def rows_of(sequences: Sequence[Seq], wanted: Sequence[int] | None = None, vocab: int = 50) -> Rows:
    """A run of all the sequences' rows."""
    lists: list[int] = []
    columns: list[tuple[int, ...]] = []
    for s in sequences:
        base = len(lists)
        lists += s.slots
        for length, extra in s.rows:
            position = length + len(extra) - 1
            slot = extra[-1] if extra else s.slots[length - 1]
            columns.append(((slot * 7 + position) % vocab, position, slot, base, length, len(lists), len(extra)))
            lists += extra
    arrays = [np.ascontiguousarray(c) for c in np.array(columns, np.int32).reshape(-1, 7).T]
    keep = range(len(columns)) if wanted is None else wanted
    return Rows(*arrays, np.array(lists, np.int32), np.array(keep, np.int32))


def run(device: Any, ops: Sequence[Op], x: F32, weights: dict[str, Any], rows: Rows, cache: Cache | None = None) -> F32:
    """One step on a copy of x."""
    return device.compile(ops, x.shape[1]).bind(weights).run(x.copy(), rows, cache.layer if cache else None)


def shuffled_slots(count: int, pages: int, seed: int = 3) -> list[int]:
    """Slots as speculation leaves them: mostly in order, with swaps."""
    slots = list(range(count))
    rng = RNG(seed)
    for _ in range(count // 5):
        i, j = rng.integers(0, count, 2)
        slots[i], slots[j] = slots[j], slots[i]
    assert count <= pages * PAGE
    return slots
