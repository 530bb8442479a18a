"""Reading bytes that may be wrong: every length is checked against what is there before anything is made of it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from headrace.errors import BadMessage
from headrace.kernels.device import F32

MAGIC = 0x7248
"""The letters "Hr", little-endian."""
HEADER = struct.Struct("<HBBI")
"""magic, protocol version, kind, bytes of the whole message."""
MOST = 1 << 30
"""Bytes of the largest message: 4096 rows of the widest model are a quarter of it."""

Data: TypeAlias = bytes | bytearray | memoryview


class Reader:
    """A cursor over one message. Every method raises BadMessage rather than read past the end."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: Data, at: int = 0) -> None:
        self.data = data
        self.at = at
        self.end = len(data)

    def take(self, fields: struct.Struct) -> tuple[Any, ...]:
        """Fixed fields."""
        at = self.at
        if fields.size > self.end - at:
            raise BadMessage("a message ends in the middle of a field")
        self.at = at + fields.size
        return fields.unpack_from(self.data, at)

    def columns(self, *counted: tuple[int, str]) -> list[tuple[Any, ...]]:
        """Packed arrays, one after another: (count, struct letter) each."""
        fields, edges = layout(counted)
        flat = self.take(fields)
        return [flat[a:b] for a, b in edges]

    def floats(self, rows: int, width: int) -> F32:
        """[rows, width] f32, a view of the message, as writable as it is."""
        need = rows * width * 4
        if need > self.end - self.at:
            raise BadMessage(
                f"a message has {self.end - self.at} bytes left where {need} of activations were announced"
            )
        x = np.frombuffer(self.data, np.float32, rows * width, self.at).reshape(rows, width)
        self.at += need
        return x

    def skip_to(self, multiple: int) -> None:
        """Zero bytes up to the next multiple."""
        pad = -self.at % multiple
        if pad > self.end - self.at or any(self.data[self.at : self.at + pad]):
            raise BadMessage("a message is padded wrongly")
        self.at += pad

    def done(self) -> None:
        if self.at != self.end:
            raise BadMessage(f"a message has {self.end - self.at} bytes too many")


@lru_cache(maxsize=512)
def layout(counted: tuple[tuple[int, str], ...]) -> tuple[struct.Struct, list[tuple[int, int]]]:
    """Arrays one after another as one struct, and where each begins and ends among its values.

    Compiling takes a few dozen bytes an array, whatever the counts.
    """
    edges, at = [], 0
    for n, _ in counted:
        edges.append((at, at + n))
        at += n
    return struct.Struct("<" + "".join(f"{n}{letter}" for n, letter in counted)), edges


def below(values: Sequence[int], limit: int, what: str) -> None:
    """BadMessage unless all values are under the limit (they are unsigned)."""
    if values and max(values) >= limit:
        raise BadMessage(f"a {what} is {max(values)}; it must be under {limit}")


def with_header(kind: int, version: int, parts: Iterable[Data]) -> bytearray:
    """The whole message."""
    data = bytearray().join((bytes(HEADER.size), *parts))
    if len(data) > MOST:
        raise BadMessage(f"a message of {len(data)} bytes is over the limit of {MOST}; fewer rows a run would fit")
    HEADER.pack_into(data, 0, MAGIC, version, kind, len(data))
    return data


def open_message(data: Data, version: int) -> tuple[int, Reader]:
    """-> (kind, a reader behind the header). BadMessage for other programs' bytes and other versions."""
    reader = Reader(data)
    if reader.end > MOST:
        raise BadMessage(f"a message of {reader.end} bytes is over the limit of {MOST}")
    magic, theirs, kind, length = reader.take(HEADER)
    if magic != MAGIC:
        raise BadMessage("bytes arrived that are no message of Headrace; does another program use this communicator?")
    if theirs != version:
        raise BadMessage(
            f"a peer speaks version {theirs} of the messages and this one version {version}; "
            "install the same Headrace on every machine"
        )
    if length != reader.end:
        raise BadMessage(f"a message of {length} bytes arrived as {reader.end}")
    return kind, reader
