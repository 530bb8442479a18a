"""From a path and options to running parts: the one place where everything is put together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import drafting
from headrace.cluster.loopback import Loopback
from headrace.config import resolve
from headrace.errors import BadRequest, Unsupported
from headrace.formats.index import named
from headrace.kernels.device import Device
from headrace.kernels.dispatch import TORCH, make_device, make_torch
from headrace.memory.budget import Budget
from headrace.memory.slots import pages_for
from headrace.memory.weights import Weights
from headrace.model.layers import Model, load_model
from headrace.options import Options, batch_threads, cores
from headrace.placement import (
    MARGIN,
    Sizes,
    affordable_caches,
    cache_pages,
    context_of,
    load_weights,
    make_cache,
    open_file,
    pass_bytes,
    place,
    resident_now,
)
from headrace.run import placing
from headrace.run.compute import DeviceComputer
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.spill import Spilled
from headrace.run.stage import Stage
from headrace.run.tiers import TieredComputer
from headrace.speculate.serial import Serial
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.planning import Expect


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
    spill: Spilled | None = field(default=None, kw_only=True)
    draft: drafting.Draft | None = None
    expect: Expect | None = None
    """What the plan that decided should take, for any work; None where nothing was decided."""

    @property
    def name(self) -> str:
        """What the model is called: its own name, else its file's."""
        return named(self.model.file)

    def close(self) -> None:
        self.computer.close()
        self.weights.close()
        self.model.file.close()
        if self.spill is not None:
            self.spill.close()
        if self.draft is not None:
            self.draft.close()


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


def _assemble(model: Model, tokenizer: Tokenizer, options: Options) -> Parts:
    if (options.device_ram, options.link) != (None, None):
        raise Unsupported(f"The device {options.device} has no memory of its own to place layers in (--device).")
    context = context_of(model, options.context)
    threads, batch = options.threads or cores(), batch_threads(options)
    device = make_device(options.device, threads=threads, cpu=options.cpu, batch=batch)
    options, expect = _decided(device, model, options)
    layers = model.layers
    wish = drafting.wish_of(options)
    policy = drafting.policy_of(wish)
    order = drafting.order_of(wish, order_of(options))
    budget = Budget(options.ram)
    caches = options.caches or affordable_caches(device, model, context, options)
    pages = pages_for(context + policy.most_guesses) * caches
    pages = pages if options.slots is None else max(pages_for(options.slots), pages // caches)
    draft = drafting.draft_of(wish, model, tokenizer, replace(options, caches=caches), context)
    with ExitStack() as held:  # closed if anything goes wrong from here on
        if draft is not None:
            held.callback(draft.close)
            draft.take(budget, device, options.rows)
        sizes = Sizes(device, model)
        if draft is not None and not draft.own:  # what drafts stays in memory
            sizes.blocks = [i for i in sizes.blocks if i not in draft.numbers]
        streamed = place(budget, device, model, pages, options, sizes=sizes)
        if streamed and isinstance(policy, Serial):
            policy.stream()
        weights = load_weights(device, model, streamed, options)
        held.callback(weights.close)
        cache = make_cache(device, model, pages, options)
        computer = DeviceComputer(device, layers, range(len(layers)), model.spec.width, weights, cache)
        spill = spilled(computer, model, options)
        stages = [(Stage(0, len(layers), len(layers)), spill or computer)]
        if draft is not None:
            stages.append(draft.load(device, weights))
        held.pop_all()
    drafter = drafting.drafter_of(wish, draft, policy)
    loop = Loopback(Head(pages, order, policy), stages, drafter, drafts=len(stages) - 1)
    return Parts(
        model, tokenizer, device, loop, weights, computer, context, budget, pass_bytes(device, model), options.kv_bits,
        draft, expect, spill=spill,
    )  # fmt: skip


def _decided(device: Device, model: Model, options: Options) -> tuple[Options, Expect | None]:
    """The planner has its say where it was asked and there is a limit; its modules take a while to import."""
    if options.choice is None or options.drafter or (options.ram is None and options.places is None):
        return options, None
    from headrace.planning import decide

    return decide(device, model, options)


def _assemble_tiers(model: Model, tokenizer: Tokenizer, options: Options) -> Parts:
    """On a device in PyTorch, with host and disk behind it."""
    if drafting.wish_of(options):
        raise Unsupported(f"The device {options.device} doesn't guess ahead; use cpu, or leave the drafter out.")
    if options.host_device not in ("torch:cpu", "cpu"):
        raise Unsupported(f"The host can't compute with {options.host_device!r}; choose torch:cpu or cpu.")
    context, threads = context_of(model, options.context), options.threads or cores()
    near, host = make_torch(options.device, threads=threads), make_torch("torch:cpu", threads=threads)
    far = host if options.host_device == host.name else make_device(threads=threads, cpu=options.cpu)
    pages = cache_pages(near, model, context, replace(options, ram=options.device_ram))
    own = range(len(model.layers))
    here = (placing.DEVICE,) * len(own)
    job = placing.Job(
        model, own, here, options.kv_bits, pages, context, options.rows, options.runs, options.sequences,
        options.kv_disk, options.activations or "device", options.overlap, options.pin_weight,
    )  # fmt: skip
    if options.places is None:
        fixed = Budget()
        placing.take_device(fixed, near, job)
        spare = None if options.device_ram is None else options.device_ram - fixed.used + fixed.items["weights"]
        job = replace(job, places=placing.fill(near, model, spare, options.kv_disk is not None))
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
    order = order_of(options)
    spill = spilled(computer, model, options)
    loop = Loopback(Head(pages, order), [(Stage(0, len(own), len(own)), spill or computer)])
    return Parts(
        model, tokenizer, near, loop, computer.weights, computer, context, budget, pass_bytes(near, model),
        options.kv_bits, spill=spill,
    )  # fmt: skip


def order_of(options: Options) -> Order:
    o = options
    return Order(rows=o.rows, runs=o.runs, chunk=o.rows, sequences=o.sequences, nexts=o.nexts or 0)


def spilled(computer: DeviceComputer | TieredComputer, model: Model, options: Options) -> Spilled | None:
    """The computer with residual rows on the disk, where the options say so."""
    if options.activations not in (None, "device", "host", "disk"):
        raise Unsupported(f"Activations can't lie on {options.activations!r}; choose device, host or disk.")
    if options.activations != "disk":
        return None
    folder = options.kv_disk or options.packs or resolve().cache
    folder.mkdir(parents=True, exist_ok=True)
    return Spilled(computer, len(model.layers), options.rows, model.spec.width, 2 * options.runs, folder)
