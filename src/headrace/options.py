"""How to run a model: every choice of the user's, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import BadRequest
from headrace.memory.link import Pace
from headrace.plan.plan import Place
from headrace.plan.sizes import Objective, Workload

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Choice:
    """What the planner may choose, and for which work. free: names of options that the user hasn't pinned.

    machine: a file with the machine's constants; None: as measured before, else measured now.
    """

    work: Workload
    objective: Objective = "throughput"
    free: frozenset[str] = frozenset({"rows", "runs", "sequences", "caches", "kv_disk"})
    machine: Path | None = None


@dataclass(frozen=True)
class Options:
    """How to run a model. context None: the model's, at most 4096 (a long context is a lot of memory to reserve).

    threads 0: one per core this process may use. ram: bytes, all that may be used; None: no limit is kept.
    sequences: how many may be computed at a time; they share the cache of ``context`` tokens times ``caches``
    (0: as many of them as the memory holds, up to one for each sequence).
    """

    threads: int = 0
    context: int | None = None
    kv_bits: tuple[int, int] = (16, 16)
    ram: int | None = None
    device: str = "cpu"
    cpu: str | None = None
    caches: int = 1
    sequences: int = 64
    rows: int = 512
    runs: int = 1
    kv_disk: Path | None = None
    """Folder for the KV cache; memory then has room for ``kv_frames`` (layer, page) extents of it and no more."""
    kv_frames: int | None = None
    """None: enough for the largest run and to read the next one's meanwhile."""
    requant: str | None = None
    """Quantise the matrices of a floating-point model as they are read: "q4" or "q8"; a model of its own."""
    rank_threads: tuple[int, ...] = ()
    """Threads of each rank, or one number for all; when empty, ``threads`` says (0: a rank's part of its host)."""
    batch_threads: tuple[int, ...] = ()
    """Threads for runs of more than one row, for each rank or for all; empty: the same."""
    layer_split: str | None = None
    """Shares of the layers for each rank, as ``cluster.split`` reads them; None: evenly by weight."""
    ship: bool = False
    """Ranks without the model file get their layers from those that have it."""
    packs: Path | None = None
    """Folder for packed files, when layers must stream; None: ``packs`` in the cache folder."""
    tell: Callable[[str], None] | None = None
    """Told, in sentences, of what takes long before the first token."""
    device_ram: int | None = None
    """Bytes of a PyTorch device's own memory that may be used (``ram`` is the host's); None: no limit is kept."""
    places: tuple[Place, ...] | None = None
    """Where each layer lies and is computed; None: on a PyTorch device there, the rest crosses from the host; on the
    CPU as many in memory as fit."""
    slots: int | None = None
    """Tokens of cache in all, instead of ``caches``."""
    choice: Choice | None = None
    """With ``ram``: let the planner choose, for this work, what ``Choice.free`` names."""
    link: Pace | None = None
    """Slows the link between host and device down to this; None: as fast as it is."""
    attn_sparsity: float = 1.0
    """Under 1: attention takes only this fraction of values, those that weigh most; an approximation."""
    overlap: bool = True
    """False: weights and caches are read when they are wanted and no sooner; to measure what reading ahead brings."""
    nexts: int | None = None
    """Most next tokens in a run; None: ``rows``."""
    activations: str | None = None
    """Where the residual rows of a block wait between layers: "device", "host", "disk"; None: where they were made."""
    pin_weight: bool = False
    """On cuda: host memory of weights is pinned, so that it crosses without a copy on the way."""
    host_device: str = "torch:cpu"
    """What computes layers placed at the host: "torch:cpu" (the device's formulas) or "cpu" (fast; other numbers)."""

    drafter: str | Path | Sequence[str | Path] = ()
    """What guesses ahead: "ngram" (prompt lookup), "layers:N" (the model's first N blocks), a draft model's path;
    several work as one. The text stays the same."""
    draft_for_draft: str | None = None
    """What guesses for a drafter with layers, so that it takes fewer passes for the same drafts: "ngram"."""
    policy: str = "ours"
    """Which guesses are computed: "ours" measures what pays, "pipeinfer" and "sync" follow ``knobs``."""
    knobs: Mapping[str, float] = field(default_factory=dict)
    """Of PipeInfer's: draft, np, pa, ps, pr, pd. The first three bound ours too, draft bounds "sync"."""

    def __post_init__(self) -> None:
        """BadRequest for a number that is none or makes no sense."""
        least = {"threads": 0, "context": 1, "ram": 0, "caches": 0, "sequences": 1, "rows": 1, "runs": 1,
                 "kv_frames": 1, "device_ram": 0, "nexts": 1, "slots": 1}  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= low):
                raise BadRequest(f"{name} is {value!r}; it must be a whole number of {low} or more.")
        bits = self.kv_bits
        if not (isinstance(bits, tuple) and len(bits) == 2 and all(b in (16, 8, 4) for b in bits)):
            raise BadRequest(f"kv_bits is {bits!r}; it must be a pair like (8, 4), each 16, 8 or 4.")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batch_threads(options: Options, rank: int = 0, ranks: int = 1) -> int:
    """A rank's threads for runs of more than one row; 0: as for one row."""
    given = options.batch_threads
    if len(given) not in (0, 1, ranks):
        raise BadRequest(
            f"{len(given)} thread counts are given for {ranks} ranks; give one for all, or one each (-tb)."
        )
    return given[rank if len(given) > 1 else 0] if given else 0
