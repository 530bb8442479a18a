"""The plan over several ranks: who gets which layers, how many blocks are under way, how many rows each has.

Every rank says what it can (``Rank``), the head decides (``Sharing``). As many blocks travel as keep the slowest rank
at work: one a stage where stages are alike, fewer where one rank's reading rules, because each block makes it read its
layers again. Pure but for ``rank_of``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from headrace import measured, system
from headrace.cluster.split import by_time, ranges
from headrace.config import resolve
from headrace.errors import HeadraceError, OverBudget
from headrace.kernels.device import Device
from headrace.memory.ahead import BUFFERS
from headrace.memory.budget import human
from headrace.memory.slots import pages_for
from headrace.model.layers import Model
from headrace.options import Options
from headrace.placement import MARGIN, Sizes, resident_now
from headrace.plan import probe
from headrace.plan.cost import Costing, Knobs
from headrace.plan.machine import Machine
from headrace.plan.pace import circling
from headrace.plan.plan import PLAIN, figure
from headrace.plan.sizes import Workload
from headrace.planning import ROWS, RUNS, SEQUENCES, cost_of
from headrace.run.schedule import Order

ALIKE = 0.08
"""Ranks whose speeds differ by less count as equal: that much two measurements of one machine differ."""
WORTH = 0.97
"""Blocks are taken together where a round is shorter than this part of one without: those that leave a rank together
come to the next one after another, and the second waits there."""
SLIP = 1.1
"""What a chain of stages takes over the sum of its parts, where nobody has work to wait for: blocks differ, and a late
one delays all."""
HOP = 1e-3, 110e6
"""Seconds and bytes/s of a message between ranks: gigabit Ethernet, as nobody measures it here."""
TRIED = 6
"""Shapes that get a split of their own, the best by a common one."""
QUICK = (1, 16, 64)
"""Rows that a rank without kept constants is measured at, at its start."""


@dataclass(frozen=True)
class Rank:
    """What a rank can. machine: its constants, None when they aren't known; memory: bytes that it may use beside the
    program, 0 when that isn't known; limited: it keeps to them by streaming (``--ram``)."""

    machine: Machine | None
    memory: int
    limited: bool


def rank_of(device: Device, model: Model, options: Options, neighbours: int) -> Rank:
    """This rank. Constants kept before or given by ``--machine``, else measured now in about a second.

    neighbours: ranks on this host, which share its memory.
    """
    usable = options.ram if options.ram is not None else (system.memory().usable or 0) // max(1, neighbours)
    memory = max(1, usable - resident_now() - MARGIN) if usable else 0
    found = None
    try:
        if options.choice is not None and options.choice.machine is not None:
            found = measured.read(options.choice.machine)
        else:
            found = measured.kept(device, resolve().cache) or _quick(device, model, options)
    except HeadraceError:
        if options.choice is not None and options.choice.machine is not None:
            raise
    return Rank(found, memory, options.ram is not None)


def said(rank: Rank) -> tuple[str, int, int]:
    """A rank as it stands in its hello."""
    return rank.machine.to_json() if rank.machine else "", rank.memory, int(rank.limited)


def heard(machine: str, memory: int, limited: int) -> Rank:
    return Rank(Machine.from_json(machine) if machine else None, memory, bool(limited))


def _quick(device: Device, model: Model, options: Options) -> Machine:
    """A short look at this machine, in the format of most weights."""
    sizes: dict[str, int] = {}
    for plan in model.layers[len(model.layers) // 2].tensors.values():
        sizes[plan.fmt] = sizes.get(plan.fmt, 0) + plan.nbytes
    file = model.file.paths[0] if model.file.paths else None
    disk = None
    if options.ram is not None and file is not None and file.stat().st_size >= measured.LARGE:
        disk = probe.Disk(file, rate=probe.disk_rate(file, probe.WEIGHTS, 4, 0.3))
    fmt = max(sizes, key=lambda name: sizes[name])
    return probe.probe(
        device, capacity=system.memory().total or 1 << 62, formats=(fmt,), kv=(options.kv_bits,), disk=disk,
        rows=QUICK, width=512, span=16 << 20, length=256,
    )  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """The decision. edges: [first, end) of each rank's layers; together: rows that a rank takes in one go over its
    layers (0: each block by itself). seconds, rate: what the work should take, new tokens/s then. why:
    for people, of each rank; telling: whether they want to know."""

    edges: tuple[tuple[int, int], ...]
    rows: int
    runs: int
    blocks: int
    sequences: int
    pages: int
    together: tuple[int, ...]
    seconds: float
    rate: float
    why: tuple[str, ...]
    free: frozenset[str]
    telling: bool

    def order(self, options: Options) -> Order:
        """For the head. Sequences at a time stay as they were given where they weren't chosen."""
        most = self.sequences if "sequences" in self.free else options.sequences
        return Order(self.rows, self.runs, self.blocks, chunk=self.rows, sequences=most, even=True)

    def text(self, names: Sequence[str]) -> str:
        """Who got what and why, in a line."""
        parts = "; ".join(f"{name}: {what}" for name, what in zip(names, self.why, strict=True))
        shape = f"{self.blocks} blocks under way, runs of up to {self.rows} rows, {self.runs} a block"
        return f"{parts}. {shape}; {figure(self.rate)} tokens/s expected."


@dataclass(frozen=True)
class Shape:
    rows: int
    runs: int
    sequences: int
    blocks: int
    pages: int

    @property
    def nexts(self) -> int:
        """Sequences whose next tokens share a block."""
        return -(-self.sequences // self.blocks)


class Sharing:
    """The search for one model over these ranks. work: what is to be computed. free: what may be chosen of rows, runs,
    sequences, caches. pages: of cache where that isn't."""

    def __init__(
        self, device: Device, model: Model, options: Options, context: int, ranks: Sequence[Rank], work: Workload,
        free: frozenset[str], pages: int,
    ) -> None:  # fmt: skip
        self.model, self.options, self.context, self.work, self.free = model, options, context, work, free
        self.pages, self.sizes = pages, Sizes(device, model)
        self.cost = cost_of(device, model, "")
        self.ranks = _levelled(ranks, self.cost.width)
        shapes, _, _ = self.sizes.cache(options.kv_bits)
        each = [device.page_nbytes(shapes[i]) if i in shapes else 0 for i in self.sizes.own]
        self._page = [0, *itertools.accumulate(each)]
        self._held = [0, *itertools.accumulate(self.sizes.held[i] for i in self.sizes.own)]
        self._blocks = [0, *itertools.accumulate(int(i in self.sizes.extents) for i in self.sizes.own)]
        self._extent = max(self.sizes.extents.values(), default=0)
        table = model.layers[-1].tensors["output"]
        self._table = device.packed_nbytes(table.fmt, table.n, table.k) if table.shares else 0
        self._sums = cache(self._sums_of)

    # --- what a stage takes -----------------------------------------------------------------------------

    def _sums_of(self, rank: int, knobs: Knobs, prompt: bool) -> list[float]:
        """Seconds that the rank computes the first so many layers for a block."""
        machine = self.ranks[rank].machine
        assert machine is not None
        costing = Costing(self.cost, machine, self.work, knobs)
        uses = [costing.option(layer, PLAIN) for layer in self.cost.layers]
        each = ((u.prefill if prompt else u.decode).busy["compute host"] for u in uses)
        return [0.0, *itertools.accumulate(each)]

    def _knobs(self, shape: Shape, prompt: bool) -> Knobs:
        bits, most = self.options.kv_bits, shape.rows
        if not prompt:
            return Knobs(shape.nexts, 1, 1, "host", *bits, most=most)
        chunk = min(self.work.prompt_len, shape.rows * shape.runs)
        return Knobs(max(1, shape.rows * shape.runs // chunk), 1, chunk, "host", *bits, most=most)

    def read(self, shape: Shape, rank: int, first: int, end: int) -> float:
        """Seconds that a rank reads its layers once; inf when it can't hold them at all."""
        who, last = self.ranks[rank], end == len(self.model.layers)
        if not who.memory:
            return 0.0
        rest = 4 * self.cost.width * shape.rows * (shape.runs * shape.blocks - 1) + self.sizes.scratch(shape.rows)
        most = shape.sequences if "sequences" in self.free else self.options.sequences
        rest += 4 * self.model.spec.vocab * min(shape.rows, most) if last else 0
        left = who.memory - rest - (self._page[end] - self._page[first]) * shape.pages
        held = self._held[end] - self._held[first] + (self._table if last and first else 0)
        if held <= left:
            return 0.0
        blocks = self._blocks[end] - self._blocks[first]
        assert who.machine is not None
        disk = next((t for t in who.machine.tiers if t.name == "disk"), None)
        ring = min(BUFFERS, blocks) * self._extent
        count = max(2, math.ceil((held + ring - left) / self._extent)) if self._extent else blocks + 1
        if count > blocks or disk is None or not who.limited:
            return math.inf
        return count * self._extent / disk.read

    def stage(self, shape: Shape, rank: int, first: int, end: int) -> tuple[float, float, float]:
        """Seconds that a rank computes a block of prompts, and one of next tokens, and that it reads its layers."""
        read = self.read(shape, rank, first, end)
        prompt, following = (self._sums(rank, self._knobs(shape, p), p) for p in (True, False))
        copied, who = HOP[0], self.ranks[rank].machine
        if 0 < read < math.inf and who is not None:  # where reading is work for the cores too
            copied += read * sum(link.taken * link.rate for link in who.path("disk", "host"))
        return copied + prompt[end] - prompt[first], copied + following[end] - following[first], read

    # --- what it all takes ------------------------------------------------------------------------------

    def counts(self, shape: Shape) -> tuple[int, float]:
        """Blocks of prompts, and rounds of next tokens."""
        w = self.work
        prompts = -(-w.prompt_len * w.batch // (shape.rows * shape.runs))
        return prompts, (w.gen_len - 1) * max(1.0, w.batch / shape.sequences)

    def seconds(self, shape: Shape, edges: Sequence[tuple[int, int]]) -> float:
        """The whole work: a block is done when it has been through all stages, and the slowest stage is the pace."""
        stages = [self.stage(shape, rank, *edge) for rank, edge in enumerate(edges)]
        prompts, rounds = self.counts(shape)
        busy = [max(prompt, read) for prompt, _, read in stages]
        first = sum(busy) + self._wire(shape, 0)
        return prompts * max(max(busy), first / shape.blocks) + first + rounds * self.round(shape, stages)

    def round(self, shape: Shape, stages: Sequence[tuple[float, float, float]], together: bool = False) -> float:
        """Seconds in which every sequence gets a token. together: ranks that read take the blocks that wait in one."""
        hop = self._wire(shape, 1) / len(stages)
        if together:
            return circling([(computed, read) for _, computed, read in stages], shape.blocks, True, hop)
        busy = [max(computed, read) for _, computed, read in stages]
        return max(shape.blocks * max(busy), SLIP * sum(busy) + hop * len(busy))

    def _wire(self, shape: Shape, phase: int) -> float:
        rows = shape.nexts if phase else shape.rows * shape.runs
        return (len(self.ranks) - 1) * 4 * self.cost.width * rows / HOP[1]

    def split(self, shape: Shape) -> tuple[tuple[int, int], ...] | None:
        """The layers of each rank so that the busiest one has as little to do as can be; None: they can't hold them."""
        prompts, rounds = self.counts(shape)

        def busy(rank: int, first: int, end: int) -> float:
            prompt, following, read = self.stage(shape, rank, first, end)
            return prompts * max(prompt, read) + rounds * shape.blocks * max(following, read)

        counts, seconds = by_time(busy, len(self.model.layers), len(self.ranks))
        return ranges(counts) if seconds < math.inf else None

    # --- the search -------------------------------------------------------------------------------------

    def shapes(self) -> Iterator[Shape]:
        o, work, free = self.options, self.work, self.free
        some = {s for s in SEQUENCES if s < work.batch} | {min(work.batch, SEQUENCES[-1])}
        each = min(pages_for(work.prompt_len + work.gen_len), pages_for(self.context))
        for sequences in sorted(some) if "sequences" in free else [min(o.sequences, work.batch)]:
            pages = max(sequences * each, pages_for(self.context)) if "caches" in free else self.pages
            for rows in ROWS if "rows" in free else (o.rows,):
                for runs in [r for r in RUNS if r <= 8] if "runs" in free else (o.runs,):
                    for blocks in range(1, 2 * len(self.ranks) + 1) if sequences > 1 else (len(self.ranks),):
                        shape = Shape(rows, runs, sequences, blocks, pages)
                        if blocks <= sequences * work.prompt_len and shape.nexts <= rows * runs:
                            yield shape

    def best(self, fixed: tuple[tuple[int, int], ...] | None = None) -> Shared:
        """The fastest shape with its split, or with the edges given. OverBudget, with the numbers, for none."""
        shapes = list(self.shapes())
        start = fixed or self.split(shapes[0])  # the smallest
        if start is None:
            raise self._refusal(shapes[0])
        tried = sorted(shapes, key=lambda s: self._order(s, start))[:TRIED]
        found = [(s, edges) for s in tried if (edges := fixed or self.split(s))]
        if not found:
            raise self._refusal(shapes[0])
        shape, edges = min(found, key=lambda f: self._order(*f))
        seconds = self.seconds(shape, edges)
        stages = [self.stage(shape, rank, *edge) for rank, edge in enumerate(edges)]
        pays = self.round(shape, stages, True) < WORTH * self.round(shape, stages)
        together = tuple(int(shape.nexts * read / took) if pays else 0 for _, took, read in stages)
        return Shared(
            edges, shape.rows, shape.runs, shape.blocks, shape.sequences, shape.pages, together, seconds,
            self.work.batch * self.work.gen_len / seconds, tuple(self._why(shape, edges, stages)), self.free,
            self.work.batch > 1
            or any(s[2] for s in stages)
            or any(r.machine != self.ranks[0].machine for r in self.ranks),
        )  # fmt: skip

    def _order(self, shape: Shape, edges: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """What to sort by: of those as good as equal (2%) the one with most sequences, then with the smallest runs."""
        seconds = self.seconds(shape, edges)
        return (
            seconds if seconds == math.inf else int(50 * math.log(seconds)),
            -shape.sequences,
            shape.rows,
            shape.runs,
        )

    def _refusal(self, shape: Shape) -> OverBudget:
        has = ", ".join(human(r.memory) for r in self.ranks)
        return OverBudget(
            f"The ranks can't hold the model between them, whoever gets which layers: its weights are "
            f"{human(self.sizes.total)}, {shape.pages} pages of cache {human(self._page[-1] * shape.pages)}, and "
            f"beside the program their budgets leave {has}; give a larger --ram, a shorter context (-c), or one more "
            "rank."
        )

    def _why(
        self, shape: Shape, edges: Sequence[tuple[int, int]], stages: Sequence[tuple[float, float, float]]
    ) -> Iterator[str]:
        """For each rank: its layers, how fast it is beside the fastest, and what it waits for."""
        knobs = self._knobs(shape, False)
        whole = [self._sums(rank, knobs, False)[-1] for rank in range(len(edges))]
        for rank, ((first, end), (_, computed, read)) in enumerate(zip(edges, stages, strict=True)):
            text = f"{end - first} layers, computes at {min(whole) / whole[rank]:.0%} of the fastest"
            if read:
                text += f", reads its layers in {figure(read)} s"
            yield f"{text}, {figure(max(computed, read))} s for {shape.nexts} next token{'s' * (shape.nexts > 1)}"


def _levelled(ranks: Sequence[Rank], width: int) -> list[Rank]:
    """The ranks, those that are as good as alike with the same compute constants."""
    out: list[Rank] = []
    for rank in ranks:
        assert rank.machine is not None
        mine = rank.machine.computes[0]
        for other in out:
            assert other.machine is not None
            theirs = other.machine.computes[0]
            if all(abs(mine.rate(n) / theirs.rate(n) - 1) < ALIKE for n in QUICK):
                rank = replace(rank, machine=replace(rank.machine, computes=other.machine.computes))
                break
        out.append(rank)
    return out


def share(
    device: Device, model: Model, options: Options, context: int, ranks: Sequence[Rank], pages: int,
    fixed: tuple[tuple[int, int], ...] | None,
) -> Shared | None:  # fmt: skip
    """The decision for these ranks. None where it isn't made: constants of a rank aren't known, the cache lies on
    disk, or the rows given by hand are fewer than the sequences that would share a block.

    pages: of cache, where nothing else is chosen. fixed: edges by hand.
    """
    if options.kv_disk is not None or any(rank.machine is None for rank in ranks):
        return None
    choice = options.choice
    work = choice.work if choice is not None else Workload(128, 128, options.sequences)
    free = choice.free if choice is not None else frozenset()
    sharing = Sharing(device, model, options, context, ranks, work, free, pages)
    return sharing.best(fixed) if any(sharing.shapes()) else None
