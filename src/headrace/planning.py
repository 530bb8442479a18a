"""The plan decides on the CPU: which layers stream, rows a run, runs a block, sequences at a time, where caches lie.

Every shape is placed by ``placement.place``, which counts all memory as loading does, so what is found is what runs;
``plan.cost`` says how long it takes. What the user pinned stays. Devices with tiers of their own: ``plan.search``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from headrace import measured
from headrace.config import resolve
from headrace.errors import BadFile, BadRequest, HeadraceError, OverBudget, Unavailable
from headrace.formats.files import read_text
from headrace.formats.index import ModelFile
from headrace.formats.requant import stored as requantised
from headrace.formats.tensor import BLOCKS
from headrace.kernels.device import PAGE, Device
from headrace.memory.ahead import BUFFERS
from headrace.memory.budget import Budget
from headrace.memory.kv_disk import least_frames, usual_frames
from headrace.memory.slots import pages_for
from headrace.memory.stream import evenly
from headrace.memory.weights import layer_nbytes
from headrace.model.layers import Layer, Model, TensorPlan, layer_ops, spec_of
from headrace.model.names import Source
from headrace.model.spec import is_vector
from headrace.options import Choice, Options
from headrace.placement import Sizes, cache_pages, context_of, place
from headrace.plan.cost import Costing, Knobs, Option, Prediction, Use
from headrace.plan.machine import Compute, Machine, Tier
from headrace.plan.pace import paced
from headrace.plan.plan import PLAIN, Place, Plan, spread
from headrace.plan.search import Candidate, Found, Gain, why
from headrace.plan.sizes import ModelCost, Workload

Expect: TypeAlias = Callable[[Workload], Prediction]
ROWS = (32, 64, 128, 256, 512)
RUNS = (1, 2, 4, 8, 16, 32, 64)
SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FRAMES = (0.0, 0.25, 0.5, 0.75)
"""Of a cache on disk, the part that is in memory; never fewer frames than the loop needs."""
WORTH = 0.97, 0.9
"""To be taken, a plan that streams must take less than this part of the time of one where everything fits; one with its
cache on disk, of one without. Such a plan costs the disk's use, and is less surely known."""
SLACK = 8 << 20
"""Bytes that looking for a plan takes itself, or reading a printed one."""
NOWHERE = Machine("", (Tier("host", 0, 1.0, 1.0),), (), (Compute("host", ((1, 1.0),)),))


@dataclass(frozen=True)
class Shape:
    """One way to run, placed: the options that do it, its plan, and what it should take."""

    options: Options
    candidate: Candidate
    streamed: int


class Planner:
    """The search for one model on one device. ``options.choice`` says for which work and what may be chosen."""

    def __init__(self, device: Device, model: Model, options: Options, machine: Machine, name: str = "") -> None:
        assert options.choice is not None
        self.device, self.model, self.options, self.machine = device, model, options, machine
        self.choice = options.choice
        self.sizes = Sizes(device, model)
        self.sizes.program += SLACK
        self.context = context_of(model, options.context)
        self.name = name or (model.file.paths[0].stem if model.file.paths else model.spec.family)
        self.cost = cost_of(device, model, self.name)
        alike = [replace(layer, key="") for layer in self.cost.layers]
        self.kinds = [alike.index(layer) for layer in alike]
        """Of each layer the first that is like it."""
        self._costings: dict[tuple[Workload, Knobs], Costing] = {}

    # --- shapes -----------------------------------------------------------------------------------------

    def shapes(self) -> Iterator[Options]:
        """Every combination of what may be chosen, within what is pinned."""
        o, work, free = self.options, self.choice.work, self.choice.free
        some = {s for s in SEQUENCES if s < work.batch} | {min(work.batch, SEQUENCES[-1])}
        for sequences in sorted(some) if "sequences" in free else [min(o.sequences, work.batch)]:
            slots = sequences * self._pages(work) * PAGE if "caches" in free else o.slots
            for rows in ROWS if "rows" in free else (o.rows,):
                for runs in RUNS if "runs" in free else (o.runs,):
                    least = -(-sequences // rows)
                    if "runs" in free and (runs < least or rows * (runs - 1) >= max(sequences * work.prompt_len, rows)):
                        continue
                    shape = replace(o, sequences=sequences, rows=rows, runs=runs, choice=None, slots=slots)
                    yield from self._caches(shape)

    def _caches(self, shape: Options) -> Iterator[Options]:
        """The shape with its cache in memory, and on disk with several numbers of frames."""
        free, folder = self.choice.free, self.options.kv_disk
        if self.options.places is not None:
            free = free - {"kv_disk"} | {"kv_disk" for p in self.options.places if p.kv == "disk"}
        if folder is None and (self.options.places is None or "kv_disk" not in free):
            yield shape
        if folder is None and "kv_disk" not in free:
            return
        shape = replace(shape, kv_disk=folder or cache_folder())
        if self.options.places is not None and self.options.kv_frames is None:
            stay = sum(p.kv == "host" for i, p in enumerate(self.options.places) if i in self.sizes.blocks)
            pages, ring = self._all_pages(shape), 2 * self._run_pages(shape)
            yield replace(shape, kv_frames=stay * pages + max(ring, len(self.sizes.blocks) * shape.sequences))
            return
        if self.options.kv_frames is not None or "kv_disk" not in free:
            yield shape
            return
        pages = self._all_pages(shape)
        need = len(self.sizes.blocks), pages, self._run_pages(shape), shape.sequences
        extents, least = need[0] * pages, usual_frames(*need)
        for frames in sorted({max(least, int(extents * part)) for part in FRAMES} | {least_frames(*need)}):
            if frames < extents:
                yield replace(shape, kv_frames=frames)

    def _pages(self, work: Workload) -> int:
        """Of a sequence."""
        return min(pages_for(work.prompt_len + work.gen_len), pages_for(self.context))

    def _all_pages(self, shape: Options) -> int:
        return cache_pages(self.device, self.model, self.context, shape)

    def _run_pages(self, shape: Options) -> int:
        return min(shape.rows, shape.sequences) * pages_for(self.context)

    # --- one shape --------------------------------------------------------------------------------------

    def placed(self, shape: Options, pages: int, budget: Budget, streamed: list[int]) -> Shape:
        """What a shape that fits takes."""
        places = self._places(shape, pages, streamed)
        knobs = self._knobs(shape, pages, self.choice.work)
        frames = shape.kv_frames or 0
        plan = Plan(self.name, self.machine.name, places=places, **dataclasses.asdict(knobs),
                    slots=pages * PAGE, frames=frames)  # fmt: skip
        p = replace(self.predict(plan, self.choice.work), memory=self._memory(budget, shape, pages, streamed))
        seconds = p.total if self.choice.objective == "throughput" else p.wait
        return Shape(shape, Candidate(plan, p, seconds), len(streamed))

    def _knobs(self, shape: Options, pages: int, work: Workload) -> Knobs:
        together = max(1, min(shape.sequences, work.batch, pages // self._pages(work), shape.rows * shape.runs))
        chunk = max(1, min(work.prompt_len, shape.rows * shape.runs // together))
        return Knobs(together, 1, chunk, "host", *shape.kv_bits, most=shape.rows)

    def _places(self, shape: Options, pages: int, streamed: list[int]) -> tuple[Place, ...]:
        on_disk = set(self._cache_on_disk(shape, pages))
        return tuple(
            Place("disk" if i in streamed else "host", "host", "disk" if i in on_disk else "host", "host")
            for i in range(len(self.model.layers))
        )

    def _cache_on_disk(self, shape: Options, pages: int) -> list[int]:
        """As many layers as caches must be read for at each pass (docs/memory.md, "The cache on disk")."""
        if shape.kv_disk is None:
            return []
        layers, work = len(self.sizes.blocks), self.choice.work
        together = self._knobs(shape, pages, work).rows
        used = layers * together * pages_for(int(work.prompt_len + work.gen_len / 2))
        need = layers, pages, self._run_pages(shape), shape.sequences
        frames = shape.kv_frames or usual_frames(*need)
        steps = layers * -(-together // shape.rows)
        share = min(1.0, max(0, used - frames) / max(1, used) / max(0.1, 1 - 3 / steps))
        return [self.sizes.blocks[i] for i in evenly(round(share * layers), layers)]

    def _memory(
        self, budget: Budget, shape: Options, pages: int, streamed: list[int]
    ) -> Mapping[str, Mapping[str, int]]:
        disk = {"packed weights": sum(self.sizes.extents[i] for i in (self.sizes.blocks if streamed else []))}
        if shape.kv_disk is not None:
            shapes, _, place = self.sizes.cache(shape.kv_bits)
            disk["KV cache"] = len(shapes) * pages * place
        return {"host": dict(budget.items), "disk": {what: size for what, size in disk.items() if size}}

    def predict(self, plan: Plan, work: Workload) -> Prediction:
        """What a plan takes for any work."""
        together = max(1, min(plan.sequences, work.batch))
        each = max(1, min(work.prompt_len, plan.sequences * plan.chunk // together))
        knobs = replace(Knobs.of(plan), rows=together, runs=1, chunk=each)
        if (work, knobs) not in self._costings:
            self._costings[work, knobs] = Costing(self.cost, self.machine, work, knobs)
        costing = self._costings[work, knobs]
        kinds = Counter(zip(self.kinds, plan.places, strict=True))
        options = {kind: costing.option(self.cost.layers[kind[0]], kind[1]) for kind in kinds}
        p = costing.times([(options[kind], n) for kind, n in kinds.items()], {})
        if any(place.streams for place in plan.places):
            order = [options[kind] for kind in zip(self.kinds, plan.places, strict=True)]
            p = replace(p, prefill_pass=_paced(order, "prefill"), decode_pass=_paced(order, "decode"))
        # Sequences of a length end together, so those that are left make a block of their own.
        left = work.batch % together
        rest = self.predict(plan, replace(work, batch=left)).block_seconds if left else 0.0
        return replace(p, rest=rest)

    # --- the search -------------------------------------------------------------------------------------

    def all(self) -> list[Shape]:
        """Every shape that fits, the fastest first. OverBudget, with the numbers of the smallest, when none does."""
        found = [self.placed(*fitting) for fitting in self.fitting()]
        return sorted(found, key=lambda s: (s.candidate.seconds, s.streamed, s.options.sequences, s.options.rows))

    def fitting(self) -> Iterator[tuple[Options, int, Budget, list[int]]]:
        """Shapes that fit, with pages of cache, ledger and streamed layers; OverBudget when there is none."""
        refusal: HeadraceError | None = None
        none = True
        for shape in self.shapes():
            pages, budget = self._all_pages(shape), Budget(shape.ram)
            try:
                streamed = place(budget, self.device, self.model, pages, shape, sizes=self.sizes)
            except (OverBudget, BadFile, Unavailable) as error:
                refusal = refusal or error  # the first shape is the smallest
                continue
            none = False
            yield shape, pages, budget, streamed
        if none:
            raise refusal or BadRequest("Nothing is left to choose from: every shape is ruled out by what is pinned.")

    def best(self) -> list[Shape]:
        """As ``all``; first the plan to take: one where everything fits in memory, unless another is really faster."""

        def value(s: Shape) -> float:
            streams, caches = (WORTH[0] if s.streamed else 1.0), (WORTH[1] if s.options.kv_disk is not None else 1.0)
            return s.candidate.seconds / streams / caches

        return sorted(self.all(), key=value)

    def search(self) -> tuple[Found, Shape]:
        """The best plan, the five next best that differ in shape and why they lost, and what would help."""
        shapes = self.best()
        best = shapes[0].candidate
        others: dict[tuple[object, ...], Candidate] = {}
        for s in shapes:
            plan = s.candidate.plan
            key = plan.rows, plan.most if plan.rows > 1 else 0, s.streamed, plan.frames
            reason = why(best, s.candidate)
            if s.candidate.seconds < best.seconds:
                reason += "; too little faster for what is less surely known"
            others.setdefault(key, replace(s.candidate, why=reason))
        return Found(best, tuple(others.values())[1:6], self._gains(best), "every shape"), shapes[0]

    def _gains(self, best: Candidate) -> tuple[Gain, ...]:
        more = None if self.options.ram is None else replace(self.options, ram=self.options.ram + 10**9)
        tried = [("+1 GB of memory", more, self.machine)] if more else []
        if any(t.name == "disk" for t in self.machine.tiers):
            tried.append(("disk twice as fast", self.options, self.machine.faster("disk", 2.0)))
        out = []
        for what, options, machine in tried:
            seconds = Planner(self.device, self.model, options, machine, self.name).best()[0].candidate.seconds
            out.append(Gain(what, best.seconds / seconds))
        return tuple(out)


def _paced(order: Sequence[Option], phase: str) -> float:
    """Seconds of a pass with reads into a few buffers; a cache on disk is read ahead like weights."""
    uses: list[Use] = [getattr(option, phase) for option in order]
    return paced([(use.busy["compute host"], use.busy.get("disk", 0.0)) for use in uses], BUFFERS)


def cost_of(device: Device, model: Model, name: str) -> ModelCost:
    """What the cost model needs of a model. A table that is the output matrix too counts where it is read whole."""
    cost = ModelCost.from_layers(name, model.spec, model.layers, lambda layer: layer_nbytes(device, layer))
    table = model.layers[-1].tensors["output"]
    if table.shares is None:
        return cost
    first, last, size = cost.layers[0], cost.layers[-1], device.packed_nbytes(table.fmt, table.n, table.k)
    ends = replace(first, nbytes=first.nbytes - size), replace(last, nbytes=last.nbytes + size)
    return replace(cost, layers=(ends[0], *cost.layers[1:-1], ends[1]))


def imagined(file: ModelFile, fmt: str | None = None, requant: str | None = None) -> Model:
    """A model of which only the configuration is here: its matrices as ``fmt``, as ``--requant`` would make them, or
    in the type the configuration names (bf16 when it names none)."""
    spec = spec_of(file)
    config = file.metadata.get("config")
    named = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, Mapping) else None
    own = {"float16": "F16", "float32": "F32"}.get(str(named), "BF16")

    def stored(name: str, k: int) -> str:
        if requant:
            return requantised(requant, name, k) or own
        return fmt if fmt and k % BLOCKS[fmt][0] == 0 and name != "position_embd" else own

    layers = []
    for key in spec.keys:
        plans = {}
        for name, (n, k) in spec.shapes(key).items():
            shares = ("embed", "token_embd") if name == "output" and spec.tied else None
            plans[name] = TensorPlan("F32" if is_vector(name) else stored(name, k), n, k, Source(name), shares)
        layers.append(Layer(key, plans, layer_ops(spec, key), spec.kv_shape(key)))
    return Model(spec, tuple(layers), file)


def cache_folder() -> Path:
    """Where a plan keeps a cache that doesn't fit in memory; the file in it has no name."""
    folder = resolve().cache / "kv"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine_for(device: Device, model: Model, options: Options, disk_rate: float = 0.0, again: bool = False) -> Machine:
    """The constants that plans for this model are made with; measured now if they aren't known yet."""
    if options.choice is not None and options.choice.machine is not None:
        return measured.read(options.choice.machine)
    formats = sorted({p.fmt for layer in model.layers[1:] for p in layer.tensors.values() if p.n > 1})
    file = model.file.paths[0] if model.file.paths else None
    return measured.machine(
        device, resolve().cache, formats, options.kv_bits, disk=file, disk_rate=disk_rate, again=again,
        tell=options.tell, apart=True,
    )  # fmt: skip


def decide(device: Device, model: Model, options: Options) -> tuple[Options, Expect | None]:
    """The options to run with, and what to expect. Without a limit, or where all fits as it is, nothing is decided."""
    choice = options.choice
    assert choice is not None
    if not known(device, choice) if options.places is not None else plain_fits(device, model, options):
        return replace(options, choice=None), None
    next(Planner(device, model, options, NOWHERE).fitting())  # what can't fit is refused before anything is measured
    planner = Planner(device, model, options, machine_for(device, model, options))
    shape = planner.best()[0]
    return shape.options, lambda work: planner.predict(shape.candidate.plan, work)


def known(device: Device, choice: Choice) -> bool:
    """Whether the machine's constants are at hand without measuring."""
    return choice.machine is not None or measured.kept(device, resolve().cache) is not None


def plain_fits(device: Device, model: Model, options: Options) -> bool:
    """Whether everything fits in memory with nothing chosen: then no plan can be better, and none is looked for."""
    assert options.choice is not None
    context, work = context_of(model, options.context), options.choice.work
    pages = cache_pages(device, model, context, options)
    together = min(options.sequences, work.batch)
    if pages < together * min(pages_for(work.prompt_len + work.gen_len), pages_for(context)):
        return False
    try:
        return options.kv_disk is None and not place(Budget(options.ram), device, model, pages, options)
    except OverBudget:
        return False


def pinned(options: Options, plan: Plan) -> Options:
    """The options that carry out a plan found before."""
    on_disk = plan.frames or any(p.kv == "disk" for p in plan.places)
    return replace(
        options, rows=plan.most or plan.rows * plan.chunk, sequences=plan.sequences,
        runs=-(-plan.sequences * plan.chunk // plan.most) if plan.most else plan.runs, places=plan.places,
        kv_bits=(plan.k_bits, plan.v_bits), slots=plan.slots or None,
        kv_disk=(options.kv_disk or cache_folder()) if on_disk else None, kv_frames=plan.frames or None,
    )  # fmt: skip


def read_plan(path: Path) -> Plan:
    """A plan from a file: as ``plan --json`` prints it, or the plan alone."""
    text = read_text(path, "plan")
    try:
        whole = json.loads(text)
        inner = whole.get("plan") if isinstance(whole, dict) else None
        return Plan.from_json(json.dumps(inner) if isinstance(inner, dict) else text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: is no plan, which is JSON ({error}); make one with `headrace plan -o`.") from None
    except HeadraceError as error:
        raise BadFile(f"{path}: {error}") from None


def percent_places(model: Model, asked: tuple[int, int, int, int, int, int]) -> tuple[Place, ...]:
    """FlexGen's six numbers where host and disk are all there is; BadRequest for shares of a device.

    Blocks' weights, and caches, to within half a layer of what is asked; the ends stay in memory.
    """
    wg, wc, cg, cc, hg, hc = asked
    if wg or cg or hg or hc != 100:
        raise BadRequest(
            "--percent: this machine has no device beside its memory and disk, so WG, CG and HG are 0 and HC is 100; "
            "--device-ram and --machine plan for one with a device."
        )
    blocks = [i for i, layer in enumerate(model.layers) if layer.kv is not None]
    stay = [round(share * len(blocks) / 100) for share in (wc, cc)]
    weights, caches = (
        [p.weights for p in spread([(PLAIN, n), (replace(PLAIN, weights="disk"), len(blocks) - n)])] for n in stay
    )
    out = [PLAIN] * len(model.layers)
    for i, w, c in zip(blocks, weights, caches, strict=True):
        out[i] = Place(w, "host", c, "host")
    return tuple(out)
