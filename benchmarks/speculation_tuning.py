"""PipeInfer's tuning advice, checked in virtual time: the numbers of docs/tuning.md.

    python benchmarks/speculation_tuning.py [--tokens 400]

8 nodes (7 for a 70B-like target, 1 for a 1.1B-like draft), Gigabit, the CPU's cost of rows unless said otherwise.
Rates are tokens/s; work is guesses launched a token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from headrace.simulate.acceptance import Acceptance, unit
from headrace.simulate.cluster import (
    CPU_CURVE,
    GPU_CURVE,
    Cluster,
    Curve,
    even,
    ours,
    pipeinfer,
    plain,
    run_simulation,
    synchronous,
)  # fmt: skip
from headrace.simulate.network import GIGABIT
from headrace.simulate.report import Report
from headrace.speculate.pipeinfer import Knobs

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Honest:
    """A draft whose confidence varies and is honest: it says p, from 0.2 to 1 (mean 0.73), and is right so often."""

    seed: int

    def stated(self, position: int) -> tuple[float, float]:
        p = 0.2 + 0.79 * unit(position * 31 + self.seed) ** 0.5
        return p, 0.5 * (1 - p)

    def rank(self, position: int) -> int:
        first, second = self.stated(position)
        luck = unit(position * 1_000_003 + self.seed * 7919 + 1)
        return 0 if luck < first else 1 if luck < first + second else -1


def cluster(curve: Curve) -> Cluster:
    full = 0.4 if curve is CPU_CURVE else 0.07
    return Cluster(even(80, 7), (full / 80,) * 7, curve, GIGABIT, 8192, 2, full * 1.1 / 70)


def runs(curve: Curve, a: float | None, knobs: Knobs, tokens: int) -> list[Report]:
    """a: of the acceptance model; None: the honest draft."""
    lucks = [Honest(seed) if a is None else Acceptance(a, seed) for seed in SEEDS]
    return [run_simulation(cluster(curve), luck, pipeinfer(knobs), tokens) for luck in lucks]


def line(name: str, found: list[Report]) -> None:
    rate = len(found) / sum(1 / r.rate for r in found)
    work = sum(r.launched / r.tokens for r in found) / len(found)
    print(f"| {name} | {rate:.3f} | {work:.1f} |", flush=True)


def section(title: str) -> None:
    print(f"\n### {title}\n| setting | tokens/s | guesses a token |\n|---|---|---|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    n = parser.parse_args().tokens
    low = 0.001
    section("Drafts over 8 lose (a = 0.66)")
    for draft in (1, 2, 4, 8, 12, 16):
        line(f"--draft {draft} -np 1", runs(CPU_CURVE, 0.66, Knobs(draft, 1, low, 0.2), n))
    section("The same where rows are nearly free (GPU-like, a = 0.66)")
    for draft in (1, 2, 4, 8, 12, 16):
        line(f"--draft {draft} -np 1", runs(GPU_CURVE, 0.66, Knobs(draft, 1, low, 0.2), n))
    for curve, name in ((CPU_CURVE, "CPU"), (GPU_CURVE, "GPU-like")):
        section(f"Wide trees lose, narrow deep ones win ({name}, a = 0.66)")
        for np in (1, 2, 3, 4):
            line(f"--draft 6 -np {np} -ps 0.03", runs(curve, 0.66, Knobs(6, np, low, 0.03), n))
    section("-pa: low for an honest draft that is often right (CPU, draft 2)")
    for pa in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9):
        line(f"-pa {pa}", runs(CPU_CURVE, None, Knobs(2, 1, pa, 0.2), n))
    section("-pr saves work without adding speed (CPU, honest draft, draft 1)")
    for pr in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        line(f"-pa 0.1 -pr {pr}", runs(CPU_CURVE, None, Knobs(1, 1, 0.1, 0.2, pr), n))
    section("-pd undoes -pa and -pr, the more the larger (CPU, honest draft, draft 1)")
    for pd in (0.0, 0.01, 0.05, 0.2, 0.5):
        line(f"-pa 0.7 -pr 0.1 -pd {pd}", runs(CPU_CURVE, None, Knobs(1, 1, 0.7, 0.2, 0.1, pd), n))
    section("For comparison (a = 0.66)")
    for curve, name in ((CPU_CURVE, "CPU"), (GPU_CURVE, "GPU-like")):
        for strategy in (plain(), synchronous(2), synchronous(8), ours()):
            line(
                f"{name}: {strategy.name}",
                [run_simulation(cluster(curve), Acceptance(0.66, s), strategy, n) for s in SEEDS],
            )


if __name__ == "__main__":
    main()
