"""A stage's arithmetic on a device with memory of its own: each layer computed where its Place says.

Residual rows stay on the device from one of its layers to the next. Everything that crosses goes through the link.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.device import F32, Rows, Weight
from headrace.kernels.split import Part, split
from headrace.memory.device_weights import Tiered
from headrace.memory.link import Direction, Link
from headrace.memory.weights import Weights
from headrace.model.layers import Layer
from headrace.plan.plan import Place
from headrace.run.compute import Cache, DeviceComputer, Traffic, from_disk
from headrace.run.sample import choose
from headrace.run.stage import Computer, Run

if TYPE_CHECKING:
    from headrace.kernels.torch_device import TorchDevice, TorchRows

Tensor: TypeAlias = Any


@dataclass
class _Guest:
    """What the device holds of a run: its live rows' table, and their residual stream while it is there."""

    run: weakref.ref[Run]
    live: list[int]
    rows: Rows
    near: TorchRows
    far: TorchRows | None = None
    x: Tensor | None = None


class TieredComputer(Computer):
    """Carries Steps of ``own`` layers: near ones on a device in PyTorch, with ``weights`` and ``cache``, the others by
    ``far``, on the host.

    places: of every layer of the model. host, host_cache: the host's device in PyTorch, for caches on host or disk
    whose layers are near, and those caches. rest: where residual rows wait between layers, if not on the device.
    """

    def __init__(
        self, layers: Sequence[Layer], own: Sequence[int], places: Sequence[Place], near: TorchDevice, weights: Weights,
        cache: Cache, far: DeviceComputer, host: TorchDevice, host_cache: Cache, link: Link, rest: str = "device",
    ) -> None:  # fmt: skip
        self.device: TorchDevice = near
        self.weights, self.cache, self.link = weights, cache, link
        self.last, self.end, self.width = len(layers) - 1, max(own) + 1, far.width
        self._far = far
        self._host, self._host_cache = host, host_cache
        self._parts: dict[int, tuple[Part, ...]] = {}
        self._here = {i for i in own if places[i].kv == "device"}
        """Layers attended on the device."""
        for i in own:
            if places[i].compute == "device":
                self._parts[i] = (Part(True, layers[i].ops, ()),) if i in self._here else split(layers[i].ops)
        self._guests: dict[int, _Guest] = {}
        self._rest = rest
        self.waited = 0.0
        """Seconds that steps waited for rows to cross."""
        self._holding = -1
        self._context: AbstractContextManager[Mapping[str, Weight]] | None = None
        self._held: Mapping[str, Weight] = {}

    def traffic(self) -> Traffic:
        near = self.weights
        caches = [getattr(cache, "disk", None) for cache in (self._far.cache, self._host_cache)]
        disk = from_disk((getattr(near, "disk", None), self._far.weights, *caches))
        waited = disk.waited + self.waited + (near.waited if isinstance(near, Tiered) else 0.0)
        return Traffic(True, disk.read, sum(self.link.sent.values()), waited)

    def step(self, layer: int, run: Run) -> None:
        """Compute one layer of a run's live rows; see ``run.stage.Computer``."""
        if layer == self.last and run.rows.wanted.shape[0] == 0:
            return
        if layer not in self._parts:
            self._release()
            self._to_host(run)
            self._far.step(layer, run)
            return
        self._far.release()
        logits = self._step_near(layer, run, self._hold(layer))
        if logits is not None:
            run.choices = choose(self.device, logits, run)
        elif layer == self.end - 1 or self._rest != "device":
            self._to_host(run)

    # --- on the device ----------------------------------------------------------------------------------

    def _step_near(self, layer: int, run: Run, weights: Mapping[str, Weight]) -> F32 | None:
        """One layer on the device, with its attention where its cache is. Returns logits, if it makes any."""
        from headrace.kernels.torch_ops import execute

        guest = self._to_device(run)
        near: dict[str, Tensor] = {"x": guest.x}
        far: dict[str, Tensor] = {}
        for part in self._parts[layer]:
            there = guest.near if part.near else self._far_rows(guest)
            side, other = (near, far) if part.near else (far, near)
            if part.brings:
                self._bring(part, side, other, guest.near.count, guest.near.padded)
            device: TorchDevice = self.device if part.near else self._host
            cache = (self.cache if layer in self._here else self._host_cache).layer(layer, guest.rows)
            execute(part.ops, side, weights, there, cache, device.at_once)
        guest.x = near["x"]
        if "logits" not in near:
            return None
        logits: F32 = self._down(near["logits"], len(guest.rows.wanted), "logits")
        return logits

    def _bring(self, part: Part, side: dict[str, Tensor], other: dict[str, Tensor], count: int, padded: int) -> None:
        """Copy the registers a part needs from the other place: the run's rows, not their padding."""
        device: TorchDevice = self.device if part.near else self._host
        pairs = []
        for name in part.brings:
            side[name] = device.floats(padded, other[name].shape[1])
            pairs.append((side[name][:count], other[name][:count].contiguous()))
        way: tuple[Direction, str] = ("to_device", "attention") if part.near else ("to_host", "qkv")
        self._cross(*way, pairs)

    def _far_rows(self, guest: _Guest) -> TorchRows:
        if guest.far is None:
            guest.far = type(guest.near)(guest.rows, self._host.send)
        return guest.far

    # --- what crosses -----------------------------------------------------------------------------------

    def _guest(self, run: Run) -> _Guest:
        """What the device holds of a run; rows that were cancelled since are taken out."""
        guest = self._guests.get(run.id)
        if guest is not None and guest.run() is run and guest.rows is run.rows:
            return guest
        from headrace.kernels.torch_device import TorchRows

        number = run.id

        def forget(_: weakref.ref[Run]) -> None:
            there = self._guests.get(number)
            if there is not None and there.run() is None:  # another of its number may be there already
                del self._guests[number]

        new = _Guest(weakref.ref(run, forget), run.live, run.rows, TorchRows(run.rows, self._up))
        if guest is not None and guest.run() is run and guest.x is not None:
            at = {i: r for r, i in enumerate(guest.live)}
            kept = self._up(np.array([at[i] for i in run.live], np.int32)).long()
            new.x = self.device.floats(new.near.padded, self.width)
            new.x[: len(kept)] = guest.x[kept]
        self._guests[number] = new
        return new

    def _to_device(self, run: Run) -> _Guest:
        """The run's residual rows on the device."""
        guest = self._guest(run)
        if guest.x is None:
            guest.x = self.device.floats(guest.near.padded, self.width)
            if run.x is not None:
                self._cross("to_device", "x", [(guest.x[: len(run.x)], self._host.send(run.x))])
                run.x = None
        return guest

    def _to_host(self, run: Run) -> None:
        """The run's residual rows on the host, in ``run.x``."""
        if run.id in self._guests:
            guest = self._guest(run)
            if guest.x is not None:
                run.x = self._down(guest.x, guest.near.count, "x")
                guest.x = None

    def _down(self, tensor: Tensor, count: int, purpose: str) -> NDArray[np.float32]:
        here = self._host.floats(count, tensor.shape[1])
        self._cross("to_host", purpose, [(here, tensor[:count].contiguous())])
        array: NDArray[np.float32] = here.numpy()
        return array

    def _up(self, array: NDArray[Any]) -> Tensor:
        """A small table to the device."""
        there = self.device.like(array)
        self._cross("to_device", "rows", [(there, self._host.send(array))])
        return there

    def _cross(self, direction: Direction, purpose: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy and wait. The device's memory, too, is free for it only after what it was asked before."""
        start = time.perf_counter()
        self.link.send(direction, purpose, pairs, urgent=True, after=self.device.mark()).result()
        self.waited += time.perf_counter() - start

    # --- holding ----------------------------------------------------------------------------------------

    def _hold(self, layer: int) -> Mapping[str, Weight]:
        """The layer's weights; a layer stays held until another is asked for."""
        if layer != self._holding:
            self._release()
            self._context = self.weights.hold(layer)
            self._held, self._holding = self._context.__enter__(), layer
        return self._held

    def _release(self) -> None:
        context, self._context, self._held, self._holding = self._context, None, {}, -1
        if context is not None:
            context.__exit__(None, None, None)

    def close(self) -> None:
        """Give back what is held, weights, caches and link included."""
        self._release()
        self._far.close()
        self._guests.clear()
        self.device.unpin()
        for held in (self.weights, self._far.weights, self.cache, self._host_cache):
            held.close()
        self.link.close()
