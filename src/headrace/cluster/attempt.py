"""One start of a launched job: mpirun with its three streams, from beginning to end; and what outlives a start."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from headrace.cluster import journal
from headrace.cluster.journal import Journal
from headrace.errors import Lost, Unavailable

START = 300.0
"""Seconds until all ranks are there: Python may lie on slow shared storage."""
SILENCE = 15.0
"""Seconds without a word of the head after which it counts as lost."""
PARTING = 10.0
"""Seconds that mpirun may take to end when the head has."""
PAUSE = 0.25
"""Seconds between looks at the clock and at signals."""
NOTHING = 1 << 32
RULE = re.compile(rb"-{40,}\s*")
"""mpirun's explanations stand between such lines."""
IDLE = re.compile(rb"\[\S+\] plm:ssh: Warning: setpgid.*\s*")
"""What mpirun says when an ssh has begun before it could do something to it."""


@dataclass(eq=False)
class Session:
    """What outlives a start. reads: the command needs standard input. held: what it prints has figures that another run
    would print differently, so it is told at the end."""

    reads: bool = False
    held: bool = False
    asks: bool = False
    """A person types, so that questions are wanted."""
    journal: Journal = field(default_factory=Journal)
    typed: bytearray = field(default_factory=bytearray)
    """All that was read of standard input."""
    told: int = 0
    """Bytes of standard output."""
    signals: list[int] = field(default_factory=list)
    """That have come."""
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def read(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        self.reads = bool(data)
        self.typed += data

    def say(self, text: bytes) -> None:
        self.digest.update(text)
        self.told += len(text)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


@dataclass
class Ended:
    """How a start ended. status: the head's, None when it didn't say; lost: what was lost, in its words; code:
    mpirun's exit status; begun: all ranks were there."""

    status: int | None = None
    lost: str = ""
    code: int = 0
    begun: bool = False


class Attempt:
    """One start: ``run`` it. Raises Lost when the head says another text than was told before."""

    def __init__(self, words: Sequence[str], session: Session) -> None:
        self.words, self.session, self.end = words, session, Ended()
        self._skip, self._again = session.told, hashlib.sha256()
        self._script = [(journal.JOURNAL, data) for data in session.journal.records()] + [(journal.END, b"")]
        """Lines for the head so far, by number."""
        self._wanted = NOTHING
        """The line it waits for."""
        self._giving = bytearray()
        """For mpirun's input."""
        self._given = 0
        """Bytes of the session's input that are in the script."""
        self._closed = False
        self._lines = {"out": b"", "err": b""}
        self._block: list[bytes] | None = None
        self._held = bytearray()
        self._passed = 0

    def run(self) -> Ended:
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C on a terminal comes here alone.
        try:
            process = subprocess.Popen(
                self.words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, preexec_fn=_end_with_parent
            )
        except OSError as error:
            why = f"{self.words[0]}: can't be started ({error.strerror})"
            raise Unavailable(f"{why}; say where mpirun is: --mpirun.") from None
        try:
            self._attend(process)
        finally:
            self._stop(process)
        self.end.code = process.returncode
        self.session.say(bytes(self._held) if self.end.status is not None and not self.end.lost else b"")
        return self.end

    def _attend(self, process: subprocess.Popen[bytes]) -> None:
        """Carry the streams until there is nothing more to come, or no hope that there is."""
        assert process.stdin and process.stdout and process.stderr
        names = {process.stdout.fileno(): "out", process.stderr.fileno(): "err"}
        heard = before = time.monotonic()
        ended = 0.0
        while names:
            sink = self._sink(process)
            sources = [*names, *([sys.stdin.fileno()] if self.session.reads else [])]
            ready, free, _ = select.select(sources, sink, [], PAUSE)
            now = time.monotonic()
            if now - before > 4 * PAUSE:  # this process stood still, perhaps all of the machine
                heard += now - before
            before = now
            if free:
                self._give(process)
            if sys.stdin.fileno() in ready:
                self.session.read()
            for file in set(ready) & set(names):
                data = os.read(file, 1 << 16)
                if self._take(names[file], data):
                    heard = now
                if not data:
                    del names[file]
            over = process.poll() is not None or self.end.status is not None
            ended = ended or (now if over else 0.0)
            if not self._pass_on(process) or self.end.lost or (ended and now - ended > PARTING):
                return
            if not ended and now - heard > (SILENCE if self.end.begun else START):
                what = "has said nothing" if self.end.begun else "and the others haven't come together"
                self.end.lost = f"The head {what} for {now - heard:.0f} s"
                return

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Leave nothing of mpirun; what it can't reach, ``launch.sweep`` ends."""
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        if process.poll() is None and not self.end.lost:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PARTING)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the ssh of each host
        process.wait()

    def _pass_on(self, process: subprocess.Popen[bytes]) -> bool:
        """Pass signals on: a first Ctrl-C as one that mpirun carries to the ranks; False to end at once."""
        signals = self.session.signals
        if signals and (signals != [signal.SIGINT] or not self.end.begun):
            return False
        if len(signals) > self._passed:
            self._passed += 1
            process.send_signal(signal.SIGUSR1)
        return True

    # --- in ---------------------------------------------------------------------------------------------

    def _sink(self, process: subprocess.Popen[bytes]) -> list[int]:
        """mpirun's input, while there is something to give."""
        session = self.session
        for start in range(self._given, len(session.typed), journal.SMALL):
            self._script.append((journal.INPUT, bytes(session.typed[start : start + journal.SMALL])))
        self._given = len(session.typed)
        if not session.reads and not self._closed:
            self._closed = True
            self._script.append((journal.END, b""))
        if self._wanted < len(self._script) and not self._giving:
            kind, data = self._script[self._wanted]
            # A newline first: what came before may have lost its own.
            self._giving += b"\n" + journal.write(kind, journal.NUMBER.pack(self._wanted) + data)
            self._wanted = NOTHING
        assert process.stdin
        return [process.stdin.fileno()] if self._giving and not process.stdin.closed else []

    def _give(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        try:  # so much never blocks when select says so (pipe(7), PIPE_BUF)
            del self._giving[: os.write(process.stdin.fileno(), self._giving[:4096])]
        except BrokenPipeError:
            process.stdin.close()

    # --- out --------------------------------------------------------------------------------------------

    def _take(self, name: str, data: bytes) -> bool:
        """Whole lines of what came; whether one was the head's."""
        whole, newline, rest = (self._lines[name] + data).rpartition(b"\n")
        if not data or len(rest) > journal.LINE:
            whole, newline, rest = whole + newline + rest, b"", b""
        self._lines[name] = rest
        head = False
        for line in (whole + newline).splitlines(keepends=True):
            said = journal.read(line) if name == "out" else None
            if said is None:
                self._noise(line)
            else:
                head = True
                self._hear(said)
        if not data and name == "err" and self._block and self.end.status is None:
            sys.stderr.buffer.write(b"".join(self._block))
        return head

    def _hear(self, said: journal.Line) -> None:
        if said.kind == journal.HERE and len(said.data) == journal.NUMBER.size:
            (self._wanted,) = journal.NUMBER.unpack(said.data)
        elif said.kind == journal.BEGUN:
            self.end.begun = True
        elif said.kind == journal.JOURNAL:
            self.session.journal.hear(said.data)
        elif said.kind == journal.END and said.data:
            self.end.status, self.end.lost = said.data[0], said.data[1:].decode(errors="replace")
        elif said.kind == journal.QUESTION and self.session.asks:
            sys.stderr.buffer.write(said.data)
            sys.stderr.buffer.flush()
        elif said.kind == journal.TEXT and self.session.held:
            self._held += said.data
        elif said.kind == journal.TEXT:
            old, new = said.data[: self._skip], said.data[self._skip :]
            self._again.update(old)
            self._skip -= len(old)
            if old and not self._skip and self._again.digest() != self.session.digest.digest():
                raise Lost(
                    "Started again, the head writes another text than before the loss; is the model another file on "
                    "that host? Compare them, and start anew."
                )
            if new:
                self.session.say(new)

    def _noise(self, line: bytes) -> None:
        """A line of mpirun's or a rank's: to standard error, but for mpirun's explanations after the head's end."""
        if RULE.fullmatch(line):
            if self._block is None:
                self._block = [line]
                return
            line, self._block = b"".join([*self._block, line]), None
            line = line if self.end.status is None else b""
        elif self._block is not None:
            self._block.append(line)
            return
        elif IDLE.fullmatch(line):
            return
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _end_with_parent() -> None:
    """When the launcher is killed, mpirun is told to end (Linux; man 2 PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
