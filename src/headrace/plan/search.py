"""Finds the plan: a small enumeration of block shapes, and for each the best place of every layer, solved exactly.

For given rows, runs, chunk and tier of activations, seconds and bytes are linear in how many
layers of each kind have each place (``cost.py``), so the best places are a small integer programme: minimise the
work's seconds subject to each pass taking at least each resource's time, and each tier holding what is put there.
HiGHS solves it; without the extra ``plan``, enumeration where only two tiers matter, and hill climbing. Deterministic.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.errors import OverBudget, Unsupported
from headrace.plan.cost import Costing, Knobs, Option, Prediction, evaluate
from headrace.plan.machine import Machine
from headrace.plan.plan import Place, Plan, figure, spread
from headrace.plan.sizes import LayerCost, ModelCost, Objective, Workload
from headrace.plan.solve import F64, I64, Problem, solver

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = (32, 256)
"""Prompt tokens a sequence and pass, beside the whole prompt: small ones where memory is short."""
KEPT = 16
"""Shapes whose best plan is known before those that can't be better are left out."""


@dataclass(frozen=True)
class Candidate:
    """A plan that fits and what it costs. ``why``: for the runners-up, what makes them slower."""

    plan: Plan
    prediction: Prediction
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Gain:
    """What a better machine would bring: seconds now / seconds then of the best plan on it."""

    what: str
    ratio: float


@dataclass(frozen=True)
class Found:
    best: Candidate
    others: tuple[Candidate, ...]
    gains: tuple[Gain, ...]
    solver: str


def search(
    model: ModelCost, machine: Machine, work: Workload, *, objective: Objective = "throughput", k_bits: int = 16,
    v_bits: int = 16, nodes: int = 1, gains: bool = True, highs: bool | None = None,
) -> Found:  # fmt: skip
    """The best plan, the five next best with why they lost, and what a better machine would bring.

    throughput: least seconds for the whole workload; latency: least mean seconds from asking to the last token when
    the whole batch asks at once. KV bits are the caller's: the planner never takes an approximation by itself.
    ``highs``: True requires HiGHS, False forbids it, None takes it where installed.
    Raises OverBudget with the numbers and what would fit.
    """
    engine, found, alike = solver(highs), list[Candidate](), _alike(model)
    queue: list[tuple[float, int, int, Costing, list[Group], Problem]] = []
    for order, knobs in enumerate(shapes(model, machine, work, k_bits, v_bits, nodes)):
        costing = Costing(model, machine, work, knobs)
        groups = grouped(costing, alike)
        problem = programme(costing, groups, objective)
        queue.append((problem.least(), 0, order, costing, groups, problem))
    heapq.heapify(queue)
    kept = KEPT if gains else 1
    while queue:  # always the shape with the least bound: a crude one, the relaxed programme's, then its best plan
        bound, exact, order, costing, groups, problem = heapq.heappop(queue)
        if bound == float("inf") or (len(found) >= kept and bound > sorted(c.seconds for c in found)[kept - 1]):
            break
        if not exact and engine.relaxed is not None:
            heapq.heappush(queue, (engine.relaxed(problem), 1, order, costing, groups, problem))
        elif (n := engine.solve(problem)) is not None:
            found.append(_candidate(costing, groups, n, objective))
    if not found:
        raise OverBudget(_refusal(model, machine, work, k_bits, v_bits, nodes))
    ranked = sorted(found, key=lambda c: (c.seconds, c.plan.sequences, c.plan.rows, c.plan.chunk, c.plan.to_json()))
    best, unlike = ranked[0], dict[tuple[int, int], Candidate]()
    for candidate in ranked:
        unlike.setdefault((candidate.plan.rows, candidate.plan.runs), candidate)
    others = tuple(dataclasses.replace(c, why=why(best, c)) for c in list(unlike.values())[1:6])

    def ratio(better: Machine, nodes: int) -> float:
        then = search(model, better, work, objective=objective, k_bits=k_bits, v_bits=v_bits, nodes=nodes, gains=False,
                      highs=highs)  # fmt: skip
        return best.seconds / then.best.seconds

    tried = _better(machine, nodes, len(model.layers)) if gains else []
    return Found(best, others, tuple(Gain(what, ratio(better, count)) for what, better, count in tried), engine.name)


def shapes(model: ModelCost, machine: Machine, work: Workload, k_bits: int, v_bits: int, nodes: int) -> Iterator[Knobs]:
    """Every block shape that is tried, in a fixed order."""
    if nodes > len(model.layers):
        raise Unsupported(f"model {model.name} has {len(model.layers)} layers, too few for {nodes} nodes.")
    parts = [] if work.batch in ROWS else [-(-work.batch // i) for i in (1, 2, 3, 4)]
    chunks = sorted({min(c, work.prompt_len) for c in (*CHUNKS, work.prompt_len)}, reverse=True)
    main = machine.computes[0].tier
    homes = [t.name for t in machine.tiers if machine.connected(t.name, main) and machine.connected(main, t.name)]
    for rows, runs in itertools.product(sorted({*ROWS, *parts}), RUNS):
        if rows * runs <= work.batch and rows <= 256:
            for chunk, home in itertools.product(chunks, homes[:2]):
                yield Knobs(rows, runs, chunk, home, k_bits, v_bits, nodes)


def places(machine: Machine, layer: LayerCost) -> list[Place]:
    """Where a layer may be: weights and cache no nearer than what computes it; next tokens attend there or at any
    place on the cache's way that can."""
    order = [t.name for t in machine.tiers]
    able = {c.tier for c in machine.computes if c.attend_one > 0}
    out = []
    for compute in machine.computes:
        here = compute.tier
        if not compute.matmul or (layer.kv_heads and compute.attend <= 0):
            continue
        far = [t for t in order[order.index(here) :] if machine.connected(t, here) and machine.connected(here, t)]
        for w, kv in itertools.product(far, far if layer.kv_heads else [here]):
            way = dict.fromkeys([kv, *(link.dst for link in machine.path(kv, here))])
            out += [Place(w, here, kv, at) for at in way if at in able or not layer.kv_heads]
    return out


@dataclass(frozen=True)
class Group:
    """Layers alike, and the choices each of them has: one option, or for the two ends one of each."""

    layers: tuple[LayerCost, ...]
    choices: tuple[tuple[Option, ...], ...]

    @property
    def count(self) -> int:
        return len(self.layers) // len(self.choices[0])


def _alike(model: ModelCost) -> list[tuple[LayerCost, ...]]:
    """Blocks by size."""
    alike: dict[LayerCost, list[LayerCost]] = {}
    for layer in model.layers:
        if layer.kind == "block":
            alike.setdefault(dataclasses.replace(layer, key=""), []).append(layer)
    return [tuple(layers) for layers in alike.values()]


def grouped(costing: Costing, alike: list[tuple[LayerCost, ...]]) -> list[Group]:
    """Blocks of equal size together; last, the two ends, whose table is one when it is tied."""
    model, machine = costing.model, costing.machine
    ends = [layer for layer in model.layers if layer.kind != "block"]
    groups = [
        Group(layers, tuple((costing.option(layers[0], p),) for p in places(machine, layers[0]))) for layers in alike
    ]
    pairs = itertools.product(*(places(machine, layer) for layer in ends))
    order = [t.name for t in machine.tiers]
    legal = [
        p
        for p in pairs
        if len({x.compute for x in p}) == 1  # and the table that is only looked up in is no nearer than the other
        and (p[0] == p[-1] if model.tied else order.index(p[0].weights) >= order.index(p[-1].weights))
    ]
    groups.append(Group(tuple(ends), tuple(tuple(map(costing.option, ends, p)) for p in legal)))
    return groups


def programme(costing: Costing, groups: list[Group], objective: Objective) -> Problem:
    """The integer programme of one block shape, in the terms of ``Costing.predict``."""
    k, work, share = costing.knobs, costing.work, costing.share()
    tiers = [t.name for t in costing.machine.tiers]
    choices = [(g, choice) for g, group in enumerate(groups) for choice in group.choices]
    memory = np.zeros((len(tiers), len(choices)))
    peaks: dict[tuple[str, str], F64] = {}
    times = [np.zeros((0, len(choices))), np.zeros((0, len(choices)))]
    for p, phase in enumerate(("prefill", "decode")):
        uses = [[getattr(option, phase) for option in choice] for _, choice in choices]
        names = sorted({r for use in uses for u in use for r in u.busy})
        rows = [[sum(u.busy[r] for u in use) for use in uses] for r in names]
        times[p] = np.array([*rows, [sum(u.chain for u in use) / k.runs for use in uses]]) * share
    base = costing.fixed(())
    extra = {
        c.tier: {t: v - base[t] for t, v in costing.fixed([c.tier]).items() if v > base[t]}
        for c in costing.machine.computes
        if c.matmul
    }
    for column, (_, choice) in enumerate(choices):
        for option in choice:
            for tier, size in option.home.items():
                memory[tiers.index(tier), column] += size * share
            for tier, size in option.kv.items():
                memory[tiers.index(tier), column] += size
            here = option.place.compute
            for key, size in (option.buffers | {(tier, f"at {here}"): s for tier, s in extra[here].items()}).items():
                row = peaks.setdefault(key, np.zeros(len(choices)))
                row[column] = max(row[column], size)
    blocks = max(1.0, work.batch / (k.rows * k.runs))
    scale = blocks + k.nodes - 1 if objective == "throughput" else (blocks + 1) / 2 * k.nodes
    return Problem(
        kind=np.array([g for g, _ in choices]),
        count=np.array([group.count for group in groups]),
        times=(times[0], times[1]),
        weights=(scale * costing.passes, scale * (work.gen_len - 1)),
        floor=(costing.hop(costing.prompt), costing.hop(costing.next)),
        memory=memory,
        peaks=tuple((tiers.index(tier), row) for (tier, _), row in peaks.items()),
        fixed=np.array([float(base[t]) for t in tiers]),
        capacity=np.array([float(t.capacity) for t in costing.machine.tiers]),
    )


def _candidate(costing: Costing, groups: list[Group], n: I64, objective: Objective) -> Candidate:
    placed: dict[str, Place] = {}
    start = 0
    for group in groups:
        taken = n[start : start + len(group.choices)].tolist()
        start += len(taken)
        if group.layers[0].kind == "block":
            kinds = [(choice[0].place, count) for choice, count in zip(group.choices, taken, strict=True)]
            placed |= {layer.key: place for layer, place in zip(group.layers, spread(kinds), strict=True)}
        else:
            placed |= {option.layer.key: option.place for option in group.choices[taken.index(1)]}
    model, machine = costing.model, costing.machine
    plan = Plan(model.name, machine.name, places=tuple(placed[layer.key] for layer in model.layers),
                **dataclasses.asdict(costing.knobs))  # fmt: skip
    prediction = evaluate(model, machine, costing.work, plan).check(machine)
    return Candidate(plan, prediction, prediction.total if objective == "throughput" else prediction.wait)


def why(best: Candidate, other: Candidate) -> str:
    p, b = other.prediction, best.prediction
    phase = max(("prefill", "decode"), key=lambda ph: float(getattr(p, ph) / p.block - getattr(b, ph) / b.block))
    resource, seconds = next(iter(p.terms[phase].items()))
    return (
        f"{other.seconds / best.seconds:.3f} x the time: {resource} binds in {phase}, {figure(seconds)} s a pass "
        f"of {p.block} sequences"
    )


def _better(machine: Machine, nodes: int, most: int) -> list[tuple[str, Machine, int]]:
    """What could help: in words, the machine, and how many of it (at most ``most``)."""
    tried = [
        (f"+1 GB of {t.name}", machine.with_tier(t.name, capacity=t.capacity + 10**9), nodes) for t in machine.tiers
    ]
    if len(machine.tiers) > 1:
        last = machine.tiers[-1].name
        tried.append((f"{last} twice as fast", machine.faster(last, 2.0), nodes))
    if machine.network is not None and nodes < most:
        tried.append(("one more node", machine, nodes + 1))
    return tried


def _refusal(model: ModelCost, machine: Machine, work: Workload, k_bits: int, v_bits: int, nodes: int) -> str:
    """Of the plans that need least of all, what each tier lacks."""
    main, needs = machine.computes[0].tier, []
    knobs = Knobs(1, 1, min(work.prompt_len, CHUNKS[0]), main, k_bits, v_bits, nodes)
    for far in [t.name for t in machine.tiers if machine.connected(t.name, main) and machine.connected(main, t.name)]:
        far_off = tuple(Place(far, main, far if x.kv_heads else main, main) for x in model.layers)
        plan = Plan(model.name, machine.name, places=far_off, **dataclasses.asdict(knobs))
        p = evaluate(model, machine, work, plan)
        short = [(t.name, p.peak(t.name), t.capacity) for t in machine.tiers if p.peak(t.name) > t.capacity]
        needs.append((sum(n - c for _, n, c in short), far, short))
    _, far, short = min(needs)
    lack = ", ".join(f"{n / 1e9:.3f} GB of {name} (it has {c / 1e9:.3f})" for name, n, c in short)
    return (
        f"{model.name} for {work.prompt_len}+{work.gen_len} tokens doesn't fit in {machine.name}: even one sequence "
        f"at a time with everything in {far!r} needs {lack}; give it that much, shorten the lengths, or store "
        "weights or cache in fewer bits."
    )
