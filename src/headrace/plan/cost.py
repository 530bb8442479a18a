"""What a plan costs on a machine: seconds and bytes, from the model's own FLOPs and bytes. Pure; no clock, no I/O.

One pass takes a block of runs through all layers. Everything that can overlap does (that is the engine's job), so a
pass takes the busiest resource's total time, and no less than one run's own chain of dependent steps times the
runs in flight allow: ``max(max_r sum_l use[l, r], sum_l chain[l] / runs)``. Layers that stream are spread evenly
(``plan.spread``) and read through a ring of two, which is what makes the sum, not each layer's maximum, the bound.
FlexGen's model (paper section 4.3) has the same terms; here tiers and resources are data, and prompt passes may be
cut in chunks. All of it is linear in how many layers have each place: ``search.py`` relies on that.

Of a plan with ``most`` the runs are our own loop's (``run/schedule.py``): a pass has as many as its rows need, each
of at most ``most`` rows, and logits only for the rows that want them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headrace.errors import OverBudget, Unsupported
from headrace.kernels.device import PAGE
from headrace.plan.machine import Compute, Link, Machine
from headrace.plan.plan import Place, Plan
from headrace.plan.sizes import LayerCost, ModelCost, Workload

F32 = 4
RING = 2
"""Buffers a streamed block, or a run's fetched cache, is read into: one used, one filled; the output layer has one."""


@dataclass(frozen=True)
class Knobs:
    """Everything of a plan but its places."""

    rows: int
    runs: int
    chunk: int
    activations: str
    k_bits: int = 16
    v_bits: int = 16
    nodes: int = 1
    most: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Knobs:
        return cls(plan.rows, plan.runs, plan.chunk, plan.activations, plan.k_bits, plan.v_bits, plan.nodes, plan.most)

    @property
    def block(self) -> int:
        """Sequences in a block."""
        return self.rows * self.runs


@dataclass(frozen=True)
class Phase:
    """One pass: ``tokens`` a sequence, ``seen`` positions a row attends to on average, ``earlier`` of them cached;
    ``runs`` of ``rows`` rows, of which ``wanted`` need logits (under 1: not every run has one)."""

    tokens: int
    seen: float
    earlier: float
    prompt: bool
    rows: float
    runs: int
    wanted: float


@dataclass
class Use:
    """Seconds by resource of one layer and a whole block; ``chain``: of its dependent steps, all runs together."""

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    chain: float = 0.0

    def send(self, path: Iterable[Link], nbytes: float, times: float = 1, chained: bool = False) -> None:
        for link in path:
            seconds = nbytes / link.rate + times * link.latency if nbytes else 0.0
            self.busy[link.shared] += seconds
            if link.taken:
                self.busy[f"compute {link.dst}"] += nbytes * link.taken
            self.chain += seconds if chained else 0.0

    def work(self, tier: str, seconds: float) -> None:
        self.busy[f"compute {tier}"] += seconds
        self.chain += seconds


@dataclass(frozen=True)
class Option:
    """A layer with a place: what it takes. ``buffers``: (tier, for what) -> bytes; layers share those of a name."""

    layer: LayerCost
    place: Place
    prefill: Use
    decode: Use
    home: Mapping[str, int]
    kv: Mapping[str, int]
    buffers: dict[tuple[str, str], int]


class Costing:
    """The coefficients of a (model, machine, workload, knobs): ``option`` for one layer, ``predict`` for all."""

    def __init__(self, model: ModelCost, machine: Machine, work: Workload, knobs: Knobs) -> None:
        self.model, self.machine, self.work, self.knobs = model, machine, work, knobs
        machine.tier(knobs.activations)
        chunk = min(knobs.chunk, work.prompt_len)
        self.passes = -(-work.prompt_len // chunk)
        earlier = (work.prompt_len - chunk) / 2
        self.prompt = self._phase(chunk, (work.prompt_len + 1) / 2, earlier, True)
        middle = work.prompt_len + work.gen_len / 2
        self.next = self._phase(1, middle, middle, False)
        self._cache: dict[tuple[object, ...], Option] = {}

    def _phase(self, tokens: int, seen: float, earlier: float, prompt: bool) -> Phase:
        k = self.knobs
        if not k.most:
            return Phase(tokens, seen, earlier, prompt, k.rows * tokens, k.runs, k.rows)
        rows = k.block * tokens
        runs = -(-rows // k.most)
        wanted = k.block / (runs * (self.passes if prompt else 1))
        return Phase(tokens, seen, earlier, prompt, rows / runs, runs, wanted)

    @cached_property
    def slots(self) -> int:
        """Cache slots a sequence takes at most, whole pages."""
        return -(-(self.work.prompt_len + self.work.gen_len) // PAGE) * PAGE

    def option(self, layer: LayerCost, place: Place) -> Option:
        kind = (layer.kind, layer.nbytes, layer.macs, layer.query, layer.kv_heads, layer.window, place)
        if kind not in self._cache:
            k = self.knobs
            kv = layer.kv_bytes(k.k_bits, k.v_bits)
            what, count = ("one", 1) if layer.kind == "output" else ("ring", RING)
            weights = self.machine.path(place.weights, place.compute) if layer.kind != "embed" else ()
            buffers = {(link.dst, what): count * layer.nbytes for link in weights}
            for link in self.machine.path(place.kv, place.attend) if kv else ():
                buffers[link.dst, "kv ring"] = RING * k.rows * self.slots * kv
            self._cache[kind] = Option(
                layer, place, self._use(layer, place, self.prompt), self._use(layer, place, self.next),
                {place.weights: layer.nbytes}, {place.kv: k.block * self.slots * kv}, buffers,
            )  # fmt: skip
        return self._cache[kind]

    def _compute(self, tier: str) -> Compute:
        compute = self.machine.compute(tier)
        if compute is None or not compute.matmul:
            raise Unsupported(f"machine {self.machine.name!r} can't compute layers at tier {tier!r}.")
        return compute

    def _use(self, layer: LayerCost, place: Place, phase: Phase) -> Use:
        m, k = self.machine, self.knobs
        use, here = Use(), self._compute(place.compute)
        rows, runs = phase.rows, phase.runs
        hop = F32 * rows * self.model.width * runs
        if layer.kind == "embed":  # a gather: only the rows' own bytes move
            use.send(m.path(place.weights, place.compute), hop, runs)
            use.work(place.compute, hop / m.tier(place.compute).read + runs * (here.overhead + rows * here.row))
        else:
            use.send(m.path(place.weights, place.compute), layer.nbytes)
            wanted = phase.wanted if layer.kind == "output" else rows
            seconds = self._arithmetic(layer, here, max(1.0, wanted)) * min(1.0, wanted)
            use.work(place.compute, runs * (seconds + here.overhead))
        if layer.query:
            self._attention(use, layer, place, phase)
        if k.activations != place.compute:
            use.send(m.path(k.activations, place.compute), hop, runs, chained=True)
            use.send(m.path(place.compute, k.activations), hop, runs, chained=True)
        return use

    def _arithmetic(self, layer: LayerCost, here: Compute, rows: float) -> float:
        """Seconds of a run's matrix products, norms and activations in a layer."""
        if layer.formats and here.formats:
            parts = zip(layer.matrices, layer.formats, strict=True)
            products = sum(2 * n * rows / here.rate(rows, fmt) for n, fmt in parts)
        else:
            products = 2 * layer.macs * rows / here.rate(rows)
        read = layer.nbytes / self.machine.tier(here.tier).read
        return max(products, read) + here.linear * len(layer.matrices) + here.value * layer.values * rows

    def _attention(self, use: Use, layer: LayerCost, place: Place, phase: Phase) -> None:
        m, k = self.machine, self.knobs
        rows, kv = phase.rows * phase.runs, layer.kv_bytes(k.k_bits, k.v_bits)
        limit = layer.window or float("inf")
        seen, earlier = min(phase.seen, limit), min(phase.earlier, limit)
        where = place.compute if phase.prompt else place.attend
        compute = m.compute(where) or self._compute(place.compute)
        rate = compute.attention(f"{k.k_bits}/{k.v_bits}", phase.prompt)
        if rate <= 0:
            raise Unsupported(f"machine {m.name!r} can't attend at tier {where!r}.")
        flops = 4 * layer.query * rows * seen
        cached = k.block * kv * earlier
        # Our cache on disk moves in pages, each a request; elsewhere a run's cache is one.
        reads, writes = (cached / kv / PAGE, rows / PAGE) if k.most else (phase.runs, phase.runs)
        use.work(where, max(flops / rate, cached / m.tier(where).read))
        use.send(m.path(place.kv, where), cached, reads)
        use.send(m.path(place.compute, place.kv), rows * kv, writes)
        if where != place.compute:  # the query down, the result back, never the cache up
            row = F32 * rows * layer.query
            use.send(m.path(place.compute, where), row, phase.runs, chained=True)
            use.send(m.path(where, place.compute), row, phase.runs, chained=True)

    def fixed(self, computes: Iterable[str]) -> dict[str, int]:
        """Bytes by tier whatever the places: activations of the block, working registers of a run, reserved."""
        k, memory = self.knobs, {tier.name: tier.reserved for tier in self.machine.tiers}
        rows = k.rows * min(k.chunk, self.work.prompt_len)
        memory[k.activations] += F32 * rows * k.runs * self.model.width
        block = max(layer.live for layer in self.model.layers if layer.kind != "output")
        live = F32 * max(rows * block, k.rows * self.model.layers[-1].live)
        for tier in computes:
            memory[tier] += live + (2 * F32 * rows * self.model.width if tier != k.activations else 0)
        return memory

    def hop(self, phase: Phase) -> float:
        """Seconds of handing a block to the next node."""
        net, k = self.machine.network, self.knobs
        if k.nodes == 1:
            return 0.0
        if net is None:
            raise Unsupported(f"machine {self.machine.name!r} names no network to further nodes.")
        return k.runs * (net.latency + F32 * k.rows * phase.tokens * self.model.width / net.rate)

    def share(self) -> float:
        """The largest share of the layers that one node has."""
        count = len(self.model.layers)
        return -(-count // self.knobs.nodes) / count

    def predict(self, options: Iterable[Option]) -> Prediction:
        """The cost of these layers together. Doesn't check memory: see ``Prediction.check``."""
        options = list(options)
        memory: dict[str, dict[str, float]] = {tier.name: defaultdict(float) for tier in self.machine.tiers}
        buffers: dict[tuple[str, str], int] = defaultdict(int)
        for option in options:
            for what, part in (("weights", option.home), ("kv", option.kv)):
                for tier, size in part.items():
                    memory[tier][what] += size if what == "kv" else size * self.share()
            for key, size in option.buffers.items():
                buffers[key] = max(buffers[key], size)
        for (tier, _), size in buffers.items():
            memory[tier]["buffers"] += size
        fixed = self.fixed({option.place.compute for option in options})
        for name, size in fixed.items():
            reserved = self.machine.tier(name).reserved
            memory[name]["reserved"] += reserved
            memory[name]["working"] += size - reserved
        tidy = {t: {k: round(v) for k, v in c.items() if v} for t, c in memory.items()}
        return self.times([(option, 1) for option in options], tidy)

    def times(self, options: Iterable[tuple[Option, int]], memory: Mapping[str, Mapping[str, int]]) -> Prediction:
        """The cost of so many layers of each kind and place."""
        options = list(options)
        k, seconds, terms = self.knobs, {}, {}
        for name, phase in (("prefill", self.prompt), ("decode", self.next)):
            whole = Use()
            for option, count in options:
                use: Use = getattr(option, name)
                whole.chain += use.chain * count
                for resource, s in use.busy.items():
                    whole.busy[resource] += s * count
            times = {r: t * self.share() for r, t in whole.busy.items()}
            times["one run's chain"] = whole.chain * self.share() / phase.runs
            if k.nodes > 1:
                times["network"] = self.hop(phase)
            terms[name] = dict(sorted(times.items(), key=lambda item: (-item[1], item[0])))
            seconds[name] = max(times.values())
        return Prediction(self.work, k, self.passes, seconds["prefill"], seconds["decode"],
                          self.hop(self.prompt), self.hop(self.next), terms, memory)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """``prefill_pass``, ``decode_pass``: seconds a block holds the busiest stage; ``terms``: by resource, largest
    first; ``memory``: tier -> what -> bytes at the peak, every buffer counted (of one node)."""

    work: Workload
    knobs: Knobs
    passes: int
    prefill_pass: float
    decode_pass: float
    prefill_hop: float
    decode_hop: float
    terms: Mapping[str, Mapping[str, float]]
    memory: Mapping[str, Mapping[str, int]]
    rest: float | None = None
    """Seconds of a last, smaller block; None: its share of a whole one's."""

    @property
    def block(self) -> int:
        """Sequences a block has."""
        return self.knobs.block

    @property
    def prefill(self) -> float:
        """Seconds of the busiest stage for all prompts of a block."""
        return self.passes * self.prefill_pass

    @property
    def decode(self) -> float:
        return (self.work.gen_len - 1) * self.decode_pass

    @property
    def block_seconds(self) -> float:
        return self.prefill + self.decode

    @property
    def total(self) -> float:
        """Seconds of the whole workload: blocks follow each other, places of finished sequences are taken at once
        (so a last short block costs its share only, unless ``rest`` says), and the last block still has the later
        nodes to pass."""
        if self.rest is not None:
            return self.work.batch // self.block * self.block_seconds + self.rest
        return max(1.0, self.work.batch / self.block) * self.block_seconds + self.latency - self.block_seconds

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, the prompts' time included."""
        return self.work.batch * self.work.gen_len / self.total

    @property
    def wait(self) -> float:
        """Mean seconds from asking to the last token when the whole batch asks at once."""
        return (max(1.0, self.work.batch / self.block) + 1) / 2 * self.latency

    @property
    def ttft(self) -> float:
        """Seconds until the first block's first tokens."""
        nodes = self.knobs.nodes
        return self.passes * (nodes * self.prefill_pass + (nodes - 1) * self.prefill_hop)

    @property
    def itl(self) -> float:
        """Seconds between a sequence's tokens."""
        return self.knobs.nodes * self.decode_pass + (self.knobs.nodes - 1) * self.decode_hop

    @property
    def latency(self) -> float:
        """Seconds from a block's start to its last token."""
        return self.ttft + (self.work.gen_len - 1) * self.itl

    @property
    def bottleneck(self) -> str:
        """The phase that takes longer and the resource that sets it."""
        phase = "prefill" if self.prefill >= self.decode else "decode"
        return f"{phase}: {next(iter(self.terms[phase]))}"

    def peak(self, tier: str) -> int:
        return sum(self.memory[tier].values())

    def check(self, machine: Machine) -> Prediction:
        """Self, or OverBudget with the numbers of every tier that doesn't hold what the plan puts there."""
        over = [t for t in machine.tiers if self.peak(t.name) > t.capacity]
        if over:
            held = {t: ", ".join(f"{what} {n / 1e9:.3f}" for what, n in self.memory[t.name].items()) for t in over}
            parts = [
                f"{t.name} needs {self.peak(t.name) / 1e9:.3f} GB of {t.capacity / 1e9:.3f} GB ({held[t]})"
                for t in over
            ]
            raise OverBudget(f"the plan doesn't fit: {'; '.join(parts)}.")
        return self


def evaluate(model: ModelCost, machine: Machine, work: Workload, plan: Plan) -> Prediction:
    """What this plan costs; raises Unsupported when plan and model don't match, never OverBudget (see ``check``)."""
    if len(plan.places) != len(model.layers):
        raise Unsupported(f"the plan places {len(plan.places)} layers, model {model.name} has {len(model.layers)}.")
    costing = Costing(model, machine, work, Knobs.of(plan))
    return costing.predict(map(costing.option, model.layers, plan.places))
