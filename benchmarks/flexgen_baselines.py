"""Other engines' schedules as they really run, so that published results can be reproduced and faults priced.

FlexGen's loop, from its code: attention and FFN of a layer are two layers; each step (layer, run) queues the next
layer's weights (all at the first run), the next run's cache, activations and stores, then computes, then waits for
all of it. Host attention and copies from unpinned memory keep the loop's own thread, so nothing hides them; weights
and cache in 4 bits are widened by a chain of element-wise kernels for every run. Accelerate and ZeRO-Inference go
row by row: every layer's weights move for one batch, without and with overlap. All rates come from the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_published import Policy
from headrace.errors import Unsupported
from headrace.plan.machine import Compute, Machine
from headrace.plan.sizes import LayerCost, ModelCost, Workload

WIDEN = 13.0
"""Bytes of device memory traffic a value when it unpacks 4 bits: two shifts or masks (0.5 + 0.5 each), two strided
stores (0.5 + 1 each), a division and an addition in place (2 + 2 each), from ``TorchCompressedDevice.decompress``."""
WIDEN_CACHE = WIDEN + 4
"""The cache is also permuted into a copy, 2 + 2."""
NARROW = 25.5
"""Bytes a value when it packs the prompt's cache: minimum, maximum, five passes, shift, or (``compress``)."""
BITS4 = 4.5 / 8
"""Bytes a value: 4 bits, and two f16 for 64."""


@dataclass(frozen=True)
class Timing:
    """Seconds of all prompts of a block, and of one further token of it."""

    prefill: float
    token: float
    sequences: int
    gen_len: int

    @property
    def total(self) -> float:
        return self.prefill + (self.gen_len - 1) * self.token

    @property
    def tokens_per_s(self) -> float:
        return self.sequences * self.gen_len / self.total


def whole_tensors(sizes: tuple[int, ...], share: tuple[float, float, float]) -> tuple[float, float, float]:
    """Shares (device, host, disk) as FlexGen realises them: a tensor goes to the tier its middle falls in,
    counting from the disk (``init_weight_list``)."""
    total, done, out = sum(sizes), 0.0, [0.0, 0.0, 0.0]
    for size in sizes:
        middle = (done + size / 2) / total * 100
        done += size
        home = 2 if middle < share[2] else 1 if middle < share[2] + share[1] else 0
        out[home] += size / total
    return out[0], out[1], out[2]


@dataclass(frozen=True)
class _Half:
    """Attention or FFN of a layer: elements, and where they are."""

    attends: bool
    elements: int
    host: float
    disk: float


class FlexGen:
    """One policy on one machine. The machine's tiers are named device, host and disk."""

    def __init__(self, model: ModelCost, machine: Machine, work: Workload, policy: Policy, nodes: int = 1) -> None:
        self.model, self.machine, self.work, self.policy, self.nodes = model, machine, work, policy, nodes
        self.block = next(layer for layer in model.layers if layer.kind == "block")
        self.blocks = sum(layer.kind == "block" for layer in model.layers)
        wg, wc = policy.percent[:2]
        share = (float(wg), float(wc), float(100 - wg - wc))
        cut = len(self.block.matrices) - 2  # OPT: q k v o, then two of the FFN
        self.halves = tuple(
            _Half(attends, sum(part), *whole_tensors(part, share)[1:])
            for attends, part in ((True, self.block.matrices[:cut]), (False, self.block.matrices[cut:]))
        )
        self.table = whole_tensors((model.vocab * model.width, 2050 * model.width), share)
        self.up, self.down = machine.path("host", "device")[0], machine.path("device", "host")[0]
        self.read, self.write = machine.path("disk", "host")[0], machine.path("host", "disk")[0]
        self.memory = machine.tier("device").read
        self.device = _must(machine, "device")
        self.weight_size = BITS4 if policy.weight4 else 2.0
        self.cache_size = BITS4 if policy.cache4 else 2.0
        if policy.percent[2] not in (0, 100) or policy.percent[3] not in (0, 100):
            raise Unsupported("FlexGen's schedule is modelled for a cache that lies on one tier.")

    def timing(self) -> Timing:
        k = self.policy.runs * self.policy.rows
        prompt, token = self._pass(True), self._pass(False)
        if self.nodes == 1:
            return Timing(prompt, token, k, self.work.gen_len)
        n = self.nodes  # n micro-batches follow each other through n stages: 2n - 1 stage times for the prompts
        return Timing(prompt * (2 * n - 1), token * n, k * n, self.work.gen_len)

    def _pass(self, prompt: bool) -> float:
        layers = self.blocks / self.nodes
        return layers * sum(self._layer(half, prompt) for half in self.halves) + self._ends(prompt)

    def _context(self) -> float:
        s, n = self.work.prompt_len, self.work.gen_len
        return s + 1 if self.policy.projected else s + n / 2

    def _layer(self, half: _Half, prompt: bool) -> float:
        """Seconds of one of its layers, all runs: a sum over steps, each the slowest of what it started."""
        policy = self.policy
        following = self.halves[1] if half.attends else self.halves[0]
        seconds = 0.0
        for run in range(policy.runs):
            last = run == policy.runs - 1
            loads_cache = not prompt and (not last if half.attends else last)
            seconds += self._step(half, following if run == 0 else None, loads_cache, prompt)
        return seconds

    def _step(self, half: _Half, load: _Half | None, loads_cache: bool, prompt: bool) -> float:
        policy, rows = self.policy, self.policy.rows * (self.work.prompt_len if prompt else 1)
        cache = policy.rows * self._context() * 2 * self.block.query * self.cache_size
        made = rows * 2 * self.block.query * self.cache_size if half.attends else 0.0
        hidden = 2.0 * rows * self.model.width if policy.percent[5] == 100 else 0.0
        up, down, disk, staged = hidden / self.up.rate, hidden / self.down.rate, 0.0, 0.0
        if load is not None:
            size = load.elements * self.weight_size
            up += size * (load.host + load.disk) / self.up.rate
            disk += size * load.disk / self.read.rate
            staged += 0.0 if policy.pinned else size * load.host
        if policy.percent[2] == 0 and policy.percent[3] == 100:
            down += made / (self.down.staged if prompt else self.down.rate)
            if loads_cache and not policy.host_attention:
                up, staged = up + cache / self.up.rate, staged + cache
        elif policy.percent[2] == 0:
            disk += made / self.write.rate + (cache / self.read.rate if loads_cache else 0.0)
        compute, alone = self._compute(half, rows, prompt), staged / self.up.staged
        if policy.overlap:
            return max(up, down, disk, compute) + alone
        return up + down + disk + compute + alone

    def _compute(self, half: _Half, rows: int, prompt: bool) -> float:
        policy = self.policy
        seconds = max(2 * half.elements * rows / self.device.rate(rows), 2 * half.elements / self.memory)
        if policy.weight4:
            seconds += half.elements * WIDEN / self.memory
        if not half.attends:
            return seconds
        values = 2 * self.block.query * rows
        if prompt:
            seconds += 2 * values * self.work.prompt_len / self.device.attend
            return seconds + (values * NARROW / self.memory if policy.cache4 else 0.0)
        seen = values * self._context()
        if policy.host_attention:
            return seconds + 2 * seen / _must(self.machine, "host").attend_one
        seconds += 2 * seen / self.device.attend_one
        return seconds + (seen * WIDEN_CACHE / self.memory if policy.cache4 else 0.0)

    def _ends(self, prompt: bool) -> float:
        """Embedding and output: the table is loaded, and widened, for both; logits are made for every position."""
        policy, size = self.policy, self.model.vocab * self.model.width
        rows = policy.rows * (self.work.prompt_len if prompt else 1)
        moved = size * self.weight_size * (self.table[1] + self.table[2])
        loads = 2 * max(moved / self.up.rate, size * self.weight_size * self.table[2] / self.read.rate)
        widen = 2 * size * WIDEN / self.memory if policy.weight4 else 0.0
        logits = max(2 * size * rows / self.device.rate(rows), 2 * size / self.memory)
        return (loads + policy.runs * (widen + logits)) / self.nodes


def row_order(model: ModelCost, machine: Machine, work: Workload, home: str, *, overlap: bool, pinned: bool) -> Timing:
    """Accelerate (no overlap, pageable memory) and ZeRO-Inference (prefetch, pinned): one batch, layer by layer.

    Cache, embedding and output stay on the device. ``home``: the tier of the blocks' weights.
    """
    device, memory = _must(machine, "device"), machine.tier("device").read
    up = machine.path("host", "device")[0]
    rate = up.rate if pinned else up.staged

    def moved(layer: LayerCost) -> float:
        size = 2.0 * sum(layer.matrices)
        if home == "device":
            return 0.0
        disk = size / machine.path("disk", "host")[0].rate if home == "disk" else 0.0
        return max(disk, size / rate) if overlap else disk + size / rate

    def one(prompt: bool) -> float:
        seconds, rows = 0.0, work.batch * (work.prompt_len if prompt else 1)
        seen = work.prompt_len if prompt else work.prompt_len + work.gen_len / 2
        for layer in model.layers:
            if layer.kind == "embed":
                continue
            compute = max(2 * layer.macs * rows / device.rate(rows), 2 * layer.macs / memory)
            if layer.query:
                attend = device.attend if prompt else device.attend_one
                compute += 4 * layer.query * rows * seen / attend
            move = moved(layer)
            seconds += max(compute, move) if overlap else compute + move
        return seconds

    return Timing(one(True), one(False), work.batch, work.gen_len)


def _must(machine: Machine, tier: str) -> Compute:
    compute = machine.compute(tier)
    if compute is None:
        raise Unsupported(f"machine {machine.name!r} gives no compute rates for {tier!r}.")
    return compute
