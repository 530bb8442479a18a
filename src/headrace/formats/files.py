"""The operating system's side of files: exact reads, atomic writes, locks, free space.

What differs between Linux, macOS and Windows about files lives here and nowhere else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headrace.errors import BadFile, Unavailable

_MOST = 1 << 30
"""Bytes asked for in one read: Linux moves at most 0x7ffff000 a call (man 2 read)."""

if sys.platform == "win32":
    import msvcrt

    _BINARY = os.O_BINARY
    _seek_lock = threading.Lock()
else:
    import fcntl

    _BINARY = 0


def open_regular(path: Path, what: str = "model file") -> tuple[int, os.stat_result]:
    """Open ``path`` for reading -> (file descriptor, its stat). BadFile unless it's a plain, readable file.

    Looked at before it's opened: opening a FIFO would wait for ever.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a directory" if path.is_dir() else "no regular file"
            raise BadFile(f"{path}: is {kind} where a {what} was expected; give the path of the file itself.")
        fd = os.open(path, os.O_RDONLY | _BINARY)
        return fd, os.fstat(fd)
    except OSError as e:
        raise cannot_read(path, what, e) from None
    except ValueError as e:  # a NUL in the path
        raise BadFile(f"{str(path)!r}: can't be a path ({e}); check the {what}'s name.") from None


@contextmanager
def opened(path: Path, what: str = "model file") -> Iterator[tuple[int, int]]:
    """``open_regular`` for as long as the context lasts -> (file descriptor, bytes in the file)."""
    fd, info = open_regular(path, what)
    try:
        yield fd, info.st_size
    finally:
        os.close(fd)


def read_text(path: Path, what: str, most: int = 64 << 20) -> str:
    """A small text file, whole. BadFile for what is none: missing, no plain file, over ``most`` bytes, not UTF-8."""
    with opened(path, what) as (fd, size):
        if size > most:
            raise BadFile(f"{path}: is over {most >> 20} MiB, which no {what} is; check the path.")
        data = bytearray(size)
        read_exact(fd, memoryview(data), 0, path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadFile(f"{path}: is no {what}, nor any text (byte {e.start} isn't UTF-8); check the path.") from None


def cannot_read(path: Path, what: str, e: OSError) -> BadFile:
    """An operating system's error as ours."""
    if isinstance(e, FileNotFoundError | NotADirectoryError):
        return BadFile(f"{path}: there is no such {what}; check the path.")
    if isinstance(e, PermissionError):
        return BadFile(f"{path}: the {what} may not be read by this user; change its permissions.")
    return BadFile(f"{path}: reading the {what} failed ({e.strerror or e}); check the disk and try again.")


def read_exact(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill ``out`` (bytes) from the file's ``offset``. BadFile when the file ends first or the disk fails."""
    done, size = 0, out.nbytes
    while done < size:
        part = out[done : min(size, done + _MOST)]
        try:
            got = _pread(fd, part, offset + done)
        except OSError as e:
            raise cannot_read(path, "file", e) from None
        if got == 0:
            raise BadFile(
                f"{path}: ends at byte {offset + done}, {size - done} bytes early; it was cut short "
                "or is being written; download it again."
            )
        done += got


def drop_cached(fd: int, offset: int, size: int) -> None:
    """What was read needn't stay in the page cache: a hint, where the system takes one."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


class DirectFile:
    """A file read past the page cache: O_DIRECT where it is to be had, else what was read is dropped from the cache.

    Offsets, lengths and memory are multiples of 4096. Threads may read at the same time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd, _ = open_regular(path)
        self._fd, self.direct = _directly(path, os.O_RDONLY, fd)

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill ``out``; BadFile when the file ends first or the disk fails."""
        read_exact(self._fd, out, offset, self.path)
        if not self.direct:
            drop_cached(self._fd, offset, out.nbytes)

    def close(self) -> None:
        os.close(self._fd)


class ScratchFile:
    """Room on the disk without a name, gone with the process; past the page cache where that is to be had.

    Offsets, lengths and memory are multiples of 4096. Threads may read and write at the same time.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Unavailable when the folder can't hold a file of ``size`` bytes."""
        self.folder = folder
        path = folder / f".headrace-{os.getpid()}-{secrets.token_hex(4)}.tmp"
        flags = os.O_RDWR | _BINARY | getattr(os, "O_TEMPORARY", 0)
        try:
            self._fd, self.direct = _directly(path, flags, os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
            if sys.platform != "win32":  # there it goes when it is closed
                path.unlink()
            reserve(self._fd, size)
        except OSError as e:
            raise self._unavailable(e, f"hold {size} bytes") from None

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill ``parts`` with what lies one after the other from ``offset`` on."""
        try:
            done = os.preadv(self._fd, parts, offset) if sys.platform != "win32" else 0
        except OSError as e:
            raise self._unavailable(e, "be read") from None
        for part, at in _rest(parts, done):
            read_exact(self._fd, part, offset + at, self.folder)

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write ``parts`` one after the other from ``offset`` on."""
        try:
            done = os.pwritev(self._fd, parts, offset) if sys.platform != "win32" else 0
            for part, at in _rest(parts, done):
                write_exact(self._fd, part, offset + at)
        except OSError as e:
            raise self._unavailable(e, "be written") from None

    def _unavailable(self, e: OSError, what: str) -> Unavailable:
        return Unavailable(
            f"{self.folder}: the file there can't {what} ({e.strerror or e}); choose a folder on a disk with more room."
        )

    def close(self) -> None:
        os.close(self._fd)


def _directly(path: Path, flags: int, fd: int) -> tuple[int, bool]:
    """A descriptor that goes past the page cache, instead of ``fd``, and True; ``fd`` where there is none."""
    if not hasattr(os, "O_DIRECT"):
        return fd, False
    try:
        direct = os.open(path, flags | os.O_DIRECT)
    except OSError:  # EINVAL: the file system (tmpfs, some network ones) has no direct reads
        return fd, False
    os.close(fd)
    return direct, True


def _rest(parts: Sequence[memoryview], done: int) -> Iterator[tuple[memoryview, int]]:
    """(what is left of a part, its place) after so many bytes of all of them."""
    at = 0
    for part in parts:
        skip = min(part.nbytes, max(0, done - at))
        if skip < part.nbytes:
            yield part[skip:], at + skip
        at += part.nbytes


def _pread(fd: int, out: memoryview, offset: int) -> int:
    if sys.platform == "win32":
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, out.nbytes)
        out[: len(data)] = data
        return len(data)
    else:
        return os.preadv(fd, [out], offset)


def write_exact(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; OSError as the system gives it."""
    done = 0
    while done < data.nbytes:
        part = data[done : done + _MOST]
        if sys.platform == "win32":
            with _seek_lock:
                os.lseek(fd, offset + done, os.SEEK_SET)
                done += os.write(fd, part)
        else:
            done += os.pwrite(fd, part, offset + done)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A new file beside ``path`` that takes its name only when the block ends well, written to the disk first."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temp.unlink()
        raise


def open_shared(path: Path) -> int:
    """A descriptor to read and write ``path``, made when missing and never emptied."""
    return os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut (POSIX: a directory is a file to be synced)."""
    if sys.platform != "win32":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write in ``folder``, which may not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def stored_bytes(path: Path) -> int:
    """Bytes of disk the file takes now: less than its size when it has holes."""
    s = path.stat()
    return s.st_size if sys.platform == "win32" else s.st_blocks * 512


def reserve(fd: int, size: int) -> None:
    """Give the file ``size`` bytes of disk now, so that a full disk is an error here and not halfway."""
    os.ftruncate(fd, size)
    if sys.platform == "linux":
        os.posix_fallocate(fd, 0, size)


def try_lock(fd: int) -> bool:
    """Take the file's exclusive lock if it's free; it goes with the descriptor, also in a crash.

    OSError where the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock(fd: int) -> None:
    """As ``try_lock``, but wait for it."""
    while not try_lock(fd):
        time.sleep(0.1)
