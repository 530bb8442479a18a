"""When to look for messages, and who has been silent for too long. Nothing here knows MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

LEAST, LONGEST = 50e-6, 10e-3
"""Seconds between polls."""
NEAR = 500e-6
"""Seconds before and after the moment a message is expected in which there is no pause between polls, at most."""
BEAT = 1.0
"""Seconds without a message to a watched peer after which it is told that this rank lives."""
PATIENCE = 15.0
"""Seconds of silence after which a watched peer counts as lost."""


class Silences:
    """Silences before a reply are mostly alike: each is a layer's or a pass's time on another rank."""

    def __init__(self) -> None:
        self._last = deque([0.0], maxlen=4)

    def ended(self, seconds: float) -> None:
        """A message came after so long a silence."""
        self._last.append(seconds)

    def nap(self, quiet: float) -> float:
        """Seconds to sleep after a poll, the silence being so long already; 0 while a message is likely to come."""
        usual = min(self._last)
        near = min(max(usual / 8, LEAST), NEAR)
        if abs(quiet - usual) < near:
            return 0.0
        # Until the moment no nap may reach past its beginning: what is found late would be learned as being late.
        return min(max(quiet / 64 if quiet > usual else usual - near - quiet, LEAST), LONGEST)


class Peers:
    """Ranks that must be heard from. Times are seconds by a steady clock."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._spoken: dict[int, float] = {}
        self._last = 0.0

    def watch(self, ranks: Iterable[int], now: float) -> None:
        """From now on these, and no others."""
        self._heard, self._last = dict.fromkeys(ranks, now), now

    def heard(self, rank: int, now: float) -> None:
        if rank in self._heard:
            self._heard[rank] = now

    def spoken(self, rank: int, now: float) -> None:
        self._spoken[rank] = now

    def beat(self, now: float) -> tuple[list[int], list[int]]:
        """Ranks to be told that this one lives, and those lost. Time in which nobody asked this doesn't count."""
        late, self._last = now - self._last, now
        if late > BEAT:
            self._heard = {rank: heard + late for rank, heard in self._heard.items()}
        mute = [rank for rank in self._heard if now - self._spoken.get(rank, 0.0) > BEAT]
        lost = [rank for rank, heard in self._heard.items() if now - heard > PATIENCE]
        self._spoken.update(dict.fromkeys(mute, now))
        for rank in lost:
            self._heard.pop(rank, None)
        return mute, lost
