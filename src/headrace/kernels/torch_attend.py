"""Attention in PyTorch, cut so that a row's numbers don't depend on its company.

A *unit* is a stretch of 256 absolute positions of one list of slots and up to eight rows that see some of it. Scores
and values of a unit are one product of fixed shape; everything else is element by element. Units of one stretch number
go together, then each row's partials are merged in order of position (docs/kernels.md, "Attention").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.device import I32, Rows
from headrace.kernels.ops import FEWEST, Attend
from headrace.kernels.torch_kv import TorchKV

Tensor: TypeAlias = Any
I64: TypeAlias = NDArray[np.int64]
Table: TypeAlias = list[tuple[Tensor, Tensor, Tensor, Tensor]]
CHUNK = 256
"""Positions of a unit."""
QUERIES = 8
"""Rows of a unit."""
AT_ONCE = 8
"""Units computed together; their cache is widened at the same time. No number depends on it."""


@dataclass(frozen=True)
class Units:
    """Some units of one stretch. slots [units, CHUNK]; rows, low, high [units, QUERIES]: row index (-1: none) and the
    positions it sees, from low to before high, counted in the stretch."""

    slots: I32
    rows: I32
    low: I32
    high: I32


def units(rows: Rows, window: int) -> Iterator[Units]:
    """All units of a run's rows, by stretch, at most AT_ONCE together. window: as of Attend."""
    length = (rows.base_len + rows.extra_len).astype(np.int64)
    first = np.maximum(0, length - window) if window else np.zeros_like(length)
    for chunk in range(-(-int(length.max(initial=0)) // CHUNK)):
        start, end = chunk * CHUNK, (chunk + 1) * CHUNK
        sees = (first < end) & (length > start)
        common = sees & ((rows.extra_len == 0) | (rows.base_len >= end))
        found: list[tuple[I64, I32]] = []
        for base in np.unique(rows.base[common]):
            mine = np.flatnonzero(common & (rows.base == base))
            for at in range(0, len(mine), QUERIES):
                tile = mine[at : at + QUERIES]
                found.append((tile, rows.lists[base + start : base + min(end, int(rows.base_len[tile].max()))]))
        for r in np.flatnonzero(sees & ~common):
            committed = rows.lists[rows.base[r] : rows.base[r] + rows.base_len[r]][start:end]
            own = rows.lists[rows.extra[r] : rows.extra[r] + rows.extra_len[r]]
            skipped = max(0, start - int(rows.base_len[r]))
            found.append((np.array([r]), np.concatenate([committed, own[skipped:]])[:CHUNK]))
        for at in range(0, len(found), AT_ONCE):
            yield _units(found[at : at + AT_ONCE], first - start, np.minimum(length, end) - start)


def _units(found: list[tuple[I64, I32]], low: I64, high: I64) -> Units:
    slots = np.empty((len(found), CHUNK), np.int32)
    rows = np.full((len(found), QUERIES), -1, np.int32)
    for u, (tile, some) in enumerate(found):
        slots[u, : len(some)] = some
        slots[u, len(some) :] = some[0]  # filled up with one of its own: never another's NaN
        rows[u, : len(tile)] = tile
    there = rows >= 0
    seen = [np.where(there, limit[rows], 0).astype(np.int32) for limit in (low, high)]
    return Units(slots, rows, *seen)


def units_nbytes(rows: int, context: int, slots: int) -> int:
    """The most bytes of a run's units for one window, when a sequence has at most ``context`` slots, all ``slots``.

    A sequence with r rows has ceil(r / QUERIES) units for each stretch of its own.
    """
    stretches = (-(-rows // QUERIES)) * -(-context // CHUNK) + min(rows * -(-context // CHUNK), slots // CHUNK + rows)
    return (stretches + rows) * (4 * CHUNK + 16 * QUERIES)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1: halves are added element by element, in one order everywhere."""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        y = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((y, x[..., 2 * half :]), -1) if n % 2 else y
    return x


def exp(x: Tensor) -> Tensor:
    return x.double().exp().float()


def attend(op: Attend, q: Tensor, kv: TorchKV, table: Table, position: Tensor, slot: Tensor) -> Tensor:
    """q: [rows, heads * head_dim] -> the same shape. table: ``units`` on the device (slots, rows, low, high); position,
    slot: of each row, perhaps of fewer than q has."""
    count, group = len(q), op.heads // op.kv_heads
    scaled = (q * op.scale).reshape(count, op.kv_heads, group, op.head_dim)
    top = torch.full((count, op.heads, 1), -torch.inf, device=q.device)
    total = torch.zeros((count, op.heads, 1), device=q.device)
    acc = torch.zeros((count, op.heads, op.head_dim), device=q.device)
    floor = _floor(op, scaled, kv, table, position, slot) if op.keep < 1 else None
    for slots, rows, low, high in table:
        m, s, a = _partials(op, scaled, kv, slots, rows, low, high, floor, slot)
        flat = rows.reshape(-1)
        there = torch.nonzero(flat >= 0).reshape(-1)
        row = flat[there]
        m, s, a = m[there], s[there], a[there]
        both = torch.maximum(top[row], m)
        old, new = exp(top[row] - both), exp(m - both)
        total[row], acc[row] = old * total[row] + new * s, old * acc[row] + new * a
        top[row] = both
    return (acc * (1 / total)).reshape(count, -1)


def _partials(
    op: Attend, q: Tensor, kv: TorchKV, slots: Tensor, rows: Tensor, low: Tensor, high: Tensor, floor: Tensor | None,
    slot: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Maximum, sum and accumulator of each row and head of some units: [units * QUERIES, heads, 1 or head_dim]."""
    n, group = len(slots), op.heads // op.kv_heads
    plain, v = _scores(op, q, kv, slots, rows)
    v = v.reshape(n, CHUNK, op.kv_heads, op.head_dim).transpose(1, 2)
    scores = op.softcap * (plain.double() / op.softcap).tanh().float() if op.softcap else plain
    scores = scores.masked_fill(~_seen(low, high)[:, None, :, None, :], -torch.inf)
    m = scores.amax(-1, keepdim=True)
    p = exp(scores - m.masked_fill(m == -torch.inf, 0))
    if floor is not None:
        least = floor[rows.clamp(min=0)].reshape(n, QUERIES, op.kv_heads, group, 1).transpose(1, 2)
        chosen = (plain >= least) | _own(slots, rows, slot)[:, None, :, None, :] | p.isnan()
        p = p.masked_fill(~chosen, 0)
    flat = p.reshape(n, op.kv_heads, QUERIES * group, CHUNK)
    a = torch.stack([torch.bmm(flat[u], v[u]) for u in range(n)])
    return _by_row(m), _by_row(tree_sum(p)), _by_row(a.reshape(n, op.kv_heads, QUERIES, group, -1))


def _scores(op: Attend, q: Tensor, kv: TorchKV, slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of some units: scores [units, kv_heads, QUERIES, group, CHUNK], those not seen too, and the slots' values."""
    n, group = len(slots), op.heads // op.kv_heads
    k, v = kv.load(slots.reshape(-1).long())
    k = k.reshape(n, CHUNK, op.kv_heads, op.head_dim).permute(0, 2, 3, 1)
    mine = q[rows.clamp(min=0)].transpose(1, 2).reshape(n, op.kv_heads, QUERIES * group, op.head_dim)
    scores = torch.stack([torch.bmm(mine[u], k[u]) for u in range(n)])
    return scores.reshape(n, op.kv_heads, QUERIES, group, CHUNK), v


def _seen(low: Tensor, high: Tensor) -> Tensor:
    at = torch.arange(CHUNK, device=low.device)
    return (at >= low[:, :, None]) & (at < high[:, :, None])


def _own(slots: Tensor, rows: Tensor, slot: Tensor) -> Tensor:
    """[units, QUERIES, CHUNK]: where a row's own slot is."""
    return slots[:, None, :] == slot[rows.clamp(min=0)][:, :, None]


def _by_row(x: Tensor) -> Tensor:
    """[units, kv_heads, QUERIES, group, n] -> [units * QUERIES, heads, n]"""
    n, kv_heads, queries, group, _ = x.shape
    return x.transpose(1, 2).reshape(n * queries, kv_heads * group, -1)


def _floor(op: Attend, q: Tensor, kv: TorchKV, table: Table, position: Tensor, slot: Tensor) -> Tensor:
    """The least score that brings its value, [rows, heads, 1]: the last of the kept ones' among the others than own."""
    seen = position + 1 if op.window == 0 else (position + 1).clamp(max=op.window)
    kept = (op.keep * (seen - 1).double()).floor().long().clamp(min=FEWEST)
    most = int(kept.max())
    best = torch.full((len(q), op.heads, most), -torch.inf, device=q.device)
    for slots, rows, low, high in table:
        others = _seen(low, high) & ~_own(slots, rows, slot)
        scores = _scores(op, q, kv, slots, rows)[0].masked_fill(~others[:, None, :, None, :], -torch.inf)
        there = torch.nonzero(rows.reshape(-1) >= 0).reshape(-1)
        row = rows.reshape(-1)[there]
        best[row] = torch.cat((best[row], _by_row(scores)[there]), -1).topk(most).values
    return best.gather(-1, (kept - 1)[:, None, None].expand(-1, op.heads, 1))


def attend_nbytes(op: Attend, rows: int) -> int:
    """The most working memory of ``attend``: its state, and AT_ONCE units' cache, scores (f32, f64, masks)."""
    state = rows * op.heads * (3 * op.head_dim + 8) * 4
    widened = AT_ONCE * CHUNK * op.kv_heads * op.head_dim * 4 * 6
    scores = AT_ONCE * QUERIES * op.heads * CHUNK * 4 * 8
    if op.keep < 1:
        kept = max(FEWEST, int(op.keep * op.most))
        scores += rows * op.heads * (kept + 1) * 4 + AT_ONCE * QUERIES * op.heads * (kept + CHUNK) * 20
    return 2 * state + widened + scores
