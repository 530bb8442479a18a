"""Weights of a device with memory of its own: some stay there, the others cross the link for each use.

The layers that cross are used in one cyclic order, so what comes next is always known: as soon as a device buffer is
free the next layer is on its way, from host memory or through host buffers from the disk (``stream.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from headrace.formats.pack import PackFile
from headrace.kernels.device import Device, KVShape, Rows, Weight
from headrace.memory.buffers import allocate, round_up
from headrace.memory.link import Link
from headrace.memory.stream import BUFFERS, Streamed
from headrace.memory.weights import TENSOR_ALIGN, Weights, pack_tensor
from headrace.model.layers import Layer, Model

if TYPE_CHECKING:
    from headrace.kernels.torch_device import TorchDevice, TorchWeight


def whole_nbytes(device: Device, layer: Layer) -> int:
    """Bytes of all a layer's tensors, shared ones too: what a buffer needs to hold it."""
    return sum(round_up(device.packed_nbytes(p.fmt, p.n, p.k), TENSOR_ALIGN) for p in layer.tensors.values())


class _Buffer:
    """Device memory for one crossing layer at a time. sent: the job that sends it, then the copy itself."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.sent: Future[Future[None]] = Future()
        self.layer = -1
        self.mark: Any = None
        """The end of the device's last work with what was here."""


class Tiered:
    """``Weights`` of the layers a device computes; ``homes`` says where each one's lie: "device", "host" or "disk".

    host: the device in PyTorch whose memory the host tier is; hosted: the layers that lie there. packed: of the disk
    layers. ``waited``: seconds ``hold``
    waited for layers to arrive.
    """

    lasting = True

    def __init__(
        self,
        device: TorchDevice,
        host: TorchDevice,
        model: Model,
        homes: Mapping[int, str],
        link: Link,
        hosted: Weights,
        packed: PackFile | None = None,
        buffers: int = BUFFERS,
    ) -> None:
        self._device, self._model, self._link = device, model, link
        self._stay: dict[int, dict[str, TorchWeight]] = {}
        self.device_nbytes = 0
        self._load([i for i, home in homes.items() if home == "device"])
        self._hosted = hosted
        disk = [i for i, home in homes.items() if home == "disk"]
        self.disk = None if packed is None else Streamed(host, model, disk, disk, packed)
        self._on_disk = frozenset(disk)
        self.order = sorted(i for i, home in homes.items() if home != "device")
        largest = max((whole_nbytes(device, model.layers[i]) for i in self.order), default=0)
        count = min(buffers, len(self.order))
        self._free = deque(_Buffer(device.empty(largest)) for _ in range(count))
        self.device_nbytes += count * largest
        self._coming: deque[_Buffer] = deque()
        self._weights: dict[tuple[int, int], dict[str, TorchWeight]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-feed")
        self._leaving: tuple[AbstractContextManager[Mapping[str, Weight]], Future[None]] | None = None
        self._next = 0
        self.waited = 0.0
        self._fill()

    def _load(self, layers: Sequence[int]) -> None:
        """Send the layers that stay, tensor by tensor; a shared one once."""
        there: dict[tuple[str, str], TorchWeight] = {}
        for index in layers:
            layer = self._model.layers[index]
            for name, plan in layer.tensors.items():
                key = plan.shares or (layer.key, name)
                if key not in there:
                    size = self._device.packed_nbytes(plan.fmt, plan.n, plan.k)
                    staged = allocate(size)
                    pack_tensor(self._device, self._model, plan, staged)
                    memory = self._device.empty(round_up(size, TENSOR_ALIGN))
                    self._link.send("to_device", "load", [(memory[:size], _tensor(staged))]).result()
                    there[key] = self._device.weight(plan.fmt, plan.n, plan.k, memory)
                    self.device_nbytes += len(memory)
            self._stay[index] = {n: there[p.shares or (layer.key, n)] for n, p in layer.tensors.items()}

    def stays(self, layer: int) -> bool:
        """Whether the layer's tensors are always at hand."""
        return layer in self._stay

    def hold(self, layer: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return nullcontext(self._stay[layer]) if layer in self._stay else self._cross(layer)

    @contextmanager
    def _cross(self, layer: int) -> Iterator[Mapping[str, Weight]]:
        buffer = self._arrived(layer)
        try:
            yield self._handles(layer, buffer)
        finally:
            buffer.layer, buffer.mark = -1, self._device.mark()
            self._free.append(buffer)
            self._fill()

    def close(self) -> None:
        """Wait for copies under way and give the memory back; the link is the caller's."""
        for buffer in self._coming:
            self._drop(buffer)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._let_go()
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()
        self._hosted.close()
        self._weights.clear()
        self._stay.clear()
        self._free, self._coming = deque(), deque()

    def _fill(self) -> None:
        """Start sending the layers that come next, for as many as there are free buffers."""
        while self._free and len(self._coming) < len(self.order):
            buffer = self._free.popleft()
            buffer.layer = self.order[self._next]
            self._next = (self._next + 1) % len(self.order)
            buffer.sent = self._pool.submit(self._bring, buffer.layer, buffer)
            self._coming.append(buffer)

    def _bring(self, layer: int, buffer: _Buffer) -> Future[None]:
        """In the feeding thread: queue the copy. A host buffer is given back to the disk's reads when its copy ended;
        that of the layer before is waited for here, so that the link always has the next copy at hand."""
        if layer not in self._on_disk:
            with self._hosted.hold(layer) as held:
                return self._send(layer, buffer, held)
        assert self.disk is not None
        context = self.disk.hold(layer)
        sent = self._send(layer, buffer, context.__enter__())
        self._let_go()
        self._leaving = context, sent
        return sent

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving[1].exception()
            leaving[0].__exit__(None, None, None)

    def _send(self, layer: int, buffer: _Buffer, held: Mapping[str, Weight]) -> Future[None]:
        pairs = [(weight.raw, held[name].raw) for name, weight in self._handles(layer, buffer).items()]
        return self._link.send("to_device", "weights", pairs, after=buffer.mark)

    def _handles(self, layer: int, buffer: _Buffer) -> dict[str, TorchWeight]:
        key = (layer, id(buffer))
        if key not in self._weights:
            found, at = {}, 0
            for name, p in self._model.layers[layer].tensors.items():
                size = self._device.packed_nbytes(p.fmt, p.n, p.k)
                found[name] = self._device.weight(p.fmt, p.n, p.k, buffer.memory[at : at + size])
                at += round_up(size, TENSOR_ALIGN)
            self._weights[key] = found
        return self._weights[key]

    def _arrived(self, layer: int) -> _Buffer:
        """The buffer with ``layer`` in it. Out of the cyclic order, what was sent ahead is dropped first."""
        while self._coming and self._coming[0].layer != layer:
            self._drop(self._coming[0])
            self._free.append(self._coming.popleft())
        if not self._coming:
            self._next = self.order.index(layer)
            self._fill()
        start = time.perf_counter()
        self._coming[0].sent.result().result()
        self.waited += time.perf_counter() - start
        return self._coming.popleft()

    def _drop(self, buffer: _Buffer) -> None:
        if not buffer.sent.cancel():
            buffer.sent.result().result()


class DeviceKV:
    """Caches of some layers in a device's memory, as tensors."""

    def __init__(self, device: TorchDevice, shapes: Mapping[int, KVShape], pages: int) -> None:
        self.nbytes = sum(device.page_nbytes(s) * pages for s in shapes.values())
        self._layers = {
            i: device.kv_pages(s, device.empty(device.page_nbytes(s) * pages).reshape(pages, -1))
            for i, s in shapes.items()
        }

    def layer(self, index: int, rows: Rows) -> Any | None:
        """The layer's cache, None for a layer without one here."""
        return self._layers.get(index)

    def close(self) -> None:
        """Give the memory back."""
        self._layers = {}


def _tensor(buffer: Any) -> Any:
    import torch

    return torch.from_numpy(buffer)
