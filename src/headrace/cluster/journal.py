"""What the head of a launched job tells its launcher, and the launcher the head when it starts the job again.

Both write lines, ``headrace1 CRC KIND DATA``: a CRC-32 of the rest in hexadecimal, one letter, base64 (RFC 4648). A
line that is none of these is somebody else's. The journal is in lines of kind JOURNAL, records one after another: a
sequence's key, where the tokens begin (little-endian u32, counted from the prompt's end), how many, the tokens. The key
is a digest of all that its text depends on, so a journal can't be applied to another request, whatever it is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import struct
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from headrace.run.types import Request

MARK = b"headrace1"
HERE, BEGUN, ALIVE, TEXT, JOURNAL, END, INPUT = "hbatjei"
"""Kinds of lines. HERE: the head listens; BEGUN: all ranks are there; TEXT: of standard output; END: the status and,
when a rank was lost and the job can't go on, why. From launcher to head: HERE to each of its HERE, as mpirun loses
input for a while (Open MPI 5.0.11); when one has come the head says HERE with a byte; then JOURNAL lines, END, INPUT
lines, END."""
PART = 24 << 10
"""Most bytes in a line, before base64."""
LINE = 1 << 16
"""No line is longer."""
MOST = 1 << 22
"""Tokens a journal holds; the oldest sequences are forgotten then, and would be computed again."""
EACH = 32
"""Tokens whose room a sequence takes beside its own."""
OVER = 0xFFFFFFFF
"""In place of where tokens begin: this sequence is not needed any more."""
_RECORD = struct.Struct("<16sII")


class Line(NamedTuple):
    kind: str
    data: bytes


def write(kind: str, data: bytes = b"") -> bytes:
    """A line."""
    body = b"%s %s" % (kind.encode(), base64.b64encode(data))
    return b"%s %08x %s\n" % (MARK, zlib.crc32(body), body)


def read(line: bytes) -> Line | None:
    """What a line says; None for one that isn't whole, or not ours."""
    parts = line.rstrip(b"\r\n").split(b" ", 2)
    if len(line) > LINE or len(parts) != 3 or parts[0] != MARK or parts[1] != b"%08x" % zlib.crc32(parts[2]):
        return None
    kind, _, data = parts[2].partition(b" ")
    try:
        return Line(kind.decode(), base64.b64decode(data, validate=True))
    except (binascii.Error, UnicodeDecodeError):
        return None


class Journal:
    """Sequences' committed tokens by key. Whatever it hears, what it holds is bounded, and a good beginning is kept."""

    def __init__(self) -> None:
        self._known: dict[bytes, array[int]] = {}
        self._count = 0

    def known(self, key: bytes) -> Sequence[int]:
        return self._known.get(key, ())

    def hear(self, data: bytes) -> None:
        """Take the records of a line; from the first that is cut short or leaves a gap on, nothing."""
        at = 0
        while len(data) - at >= _RECORD.size:
            key, start, count = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            if start == OVER:
                self._count -= len(self._known.pop(key, ()))
                continue
            tokens = array("I", data[at : at + 4 * count] if len(data) - at >= 4 * count else b"")
            at += 4 * count
            known = self._known.get(key, array("I"))
            if len(tokens) != count or start > len(known):
                return
            self._count -= len(known)
            known[start : start + count] = tokens
            self._count += len(known)
            self._known[key] = known
            while self._count + EACH * len(self._known) > MOST:
                self._count -= len(self._known.pop(next(iter(self._known))))

    def lines(self) -> Iterator[bytes]:
        """All it holds, as lines."""
        for key, tokens in self._known.items():
            for start in range(0, len(tokens), PART // 8):
                yield write(JOURNAL, record(key, start, tokens[start : start + PART // 8]))


def record(key: bytes, start: int, tokens: Iterable[int] = ()) -> bytes:
    some = array("I", tokens)
    return _RECORD.pack(key, start, len(some)) + some.tobytes()


class Out(io.RawIOBase):
    """Standard output for a launcher: what is written becomes TEXT lines; other lines go between. For any thread."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file, self._lock = file, threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def write(self, data: object) -> int:
        text = bytes(data)  # type: ignore[call-overload]
        for start in range(0, len(text), PART):
            self.say(TEXT, text[start : start + PART])
        return len(text)

    def say(self, kind: str, data: bytes = b"") -> None:
        line = write(kind, data)
        with self._lock:
            while line:
                line = line[os.write(self._file, line) :]


class In(io.RawIOBase):
    """Standard input from a launcher, after the journal: what INPUT lines say, up to END."""

    def __init__(self, source: BinaryIO) -> None:
        super().__init__()
        self._source, self._data, self._over = source, b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data and not self._over:
            line = self._source.readline(LINE)
            said = read(line) or Line("", b"")
            self._over = not line or said.kind == END
            self._data = said.data if said.kind == INPUT else b""
        count = min(len(buffer), len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count


class Book:
    """The head's side: says what is committed, and knows what an earlier head had committed.

    before: an earlier head's journal. salt: all that a text depends on beside the request, the model first.
    """

    def __init__(self, say: Callable[[str, bytes], None], before: Journal) -> None:
        self.say, self._before = say, before
        self.salt = ""
        self._open: dict[int, tuple[bytes, int]] = {}
        self._fresh: list[bytes] = []

    def begin(self, request: Request, vocab: int) -> tuple[int, ...]:
        """Follow a request from now on; returns its tokens committed before, at most until it is over."""
        about = repr((self.salt, request.tokens, request.sampling, sorted(request.ends)))
        key = hashlib.sha256(about.encode()).digest()[:16]
        self._open[request.id] = key, 0
        found: list[int] = []
        if not request.sampling.logprobs:  # those aren't kept
            for token in self._before.known(key)[: request.max_tokens]:
                if token >= vocab:
                    break
                found.append(token)
                if token in request.ends:
                    break
        return tuple(found)

    def token(self, request: int, token: int) -> None:
        key, count = self._open[request]
        self._fresh.append(record(key, count, (token,)))
        self._open[request] = key, count + 1

    def over(self, request: int) -> None:
        """The request's outcome is safe elsewhere."""
        found = self._open.pop(request, None)
        if found is not None:
            self._fresh.append(record(found[0], OVER))

    def flush(self) -> None:
        """Say what has come since the last time."""
        while self._fresh:
            some, self._fresh = self._fresh[: PART // 32], self._fresh[PART // 32 :]
            self.say(JOURNAL, b"".join(some))
