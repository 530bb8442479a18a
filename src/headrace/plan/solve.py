"""The integer programme of ``search.py``, solved by HiGHS or, without it, by trying mixes and moves."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Unsupported

F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
TIDY = 1e-6
"""Weight of all resources' time together beside the objective: of plans as fast, the one that moves less."""
GAP = 1e-4
"""Relative distance from the optimum at which HiGHS may stop."""
OPTIONS = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": GAP, "mip_abs_gap": 0.0,
           "parallel": "off"}  # fmt: skip
MANY = 6
"""Choices of a kind of layer up to which mixes are enumerated when HiGHS isn't there."""


@dataclass(frozen=True)
class Problem:
    """How many of each kind of layer get each choice. Columns are choices, grouped by kind.

    Minimise ``sum_p weights[p] * max(floor[p], max(times[p] @ n))`` over the two passes p, with
    ``memory @ n + sum of peaks + fixed <= capacity`` by tier; a peak is (tier, amount by column): the largest amount
    of any column with n > 0 (a buffer that all of them share). Seconds and bytes.
    """

    kind: I64
    """Of each column; ascending."""
    count: I64
    """Layers of each kind."""
    times: tuple[F64, F64]
    """[resources, columns] of the prompt's and the next token's pass."""
    weights: tuple[float, float]
    floor: tuple[float, float]
    memory: F64
    peaks: tuple[tuple[int, F64], ...]
    fixed: F64
    capacity: F64

    def fits(self, n: I64) -> NDArray[np.bool_]:
        """n: [..., columns]."""
        used = n @ self.memory.T + self.fixed
        for tier, amount in self.peaks:
            used[..., tier] += np.where(n > 0, amount, 0.0).max(axis=-1)
        return np.asarray((used <= self.capacity).all(axis=-1))

    def least(self) -> float:
        """No n has fewer seconds: each layer takes of each resource what its best choice for that resource takes."""
        total = 0.0
        for times, weight, floor in zip(self.times, self.weights, self.floor, strict=True):
            best = sum(times[:, self.kind == k].min(axis=1) * c for k, c in enumerate(self.count))
            if not np.isfinite(best).all() or not (self.fixed <= self.capacity).all():
                return float("inf")
            total += weight * max(float(np.max(best)), floor)
        return total

    def seconds(self, n: I64) -> F64:
        """The objective, with a little of everything's sum; n: [..., columns]."""
        total = np.zeros(n.shape[:-1])
        for times, weight, floor in zip(self.times, self.weights, self.floor, strict=True):
            busy = n @ times.T
            total = total + weight * (np.maximum(busy.max(axis=-1), floor) + TIDY * busy.sum(axis=-1))
        return total


@dataclass(frozen=True)
class Engine:
    """``solve``: from a problem to n [columns], None when nothing fits; ``relaxed``: a bound that is quick to get."""

    name: str
    solve: Callable[[Problem], I64 | None]
    relaxed: Callable[[Problem], float] | None


def solver(highs: bool | None) -> Engine:
    """HiGHS where it is installed and not forbidden."""
    if highs is not False:
        try:
            import highspy
        except ImportError:
            if highs:
                raise Unsupported("HiGHS isn't installed; pip install 'headrace[plan]' brings it.") from None
        else:
            return Engine("HiGHS", lambda p: solve_highs(highspy, p), lambda p: relaxed_highs(highspy, p))
    return Engine("few places", solve_few, None)


class _Programme:
    """Columns and rows on their way to HiGHS."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        """Seconds that one unit of the objective stands for."""
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[float, float, dict[int, float]]] = []

    def column(self, cost: float = 0.0, upper: float = float("inf"), whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, low: float, high: float, entries: dict[int, float]) -> None:
        self.rows.append((low, high, {i: v for i, v in entries.items() if v}))


def _programme(problem: Problem, tight: float) -> _Programme:
    """Time in units of the largest use, memory in each tier's capacity, so that the solver's tolerances mean
    the same everywhere. The first columns are the problem's."""
    inf, layers, top = float("inf"), problem.count[problem.kind], max(problem.weights)
    unit = max(float((t * layers).max()) for t in problem.times)
    p = _Programme(unit * top)
    tidy = sum(w / top * TIDY * t.sum(axis=0) / unit for t, w in zip(problem.times, problem.weights, strict=True))
    for cost, most in zip(np.asarray(tidy), layers, strict=True):
        p.column(float(cost), float(most), True)
    for kind, count in enumerate(problem.count):
        p.row(float(count), float(count), {int(i): 1.0 for i in np.flatnonzero(problem.kind == kind)})
    for times, weight, floor in zip(problem.times, problem.weights, problem.floor, strict=True):
        seconds = p.column(weight / top)
        p.row(floor / unit, inf, {seconds: 1.0})
        for use in times:
            p.row(0.0, inf, {seconds: 1.0, **{i: -float(v) / unit for i, v in enumerate(use)}})
    held: list[dict[int, float]] = [{} for _ in problem.capacity]
    for tier, amount in problem.peaks:
        peak, size = p.column(), max(problem.capacity[tier], 1.0)
        held[tier][peak] = 1.0
        for value in np.unique(amount[amount > 0]):
            columns = np.flatnonzero(amount == value)
            used = p.column(upper=1.0, whole=True)
            most = float(problem.count[np.unique(problem.kind[columns])].sum())
            p.row(-inf, 0.0, {used: -most, **{int(i): 1.0 for i in columns}})
            p.row(0.0, inf, {peak: 1.0, used: -float(value) / size})
    for tier, capacity in enumerate(problem.capacity):
        size = max(capacity, 1.0)
        use = {i: float(v) / size for i, v in enumerate(problem.memory[tier])}
        p.row(-inf, (capacity - problem.fixed[tier]) / size * tight, {**use, **held[tier]})
    return p


def _engine(highspy: Any) -> Any:
    """HiGHS 1.16 greets on standard output while it is made, before it can be told not to: there, JSON may follow."""
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        return highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


def _run(highspy: Any, p: _Programme, whole: bool) -> Any:
    """The engine after solving, or None when there is no solution."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(p.cost), len(p.rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(p.cost), np.zeros(len(p.cost)), np.array(p.upper)
    lp.row_lower_ = np.array([low for low, _, _ in p.rows])
    lp.row_upper_ = np.array([high for _, high, _ in p.rows])
    kinds = highspy.HighsVarType
    if whole:
        lp.integrality_ = [kinds.kInteger if w else kinds.kContinuous for w in p.whole]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(r) for _, _, r in p.rows)]).astype(np.int32)
    lp.a_matrix_.index_ = np.array([i for _, _, r in p.rows for i in r], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([v for _, _, r in p.rows for v in r.values()])
    engine = _engine(highspy)
    for option, value in OPTIONS.items():
        engine.setOptionValue(option, value)
    engine.passModel(lp)
    engine.run()
    return engine if engine.getModelStatus() == highspy.HighsModelStatus.kOptimal else None


def relaxed_highs(highspy: Any, problem: Problem) -> float:
    """The seconds that whole numbers can't go below."""
    p = _programme(problem, 1.0)
    engine = _run(highspy, p, False)
    return float("inf") if engine is None else engine.getInfo().objective_function_value * p.unit * (1 - 1e-4)


def solve_highs(highspy: Any, problem: Problem, tight: float = 1.0) -> I64 | None:
    """Exact to ``GAP``. Memory is checked in exact numbers afterwards, and a touch less offered if it fails."""
    engine = _run(highspy, _programme(problem, tight), True)
    if engine is None:
        return None
    n: I64 = np.rint(np.array(engine.getSolution().col_value)[: len(problem.kind)]).astype(np.int64)
    if problem.fits(n):
        return n
    return solve_highs(highspy, problem, 1.0 - 1e-6) if tight == 1.0 else None


def solve_few(problem: Problem) -> I64 | None:
    """Without HiGHS: exact over mixes of at most three choices for one kind of block with at most ``MANY`` choices
    (two tiers that one place computes from); else the best of hill climbs, which is near but not proven."""
    several = [kind for kind, count in enumerate(problem.count) if count > 1]
    if len(several) > 1 or max(np.bincount(problem.kind)) > MANY:
        return _climbs(problem)
    best, value = None, float("inf")
    rest = _mixes(problem, several[0]) if several else np.zeros((1, len(problem.kind)), dtype=np.int64)
    for parts in itertools.product(*(_mixes(problem, k) for k in range(len(problem.count)) if k not in several)):
        n, seconds = _least(problem, rest + sum(parts))
        if n is not None and seconds < value:
            best, value = n, seconds
    return best


def _least(problem: Problem, tried: I64) -> tuple[I64 | None, float]:
    """The best of these that fits: n [ways, columns]."""
    good = np.flatnonzero(problem.fits(tried))
    if not good.size:
        return None, float("inf")
    seconds = problem.seconds(tried[good])
    first = int(seconds.argmin())
    return tried[good[first]], float(seconds[first])


def _climbs(problem: Problem) -> I64 | None:
    """From every choice taken by all of its kind (the other kinds at their last choice), and from every choice taken by
    all kinds alike, move some layers from one choice to another as long as that helps."""
    columns = [np.flatnonzero(problem.kind == kind) for kind in range(len(problem.count))]
    base = np.zeros(len(problem.kind), dtype=np.int64)
    base[[c[-1] for c in columns]] = problem.count
    starts = []
    for kind, own in enumerate(columns):
        for column in own:
            starts.append(base.copy())
            starts[-1][own] = 0
            starts[-1][column] = problem.count[kind]
    for choice in range(max(map(len, columns))):
        starts.append(np.zeros_like(base))
        starts[-1][[own[min(choice, len(own) - 1)] for own in columns]] = problem.count
    best, value = None, float("inf")
    for start in starts:
        n, seconds = _least(problem, start[None])
        while n is not None:
            better, less = _least(problem, _moves(problem, n, columns))
            if better is None or less >= seconds * (1 - 1e-9):
                break
            n, seconds = better, less
        if n is not None and seconds < value:
            best, value = n, seconds
    return best


def _moves(problem: Problem, n: I64, columns: list[NDArray[np.int_]]) -> I64:
    """n with 1, 2, 4 ... or all of a choice's layers moved to another of its kind: [moves, columns]."""
    moves = {
        (a, b, size)
        for own in columns
        for a in own[n[own] > 0].tolist()
        for b in own.tolist()
        if a != b
        for size in (*(1 << i for i in range(int(n[a]).bit_length()) if 1 << i < n[a]), int(n[a]))
    }
    out = np.repeat(n[None, :], len(moves) + 1, axis=0)
    for row, (a, b, size) in zip(out, sorted(moves), strict=False):
        row[a] -= size
        row[b] += size
    return out


def _mixes(problem: Problem, kind: int) -> I64:
    """All ways to give this kind's layers at most three of its choices: [ways, columns]."""
    columns, count = np.flatnonzero(problem.kind == kind).tolist(), int(problem.count[kind])
    out = []
    for some in itertools.combinations(columns, min(3, len(columns))):
        for cut in itertools.combinations(range(count + len(some) - 1), len(some) - 1):
            n = np.zeros(len(problem.kind), dtype=np.int64)
            ends = (-1, *cut, count + len(some) - 1)
            n[list(some)] = [b - a - 1 for a, b in itertools.pairwise(ends)]
            out.append(n)
    return np.array(out)
