"""MPI, used by one thread at a time (MPI_THREAD_SERIALIZED): a lock says whose turn it is.

A thread of its own initialises, finalises, and does what is to be done while the computing thread computes. A thread
that sends does so itself when nobody else is at MPI, and one that waits polls itself, so that a message is handed from
thread to thread only by accident. Where MPI allows one thread only, that is the one that always has the lock.

Polls are with Improbe (a blocked Recv burns a core). Silences before a reply are mostly alike, so who waits sleeps
until shortly before the shortest of the last ones, looks without pause for a while, at most a millisecond, and then
sleeps a 64th of the silence so far, from 50 us to 10 ms: an idle rank costs next to nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from headrace.cluster import handshake, message
from headrace.cluster.handshake import Control, Ping, Stop, Want
from headrace.cluster.members import CONTROL, Arrival
from headrace.cluster.message import Limits, Message
from headrace.cluster.mpi_transfers import MPI, Transfers
from headrace.cluster.pulse import LEAST, LONGEST, PATIENCE, Peers, Silences
from headrace.errors import BadMessage, HeadraceError, Lost, Unavailable
from headrace.system import fine_timer

CALM = 1e-3
"""Seconds between polls, at least, while the computing thread has something to do."""
FAREWELL = 5.0
"""Seconds that leaving may take."""
NAME = 64
REGROUP = 60.0
"""Seconds that those who are left may take to come together."""
GONE = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""What ULFM (`mpirun --with-ft ulfm`) says of a communicator that has lost a rank."""


class Link:
    """This process in the MPI job. ``receive`` and ``wait`` are to be called from one thread, ``send`` from any.

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
        self._peers, self._silences = Peers(), Silences()
        self._outbox: deque[tuple[int, int, Message | Control]] = deque()
        self._inbox: deque[Arrival] = deque()
        self._mpi, self._wake = threading.Lock(), threading.Lock()
        """Held by the thread that is at MPI; rung for whoever sleeps between polls."""
        self._shared = False
        self._failed: Exception | None = None
        self._leaving = self._left = self.lost = False
        self._moved = 0.0
        self._latest: tuple[memoryview, Limits] | None = None
        self._broken = self._regroup = self._headless = False
        self._kept: list[Transfers] = []
        """What will never end: MPI may still know its buffers."""
        self._ready = threading.Event()
        fine_timer()  # of this thread and the one it starts
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
        self._at_mpi(0.0, self._post)

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
        end = time.monotonic() + seconds
        while not self._inbox and (left := end - time.monotonic()) > 0:
            self._at_mpi(min(left, CALM), partial(self._attend, end))
            if self._failed:
                time.sleep(CALM)

    def _at_mpi(self, patience: float, work: Callable[[], object]) -> None:
        """Do that with MPI, if it is free within so many seconds. What goes wrong is for MPI's own thread to hear."""
        if self._mpi.acquire(timeout=patience):
            try:
                if self._failed is None:
                    work()
            except Exception as error:
                self._failed = error
            finally:
                self._mpi.release()
        if self._outbox or self._under_way.busy or self._failed:
            _release(self._wake)

    def _attend(self, end: float) -> None:
        """Do MPI's work until something has come or it is so late."""
        before, waited, warm = self._moved, False, False
        while True:
            self._work()
            now = time.monotonic()
            if self._inbox or now >= end:
                break
            waited = True
            nap = self._silences.nap(now - before)
            if nap:
                warm = False
                self._beat(now)
                self._wake.acquire(timeout=min(LEAST if self._under_way.busy else nap, end - now))
            elif not warm:
                warm = True
                self._rehearse()
        if waited and self._inbox:
            self._silences.ended(now - before)

    def _rehearse(self) -> None:
        """Read the last message once more, so that what reads the next is in the caches: a third of a hop's time."""
        if self._latest is not None:
            message.unpack(*self._latest)

    def fail(self, error: HeadraceError) -> None:
        """Let ``receive`` raise this; from any thread."""
        self._tell(-1, error)
        _release(self._wake)

    def watch(self, ranks: Sequence[int]) -> None:
        """From now on these must be heard from; a silent one becomes a ``Lost`` in ``receive``."""
        self._peers.watch(ranks, time.monotonic())
        _release(self._wake)

    def reform(self) -> bool:
        """After a ``Lost``: come together again with those who are left, under new numbers, nothing under way.

        False when that can't be: no ULFM, the head is gone, or it took too long. Another loss on the way is a Lost
        in ``receive`` as usual.
        """
        if not self._broken:
            return False
        self._peers = Peers()
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
        self._peers = Peers()
        self._leaving = True
        _release(self._wake)
        self._thread.join(FAREWELL)
        return self._left

    def _raise(self) -> None:
        if self._inbox and isinstance(self._inbox[0].message, HeadraceError):
            raise self._inbox[0].message

    # --- MPI's own thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        self._mpi.acquire()
        try:
            self._shared = MPI.Init_thread(MPI.THREAD_SERIALIZED) >= MPI.THREAD_SERIALIZED
            comm: MPI.Intracomm | None = MPI.COMM_WORLD
            while comm is not None:
                try:
                    self._meet(comm)
                    self._stand_in()
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
        self._under_way = Transfers(comm, self._deliver)
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
        self._kept.append(self._under_way)
        self._outbox.clear()
        self._inbox.clear()
        self._broken = self._regroup = False
        smaller: MPI.Intracomm = comm.Shrink()  # type: ignore[assignment]
        return smaller

    def _stand_in(self) -> None:
        """Do MPI's work while nobody else does; returns when this process has sent all and wants to leave."""
        self._moved = time.monotonic()
        while True:
            self._work()
            if self._leaving and not self._outbox and not self._under_way.sending:
                return
            self._beat(time.monotonic())
            busy = self._under_way.busy
            if self._shared:
                self._mpi.release()
            rung = self._wake.acquire(timeout=LEAST if busy else self._calm())
            while self._shared and not self._mpi.acquire(blocking=False):
                if rung:
                    _release(self._wake)  # it was for the one who waits
                rung = False
                time.sleep(self._calm())
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed

    def _calm(self) -> float:
        """Seconds between polls that nobody waits for."""
        return min(max((time.monotonic() - self._moved) / 64, CALM), 2 * LONGEST)

    # --- MPI's work, for whose turn it is ---------------------------------------------------------------

    def _work(self) -> None:
        """Send what is queued and take what has come."""
        self._post()
        self._under_way.poll()

    def _post(self) -> None:
        """Start sending what is queued."""
        while self._outbox:
            rank, to, what = self._outbox.popleft()
            data = handshake.pack(what) if to == CONTROL else message.pack(what)  # type: ignore[arg-type]
            self._under_way.send(rank, to - CONTROL, data)
            now = time.monotonic()
            self._peers.spoken(rank, now)
            if not isinstance(what, Ping):
                self._moved = now
            self.sent[to, "messages"] += 1
            self.sent[to, "bytes"] += len(data)

    def _deliver(self, source: int, tag: int, data: memoryview) -> None:
        """Unpack a message into the inbox."""
        to = tag + CONTROL
        now = time.monotonic()
        self._peers.heard(source, now)
        said: Message | Control | HeadraceError
        try:
            said = handshake.unpack(data) if to == CONTROL else message.unpack(data, self._expected(to))
        except BadMessage as error:
            said = BadMessage(f"From {self.name(source)}: {error}.")
        if isinstance(said, Ping):
            return
        self._moved = now
        if to != CONTROL and not isinstance(said, HeadraceError) and time.monotonic() - now < LEAST * 4:
            self._latest = data, self.limits[to]
        if isinstance(said, Want) and self.asked is not None:
            self.asked(source, said)
        else:
            self._inbox.append(Arrival(source, to, said))

    def _expected(self, to: int) -> Limits:
        if to not in self.limits:
            raise BadMessage("a message is for somebody who isn't here")
        return self.limits[to]

    def _tell(self, source: int, what: Control | HeadraceError) -> None:
        self._inbox.append(Arrival(source, CONTROL, what))

    def _beat(self, now: float) -> None:
        """Say that this rank lives, and notice who says nothing."""
        mute, lost = self._peers.beat(now)
        self._outbox.extend((rank, CONTROL, Ping()) for rank in mute)
        for rank in lost:
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
