"""Weights that don't stay: read past the page cache from a packed file while other layers are computed.

All reads of a layer are queued at once, so the disk has work through the whole block (``ahead.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from headrace.formats.files import DirectFile
from headrace.formats.pack import PackFile, PackWriter, plan_pack
from headrace.kernels.device import Bytes, Device, Weight
from headrace.memory.ahead import BUFFERS, Ahead
from headrace.memory.buffers import allocate
from headrace.memory.weights import Resident, pack_tensor
from headrace.model.layers import Model, TensorPlan

REQUEST = 2 << 20
"""Bytes of one read; see docs/log.md for the sizes tried."""
DEPTH = 4
"""Reads under way at a time."""


def pack(
    device: Device, model: Model, layers: Sequence[int], folder: Path, tell: Callable[[str], None] | None = None
) -> PackFile:
    """The packed file of these layers in the device's layout, or of all blocks (``headrace pack``) where that is there
    already; else it is made now.

    Ranks of one job stream different layers, so each packs its own and none packs another's, also on shared storage.
    A shared tensor gets bytes of its own in it. Memory is short where layers stream, so from now on what is read of the
    model stays in no page cache. tell: hears, in a line, what takes time. OverBudget when the disk is too full.
    """
    model.file.spare_cache()
    blocks = [i for i, layer in enumerate(model.layers) if layer.kv is not None]
    if set(layers) < set(blocks) and (whole := _writer(device, model, blocks, folder)[0].finished()) is not None:
        return whole
    writer, tensors = _writer(device, model, layers, folder)
    return writer.write(lambda key, t, out: pack_tensor(device, model, tensors[key][t.name], out), tell)


def _writer(
    device: Device, model: Model, layers: Sequence[int], folder: Path
) -> tuple[PackWriter, dict[str, Mapping[str, TensorPlan]]]:
    """What makes the file of these layers, and their tensors."""
    tensors = {model.layers[i].key: model.layers[i].tensors for i in layers}
    content = {
        key: [(name, p.fmt, p.n, p.k, device.packed_nbytes(p.fmt, p.n, p.k)) for name, p in plans.items()]
        for key, plans in tensors.items()
    }
    return PackWriter(folder, plan_pack(model.file.identity(), device.layout, device.layout_version, content)), tensors


def evenly(count: int, total: int) -> list[int]:
    """``count`` of ``range(total)``, spread so that the gaps differ by at most one."""
    return [(2 * i + 1) * total // (2 * count) for i in range(count)] if count else []


class Streamed(Ahead):
    """``Weights`` of a model of which the layers ``streamed`` are read for each use; the others stay.

    ``read_bytes`` counts what came from the disk, ``waited`` the seconds ``hold`` waited for it.
    """

    lasting = True

    def __init__(
        self, device: Device, model: Model, layers: Sequence[int], streamed: Sequence[int], packed: PackFile,
        buffers: int = BUFFERS, ahead: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device, model, streamed, ahead)
        self._extents = {i: packed.layers[model.layers[i].key] for i in self.order}
        self.resident = Resident(device, model, [i for i in layers if i not in self._extents])
        largest = max((e.nbytes for e in self._extents.values()), default=0)
        count = min(buffers if ahead else 1, len(self.order))
        self.buffer_bytes = largest * count
        self._file = DirectFile(packed.path)
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="headrace-read")
        self._lock = threading.Lock()
        self.read_bytes = 0
        # One piece, so that it has 2 MiB pages: direct reads into small ones are a quarter as fast (docs/log.md).
        memory = allocate(largest * count)
        self.start(memory[i * largest : (i + 1) * largest] for i in range(count))

    @property
    def cycle_bytes(self) -> int:
        """Bytes read from the disk for one pass over all layers."""
        return sum(extent.nbytes for extent in self._extents.values())

    @property
    def nbytes(self) -> int:
        return self.resident.nbytes + self.buffer_bytes

    def hold(self, layer: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.held(layer) if layer in self._extents else self.resident.hold(layer)

    def stays(self, layer: int) -> bool:
        return layer not in self._extents

    def close(self) -> None:
        """Wait for reads under way and give the memory back."""
        self.drop_all()
        self._pool.shutdown()
        self._file.close()
        self.resident.close()

    def bring(self, layer: int, memory: Bytes) -> list[Future[None]]:
        extent = self._extents[layer]
        view = memory.data[: extent.nbytes]
        places = range(0, extent.nbytes, REQUEST)
        return [self._pool.submit(self._read, view[at : at + REQUEST], extent.offset + at) for at in places]

    def _read(self, out: memoryview, offset: int) -> None:
        self._file.read_into(out, offset)
        with self._lock:
            self.read_bytes += out.nbytes
