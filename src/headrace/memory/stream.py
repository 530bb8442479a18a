"""Weights that don't stay: read past the page cache from a packed file while other layers are computed.

The layers are used in one cyclic order, so what comes next is always known: as soon as a buffer is free, the
next layer's reads are queued, all of them at once, and the disk has work through the whole block.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from headrace.formats.files import DirectFile
from headrace.formats.pack import PackFile, PackPlan, PackWriter, plan_pack
from headrace.kernels.device import Bytes, Device, Weight
from headrace.memory.buffers import allocate
from headrace.memory.weights import Resident, pack_tensor
from headrace.model.layers import Model

REQUEST = 2 << 20
"""Bytes of one read; see docs/log.md for the sizes tried."""
DEPTH = 4
"""Reads under way at a time."""
BUFFERS = 3
"""Layers' worth of memory for streaming: one computed, one or two being read."""


def pack_plan(device: Device, model: Model, layers: Sequence[int]) -> PackPlan:
    """The packed file of these layers, in this device's layout; a shared tensor gets bytes of its own in it."""
    content = {}
    for layer in (model.layers[i] for i in layers):
        sizes = {name: device.packed_nbytes(p.fmt, p.n, p.k) for name, p in layer.tensors.items()}
        content[layer.key] = [(name, p.fmt, p.n, p.k, sizes[name]) for name, p in layer.tensors.items()]
    return plan_pack(model.file.identity(), device.layout, device.layout_version, content)


def pack(
    device: Device, model: Model, layers: Sequence[int], folder: Path, tell: Callable[[str], None] | None = None
) -> PackFile:
    """The packed file, made now unless it is there. OverBudget when the disk is too full."""
    writer = PackWriter(folder, pack_plan(device, model, layers))
    ready = writer.finished()
    if ready is not None:
        return ready
    if tell is not None:
        tell(writer.statement())
    tensors = {model.layers[i].key: model.layers[i].tensors for i in layers}
    return writer.write(lambda key, t, out: pack_tensor(device, model, tensors[key][t.name], out))


def evenly(count: int, total: int) -> list[int]:
    """``count`` of ``range(total)``, spread so that the gaps differ by at most one."""
    return [(2 * i + 1) * total // (2 * count) for i in range(count)] if count else []


class _Buffer:
    """Memory for one streamed layer at a time."""

    def __init__(self, nbytes: int) -> None:
        self.memory: Bytes = allocate(nbytes)
        self.reads: list[Future[None]] = []
        self.layer = -1


class Streamed:
    """``Weights`` of a model of which the layers ``streamed`` are read for each use; the others stay.

    ``read_bytes`` counts what came from the disk, ``waited`` the seconds ``hold`` waited for it.
    """

    lasting = True

    def __init__(
        self,
        device: Device,
        model: Model,
        layers: Sequence[int],
        streamed: Sequence[int],
        packed: PackFile,
        buffers: int = BUFFERS,
    ) -> None:
        self.order = sorted(streamed)
        self._extents = {i: packed.extent(model.layers[i].key) for i in self.order}
        self.resident = Resident(device, model, [i for i in layers if i not in self._extents])
        largest = max((e.nbytes for e in self._extents.values()), default=0)
        count = min(buffers, len(self.order))
        self.buffer_bytes = largest * count
        self._buffers = [_Buffer(largest) for _ in range(count)]
        self._free = deque(self._buffers)
        self._coming: deque[_Buffer] = deque()
        self._weights: dict[tuple[int, int], dict[str, Weight]] = {}
        self._device = device
        self._file = DirectFile(packed.path)
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="headrace-read")
        self._lock = threading.Lock()
        self._next = 0
        self.read_bytes = 0
        self.waited = 0.0
        self._fill()

    @property
    def cycle_bytes(self) -> int:
        """Bytes read from the disk for one pass over all layers."""
        return sum(extent.nbytes for extent in self._extents.values())

    @property
    def nbytes(self) -> int:
        return self.resident.nbytes + self.buffer_bytes

    @contextmanager
    def hold(self, layer: int) -> Iterator[Mapping[str, Weight]]:
        if layer not in self._extents:
            with self.resident.hold(layer) as held:
                yield held
            return
        buffer = self._arrived(layer)
        try:
            yield self._handles(layer, buffer)
        finally:
            buffer.layer = -1
            self._free.append(buffer)
            self._fill()

    def stays(self, layer: int) -> bool:
        return layer not in self._extents

    def close(self) -> None:
        """Wait for reads under way and give the memory back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()
        self._weights.clear()
        self._buffers, self._free, self._coming = [], deque(), deque()
        self.resident.close()

    def _fill(self) -> None:
        """Queue reads of the layers that come next, for as many as there are free buffers."""
        while self._free and len(self._coming) < len(self.order):
            buffer = self._free.popleft()
            buffer.layer = self.order[self._next]
            self._next = (self._next + 1) % len(self.order)
            extent = self._extents[buffer.layer]
            view = buffer.memory.data[: extent.nbytes]
            buffer.reads = [
                self._pool.submit(self._read, view[at : at + REQUEST], extent.offset + at)
                for at in range(0, extent.nbytes, REQUEST)
            ]
            self._coming.append(buffer)

    def _read(self, out: memoryview, offset: int) -> None:
        self._file.read_into(out, offset)
        with self._lock:
            self.read_bytes += out.nbytes

    def _arrived(self, layer: int) -> _Buffer:
        """The buffer with ``layer`` in it. Out of the cyclic order, what was read ahead is dropped first."""
        while self._coming and self._coming[0].layer != layer:
            self._drop(self._coming.popleft())
        if not self._coming:
            self._next = self.order.index(layer)
            self._fill()
        buffer = self._coming.popleft()
        start = time.perf_counter()
        for read in buffer.reads:
            read.result()
        self.waited += time.perf_counter() - start
        return buffer

    def _drop(self, buffer: _Buffer) -> None:
        for read in buffer.reads:
            if not read.cancel():
                read.result()
        self._free.append(buffer)

    def _handles(self, layer: int, buffer: _Buffer) -> dict[str, Weight]:
        key = (layer, id(buffer))
        if key not in self._weights:
            self._weights[key] = {
                t.name: self._device.weight(t.fmt, t.n, t.k, buffer.memory[t.offset : t.offset + t.nbytes])
                for t in self._extents[layer].tensors
            }
        return self._weights[key]
