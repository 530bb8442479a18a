"""Measures this machine: matrix products at several row counts, attention, memory, disk. The planner's only numbers.

Everything goes through a ``Device`` or a file, so that a GPU is probed by the same code. Rates are medians of a few
tries.
"""

from __future__ import annotations

import itertools
import mmap
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headrace.errors import Unsupported
from headrace.formats.files import DirectFile
from headrace.kernels.device import PAGE, BoundProgram, Bytes, Device, KVShape, Rows
from headrace.kernels.ops import Act, Add, Attend, Linear, Norm, Op, Scale
from headrace.plan.machine import Compute, Link, Machine, Tier

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
WIDTH = 1024
BEYOND_CACHES = 96 << 20
"""Bytes of weights gone through in turn, so that one row reads them from memory."""
REQUEST, SMALL = 8 << 20, 32 << 10
"""Bytes of a disk read, and of one of a cache's pages."""
WEIGHTS = 2 << 20
"""Bytes of a read of streamed weights (``memory.stream.REQUEST``)."""
ALIGN = 4096


@runtime_checkable
class Streams(Protocol):
    """A device that can say how fast it reads its memory, in bytes/s."""

    def bandwidth(self, data: Sequence[Bytes] | None = None) -> float: ...


@dataclass(frozen=True)
class Disk:
    """A disk to be measured: a file on it of at least some tens of MB, and its room. ``write`` 0: half as fast as read.

    rate: taken as given, nothing is read then."""

    path: Path
    capacity: int = 0
    write: float = 0.0
    rate: float = 0.0


def probe(
    device: Device, *, capacity: int, formats: Sequence[str], kv: Sequence[tuple[int, int]], disk: Disk | None = None,
    rows: Sequence[int] = ROWS, width: int = WIDTH, span: int = BEYOND_CACHES, length: int = 1024,
) -> Machine:  # fmt: skip
    """The machine of one device and at most one disk, by measurement (a few seconds; one more a format).

    kv: (K bits, V bits) of caches. rows: ascending; span: bytes of weights gone through in turn; length: of the
    sequences attended to, whole pages.
    """
    if list(rows) != sorted(set(rows)) or not rows or rows[0] < 1:
        raise Unsupported(f"probing needs ascending row counts of at least 1, got {list(rows)}.")
    curves = {fmt: matmul_curve(device, fmt, rows, width, span) for fmt in formats}
    first, nbytes, seconds = next(iter(curves.values()))
    some = [np.ones(min(span, BEYOND_CACHES), np.uint8)]
    memory = device.bandwidth(some) if isinstance(device, Streams) else nbytes / seconds
    rates = {
        f"{k}/{v}": (attend_rate(device, 1, length, (k, v)), attend_rate(device, 16, length, (k, v))) for k, v in kv
    }
    compute = Compute(
        "host", first, *next(iter(rates.values())), overhead(device, width), {fmt: c[0] for fmt, c in curves.items()},
        rates, linear_cost(device), value_cost(device),
    )  # fmt: skip
    tiers, links = [Tier("host", capacity, memory, memory)], list[Link]()
    sources = {"device": f"{device.name}, width {width}, measured"}
    if disk is not None:
        alone = disk.rate or disk_rate(disk.path, WEIGHTS, 4, 1.0)
        small = 0.0 if disk.rate else pages_cost(disk.path, alone)
        read, taken = (disk.rate, 0.0) if disk.rate else beside(device, formats[0], disk.path, width)
        write = disk.write or read / 2
        tiers.append(Tier("disk", disk.capacity, read, write))
        links = [Link("disk", "host", read, small, "disk", taken=taken), Link("host", "disk", write, small, "disk")]
        how = "as given" if disk.rate else f"direct reads from {disk.path.name}, measured"
        sources["disk"] = how + ("" if disk.write else "; writes assumed half as fast")
    return Machine("this machine", tuple(tiers), tuple(links), (compute,), None, sources)


def matmul_curve(
    device: Device, fmt: str, rows: Sequence[int], width: int, span: int = BEYOND_CACHES
) -> tuple[tuple[tuple[int, float], ...], int, float]:
    """((rows, FLOP/s), ...), and the bytes and seconds of going through all weights at the first row count.

    A step is two matrices [4 width, width] and back, in a chain of unlike weights bigger than any cache: up to
    32 rows what comes from memory costs an eighth more than what stayed.
    """
    size = device.packed_nbytes(fmt, 4 * width, width) + device.packed_nbytes(fmt, width, 4 * width)
    steps = _there_and_back(device, fmt, width, max(2, span // max(size, 1)))
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


def _there_and_back(device: Device, fmt: str, width: int, count: int) -> list[BoundProgram]:
    """Steps of a matrix [4 width, width] and one back, with weights of their own."""
    program = device.compile((Linear("h", "x", "up"), Linear("x", "h", "down")), width)
    shapes = {"up": (4 * width, width), "down": (width, 4 * width)}
    return [program.bind(_weights(device, fmt, shapes)) for _ in range(count)]


def attend_rate(device: Device, sequences: int, length: int = 1024, bits: tuple[int, int] = (16, 16)) -> float:
    """FLOP/s of attention: one sequence's 64 last rows (a prompt), or one row of each of several (next tokens); of
    twelve heads of 64 three share K and V."""
    heads, head_dim = 12, 64
    each = min(64, length) if sequences == 1 else 1
    shape = KVShape(heads // 3, head_dim, *bits)
    pages, extent = sequences * (length // PAGE), device.page_nbytes(shape)
    memory = _aligned(pages * extent, ALIGN)
    table = np.uint64(memory.ctypes.data) + np.arange(pages, dtype=np.uint64) * np.uint64(extent)
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


def linear_cost(device: Device) -> float:
    """Seconds of a matrix product with nothing to compute."""
    count = 8
    ops = tuple(Linear("xh"[i % 2 == 0], "hx"[i % 2 == 0], f"w{i}") for i in range(count))
    program = device.compile(ops, 64)
    step = program.bind(_weights(device, "Q8_0", {f"w{i}": (64, 64) for i in range(count)}))
    rows, x = _rows([(1, 1)]), np.zeros((1, 64), np.float32)
    return _usual(lambda: [step.run(x, rows, None) for _ in range(10)]) / 10 / count


def value_cost(device: Device) -> float:
    """Seconds of a value in a norm or an activation."""
    width, rows = 2048, 64
    ops: tuple[Op, ...] = (Norm("h", "x", "norm"), Act("h", "h", "silu"), Add("x", "h"))
    step = device.compile(ops, width).bind(_weights(device, "F32", {"norm": (1, width)}))
    run, x = _rows([(1, 1)] * rows), np.zeros((rows, width), np.float32)
    return _usual(lambda: step.run(x, run, None)) / (2 * rows * width)


def pages_cost(path: Path, rate: float) -> float:
    """Seconds that a small read takes beside its bytes, 16 at a time: how a cache on disk is read."""
    return max(0.0, SMALL / disk_rate(path, SMALL, 16, 0.4) - SMALL / rate)


def disk_rate(path: Path, request: int = REQUEST, readers: int = 4, seconds: float = 2.0) -> float:
    """Bytes/s of direct reads of ``request`` bytes, several at a time, going through the file in turn."""
    size = path.stat().st_size // request * request if path.is_file() else 0
    if size < request or request % ALIGN:
        raise Unsupported(f"{path}: the disk is measured on a file of at least {request} bytes, read in whole pages.")
    file, start = DirectFile(path), perf_counter()
    offsets = itertools.count(0, request)  # its next() is one step for all threads

    def reader(_: int) -> int:
        buffer, done = _large(request), 0
        while perf_counter() - start < seconds:
            file.read_into(buffer, next(offsets) % size)
            done += request
        return done

    try:
        with ThreadPoolExecutor(readers) as pool:
            done = sum(pool.map(reader, range(readers)))
        elapsed = perf_counter() - start
    finally:
        file.close()
    if not done:
        raise Unsupported(f"{path}: not one read of {request} bytes came back in {seconds:g} s.")
    return done / elapsed


def beside(device: Device, fmt: str, path: Path, width: int = WIDTH) -> tuple[float, float]:
    """The disk's bytes/s while the device computes, and the seconds of computing that a byte read takes from it."""
    seconds, (step,) = 1.5, _there_and_back(device, fmt, width, 1)
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


def _usual(action: Callable[[], object]) -> float:
    """The median seconds of a few tries after one to warm up: on a machine that others use too, the best is luck."""
    action()
    took: list[float] = []
    while len(took) < 5 and (len(took) < 3 or sum(took) < 0.5):
        start = perf_counter()
        action()
        took.append(perf_counter() - start)
    return max(statistics.median(took), 1e-9)


def _weights(device: Device, fmt: str, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Weights of zero scale: the arithmetic is the same, and nothing overflows."""
    out = {}
    for name, (n, k) in shapes.items():
        memory = _aligned(device.packed_nbytes(fmt, n, k), 64)
        memory[:] = 0  # touched, or every page would be the same one of the system's
        out[name] = device.weight(fmt, n, k, memory)
    return out


def _aligned(size: int, to: int) -> Bytes:
    """Zeros at an address that is a multiple of ``to``."""
    memory = np.zeros(size + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start : start + size]


def _rows(sequences: Sequence[tuple[int, int]]) -> Rows:
    """(length, rows): the last ``rows`` positions of sequences of that length, each with slots of its own."""
    found: list[tuple[int, int, int]] = []
    lists: list[int] = []
    for length, rows in sequences:
        start = len(lists)
        lists += range(-(-start // PAGE) * PAGE, -(-start // PAGE) * PAGE + length)
        found += [(p, lists[start + p], start) for p in range(length - rows, length)]
    position, slot, base = np.array(found, np.int32).T.copy()
    zero, none = np.zeros(len(found), np.int32), np.empty(0, np.int32)
    return Rows(zero, position, slot, base, position + np.int32(1), zero, zero, np.array(lists, np.int32), none)
