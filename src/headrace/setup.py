"""From a path and options to running parts: the one place where everything is put together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.cluster.loopback import Loopback
from headrace.errors import BadRequest
from headrace.formats.index import open_model
from headrace.kernels.device import PAGE, Device
from headrace.kernels.dispatch import make_device
from headrace.memory.budget import Budget, human
from headrace.memory.kv import HostKV, kv_shapes, page_nbytes
from headrace.memory.slots import pages_for
from headrace.memory.weights import Resident, Weights, layer_nbytes
from headrace.model.layers import Model, load_model
from headrace.run.compute import DeviceComputer
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Options:
    """How to run a model. context None: the model's, at most 4096 (a long context is a lot of memory to reserve).

    threads 0: one per core this process may use. ram: bytes, all that may be used; None: no limit is kept.
    sequences: how many may be computed at a time; they share the cache of ``context`` tokens times ``caches``.
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


@dataclass
class Parts:
    """What an engine is made of."""

    model: Model
    tokenizer: Tokenizer
    device: Device
    loop: Loopback
    weights: Weights
    computer: DeviceComputer
    context: int
    budget: Budget
    pass_bytes: int

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
    file = open_model(path)
    try:
        model = load_model(file)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        tokenizer.check_model(model.spec.vocab)
        return _assemble(model, tokenizer, options)
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
    context = context_of(model, options.context)
    device = make_device(options.device, threads=options.threads or cores(), cpu=options.cpu)
    layers = model.layers
    order = Order(rows=options.rows, chunk=options.rows, sequences=options.sequences)
    pages = options.caches * pages_for(context)
    budget = Budget(options.ram)
    _count(budget, device, model, pages, options)
    weights = Resident(device, model, range(len(layers)))
    cache = HostKV(device, kv_shapes(layers, options.kv_bits), pages)
    computer = DeviceComputer(device, layers, range(len(layers)), model.spec.width, weights, cache)
    stage = Stage(0, len(layers), len(layers))
    loop = Loopback(Head(pages, order), [(stage, computer)])
    return Parts(model, tokenizer, device, loop, weights, computer, context, budget, pass_bytes(device, model))


def pass_bytes(device: Device, model: Model) -> int:
    """Bytes of weights one decode pass reads: everything but the embedding table, of which it reads a row."""
    table = model.layers[-1].tensors["output"]
    total = sum(layer_nbytes(device, layer) for layer in model.layers[1:])
    return total + (device.packed_nbytes(table.fmt, table.n, table.k) if table.shares else 0)


def _count(budget: Budget, device: Device, model: Model, pages: int, options: Options) -> None:
    """Everything the run will take, before a byte of it is loaded."""
    per_page = page_nbytes(device, model.layers, options.kv_bits)
    remedy = f"a token of context takes {human(per_page / PAGE)} at {options.kv_bits[0]}/{options.kv_bits[1]} KV bits"
    budget.take("program", resident_now())
    budget.take("weights", sum(layer_nbytes(device, layer) for layer in model.layers))
    scratch = max(
        device.scratch_nbytes(
            layer.ops, model.spec.width, options.rows, {n: (p.fmt, p.n, p.k) for n, p in layer.tensors.items()}
        )
        for layer in model.layers
    )
    budget.take("working buffers", scratch)
    budget.take("KV cache", pages * per_page, remedy)


def resident_now() -> int:
    """Resident bytes of this process, 0 where the system doesn't say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
