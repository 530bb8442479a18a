"""The CPU device: the C++ extension behind ``Device``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from headrace.kernels import _native
from headrace.kernels.device import F32, Bytes, KVShape, Rows, Shapes
from headrace.kernels.draw import Draw, Drawn
from headrace.kernels.ops import Act, Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV

ROW_FIELDS = ("token", "position", "slot", "base", "base_len", "extra", "extra_len", "lists", "wanted")
_Kind = _native.Op.Kind


class CpuDevice:
    """``Device`` on the CPU. threads: of its pool, the caller's included; batch: for runs of more than one row (0: the
    same); path: "portable", "avx2", "avx512" or "" (the best).

    Calls from several Python threads take turns. A ``ValueError`` says the caller broke the contract of ``Device``.
    """

    name = "cpu"
    layout = "rows8"
    layout_version = 2

    def __init__(self, threads: int, path: str = "", batch: int = 0) -> None:
        self._native = _native.Device(threads, path)
        self._wide = _native.Device(batch, path) if batch not in (0, threads) else self._native
        self._rows: tuple[Rows, _native.Rows] | None = None

        self.path, self.threads = self._native.path, self._native.threads
        """Which kernels run ("portable", "avx2" or "avx512"), and on how many threads."""

    packed_nbytes = staticmethod(_native.packed_nbytes)
    pack = staticmethod(_native.pack)

    @property
    def arena_nbytes(self) -> int:
        """Bytes of scratch held now; grows to at most the largest ``scratch_nbytes`` of what was run."""
        return self._native.arena_nbytes

    def weight(self, fmt: str, n: int, k: int, packed: Bytes) -> _native.Matrix:
        return _native.Matrix(fmt, n, k, packed)

    def compile(self, ops: Sequence[Op], width: int) -> CpuProgram:
        return CpuProgram(self, ops, width)

    def page_nbytes(self, shape: KVShape) -> int:
        return self.kv_layer(shape, np.empty(0, np.uint64)).page_nbytes

    def kv_layer(self, shape: KVShape, pages: NDArray[np.uint64]) -> _native.KV:
        return _native.KV(shape.kv_heads, shape.head_dim, shape.k_bits, shape.v_bits, pages)

    def scratch_nbytes(self, ops: Sequence[Op], width: int, max_rows: int, shapes: Shapes) -> int:
        """The most memory the device takes for runs of up to ``max_rows`` of these ops, at any context.

        shapes: of each tensor the ops name. All programs share it: take the largest of the layers'.
        """
        program = CpuProgram(self, ops, width)
        weights = tuple(_native.Matrix.shape_only(*shapes[name]) for name in program.names)
        return _native.Bound(program.native, weights).scratch_nbytes(max_rows, max(self.threads, self._wide.threads))

    def pool(self, rows: Rows) -> _native.Device:
        """The threads that compute such a run."""
        return self._native if rows.count == 1 else self._wide

    def rope_table(self, inv_freq: list[float], magnitude: float) -> int:
        """The number of such a table, the same in both pools."""
        if self._wide is not self._native:
            self._wide.rope_table(inv_freq, magnitude)
        return self._native.rope_table(inv_freq, magnitude)

    def native_rows(self, rows: Rows) -> _native.Rows:
        """The rows as C++ reads them, checked; made once for all layers of a run."""
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, _native.Rows([getattr(rows, f) for f in ROW_FIELDS])
        return self._rows[1]

    def sample(self, logits: F32, draws: Sequence[Draw]) -> list[Drawn]:
        """Choose a token for each row of logits [rows, vocab]; see docs/kernels.md, "Sampling"."""
        return [Drawn(*row) for row in _native.sample(self._native, logits, [_draw(d) for d in draws])]

    def bandwidth(self, data: Sequence[Bytes] | None = None) -> float:
        """Bytes/s at which all threads together read ``data`` from memory (None: 256 MiB); the best of three."""
        data = [np.ones(256 << 20, np.uint8)] if data is None else data
        best = float("inf")
        for _ in range(3):
            start = perf_counter()
            for piece in data:
                self._native.read(piece)
            best = min(best, perf_counter() - start)
        return sum(piece.nbytes for piece in data) / best


class CpuProgram:
    """A compiled layer; ``bind`` joins it with its weights."""

    def __init__(self, device: CpuDevice, ops: Sequence[Op], width: int) -> None:
        compiler = _Compiler(device)
        native = [compiler.op(op) for op in ops]
        self.device = device
        self.width = width
        self.names = tuple(compiler.weights)
        self.native = _native.Program(width, len(compiler.registers), compiler.registers.get("logits", -1), native)

    def bind(self, weights: Mapping[str, _native.Matrix]) -> BoundProgram:
        """The program with its weights, which it keeps alive."""
        return BoundProgram(self, weights)


class BoundProgram:
    """A program and its weights: one layer, ready to run."""

    def __init__(self, program: CpuProgram, weights: Mapping[str, _native.Matrix]) -> None:
        self._device = program.device
        self.native = _native.Bound(program.native, tuple([weights[name] for name in program.names]))
        self._result_width = self.native.result_width if program.native.has_logits else 0

    def run(self, x: F32, rows: Rows, kv: _native.KV | None) -> F32:
        """As ``device.BoundProgram.run``."""
        native = self._device.native_rows(rows)
        out = np.empty((rows.wanted.shape[0], self._result_width), np.float32) if self._result_width else None
        self.native.run(self._device.pool(rows), x, out, native, kv)
        return x if out is None else out


class Chain:
    """Layers that follow each other, each with its cache or None, none of them the last: many in one call."""

    def __init__(self, device: CpuDevice, bounds: Sequence[BoundProgram], caches: Sequence[_native.KV | None]) -> None:
        self._device = device
        self._native = _native.Chain(tuple([b.native for b in bounds]), tuple(caches))

    def run(self, x: F32, rows: Rows, first: int, last: int, seconds: float) -> int:
        """As ``BoundProgram.run`` for the layers from the ``first`` one given to the ``last``, until so many seconds
        are over; returns which was the last one."""
        native = self._device.native_rows(rows)
        return self._native.run(self._device.pool(rows), x, native, first, last, seconds)


class _Compiler:
    """Names of registers and weights to numbers, in order of appearance."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.registers = {"x": 0}
        self.weights: dict[str, int] = {}

    def register(self, name: str | None) -> int:
        return -1 if name is None else self.registers.setdefault(name, len(self.registers))

    def weight(self, name: str | None) -> int:
        return -1 if name is None else self.weights.setdefault(name, len(self.weights))

    def op(self, op: Op) -> _native.Op:
        match op:
            case Gather():
                o = self._made(_Kind.Gather, op.dst, weight=op.table, flag=op.accumulate)
                o.by_position, o.n, o.value = op.index == "position", op.offset, op.scale
            case Norm():
                o = self._made(_Kind.Norm, op.dst, op.src, op.weight, op.bias, op.kind == "layer")
                o.n, o.value = op.group, op.eps
            case Linear():
                o = self._made(_Kind.Linear, op.dst, op.src, op.weight, op.bias, op.accumulate)
            case Rope():
                o = self._made(_Kind.Rope, op.buf, flag=op.style == "interleaved")
                o.heads, o.head_dim, o.n = op.heads, op.head_dim, len(op.inv_freq)
                o.table = self.device.rope_table(list(op.inv_freq), op.magnitude)
            case StoreKV():
                o = self._made(_Kind.StoreKV, None, op.k)
                o.src2 = self.register(op.v)
            case Attend():
                o = self._made(_Kind.Attend, op.dst, op.src)
                o.heads, o.kv_heads, o.head_dim = op.heads, op.kv_heads, op.head_dim
                o.value, o.window, o.softcap = op.scale, op.window, op.softcap
                o.keep, o.n = op.keep, op.most
            case Act():
                o = self._made(_Kind.Act, op.dst, op.src)
                o.src2, o.act = self.register(op.up), _native.Op.Activation[op.kind]
            case Add():
                o = self._made(_Kind.Add, op.dst, op.src)
            case Copy():
                o = self._made(_Kind.Copy, op.dst, op.src, flag=op.wanted)
            case Scale():
                o = self._made(_Kind.Scale, op.buf)
                o.value, o.softcap = op.factor, op.softcap
        return o

    def _made(
        self, kind: _native.Op.Kind, dst: str | None, src: str | None = None,
        weight: str | None = None, bias: str | None = None, flag: bool = False,
    ) -> _native.Op:  # fmt: skip
        o = _native.Op(kind)
        o.dst, o.src, o.flag = self.register(dst), self.register(src), flag
        o.weight, o.bias = self.weight(weight), self.weight(bias)
        return o


def _draw(d: Draw) -> _native.Draw:
    reals = (d.temperature, d.top_p, d.min_p, d.repeat_penalty, d.frequency_penalty, d.presence_penalty)
    return _native.Draw(reals, d.top_k, d.seed, d.choice, d.position, d.recent, list(d.bias), d.mask, d.logprobs)
