"""The reference device: every operation in plain NumPy, for tests. What the others are compared with.

Weights stay the file's bytes and are widened once on first use; products are f32, norms and softmax f64 inside.
The cache may also be f32 (32 bits), which no other device offers: rounding K and V hides small errors elsewhere.
It reads formats (a neighbour folder) for the block formats: tests need both, and the product needs neither here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.formats.quant import dequantise
from headrace.formats.tensor import row_nbytes
from headrace.kernels.device import F32, PAGE, Bytes, KVShape, Rows
from headrace.kernels.ops import FEWEST, Act, Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV


@dataclass
class _Weight:
    fmt: str
    n: int
    k: int
    packed: Bytes

    @cached_property
    def values(self) -> F32:
        """[n, k]"""
        return dequantise(self.fmt, self.packed, self.n, self.k).reshape(self.n, self.k)

    def row(self, index: NDArray[Any]) -> F32:
        """The chosen rows, [len(index), k], without widening the rest."""
        raw = np.ascontiguousarray(self.packed.reshape(self.n, -1)[index])
        return dequantise(self.fmt, raw.reshape(-1), len(index), self.k).reshape(-1, self.k)


class ReferenceDevice:
    """``Device`` in NumPy. Packing is the identity: a tensor is its file's bytes."""

    name = "reference"
    layout = "file"
    layout_version = 1

    def packed_nbytes(self, fmt: str, n: int, k: int) -> int:
        return n * row_nbytes(fmt, k)

    def pack(self, fmt: str, n: int, k: int, raw: Bytes, out: Bytes, first: int = 0) -> None:
        at = first * row_nbytes(fmt, k)
        out[at : at + raw.size] = raw

    def weight(self, fmt: str, n: int, k: int, packed: Bytes) -> _Weight:
        return _Weight(fmt, n, k, packed[: self.packed_nbytes(fmt, n, k)])

    def compile(self, ops: Sequence[Op], width: int) -> _Program:
        return _Program(tuple(ops), width)

    def page_nbytes(self, shape: KVShape) -> int:
        return shape.kv_heads * PAGE * (_head_nbytes(shape.head_dim, shape.k_bits)
                                        + _head_nbytes(shape.head_dim, shape.v_bits))  # fmt: skip

    def kv_layer(self, shape: KVShape, pages: NDArray[np.uint64]) -> _KV:
        return _KV(shape, pages, self.page_nbytes(shape))


def _head_nbytes(dim: int, bits: int) -> int:
    """One head's K or V of one slot: f32 (only here), f16; or per 32 values an f16 scale, f16 minimum (4) and bits."""
    return dim * bits // 8 if bits >= 16 else -(-dim // 32) * {8: 34, 4: 20}[bits]


@dataclass
class _KV:
    """A layer's cache over pages at given addresses. ``pages`` may change between steps."""

    shape: KVShape
    pages: NDArray[np.uint64]
    extent: int

    def _page(self, index: int) -> tuple[Bytes, Bytes]:
        """K and V of a page: bytes [kv_heads, PAGE, a head's bytes]."""
        s = self.shape
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * self.extent).from_address(int(self.pages[index])))
        split = s.kv_heads * PAGE * _head_nbytes(s.head_dim, s.k_bits)
        return raw[:split].reshape(s.kv_heads, PAGE, -1), raw[split:].reshape(s.kv_heads, PAGE, -1)

    def store(self, slot: int, k: F32, v: F32) -> None:
        """k, v: [kv_heads, head_dim]"""
        keys, values = self._page(slot // PAGE)
        keys[:, slot % PAGE] = _encode(k, self.shape.k_bits)
        values[:, slot % PAGE] = _encode(v, self.shape.v_bits)

    def load(self, slots: NDArray[np.int32]) -> tuple[F32, F32]:
        """-> k, v: [slots, kv_heads, head_dim]"""
        s = self.shape
        raw_k = np.empty((len(slots), s.kv_heads, _head_nbytes(s.head_dim, s.k_bits)), np.uint8)
        raw_v = np.empty((len(slots), s.kv_heads, _head_nbytes(s.head_dim, s.v_bits)), np.uint8)
        for page in np.unique(slots // PAGE):
            keys, values = self._page(int(page))
            mine = np.flatnonzero(slots // PAGE == page)
            raw_k[mine] = keys[:, slots[mine] % PAGE].swapaxes(0, 1)
            raw_v[mine] = values[:, slots[mine] % PAGE].swapaxes(0, 1)
        return _decode(raw_k, s.head_dim, s.k_bits), _decode(raw_v, s.head_dim, s.v_bits)


def _encode(x: F32, bits: int) -> Bytes:
    """[heads, dim] -> bytes [heads, a head's bytes]."""
    heads, dim = x.shape
    if bits >= 16:
        return np.ascontiguousarray(x, np.float16 if bits == 16 else np.float32).view(np.uint8)
    groups = np.zeros((heads, -(-dim // 32) * 32), np.float32)
    groups[:, :dim] = x
    g = groups.reshape(heads, -1, 32)
    if bits == 8:
        scale = (np.abs(g).max(-1, keepdims=True) / 127).astype(np.float16)
        q = np.clip(np.rint(_over(g, scale)), -127, 127).astype(np.int8).view(np.uint8)
        return np.concatenate([scale.view(np.uint8), q], -1).reshape(heads, -1)
    low = g.min(-1, keepdims=True)
    scale, base = ((g.max(-1, keepdims=True) - low) / 15).astype(np.float16), low.astype(np.float16)
    q = np.clip(np.rint(_over(g - base.astype(np.float32), scale)), 0, 15).astype(np.uint8)
    packed = q[..., :16] | q[..., 16:] << 4
    return np.concatenate([scale.view(np.uint8), base.view(np.uint8), packed], -1).reshape(heads, -1)


def _over(x: F32, scale: NDArray[np.float16]) -> F32:
    s = scale.astype(np.float32)
    return np.divide(x, s, out=np.zeros_like(x), where=s != 0)


def _decode(raw: Bytes, dim: int, bits: int) -> F32:
    """Bytes [..., a head's bytes] -> [..., dim]."""
    if bits >= 16:
        return raw.view(np.float16 if bits == 16 else np.float32).astype(np.float32)
    g = raw.reshape(*raw.shape[:-1], -1, 34 if bits == 8 else 20)
    scale = np.ascontiguousarray(g[..., :2]).view(np.float16).astype(np.float32)
    if bits == 8:
        out = scale * np.ascontiguousarray(g[..., 2:]).view(np.int8)
    else:
        base = np.ascontiguousarray(g[..., 2:4]).view(np.float16).astype(np.float32)
        q = np.concatenate([g[..., 4:] & 15, g[..., 4:] >> 4], -1)
        out = scale * q + base
    return out.reshape(*raw.shape[:-1], -1)[..., :dim]


@dataclass
class _Step:
    """What an operation may touch: registers, weights, rows, cache."""

    weights: Mapping[str, _Weight]
    rows: Rows
    kv: _KV | None
    regs: dict[str, F32] = field(default_factory=dict)

    def vector(self, name: str | None) -> F32 | None:
        return None if name is None else self.weights[name].values[0]


@dataclass
class _Bound:
    program: _Program
    weights: Mapping[str, Any]

    def run(self, x: F32, rows: Rows, kv: Any | None) -> F32:
        """As ``BoundProgram.run``: x, changed in place, or the register ``logits`` where the ops write it."""
        step = _Step(self.weights, rows, kv, {"x": x})
        with np.errstate(over="ignore", invalid="ignore"):
            for op in self.program.ops:
                _RUN[type(op)](op, step)
        x[:] = step.regs["x"]
        return step.regs.get("logits", x)


@dataclass
class _Program:
    ops: tuple[Op, ...]
    width: int

    def bind(self, weights: Mapping[str, Any]) -> _Bound:
        return _Bound(self, weights)


def _gather(op: Gather, s: _Step) -> None:
    index = (s.rows.token if op.index == "token" else s.rows.position) + op.offset
    found = s.weights[op.table].row(index) * np.float32(op.scale)
    s.regs[op.dst] = s.regs[op.dst] + found if op.accumulate else found


def _norm(op: Norm, s: _Step) -> None:
    src = s.regs[op.src]
    x = src.reshape(len(src), -1, op.group or src.shape[1]).astype(np.float64)
    if op.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + op.eps) * s.vector(op.weight)
    bias = s.vector(op.bias)
    s.regs[op.dst] = (y if bias is None else y + bias).astype(np.float32).reshape(src.shape)


def _linear(op: Linear, s: _Step) -> None:
    y = s.regs[op.src] @ s.weights[op.weight].values.T
    bias = s.vector(op.bias)
    if bias is not None:
        y = y + bias
    s.regs[op.dst] = s.regs[op.dst] + y if op.accumulate else y


def _rope(op: Rope, s: _Step) -> None:
    n = len(op.inv_freq)
    x = s.regs[op.buf].reshape(-1, op.heads, op.head_dim).copy()
    angle = s.rows.position[:, None].astype(np.float64) * np.array(op.inv_freq)
    cos = (np.cos(angle) * op.magnitude).astype(np.float32)[:, None, :]
    sin = (np.sin(angle) * op.magnitude).astype(np.float32)[:, None, :]
    first, second = (slice(0, n), slice(n, 2 * n)) if op.style == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    s.regs[op.buf] = x.reshape(len(x), -1)


def _store(op: StoreKV, s: _Step) -> None:
    assert s.kv is not None
    shape = (-1, s.kv.shape.kv_heads, s.kv.shape.head_dim)
    for slot, k, v in zip(s.rows.slot, s.regs[op.k].reshape(shape), s.regs[op.v].reshape(shape), strict=True):
        s.kv.store(int(slot), k, v)


def _attend(op: Attend, s: _Step) -> None:
    assert s.kv is not None
    rows, kv = s.rows, s.kv
    q = s.regs[op.src].reshape(-1, op.kv_heads, op.heads // op.kv_heads, op.head_dim)
    out = np.empty_like(q)
    for r in range(rows.count):
        committed = rows.lists[rows.base[r] : rows.base[r] + rows.base_len[r]]
        own = rows.lists[rows.extra[r] : rows.extra[r] + rows.extra_len[r]]
        slots = np.concatenate([committed, own])
        if op.window:
            slots = slots[max(0, int(rows.position[r]) - op.window + 1) :]
        k, v = kv.load(slots)
        scores = np.einsum("ghd,sgd->ghs", q[r], k, optimize=True) * np.float32(op.scale)
        plain = scores
        if op.softcap:
            scores = op.softcap * np.tanh(scores / op.softcap)
        wide = scores.astype(np.float64)
        weights = np.exp(wide - wide.max(-1, keepdims=True))
        if op.keep < 1:
            weights[..., :-1] *= _chosen(plain[..., :-1], max(FEWEST, int(op.keep * (len(slots) - 1))))
        weights /= weights.sum(-1, keepdims=True)
        out[r] = np.einsum("ghs,sgd->ghd", weights.astype(np.float32), v, optimize=True)
    s.regs[op.dst] = out.reshape(rows.count, -1)


def _chosen(scores: F32, count: int) -> NDArray[np.bool_]:
    """Which are among the ``count`` highest of the last dimension, or as high."""
    if count >= scores.shape[-1]:
        return np.ones(scores.shape, np.bool_)
    return scores >= np.sort(scores, axis=-1)[..., -count, None]


def _act(op: Act, s: _Step) -> None:
    x = s.regs[op.src].astype(np.float64)
    if op.kind == "silu":
        y = x / (1 + np.exp(-x))
    elif op.kind == "relu":
        y = np.maximum(x, 0)
    elif op.kind == "gelu_tanh":
        y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        y = 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    out = y.astype(np.float32)
    s.regs[op.dst] = out if op.up is None else out * s.regs[op.up]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _add(op: Add, s: _Step) -> None:
    s.regs[op.dst] = s.regs[op.dst] + s.regs[op.src]


def _copy(op: Copy, s: _Step) -> None:
    src = s.regs[op.src]
    s.regs[op.dst] = src[s.rows.wanted] if op.wanted else src.copy()


def _scale(op: Scale, s: _Step) -> None:
    y = s.regs[op.buf] * np.float32(op.factor)
    if op.softcap:
        y = (op.softcap * np.tanh(y.astype(np.float64) / op.softcap)).astype(np.float32)
    s.regs[op.buf] = y


_RUN: Mapping[type, Any] = {
    Gather: _gather, Norm: _norm, Linear: _linear, Rope: _rope, StoreKV: _store, Attend: _attend, Act: _act,
    Add: _add, Copy: _copy, Scale: _scale,
}  # fmt: skip
