"""Layers onto a device, the host and the disk as their Places say: checked, counted, then loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import Unsupported
from headrace.kernels.device import PAGE, Device, KVShape
from headrace.kernels.ops import Attend
from headrace.kernels.split import split
from headrace.memory.ahead import BUFFERS, whole_nbytes
from headrace.memory.budget import Budget
from headrace.memory.buffers import round_up
from headrace.memory.device_weights import DeviceKV, Tiered
from headrace.memory.kv import HostKV, kv_shapes
from headrace.memory.kv_disk import DiskKV, EitherKV, on_disk_nbytes, usual_frames
from headrace.memory.link import PIECE, Link, Pace
from headrace.memory.slots import pages_for
from headrace.memory.stream import Streamed, pack
from headrace.memory.weights import Resident, Weights, resident_nbytes, tensor_nbytes
from headrace.model.layers import Layer, Model
from headrace.plan.plan import Place, spread
from headrace.run.compute import DeviceComputer
from headrace.run.tiers import TieredComputer

if TYPE_CHECKING:
    from headrace.kernels.torch_device import TorchDevice

TIERS = ("device", "host", "disk")
DEVICE = Place("device", "device", "device", "device")
AHEAD = 2
"""Copies of the residual rows a run has at a time, while cancelled ones are taken out."""


def check_places(layers: Sequence[Layer], places: Sequence[Place]) -> None:
    """Unsupported, naming the layer, for a placement that this program can't carry out."""
    if len(places) != len(layers):
        raise Unsupported(f"The plan places {len(places)} layers and the model has {len(layers)}; make one for it.")
    for layer, p in zip(layers, places, strict=True):
        cache, at_host = layer.kv is not None, p.compute == "host"
        for wrong, why in (
            (p.weights not in TIERS or p.compute not in TIERS[:2],
             "weights lie in one of device, host, disk, and device or host computes"),
            (at_host and p.weights == "device", "weights for the host's use must lie on the host or the disk"),
            (cache and p.kv not in TIERS, "its cache can lie on the device, the host or the disk"),
            (cache and p.attend != ("device" if p.kv == "device" else "host"),
             "its cache is attended where it lies, or at the host if that is the disk; caches aren't fetched"),
            (cache and at_host and p.kv == "device", "a layer computed at the host needs its cache there"),
        ):  # fmt: skip
            if wrong:
                raise Unsupported(f"Layer {layer.key} can't be placed as {p}: {why}.")


@dataclass(frozen=True)
class Job:
    """What is to be placed: a stage's layers ``own``, and the sizes of its work."""

    model: Model
    own: Sequence[int]
    places: Sequence[Place]
    kv_bits: tuple[int, int]
    pages: int
    context: int
    rows: int
    runs: int
    sequences: int = 64
    kv_disk: Path | None = None
    """Folder of caches on disk."""
    rest: str = "device"
    """Where residual rows wait between layers."""
    overlap: bool = True
    pin: bool = False

    def where(self, weights: str, compute: str) -> list[int]:
        """Own layers with this home of weights and this place of computing."""
        return [i for i in self.own if (self.places[i].weights, self.places[i].compute) == (weights, compute)]

    def caches(self, kv: str, compute: str) -> dict[int, KVShape]:
        """Of own layers computed there, the caches that lie there."""
        shapes, places = kv_shapes(self.model.layers, self.kv_bits), self.places
        return {i: shapes[i] for i in self.own if i in shapes and (places[i].kv, places[i].compute) == (kv, compute)}

    def away(self, compute: str) -> list[int]:
        """Own layers computed there whose cache is on host or disk."""
        return sorted([*self.caches("host", compute), *self.caches("disk", compute)])

    def frames(self, compute: str) -> int:
        """Of the caches on disk of layers computed there."""
        together = min(self.rows, self.sequences) * pages_for(self.context)
        return usual_frames(len(self.caches("disk", compute)), self.pages, together, self.sequences)

    def cache(self, device: Device, compute: str) -> EitherKV:
        """Caches on host and disk of layers computed there, attended by the host's ``device``."""
        disk, on_disk = None, self.caches("disk", compute)
        if on_disk:
            assert self.kv_disk is not None
            disk = DiskKV(device, on_disk, self.pages, self.frames(compute), self.kv_disk, self.overlap)
        return EitherKV(HostKV(device, self.caches("host", compute), self.pages), disk)

    def cache_nbytes(self, device: Device, compute: str) -> int:
        """Host memory of ``cache``; what is on disk must have room there (Unavailable)."""
        held = self.pages * sum(map(device.page_nbytes, self.caches("host", compute).values()))
        on_disk = self.caches("disk", compute)
        if not on_disk:
            return held
        return held + on_disk_nbytes(device, on_disk, self.pages, self.frames(compute), self.kv_disk)


def take_device(budget: Budget, near: TorchDevice, job: Job) -> None:
    """Count everything the device holds; OverBudget with the ledger when it doesn't fit."""
    model, layers, rows = job.model, job.model.layers, -(-job.rows // 16) * 16
    crossing = job.where("host", "device") + job.where("disk", "device")
    mine = job.where("device", "device") + crossing
    budget.take("libraries", near.library_nbytes)
    budget.take("weights", resident_nbytes(near, model, job.where("device", "device")), "place fewer layers there")
    largest = max((whole_nbytes(near, layers[i]) for i in crossing), default=0)
    budget.take("weight buffers", min(BUFFERS, len(crossing)) * largest)
    pages = job.pages * sum(map(near.page_nbytes, job.caches("device", "device").values()))
    budget.take("KV cache", pages, "place caches on the host")
    scratch = [_scratch(near, layers[i], model.spec.width, job.rows) for i in mine]
    budget.take("working buffers", max(scratch, default=0), "fewer rows a run would take less")
    budget.take("activations", AHEAD * 4 * rows * model.spec.width * job.runs)
    budget.take("slot lists", _tables(near, job, job.caches("device", "device")))


def take_host(budget: Budget, host: TorchDevice, far: Device, link: Link, job: Job) -> None:
    """Count everything beside the program that the host holds."""
    model, layers, width = job.model, job.model.layers, job.model.spec.width
    near_host, far_host, _ = _host_layers(job, far is host)
    budget.take("weights", resident_nbytes(host, model, near_host) + resident_nbytes(far, model, far_host))
    buffers = 0
    for device, disk in ((host, job.where("disk", "device")), (far, job.where("disk", "host"))):
        extents = [round_up(whole_nbytes(device, layers[i])) for i in disk]
        buffers += min(BUFFERS, len(disk)) * max(extents, default=0)
    budget.take("streaming buffers", buffers)
    staged = [tensor_nbytes(host, p) for i in job.where("device", "device") for p in layers[i].tensors.values()]
    budget.take("loading", max(staged, default=0))
    budget.take("KV cache", job.cache_nbytes(host, "device") + job.cache_nbytes(far, "host"))
    scratch = [_scratch(far, layers[i], width, job.rows) for i in job.where("host", "host") + job.where("disk", "host")]
    for i in job.away("device"):
        ops = [op for part in split(layers[i].ops) if not part.near for op in part.ops]
        scratch.append(host.scratch_nbytes(ops, width, job.rows, {}))
    budget.take("working buffers", max(scratch, default=0) + AHEAD * 4 * job.rows * width * job.runs)
    budget.take("slot lists", _tables(host, job, job.away("device")))
    budget.take("pinned buffers", link.pinned_nbytes)


def _host_layers(job: Job, alike: bool) -> tuple[list[int], list[int], list[int]]:
    """Layers in host memory in the device's layout, in the host's own, and those the host streams.

    alike: the two layouts are one; then a table shared between both kinds is held once, unless some stream.
    """
    near, far, streamed = job.where("host", "device"), job.where("host", "host"), job.where("disk", "host")
    return (near + far, [], []) if alike and not streamed else (near, far, streamed)


def _tables(device: TorchDevice, job: Job, attended: Iterable[int]) -> int:
    """Slot lists of the runs of a block, for each window that the layers attended there have."""
    ops = [op for i in attended for op in job.model.layers[i].ops if isinstance(op, Attend)]
    each = device.tables_nbytes(job.rows, job.context, job.pages * PAGE)
    return len({op.window for op in ops}) * job.runs * each


def _scratch(device: Device, layer: Layer, width: int, rows: int) -> int:
    return device.scratch_nbytes(layer.ops, width, rows, {n: (p.fmt, p.n, p.k) for n, p in layer.tensors.items()})


def fill(near: TorchDevice, model: Model, room: int | None, kv_disk: bool = False) -> tuple[Place, ...]:
    """A plain placement: what fits ``room`` bytes stays on the device, the rest crosses from the host, spread.

    The blocks go first, then the ends. kv_disk: caches lie on the disk. The searched plan does better.
    """
    count = len(model.layers)
    sizes = [whole_nbytes(near, layer) for layer in model.layers]
    crossing = Place("host", "device", "device", "device")
    for out in range(count + 1):
        blocks = max(0, count - 2 - out)
        middle = spread([(DEVICE, blocks), (crossing, count - 2 - blocks)])
        ends = [crossing if out > count - 2 + i else DEVICE for i in range(2)]
        places = (ends[0], *middle, ends[1])
        stay = resident_nbytes(near, model, (i for i, p in enumerate(places) if p is DEVICE))
        buffers = min(BUFFERS, out) * max((s for s, p in zip(sizes, places, strict=True) if p is crossing), default=0)
        if room is None or stay + buffers <= room:
            break
    return tuple(replace(p, kv="disk", attend="host") for p in places) if kv_disk else places


def make_link(near: TorchDevice, pace: Pace | None) -> Link:
    """The link of a device: its two movers, perhaps paced."""
    to_device, to_host = near.movers(PIECE)
    return Link({"to_device": to_device, "to_host": to_host}, pace)


def assemble(
    near: TorchDevice, host: TorchDevice, far: Device, link: Link, job: Job, packs: Path,
    tell: Callable[[str], None] | None = None,
) -> TieredComputer:  # fmt: skip
    """Pack what lies on disk, load, and join. host: the host's device in PyTorch; far: the one that computes there."""
    model, layers = job.model, job.model.layers
    near_host, far_host, far_disk = _host_layers(job, far is host)
    hosted = Resident(host, model, near_host)
    disk = job.where("disk", "device")
    packed = pack(host, model, disk, packs, tell) if disk else None
    homes = {i: job.places[i].weights for i in job.own if job.places[i].compute == "device"}
    if job.pin:
        near.pin([hosted.arena])
    near_weights = Tiered(near, host, model, homes, link, hosted, packed, ahead=job.overlap)
    far_weights: Weights = hosted if far is host else Resident(far, model, far_host)
    if far_disk:
        streams = pack(far, model, far_disk, packs, tell)
        far_weights = Streamed(far, model, far_host + far_disk, far_disk, streams, ahead=job.overlap)
    far_own = [i for i in job.own if job.places[i].compute == "host"]
    there = DeviceComputer(far, layers, far_own, model.spec.width, far_weights, job.cache(far, "host"))
    near_cache = DeviceKV(near, job.caches("device", "device"), job.pages)
    return TieredComputer(layers, job.own, job.places, near, near_weights, near_cache, there, host,
                          job.cache(host, "device"), link, job.rest)  # fmt: skip
