"""Measures this machine: matrix products at several row counts, attention, memory, disk. The planner's only numbers.

Everything goes through a ``Device`` or a file, so that a GPU is probed by the same code. Rates are medians of a few
tries.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headrace.errors import Unsupported
from headrace.formats.files import DirectFile
from headrace.kernels.device import PAGE, Bytes, Device, KVShape, Rows
from headrace.kernels.ops import Act, Add, Attend, Linear, Norm, Op, Scale
from headrace.plan.machine import Compute, Link, Machine, Tier

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
WIDTH = 1024
BEYOND_CACHES = 96 << 20
"""Bytes of weights gone through in turn, so that one row reads them from memory."""
REQUEST = 8 << 20
"""Bytes of a disk read."""
WEIGHTS = 2 << 20
"""Bytes of a read of streamed weights (``memory.stream.REQUEST``)."""
ALIGN = 4096


@runtime_checkable
class Streams(Protocol):
    """A device that can say how fast it reads its memory, in bytes/s."""

    def bandwidth(self, data: Sequence[Bytes] | None = None) -> float: ...


@dataclass(frozen=True)
class Sample:
    """What a device measured: a compute, and the bytes/s at which its memory is read."""

    compute: Compute
    memory: float


@dataclass(frozen=True)
class Disk:
    """A disk to be measured: a file on it of at least some tens of MB, and its room. ``write`` 0: half as fast as read.

    rate: taken as given, nothing is read then."""

    path: Path
    capacity: int = 0
    write: float = 0.0
    rate: float = 0.0


def probe(
    device: Device,
    *,
    tier: str = "host",
    capacity: int,
    reserved: int = 0,
    formats: Sequence[str] = ("Q8_0",),
    kv: Sequence[tuple[int, int]] = ((16, 16),),
    disk: Disk | None = None,
    rows: Sequence[int] = ROWS,
    width: int = WIDTH,
    span: int = BEYOND_CACHES,
    length: int = 1024,
) -> Machine:
    """The machine of one device and at most one disk, by measurement (a few seconds; one more a format)."""
    sample = measure(device, tier, formats, kv, rows, width, span, length)
    tiers = [Tier(tier, capacity, sample.memory, sample.memory, reserved)]
    links: list[Link] = []
    sources = {"device": f"{device.name}, width {width}, measured"}
    if disk is not None:
        alone = disk.rate or disk_rate(disk.path, WEIGHTS, 4, 1.0)
        small = 0.0 if disk.rate else pages_cost(disk.path, alone)
        read, taken = (disk.rate, 0.0) if disk.rate else beside(device, formats[0], disk.path, width)
        write = disk.write or read / 2
        tiers.append(Tier("disk", disk.capacity, read, write))
        links = [Link("disk", tier, read, small, "disk", taken=taken), Link(tier, "disk", write, small, "disk")]
        how = "as given" if disk.rate else f"direct reads from {disk.path.name}, measured"
        sources["disk"] = how + ("" if disk.write else "; writes assumed half as fast")
    return Machine("this machine", tuple(tiers), tuple(links), (sample.compute,), None, sources)


def measure(
    device: Device,
    tier: str,
    formats: Sequence[str] = ("Q8_0",),
    kv: Sequence[tuple[int, int]] = ((16, 16),),
    rows: Sequence[int] = ROWS,
    width: int = WIDTH,
    span: int = BEYOND_CACHES,
    length: int = 1024,
) -> Sample:
    """Matrix and attention rates of a device. Rows ascending; ``span``: bytes of weights gone through in turn;
    ``length``: of the sequences attended to, whole pages; ``kv``: (K bits, V bits) of their caches."""
    if list(rows) != sorted(set(rows)) or not rows or rows[0] < 1:
        raise Unsupported(f"probing needs ascending row counts of at least 1, got {list(rows)}.")
    curves = {fmt: matmul_curve(device, fmt, rows, width, span) for fmt in formats}
    first, nbytes, seconds = next(iter(curves.values()))
    some = [np.ones(min(span, BEYOND_CACHES), np.uint8)]
    read = device.bandwidth(some) if isinstance(device, Streams) else nbytes / seconds
    rates = {
        f"{k}/{v}": (attend_rate(device, 1, length, bits=(k, v)), attend_rate(device, 16, length, bits=(k, v)))
        for k, v in kv
    }
    prompt, following = next(iter(rates.values()))
    compute = Compute(
        tier, first, prompt, following, overhead(device, width), {fmt: c[0] for fmt, c in curves.items()}, rates,
        linear_cost(device), value_cost(device),
    )  # fmt: skip
    return Sample(compute, read)


def matmul_curve(
    device: Device, fmt: str, rows: Sequence[int], width: int, span: int = BEYOND_CACHES
) -> tuple[tuple[tuple[int, float], ...], int, float]:
    """((rows, FLOP/s), ...), and the bytes and seconds of going through all weights at the first row count.

    A step is two matrices [4 width, width] and back, in a chain of unlike weights bigger than any cache: up to
    32 rows what comes from memory costs an eighth more than what stayed.
    """
    ops: tuple[Op, ...] = (Linear("h", "x", "up"), Linear("x", "h", "down"))
    program = device.compile(ops, width)
    shapes = {"up": (4 * width, width), "down": (width, 4 * width)}
    size = sum(device.packed_nbytes(fmt, n, k) for n, k in shapes.values())
    steps = [program.bind(_weights(device, fmt, shapes)) for _ in range(max(2, span // max(size, 1)))]
    curve, first = [], 0.0
    for count in rows:
        run, x = _rows([(1, 1)] * count), np.zeros((count, width), np.float32)
        some = steps if count <= 16 else steps[: max(1, len(steps) // 4)]

        def go(some: Any = some, x: Any = x, run: Any = run) -> None:
            for step in some:
                step.run(x, run, None)

        seconds = _usual(go)
        first = first or seconds
        curve.append((count, 2.0 * count * len(some) * 8 * width * width / seconds))
    return tuple(curve), size * len(steps), first


def attend_rate(
    device: Device,
    sequences: int,
    length: int = 1024,
    heads: int = 12,
    head_dim: int = 64,
    bits: tuple[int, int] = (16, 16),
) -> float:
    """FLOP/s of attention: one sequence's 64 last rows (a prompt), or one row of each of several (next tokens); three
    heads share K and V."""
    each = min(64, length) if sequences == 1 else 1
    shape = KVShape(heads // 3, head_dim, *bits)
    pages, extent = sequences * (length // PAGE), device.page_nbytes(shape)
    memory = np.zeros(pages * extent + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN + memory.ctypes.data
    table = np.uint64(start) + np.arange(pages, dtype=np.uint64) * np.uint64(extent)
    kv = device.kv_layer(shape, table)
    wide = heads * head_dim
    step = device.compile((Attend("x", "x", heads, heads // 3, head_dim, head_dim**-0.5),), wide).bind({})
    rows = _rows([(length, each)] * sequences)
    x = np.zeros((rows.count, wide), np.float32)
    seen = sum(length - each + 1 + i for i in range(each)) * sequences
    return 4.0 * wide * seen / _usual(lambda: step.run(x, rows, kv))


def overhead(device: Device, width: int) -> float:
    """Seconds of a step that computes next to nothing."""
    step = device.compile((Scale("x", 1.0),), width).bind({})
    rows, x = _rows([(1, 1)]), np.zeros((1, width), np.float32)
    return _usual(lambda: [step.run(x, rows, None) for _ in range(50)]) / 50


def linear_cost(device: Device, count: int = 8) -> float:
    """Seconds of a matrix product with nothing to compute."""
    ops = tuple(Linear("xh"[i % 2 == 0], "hx"[i % 2 == 0], f"w{i}") for i in range(count))
    program = device.compile(ops, 64)
    step = program.bind(_weights(device, "Q8_0", {f"w{i}": (64, 64) for i in range(count)}))
    rows, x = _rows([(1, 1)]), np.zeros((1, 64), np.float32)
    return _usual(lambda: [step.run(x, rows, None) for _ in range(10)]) / 10 / count


def value_cost(device: Device, width: int = 2048, rows: int = 64) -> float:
    """Seconds of a value in a norm or an activation."""
    ops: tuple[Op, ...] = (Norm("h", "x", "norm"), Act("h", "h", "silu"), Add("x", "h"))
    step = device.compile(ops, width).bind(_weights(device, "F32", {"norm": (1, width)}))
    run, x = _rows([(1, 1)] * rows), np.zeros((rows, width), np.float32)
    return _usual(lambda: step.run(x, run, None)) / (2 * rows * width)


def pages_cost(path: Path, rate: float, nbytes: int = 32 << 10) -> float:
    """Seconds that a small read takes beside its bytes, 16 at a time: how a cache on disk is read."""
    return max(0.0, nbytes / disk_rate(path, nbytes, 16, 0.4) - nbytes / rate)


def disk_rate(path: Path, request: int = REQUEST, readers: int = 4, seconds: float = 2.0, span: int = 0) -> float:
    """Bytes/s of direct reads of ``request`` bytes, several at a time, going through the file (or its first ``span``
    bytes) in turn."""
    size = path.stat().st_size // request * request if path.is_file() else 0
    size = min(size, span // request * request or size)
    if size < request or request % ALIGN:
        raise Unsupported(f"{path}: the disk is measured on a file of at least {request} bytes, read in whole pages.")
    file = DirectFile(path)
    lock, next_offset, done = threading.Lock(), 0, 0
    start = perf_counter()

    def reader() -> None:
        nonlocal next_offset, done
        buffer = _large(request)
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


def beside(device: Device, fmt: str, path: Path, width: int = WIDTH, seconds: float = 1.5) -> tuple[float, float]:
    """The disk's bytes/s while the device computes, and the seconds of computing that a byte read takes from it."""
    shapes = {"up": (4 * width, width), "down": (width, 4 * width)}
    program = device.compile((Linear("h", "x", "up"), Linear("x", "h", "down")), width)
    step = program.bind(_weights(device, fmt, shapes))
    run, x = _rows([(1, 1)] * 32), np.zeros((32, width), np.float32)

    def steps(going: Callable[[float], bool]) -> float:
        """Steps a second while that holds, of the seconds so far."""
        start, done = perf_counter(), 0
        while going(perf_counter() - start):
            step.run(x, run, None)
            done += 1
        return done / (perf_counter() - start)

    steps(lambda t: t < seconds / 4)
    before = steps(lambda t: t < seconds / 2)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(disk_rate, path, WEIGHTS, 4, seconds)
        during = steps(lambda _: not reading.done())
        rate = reading.result()
    alone = (before + steps(lambda t: t < seconds / 2)) / 2
    return rate, max(0.0, 1.0 - during / alone) / rate


def _large(nbytes: int) -> memoryview:
    """Memory in 2 MiB pages where the system has them, as layers are read into: with small ones a direct read of a
    few MiB falls into hundreds of pieces."""
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # shared: small pages
    memory = mmap.mmap(-1, nbytes + (2 << 20), **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    whole[::ALIGN] = 0
    start = -whole.ctypes.data % (2 << 20)
    return whole[start : start + nbytes].data


def _usual(action: Callable[[], object], tries: int = 5) -> float:
    """The median seconds of a few tries after one to warm up: on a machine that others use too, the best is luck."""
    action()
    took: list[float] = []
    while len(took) < tries and (len(took) < 3 or sum(took) < 0.5):
        start = perf_counter()
        action()
        took.append(perf_counter() - start)
    return max(statistics.median(took), 1e-9)


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
