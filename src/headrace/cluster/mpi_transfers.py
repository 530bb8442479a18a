"""Bytes under way over one communicator, for whoever's turn it is at MPI (``cluster.mpi``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np

from headrace.cluster.message import CANCEL
from headrace.cluster.wire import MOST

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI as MPI  # noqa: E402

EAGER = 64 << 10
"""Larger messages are received while others go on."""


class Transfers:
    """deliver: takes (source, tag, bytes)."""

    def __init__(self, comm: MPI.Intracomm, deliver: Callable[[int, int, memoryview], None]) -> None:
        self.comm, self.deliver = comm, deliver
        self._status = MPI.Status()
        self._sending: list[tuple[Any, bytearray]] = []
        self._incoming: list[tuple[int, int, Any, memoryview]] = []

    @property
    def sending(self) -> bool:
        return bool(self._sending)

    @property
    def busy(self) -> bool:
        """Whether something is under way, so that it is to be looked after."""
        return bool(self._sending or self._incoming)

    def send(self, rank: int, tag: int, data: bytearray) -> None:
        request = self.comm.Isend([data, MPI.BYTE], rank, tag)
        if not request.Test():
            self._sending.append((request, data))

    def poll(self) -> None:
        """Take what has come, one source's in order but for cancels; forget what is sent."""
        if self._sending:
            self._sending = [entry for entry in self._sending if not entry[0].Test()]
        status = self._status
        while (probed := self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            source, tag, size = status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)
            if not 0 <= size <= MOST:
                raise MPI.Exception(MPI.ERR_COUNT)
            buffer = np.empty(size, np.uint8).data
            request = None
            if size <= EAGER:
                probed.Recv([buffer, MPI.BYTE])
            else:
                request = probed.Irecv([buffer, MPI.BYTE])
            if self._incoming or request is not None:
                self._incoming.append((source, tag, request, buffer))
            else:
                self.deliver(source, tag, buffer)
        if self._incoming:
            self._complete()

    def _complete(self) -> None:
        """Deliver what has wholly come, unless something earlier of the same source hasn't."""
        left: list[tuple[int, int, Any, memoryview]] = []
        blocked: set[int] = set()
        for source, tag, request, buffer in self._incoming:
            here = request is None or request.Test()
            if here and (source not in blocked or buffer[3] == CANCEL):
                self.deliver(source, tag, buffer)
            else:
                blocked.add(source)
                left.append((source, tag, None if here else request, buffer))
        self._incoming = left
