"""The file of a batch job: one JSON object a line, read as often as wanted and never whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from headrace.errors import BadFile
from headrace.formats.files import cannot_read, open_regular

MAX_LINE = 16 << 20
"""Bytes of one row; a longer one is passed over without being kept in memory."""


@dataclass(frozen=True)
class RowFile:
    """A batch file as it was when it was opened. digest: SHA-256 of its bytes; total: rows; changed: mtime in ns."""

    path: Path
    digest: str
    total: int
    size: int
    changed: int

    @staticmethod
    def open(path: Path) -> RowFile:
        """Read it once. BadFile when it can't be read or has no rows."""
        with _reader(path) as f:
            info = path.stat()
            try:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
                f.seek(0)
                total = sum(1 for _ in _lines(f))
            except OSError as e:
                raise cannot_read(path, "batch file", e) from None
        if not total:
            raise BadFile(f"{path}: the batch file has no rows; write one JSON object a line.")
        return RowFile(path, digest, total, info.st_size, info.st_mtime_ns)

    def rows(self) -> Iterator[tuple[int, bytes | None]]:
        """(number from 1, the line) of every row; None for one that is too long. BadFile if the file was changed."""
        with _reader(self.path) as f:
            yield from _lines(f)
            info = self.path.stat()
        if (info.st_size, info.st_mtime_ns) != (self.size, self.changed):
            raise BadFile(f"{self.path}: was changed while the job was at work; start the job anew with --restart.")


def _reader(path: Path) -> BufferedReader:
    fd, _ = open_regular(path, "batch file")
    return open(fd, "rb")  # noqa: PTH123  (a descriptor has no Path)


def _lines(f: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Lines that aren't blank."""
    number = 0
    while line := f.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE and not line.endswith(b"\n"):
            while (rest := f.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            number += 1
            yield number, None
        elif line.strip():
            number += 1
            yield number, line
