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
import select
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.run.types import Request

MARK = b"headrace1"
HERE, BEGUN, ALIVE, TEXT, QUESTION, JOURNAL, END, INPUT = "hbatqjei"
"""Kinds of lines. HERE: the head waits for a line of that number (u32), from 0; BEGUN: all ranks are there; TEXT: of
standard output; QUESTION: for a person who types; END: the status and, when a rank was lost and the job can't go on,
why. From launcher to head, numbered and each sent when it is waited for, as mpirun loses some of its input (Open MPI
5.0.11): JOURNAL, END, INPUT, END."""
SMALL = 400
"""Most bytes in a line to the head."""
AGAIN = 0.25
"""Seconds after which the head asks for a line again."""
NUMBER = struct.Struct("<I")
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

    def records(self) -> Iterator[bytes]:
        """All it holds, in small pieces."""
        for key, tokens in self._known.items():
            for start in range(0, len(tokens), SMALL // 4):
                yield record(key, start, tokens[start : start + SMALL // 4])


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
    """What a launcher sends to standard input: ``take`` the journal's lines; then, as a file, what the INPUT lines say.

    say: asks for a line.
    """

    def __init__(self, file: int, say: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._file, self._say = file, say
        self._next, self._rest, self._data, self._over = 0, b"", b"", False

    def take(self) -> Line:
        """The next line, asked for until it has come; END when there is nothing to come any more."""
        while True:
            number, end = NUMBER.pack(self._next), time.monotonic() + AGAIN
            self._say(HERE, number)
            while (left := end - time.monotonic()) > 0 and select.select([self._file], [], [], left)[0]:
                data = os.read(self._file, 1 << 16)
                if not data:
                    return Line(END, b"")
                *whole, self._rest = (self._rest + data)[-2 * LINE :].split(b"\n")
                for line in whole:
                    said = read(line)
                    if said is not None and said.data[: NUMBER.size] == number:
                        self._next += 1
                        return Line(said.kind, said.data[NUMBER.size :])

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data and not self._over:
            said = self.take()
            self._over, self._data = said.kind == END, said.data
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
