"""A device behind a paced link: measured passes beside the longest of link, disk and computing.

    python benchmarks/device_tier.py [--model FILE] [--rows 8] [--runs 1] [--passes 4] [--out FILE]

On ``torch:cpu``, decode passes of a block of runs. "compute": a pass without what its steps waited for weights and rows
(on a machine that others use, a pass measured at another time would compare their load); "resident": the same block
with all layers on the device, for comparison. "link": the bytes that crossed at the pace, and its latency for each
copy. "disk": the streamed bytes at the rate their reads have when nothing else is done. The share is the longest of
compute, link and disk, divided by the pass; medians. Rates of the link: 12/20 of the rate at which this host copies
memory, as in FlexGen's machine; and, as the device is slow here, rates at which the link takes half as long as
computing, as long, and twice as long. In the last case the disk's reads are slowed down as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from headrace.formats.index import open_model
from headrace.memory.link import DIRECTIONS, Link, Pace
from headrace.model.layers import load_model
from headrace.options import Options
from headrace.plan.plan import Place
from headrace.run.stage import Stage
from headrace.run.tiers import TieredComputer
from headrace.run.types import Append, Params, Result, Row, RunMessage, Sampling, Step
from headrace.setup import build
from headrace.system import cores
from model_zoo import smollm2

LATENCY = 20e-6
DEVICE = Place("device", "device", "device", "device")


def crossing(home: str, kv: str = "device") -> Place:
    return Place(home, "device", kv, kv)


class Passes:
    """Decode passes of ``rows`` * ``runs`` sequences through a placed model."""

    def __init__(self, path: Path, places: list[Place], rows: int, runs: int, pace: Pace | None, packs: Path) -> None:
        self.parts = build(path, Options(
            device="torch:cpu", threads=1, context=256, caches=rows * runs, rows=rows, runs=runs, packs=packs,
            places=tuple(places), link=pace,
        ))  # fmt: skip
        assert isinstance(self.parts.computer, TieredComputer)
        self.computer = self.parts.computer
        total = len(self.parts.model.layers)
        self.stage = Stage(0, total, total)
        self.rows, self.runs, self.position, self.run = rows, runs, 0, 0

    def messages(self) -> list[RunMessage]:
        made = []
        for r in range(self.runs):
            ops: list[Any] = []
            rows = []
            for s in range(r * self.rows, (r + 1) * self.rows):
                token, slot = (s * 31 + self.position * 7) % 4000 + 300, s * 256 + self.position
                ops += [Params(s, Sampling())] if self.position == 0 else []
                ops.append(Append(s, (slot,), (token,)))
                rows.append(Row(s, self.position, token, slot, wanted=True))
            made.append(RunMessage(0, self.run, r + 1 < self.runs, tuple(ops), tuple(rows)))
            self.run += 1
        self.position += 1
        return made

    def once(self) -> float:
        """Seconds of one pass of the block."""
        start = time.perf_counter()
        done = 0
        for message in self.messages():
            effects = self.stage.on_event(message, 0.0)
        while True:
            done += sum(isinstance(e, Result) for e in effects)
            if done == self.runs:
                return time.perf_counter() - start
            step = next(e for e in effects if isinstance(e, Step))
            self.computer.step(step.layer, self.stage.runs[step.run])
            effects = self.stage.on_event(step, 0.0)

    def several(self, count: int) -> list[float]:
        """The first is not counted: what was sent while nothing was computed makes it shorter."""
        return [self.once() for _ in range(count + 1)][1:]


class SlowFile:
    """A file whose reads take turns at a rate."""

    def __init__(self, file: Any, rate: float) -> None:
        self._file, self._rate = file, rate
        self._lock, self._free = threading.Lock(), 0.0

    def read_into(self, out: memoryview, offset: int) -> None:
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + out.nbytes / self._rate
            until = self._free
        self._file.read_into(out, offset)
        time.sleep(max(0.0, until - time.perf_counter()))

    def close(self) -> None:
        self._file.close()


def copy_rate() -> float:
    """Bytes/s of copying memory with one thread."""
    a, b = (torch.zeros(64 << 20, dtype=torch.uint8) for _ in range(2))
    a.copy_(b)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a.copy_(b)
        times.append(time.perf_counter() - start)
    return float(len(a) / min(times))


def disk_seconds(passes: Passes) -> tuple[int, float]:
    """Bytes of one pass from the disk, and the seconds they take alone."""
    disk = passes.computer.weights.disk  # type: ignore[attr-defined]
    if disk is None:
        return 0, 0.0
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for layer in disk.order:
            with disk.hold(layer):
                pass
        times.append(time.perf_counter() - start)
    return disk.cycle_bytes, statistics.median(times[1:])


def crossed(link: Link) -> dict[str, int]:
    """Bytes by direction."""
    return {d: sum(n for (way, _), n in link.sent.items() if way == d) for d in DIRECTIONS}


def measure(
    path: Path, name: str, places: list[Place], rate: float, a: Any, packs: Path, disk_rate: float | None = None
) -> Any:
    passes = Passes(path, places, a.rows, a.runs, Pace(rate, LATENCY), packs)
    if disk_rate is not None:
        disk = passes.computer.weights.disk  # type: ignore[attr-defined]
        disk._file = SlowFile(disk._file, disk_rate)
    disk_bytes, disk = disk_seconds(passes)
    passes.once()
    link, weights = passes.computer.link, passes.computer.weights
    before, copies = crossed(link), link.copies
    took, computed = [], []
    for _ in range(a.passes):
        waited = passes.computer.waited + weights.waited  # type: ignore[attr-defined]
        took.append(passes.once())
        waited = passes.computer.waited + weights.waited - waited  # type: ignore[attr-defined]
        computed.append(took[-1] - waited)
    sent = max(crossed(link)[d] - before[d] for d in DIRECTIONS) / a.passes
    crossing_seconds = sent / rate + (link.copies - copies) / a.passes * LATENCY
    passes.parts.close()
    longest = [max(c, crossing_seconds, disk) for c in computed]
    share = statistics.median(x / t for x, t in zip(longest, took, strict=True))
    row = {
        "name": name, "link_bytes_per_s": rate, "link_bytes": sent, "disk_bytes": disk_bytes, "share_of_longest": share,
        "compute": statistics.median(computed), "link": crossing_seconds, "disk": disk,
        "pass": statistics.median(took), "passes": took, "computed": computed,
    }  # fmt: skip
    times = "  ".join(f"{k} {1e3 * row[k]:.0f} ms" for k in ("compute", "link", "disk", "pass"))
    print(f"{name:42} {share:6.1%}  {times}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    path = a.model or smollm2()
    with open_model(path) as file:
        model = load_model(file)
        count = len(model.layers)
        weights = sum(layer.nbytes for layer in model.layers[1:-1])
    with tempfile.TemporaryDirectory() as folder:
        packs = Path(folder)
        resident = Passes(path, [DEVICE] * count, a.rows, a.runs, None, packs)
        compute = statistics.median(resident.several(a.passes))
        memory = copy_rate()
        balanced = weights / compute
        inner = count - 2
        half = [crossing("host") if i % 2 else crossing("disk") for i in range(inner)]
        thirds = [(DEVICE, crossing("host", "host"), crossing("disk"))[i % 3] for i in range(inner)]
        host, disk = [crossing("host")] * inner, [crossing("disk")] * inner
        cases = [
            ("host weights, link 12/20 of memory", host, memory * 0.6),
            ("host weights, link half of computing", host, balanced * 2),
            ("host weights, link as computing", host, balanced),
            ("host weights, link twice computing", host, balanced / 2),
            ("disk weights, link as computing", disk, balanced),
            ("host and disk weights, link as computing", half, balanced),
            ("three tiers, a third host attention", thirds, balanced / 2),
            ("disk weights, a disk twice computing", disk, balanced * 2, balanced / 2),
        ]
        rows = [measure(path, n, [DEVICE, *p, DEVICE], r, a, packs, *more) for n, p, r, *more in cases]
        compute = statistics.median([compute, *resident.several(a.passes)])
        resident.parts.close()
    result = {
        "model": path.name, "rows": a.rows, "runs": a.runs, "threads": 1,
        "resident": compute, "cores": cores(), "torch": torch.__version__,
        "copy_bytes_per_s": memory, "weight_bytes": weights, "latency": LATENCY, "cases": rows,
        "load": [round(x, 1) for x in os.getloadavg()],
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    if a.out:
        a.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
