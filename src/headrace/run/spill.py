"""Residual rows that wait on the disk while the other runs of a block are computed: FlexGen's activations on disk."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np

from headrace.formats.files import ScratchFile
from headrace.memory.buffers import allocate, round_up
from headrace.run.stage import Computer, Run


class Spilled(Computer):
    """``computer`` with every run's rows written to a nameless file in ``folder`` after each layer but the last one.

    runs: that may be under way at a time; rows, width: of each. The file grows by what more there are.
    """

    def __init__(self, computer: Computer, end: int, rows: int, width: int, runs: int, folder: Path) -> None:
        self._computer, self._last, self._width = computer, end - 1, width
        self._buffer = allocate(round_up(4 * rows * width))
        self._file = ScratchFile(folder, self._buffer.nbytes * runs)
        self._slots = 0
        self._free: list[int] = []
        self._away: dict[int, tuple[weakref.ref[Run], int, list[int]]] = {}
        """Run -> itself, its place in the file, and which of its rows were written."""
        self.nbytes = self._buffer.nbytes
        self.read_bytes = self.written_bytes = 0

    def step(self, layer: int, run: Run) -> None:
        """As ``Computer.step``; rows that were cancelled meanwhile are left out."""
        self._fetch(run)
        self._computer.step(layer, run)
        if layer < self._last and run.x is not None:
            self._store(run)

    def _fetch(self, run: Run) -> None:
        there = self._away.pop(run.id, None)
        if there is None:
            return
        _, slot, live = there
        self._free.append(slot)
        size = round_up(4 * len(live) * self._width)
        self._file.read([self._buffer.data[:size]], slot * self._buffer.nbytes)
        self.read_bytes += size
        x = self._buffer[: 4 * len(live) * self._width].view(np.float32).reshape(len(live), self._width)
        at = {i: r for r, i in enumerate(live)}
        run.x = x[[at[i] for i in run.live]]

    def _store(self, run: Run) -> None:
        assert run.x is not None
        if not self._free:  # those whose runs ended in a tombstone
            for number in [n for n, (ref, _, _) in self._away.items() if ref() is None]:
                self._free.append(self._away.pop(number)[1])
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        slot, raw = self._free.pop(), run.x.reshape(-1).view(np.uint8)
        size = round_up(raw.nbytes)
        self._buffer[: raw.nbytes] = raw
        self._file.write([self._buffer.data[:size]], slot * self._buffer.nbytes)
        self.written_bytes += size
        self._away[run.id] = weakref.ref(run), slot, list(run.live)
        run.x = None

    def close(self) -> None:
        self._file.close()
