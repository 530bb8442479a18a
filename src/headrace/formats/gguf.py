"""GGUF, versions 2 and 3, little endian: metadata and the tensor table of one file.

Layout as in the GGUF specification (ggml, docs/gguf.md): magic, version, counts, key-value pairs, tensor infos,
padding, data. Every length, count and offset is hostile until it was compared with the bytes that are left.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, Unsupported
from headrace.formats.files import open_regular, read_exact
from headrace.formats.tensor import BLOCKS, GGML_TYPES, TensorInfo, check_extents, show, tensor_nbytes

CHUNK = 1 << 16
MAX_DEPTH = 4
MAX_NAME = 65535
MAX_ENTRIES = 1 << 18
"""Most key-value pairs, tensors or inner arrays of a file: far over any model's, few enough to hold."""

# Value types of the specification: number -> (name, NumPy type).
SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "<u1"), 1: ("i8", "<i1"), 2: ("u16", "<u2"), 3: ("i16", "<i2"), 4: ("u32", "<u4"), 5: ("i32", "<i4"),
    6: ("f32", "<f4"), 7: ("bool", "<u1"), 10: ("u64", "<u8"), 11: ("i64", "<i8"), 12: ("f64", "<f8"),
}  # fmt: skip
STRING, ARRAY, BOOL = 8, 9, 7


class Strings(Sequence[str]):
    """Many strings in one block of bytes: 8 bytes each beside their text, decoded when they are asked for."""

    __slots__ = ("_blob", "_ends")

    def __init__(self, blob: bytes, ends: NDArray[np.int64]) -> None:
        """blob: the texts one after the other, UTF-8; ends: where each ends in it."""
        self._blob, self._ends = blob, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> Strings:
        raw = [t.encode() for t in texts]
        return cls(b"".join(raw), np.cumsum([len(r) for r in raw], dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        return self._blob[int(self._ends[i - 1]) if i else 0 : int(self._ends[i])].decode()

    def __iter__(self) -> Iterator[str]:
        blob, start = self._blob, 0
        for end in self._ends.tolist():
            yield blob[start:end].decode()
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(
            a == b for a, b in zip(self, other, strict=True))  # fmt: skip

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} strings: {', '.join(map(show, self[:3]))}{', ...' if len(self) > 3 else ''}>"

    def raw(self) -> Iterator[bytes]:
        """Each string's bytes, in order."""
        start = 0
        for end in self._ends.tolist():
            yield self._blob[start:end]
            start = end


@dataclass(frozen=True)
class GgufFile:
    """One .gguf file. ``metadata``: str, int, float, bool, NumPy arrays, ``Strings``, lists of these (nested arrays).

    ``types`` keeps each value's GGUF type ("u32", "arr[str]", ...); ``tensors`` are in file order.
    """

    path: Path
    size: int
    version: int
    metadata: dict[str, object]
    types: dict[str, str]
    tensors: list[TensorInfo]
    alignment: int
    data_offset: int


class _Cursor:
    """A file read forwards in bounded chunks; a length is compared with what is left before it is believed."""

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd, self.path, self.size = fd, path, size
        self.buf, self.pos, self.base = b"", 0, 0
        self.arrays = 0

    @property
    def at(self) -> int:
        return self.base + self.pos

    @property
    def left(self) -> int:
        return self.size - self.at

    def bad(self, what: str) -> NoReturn:
        raise BadFile(f"{self.path}: {what}; the file is damaged, download or convert it again.")

    def fill(self, n: int, what: str) -> None:
        """Have n more bytes in the buffer."""
        have = len(self.buf) - self.pos
        if have >= n:
            return
        if n > self.left:
            self.bad(f"{what} at byte {self.at} needs {n} bytes but only {self.left} are left")
        more = bytearray(min(max(n, CHUNK), self.left) - have)
        read_exact(self.fd, memoryview(more), self.base + len(self.buf), self.path)
        self.base += self.pos
        self.buf, self.pos = self.buf[self.pos :] + more, 0

    def number(self, form: str, what: str) -> int:
        size = struct.calcsize(form)
        self.fill(size, what)
        (value,) = struct.unpack_from(form, self.buf, self.pos)
        self.pos += size
        return int(value)

    def text(self, what: str, most: int | None = None) -> str:
        n = self.number("<Q", what)
        if n > self.left or (most is not None and n > most):
            self.bad(f"{what} at byte {self.at - 8} claims {n} bytes")
        self.fill(n, what)
        raw = self.buf[self.pos : self.pos + n]
        self.pos += n
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.bad(f"{what} at byte {self.at - n} isn't UTF-8")

    def block(self, dtype: str, count: int, what: str) -> NDArray[np.generic]:
        """``count`` numbers, read-only."""
        kind = np.dtype(dtype)
        size = count * kind.itemsize
        if size > self.left:
            self.bad(f"{what} claims {count} values at byte {self.at} but only {self.left} bytes are left")
        out = np.empty(count, kind)
        view = out.view(np.uint8).data
        have = min(size, len(self.buf) - self.pos)
        view[:have] = self.buf[self.pos : self.pos + have]
        self.pos += have
        if have < size:
            read_exact(self.fd, view[have:], self.at, self.path)
            self.base, self.buf, self.pos = self.at + size - have, b"", 0
        out.flags.writeable = False
        return out

    def strings(self, count: int, what: str) -> Strings:
        """``count`` strings in one pass: 256k tokens in about 0.15 s."""
        if count > self.left // 8:
            self.bad(f"{what} claims {count} strings at byte {self.at} but only {self.left} bytes are left")
        blob, sizes, done = bytearray(), np.empty(count, np.int64), 0
        unpack = struct.Struct("<Q").unpack_from
        while done < count:
            self.fill(8, what)
            n = unpack(self.buf, self.pos)[0]
            if n > self.left - 8:
                self.bad(f"{what}: string {done} at byte {self.at} claims {n} bytes")
            self.fill(8 + n, what)
            starts: list[int] = []
            buf, at = self.buf, self.pos
            last, most, add = len(buf) - 8, count - done, starts.append
            while at <= last and len(starts) < most:
                add(at)
                at += 8 + unpack(buf, at)[0]
            if at > len(buf):
                at = starts.pop()
            edges = np.array([*starts, at])
            text = np.ones(at, np.bool_)
            text[: self.pos] = False
            for i in range(8):
                text[edges[:-1] + i] = False
            blob += np.frombuffer(buf, np.uint8, at)[text].tobytes()
            sizes[done : done + len(starts)] = np.diff(edges) - 8
            self.pos, done = at, done + len(starts)
        ends = np.cumsum(sizes, dtype=np.int64, out=sizes)
        return Strings(self._utf8(bytes(blob), ends, what), ends)

    def _utf8(self, blob: bytes, ends: NDArray[np.int64], what: str) -> bytes:
        """Each string is UTF-8 when the whole is and no string starts with a continuation byte (10xxxxxx)."""
        try:
            if not blob.isascii():
                blob.decode()
        except UnicodeDecodeError as e:
            self.bad(f"{what}: string {int(np.searchsorted(ends, e.start, side='right'))} isn't UTF-8")
        starts = ends[:-1][ends[:-1] < len(blob)]
        broken = (np.frombuffer(blob, np.uint8)[starts] & 0xC0) == 0x80
        if broken.any():
            self.bad(f"{what}: a string isn't UTF-8")
        return blob

    def value(self, kind: int, what: str, depth: int = 0) -> tuple[object, str]:
        """A metadata value and the name of its type."""
        if kind in SCALARS:
            name, dtype = SCALARS[kind]
            if kind == BOOL:
                return self.boolean(self.number("<B", what), what), name
            return self.block(dtype, 1, what)[0].item(), name
        if kind == STRING:
            return self.text(what), "str"
        if kind != ARRAY:
            self.bad(f"{what} has the unknown value type {kind}")
        if depth == MAX_DEPTH:
            self.bad(f"{what} is nested more than {MAX_DEPTH} deep")
        inner, count = self.number("<I", what), self.number("<Q", what)
        if inner == STRING:
            return self.strings(count, what), "arr[str]"
        if inner in SCALARS:
            name, dtype = SCALARS[inner]
            values = self.block(dtype, count, what)
            if inner == BOOL:
                if values.size and values.view(np.uint8).max() > 1:
                    self.bad(f"{what} holds a boolean that is neither 0 nor 1")
                values = values.view(np.bool_)
            return values, f"arr[{name}]"
        if inner != ARRAY:
            self.bad(f"{what} has the unknown value type {inner}")
        self.arrays += count
        if count > self.left // 12 or self.arrays > MAX_ENTRIES:
            self.bad(f"{what} claims {count} inner arrays but only {self.left} bytes are left")
        return [self.value(ARRAY, what, depth + 1)[0] for _ in range(count)], "arr[arr]"

    def boolean(self, value: int, what: str) -> bool:
        if value > 1:
            self.bad(f"{what} holds a boolean that is neither 0 nor 1")
        return bool(value)


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table of one file. BadFile or Unsupported, naming what is wrong and where."""
    fd, info = open_regular(path)
    try:
        return _parse(_Cursor(fd, path, info.st_size))
    finally:
        os.close(fd)


def _parse(c: _Cursor) -> GgufFile:
    version = _version(c)
    n_tensors, n_pairs = c.number("<Q", "the tensor count"), c.number("<Q", "the metadata count")
    # The least an entry takes: 8 + 1 + 4 + 1 bytes a pair, 8 + 1 + 4 + 4 + 8 a tensor.
    if n_pairs > min(c.left // 14, MAX_ENTRIES) or n_tensors > min(c.left // 25, MAX_ENTRIES):
        c.bad(f"claims {n_pairs} metadata entries and {n_tensors} tensors in {c.size} bytes")
    metadata: dict[str, object] = {}
    types: dict[str, str] = {}
    for i in range(n_pairs):
        key = c.text(f"metadata key {i}", MAX_NAME)
        if not key or key in metadata:
            c.bad(f"metadata key {show(key)} is {'there twice' if key else 'empty'}")
        metadata[key], types[key] = c.value(c.number("<I", f"metadata {show(key)}"), f"metadata {show(key)}")
    alignment = _alignment(c, metadata, types)
    table = [_entry(c, i) for i in range(n_tensors)]
    start = -(-c.at // alignment) * alignment
    tensors = [_place(c, *entry, start, alignment) for entry in table]
    if len({t.name for t in tensors}) < len(tensors):
        names = sorted(t.name for t in tensors)
        twice = next(a for a, b in pairwise(names) if a == b)
        c.bad(f"tensor {show(twice)} is there twice")
    check_extents(c.path, tensors)
    return GgufFile(c.path, c.size, version, metadata, types, tensors, alignment, start)


def _version(c: _Cursor) -> int:
    c.fill(min(c.size, 4), "the magic")
    if c.buf[:4] != b"GGUF":
        raise BadFile(f"{c.path}: {_what_instead(c.buf[:512])}")
    c.pos = 4
    version = c.number("<I", "the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise Unsupported(
            f"{c.path}: is a big-endian GGUF file, which Headrace doesn't read; "
            "convert the model for little-endian machines."
        )
    raise Unsupported(
        f"{c.path}: is GGUF version {version}, and Headrace reads 2 and 3; "
        "convert the model again with a current converter."
    )


def _what_instead(head: bytes) -> str:
    """What a file without GGUF's magic seems to be, and what to do."""
    start = head.lstrip()[:64].lower()
    if not head:
        return "is empty; download it again."
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page, not a model; download the file itself (on a hub, the link with /resolve/)."
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the model; run `git lfs pull` in its repository."
    if head[:2] == b"PK" or head[:1] == b"\x80":
        return "is a pickle or ZIP archive (PyTorch?), not GGUF; use a GGUF file or a safetensors folder."
    if head[:4] in (b"lmgg", b"tjgg", b"algg", b"fmgg"):
        return "is in a GGML format older than GGUF; download the model as GGUF."
    if start.startswith((b'{"error', b"{'error")) or b"not found" in start:
        return "is a server's error message, not a model; download it again."
    return "is no GGUF file (it doesn't start with 'GGUF'); check the path or download it again."


def _alignment(c: _Cursor, metadata: dict[str, object], types: dict[str, str]) -> int:
    value = metadata.get("general.alignment", 32)
    kind = types.get("general.alignment", "u32")
    if kind != "u32" or not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
        c.bad(f"general.alignment is {show(str(value))} ({kind}), no power of two from 8 to {1 << 20}")
    return value


def _entry(c: _Cursor, i: int) -> tuple[str, tuple[int, ...], int, int]:
    """One row of the tensor table -> (name, shape outermost first, type number, offset in the data)."""
    name = c.text(f"the name of tensor {i}", MAX_NAME)
    what = f"tensor {show(name)}"
    n_dims = c.number("<I", what)
    if n_dims > 4:
        c.bad(f"{what} claims {n_dims} dimensions, where GGUF allows 4")
    dims = [c.number("<Q", what) for _ in range(n_dims)]
    if any(not 1 <= d < 1 << 48 for d in dims):
        c.bad(f"{what} has the impossible shape {dims}")
    return name, tuple(reversed(dims)), c.number("<I", what), c.number("<Q", what)


def _place(c: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int,
           alignment: int) -> TensorInfo:  # fmt: skip
    fmt = GGML_TYPES[kind][0] if kind in GGML_TYPES else f"type {kind}"
    if not name:
        c.bad("a tensor has no name")
    if offset % alignment:
        c.bad(f"tensor {show(name)} lies at offset {offset}, which isn't a multiple of {alignment}")
    try:
        nbytes = tensor_nbytes(fmt, shape) if fmt in BLOCKS else 0
    except ValueError as e:
        c.bad(f"tensor {show(name)}: {e}")
    if start + offset + nbytes > c.size:
        c.bad(f"tensor {show(name)} ends at byte {start + offset + nbytes} but the file has {c.size}")
    return TensorInfo(name, fmt, shape, c.path, start + offset, nbytes)
