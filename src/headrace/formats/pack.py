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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, HeadraceError, OverBudget
from headrace.formats.files import (
    cannot_read,
    free_bytes,
    open_regular,
    open_shared,
    read_exact,
    reserve,
    stored_bytes,
    sync_folder,
    try_lock,
    write_exact,
)
from headrace.formats.safetensors import parse_json
from headrace.formats.tensor import KNOWN, show

MAGIC = b"HRPACK\x00\x01"
ALIGN = 4096
"""Of extents in the file: what O_DIRECT wants on every common disk."""
TENSOR_ALIGN = 64
"""Of tensors in an extent: what ``Device.pack`` and ``Device.weight`` want."""
MAX_HEADER = 16 << 20
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
    """A layer's bytes: ``nbytes`` from ``offset`` of ``path``, both multiples of 4096."""

    path: Path
    offset: int
    nbytes: int
    tensors: tuple[PackedTensor, ...]


@dataclass(frozen=True)
class PackPlan:
    """Everything that decides a packed file's bytes but the weights: from ``plan_pack``."""

    source: str
    device: str
    layout: int
    layers: Mapping[str, tuple[int, int, tuple[PackedTensor, ...]]]
    """Layer key -> (offset, bytes, tensors), in file order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        ends = [offset + size for offset, size, _ in self.layers.values()]
        return max(ends, default=_up(_PREFIX.size + len(self.header({})), ALIGN))

    @property
    def key(self) -> str:
        """The file's name, without its suffix."""
        return hashlib.blake2b(self.header({}), digest_size=16).hexdigest()

    def header(self, sums: Mapping[str, str]) -> bytes:
        """The header; of the same length with and without the layers' checksums."""
        layers = [
            [
                key,
                offset,
                size,
                sums.get(key, "0" * 32),
                [[t.name, t.fmt, t.n, t.k, t.offset, t.nbytes] for t in tensors],
            ]
            for key, (offset, size, tensors) in self.layers.items()
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
        placed: dict[str, tuple[int, int, tuple[PackedTensor, ...]]] = {}
        for key, tensors in layers.items():
            inner, size = [], 0
            for name, fmt, n, k, nbytes in tensors:
                inner.append(PackedTensor(name, fmt, n, k, size, nbytes))
                size = _up(size + nbytes, TENSOR_ALIGN)
            placed[key] = (start, _up(size, ALIGN), tuple(inner))
            start += placed[key][1]
        return PackPlan(source, device, layout, placed)

    # The header's length depends on its offsets' digits: first lay out with long ones to learn the most it takes.
    return place(_up(_PREFIX.size + len(place(1 << 50).header({})), ALIGN))


class PackFile:
    """A finished packed file. BadFile when it isn't one, or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fd, info = open_regular(path, "packed file")
        try:
            self.plan, self.sums = _read_header(fd, path, info.st_size)
        finally:
            os.close(fd)

    def extent(self, layer: str) -> Extent:
        """Where a layer lies. KeyError for a layer that isn't there."""
        return Extent(self.path, *self.plan.layers[layer])

    def verify(self) -> None:
        """Read everything; BadFile names the first layer whose bytes aren't those written."""
        fd, _ = open_regular(self.path, "packed file")
        try:
            for key, (offset, size, _) in self.plan.layers.items():
                if _checksum(fd, offset, size, self.path) != self.sums[key]:
                    raise BadFile(
                        f"{self.path}: layer {show(key)} is damaged; delete the file, it will be packed again."
                    )
        finally:
            os.close(fd)


class PackWriter:
    """Writes one packed file into ``folder``, or goes on with it."""

    def __init__(self, folder: Path, plan: PackPlan) -> None:
        self.plan = plan
        self.path = folder / f"{plan.key}.pack"
        self.part = folder / f"{plan.key}.part"
        self.journal = folder / f"{plan.key}.journal"

    def finished(self) -> PackFile | None:
        """The file when it is there already."""
        with suppress(HeadraceError):
            found = PackFile(self.path)
            if found.plan.key == self.plan.key:
                return found
        return None

    def statement(self) -> str:
        """What ``write`` will do to the disk, in a sentence."""
        need, free = self._missing(), free_bytes(self.path.parent)
        return f"Packing writes {need / 1e9:.2f} GB to {self.path} ({free / 1e9:.2f} GB are free there)."

    def write(self, pack: PackTensor, done: Callable[[str, int, int], None] | None = None) -> PackFile:
        """Pack what isn't packed yet; holds one tensor in memory. ``done``: (layer, layers finished, of how many).

        OverBudget when the disk is or gets too full. Stopped by any exception, it leaves the finished layers for the
        next ``write``.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = open_shared(self.part)
        except OSError as e:
            raise BadFile(f"{self.part}: can't be written ({e.strerror}); choose another cache folder.") from None
        try:
            if not try_lock(fd):
                raise BadFile(f"{self.part}: another process is packing this model; wait for it or stop it.")
            if (ready := self.finished()) is not None:
                self.discard()
                return ready
            try:
                self._reserve(fd)
            except BaseException:
                if os.fstat(fd).st_size == 0:
                    self.discard()
                raise
            self._write_all(fd, pack, done)
        except OSError as e:
            raise self._failed(e) from None
        finally:
            os.close(fd)
        return PackFile(self.path)

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
        return cannot_read(self.part, "packed file", e)

    def _write_all(self, fd: int, pack: PackTensor, done: Callable[[str, int, int], None] | None) -> None:
        sums = self._resume(fd)
        with self.journal.open("ab") as journal:
            for key, (offset, _, _) in self.plan.layers.items():
                if key not in sums:
                    sums[key] = self._write_layer(fd, key, offset, pack)
                    os.fsync(fd)  # the bytes before the journal's word for them
                    journal.write(json.dumps([key, sums[key]]).encode() + b"\n")
                    journal.flush()
                    os.fsync(journal.fileno())
                if done is not None:
                    done(key, len(sums), len(self.plan.layers))
        header = self.plan.header(sums)
        prefix = _PREFIX.pack(MAGIC, len(header), 0, hashlib.blake2b(header, digest_size=16).digest())
        write_exact(fd, memoryview(prefix + header), 0)
        os.fsync(fd)
        self.part.replace(self.path)
        self.journal.unlink()
        sync_folder(self.path.parent)

    def _write_layer(self, fd: int, key: str, start: int, pack: PackTensor) -> str:
        """Tensor by tensor, padding included -> the extent's checksum."""
        _, size, tensors = self.plan.layers[key]
        digest, at = hashlib.blake2b(digest_size=16), 0
        for i, t in enumerate(tensors):
            out = _aligned((tensors[i + 1].offset if i + 1 < len(tensors) else size) - t.offset)
            pack(key, t, out[: t.nbytes])
            write_exact(fd, out.data, start + at)
            digest.update(out.data)
            at += out.nbytes
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
                offset, size, _ = self.plan.layers.get(key, (0, 0, ()))
                if size and _checksum(fd, offset, size, self.part) == said:
                    sums[key] = said
        return sums


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeros at an address that is a multiple of 64."""
    raw = np.zeros(size + TENSOR_ALIGN, np.uint8)
    skip = -raw.ctypes.data % TENSOR_ALIGN
    return raw[skip : skip + size]


def _checksum(fd: int, offset: int, size: int, path: Path) -> str:
    digest, buffer = hashlib.blake2b(digest_size=16), memoryview(bytearray(min(size, _STEP)))
    for at in range(0, size, _STEP):
        piece = buffer[: min(_STEP, size - at)]
        read_exact(fd, piece, offset + at, path)
        digest.update(piece)
    return digest.hexdigest()


def _read_header(fd: int, path: Path, size: int) -> tuple[PackPlan, dict[str, str]]:
    def bad(what: str) -> BadFile:
        return BadFile(f"{path}: {what}; delete the file, it will be packed again.")

    if size < _PREFIX.size:
        raise bad("is too short for a packed file")
    prefix = bytearray(_PREFIX.size)
    read_exact(fd, memoryview(prefix), 0, path)
    magic, length, zero, said = _PREFIX.unpack(prefix)
    if magic != MAGIC or zero:
        raise bad("is no packed file of this version")
    if length > min(MAX_HEADER, size - _PREFIX.size):
        raise bad(f"claims a header of {length} bytes in a file of {size}")
    raw = bytearray(length)
    read_exact(fd, memoryview(raw), _PREFIX.size, path)
    if hashlib.blake2b(raw, digest_size=16).digest() != said:
        raise bad("has a damaged header")
    try:
        plan, sums = _parse_header(parse_json(path, bytes(raw), "packed file's header"))
    except (KeyError, TypeError, ValueError) as e:
        raise bad(f"has a header that says nonsense ({show(str(e))})") from None
    start = _PREFIX.size + length
    for key, (offset, nbytes, tensors) in plan.layers.items():
        if offset < start or offset % ALIGN or nbytes % ALIGN or offset + nbytes > size:
            raise bad(f"places layer {show(key)} outside of it or over another")
        start, end = offset + nbytes, 0
        for t in tensors:
            if t.fmt not in KNOWN or t.offset < end or t.offset % TENSOR_ALIGN or t.offset + t.nbytes > nbytes:
                raise bad(f"places tensor {show(t.name)} of layer {show(key)} outside of it or over another")
            end = t.offset + t.nbytes
    return plan, sums


def _parse_header(header: object) -> tuple[PackPlan, dict[str, str]]:
    """Types checked here (ValueError, TypeError, KeyError), places by the caller."""
    if not isinstance(header, dict) or header.keys() != {"source", "device", "layout", "layers"}:
        raise ValueError("unknown fields")
    layers: dict[str, tuple[int, int, tuple[PackedTensor, ...]]] = {}
    sums: dict[str, str] = {}
    for key, offset, nbytes, checksum, tensors in header["layers"]:
        inner = tuple(
            PackedTensor(_text(name), _text(fmt), *map(_number, (n, k, at, size)))
            for name, fmt, n, k, at, size in tensors
        )
        if _text(key) in layers or len({t.name for t in inner}) < len(inner):
            raise ValueError("a name twice")
        layers[key] = (_number(offset), _number(nbytes), inner)
        sums[key] = _text(checksum)
    plan = PackPlan(_text(header["source"]), _text(header["device"]), _number(header["layout"]), layers)
    return plan, sums


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text where there should be some")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise TypeError("no whole number where there should be one")
    return value
