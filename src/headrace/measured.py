"""The machine's constants for the planner: measured once and kept in the cache folder, or taken from a file.

The loop's own seconds, of Python and not of a device, are measured here too, with a computer that computes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from headrace import system
from headrace.cluster.loopback import Loopback
from headrace.errors import BadFile, HeadraceError, Unavailable
from headrace.formats.files import atomic, free_bytes, read_text
from headrace.kernels.cpu import CpuDevice
from headrace.kernels.device import Device
from headrace.kernels.dispatch import make_device
from headrace.plan import probe
from headrace.plan.machine import Machine
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Computer, Run, Stage
from headrace.run.types import Choice, Request, Submit

USUAL = ("Q4_0", "Q4_1", "Q8_0", "Q4_K")
"""Formats that ``check --probe`` measures; others when a model has them."""
FILE_BYTES = 96 << 20
"""Of the file that is written to measure the disk when there is none to read."""
LARGE = 64 << 20
"""A model file under this says little about a disk."""
BUSY = 1.25
"""Of ``system.load``: what is measured then is marked, and measured again when the machine is quiet."""


def name_of(device: Device) -> str:
    """What a machine is known by: constants of another processor, thread count or kernel path don't hold."""
    threads, path = getattr(device, "threads", 1), getattr(device, "path", device.name)
    return f"{system.processor()}, {threads} threads, {path}"


def where(device: Device, cache: Path) -> Path:
    """The file that the machine's constants are kept in, one a number of threads."""
    return cache / f"machine-{getattr(device, 'threads', 1)}.json"


def kept(device: Device, cache: Path) -> Machine | None:
    """The constants measured before, if they are of this machine and weren't marked by a load that is over."""
    try:
        found = Machine.from_json(read_text(where(device, cache), "machine's file"))
    except HeadraceError:
        return None
    good = "load" not in found.sources or system.load() > BUSY
    return found if good and found.name == name_of(device) else None


def read(path: Path) -> Machine:
    """A machine's file as a user gives it. BadFile says what is wrong with it."""
    text = read_text(path, "machine's file")
    try:
        return Machine.from_json(text)
    except HeadraceError as error:
        raise BadFile(f"{path}: {error}") from None


def machine(
    device: Device,
    cache: Path,
    formats: Collection[str],
    kv: tuple[int, int] = (16, 16),
    *,
    disk: Path | None = None,
    disk_rate: float = 0.0,
    again: bool = False,
    tell: Callable[[str], None] | None = None,
    apart: bool = False,
) -> Machine:
    """This machine: as kept in ``cache``, with what that lacks (a format, KV bits) measured now, and kept.

    disk: a large file on the disk that weights stream from; where there is none, one is written for the while.
    disk_rate: bytes/s, not measured then, and not kept. apart: measure in a process of its own, whose memory isn't
    this one's.
    """
    found = None if again else kept(device, cache)
    bits = f"{kv[0]}/{kv[1]}"
    known = found is not None and all(f in found.computes[0].formats for f in formats)
    if found is not None and known and bits in found.computes[0].attends:
        return _with_rate(found, disk_rate)
    if found is None and tell is not None:
        tell("Measuring this machine, once (some seconds) ...")
    if apart:
        work = [device.threads, device.path] if isinstance(device, CpuDevice) else [1, ""]
        asked = json.dumps([*work, str(cache), list(formats), kv, disk and str(disk), disk_rate, again])
        done = subprocess.run([sys.executable, "-m", "headrace.measured", asked], capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no word"]
            raise Unavailable(f"This machine can't be measured ({last[0]}); give its constants (--machine).")
        return Machine.from_json(done.stdout)
    load = system.load()
    if found is None:
        found = _measured(device, cache, formats, kv, disk, disk_rate)
    else:
        found = _more(found, device, formats, kv)
    if load > BUSY:
        marked = f"{load:.1f} programs a core computed beside this; it is measured again on a quiet machine"
        found = replace(found, sources={**found.sources, "load": marked})
    if not disk_rate:
        cache.mkdir(parents=True, exist_ok=True)
        with atomic(where(device, cache)) as file:
            file.write(found.to_json().encode())
    return _with_rate(found, disk_rate)


def _with_rate(m: Machine, rate: float) -> Machine:
    return m.faster("disk", rate / m.tier("disk").read) if rate else m


def _measured(
    device: Device, cache: Path, formats: Collection[str], kv: tuple[int, int], disk: Path | None, rate: float
) -> Machine:
    file, written = disk, False
    if not rate and (file is None or not file.is_file() or file.stat().st_size < LARGE or not _same_disk(file, cache)):
        file, written = _write_file(cache), True
    try:
        about = probe.Disk(file or cache, free_bytes(cache), rate=rate)
        capacity = system.memory().total or 1 << 62
        found = probe.probe(device, capacity=capacity, formats=tuple(formats), kv=(kv,), disk=about)
    finally:
        if written and file is not None:
            file.unlink(missing_ok=True)
    step, row = loop_costs()
    compute = replace(found.computes[0], overhead=found.computes[0].overhead + step, row=row)
    return replace(found, name=name_of(device), computes=(compute,))


def _more(m: Machine, device: Device, formats: Collection[str], kv: tuple[int, int]) -> Machine:
    c, bits = m.computes[0], f"{kv[0]}/{kv[1]}"
    curves = {
        fmt: probe.matmul_curve(device, fmt, probe.ROWS, probe.WIDTH)[0] for fmt in formats if fmt not in c.formats
    }
    rates = c.attends.get(bits) or (probe.attend_rate(device, 1, bits=kv), probe.attend_rate(device, 16, bits=kv))
    return replace(m, computes=(replace(c, formats={**c.formats, **curves}, attends={**c.attends, bits: rates}),))


def _same_disk(file: Path, cache: Path) -> bool:
    there = next(p for p in (cache, *cache.parents) if p.exists())
    return file.stat().st_dev == there.stat().st_dev


def _write_file(cache: Path) -> Path:
    """A file that doesn't compress."""
    cache.mkdir(parents=True, exist_ok=True)
    path, piece = cache / ".probe", os.urandom(1 << 20)
    with atomic(path) as file:
        for i in range(FILE_BYTES >> 20):
            file.write(i.to_bytes(8, "little") + piece[8:])
    return path


# --- the loop ---------------------------------------------------------------------------------------------


class _Still(Computer):
    """A computer that computes nothing and always chooses the first token."""

    def __init__(self, last: int) -> None:
        self.last = last

    def step(self, layer: int, run: Run) -> None:
        rows = run.rows
        if run.x is None:
            run.x = np.empty((rows.count, 1), np.float32)
        if layer == self.last:
            run.choices = tuple(Choice(run.live[r], 0) for r in rows.wanted.tolist())


def loop_costs(tokens: int = 24) -> tuple[float, float]:
    """Seconds of Python for a (layer, run) step, and for a row of a pass."""

    def seconds(sequences: int, layers: int) -> float:
        order = Order(rows=64, chunk=64, sequences=sequences)
        loop = Loopback(Head(4 * sequences, order), [(Stage(0, layers, layers), _Still(layers - 1))])
        for i in range(sequences):
            loop.submit(Submit(Request(i, (1,) * 8, tokens)))
        start = perf_counter()
        while not loop.idle:
            loop.pump()
        return (perf_counter() - start) / tokens

    few, deep, wide = (min(seconds(*shape) for _ in range(3)) for shape in ((1, 4), (1, 36), (48, 4)))
    row = max(0.0, (wide - few) / 47)
    return max(0.0, (deep - row) / 36), row


def main(asked: str) -> None:
    """The process that ``machine`` measures in."""
    threads, path, cache, formats, kv, disk, rate, again = json.loads(asked)
    device = make_device(threads=threads, cpu=path or None)
    found = machine(
        device, Path(cache), formats, (kv[0], kv[1]), disk=Path(disk) if disk else None, disk_rate=rate, again=again
    )
    print(found.to_json())


if __name__ == "__main__":
    main(sys.argv[1])
