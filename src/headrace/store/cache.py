"""The folder of fetched models: what is in it, where a name's file lies, and how it leaves.

Layout under ``Config.cache``: ``models/NAME/`` holds a known model (``known.py``), ``hub/ORG/REPO/`` files of a hub
repository (``hub.py``); a file has its name only when it is complete and checked, until then it ends in ``.part``.
``ships/DIGEST-N/`` holds what other ranks sent of a model (``cluster/ship.py``), in files with holes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BadRequest, Unavailable
from headrace.formats.files import free_bytes, lock, open_shared, stored_bytes, try_lock

LOCK = ".lock"
PART = ".part"


@dataclass(frozen=True)
class Entry:
    """One fetched model. nbytes: what it takes, unfinished files included; partial: some file isn't complete."""

    name: str
    path: Path
    nbytes: int
    partial: bool


def entries(root: Path) -> list[Entry]:
    """Everything in the cache, by name."""
    found = [_entry(folder.name, folder) for folder in _folders(root / "models")]
    found += [_entry(f"ship:{folder.name}", folder, stored_bytes) for folder in _folders(root / "ships")]
    for org in _folders(root / "hub"):
        found += [_entry(f"hf:{org.name}/{repo.name}", repo) for repo in _folders(org)]
    return sorted((entry for entry in found if entry.nbytes), key=lambda entry: entry.name)


def remove(root: Path, name: str) -> Entry:
    """Delete a model from the cache. BadRequest when there is none of that name."""
    for entry in entries(root):
        if entry.name == name:
            with locked(entry.path), writing(entry.path):
                shutil.rmtree(entry.path)
            return entry
    there = ", ".join(entry.name for entry in entries(root)) or "nothing"
    raise BadRequest(f"The cache {root} has no model {name!r}; it holds {there}.")


def _entry(name: str, folder: Path, size: Callable[[Path], int] = lambda p: p.stat().st_size) -> Entry:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return Entry(name, folder, sum(size(p) for p in files), any(p.name.endswith(PART) for p in files))


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if p.is_dir())
    except OSError:
        return []


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of the operating system while writing in ``folder``, as ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(
                f"{folder}: the disk is full; make room (`headrace cache` lists what can go) or set HEADRACE_CACHE to "
                "a folder on another disk."
            ) from None
        why = error.strerror or str(error)
        raise Unavailable(
            f"{folder}: can't be written ({why}); set HEADRACE_CACHE to a folder you may write to."
        ) from None


@contextmanager
def locked(folder: Path, note: Callable[[str], object] | None = None) -> Iterator[None]:
    """One process at a time fetches into or removes ``folder``, which is made. The lock goes with the process.

    note: hears that another process has it, which is then waited for; None: that is Unavailable.
    """
    while True:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            fd = open_shared(folder / LOCK)
        try:
            with writing(folder):
                free = try_lock(fd)
            if not free:
                if note is None:
                    raise Unavailable(f"{folder}: another process is fetching this model; wait until it is done.")
                note(f"another process is fetching this model into {folder}; waiting for it")
                lock(fd)
            if os.fstat(fd).st_nlink:  # else the other process removed the folder
                yield
                return
        finally:
            os.close(fd)


def require_room(folder: Path, nbytes: int) -> None:
    """Unavailable, with the numbers, when ``folder``'s disk has less than ``nbytes`` free."""
    free = free_bytes(folder)
    if free < nbytes:
        raise Unavailable(
            f"{folder}: {nbytes / 1e6:,.0f} MB are needed and the disk has {free / 1e6:,.0f} MB free; make room "
            "(`headrace cache` lists what can go) or set HEADRACE_CACHE to a folder on another disk."
        )
