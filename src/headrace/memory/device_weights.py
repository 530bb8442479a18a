"""Weights of a device with memory of its own: some stay there, the others cross the link for each use.

Those pass through buffers of the device (``ahead.py``), from host memory or through host buffers from the disk
(``stream.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from headrace.formats.pack import PackFile
from headrace.kernels.device import KVShape, Rows, Weight
from headrace.memory.ahead import BUFFERS, Ahead, whole_nbytes
from headrace.memory.buffers import allocate
from headrace.memory.link import Link
from headrace.memory.stream import Streamed
from headrace.memory.weights import Weights, pack_tensor, tensor_nbytes
from headrace.model.layers import Model

if TYPE_CHECKING:
    from headrace.kernels.torch_device import TorchDevice, TorchWeight


class Tiered(Ahead):
    """``Weights`` of the layers a device computes; ``homes`` says where each one's lie: "device", "host" or "disk".

    host: the device in PyTorch whose memory the host tier is; hosted: the layers that lie there. packed: of the disk
    layers. ``waited``: seconds ``hold`` waited for layers to arrive.
    """

    lasting = True

    def __init__(
        self, device: TorchDevice, host: TorchDevice, model: Model, homes: Mapping[int, str], link: Link,
        hosted: Weights, packed: PackFile | None = None, ahead: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device, model, (i for i, home in homes.items() if home != "device"), ahead)
        self._near, self._link = device, link
        self._stay: dict[int, dict[str, TorchWeight]] = {}
        self.device_nbytes = 0
        self._load(host, [i for i, home in homes.items() if home == "device"])
        self._hosted = hosted
        disk = [i for i, home in homes.items() if home == "disk"]
        self.disk = None if packed is None else Streamed(host, model, disk, disk, packed, ahead=ahead)
        self._on_disk = frozenset(disk)
        largest = max((whole_nbytes(device, model.layers[i]) for i in self.order), default=0)
        count = min(BUFFERS if ahead else 1, len(self.order))
        self.device_nbytes += count * largest
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-feed")
        self._leaving: tuple[AbstractContextManager[Mapping[str, Weight]], Future[None]] | None = None
        self.start(device.empty(largest) for _ in range(count))

    def _load(self, host: TorchDevice, layers: Sequence[int]) -> None:
        """Send the layers that stay, tensor by tensor; a shared one once."""
        there: dict[tuple[str, str], TorchWeight] = {}
        for index in layers:
            layer = self._model.layers[index]
            for name, plan in layer.tensors.items():
                key = plan.shares or (layer.key, name)
                if key not in there:
                    size = self._near.packed_nbytes(plan.fmt, plan.n, plan.k)
                    staged = allocate(size)
                    pack_tensor(self._near, self._model, plan, staged)
                    memory = self._near.empty(tensor_nbytes(self._near, plan))
                    self._link.send("to_device", "load", [(memory[:size], host.send(staged))]).result()
                    there[key] = self._near.weight(plan.fmt, plan.n, plan.k, memory)
                    self.device_nbytes += len(memory)
            self._stay[index] = {n: there[p.shares or (layer.key, n)] for n, p in layer.tensors.items()}

    def stays(self, layer: int) -> bool:
        """Whether the layer's tensors are always at hand."""
        return layer in self._stay

    def hold(self, layer: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return nullcontext(self._stay[layer]) if layer in self._stay else self.held(layer)

    def close(self) -> None:
        """Wait for copies under way and give the memory back; the link is the caller's."""
        self.drop_all()
        self._pool.shutdown()
        self._let_go()
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()
        self._hosted.close()
        self._stay.clear()

    def bring(self, layer: int, memory: Any) -> list[Future[Future[None]]]:
        # What the device computes with the buffer's last layer must end before its memory is written.
        return [self._pool.submit(self._feed, layer, memory, self._near.mark())]

    def _feed(self, layer: int, memory: Any, after: Any) -> Future[None]:
        """In the feeding thread: queue the copy. A host buffer is given back to the disk's reads when its copy ended;
        that of the layer before is waited for here, so that the link always has the next copy at hand."""
        if layer not in self._on_disk:
            with self._hosted.hold(layer) as held:
                return self._send(layer, memory, after, held)
        assert self.disk is not None
        if not self.ahead:  # the host, too, has one buffer
            with self.disk.hold(layer) as held:
                sent = self._send(layer, memory, after, held)
                sent.exception()
                return sent
        context = self.disk.hold(layer)
        sent = self._send(layer, memory, after, context.__enter__())
        self._let_go()
        self._leaving = context, sent
        return sent

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving[1].exception()
            leaving[0].__exit__(None, None, None)

    def _send(self, layer: int, memory: Any, after: Any, held: Mapping[str, Weight]) -> Future[None]:
        tensors = self._handles(layer, memory)
        pairs = [(weight.raw, held[name].raw) for name, weight in tensors.items()]
        return self._link.send("to_device", "weights", pairs, after=after)


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
