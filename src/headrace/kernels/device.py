"""What a device offers: the same few calls for the CPU extension, PyTorch and the reference code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.ops import Op

if TYPE_CHECKING:
    from headrace.kernels.draw import Draw, Drawn

I32: TypeAlias = NDArray[np.int32]
F32: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Weight: TypeAlias = Any
"""A device's own handle of one tensor; made by ``Device.weight``, meaningless to others."""

Shapes: TypeAlias = Mapping[str, tuple[str, int, int]]
"""Tensor name -> (format, n, k)."""

PAGE = 32
"""Slots in a page: the unit of allocation and of moving cache."""


@dataclass(frozen=True)
class Rows:
    """The rows of one run on one stage, slot lists resolved. All arrays are int32 and C-contiguous.

    Row r sees, in position order, ``lists[base[r] : base[r] + base_len[r]]`` (committed slots of its
    sequence) and then ``lists[extra[r] : extra[r] + extra_len[r]]`` (its ancestors' slots and its own).
    Its own slot is the last of the two together, so ``position[r] == base_len[r] + extra_len[r] - 1``.
    """

    token: I32
    position: I32
    slot: I32
    base: I32
    base_len: I32
    extra: I32
    extra_len: I32
    lists: I32
    wanted: I32
    """Indices of the rows whose logits are wanted, ascending."""

    @property
    def count(self) -> int:
        return int(self.token.shape[0])


@dataclass(frozen=True)
class KVShape:
    """Geometry of one layer's cache. A page's extent is K ``[kv_heads, PAGE, head_dim]``, then V likewise.

    ``k_bits`` and ``v_bits``: 16 (f16), 8 or 4 (groups of 32 along head_dim, one f16 scale; 4 bit: scale
    and minimum); the layout inside is the device's.
    """

    kv_heads: int
    head_dim: int
    k_bits: int = 16
    v_bits: int = 16

    @property
    def k_nbytes(self) -> int:
        """Bytes of one slot's K."""
        return self.kv_heads * _head_nbytes(self.head_dim, self.k_bits)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot's K and V."""
        return self.k_nbytes + self.kv_heads * _head_nbytes(self.head_dim, self.v_bits)


def _head_nbytes(dim: int, bits: int) -> int:
    return 2 * dim if bits == 16 else -(-dim // 32) * {8: 34, 4: 20}[bits]


class BoundProgram(Protocol):
    """A compiled layer joined with its weights."""

    def run(self, x: F32, rows: Rows, kv: Any | None) -> F32:
        """One step: one layer of one run. x: the residual rows [rows, width], changed in place.

        Returns x, or for the last layer the logits [wanted rows, vocab]. ``kv``: from ``Device.kv_layer``.
        """
        ...


class Program(Protocol):
    """A compiled layer."""

    def bind(self, weights: Mapping[str, Weight]) -> BoundProgram:
        """The layer with its tensors, which it keeps alive."""
        ...


class Device(Protocol):
    """Where layers are computed."""

    name: str
    layout: str
    """Name of the packed layout; packed files are keyed by it and its version."""
    layout_version: int

    def packed_nbytes(self, fmt: str, n: int, k: int) -> int:
        """Bytes of a [n, k] tensor in this device's layout: at most the file's + 3%."""
        ...

    def pack(self, fmt: str, n: int, k: int, raw: Bytes, out: Bytes, first: int = 0) -> None:
        """File bytes (rows one after the other) to the device's layout. out: packed_nbytes, 64-aligned.

        raw: all rows; or, part by part in order, those from ``first`` on, a multiple of 8 of them (the last part: any).
        """
        ...

    def weight(self, fmt: str, n: int, k: int, packed: Bytes) -> Weight:
        """A handle over packed bytes, without a copy; keeps ``packed`` alive."""
        ...

    def compile(self, ops: Sequence[Op], width: int) -> Program: ...

    def scratch_nbytes(self, ops: Sequence[Op], width: int, max_rows: int, shapes: Shapes) -> int:
        """The most working memory for runs of up to ``max_rows`` rows of these ops."""
        ...

    def sample(self, logits: F32, draws: Sequence[Draw]) -> list[Drawn]:
        """Choose a token for each row of logits [rows, vocab]."""
        ...

    def page_nbytes(self, shape: KVShape) -> int:
        """Bytes of one (layer, page) extent."""
        ...

    def kv_layer(self, shape: KVShape, pages: NDArray[np.uint64]) -> Any:
        """A layer's cache over a table of page addresses [pages]; the caller may change entries between steps."""
        ...
