"""What a model takes of the memory, and where each part of it lies: counted before a byte is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrace import system
from headrace.config import resolve
from headrace.errors import BadRequest, OverBudget, Unsupported
from headrace.formats.files import free_bytes
from headrace.formats.index import ModelFile, open_model
from headrace.formats.requant import requantise
from headrace.formats.sparse import sparsely
from headrace.kernels.device import F32, PAGE, Device, KVShape
from headrace.memory.ahead import BUFFERS
from headrace.memory.budget import Budget, human
from headrace.memory.buffers import round_up
from headrace.memory.kv import HostKV, kv_shapes, page_nbytes
from headrace.memory.kv_disk import DiskKV, least_frames, on_disk_nbytes, stride, usual_frames
from headrace.memory.slots import pages_for
from headrace.memory.stream import Streamed, evenly, pack
from headrace.memory.weights import Resident, Weights, layer_nbytes
from headrace.model.layers import Layer, Model
from headrace.options import DEFAULT_CONTEXT, Options
from headrace.run.inputs import WORD, squares_of_inputs

MARGIN = 48 << 20
"""What Python and its libraries still take after the model file was read: tables of the loop, text, NumPy arrays."""


def open_file(path: Path, options: Options) -> ModelFile:
    """The model file, requantised or with sparse attention when the options say so."""

    def inputs(file: ModelFile) -> Mapping[str, F32]:
        return squares_of_inputs(file, None if options.ram is None else options.ram - resident_now())

    file = open_model(path)
    try:
        file = file if options.requant is None else requantise(file, options.requant, (WORD, inputs))
        return sparsely(file, options.attn_sparsity, options.context or DEFAULT_CONTEXT)
    except BaseException:
        file.close()
        raise


def context_of(model: Model, asked: int | None) -> int:
    if asked is None:
        return min(model.spec.context, DEFAULT_CONTEXT)
    if not 1 < asked <= model.spec.context:
        raise BadRequest(f"A context of {asked} is asked for; this model takes 2 to {model.spec.context} tokens (-c).")
    return asked


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
    return Streamed(device, model, own, streamed, packed, ahead=options.overlap)


def make_cache(
    device: Device, model: Model, pages: int, options: Options, own: Sequence[int] | None = None
) -> HostKV | DiskKV:
    """The KV cache of all layers, or of a stage's ``own``: in memory, or on disk where ``options`` say so."""
    shapes = stage_shapes(model, options, own)
    frames = kv_frames(model, shapes, pages, options)
    if options.kv_disk is None or frames is None:
        return HostKV(device, shapes, pages)
    return DiskKV(device, shapes, pages, frames, options.kv_disk, options.overlap)


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


class Sizes:
    """What layers of a model (all, or a stage's ``own``) take, each size looked up once however often they're placed.

    program: bytes that are used already, with what the libraries still take.
    """

    def __init__(self, device: Device, model: Model, own: Sequence[int] | None = None) -> None:
        self.device, self.model = device, model
        self.own = range(len(model.layers)) if own is None else own
        self.layers = [model.layers[i] for i in self.own]
        self.program = resident_now() + MARGIN
        self.held = held_nbytes(device, model, self.own)
        self.blocks = [i for i in self.own if model.layers[i].kv is not None]
        self.extents = {i: extent_nbytes(device, model.layers[i]) for i in self.blocks}
        self.total = sum(self.held.values())
        self._scratch: dict[int, int] = {}
        self._cache: dict[tuple[int, int], tuple[dict[int, KVShape], int, int]] = {}

    def scratch(self, rows: int) -> int:
        if rows not in self._scratch:
            self._scratch[rows] = scratch_nbytes(self.device, self.model, rows, self.layers)
        return self._scratch[rows]

    def cache(self, bits: tuple[int, int]) -> tuple[dict[int, KVShape], int, int]:
        """Shapes of the layers' caches, bytes of a page of all of them, and of a page's place on disk."""
        if bits not in self._cache:
            kv = {i: self.model.layers[i].kv for i in self.own}
            shapes = {i: replace(s, k_bits=bits[0], v_bits=bits[1]) for i, s in kv.items() if s is not None}
            page = sum(self.device.page_nbytes(shape) for shape in shapes.values())
            self._cache[bits] = shapes, page, stride(self.device, shapes)
        return self._cache[bits]

    def cached(self, pages: int, options: Options) -> int:
        """Memory of the KV cache; what is on disk must have room there (Unavailable)."""
        shapes, page, _ = self.cache(options.kv_bits)
        frames = kv_frames(self.model, shapes, pages, options)
        if options.kv_disk is None or frames is None:
            return page * pages
        return on_disk_nbytes(self.device, shapes, pages, frames, options.kv_disk)

    def working(self, options: Options) -> int:
        """Registers of a run, residual rows of the others of a block, and logits of every row that may want them."""
        ends = self.model.layers[-1] in self.layers
        logits = 4 * self.model.spec.vocab * min(options.rows, options.sequences) if ends else 0
        return self.scratch(options.rows) + 4 * self.model.spec.width * options.rows * (options.runs - 1) + logits

    def streaming(self, streamed: Sequence[int]) -> tuple[int, int]:
        """(bytes of what stays, bytes of the buffers) when these are streamed."""
        buffers = min(BUFFERS, len(streamed)) * max((self.extents[i] for i in streamed), default=0)
        return self.total - sum(self.held[i] for i in streamed), buffers

    def streamed(self, left: int) -> list[int] | None:
        """The fewest blocks that must stream for the weights to fit into ``left`` bytes, spread evenly; None: never."""
        largest = max((self.held[i] for i in self.blocks), default=0)
        for count in range(max(2, -(-(self.total - left) // max(1, largest))), len(self.blocks) + 1):
            some = [self.blocks[i] for i in evenly(count, len(self.blocks))]
            if sum(self.streaming(some)) <= left:
                return some
        return None


def place(
    budget: Budget,
    device: Device,
    model: Model,
    pages: int,
    options: Options,
    own: Sequence[int] | None = None,
    sizes: Sizes | None = None,
) -> list[int]:
    """Which layers must stream for everything to fit the budget, spread evenly; counts it all before a byte is loaded.
    Those that ``options.places`` put on the disk, where it is given.

    own: a stage's layers (None: all). Each stage has a budget of its own. sizes: when they are known already.

    OverBudget, with the numbers, when not even the smallest placement fits.
    """
    bits = f"{options.kv_bits[0]}/{options.kv_bits[1]}"
    sizes = sizes or Sizes(device, model, own)
    budget.take("program", sizes.program, "give a larger --ram")
    budget.take("working buffers", sizes.working(options), "fewer rows a run would take less")
    token = human(sizes.cache(options.kv_bits)[1] / PAGE)
    remedy = f"a token of context takes {token} at {bits} KV bits (-c, --kv-bits, --kv-disk)"
    budget.take("KV cache", sizes.cached(pages, options), remedy)
    if options.places is not None:
        streamed: list[int] | None = placed_on_disk(model, options, sizes.blocks)
    elif budget.left is None or sizes.total <= budget.left:
        streamed = []
    else:
        streamed = sizes.streamed(budget.left)
    if streamed is not None:
        stay, buffers = sizes.streaming(streamed)
        budget.take("resident weights" if streamed else "weights", stay, "let more layers stream")
        if streamed:
            budget.take("streaming buffers", buffers, "let more layers stream")
        return streamed
    need = budget.used + sum(sizes.streaming(sizes.blocks))
    ledger = ", ".join(f"{name} {human(size)}" for name, size in budget.items.items())
    raise OverBudget(
        f"Even with every block streamed from disk this needs {human(need)} and the budget is "
        f"{human(options.ram or 0)} ({ledger}, and {BUFFERS} layers of weights at a time); a shorter context (-c), "
        "fewer KV bits (--kv-bits 8/4) or a larger --ram would fit."
    )


def placed_on_disk(model: Model, options: Options, blocks: Sequence[int]) -> list[int]:
    """The layers that ``options.places`` let stream; Unsupported for what this device can't do."""
    places = options.places or ()
    if len(places) != len(model.layers):
        raise Unsupported(
            f"The plan places {len(places)} layers and the model has {len(model.layers)}; make a plan for this model."
        )
    for i, (layer, p) in enumerate(zip(model.layers, places, strict=True)):
        if p.compute != "host" or p.weights not in ("host", "disk") or p.kv not in ("host", "disk"):
            raise Unsupported(f"Layer {layer.key} can't be placed as {p}: the CPU computes from host and disk.")
        if p.weights == "disk" and layer.kv is None and i not in blocks:
            raise Unsupported(f"Layer {layer.key} can't be placed as {p}: only blocks are streamed.")
    return [i for i in blocks if places[i].weights == "disk"]


def cache_pages(device: Device, model: Model, context: int, options: Options) -> int:
    """Pages of cache for all sequences together; a single one always has room for the whole context."""
    if options.slots is not None:
        return max(pages_for(options.slots), pages_for(context))
    return pages_for(context) * (options.caches or affordable_caches(device, model, context, options))


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
