"""MPI, owned by one thread a process: it initialises, sends, polls and finalises; nobody else calls MPI.

So the lowest level of thread support is enough. The thread polls with Improbe, spins for 50 us after traffic and then
sleeps between polls, a 64th of the silence so far, from 50 us to 10 ms: a reply is found late by at most a few per
cent of what was waited for, and an idle rank costs next to nothing (a blocked Recv burns a core).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mpi4py
import numpy as np

from headrace.cluster import handshake, message
from headrace.cluster.handshake import Control, Ping, Stop, Want
from headrace.cluster.members import CONTROL, Arrival
from headrace.cluster.message import Limits, Message
from headrace.cluster.wire import MOST
from headrace.errors import BadMessage, HeadraceError, Lost, Unavailable
from headrace.system import fine_timer

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

SPIN = 50e-6
LEAST, LONGEST = 50e-6, 10e-3
"""Seconds between polls."""
EAGER = 64 << 10
"""Larger messages are received while others go on."""
BEAT = 1.0
"""Seconds without a message to a watched peer after which it is told that this rank lives."""
PATIENCE = 15.0
"""Seconds of silence after which a watched peer counts as lost."""
FAREWELL = 5.0
"""Seconds that leaving may take."""
NAME = 64
REGROUP = 60.0
"""Seconds that those who are left may take to come together."""
GONE = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""What ULFM (`mpirun --with-ft ulfm`) says of a communicator that has lost a rank."""


class Link:
    """This process in the MPI job: ``send``, ``receive`` and ``wait``, to be called from one thread.

    limits: what each of this rank's addresses accepts; set it before others may send there. hosts: of all ranks;
    origins: the numbers they were started with; gone: names of those that were there before the last ``reform``.
    sent: (address, bytes or messages) so far. asked: hears, in the communication thread, who wants what of a model.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.status: int | None = None
        self.hosts: tuple[str, ...] = ()
        self.origins: tuple[int, ...] = ()
        self.gone = ""
        self.limits: dict[int, Limits] = {}
        self.asked: Callable[[int, Want], None] | None = None
        self.sent: Counter[tuple[int, str]] = Counter()
        self._watched: dict[int, float] = {}
        self._spoken: dict[int, float] = {}
        self._outbox: deque[tuple[int, int, Message | Control]] = deque()
        self._inbox: deque[Arrival] = deque()
        self._wake, self._arrived = threading.Lock(), threading.Lock()
        self._leaving = self._left = self.lost = False
        self._sending: list[tuple[Any, bytes]] = []
        self._incoming: list[tuple[int, int, Any, memoryview]] = []
        self._status = MPI.Status()
        self._last = 0.0
        self._broken = self._regroup = self._headless = False
        self._kept: list[object] = []
        """Buffers of transfers that will never end: MPI may still know them."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="mpi", daemon=True)
        self._thread.start()
        self._ready.wait()
        self._raise()

    @property
    def size(self) -> int:
        return len(self.hosts)

    def name(self, rank: int) -> str:
        """A rank as people know it."""
        return f"rank {rank} on host {self.hosts[rank]}"

    # --- for the computing thread -----------------------------------------------------------------------

    def send(self, rank: int, to: int, message: Message | Control) -> None:
        """Queue a message. Its arrays must not be written to afterwards."""
        self._outbox.append((rank, to, message))
        _release(self._wake)

    def receive(self) -> Arrival | None:
        """What has come, in order of arrival; None when nothing has. Raises what went wrong on the way."""
        if not self._inbox:
            return None
        arrival = self._inbox.popleft()
        if isinstance(arrival.message, HeadraceError):
            raise arrival.message
        return arrival

    def wait(self, seconds: float) -> None:
        """Sleep until something has come, at most so long."""
        if not self._inbox:
            self._arrived.acquire(timeout=seconds)

    def fail(self, error: HeadraceError) -> None:
        """Let ``receive`` raise this; from any thread."""
        self._tell(-1, error)

    def watch(self, ranks: Sequence[int]) -> None:
        """From now on these must be heard from; a silent one becomes a ``Lost`` in ``receive``."""
        self._watched = dict.fromkeys(ranks, time.monotonic())
        _release(self._wake)

    def reform(self) -> bool:
        """After a ``Lost``: come together again with those who are left, under new numbers, nothing under way.

        False when that can't be: no ULFM, the head is gone, or it took too long. Another loss on the way is a Lost
        in ``receive`` as usual.
        """
        if not self._broken:
            return False
        self._watched = {}
        self.limits.clear()
        self._ready.clear()
        self._regroup = True
        _release(self._wake)
        if not self._ready.wait(REGROUP) or self._headless:
            return False
        self.watch(range(1, self.size) if self.rank == 0 else [0])
        return True

    def leave(self) -> bool:
        """Send what is queued and leave MPI, waiting for the other ranks unless one is lost. False: took too long."""
        self._watched = {}
        self._leaving = True
        _release(self._wake)
        self._thread.join(FAREWELL)
        return self._left

    def _raise(self) -> None:
        if self._inbox and isinstance(self._inbox[0].message, HeadraceError):
            raise self._inbox[0].message

    # --- the communication thread -----------------------------------------------------------------------

    def _main(self) -> None:
        fine_timer()
        try:
            MPI.Init_thread(MPI.THREAD_FUNNELED)
            comm: MPI.Intracomm | None = MPI.COMM_WORLD
            while comm is not None:
                try:
                    self._meet(comm)
                    self._work(comm)
                    break
                except MPI.Exception as error:
                    if error.Get_error_class() not in GONE:
                        raise
                comm = self._break_up(comm)
            if not self.lost:  # it would wait for the lost
                MPI.Finalize()
            self._left = True
        except HeadraceError as error:
            self._tell(-1, error)
        except Exception as error:
            self._tell(-1, Unavailable(f"MPI failed on this machine ({error!r}); start again, with other MPI options."))
        finally:
            self._ready.set()

    def _meet(self, comm: MPI.Intracomm) -> None:
        """Learn everybody's host and number."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, size = comm.Get_rank(), comm.Get_size()
        own, names = bytearray(NAME), bytearray(NAME * size)
        own[:] = MPI.Get_processor_name().encode()[:NAME].ljust(NAME, b"\0")
        comm.Allgather([own, MPI.BYTE], [names, MPI.BYTE])
        before = dict(zip(self.origins, map(self.name, range(self.size)), strict=True))
        some = [bytes(names[i : i + NAME]).rstrip(b"\0") for i in range(0, len(names), NAME)]
        self.hosts = tuple(name.decode(errors="replace") for name in some)
        origins = MPI.Group.Translate_ranks(comm.Get_group(), range(size), MPI.COMM_WORLD.Get_group())
        self.origins = tuple(map(int, origins))
        self.gone = ", ".join(name for origin, name in before.items() if origin not in self.origins)
        self._headless = self.origins[0] != 0
        self._ready.set()

    def _break_up(self, comm: MPI.Intracomm) -> MPI.Intracomm | None:
        """A rank is gone: make it known, and wait until this process wants to go on (a new communicator) or leave."""
        with suppress(MPI.Exception):
            comm.Revoke()
        failed = comm.Get_failed()
        gone = MPI.Group.Translate_ranks(failed, range(failed.Get_size()), comm.Get_group())
        who = ", ".join(map(self.name, gone)) or "a rank that others know of"
        self.lost = self._broken = True
        self._tell(-1, Lost(f"Lost: {who}; its process ended, or its machine can't be reached."))
        self._ready.set()
        while not self._regroup:
            if self._leaving:
                return None
            self._wake.acquire(timeout=LONGEST)
        self._kept += [*self._sending, *self._incoming]
        self._sending, self._incoming = [], []
        self._outbox.clear()
        self._inbox.clear()
        self._broken = self._regroup = False
        smaller: MPI.Intracomm = comm.Shrink()  # type: ignore[assignment]
        return smaller

    def _work(self, comm: MPI.Intracomm) -> None:
        self._last = moved = time.monotonic()
        while True:
            busy = self._post(comm)
            busy |= self._collect(comm)
            now = time.monotonic()
            if busy:
                moved = now
            elif self._leaving and not self._outbox and not self._sending:
                return
            quiet = now - moved
            if quiet < SPIN:
                continue
            self._beat(now)
            waiting = bool(self._sending or self._incoming)
            self._wake.acquire(timeout=LEAST if waiting else min(max(quiet / 64, LEAST), LONGEST))

    def _post(self, comm: MPI.Intracomm) -> bool:
        """Start sending what is queued; forget what is sent. Whether there was anything but pings, as ``_collect``."""
        busy = False
        while self._outbox:
            rank, to, what = self._outbox.popleft()
            busy |= not isinstance(what, Ping)
            data = handshake.pack(what) if to == CONTROL else message.pack(what)  # type: ignore[arg-type]
            self._sending.append((comm.Isend([data, MPI.BYTE], rank, to - CONTROL), data))
            self._spoken[rank] = time.monotonic()
            self.sent[to, "messages"] += 1
            self.sent[to, "bytes"] += len(data)
        if self._sending:
            self._sending = [entry for entry in self._sending if not entry[0].Test()]
        return busy

    def _collect(self, comm: MPI.Intracomm) -> bool:
        """Take what has come. Messages of one source stay in order, but for cancels."""
        status, busy = self._status, False
        while (probed := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            source, to, size = status.Get_source(), status.Get_tag() + CONTROL, status.Get_count(MPI.BYTE)
            if not 0 <= size <= MOST:
                raise MPI.Exception(MPI.ERR_COUNT)
            buffer = np.empty(size, np.uint8).data
            request = None
            if size <= EAGER:
                probed.Recv([buffer, MPI.BYTE])
            else:
                request = probed.Irecv([buffer, MPI.BYTE])
            if self._incoming or request is not None:
                self._incoming.append((source, to, request, buffer))
                busy = True
            else:
                busy |= self._deliver(source, to, buffer)
        if self._incoming:
            busy |= self._complete()
        return busy

    def _complete(self) -> bool:
        """Deliver what has wholly come, unless something earlier of the same source hasn't."""
        left: list[tuple[int, int, Any, memoryview]] = []
        blocked: set[int] = set()
        for entry in self._incoming:
            source, to, request, buffer = entry
            here = request is None or request.Test()
            if here and (source not in blocked or buffer[3] == message.CANCEL):
                self._deliver(source, to, buffer)
            else:
                blocked.add(source)
                left.append((source, to, None if here else request, buffer))
        delivered = len(left) < len(self._incoming)
        self._incoming = left
        return delivered

    def _deliver(self, source: int, to: int, data: memoryview) -> bool:
        """Unpack a message into the inbox; False for a ping, which is none for anybody."""
        if source in self._watched:
            self._watched[source] = time.monotonic()
        try:
            if to == CONTROL:
                said = handshake.unpack(data)
                if isinstance(said, Ping):
                    return False
                if isinstance(said, Want) and self.asked is not None:
                    self.asked(source, said)
                else:
                    self._tell(source, said)
                return True
            limits = self.limits.get(to)
            if limits is None:
                raise BadMessage("a message is for somebody who isn't here")
            found = message.unpack(data, limits)
        except BadMessage as error:
            self._tell(source, BadMessage(f"From {self.name(source)}: {error}."))
            return True
        self._inbox.append(Arrival(source, to, found))
        _release(self._arrived)
        return True

    def _tell(self, source: int, what: Control | HeadraceError) -> None:
        self._inbox.append(Arrival(source, CONTROL, what))
        _release(self._arrived)

    def _beat(self, now: float) -> None:
        """Say that this rank lives, and notice who says nothing. Time in which this thread didn't run doesn't count."""
        late, self._last = now - self._last, now
        for rank, heard in list(self._watched.items()):
            if late > BEAT:
                self._watched[rank] = heard = heard + late
            if now - self._spoken.get(rank, 0.0) > BEAT:
                self._outbox.append((rank, CONTROL, Ping()))
                self._spoken[rank] = now
            if now - heard > PATIENCE:
                del self._watched[rank]
                self.lost = True
                self._tell(rank, Lost(_SILENT.format(_first_upper(self.name(rank)), PATIENCE)))


_SILENT = (
    "{} has said nothing for {:.0f} s: it was stopped or killed, or its network is down; look at that machine and "
    "start again."
)


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _release(lock: threading.Lock) -> None:
    """Wake a sleeper, now or when it next goes to sleep. The lock is a bell: locked when nothing has happened."""
    try:
        lock.release()
    except RuntimeError:
        return


@contextmanager
def join() -> Iterator[Link]:
    """Be one rank of the job for as long as the block lasts; at its end the head (rank 0) sends everybody home.

    On another rank the block is ``serve``, which returns when the head says so. Everyone watches the head, and the
    head everyone. ``link.status``: what the head tells the others to exit with.
    """
    link = Link()
    others = range(1, link.size)
    link.watch(others if link.rank == 0 else [0])
    missing = ""
    try:
        yield link
        link.status = link.status or 0
    finally:
        if link.rank == 0:
            missing = _send_home(link, others)
        else:
            link.send(0, CONTROL, Stop(0))
        link.leave()
    if missing:
        raise Lost(
            f"The work is done, but not everybody left within {FAREWELL:.0f} s: {missing}; look at that machine."
        )


def _send_home(link: Link, others: Sequence[int]) -> str:
    """Tell every rank to leave and hear that it does; names those that don't answer, if none was lost before."""
    for rank in others:
        link.send(rank, CONTROL, Stop(2 if link.status is None else link.status))
    left: set[int] = set()
    end = time.monotonic() + FAREWELL
    while len(left) < len(others) and not link.lost and time.monotonic() < end:
        try:
            arrival = link.receive()
        except HeadraceError:
            continue
        if arrival is None:
            link.wait(0.1)
        elif isinstance(arrival.message, Stop):
            left.add(arrival.source)
    if len(left) == len(others) or link.lost:
        return ""
    link.lost = True
    return ", ".join(link.name(rank) for rank in others if rank not in left)
