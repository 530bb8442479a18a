"""The KV cache of one stage: an extent for each (layer, page), K then V, in the device's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.kernels.device import Bytes, Device, KVShape, Rows
from headrace.memory.buffers import address, allocate
from headrace.model.layers import Layer

PRESETS: Mapping[str, tuple[int, int]] = {"16/16": (16, 16), "8/8": (8, 8), "8/4": (8, 4), "4/4": (4, 4)}


def kv_shapes(layers: Sequence[Layer], bits: tuple[int, int]) -> dict[int, KVShape]:
    """Layers with a cache, by index, at the given bits of K and V."""
    return {i: replace(s.kv, k_bits=bits[0], v_bits=bits[1]) for i, s in enumerate(layers) if s.kv is not None}


def page_nbytes(device: Device, layers: Sequence[Layer], bits: tuple[int, int]) -> int:
    """Bytes of one page through all the given layers."""
    return sum(device.page_nbytes(shape) for shape in kv_shapes(layers, bits).values())


class HostKV:
    """Every page in host memory; touched when first written."""

    def __init__(self, device: Device, shapes: Mapping[int, KVShape], pages: int) -> None:
        self.pages = pages
        self._buffers: list[Bytes] = []
        self._layers: dict[int, Any] = {}
        for index, shape in shapes.items():
            size = device.page_nbytes(shape)
            buffer = allocate(size * pages)
            self._buffers.append(buffer)
            table = np.uint64(address(buffer)) + np.arange(pages, dtype=np.uint64) * np.uint64(size)
            self._layers[index] = device.kv_layer(shape, table)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers)

    def layer(self, index: int, rows: Rows | None = None) -> Any | None:
        """The device's handle of a layer's cache, None for a layer without one."""
        return self._layers.get(index)

    def close(self) -> None:
        """Give the memory back."""
        self._layers, self._buffers = {}, []
