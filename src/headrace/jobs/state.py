"""A batch job's memory on disk: SQLite, one row per input line, durable before it counts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BadFile, BadRequest
from headrace.system import file_system

VERSION = 1
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "lustre", "afs", "ceph", "glusterfs"})
"""File systems on which SQLite's write-ahead log must not be used (sqlite.org/wal.html: no shared memory there)."""

_TABLES = """
create table if not exists job (key text primary key, value text not null);
create table if not exists done (line integer primary key, custom_id text, ok integer not null, result text not null);
"""


@dataclass(frozen=True)
class Progress:
    rows: int
    failed: int


class State:
    """Finished rows of one job. Killing the process at any moment loses at most rows that were not finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5)
            kind = file_system(path.parent)
            self.journal = "delete" if kind in NETWORK else "wal"
            self._db.execute(f"pragma journal_mode = {self.journal}")
            self._db.execute("pragma synchronous = full")
            self._db.execute("pragma locking_mode = exclusive")
            self._db.execute("begin immediate")
            for statement in _TABLES.strip().split(";\n"):
                self._db.execute(statement)
            self._db.execute("commit")
        except sqlite3.OperationalError as e:
            raise BadFile(
                f"{path}: the job's state can't be used ({e}); another run of this job may be at work, or the folder "
                "isn't writable."
            ) from None
        except sqlite3.DatabaseError as e:
            raise BadFile(f"{path}: is no job state ({e}); move it away to start the job anew.") from None

    def claim(self, facts: dict[str, str]) -> None:
        """The first time: write down what the job is. Later: BadRequest when it has become another one."""
        known = dict(self._db.execute("select key, value from job"))
        if not known:
            self._db.execute("begin immediate")
            self._db.executemany("insert into job values (?, ?)", [*facts.items(), ("version", str(VERSION))])
            self._db.execute("commit")
            return
        for key, value in {**facts, "version": str(VERSION)}.items():
            if known.get(key) != value:
                raise BadRequest(
                    f"{self.path}: belongs to a job with {key} {known.get(key)}, this one has {value}; use the same as "
                    "before to resume, or another output file (or --restart) to start anew."
                )

    def finish(self, line: int, custom_id: str | None, ok: bool, result: str) -> None:
        """Keep a row's result; when this returns, it is on the disk."""
        self._db.execute("insert into done values (?, ?, ?, ?)", (line, custom_id, int(ok), result))

    def lines(self) -> set[int]:
        """Lines that are finished."""
        return {line for (line,) in self._db.execute("select line from done")}

    def progress(self) -> Progress:
        rows, failed = self._db.execute("select count(*), coalesce(sum(1 - ok), 0) from done").fetchone()
        return Progress(rows, failed)

    def results(self) -> Iterator[str]:
        """Results in the input's order."""
        for (result,) in self._db.execute("select result from done order by line"):
            yield result

    def close(self) -> None:
        self._db.close()
