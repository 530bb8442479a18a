"""Layers that pass through a few buffers: while one is computed, the next are on their way.

They are used in one cyclic order, so what comes next is always known: as soon as a buffer is free, the next layer
is begun, and whatever brings it has work through the whole block.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from headrace.kernels.device import Device, Weight
from headrace.memory.weights import tensor_nbytes
from headrace.model.layers import Layer, Model

BUFFERS = 3
"""Layers' worth of memory: one computed, one or two on their way."""


def whole_nbytes(device: Device, layer: Layer) -> int:
    """Bytes of all a layer's tensors, shared ones too: what a buffer needs to hold it."""
    return sum(tensor_nbytes(device, p) for p in layer.tensors.values())


class Buffer:
    """Memory for one layer at a time. coming: what must end before the layer is there (``_end``)."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.layer = -1
        self.coming: Sequence[Future[Any]] = ()


class Ahead:
    """The buffers and their order. Its heirs say how a layer is brought.

    ``waited``: seconds that ``held`` waited for layers to arrive.
    """

    def __init__(self, device: Device, model: Model, order: Iterable[int], ahead: bool = True) -> None:
        self.order = sorted(order)
        self.ahead = ahead
        """False: a layer is brought when it is asked for, into the one buffer there should be."""
        self.waited = 0.0
        self._device, self._model = device, model
        self._free: deque[Buffer] = deque()
        self._coming: deque[Buffer] = deque()
        self._weights: dict[tuple[int, int], dict[str, Weight]] = {}
        self._next = 0

    def start(self, memories: Iterable[Any]) -> None:
        """Begin with these buffers."""
        self._free.extend(map(Buffer, memories))
        if self.ahead:
            self._fill()

    def bring(self, layer: int, memory: Any) -> Sequence[Future[Any]]:
        """Begin to fill the memory with the layer's tensors, as they lie in a packed file's extent."""
        raise NotImplementedError

    @contextmanager
    def held(self, layer: int) -> Iterator[Mapping[str, Weight]]:
        """The layer's tensors, waited for. Out of the cyclic order, what came ahead is dropped first."""
        while self._coming and self._coming[0].layer != layer:
            self._drop(self._coming.popleft())
        if not self._coming:
            self._next = self.order.index(layer)
            self._fill()
        buffer = self._coming.popleft()
        start = time.perf_counter()
        try:
            for future in buffer.coming:
                _end(future)
            buffer.coming = ()
            self.waited += time.perf_counter() - start
            yield self._handles(layer, buffer.memory)
        finally:  # also when it didn't arrive: whoever asks again gets it brought again
            self._drop(buffer)
            if self.ahead:
                self._fill()

    def drop_all(self) -> None:
        """Wait for what is under way and let the buffers go."""
        while self._coming:
            self._drop(self._coming.popleft())
        self._free.clear()
        self._weights.clear()

    def _fill(self) -> None:
        """Begin the layers that come next, for as many as there are free buffers."""
        while self._free and len(self._coming) < len(self.order):
            buffer = self._free.popleft()
            buffer.layer = self.order[self._next]
            self._next = (self._next + 1) % len(self.order)
            buffer.coming = self.bring(buffer.layer, buffer.memory)
            self._coming.append(buffer)

    def _drop(self, buffer: Buffer) -> None:
        """Free a buffer, after what was begun for it, however that ends."""
        for future in buffer.coming:
            if not future.cancel():
                with suppress(Exception):
                    _end(future)
        self._free.append(buffer)

    def _handles(self, layer: int, memory: Any) -> dict[str, Weight]:
        key = (layer, id(memory))
        if key not in self._weights:
            found, at = {}, 0
            for name, p in self._model.layers[layer].tensors.items():
                size = self._device.packed_nbytes(p.fmt, p.n, p.k)
                found[name] = self._device.weight(p.fmt, p.n, p.k, memory[at : at + size])
                at += tensor_nbytes(self._device, p)
            self._weights[key] = found
        return self._weights[key]


def _end(future: Any) -> None:
    """Wait for it, and for the future that may be its result; raises what went wrong."""
    while isinstance(future, Future):
        future = future.result()
