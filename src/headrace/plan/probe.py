"""Measures this machine: matrix products at several row counts, attention, memory, disk. The planner's only numbers.

Everything goes through a ``Device`` or a file, so that a GPU is probed by the same code. Rates are the best of a few
tries: noise only ever slows.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headrace.errors import Unsupported
from headrace.formats.files import DirectFile
from headrace.kernels.device import PAGE, Device, KVShape, Rows
from headrace.kernels.ops import Attend, Linear, Op, Scale
from headrace.plan.machine import Compute, Link, Machine, Tier

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
WIDTH = 2048
BEYOND_CACHES = 192 << 20
"""Bytes of weights gone through in turn, so that one row reads them from memory."""
REQUEST = 8 << 20
"""Bytes of a disk read."""
ALIGN = 4096


@runtime_checkable
class Streams(Protocol):
    """A device that can say how fast it reads its memory, in bytes/s."""

    def bandwidth(self) -> float: ...


@dataclass(frozen=True)
class Sample:
    """What a device measured: a compute, and the bytes/s at which one row's weights stream."""

    compute: Compute
    memory: float


def probe(
    device: Device,
    *,
    tier: str = "host",
    capacity: int,
    reserved: int = 0,
    fmt: str = "Q8_0",
    disk: Path | None = None,
    disk_capacity: int = 0,
    disk_write: float = 0.0,
    rows: Sequence[int] = ROWS,
    width: int = WIDTH,
    span: int = BEYOND_CACHES,
    length: int = 1024,
) -> Machine:
    """The machine of one device and at most one disk, by measurement (a few seconds).

    ``disk``: a file of at least some hundred MB on the disk to measure (the model's); ``disk_write`` 0: half the
    read rate is assumed, and said so in ``sources``.
    """
    sample = measure(device, tier, fmt, rows, width, span, length)
    tiers = [Tier(tier, capacity, sample.memory, sample.memory, reserved)]
    links: list[Link] = []
    sources = {"device": f"{device.name}, {fmt}, width {width}, measured"}
    if disk is not None:
        read = disk_rate(disk)
        write = disk_write or read / 2
        tiers.append(Tier("disk", disk_capacity, read, write))
        links = [Link("disk", tier, read, 0.0, "disk"), Link(tier, "disk", write, 0.0, "disk")]
        sources["disk"] = f"direct reads of {REQUEST >> 20} MiB from {disk.name}, measured" + (
            "" if disk_write else "; writes assumed half as fast"
        )
    return Machine("this machine", tuple(tiers), tuple(links), (sample.compute,), None, sources)


def measure(
    device: Device,
    tier: str,
    fmt: str = "Q8_0",
    rows: Sequence[int] = ROWS,
    width: int = WIDTH,
    span: int = BEYOND_CACHES,
    length: int = 1024,
) -> Sample:
    """Matrix and attention rates of a device. Rows ascending; ``span``: bytes of weights gone through in turn;
    ``length``: of the sequences attended to, whole pages."""
    if list(rows) != sorted(set(rows)) or not rows or rows[0] < 1:
        raise Unsupported(f"probing needs ascending row counts of at least 1, got {list(rows)}.")
    curve, nbytes, seconds = matmul_curve(device, fmt, rows, width, span)
    read = device.bandwidth() if isinstance(device, Streams) else nbytes / seconds
    compute = Compute(
        tier, curve, attend_rate(device, 1, length), attend_rate(device, 16, length), overhead(device, width)
    )
    return Sample(compute, read)


def matmul_curve(
    device: Device, fmt: str, rows: Sequence[int], width: int, span: int = BEYOND_CACHES
) -> tuple[tuple[tuple[int, float], ...], int, float]:
    """((rows, FLOP/s), ...), and the bytes and seconds of going through all weights at the first row count.

    A step is two matrices [4 width, width] and back, in a chain of unlike weights bigger than any cache.
    """
    ops: tuple[Op, ...] = (Linear("h", "x", "up"), Linear("x", "h", "down"))
    program = device.compile(ops, width)
    shapes = {"up": (4 * width, width), "down": (width, 4 * width)}
    size = sum(device.packed_nbytes(fmt, n, k) for n, k in shapes.values())
    steps = [program.bind(_weights(device, fmt, shapes)) for _ in range(max(2, span // max(size, 1)))]
    curve, first = [], 0.0
    for count in rows:
        run, x = _rows([(1, 1)] * count), np.zeros((count, width), np.float32)
        some = steps if count <= 16 else steps[:2]

        def go(some: Any = some, x: Any = x, run: Any = run) -> None:
            for step in some:
                step.run(x, run, None)

        seconds = _best(go)
        first = first or seconds
        curve.append((count, 2.0 * count * len(some) * 8 * width * width / seconds))
    return tuple(curve), size * len(steps), first


def attend_rate(device: Device, sequences: int, length: int = 1024, heads: int = 16, head_dim: int = 64) -> float:
    """FLOP/s of attention: one sequence's 64 last rows (a prompt), or one row of each of several (next tokens)."""
    each = min(64, length) if sequences == 1 else 1
    shape = KVShape(heads, head_dim)
    pages, extent = sequences * (length // PAGE), device.page_nbytes(shape)
    memory = np.zeros(pages * extent + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN + memory.ctypes.data
    table = np.uint64(start) + np.arange(pages, dtype=np.uint64) * np.uint64(extent)
    kv = device.kv_layer(shape, table)
    wide = heads * head_dim
    program = device.compile((Attend("x", "x", heads, heads, head_dim, head_dim**-0.5),), wide)
    rows = _rows([(length, each)] * sequences)
    x = np.zeros((rows.count, wide), np.float32)
    seen = sum(length - each + 1 + i for i in range(each)) * sequences
    return 4.0 * wide * seen / _best(lambda: program.run(x, {}, rows, kv))


def overhead(device: Device, width: int) -> float:
    """Seconds of a step that computes next to nothing."""
    program = device.compile((Scale("x", 1.0),), width).bind({})
    rows, x = _rows([(1, 1)]), np.zeros((1, width), np.float32)
    return _best(lambda: [program.run(x, rows, None) for _ in range(50)]) / 50


def disk_rate(path: Path, request: int = REQUEST, readers: int = 4, seconds: float = 2.0) -> float:
    """Bytes/s of direct reads of ``request`` bytes, several at a time, going through the file in turn."""
    size = path.stat().st_size // request * request if path.is_file() else 0
    if size < request or request % ALIGN:
        raise Unsupported(f"{path}: the disk is measured on a file of at least {request} bytes, read in whole pages.")
    file = DirectFile(path)
    lock, next_offset, done = threading.Lock(), 0, 0
    start = perf_counter()

    def reader() -> None:
        nonlocal next_offset, done
        buffer = memoryview(mmap.mmap(-1, request))
        while perf_counter() - start < seconds:
            with lock:
                offset, next_offset = next_offset, (next_offset + request) % size
            file.read_into(buffer, offset)
            with lock:
                done += request

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(readers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = perf_counter() - start
    finally:
        file.close()
    if not done:
        raise Unsupported(f"{path}: not one read of {request} bytes came back in {seconds:g} s.")
    return done / elapsed


def _best(action: Callable[[], object], tries: int = 3) -> float:
    """The least seconds of a few tries after one to warm up."""
    action()
    best = float("inf")
    for _ in range(tries):
        start = perf_counter()
        action()
        best = min(best, perf_counter() - start)
    return max(best, 1e-9)


def _weights(device: Device, fmt: str, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Weights of zero scale: the arithmetic is the same, and nothing overflows."""
    out = {}
    for name, (n, k) in shapes.items():
        size = device.packed_nbytes(fmt, n, k)
        memory = np.zeros(size + 64, np.uint8)
        memory[:] = 0  # touched, or every page would be the same one of the system's
        start = -memory.ctypes.data % 64
        out[name] = device.weight(fmt, n, k, memory[start : start + size])
    return out


def _rows(sequences: Sequence[tuple[int, int]]) -> Rows:
    """(length, rows): the last ``rows`` positions of sequences of that length, each with slots of its own."""
    position: list[int] = []
    slot: list[int] = []
    base: list[int] = []
    lists: list[int] = []
    for length, rows in sequences:
        start = len(lists)
        lists += range(-(-start // PAGE) * PAGE, -(-start // PAGE) * PAGE + length)
        for p in range(length - rows, length):
            position.append(p)
            slot.append(lists[start + p])
            base.append(start)
    i32 = [np.array(v, np.int32) for v in (position, slot, base, lists)]
    count = len(position)
    zero = np.zeros(count, np.int32)
    return Rows(zero, i32[0], i32[1], i32[2], i32[0] + np.int32(1), zero, zero, i32[3], np.empty(0, np.int32))
