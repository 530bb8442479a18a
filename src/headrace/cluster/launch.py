"""A job over several hosts from the side where the user sits: mpirun and ssh, and starting again when that helps.

The head writes its standard output as lines (``cluster/journal.py``). So the launcher, which outlives any host, knows
what was told and what was committed: after a loss it looks which hosts still answer, ends what is left of the job
there, and starts the same command over them with the journal. The new head says everything again from the beginning;
what was told before is compared and not told twice.
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from headrace.cluster.attempt import Attempt, Ended, Session
from headrace.errors import Lost, Unavailable

PROBE = 15.0
"""Seconds a host may take to answer."""
KEPT = 64 << 20
"""Bytes of standard input that are given again after a loss."""

SWEEP = """import os
for n in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
    try:
        said = b"".join(open("/proc/%s/%s" % (n, what), "rb").read() for what in ("environ", "cmdline"))
        if int(n) != os.getpid() and any(word in said for word in WORDS):
            os.kill(int(n), 9)
    except OSError:
        pass
"""
"""For each host's Python: end the processes of a job, known by words in their environment or command line."""


@dataclass(frozen=True)
class Way:
    """How hosts are reached and things are started there. ssh, mpirun: words; python: its path, the same on all."""

    ssh: tuple[str, ...]
    mpirun: tuple[str, ...]
    python: str

    def on(self, host: str) -> list[str]:
        """Words before a command that is to run there: none for this machine."""
        return [] if host in ("localhost", "127.0.0.1", socket.gethostname()) else [*self.ssh, host]


def sweep(way: Way, hosts: Sequence[str], job: str) -> dict[str, str]:
    """End what is left of a job on the hosts; returns those that don't answer, and why."""
    words = f"HEADRACE_LAUNCHER={job}:".encode(), f"headrace_job\0{job}".encode()
    script = f"WORDS = {words!r}\n{SWEEP}".encode()

    def one(host: str) -> str:
        start = way.on(host)
        try:
            done = subprocess.run(
                [*start, shlex.quote(way.python) if start else way.python, "-"],
                input=script, capture_output=True, timeout=PROBE, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no answer within {PROBE:.0f} s"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return "" if done.returncode == 0 else (said or [f"status {done.returncode}"])[-1]

    with ThreadPoolExecutor(len(hosts)) as pool:
        return {host: why for host, why in zip(hosts, pool.map(one, hosts), strict=True) if why}


@dataclass(eq=False)
class Launcher:
    """One command over hosts. hosts: (name, ranks there) in rank order. words: of the command, after ``headrace``.

    exported: names of variables the ranks get. restarts: most new starts. tell: hears of them.
    """

    way: Way
    hosts: Sequence[tuple[str, int]]
    words: Sequence[str]
    session: Session
    exported: Sequence[str] = ()
    restarts: int = 5
    tell: Callable[[str], None] = lambda line: None
    job: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def run(self) -> int:
        """Do it; returns the exit status. Raises Lost or Unavailable when there is no going on."""
        away = self._sweep()
        if away:
            raise Unavailable(f"{_listed(away)}; each host must let ssh in without a question, and have that Python.")
        left, clean, again = list(self.hosts), False, 0
        try:
            with self._signalled():
                while True:
                    end = Attempt(self.command(left), self.session).run()
                    if end.status is not None and not end.lost:
                        clean = end.code == 0 and not end.status
                        return end.status
                    if self.session.signals:
                        return 128 + self.session.signals[0]
                    left = self._survivors(left, end, again)
                    again += 1
        finally:
            if not clean:
                self._sweep()

    def _sweep(self) -> dict[str, str]:
        return sweep(self.way, [name for name, _ in self.hosts], self.job)

    def _survivors(self, left: Sequence[tuple[str, int]], end: Ended, again: int) -> list[tuple[str, int]]:
        """Hosts to start again over. Raises what says why not."""
        away = self._sweep()
        there = [(name, ranks) for name, ranks in self.hosts if name not in away]
        gone = "The head is gone" if end.begun else f"The start failed with status {end.code}"
        why = end.lost.partition("; look at that machine")[0] or gone
        why = "; ".join([why.rstrip("."), *([_listed(away)] if away else [])])
        if not there:
            raise Lost(f"{why}. No host is left.")
        if not (end.begun or end.lost) and 0 < end.code < 128 and len(there) >= len(left):
            raise Unavailable(f"{why}: the words above say why. `headrace check --hosts` looks at each host.")
        if len(self.session.typed) > KEPT:
            raise Lost(f"{why}. Over {KEPT >> 20} MiB of input were read, too much to be given again; start anew.")
        if again >= self.restarts:
            raise Lost(f"{why}. Given up after {again} new starts (--restarts).")
        if self.words[0] == "batch" and next(self.session.journal.records(), None):  # its state is this job's now
            self.words = [word for word in self.words if word != "--restart"]
        names = ", ".join(name for name, _ in there)
        self.tell(f"{why}. Starting again over {names} ({again + 1} of at most {self.restarts} times).")
        return there

    def command(self, left: Sequence[tuple[str, int]]) -> list[str]:
        """mpirun's command line."""
        numbers, first = [], 0
        for host in self.hosts:
            numbers += [str(i) for i in range(first, first + host[1])] if host in left else []
            first += host[1]
        prte = {
            "plm_ssh_agent": " ".join(self.way.ssh), "plm_ssh_no_tree_spawn": "1", "headrace_job": self.job,
            "oob_tcp_keepalive_time": "5", "oob_tcp_keepalive_intvl": "2", "oob_tcp_keepalive_probes": "4",
        }  # fmt: skip
        words = [*self.way.mpirun, "--with-ft", "ulfm", "--bind-to", "none", "-n", str(len(numbers))]
        words += ["--host", ",".join(f"{name}:{ranks}" for name, ranks in left)]
        words += [word for name, value in prte.items() for word in ("--prtemca", name, value)]
        words += ["-x", f"HEADRACE_LAUNCHER={self.job}:{','.join(numbers)}"]
        words += [word for name in self.exported for word in ("-x", name)]
        return [*words, self.way.python, "-m", "headrace", *self.words]

    @contextmanager
    def _signalled(self) -> Iterator[None]:
        """Signals are noted; a start passes them on."""

        def note(number: int, frame: FrameType | None) -> None:
            self.session.signals.append(number)

        wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = [signal.signal(number, note) for number in wanted]
        try:
            yield
        finally:
            for number, was in zip(wanted, before, strict=True):
                signal.signal(number, was)


def _listed(away: dict[str, str]) -> str:
    return "; ".join(f"{host} can't be reached ({why})" for host, why in away.items())
