"""What the search found, in words and columns: the text of ``headrace plan``. Pure."""

from __future__ import annotations

from collections import Counter

from headrace.plan.cost import Prediction
from headrace.plan.machine import Machine
from headrace.plan.plan import Plan, figure, lines
from headrace.plan.search import Candidate, Found
from headrace.plan.sizes import ModelCost


def explain(model: ModelCost, machine: Machine, found: Found) -> str:
    """The plan, what it should do, what it takes of each tier, what binds, what lost, what would help."""
    plan, p = found.best.plan, found.best.prediction
    parts = [headline(model, p), placement(plan), _memory(machine, p), _terms(p)]
    if found.others:
        parts.append("Next best:\n" + lines([_loser(c) for c in found.others]))
    if found.gains:
        rows = [(g.what, f"{g.ratio:.3f} x as fast") for g in found.gains]
        parts.append("What would help:\n" + lines(rows))
    return "\n\n".join(parts)


def headline(model: ModelCost, p: Prediction) -> str:
    """One line of what to expect."""
    return (
        f"{model.name}, {p.work.batch} sequences of {p.work.prompt_len}+{p.work.gen_len} tokens: "
        f"{figure(p.tokens_per_s)} tokens/s, first token after {figure(p.ttft)} s, then one a sequence "
        f"every {figure(p.itl)} s; {figure(p.total, 4)} s in all; {p.bottleneck} binds."
    )


def placement(plan: Plan) -> str:
    """Block shape and how many layers have which place."""
    nodes = f", {plan.nodes} nodes" if plan.nodes > 1 else ""
    table = [("layers", "weights", "computed", "cache", "attends")]
    table += [(str(n), p.weights, p.compute, p.kv, p.attend) for p, n in sorted(Counter(plan.places).items())]
    return f"Block: {shape_of(plan)}, cache {plan.k_bits}/{plan.v_bits} bits{nodes}.\n{lines(table)}"


def shape_of(plan: Plan) -> str:
    """Sequences, rows and runs, in words."""
    if not plan.most:
        return (
            f"{plan.runs} runs of {plan.rows} sequences, prompts {plan.chunk} tokens at a time, activations on "
            f"{plan.activations}"
        )
    runs = -(-plan.sequences * plan.chunk // plan.most)
    frames = f", {plan.frames} pages of the cache in memory" if plan.frames else ""
    return f"{plan.sequences} sequences at a time, runs of up to {plan.most} rows, {runs} in a pass{frames}"


def _memory(machine: Machine, p: Prediction) -> str:
    what = list(dict.fromkeys(w for held in p.memory.values() for w in held))
    table: list[tuple[str, ...]] = [("GB", *what, "peak", "of")]
    for tier in machine.tiers:
        held = p.memory[tier.name]
        cells = (f"{held.get(w, 0) / 1e9:.3f}" for w in what)
        table.append((tier.name, *cells, f"{p.peak(tier.name) / 1e9:.3f}", f"{tier.capacity / 1e9:.3f}"))
    return lines(table)


def _terms(p: Prediction) -> str:
    table: list[tuple[str, ...]] = [("seconds a pass", "prompt", "next token")]
    for resource in dict.fromkeys([*p.terms["decode"], *p.terms["prefill"]]):
        cells = (p.terms[phase].get(resource, 0.0) for phase in ("prefill", "decode"))
        table.append((resource, *(f"{figure(s, 4)}" for s in cells)))
    return lines(table)


def _loser(c: Candidate) -> tuple[str, ...]:
    weights, kv = (Counter(getattr(p, what) for p in c.plan.places).most_common(1)[0][0] for what in ("weights", "kv"))
    where = f"weights mostly {weights}, cache mostly {kv}"
    if c.plan.most:
        where = f"{sum(p.streams for p in c.plan.places)} layers stream"
        return (shape_of(c.plan), where, c.why)
    return (f"{c.plan.runs} runs of {c.plan.rows}, prompts by {c.plan.chunk}", where, c.why)
