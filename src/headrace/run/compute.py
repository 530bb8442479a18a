"""A stage's arithmetic: one step is one layer of one run, on a device, with weights and cache at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from headrace.kernels.cpu import BoundProgram as CpuBound
from headrace.kernels.cpu import Chain, CpuDevice
from headrace.kernels.device import F32, BoundProgram, Device, Program, Rows, Weight
from headrace.memory.kv import HostKV
from headrace.memory.kv_disk import DiskKV
from headrace.memory.stream import Streamed
from headrace.memory.weights import Weights
from headrace.model.layers import Layer
from headrace.run.sample import choose
from headrace.run.stage import Computer, Run
from headrace.run.types import Choice

SHORT = 2e-3
"""Seconds of layers that are computed in one go, before anybody looks at what has come."""


class Cache(Protocol):
    """The KV cache of a stage's layers."""

    def layer(self, index: int, rows: Rows) -> Any | None:
        """The device's handle of a layer's cache, with every page these rows see at hand until the next call."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Traffic:
    """What a computer moved so far. streams: whether anything comes from disk or link at all.

    read: bytes of weights and cache from the disk; crossed: bytes between host and device; waited: seconds that steps
    waited for either.
    """

    streams: bool
    read: int
    crossed: int
    waited: float


def from_disk(stores: Iterable[object]) -> Traffic:
    """Of those among weights and caches that read the disk."""
    disks = [s for s in stores if isinstance(s, Streamed | DiskKV)]
    return Traffic(bool(disks), sum(d.read_bytes for d in disks), 0, sum(d.waited for d in disks))


class DeviceComputer(Computer):
    """Carries Steps of layers in ``programs``. A layer stays held until another is asked for."""

    def __init__(
        self, device: Device, layers: Sequence[Layer], own: Iterable[int], width: int, weights: Weights, cache: Cache
    ) -> None:
        self.device, self.width = device, width
        self.weights, self.cache = weights, cache
        self.last = len(layers) - 1
        self._programs: dict[int, Program] = {i: device.compile(layers[i].ops, width) for i in own}
        self.first = min(own, default=0)
        self._holding = -1
        self._staying: dict[int, BoundProgram] = {}
        self._bound: dict[tuple[int, int], tuple[Mapping[str, Weight], BoundProgram]] = {}
        self._now: BoundProgram | None = None
        self._context: AbstractContextManager[Mapping[str, Weight]] | None = None

    def step(self, layer: int, run: Run) -> None:
        """Compute one layer of a run's live rows; see ``run.stage.Computer``."""
        rows = run.rows
        if run.x is None:
            run.x = np.empty((rows.count, self.width), np.float32)
        if layer == self.last and rows.wanted.shape[0] == 0:
            return
        bound = self._staying.get(layer)
        if bound is None:
            bound = self._held(layer)
        elif self._context is not None:
            self.release()
        out = bound.run(run.x, rows, self.cache.layer(layer, rows))
        if layer == self.last:
            run.choices = self._answer(run, out)

    def steps(self, layer: int, through: int, run: Run) -> int:
        """As ``run.stage.Computer.steps``."""
        through = min(through, self.last - 1)
        if through <= layer or run.x is None or self._chain is None:
            self.step(layer, run)
            return layer
        return self._chain.run(run.x, run.rows, layer - self.first, through - self.first, SHORT) + self.first

    @cached_property
    def _chain(self) -> Chain | None:
        """All layers but the last, if they lie in memory with their cache."""
        inner = [i for i in self._programs if i != self.last]
        if not (isinstance(self.device, CpuDevice) and isinstance(self.cache, HostKV)):
            return None
        if not all(map(self.weights.stays, inner)):
            return None
        bounds = [self._staying.get(i) or self._held(i) for i in inner]
        return Chain(self.device, cast("list[CpuBound]", bounds), [self.cache.layer(i) for i in inner])

    def _answer(self, run: Run, logits: F32) -> tuple[Choice, ...]:
        return choose(self.device, logits, run)

    def _held(self, layer: int) -> BoundProgram:
        """The layer's program with its weights, held in place of the last one's if they don't simply stay."""
        if layer == self._holding and self._now is not None:
            return self._now
        self.release()
        context = self.weights.hold(layer)
        held = context.__enter__()
        if self.weights.stays(layer):
            context.__exit__(None, None, None)
            self._staying[layer] = self._programs[layer].bind(held)
            return self._staying[layer]
        # Joined once for each place the layer's bytes come to lie in, if such a place lasts.
        key = layer, id(held)
        now = self._bound[key][1] if key in self._bound else self._programs[layer].bind(held)
        if self.weights.lasting:
            self._bound[key] = held, now
        self._context, self._now, self._holding = context, now, layer
        return now

    def release(self) -> None:
        """Let the layer go that is held."""
        context, self._context, self._now, self._holding = self._context, None, None, -1
        if context is not None:
            context.__exit__(None, None, None)

    def traffic(self) -> Traffic:
        return from_disk((self.weights, self.cache))

    def close(self) -> None:
        """Give back what is held."""
        self.release()
        vars(self).pop("_chain", None)
        self._bound.clear()
        self._staying.clear()
        self.cache.close()
