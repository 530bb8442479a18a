"""Where weights live: packed once into a device's layout, held while a layer is computed.

``hold(i)`` is all the loop knows. Resident layers are simply there; the streamed ones of ``stream.py`` are
fetched before and dropped after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from headrace.kernels.device import Bytes, Device, Weight
from headrace.memory.buffers import allocate, round_up
from headrace.model.layers import Layer, Model, TensorPlan, fetch

TENSOR_ALIGN = 64
CHUNK = 8 << 20
"""File bytes read and packed at a time, so that loading needs little beside the result."""


class Weights(Protocol):
    """The weights of some layers, by index in the model's flat list.

    lasting: ``hold`` gives the same mappings again and again, so programs may stay joined with them.
    """

    lasting: bool

    def hold(self, layer: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """The layer's tensors for as long as the context lasts."""
        ...

    def stays(self, layer: int) -> bool:
        """Whether the layer lies in memory for good, held or not."""
        ...

    def close(self) -> None: ...


def tensor_nbytes(device: Device, plan: TensorPlan) -> int:
    """Memory of a tensor in the device's layout, up to where the next one begins."""
    return round_up(device.packed_nbytes(plan.fmt, plan.n, plan.k), TENSOR_ALIGN)


def layer_nbytes(device: Device, layer: Layer) -> int:
    """Bytes of a layer's own tensors in the device's layout."""
    return sum(tensor_nbytes(device, p) for p in layer.tensors.values() if p.shares is None)


def resident_nbytes(device: Device, model: Model, layers: Iterable[int]) -> int:
    """Bytes of these layers in one memory, a shared tensor once."""
    own = [model.layers[i] for i in layers]
    tensors = {p.shares or (layer.key, name): p for layer in own for name, p in layer.tensors.items()}
    return sum(tensor_nbytes(device, p) for p in tensors.values())


def pack_tensor(device: Device, model: Model, plan: TensorPlan, out: Bytes) -> None:
    """Read a tensor from its file and pack it into ``out``, a few rows at a time where the file has them in order."""
    rows = max(8, CHUNK // max(1, plan.nbytes // plan.n) // 8 * 8)
    if plan.n <= rows or plan.source.spans is not None:
        device.pack(plan.fmt, plan.n, plan.k, fetch(model.file, plan), out)
        return
    info = model.file.tensors[plan.source.tensor]
    for start in range(0, plan.n, rows):
        device.pack(plan.fmt, plan.n, plan.k, model.file.read(info, slice(start, start + rows)), out, start)


class Resident:
    """Layers of a model, loaded whole. A shared tensor (a tied output matrix) is loaded once."""

    lasting = True

    def __init__(self, device: Device, model: Model, layers: Sequence[int]) -> None:
        self._held: dict[int, dict[str, Weight]] = {}
        packed: dict[tuple[str, str], Bytes] = {}
        # One piece of memory, so that huge pages cover nearly all of it whatever the layers' sizes.
        self.arena, at = allocate(resident_nbytes(device, model, layers)), 0
        self.buffers: list[Bytes] = []
        for index in layers:
            layer, start = model.layers[index], at
            self._held[index] = {}
            for name, p in layer.tensors.items():
                key = p.shares or (layer.key, name)
                if key not in packed:
                    packed[key] = self.arena[at : at + device.packed_nbytes(p.fmt, p.n, p.k)]
                    pack_tensor(device, model, p, packed[key])
                    at += tensor_nbytes(device, p)
                self._held[index][name] = device.weight(p.fmt, p.n, p.k, packed[key])
            self.buffers.append(self.arena[start:at])

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def hold(self, layer: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return nullcontext(self._held[layer])

    def stays(self, layer: int) -> bool:
        return True

    def close(self) -> None:
        self._held, self.buffers, self.arena = {}, [], allocate(0)
