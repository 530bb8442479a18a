"""Slots and pages: who owns the places of K and V (head side), and who reads which (every side).

A slot is the place of one token's K and V, the same number on every stage; a page is PAGE consecutive
slots. ``SlotPool`` decides and lives in the head; ``Tables`` only follows cache operations and is the same
on every stage by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import BadMessage
from headrace.kernels.device import I32, PAGE


@dataclass
class Lease:
    """The slots one sequence may use: its own pages, slots free in them, and how many pages it may still take."""

    pages: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    reserve: int = 0


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


class SlotPool:
    """Pages of the cache, reference-counted; plain data, no I/O.

    A lease reserves the pages it can ever need when it's made, so a running sequence never lacks a slot.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._refs = [0] * pages
        self._promised = 0

    @property
    def available(self) -> int:
        """Pages neither used nor promised."""
        return len(self._free) - self._promised

    def lease(self, tokens: int) -> Lease | None:
        """Room for ``tokens`` slots, or None when that much isn't available now."""
        need = pages_for(tokens)
        if need > self.available:
            return None
        self._promised += need
        return Lease(reserve=need)

    def fork(self, shared_slots: Sequence[int], tokens: int) -> Lease | None:
        """A lease that shares the pages of ``shared_slots`` and has room for ``tokens`` more slots."""
        lease = self.lease(tokens)
        if lease is not None:
            for page in sorted({s // PAGE for s in shared_slots}):
                self._refs[page] += 1
                lease.pages.append(page)
        return lease

    def take(self, lease: Lease) -> int | None:
        """A slot for the next token or guess; None when the lease is used up."""
        if not lease.free:
            if lease.reserve == 0:
                return None
            lease.reserve -= 1
            self._promised -= 1
            page = self._free.pop()
            self._refs[page] = 1
            lease.pages.append(page)
            lease.free.extend(range(page * PAGE + PAGE - 1, page * PAGE - 1, -1))
        return lease.free.pop()

    def room(self, lease: Lease) -> int:
        """Slots the lease can still give."""
        return len(lease.free) + lease.reserve * PAGE

    def give_back(self, lease: Lease, slot: int) -> None:
        """A guess's slot, after it was dropped. At once: per layer, everything happens in run order."""
        lease.free.append(slot)

    def release(self, lease: Lease) -> None:
        """Everything of a lease."""
        self._promised -= lease.reserve
        for page in lease.pages:
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free.append(page)
        lease.pages, lease.free, lease.reserve = [], [], 0

    def check_integrity(self, leases: list[Lease]) -> list[str]:
        """What is wrong, as sentences; empty when all is well."""
        wrong: list[str] = []
        refs = [0] * self.total
        for lease in leases:
            for page in lease.pages:
                refs[page] += 1
            if len(set(lease.free)) != len(lease.free):
                wrong.append("a slot is free twice in one lease")
            strays = [slot for slot in lease.free if slot // PAGE not in lease.pages]
            wrong += [f"slot {slot} is free in a lease that does not own its page" for slot in strays]
        if refs != self._refs:
            wrong.append("page reference counts differ from the leases'")
        if sorted(self._free) != [p for p in range(self.total) if self._refs[p] == 0]:
            wrong.append("the free pages are not those without a reference")
        if self._promised != sum(lease.reserve for lease in leases) or self._promised > len(self._free):
            wrong.append("promised pages differ from the leases' reserves")
        return wrong


class Table:
    """Committed slots of a sequence with their token ids. Append-only; views taken earlier stay valid."""

    __slots__ = ("_slots", "_tokens", "length")

    def __init__(self, slots: I32 | None = None, tokens: I32 | None = None, length: int = 0) -> None:
        self._slots = np.empty(64, np.int32) if slots is None else slots
        self._tokens = np.empty(64, np.int32) if tokens is None else tokens
        self.length = length

    @property
    def slots(self) -> I32:
        return self._slots[: self.length]

    @property
    def tokens(self) -> I32:
        return self._tokens[: self.length]

    def append(self, slots: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        end = self.length + len(slots)
        if end > self._slots.shape[0]:
            more = np.empty(max(end, 2 * self._slots.shape[0]) - self.length, np.int32)
            self._slots, self._tokens = np.concatenate([self.slots, more]), np.concatenate([self.tokens, more])
        self._slots[self.length : end] = slots
        self._tokens[self.length : end] = tokens
        self.length = end

    def fork(self, length: int) -> Table:
        return Table(self.slots[:length].copy(), self.tokens[:length].copy(), length)


class Tables:
    """Every sequence's table on one stage, and each slot's token id."""

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}
        self._token_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, seq: int) -> Table:
        table = self._tables.get(seq)
        if table is None:
            raise BadMessage(f"sequence {seq} is not known here; the peers' caches have come apart")
        return table

    def note(self, slot: int, token: int) -> None:
        """Keep the token id of a row beside its slot."""
        self._token_of[slot] = token

    def noted(self, slots: list[int]) -> I32:
        return np.asarray([self._token_of[s] for s in slots], np.int32)

    def open(self, seq: int) -> None:
        """Know a sequence, though it may have no slots yet (and may be freed without ever having any)."""
        self._tables.setdefault(seq, Table())

    def append(self, seq: int, slots: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        if len(slots) != len(tokens):
            raise BadMessage(f"sequence {seq}: {len(slots)} slots but {len(tokens)} tokens")
        self._tables.setdefault(seq, Table()).append(slots, tokens)

    def fork(self, seq: int, source: int, length: int) -> None:
        table = self[source]
        if not 0 <= length <= table.length or seq in self._tables:
            raise BadMessage(f"cannot fork sequence {source} at {length} into {seq}")
        self._tables[seq] = table.fork(length)

    def free(self, seq: int) -> None:
        if self._tables.pop(seq, None) is None:
            raise BadMessage(f"sequence {seq} is freed twice")
