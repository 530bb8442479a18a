"""The operations in PyTorch. Registers are f32 [rows, width], rows padded to whole tiles with zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from headrace.kernels.device import Shapes
from headrace.kernels.ops import Act, Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV
from headrace.kernels.torch_attend import attend, attend_nbytes, tree_sum
from headrace.kernels.torch_formats import expanding_nbytes
from headrace.kernels.torch_kv import TorchKV

if TYPE_CHECKING:
    from headrace.kernels.torch_device import TorchRows, TorchWeight

Tensor: TypeAlias = Any
TILE = 16
"""Rows of a product. Its shape never varies, so neither does what the library does with a row."""


@dataclass
class _Step:
    registers: dict[str, Tensor]
    weights: Mapping[str, TorchWeight]
    rows: TorchRows
    kv: TorchKV | None
    at_once: int

    def vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self.weights[name].vector


def execute(
    ops: Sequence[Op], registers: dict[str, Tensor], weights: Mapping[str, TorchWeight], rows: TorchRows,
    kv: TorchKV | None, at_once: int,
) -> None:  # fmt: skip
    """Run operations over ``registers``, which gain what the operations write."""
    step = _Step(registers, weights, rows, kv, at_once)
    for op in ops:
        _RUN[type(op)](op, step)


def _gather(op: Gather, s: _Step) -> None:
    index = (s.rows.token if op.index == "token" else s.rows.position) + op.offset
    found = s.weights[op.table].gather(index) * op.scale
    s.registers[op.dst] = s.registers[op.dst] + found if op.accumulate else found


def _norm(op: Norm, s: _Step) -> None:
    src = s.registers[op.src]
    x = src.reshape(len(src), -1, op.group or src.shape[1])
    if op.kind == "layer":
        x = x - tree_sum(x) / x.shape[-1]
    y = x * (1 / (tree_sum(x * x) / x.shape[-1] + op.eps).sqrt()) * s.vector(op.weight)
    bias = s.vector(op.bias)
    s.registers[op.dst] = (y if bias is None else y + bias).reshape(src.shape)


def _linear(op: Linear, s: _Step) -> None:
    src, weight = s.registers[op.src], s.weights[op.weight]
    y = torch.empty((len(src), weight.n), device=src.device)
    for start, stop in blocks(weight.n, weight.k, s.at_once):
        columns = weight.values(start, stop).t()
        for at in range(0, len(src), TILE):
            y[at : at + TILE, start:stop] = torch.mm(src[at : at + TILE], columns)
    bias = s.vector(op.bias)
    if bias is not None:
        y += bias
    s.registers[op.dst] = s.registers[op.dst] + y if op.accumulate else y


def blocks(n: int, k: int, at_once: int) -> list[tuple[int, int]]:
    """Ranges of a weight's rows that are widened together: a function of its shape alone."""
    step = max(1, at_once // k)
    return [(start, min(n, start + step)) for start in range(0, n, step)]


def _rope(op: Rope, s: _Step) -> None:
    n = len(op.inv_freq)
    key = op.inv_freq, op.magnitude
    if key not in s.rows.rope:
        inverse = torch.tensor(op.inv_freq, dtype=torch.float64, device=s.rows.position.device)
        angle = s.rows.position[:, None].double() * inverse
        s.rows.rope[key] = (angle.cos() * op.magnitude).float()[:, None], (angle.sin() * op.magnitude).float()[:, None]
    cos, sin = s.rows.rope[key]
    x = s.registers[op.buf].reshape(-1, op.heads, op.head_dim).clone()
    first, second = (slice(0, n), slice(n, 2 * n)) if op.style == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    s.registers[op.buf] = x.reshape(len(x), -1)


def _store(op: StoreKV, s: _Step) -> None:
    assert s.kv is not None
    s.kv.store(s.rows.slot, s.registers[op.k][: s.rows.count], s.registers[op.v][: s.rows.count])


def _attend(op: Attend, s: _Step) -> None:
    assert s.kv is not None
    y = attend(op, s.registers[op.src], s.kv, s.rows.units(op.window), s.rows.position, s.rows.slot)
    y[s.rows.count :] = 0
    s.registers[op.dst] = y


def _act(op: Act, s: _Step) -> None:
    x = s.registers[op.src].double()
    if op.kind == "silu":
        y = x / (1 + (-x).exp())
    elif op.kind == "relu":
        y = x.clamp(min=0)
    elif op.kind == "gelu_tanh":
        y = 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    else:
        y = 0.5 * x * (1 + (x / math.sqrt(2)).erf())
    out = y.float()
    s.registers[op.dst] = out if op.up is None else out * s.registers[op.up]


def _add(op: Add, s: _Step) -> None:
    s.registers[op.dst] = s.registers[op.dst] + s.registers[op.src]


def _copy(op: Copy, s: _Step) -> None:
    src = s.registers[op.src]
    if op.wanted:
        src = torch.nn.functional.pad(src[s.rows.wanted], (0, 0, 0, -len(s.rows.host.wanted) % TILE))
    s.registers[op.dst] = src  # registers are replaced, never written into, so this is a copy


def _scale(op: Scale, s: _Step) -> None:
    y = s.registers[op.buf] * op.factor
    if op.softcap:
        y = (op.softcap * (y.double() / op.softcap).tanh()).float()
    s.registers[op.buf] = y


_RUN: Mapping[type, Callable[[Any, _Step], None]] = {
    Gather: _gather, Norm: _norm, Linear: _linear, Rope: _rope, StoreKV: _store, Attend: _attend, Act: _act,
    Add: _add, Copy: _copy, Scale: _scale,
}  # fmt: skip


def scratch_nbytes(ops: Sequence[Op], width: int, rows: int, shapes: Shapes, at_once: int) -> int:
    """The most working memory of ``execute`` for so many (padded) rows: every register, and the hungriest operation.

    The factors are bytes a value, temporaries included; a test measures them.
    """
    widths, most = {"x": width}, 0
    for op in ops:
        if isinstance(op, Gather):
            widths[op.dst] = shapes[op.table][2]
            need = rows * widths[op.dst] * 22
        elif isinstance(op, Linear):
            fmt, n, k = shapes[op.weight]
            widths[op.dst] = n
            need = rows * n * 8 + expanding_nbytes(fmt, max(k, min(n * k, at_once))) + TILE * n * 4
        elif isinstance(op, Attend):
            widths[op.src] = widths[op.dst] = op.heads * op.head_dim
            widths["k"] = widths["v"] = op.kv_heads * op.head_dim
            need = attend_nbytes(op, rows) + rows * op.kv_heads * op.head_dim * 32
        elif isinstance(op, StoreKV):
            continue  # counted with Attend
        elif isinstance(op, Rope | Scale):
            need = rows * widths[op.buf] * 32
        else:
            widths[op.dst] = widths[op.src]
            need = rows * widths[op.src] * (32 if isinstance(op, Act) else 16)
        most = max(most, need)
    return 4 * rows * sum(widths.values()) + most
