"""The packed file: a model in a device's own layout, one extent a layer, ready to be streamed.

    "HRPACK" 0 1 | u32 header bytes | u32 0 | blake2b-128 of the header | header (JSON) | extents, each at 4096 * i

It is named by what decides its bytes (source file, device, layout, tensors), written beside a journal of finished
layers so that an interrupted packing goes on where it was, and takes its name only when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, HeadraceError, OverBudget
from headrace.formats.files import (
    free_bytes,
    lock,
    open_shared,
    opened,
    read_exact,
    reserve,
    stored_bytes,
    sync_folder,
    try_lock,
    write_exact,
)

MAGIC = b"HRPACK\x00\x01"
ALIGN = 4096
"""Of extents in the file: what O_DIRECT wants on every common disk."""
TENSOR_ALIGN = 64
"""Of tensors in an extent: what ``Device.pack`` and ``Device.weight`` want."""
SPARE = 16 << 20
"""Bytes of disk left free beside the file."""

_PREFIX = struct.Struct("<8sII16s")
_STEP = 1 << 20

PackTensor: TypeAlias = Callable[[str, "PackedTensor", NDArray[np.uint8]], None]
"""(layer key, tensor, out): fill out, [tensor.nbytes] zeroed and 64-aligned, with the tensor in device layout."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor [n, k] of an extent; ``offset`` counts from the extent's start."""

    name: str
    fmt: str
    n: int
    k: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A layer's bytes: ``nbytes`` from ``offset`` of the file, both multiples of 4096."""

    offset: int
    nbytes: int
    tensors: tuple[PackedTensor, ...]


@dataclass(frozen=True)
class PackPlan:
    """Everything that decides a packed file's bytes but the weights: from ``plan_pack``. layers: in file order."""

    source: str
    device: str
    layout: int
    layers: Mapping[str, Extent]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return max((e.offset + e.nbytes for e in self.layers.values()), default=_up(len(self.head({})), ALIGN))

    @property
    def key(self) -> str:
        """The file's name, without its suffix."""
        return hashlib.blake2b(self._header({}), digest_size=16).hexdigest()

    def head(self, sums: Mapping[str, str]) -> bytes:
        """What the file begins with; of the same length with and without the layers' checksums."""
        header = self._header(sums)
        return _PREFIX.pack(MAGIC, len(header), 0, hashlib.blake2b(header, digest_size=16).digest()) + header

    def _header(self, sums: Mapping[str, str]) -> bytes:
        layers = [
            [key, e.offset, e.nbytes, sums.get(key, "0" * 32), [astuple(t) for t in e.tensors]]
            for key, e in self.layers.items()
        ]
        body = {"source": self.source, "device": self.device, "layout": self.layout, "layers": layers}
        return json.dumps(body, separators=(",", ":")).encode()


def plan_pack(
    source: str, device: str, layout: int, layers: Mapping[str, Sequence[tuple[str, str, int, int, int]]]
) -> PackPlan:
    """Lay a packed file out.

    source: ``ModelFile.identity()``; device, layout: the device's name and its layout's version; layers: key ->
    (tensor name, format, n, k, packed bytes) in the order wanted.
    """

    def place(start: int) -> PackPlan:
        placed: dict[str, Extent] = {}
        for key, tensors in layers.items():
            inner, size = [], 0
            for name, fmt, n, k, nbytes in tensors:
                inner.append(PackedTensor(name, fmt, n, k, size, nbytes))
                size = _up(size + nbytes, TENSOR_ALIGN)
            placed[key] = Extent(start, _up(size, ALIGN), tuple(inner))
            start += placed[key].nbytes
        return PackPlan(source, device, layout, placed)

    # The header's length depends on its offsets' digits: first lay out with long ones to learn the most it takes.
    return place(_up(len(place(1 << 50).head({})), ALIGN))


@dataclass(frozen=True)
class PackFile:
    """A finished packed file. layers: where each lies."""

    path: Path
    layers: Mapping[str, Extent]


class PackWriter:
    """Writes one packed file into ``folder``, or goes on with it."""

    def __init__(self, folder: Path, plan: PackPlan) -> None:
        self.plan = plan
        self.path = folder / f"{plan.key}.pack"
        self.part = folder / f"{plan.key}.part"
        self.journal = folder / f"{plan.key}.journal"

    def finished(self) -> PackFile | None:
        """The file when it is there already; one that is damaged or another's isn't. Nothing it says is believed."""
        raw = bytearray(len(self.plan.head({})))
        try:
            with opened(self.path, "packed file") as (fd, size):
                read_exact(fd, memoryview(raw), 0, self.path)
            sums = {key: said for key, _, _, said, _ in json.loads(raw[_PREFIX.size :])["layers"]}
            whole = size >= self.plan.nbytes and self.plan.head(sums) == raw
        except (HeadraceError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return PackFile(self.path, self.plan.layers) if whole else None

    def statement(self) -> str:
        """What ``write`` will do to the disk, in a sentence."""
        need, free = self._missing(), free_bytes(self.path.parent)
        return f"Packing writes {need / 1e9:.2f} GB to {self.path} ({free / 1e9:.2f} GB are free there)."

    def write(self, pack: PackTensor, tell: Callable[[str], None] | None = None) -> PackFile:
        """The file, made unless it is there: packs what isn't packed yet; holds one tensor in memory.

        tell: hears in a line what is about to be written, or that another process is at it and is waited for.
        OverBudget when the disk is or gets too full. Stopped by any exception, it leaves the finished layers for the
        next ``write``.
        """
        if (ready := self.finished()) is not None:
            return ready
        tell = tell or (lambda line: None)
        try:
            with self._alone(tell) as fd:
                if (ready := self.finished()) is not None:
                    self.discard()
                    return ready
                tell(self.statement())
                try:
                    self._reserve(fd)
                except BaseException:
                    if os.fstat(fd).st_size == 0:
                        self.discard()
                    raise
                self._write_all(fd, pack)
        except OSError as e:
            raise self._failed(e) from None
        return PackFile(self.path, self.plan.layers)

    @contextmanager
    def _alone(self, tell: Callable[[str], None]) -> Iterator[int]:
        """The unfinished file while no other process is at it: one that ends, or dies, leaves it to the next."""
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fd = open_shared(self.part)
            except OSError as e:
                raise self._failed(e) from None
            try:
                if not try_lock(fd):
                    tell(f"Another process is packing this model to {self.path}; waiting for it.")
                    lock(fd)
                if os.fstat(fd).st_nlink:  # else the other process took the file away
                    yield fd
                    return
            finally:
                os.close(fd)

    def discard(self) -> None:
        """Remove what an unfinished packing left."""
        for path in (self.part, self.journal):
            path.unlink(missing_ok=True)

    def _missing(self) -> int:
        return self.plan.nbytes - min(self.plan.nbytes, stored_bytes(self.part) if self.part.exists() else 0)

    def _reserve(self, fd: int) -> None:
        need, free = self._missing(), free_bytes(self.path.parent)
        if need + SPARE > free and need:
            raise OverBudget(
                f"{self.path.parent}: packing the model needs {(need + SPARE) / 1e9:.2f} GB of disk and "
                f"{free / 1e9:.2f} GB are free; free {(need + SPARE - free) / 1e9:.2f} GB or choose another folder."
            )
        reserve(fd, self.plan.nbytes)

    def _failed(self, e: OSError) -> HeadraceError:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return OverBudget(
                f"{self.part}: the disk is full ({self.plan.nbytes / 1e9:.2f} GB are needed in all); free some and "
                "start again, the finished layers are kept."
            )
        return BadFile(f"{self.part}: can't be written ({e.strerror or e}); choose another folder for packed files.")

    def _write_all(self, fd: int, pack: PackTensor) -> None:
        sums = self._resume(fd)
        with self.journal.open("ab") as journal:
            for key, extent in self.plan.layers.items():
                if key not in sums:
                    sums[key] = self._write_layer(fd, key, extent, pack)
                    os.fsync(fd)  # the bytes before the journal's word for them
                    journal.write(json.dumps([key, sums[key]]).encode() + b"\n")
                    journal.flush()
                    os.fsync(journal.fileno())
        write_exact(fd, memoryview(self.plan.head(sums)), 0)
        os.fsync(fd)
        self.part.replace(self.path)
        self.journal.unlink()
        sync_folder(self.path.parent)

    @staticmethod
    def _write_layer(fd: int, key: str, extent: Extent, pack: PackTensor) -> str:
        """Tensor by tensor, padding included -> the extent's checksum."""
        digest = hashlib.blake2b(digest_size=16)
        ends = [*(t.offset for t in extent.tensors[1:]), extent.nbytes]
        for t, end in zip(extent.tensors, ends, strict=False):
            out = _aligned(end - t.offset)
            pack(key, t, out[: t.nbytes])
            write_exact(fd, out.data, extent.offset + t.offset)
            digest.update(out.data)
        return digest.hexdigest()

    def _resume(self, fd: int) -> dict[str, str]:
        """Checksums of the layers an earlier try finished: in the journal, and their bytes agree."""
        sums: dict[str, str] = {}
        try:
            lines = self.journal.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return sums
        with suppress(ValueError, TypeError):
            for line in lines:
                key, said = json.loads(line)
                if key in self.plan.layers and _checksum(fd, self.plan.layers[key], self.part) == said:
                    sums[key] = said
        return sums


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeros at an address that is a multiple of 64."""
    raw = np.zeros(size + TENSOR_ALIGN, np.uint8)
    skip = -raw.ctypes.data % TENSOR_ALIGN
    return raw[skip : skip + size]


def _checksum(fd: int, extent: Extent, path: Path) -> str:
    digest, buffer = hashlib.blake2b(digest_size=16), memoryview(bytearray(_STEP))
    for at in range(0, extent.nbytes, _STEP):
        piece = buffer[: extent.nbytes - at]
        read_exact(fd, piece, extent.offset + at, path)
        digest.update(piece)
    return digest.hexdigest()
