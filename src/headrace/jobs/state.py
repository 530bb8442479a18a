"""A batch job's memory on disk: SQLite, one row per input line, durable before it counts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from headrace.errors import BadFile, BadRequest, Unavailable
from headrace.system import file_system

VERSION = "1"
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "lustre", "afs", "ceph", "glusterfs"})
"""File systems on which SQLite's write-ahead log must not be used (sqlite.org/wal.html: no shared memory there)."""
PATIENCE = 2.0
"""Seconds to wait for another process that has the state, which may be about to end."""

_TABLES = (
    "create table if not exists job (key text primary key, value text not null)",
    "create table if not exists done"
    " (line integer primary key, custom_id text, ok integer not null, result text not null)",
)
_FORGET = ("drop table if exists job", "drop table if exists done")


@dataclass(frozen=True)
class Progress:
    rows: int
    failed: int


class Outcome(NamedTuple):
    """A finished row. ok: it has a response; else ``result`` is its error row."""

    line: int
    custom_id: str | None
    ok: bool
    result: str


class State:
    """Finished rows of one job. Killing the process at any moment loses at most rows that were not finished.

    While it is open no other process can open it. A context manager.
    """

    def __init__(self, path: Path, anew: bool = False, patience: float = PATIENCE) -> None:
        """anew: forget what is in it. BadFile when the file is no job's state, in use, or can't be made."""
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=patience)
        except sqlite3.OperationalError as e:
            raise BadFile(f"{path}: can't be made to keep the job's state ({e}); is the folder writable?") from None
        try:
            self.journal = "delete" if file_system(path.parent) in NETWORK else "wal"
            for setting in ("locking_mode = exclusive", f"journal_mode = {self.journal}", "synchronous = full"):
                self._db.execute(f"pragma {setting}")
            with self._db:
                self._db.execute("begin exclusive")
                for statement in (*(_FORGET if anew else ()), *_TABLES):
                    self._db.execute(statement)
            self._check()
        except BaseException as e:
            self._db.close()
            if not isinstance(e, sqlite3.DatabaseError):
                raise
            if "locked" in str(e):
                raise BadFile(f"{path}: is in use by another run of this job; wait for it, or end it.") from None
            if isinstance(e, sqlite3.OperationalError):
                raise BadFile(
                    f"{path}: the job's state can't be used ({e}); the folder must be writable and have room."
                ) from None
            raise BadFile(f"{path}: is no job's state ({e}); move it away to start the job anew.") from None
        self._progress = Progress(*self._db.execute("select count(*), coalesce(sum(1 - ok), 0) from done").fetchone())

    def _check(self) -> None:
        columns = [name for _, name, *_ in self._db.execute("pragma table_info(done)")]
        version = dict(self._db.execute("select key, value from job")).get("version", VERSION)
        if columns != ["line", "custom_id", "ok", "result"] or version != VERSION:
            raise BadFile(f"{self.path}: was written by another version; finish the job with that, or use --restart.")

    def claim(self, facts: dict[str, str], notes: dict[str, str]) -> dict[str, str]:
        """The first time: write down what the job is. Later: BadRequest when it has become another one.

        Returns the notes as they were the first time.
        """
        known = dict(self._db.execute("select key, value from job"))
        if not known:
            with self._writing():
                self._db.executemany("insert into job values (?, ?)", ({"version": VERSION} | notes | facts).items())
            return notes
        for key, value in facts.items():
            if known.get(key) != value:
                raise BadRequest(
                    f"{self.path}: belongs to a job with {key} {known.get(key)}, this one has {value}; use the same as "
                    "before to resume, or another output file (or --restart) to start anew."
                )
        return {key: known.get(key, value) for key, value in notes.items()}

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Keep some rows' results, all or none; when this returns, they are on the disk. Unavailable if it's full."""
        with self._writing():
            self._db.executemany("insert into done values (?, ?, ?, ?)", outcomes)
        bad = sum(not o.ok for o in outcomes)
        self._progress = Progress(self._progress.rows + len(outcomes), self._progress.failed + bad)

    def lines(self) -> set[int]:
        """Lines that are finished."""
        return {line for (line,) in self._db.execute("select line from done")}

    def progress(self) -> Progress:
        return self._progress

    def results(self) -> Iterator[str]:
        """Results in the input's order."""
        for (result,) in self._db.execute("select result from done order by line"):
            yield result

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """All or nothing of what is written inside; on the disk afterwards."""
        try:
            with self._db:  # commits, or rolls back
                self._db.execute("begin immediate")
                yield
        except sqlite3.DatabaseError as e:
            raise Unavailable(
                f"{self.path}: a row's result can't be kept ({e}); make room or mend the disk, then give the same "
                "command again: it goes on from here."
            ) from None

    def close(self) -> None:
        self._db.close()

    def remove(self) -> None:
        """The job is over: close, and leave nothing behind."""
        self.close()
        discard(self.path)

    def __enter__(self) -> State:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def discard(path: Path) -> None:
    """Delete a state that isn't needed any more; what can't be deleted does no harm, as the output is there."""
    for suffix in ("-wal", "-shm", "-journal", ""):
        with suppress(OSError):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
