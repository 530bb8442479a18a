"""A layer's cache in PyTorch: records of slots as tensors, rounded as docs/kernels.md says ("K and V in their slots").

A page's extent is PAGE records one after the other, a record is K of all heads and then V: so a list of slots is one
gather, and pages that follow each other in memory are one tensor [slots, record].
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.device import PAGE, KVShape

Tensor: TypeAlias = Any
ALIGN = 64
_F16_MAX = 65504.0


def page_nbytes(shape: KVShape) -> int:
    """Bytes of one (layer, page) extent, a multiple of 64."""
    return -(-PAGE * shape.nbytes // ALIGN) * ALIGN


def encode(x: Tensor, bits: int) -> Tensor:
    """f32 [rows, heads, dim] -> bytes [rows, heads * a head's bytes]."""
    rows, heads, dim = x.shape
    if bits == 16:
        return x.clamp(-_F16_MAX, _F16_MAX).half().view(torch.uint8).reshape(rows, -1)
    groups = torch.nn.functional.pad(x, (0, -dim % 32)).reshape(rows, heads, -1, 32)
    if bits == 8:
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
        q = _quotient(groups, scale).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        parts: tuple[Tensor, ...] = (scale.view(torch.uint8), q)
    else:
        low = groups.amin(-1, keepdim=True)
        scale, base = ((groups.amax(-1, keepdim=True) - low) / 15).half(), low.half()
        q = _quotient(groups - base.float(), scale).round().clamp(0, 15).to(torch.uint8)
        parts = (scale.view(torch.uint8), base.view(torch.uint8), q[..., :16] | (q[..., 16:] << 4))
    return torch.cat(parts, -1).reshape(rows, -1)


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, 0 where the scale is; a NaN counts as 0, as the scale already tells of it."""
    s = scale.float()
    return torch.nan_to_num(torch.where(s == 0, torch.zeros_like(x), x * (1 / s)))


def decode(raw: Tensor, heads: int, dim: int, bits: int) -> Tensor:
    """Bytes [slots, heads * a head's bytes] -> f32 [slots, heads, dim]."""
    slots = len(raw)
    if bits == 16:
        return raw.contiguous().view(torch.float16).float().reshape(slots, heads, dim)
    g = raw.reshape(slots, heads, -1, 34 if bits == 8 else 20)
    scale = g[..., :2].contiguous().view(torch.float16).float()
    if bits == 8:
        y = g[..., 2:].contiguous().view(torch.int8).float() * scale
    else:
        base = g[..., 2:4].contiguous().view(torch.float16).float()
        y = torch.cat((g[..., 4:] & 15, g[..., 4:] >> 4), -1).float() * scale + base
    return y.reshape(slots, heads, -1)[..., :dim]


class TorchKV:
    """A layer's cache. Either one tensor of pages on the device, or a table of addresses in host memory.

    The table's owner may change its entries between steps; pages at even distances are seen as one tensor.
    """

    def __init__(self, shape: KVShape, pages: Tensor | NDArray[np.uint64]) -> None:
        self.shape = shape
        self.extent = page_nbytes(shape)
        self.record = shape.nbytes
        self.split = shape.k_nbytes
        self._table = pages if isinstance(pages, np.ndarray) else None
        self._seen: NDArray[np.uint64] | None = None
        self._pages: list[Tensor] = []
        self._whole = None if self._table is not None else self._records(pages)

    def _records(self, pages: Tensor) -> Tensor:
        """Bytes [pages, extent] -> [pages, PAGE, record]."""
        return pages[:, : PAGE * self.record].unflatten(1, (PAGE, self.record))

    def _resolve(self) -> None:
        """See the pages where the table says they are now."""
        table = self._table
        if table is None or (self._seen is not None and np.array_equal(self._seen, table)):
            return
        self._seen = table.copy()
        steps = np.diff(table.astype(np.int64))
        even = len(table) > 0 and bool((steps == self.extent).all())
        runs = [(int(table[0]), len(table))] if even else [(int(at), 1) for at in table]
        views = [self._records(_at(at, count, self.extent)) for at, count in runs]
        self._whole, self._pages = (views[0], []) if even else (None, views)

    def store(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots: int64 [rows], on the device; k, v: f32 [rows, kv_heads * head_dim]."""
        self._resolve()
        s = self.shape
        by_head = (len(slots), s.kv_heads, s.head_dim)
        record = torch.cat((encode(k.reshape(by_head), s.k_bits), encode(v.reshape(by_head), s.v_bits)), 1)
        if self._whole is not None:
            self._whole[slots // PAGE, slots % PAGE] = record
        else:
            for row, slot in enumerate(slots.tolist()):
                self._pages[slot // PAGE][0, slot % PAGE] = record[row]

    def load(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots: int64 [count] -> k, v: f32 [count, kv_heads, head_dim]."""
        self._resolve()
        if self._whole is not None:
            records = self._whole[slots // PAGE, slots % PAGE]
        else:
            there, at = torch.unique(slots // PAGE, return_inverse=True)
            records = torch.cat([self._pages[i] for i in there.tolist()])[at, slots % PAGE]
        s = self.shape
        k = decode(records[:, : self.split], s.kv_heads, s.head_dim, s.k_bits)
        return k, decode(records[:, self.split :], s.kv_heads, s.head_dim, s.v_bits)


def _at(address: int, pages: int, extent: int) -> Tensor:
    """Bytes [pages, extent] at an address of this process."""
    raw = (ctypes.c_uint8 * (pages * extent)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).reshape(pages, extent)
