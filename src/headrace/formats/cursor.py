"""Reading a hostile file forwards: nothing is allocated or looped over before it was compared with what is left."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile
from headrace.formats.files import read_exact
from headrace.formats.tensor import show

CHUNK = 1 << 16
SPARE = 1 << 20
_U64 = struct.Struct("<Q").unpack_from


class Strings(Sequence[str]):
    """Many strings in one block of bytes: 8 bytes each beside their text, decoded when they are asked for."""

    __slots__ = ("_blob", "_ends")

    def __init__(self, blob: bytes | bytearray, ends: NDArray[np.int64]) -> None:
        """blob: the texts one after the other, UTF-8; ends: where each ends in it."""
        self._blob, self._ends = blob, ends

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
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} strings: {', '.join(map(show, self[:3]))}{', ...' if len(self) > 3 else ''}>"


class Cursor:
    """A file read forwards in bounded chunks; a length is compared with what is left before it is believed."""

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd, self.path, self.size = fd, path, size
        self.buf, self.pos, self.base = b"", 0, 0
        self.claimed = 0

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

    def claim(self, count: int, least: int, cost: int, what: str) -> None:
        """``count`` entries of at least ``least`` bytes are to follow, and become objects of ``cost`` bytes each.

        Refused when the file can't hold them, or when it was made of little else than entries to fill our memory:
        all objects together may take the file's own size and 1 MB.
        """
        if count * least > self.left:
            self.bad(f"claims {count} {what} at byte {self.at} where only {self.left} bytes are left")
        self.claimed += count * cost
        if self.claimed > self.size + SPARE:
            self.bad(f"claims {count} {what}, too many for a file of {self.size} bytes")

    def text(self, what: str, most: int | None = None) -> str:
        n = self.number("<Q", what)
        if n > self.left or (most is not None and n > most):
            self.bad(f"{what} at byte {self.at - 8} claims {n} bytes")
        try:
            return b"".join(self.pieces(n, what)).decode()
        except UnicodeDecodeError:
            self.bad(f"{what} at byte {self.at - n} isn't UTF-8")

    def pieces(self, n: int, what: str) -> Iterator[bytes]:
        """The next n bytes, in pieces of at most CHUNK."""
        while n:
            size = min(n, CHUNK)
            self.fill(size, what)
            yield self.buf[self.pos : self.pos + size]
            self.pos, n = self.pos + size, n - size

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
        """``count`` strings in one pass, 256k tokens in about 0.15 s; never more memory than they take in the file."""
        if count > self.left // 8:
            self.bad(f"{what} claims {count} strings at byte {self.at} but only {self.left} bytes are left")
        blob, ends, done = bytearray(), np.empty(count, np.int64), 0
        while done < count:
            self.fill(8, what)
            n = _U64(self.buf, self.pos)[0]
            if n > self.left - 8:
                self.bad(f"{what}: string {done} at byte {self.at} claims {n} bytes")
            before = len(blob)
            try:
                if 8 + n > CHUNK:
                    self.pos += 8
                    _extend(blob, self.pieces(n, what))
                    sizes = np.array([n])
                else:
                    self.fill(8 + n, what)
                    sizes = self._buffered(blob, count - done)
            except UnicodeDecodeError:
                self.bad(f"{what}: string {done} or one soon after it isn't UTF-8")
            ends[done : done + len(sizes)] = before + np.cumsum(sizes)
            done += len(sizes)
        return Strings(blob, ends)

    def _buffered(self, blob: bytearray, most: int) -> NDArray[np.int64]:
        """Append the texts of the strings that lie whole in the buffer (one at least) -> their lengths.

        Each is UTF-8 when all together are and none starts with a continuation byte (10xxxxxx).
        """
        buf, at = self.buf, self.pos
        last, starts = len(buf) - 8, list[int]()
        add, unpack = starts.append, _U64
        while at <= last and len(starts) < most:
            add(at)
            at += 8 + unpack(buf, at)[0]
        if at > len(buf):
            at = starts.pop()
        edges = np.array([*starts, at])
        sizes: NDArray[np.int64] = np.diff(edges) - 8
        raw, heads = np.frombuffer(buf, np.uint8, at), edges[:-1]
        text = np.ones(at, np.bool_)
        text[: self.pos] = False
        for i in range(8):
            text[heads + i] = False
        found = raw[text].tobytes()
        if not found.isascii():
            found.decode()
            if (raw[heads[sizes > 0] + 8] & 0xC0 == 0x80).any():
                raise UnicodeDecodeError("utf-8", found, 0, 1, "a letter over two strings")
        blob += found
        self.pos = at
        return sizes


def _extend(blob: bytearray, pieces: Iterable[bytes]) -> None:
    """Append one long text, checked piece by piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in pieces:
        decoder.decode(piece)
        blob += piece
    decoder.decode(b"", final=True)
