"""GGUF, versions 2 and 3, little endian: metadata and the tensor table of one file.

Layout as in the GGUF specification (ggml, docs/gguf.md): magic, version, counts, key-value pairs, tensor infos,
padding, data. Every length, count and offset is hostile until it was compared with the bytes that are left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, Unsupported
from headrace.formats.cursor import Cursor
from headrace.formats.files import opened
from headrace.formats.tensor import BLOCKS, GGML_TYPES, TensorInfo, check_extents, show, tensor_nbytes

MAX_DEPTH = 4
MAX_NAME = 65535
PAIR_COST, TENSOR_COST, ARRAY_COST = 320, 640, 192
"""Bytes that one of them takes in our memory, measured, rounded up."""

# Value types of the specification: number -> (name, NumPy type).
SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "<u1"), 1: ("i8", "<i1"), 2: ("u16", "<u2"), 3: ("i16", "<i2"), 4: ("u32", "<u4"), 5: ("i32", "<i4"),
    6: ("f32", "<f4"), 7: ("bool", "<u1"), 10: ("u64", "<u8"), 11: ("i64", "<i8"), 12: ("f64", "<f8"),
}  # fmt: skip
STRING, ARRAY, BOOL = 8, 9, 7


@dataclass(frozen=True)
class GgufFile:
    """One .gguf file. ``metadata``: str, int, float, bool, NumPy arrays, ``Strings``, lists of these (nested arrays).

    ``types`` keeps each value's GGUF type ("u32", "arr[str]", ...); ``tensors`` are in file order.
    """

    path: Path
    metadata: dict[str, object]
    types: dict[str, str]
    tensors: list[TensorInfo]


class _Reader(Cursor):
    """GGUF's metadata values."""

    def value(self, kind: int, what: str, depth: int = 0) -> tuple[object, str]:
        """A metadata value and the name of its type."""
        if kind in SCALARS:
            values, name = self.scalars(kind, 1, what)
            return values[0].item(), name
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
            values, name = self.scalars(inner, count, what)
            return values, f"arr[{name}]"
        if inner != ARRAY:
            self.bad(f"{what} has the unknown value type {inner}")
        self.claim(count, 12, ARRAY_COST, "inner arrays")
        return [self.value(ARRAY, what, depth + 1)[0] for _ in range(count)], "arr[arr]"

    def scalars(self, kind: int, count: int, what: str) -> tuple[NDArray[Any], str]:
        """So many of them, and the name of their type."""
        name, dtype = SCALARS[kind]
        values = self.block(dtype, count, what)
        if kind == BOOL:
            if values.view(np.uint8).max(initial=0) > 1:
                self.bad(f"{what} holds a boolean that is neither 0 nor 1")
            values = values.view(np.bool_)
        return values, name


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table of one file. BadFile or Unsupported, naming what is wrong and where."""
    with opened(path) as (fd, size):
        return _parse(_Reader(fd, path, size))


def _parse(c: _Reader) -> GgufFile:
    _check_version(c)
    n_tensors, n_pairs = c.number("<Q", "the tensor count"), c.number("<Q", "the metadata count")
    c.claim(n_pairs, 8 + 1 + 4 + 1, PAIR_COST, "metadata entries")
    c.claim(n_tensors, 8 + 1 + 4 + 4 + 8, TENSOR_COST, "tensors")
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
    return GgufFile(c.path, metadata, types, tensors)


def _check_version(c: _Reader) -> None:
    c.fill(min(c.size, 4), "the magic")
    if c.buf[:4] != b"GGUF":
        what = next(what for start, what in INSTEAD if re.match(start, c.buf[:512], re.IGNORECASE | re.DOTALL))
        raise BadFile(f"{c.path}: {what}.")
    c.pos = 4
    version = c.number("<I", "the version")
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:
        raise Unsupported(f"{c.path}: is a big-endian GGUF file; convert the model for little-endian machines.")
    raise Unsupported(f"{c.path}: is GGUF version {version}, and Headrace reads 2 and 3; convert the model again.")


INSTEAD = (
    (rb"\s*<(!doctype|html|\?xml|head)",
     "is a web page, not a model; download the file itself (on a hub, the link with /resolve/)"),
    (rb"\s*version https://git-lfs", "is a Git LFS pointer, not the model; run `git lfs pull` in its repository"),
    (rb"PK|\x80", "is a pickle or ZIP archive (PyTorch?), not GGUF; use a GGUF file or a safetensors folder"),
    (rb"(lm|tj|al|fm)gg", "is in a GGML format older than GGUF; download the model as GGUF"),
    (rb"\s*(\{[\"']error|.{0,55}not found)", "is a server's error message, not a model; download it again"),
    (rb"\Z", "is empty; download it again"),
    (rb"", "is no GGUF file (it doesn't start with 'GGUF'); check the path or download it again"),
)  # fmt: skip
"""How a file without GGUF's magic begins -> what it seems to be, and what to do."""


def _alignment(c: _Reader, metadata: dict[str, object], types: dict[str, str]) -> int:
    value = metadata.get("general.alignment", 32)
    kind = types.get("general.alignment", "u32")
    if kind != "u32" or not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
        c.bad(f"general.alignment is {show(str(value))} ({kind}), no power of two from 8 to {1 << 20}")
    return value


def _entry(c: _Reader, i: int) -> tuple[str, tuple[int, ...], int, int]:
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


def _place(c: _Reader, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int,
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
