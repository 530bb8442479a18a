"""The device in PyTorch: ``torch:cpu`` or ``cuda``, one code. See docs/device.md for how its numbers stay put.

Imported only when such a device is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import Unsupported
from headrace.kernels.cpu import CpuDevice
from headrace.kernels.device import F32, Bytes, KVShape, Rows, Shapes
from headrace.kernels.draw import Draw, Drawn
from headrace.kernels.ops import Op
from headrace.kernels.torch_attend import Table, units, units_nbytes
from headrace.kernels.torch_copy import CudaMover, HostMover
from headrace.kernels.torch_formats import expand, nbytes
from headrace.kernels.torch_kv import TorchKV, page_nbytes
from headrace.kernels.torch_ops import TILE, execute, scratch_nbytes

Tensor: TypeAlias = Any
Send: TypeAlias = Callable[[NDArray[Any]], Tensor]
"""Brings a small array of the host to the device."""


@dataclass(frozen=True)
class TorchWeight:
    """One tensor [n, k] in its file's bytes, on the device: uint8 [nbytes]."""

    fmt: str
    n: int
    k: int
    raw: Tensor

    def values(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as f32."""
        return expand(self.fmt, self.raw.reshape(self.n, -1)[start:stop].reshape(-1), self.k)

    def gather(self, index: Tensor) -> Tensor:
        """The chosen rows, f32 [len(index), k]."""
        return expand(self.fmt, self.raw.reshape(self.n, -1)[index].reshape(-1), self.k)

    @cached_property
    def vector(self) -> Tensor:
        """A norm weight or bias, [k]: F32, so a view of the bytes."""
        return self.values(0, 1).reshape(-1)


class TorchRows:
    """A run's rows on the device, padded to whole tiles. Slots and units are sent when first wanted."""

    def __init__(self, rows: Rows, send: Send) -> None:
        self.host = rows
        self.count = rows.count
        self.padded = padded(rows.count)
        self._send = send
        sent = send(np.stack((rows.token, rows.position))).long()
        self.token, self.position = torch.nn.functional.pad(sent, (0, self.padded - self.count))
        self.rope: dict[tuple[tuple[float, ...], float], tuple[Tensor, Tensor]] = {}
        self._units: dict[int, Table] = {}

    @cached_property
    def slot(self) -> Tensor:
        return self._send(self.host.slot).long()

    @cached_property
    def wanted(self) -> Tensor:
        return self._send(self.host.wanted).long()

    def units(self, window: int) -> Table:
        """Of ``torch_attend.units``, for ``Attend`` with this window."""
        if window not in self._units:
            send, found = self._send, units(self.host, window)
            self._units[window] = [(send(u.slots), send(u.rows).long(), send(u.low), send(u.high)) for u in found]
        return self._units[window]


def padded(rows: int) -> int:
    """Rows of whole tiles."""
    return -(-rows // TILE) * TILE


class TorchDevice:
    """``Device`` in PyTorch. name: "torch:cpu" or "cuda". threads: of PyTorch's pool, which is the process's.

    Packing is the identity: a tensor is its file's bytes. Raises Unsupported where there is no such device.
    """

    layout = "file"
    layout_version = 1

    def __init__(self, name: str = "torch:cpu", threads: int = 1) -> None:
        if name not in ("torch:cpu", "cuda"):
            raise Unsupported(f"PyTorch has no device {name!r} here; there are: torch:cpu, cuda.")
        if name == "cuda" and not torch.cuda.is_available():
            raise Unsupported("PyTorch sees no CUDA device; install its CUDA build and a driver, or use torch:cpu.")
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")
        self.at_once = (1 << 24) if name == "cuda" else (1 << 20)
        """Weights widened at a time."""
        self.library_nbytes = (96 << 20) if name == "cuda" else 0
        """What the libraries take of the device's memory: cuBLAS's work space, the allocator's rounding."""
        self.threads = threads
        self._sampler: CpuDevice | None = None
        self._pinned: list[Bytes] = []
        self._rows: tuple[Rows, TorchRows] | None = None
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = False  # f32 means f32

    packed_nbytes = staticmethod(nbytes)
    page_nbytes = staticmethod(page_nbytes)
    tables_nbytes = staticmethod(units_nbytes)

    def pack(self, fmt: str, n: int, k: int, raw: Bytes, out: Bytes, first: int = 0) -> None:
        at = nbytes(fmt, first, k)
        out[at : at + raw.size] = raw

    def weight(self, fmt: str, n: int, k: int, packed: Bytes | Tensor) -> TorchWeight:
        """packed: bytes of the host (on ``cuda`` they are copied), or a uint8 tensor of the device."""
        raw = torch.from_numpy(packed) if isinstance(packed, np.ndarray) else packed
        return TorchWeight(fmt, n, k, raw[: nbytes(fmt, n, k)].to(self.device))

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8 [nbytes]."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def floats(self, rows: int, width: int) -> Tensor:
        """Zeros of the device, f32 [rows, width]."""
        return torch.zeros((rows, width), device=self.device)

    def like(self, array: NDArray[Any]) -> Tensor:
        """Memory of the device for a copy of the array."""
        return torch.empty_like(torch.from_numpy(array), device=self.device)

    def send(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, not over any link; on ``torch:cpu`` not copied."""
        return torch.from_numpy(array).to(self.device)

    def movers(self, piece: int) -> tuple[HostMover | CudaMover, HostMover | CudaMover]:
        """For a link of pieces of so many bytes: to the device, and to the host."""
        if self.name == "cuda":
            return CudaMover(True, piece), CudaMover(False, piece)
        return HostMover(), HostMover()

    def limit(self, nbytes: int | None) -> None:
        """Have memory beyond this refused to us, where the device can do that; else counting beforehand must do."""
        if self.name == "cuda" and nbytes is not None:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))

    def pin(self, buffers: Sequence[Bytes]) -> None:
        """Tell the driver that this host memory stays, so that it crosses without a copy on the way (cuda alone)."""
        if self.name != "cuda":
            raise Unsupported(f"There is nothing to pin for {self.name} (--pin-weight); leave it out.")
        for buffer in buffers:
            status = torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)
            if int(status) != 0:
                raise Unsupported(f"CUDA can't pin {buffer.nbytes} bytes ({status}); leave --pin-weight out.")
            self._pinned.append(buffer)

    def unpin(self) -> None:
        """Before the memory is given back."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().ctypes.data)

    def mark(self) -> Any:
        """A place in the device's work: what was asked of it until now. None where work is done when asked for."""
        return torch.cuda.current_stream().record_event() if self.name == "cuda" else None

    def rows(self, rows: Rows) -> TorchRows:
        """The rows on the device; made once for all layers of a run."""
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, TorchRows(rows, self.send)
        return self._rows[1]

    def compile(self, ops: Sequence[Op], width: int) -> TorchProgram:
        return TorchProgram(self, tuple(ops), width)

    def scratch_nbytes(self, ops: Sequence[Op], width: int, max_rows: int, shapes: Shapes) -> int:
        return scratch_nbytes(ops, width, padded(max_rows), shapes, self.at_once)

    def kv_layer(self, shape: KVShape, pages: NDArray[np.uint64]) -> TorchKV:
        """Over pages in host memory: for ``torch:cpu`` only; ``kv_pages`` makes pages on any device."""
        if self.name == "cuda":
            raise Unsupported("A cache in host memory is not cuda's; keep it on the device or attend on the host.")
        return TorchKV(shape, pages)

    def kv_pages(self, shape: KVShape, pages: Tensor) -> TorchKV:
        """Over a tensor of the device, uint8 [pages, page_nbytes]."""
        return TorchKV(shape, pages)

    def sample(self, logits: F32, draws: Sequence[Draw]) -> list[Drawn]:
        """On the host, by the CPU extension's rule."""
        if self._sampler is None:
            self._sampler = CpuDevice(self.threads)
        return self._sampler.sample(np.ascontiguousarray(logits), draws)


@dataclass(frozen=True)
class TorchProgram:
    """A compiled layer: its operations are interpreted."""

    device: TorchDevice
    ops: tuple[Op, ...]
    width: int

    def bind(self, weights: Mapping[str, TorchWeight]) -> TorchBound:
        return TorchBound(self, weights)


@dataclass(frozen=True)
class TorchBound:
    """A program and its weights."""

    program: TorchProgram
    weights: Mapping[str, TorchWeight]

    def run(self, x: F32, rows: Rows, kv: TorchKV | None) -> F32:
        """As ``BoundProgram.run``, with x on the host."""
        device = self.program.device
        there = device.rows(rows)
        start = torch.zeros((there.padded, self.program.width), device=device.device)
        start[: rows.count] = device.send(x)
        registers = {"x": start}
        execute(self.program.ops, registers, self.weights, there, kv, device.at_once)
        if "logits" in registers:
            logits: F32 = registers["logits"][: len(rows.wanted)].cpu().numpy()
            return logits
        x[:] = registers["x"][: rows.count].cpu().numpy()
        return x
