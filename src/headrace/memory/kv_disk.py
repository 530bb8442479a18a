"""The KV cache of one stage on disk, in a fixed number of frames of host memory; see docs/memory.md.

An extent is one page of one layer, numbered ``layer's place * pages + page``. Bookkeeping belongs to the caller's
thread; the threads of the pools only read and write frames that nobody else uses meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, OverBudget, Unavailable
from headrace.formats.files import ScratchFile, free_bytes
from headrace.kernels.device import I32, PAGE, Device, KVShape, Rows
from headrace.memory.budget import human
from headrace.memory.buffers import address, allocate, round_up
from headrace.memory.kv import HostKV

Bools: TypeAlias = NDArray[np.bool_]

READERS, WRITERS = 16, 1
"""Pages of a sequence seldom lie side by side, so reads are small and many must be under way."""
REQUEST = 2 << 20
"""Bytes read or written in one call, where extents lie side by side."""
AHEAD = 2
"""Steps looked ahead for extents to read. Each costs frames in which something else could have stayed."""
TOGETHER = 8
"""Pages side by side of which all stay or none, so that reads are long."""
MOST_READS = 4 * READERS
"""Reads under way after which no more are begun ahead."""
FULL = np.uint32(0xFFFFFFFF)
BOOKS = 33
"""Bytes of tables an extent takes, in a frame or not."""


def stride(device: Device, shapes: Mapping[int, KVShape]) -> int:
    """Bytes of an extent, on disk and in its frame."""
    return round_up(max((device.page_nbytes(shape) for shape in shapes.values()), default=0))


def least_frames(layers: int, pages: int, run_pages: int, sequences: int) -> int:
    """Frames without which a step could lack one: the largest run's pages, and a page being filled for each sequence
    and layer."""
    return min(layers * pages, min(pages, run_pages) + layers * min(sequences, pages))


def usual_frames(layers: int, pages: int, run_pages: int, sequences: int) -> int:
    """``least_frames``, and room to read the next run's pages meanwhile."""
    return min(layers * pages, least_frames(layers, pages, run_pages, sequences) + min(pages, run_pages))


def on_disk_nbytes(device: Device, shapes: Mapping[int, KVShape], pages: int, frames: int, folder: Path | None) -> int:
    """Memory of a ``DiskKV``. BadFile or Unavailable when the folder isn't there or has no room for the rest."""
    if folder is None or not folder.is_dir():
        raise BadFile(f"{folder or '--kv-disk'}: there is no such folder for the KV cache; make it first.")
    extents, each, free = len(shapes) * pages, stride(device, shapes), free_bytes(folder)
    if extents * each > free:
        raise Unavailable(
            f"{folder}: the KV cache takes {human(extents * each)} and there are {human(free)}; use another folder "
            "(--kv-disk), fewer sequences or a shorter context."
        )
    return frames * each + extents * BOOKS


class _Seen(NamedTuple):
    """What a run's rows touch. pages: all they see, ascending; own: those written; masks: which slots of each."""

    rows: Rows
    pages: I32
    own: I32
    masks: NDArray[np.uint32]


def _look(rows: Rows) -> _Seen:
    own, place = np.unique(rows.slot // PAGE, return_inverse=True)
    masks = np.zeros(len(own), np.uint32)
    np.bitwise_or.at(masks, place, np.uint32(1) << (rows.slot % PAGE).astype(np.uint32))
    return _Seen(rows, np.unique(rows.lists // PAGE), own, masks)


class DiskKV:
    """``frames`` extents in memory, the others in a nameless file in ``folder``. A ``Cache``, as ``kv.HostKV``.

    read_bytes and written_bytes count what went over the disk, ``waited`` the seconds that steps waited for it.
    """

    def __init__(self, device: Device, shapes: Mapping[int, KVShape], pages: int, frames: int, folder: Path,
                 ahead: bool = True) -> None:  # fmt: skip
        self.ahead = ahead
        self.pages, self.frames, self.stride = pages, frames, stride(device, shapes)
        extents = len(shapes) * pages
        self._places = {layer: place for place, layer in enumerate(shapes)}
        self._table = np.zeros((len(shapes), pages), np.uint64)
        self._handles = [device.kv_layer(s, row) for s, row in zip(shapes.values(), self._table, strict=True)]
        self._address: NDArray[np.uint64] = self._table.reshape(-1)
        self._memory = allocate(frames * self.stride)
        self._base = np.uint64(address(self._memory)) if frames else np.uint64(0)
        self._frame: I32 = np.full(extents, -1, np.int32)
        self._used: I32 = np.zeros(extents, np.int32)
        self._fill = np.zeros(extents, np.uint32)
        self._stored: Bools = np.zeros(extents, np.bool_)
        # Multiples of the golden ratio (Knuth, TAOCP 6.4): however many of them are kept, they lie evenly spread.
        self._turn = (np.arange(extents, dtype=np.int64) // TOGETHER * 2654435769) % (1 << 32)
        self._extent: I32 = np.full(frames, -1, np.int32)
        self._dirty: Bools = np.zeros(frames, np.bool_)
        self._moving: Bools = np.zeros(frames, np.bool_)
        """Being read or written."""
        self._free = list(range(frames))
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}
        self._file = ScratchFile(folder, extents * self.stride)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="headrace-kv-read")
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="headrace-kv-write")
        self._clock, self._cycle = 0, 1.0
        self._place = -1
        self._before: list[_Seen] = []
        self._now: list[_Seen] = []
        self._last: I32 = np.empty(0, np.int32)
        """Extents that the step under way writes."""
        self.read_bytes = self.written_bytes = 0
        self.waited = 0.0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + BOOKS * len(self._frame)

    def layer(self, index: int, rows: Rows) -> Any | None:
        """The last step is over; a layer's handle with every page these rows see in memory, until the next call."""
        self._settle()
        place = self._places.get(index)
        if place is None:
            return None
        seen = self._follow(place, rows)
        extents = place * self.pages + seen.pages
        self._bring(extents)
        self._mark(extents, place * self.pages + seen.own, seen.masks)
        self._read_ahead(place, extents)
        return self._handles[place]

    def close(self) -> None:
        """Wait for what is under way and give memory and disk back."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writers.shutdown(wait=True, cancel_futures=True)
        self._file.close()
        self._handles.clear()
        self._reads.clear()
        self._writes.clear()
        self._memory = allocate(0)

    # --- the order of steps -----------------------------------------------------------------------------

    def _follow(self, place: int, rows: Rows) -> _Seen:
        """Note the step: the order of the runs in one layer is their order in the next."""
        if place != self._place:
            self._place, self._before, self._now = place, self._now, []
        known = next((seen for seen in self._before if seen.rows is rows), None)
        self._now.append(known or _look(rows))
        return self._now[-1]

    def _upcoming(self, place: int) -> Iterator[I32]:
        """Extents of the next steps, as far as anyone can tell."""
        order = self._before if len(self._before) > len(self._now) else self._now
        for i in range(len(self._now), len(self._now) + AHEAD):
            layer, run = divmod(i, len(order))
            yield (place + layer) % len(self._handles) * self.pages + order[run].pages

    def _mark(self, extents: I32, own: I32, masks: NDArray[np.uint32]) -> None:
        """These are used now, and those written."""
        self._clock += 1
        used = self._used[extents]
        again = used[used > 0]
        if len(again):
            self._cycle = max(0.98 * self._cycle, float(np.median(self._clock - again)))
        self._used[extents] = self._clock
        self._dirty[self._frame[own]] = True
        # A slot written again, after the page was full, begins the page's next life.
        fill = self._fill[own]
        self._fill[own] = np.where(fill == FULL, masks, fill | masks)
        self._last = own

    def _settle(self) -> None:
        """After a step: what has arrived or was written is noted, the pages it has filled are written behind."""
        for under_way in (self._reads, self._writes):
            for extent in [e for e, future in under_way.items() if future.done()]:
                self._arrived(under_way, extent)
        own, self._last = self._last, self._last[:0]
        if self.frames < len(self._frame):
            self._write(own[self._fill[own] == FULL])

    # --- frames -----------------------------------------------------------------------------------------

    def _bring(self, extents: I32) -> None:
        """Wait until all of them are in frames."""
        start = time.perf_counter()
        absent = extents[self._frame[extents] < 0]
        if len(absent):
            self._load(absent, self._marked(extents), patient=True)
        if self._reads:
            for extent in self._reads.keys() & set(extents.tolist()):
                self._arrived(self._reads, extent)
        self.waited += time.perf_counter() - start

    def _read_ahead(self, place: int, now: I32) -> None:
        if self.frames == len(self._frame) or not self.ahead:
            return
        kept = self._marked(now)
        for extents in self._upcoming(place):
            if len(self._reads) >= MOST_READS:
                return
            kept |= self._marked(extents)
            absent = extents[(self._frame[extents] < 0) & self._stored[extents]]
            if len(absent) and self._load(absent, kept, patient=False) < len(absent):
                return

    def _marked(self, extents: I32) -> Bools:
        """The frames that hold any of these."""
        kept: Bools = np.zeros(self.frames, np.bool_)
        at = self._frame[extents]
        kept[at[at >= 0]] = True
        return kept

    def _load(self, absent: I32, kept: Bools, patient: bool) -> int:
        """Give extents frames and begin to read them, all (patient) or as many as there is room for now."""
        frames = self._room(len(absent), kept, patient)
        absent = absent[: len(frames)]
        self._frame[absent] = frames
        self._extent[frames] = absent
        kept[frames] = True
        self._address[absent] = self._base + np.asarray(frames, np.uint64) * np.uint64(self.stride)
        self._start(absent[self._stored[absent]], self._reads)
        return len(absent)

    def _room(self, count: int, kept: Bools, patient: bool) -> list[int]:
        """Frames for ``count`` extents, by evicting others than ``kept``; fewer when it isn't patient."""
        if len(self._free) < count:
            self._evict(count - len(self._free), kept)
        while patient and len(self._free) < count:
            waited = any(self._wait_for_one(under_way, kept) for under_way in (self._writes, self._reads))
            if not waited and not self._write_oldest(count - len(self._free), kept):
                raise OverBudget(
                    f"A run needs {int(kept.sum()) + count} pages of cache in memory and there are {self.frames} "
                    "frames; use fewer rows a run, or more frames (--kv-frames)."
                )
            self._evict(count - len(self._free), kept)
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def _wait_for_one(self, under_way: dict[int, Future[None]], kept: Bools) -> bool:
        """Whether there was one, of a frame that isn't kept."""
        extent = next((e for e in under_way if not kept[self._frame[e]]), None)
        if extent is not None:
            self._arrived(under_way, extent)
        return extent is not None

    def _evict(self, count: int, kept: Bools) -> None:
        """Free up to ``count`` frames whose extents are safe on the disk: those nobody uses any more, then by turn."""
        frames = np.flatnonzero(~(kept | self._dirty | self._moving) & (self._extent >= 0))
        used = self._used[self._extent[frames]].astype(np.int64)
        stale = self._clock - used > 2 * self._cycle
        order = np.argsort(np.where(stale, used - (1 << 40), -self._turn[self._extent[frames]]), kind="stable")
        for frame in frames[order[:count]].tolist():
            extent = self._extent[frame]
            self._frame[extent], self._address[extent], self._extent[frame] = -1, 0, -1
            self._free.append(frame)

    def _write_oldest(self, count: int, kept: Bools) -> bool:
        """Pages that never got full: those longest unused are written as they are. Whether there are any."""
        frames = np.flatnonzero(~kept & self._dirty & (self._extent >= 0))
        oldest = np.argsort(self._used[self._extent[frames]], kind="stable")[:count]
        self._write(np.sort(self._extent[frames[oldest]]))
        return len(frames) > 0

    # --- the disk ---------------------------------------------------------------------------------------

    def _write(self, extents: I32) -> None:
        """Begin to write, after earlier writes of the same extents."""
        for extent in self._writes.keys() & set(extents.tolist()):
            self._arrived(self._writes, extent)
        extents = extents[self._dirty[self._frame[extents]]]
        self._dirty[self._frame[extents]] = False
        self._stored[extents] = True
        self._start(extents, self._writes)

    def _start(self, extents: I32, under_way: dict[int, Future[None]]) -> None:
        """Begin to read or write them, in one call those that lie side by side; extents ascending."""
        reads = under_way is self._reads
        pool, move = (self._readers, self._file.read) if reads else (self._writers, self._file.write)
        most = max(1, min(REQUEST // max(1, self.stride), 512))
        breaks = np.flatnonzero(np.diff(extents) != 1) + 1
        for side_by_side in np.split(extents, breaks):
            for at in range(0, len(side_by_side), most):
                some = side_by_side[at : at + most]
                frames = self._frame[some].tolist()
                self._moving[frames] = True
                view = self._memory.data
                parts = [view[f * self.stride : (f + 1) * self.stride] for f in frames]
                future = pool.submit(move, parts, int(some[0]) * self.stride)
                under_way.update(dict.fromkeys(some.tolist(), future))

    def _arrived(self, under_way: dict[int, Future[None]], extent: int) -> None:
        """Wait for a read or write; Unavailable when it failed."""
        under_way.pop(extent).result()
        self._moving[self._frame[extent]] = False
        if under_way is self._reads:
            self.read_bytes += self.stride
        else:
            self.written_bytes += self.stride


class EitherKV:
    """Caches of some layers in memory and of others on disk. A ``Cache``."""

    def __init__(self, memory: HostKV, disk: DiskKV | None) -> None:
        self.memory, self.disk = memory, disk

    def layer(self, index: int, rows: Rows) -> Any | None:
        found = None if self.disk is None else self.disk.layer(index, rows)
        return self.memory.layer(index, rows) if found is None else found

    def close(self) -> None:
        self.memory.close()
        if self.disk is not None:
            self.disk.close()
