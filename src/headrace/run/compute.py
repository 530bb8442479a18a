"""A stage's arithmetic: one step is one layer of one run, on a device, with weights and cache at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from headrace.kernels.device import F32, Device, Program, Weight
from headrace.memory.weights import Weights
from headrace.model.layers import Layer
from headrace.run.stage import Run
from headrace.run.types import Choice, Sampling


class Cache(Protocol):
    """The KV cache of a stage's layers."""

    def layer(self, index: int) -> Any | None: ...


class Sampler(Protocol):
    """Chooses tokens. rows: for each row of logits its parameters, the ids they look back at, the row's position."""

    def choose(self, logits: F32, rows: Sequence[tuple[Sampling, np.ndarray, int]]) -> list[Choice]: ...


class DeviceComputer:
    """Carries Steps of layers in ``programs``. A layer stays held until another is asked for."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[Layer],
        own: Sequence[int],
        width: int,
        weights: Weights,
        cache: Cache,
        sampler: Sampler,
    ) -> None:
        self.width = width
        self.weights = weights
        self.cache = cache
        self.sampler = sampler
        self.last = len(layers) - 1
        self._programs: dict[int, Program] = {i: device.compile(layers[i].ops, width) for i in own}
        self._holding = -1
        self._held: Mapping[str, Weight] = {}
        self._stack = ExitStack()

    def step(self, layer: int, run: Run) -> None:
        """Compute one layer of a run's live rows; see ``run.stage.Computer``."""
        rows = run.rows
        if run.x is None:
            run.x = np.empty((rows.count, self.width), np.float32)
        if layer == self.last and rows.wanted.shape[0] == 0:
            return
        if layer != self._holding:
            self._hold(layer)
        out = self._programs[layer].run(run.x, self._held, rows, self.cache.layer(layer))
        if layer == self.last:
            run.choices = self._choose(run, out)

    def _choose(self, run: Run, logits: F32) -> tuple[Choice, ...]:
        asked = []
        ids = []
        for r in run.rows.wanted.tolist():
            i = run.live[r]
            sampling, history = run.history[i]
            ids.append(i)
            asked.append((sampling, history, run.message.rows[i].position))
        chosen = self.sampler.choose(logits, asked)
        return tuple(Choice(i, c.token, c.logprob, c.top) for i, c in zip(ids, chosen, strict=True))

    def _hold(self, layer: int) -> None:
        self._stack.close()
        self._holding = -1
        self._held = self._stack.enter_context(self.weights.hold(layer))
        self._holding = layer

    def close(self) -> None:
        """Give back what is held."""
        self._stack.close()
        self._holding = -1
        self._held = {}
