"""From a path and options to running parts: the one place where everything is put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace import system
from headrace.cluster.loopback import Loopback
from headrace.config import resolve
from headrace.errors import BadFile, BadRequest, OverBudget, Unavailable, Unsupported
from headrace.formats.files import free_bytes
from headrace.formats.index import ModelFile, open_model
from headrace.formats.requant import requantise
from headrace.kernels.device import PAGE, Device, KVShape
from headrace.kernels.dispatch import TORCH, make_device, make_torch
from headrace.memory.budget import Budget, human
from headrace.memory.buffers import round_up
from headrace.memory.kv import HostKV, kv_shapes, page_nbytes
from headrace.memory.kv_disk import BOOKS, DiskKV, least_frames, stride, usual_frames
from headrace.memory.link import Pace
from headrace.memory.slots import pages_for
from headrace.memory.stream import BUFFERS, Streamed, evenly, pack
from headrace.memory.weights import Resident, Weights, layer_nbytes
from headrace.model.layers import Layer, Model, load_model
from headrace.plan.plan import Place
from headrace.run import placing
from headrace.run.compute import DeviceComputer
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.run.tiers import TieredComputer
from headrace.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
MARGIN = 48 << 20
"""What Python and its libraries still take after the model file was read: tables of the loop, text, NumPy arrays."""


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
    layer_split: str | None = None
    """Shares of the layers for each rank, as ``cluster.split`` reads them; None: evenly by weight."""
    packs: Path | None = None
    """Folder for packed files, when layers must stream; None: ``packs`` in the cache folder."""
    tell: Callable[[str], None] | None = None
    """Told, in sentences, of what takes long before the first token."""
    device_ram: int | None = None
    """Bytes of a PyTorch device's own memory that may be used (``ram`` is the host's); None: no limit is kept."""
    places: tuple[Place, ...] | None = None
    """Where each layer lies and is computed, on a PyTorch device; None: there, the rest crosses from the host."""
    link: Pace | None = None
    """Slows the link between host and device down to this; None: as fast as it is."""
    host_device: str = "torch:cpu"
    """What computes layers placed at the host: "torch:cpu" (the device's formulas) or "cpu" (fast; other numbers)."""

    def __post_init__(self) -> None:
        """BadRequest for a number that is none or makes no sense."""
        least = {"threads": 0, "context": 1, "ram": 0, "caches": 0, "sequences": 1, "rows": 1, "runs": 1,
                 "kv_frames": 1, "device_ram": 0}  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= low):
                raise BadRequest(f"{name} is {value!r}; it must be a whole number of {low} or more.")
        bits = self.kv_bits
        if not (isinstance(bits, tuple) and len(bits) == 2 and all(b in (16, 8, 4) for b in bits)):
            raise BadRequest(f"kv_bits is {bits!r}; it must be a pair like (8, 4), each 16, 8 or 4.")


@dataclass
class Parts:
    """What an engine is made of."""

    model: Model
    tokenizer: Tokenizer
    device: Device
    loop: Loopback
    weights: Weights
    computer: DeviceComputer | TieredComputer
    context: int
    budget: Budget
    pass_bytes: int
    kv_bits: tuple[int, int]

    @property
    def name(self) -> str:
        """What the model is called: its own name, else its file's."""
        named = self.model.file.metadata.get("general.name")
        return named if isinstance(named, str) and named else self.model.file.paths[0].stem

    def close(self) -> None:
        self.computer.close()
        self.weights.close()
        self.model.file.close()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(path: Path, options: Options) -> Parts:
    """Open, understand, check the budget, load. Raises a HeadraceError before loading when something is wrong."""
    if options.threads < 0 or options.threads > 1024:
        raise BadRequest(f"{options.threads} threads can't be had; give 1 to 1024, or 0 for one per core.")
    file = open_file(path, options)
    try:
        model = load_model(file)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        tokenizer.check_model(model.spec.vocab)
        return (_assemble_tiers if options.device in TORCH else _assemble)(model, tokenizer, options)
    except BaseException:
        file.close()
        raise


def open_file(path: Path, options: Options) -> ModelFile:
    """The model file, requantised when the options say so."""
    file = open_model(path)
    try:
        return file if options.requant is None else requantise(file, options.requant)
    except BaseException:
        file.close()
        raise


def context_of(model: Model, asked: int | None) -> int:
    if asked is None:
        return min(model.spec.context, DEFAULT_CONTEXT)
    if not 1 < asked <= model.spec.context:
        raise BadRequest(f"A context of {asked} is asked for; this model takes 2 to {model.spec.context} tokens (-c).")
    return asked


def _assemble(model: Model, tokenizer: Tokenizer, options: Options) -> Parts:
    if (options.device_ram, options.places, options.link) != (None, None, None):
        raise Unsupported(f"The device {options.device} has no memory of its own to place layers in (--device).")
    context = context_of(model, options.context)
    device = make_device(options.device, threads=options.threads or cores(), cpu=options.cpu)
    layers = model.layers
    order = Order(rows=options.rows, runs=options.runs, chunk=options.rows, sequences=options.sequences)
    budget = Budget(options.ram)
    pages = pages_for(context) * (options.caches or affordable_caches(device, model, context, options))
    streamed = place(budget, device, model, pages, options)
    weights = load_weights(device, model, streamed, options)
    cache = make_cache(device, model, pages, options)
    computer = DeviceComputer(device, layers, range(len(layers)), model.spec.width, weights, cache)
    stage = Stage(0, len(layers), len(layers))
    loop = Loopback(Head(pages, order), [(stage, computer)])
    return Parts(
        model, tokenizer, device, loop, weights, computer, context, budget, pass_bytes(device, model), options.kv_bits
    )


def _assemble_tiers(model: Model, tokenizer: Tokenizer, options: Options) -> Parts:
    """On a device in PyTorch, with host and disk behind it."""
    if options.host_device not in ("torch:cpu", "cpu"):
        raise Unsupported(f"The host can't compute with {options.host_device!r}; choose torch:cpu or cpu.")
    if options.kv_disk is not None:
        raise Unsupported(
            f"The device {options.device} can't keep caches on disk; keep them on the device or the host."
        )
    context, threads = context_of(model, options.context), options.threads or cores()
    near, host = make_torch(options.device, threads=threads), make_torch("torch:cpu", threads=threads)
    far = host if options.host_device == host.name else make_device(threads=threads, cpu=options.cpu)
    pages = pages_for(context) * (options.caches or 1)
    own = range(len(model.layers))
    here = (placing.DEVICE,) * len(own)
    job = placing.Job(model, own, here, options.kv_bits, pages, context, options.rows, options.runs)
    if options.places is None:
        fixed = Budget()
        placing.take_device(fixed, near, job)
        spare = None if options.device_ram is None else options.device_ram - fixed.used + fixed.items["weights"]
        job = replace(job, places=placing.fill(near, model, spare))
    else:
        placing.check_places(model.layers, options.places)
        job = replace(job, places=options.places)
    link = placing.make_link(near, options.link)
    try:
        budget = Budget(options.ram)
        budget.take("program", resident_now() + MARGIN)
        placing.take_host(budget, host, far, link, job)
        placing.take_device(Budget(options.device_ram), near, job)
        near.limit(options.device_ram)
        folder = options.packs or resolve().cache / "packs"
        computer = placing.assemble(near, host, far, link, job, folder, options.tell)
    except BaseException:
        link.close()
        raise
    order = Order(rows=options.rows, runs=options.runs, chunk=options.rows, sequences=options.sequences)
    loop = Loopback(Head(pages, order), [(Stage(0, len(own), len(own)), computer)])
    return Parts(
        model, tokenizer, near, loop, computer.weights, computer, context, budget, pass_bytes(near, model),
        options.kv_bits,
    )  # fmt: skip


def load_weights(
    device: Device, model: Model, streamed: list[int], options: Options, own: Sequence[int] | None = None
) -> Weights:
    """Layers (all, or a stage's ``own``) in memory, or the ``streamed`` of them read for each use from a file packed
    now or earlier."""
    own = range(len(model.layers)) if own is None else own
    if not streamed:
        return Resident(device, model, own)
    folder = options.packs or resolve().cache / "packs"
    blocks = [i for i in own if model.layers[i].kv is not None]
    packed = pack(device, model, blocks, folder, options.tell)
    return Streamed(device, model, own, streamed, packed)


def make_cache(
    device: Device, model: Model, pages: int, options: Options, own: Sequence[int] | None = None
) -> HostKV | DiskKV:
    """The KV cache of all layers, or of a stage's ``own``: in memory, or on disk where ``options`` say so."""
    shapes = stage_shapes(model, options, own)
    frames = kv_frames(model, shapes, pages, options)
    if options.kv_disk is None or frames is None:
        return HostKV(device, shapes, pages)
    return DiskKV(device, shapes, pages, frames, options.kv_disk)


def stage_shapes(model: Model, options: Options, own: Sequence[int] | None) -> dict[int, KVShape]:
    shapes = kv_shapes(model.layers, options.kv_bits)
    return {i: shape for i, shape in shapes.items() if own is None or i in own}


def kv_frames(model: Model, shapes: Mapping[int, KVShape], pages: int, options: Options) -> int | None:
    """Extents of the cache that are in memory; None: all. OverBudget when steps could need more than are given."""
    if options.kv_disk is None:
        if options.kv_frames is not None:
            raise BadRequest("Frames are for a KV cache on disk; say where (--kv-disk), or leave --kv-frames out.")
        return None
    together = min(options.rows, options.sequences)
    need = len(shapes), pages, together * pages_for(context_of(model, options.context)), options.sequences
    least, frames = least_frames(*need), options.kv_frames or usual_frames(*need)
    if frames < least:
        raise OverBudget(
            f"{frames} frames of cache in memory are too few: a run of {together} sequences needs {least} "
            "(--kv-frames); or use fewer rows a run, fewer sequences or a shorter context."
        )
    return None if frames >= len(shapes) * pages else frames


def cache_nbytes(device: Device, model: Model, pages: int, options: Options, own: Sequence[int] | None = None) -> int:
    """Memory of the KV cache; what is on disk must have room there (Unavailable)."""
    shapes = stage_shapes(model, options, own)
    frames = kv_frames(model, shapes, pages, options)
    if options.kv_disk is None or frames is None:
        return sum(device.page_nbytes(shape) for shape in shapes.values()) * pages
    if not options.kv_disk.is_dir():
        raise BadFile(f"{options.kv_disk}: there is no such folder for the KV cache; make it first.")
    extents, free = len(shapes) * pages, free_bytes(options.kv_disk)
    if extents * stride(device, shapes) > free:
        raise Unavailable(
            f"{options.kv_disk}: the KV cache takes {human(extents * stride(device, shapes))} and there are "
            f"{human(free)}; use another folder (--kv-disk), fewer sequences or a shorter context."
        )
    return frames * stride(device, shapes) + extents * BOOKS


def pass_bytes(device: Device, model: Model) -> int:
    """Bytes of weights one decode pass reads: everything but the embedding table, of which it reads a row."""
    table = model.layers[-1].tensors["output"]
    total = sum(layer_nbytes(device, layer) for layer in model.layers[1:])
    return total + (device.packed_nbytes(table.fmt, table.n, table.k) if table.shares else 0)


def held_nbytes(device: Device, model: Model, own: Sequence[int]) -> dict[int, int]:
    """Bytes of each of these layers in memory; a shared tensor counts where its owner isn't among them."""
    keys = {model.layers[i].key for i in own}
    sizes = {}
    for i in own:
        layer = model.layers[i]
        apart = [p for p in layer.tensors.values() if p.shares is not None and p.shares[0] not in keys]
        sizes[i] = layer_nbytes(device, layer) + sum(device.packed_nbytes(p.fmt, p.n, p.k) for p in apart)
    return sizes


def place(
    budget: Budget, device: Device, model: Model, pages: int, options: Options, own: Sequence[int] | None = None
) -> list[int]:
    """Which layers must stream for everything to fit the budget, spread evenly; counts it all before a byte is loaded.

    own: a stage's layers (None: all). Each stage has a budget of its own.

    OverBudget, with the numbers, when not even the smallest placement fits.
    """
    bits = f"{options.kv_bits[0]}/{options.kv_bits[1]}"
    own = range(len(model.layers)) if own is None else own
    layers = [model.layers[i] for i in own]
    per_page = page_nbytes(device, layers, options.kv_bits)
    budget.take("program", resident_now() + MARGIN, "give a larger --ram")
    budget.take(
        "working buffers", scratch_nbytes(device, model, options.rows, layers), "fewer rows a run would take less"
    )
    remedy = f"a token of context takes {human(per_page / PAGE)} at {bits} KV bits (-c, --kv-bits, --kv-disk)"
    budget.take("KV cache", cache_nbytes(device, model, pages, options, own), remedy)
    sizes = held_nbytes(device, model, own)
    total = sum(sizes.values())
    if budget.left is None or total <= budget.left:
        budget.take("weights", total)
        return []
    blocks = [i for i in own if model.layers[i].kv is not None]
    for count in range(2, len(blocks) + 1):
        streamed = [blocks[i] for i in evenly(count, len(blocks))]
        buffers = min(BUFFERS, count) * max(extent_nbytes(device, model.layers[i]) for i in streamed)
        stay = total - sum(sizes[i] for i in streamed)
        if stay + buffers <= budget.left:
            budget.take("resident weights", stay)
            budget.take("streaming buffers", buffers)
            return streamed
    need = budget.used + total - sum(sizes[i] for i in blocks) + BUFFERS * max((sizes[i] for i in blocks), default=0)
    ledger = ", ".join(f"{name} {human(size)}" for name, size in budget.items.items())
    raise OverBudget(
        f"Even with every block streamed from disk this needs {human(need)} and the budget is "
        f"{human(options.ram or 0)} ({ledger}, and {BUFFERS} layers of weights at a time); a shorter context (-c), "
        "fewer KV bits (--kv-bits 8/4) or a larger --ram would fit."
    )


def affordable_caches(device: Device, model: Model, context: int, options: Options) -> int:
    """How many sequences' caches to have room for: from half of what the weights leave, or a third if they stream."""
    limit = options.ram if options.ram is not None else system.memory().usable
    if options.kv_disk is not None:
        return on_disk_caches(device, model, context, options)
    if limit is None:
        return 1
    spare = limit - sum(layer_nbytes(device, layer) for layer in model.layers)
    share = max(spare // 2, limit // 3)
    return max(
        1, min(options.sequences, share // (pages_for(context) * page_nbytes(device, model.layers, options.kv_bits)))
    )


def on_disk_caches(device: Device, model: Model, context: int, options: Options) -> int:
    """How many sequences' caches half of the free disk holds."""
    shapes = kv_shapes(model.layers, options.kv_bits)
    each = len(shapes) * pages_for(context) * stride(device, shapes)
    return max(1, min(options.sequences, free_bytes(options.kv_disk or Path()) // 2 // max(1, each)))


def extent_nbytes(device: Device, layer: Layer) -> int:
    """Bytes of a layer in a packed file, in memory while it is streamed."""
    return round_up(layer_nbytes(device, layer))


def scratch_nbytes(device: Device, model: Model, rows: int, layers: Sequence[Layer] | None = None) -> int:
    """Working memory of the device for runs of so many rows through these layers (or all), residual stream included."""
    width, layers = model.spec.width, model.layers if layers is None else layers
    shapes = [{n: (p.fmt, p.n, p.k) for n, p in layer.tensors.items()} for layer in layers]
    most = max(device.scratch_nbytes(layer.ops, width, rows, s) for layer, s in zip(layers, shapes, strict=True))
    return most + 4 * width * rows


def resident_now() -> int:
    """Resident bytes of this process, 0 where the system doesn't say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
