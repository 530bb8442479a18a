"""Virtual time: what will happen, in order. Ties happen in the order they were said, so a run is repeatable."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """An agenda of calls. now: seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._said = 0

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Call then; a time that has passed means now."""
        self._said += 1
        heapq.heappush(self._heap, (max(time, self.now), self._said, call, args))

    @property
    def next(self) -> float | None:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else None

    def turn(self) -> bool:
        """Let the next thing happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True
