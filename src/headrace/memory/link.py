"""The link between host and device: every copy between them goes through it, and is counted.

A thread for each direction copies in pieces; between pieces, urgent copies (a run's rows) overtake weights. With a
rate it is paced by a clock, so that ``torch:cpu`` behaves like a device behind a bus of that rate.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

Tensor: TypeAlias = Any
Direction: TypeAlias = Literal["to_device", "to_host"]
DIRECTIONS: tuple[Direction, ...] = ("to_device", "to_host")

PIECE = 1 << 20
"""Bytes copied before the queue is looked at again, and of each pinned buffer."""


class Mover(Protocol):
    """How bytes get across in one direction; used by one thread."""

    pinned_nbytes: int
    """Host memory it holds that can't be paged out."""

    def begin(self, after: Any) -> None:
        """What follows waits for the device's work up to ``after``, a mark of its computing stream."""
        ...

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """uint8 of at most PIECE bytes; the source may be changed again after ``finish``."""
        ...

    def finish(self) -> None:
        """Wait until all copies are there."""
        ...


@dataclass(frozen=True)
class Pace:
    """bytes/s in each direction, and seconds before a copy's first byte."""

    rate: float
    latency: float = 0.0


@dataclass(order=True)
class _Job:
    """Some copies that end together."""

    priority: int
    number: int
    pieces: list[tuple[Tensor, Tensor]] = field(compare=False)
    after: Any = field(compare=False)
    submitted: float = field(compare=False)
    done: Future[None] = field(compare=False, default_factory=Future)
    at: int = field(compare=False, default=0)


class Link:
    """``sent[direction, purpose]`` counts bytes, ``copies`` calls of ``send``."""

    def __init__(self, movers: Mapping[Direction, Mover], pace: Pace | None = None) -> None:
        self.pace = pace
        self.sent: Counter[tuple[str, str]] = Counter()
        self._movers = dict(movers)
        self._wake = threading.Condition()
        self._queues: dict[Direction, list[_Job]] = {d: [] for d in DIRECTIONS}
        self._closed = False
        self.copies = 0
        self._threads = [
            threading.Thread(target=self._work, args=(d,), name=f"headrace-{d}", daemon=True) for d in DIRECTIONS
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pinned_nbytes(self) -> int:
        return sum(mover.pinned_nbytes for mover in self._movers.values())

    def send(
        self, direction: Direction, purpose: str, pairs: Sequence[tuple[Tensor, Tensor]], *, urgent: bool = False,
        after: Any = None,
    ) -> Future[None]:  # fmt: skip
        """Copy each pair's second to its first, contiguous tensors of equal bytes. Both must stay until it is done.

        after: a mark of the device's computing stream; the copy begins when the work before it is done.
        """
        pieces: list[tuple[Tensor, Tensor]] = []
        for dst, src in pairs:
            to, of = as_bytes(dst), as_bytes(src)
            pieces += [(to[at : at + PIECE], of[at : at + PIECE]) for at in range(0, len(of), PIECE)]
        with self._wake:
            if self._closed:
                raise RuntimeError("the link is closed")
            self.copies += 1
            job = _Job(0 if urgent else 1, self.copies, pieces, after, time.perf_counter())
            self.sent[direction, purpose] += sum(len(src) for _, src in pieces)
            heapq.heappush(self._queues[direction], job)
            self._wake.notify_all()
        return job.done

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, direction: Direction) -> None:
        queue, mover, free_at = self._queues[direction], self._movers[direction], 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: bool(queue) or self._closed)
                if not queue:
                    return
                job = heapq.heappop(queue)
            try:
                free_at = self._piece(job, mover, free_at)
            except BaseException as error:
                job.done.set_exception(error)
                continue
            if job.at < len(job.pieces):
                with self._wake:
                    heapq.heappush(queue, job)
            else:
                job.done.set_result(None)

    def _piece(self, job: _Job, mover: Mover, free_at: float) -> float:
        """Copy a job's next piece; returns when the paced link is free again. Late sleeps are made up for."""
        if job.at == 0:
            mover.begin(job.after)
            if self.pace is not None:
                free_at = max(free_at, job.submitted) + self.pace.latency
        if job.at < len(job.pieces):
            dst, src = job.pieces[job.at]
            mover.copy(dst, src)
            job.at += 1
            if self.pace is not None:
                free_at += len(src) / self.pace.rate
        if job.at == len(job.pieces):
            mover.finish()
        if self.pace is not None and (ahead := free_at - time.perf_counter()) > 0:
            time.sleep(ahead)
        return free_at


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [bytes], the same memory."""
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be copied over the link")
    flat = tensor.view(-1)
    return flat if flat.element_size() == 1 else flat.view(flat.new_empty(0).byte().dtype)
