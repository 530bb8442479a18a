"""How bytes cross between host and device: plain copies for torch:cpu, streams and pinned buffers for cuda."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = Any


class HostMover:
    """Both ends are memory of this process."""

    pinned_nbytes = 0

    def begin(self, after: Any) -> None:
        """Nothing runs beside the caller's thread, so nothing is waited for."""

    def copy(self, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src)

    def finish(self) -> None:
        """Copies end before ``copy`` returns."""


class CudaMover:
    """One direction, on a stream of its own, through two pinned buffers of ``piece`` bytes (DMA needs pinned memory).

    Memory that is pinned already is copied without them.
    """

    def __init__(self, to_device: bool, piece: int) -> None:
        self._to_device = to_device
        self._stream = torch.cuda.Stream()
        self._staging = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self.pinned_nbytes = 2 * piece

    def begin(self, after: Any) -> None:
        if after is not None:
            self._stream.wait_event(after)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        host = src if self._to_device else dst
        if host.is_pinned():
            with torch.cuda.stream(self._stream):
                dst.copy_(src, non_blocking=True)
            return
        self._turn ^= 1
        buffer, event = self._staging[self._turn][: len(src)], self._events[self._turn]
        event.synchronize()  # the buffer's last copy has left it
        if self._to_device:
            buffer.copy_(src)
            with torch.cuda.stream(self._stream):
                dst.copy_(buffer, non_blocking=True)
            event.record(self._stream)
            return
        with torch.cuda.stream(self._stream):
            buffer.copy_(src, non_blocking=True)
        event.record(self._stream)
        event.synchronize()
        dst.copy_(buffer)

    def finish(self) -> None:
        self._stream.synchronize()
