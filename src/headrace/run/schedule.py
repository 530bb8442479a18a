"""What goes into the next block: a pure decision over plain data.

A run is filled first with next tokens, then with prompt chunks, then with guesses. Nothing here knows a
device, a clock or a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """The plan's part that the loop follows: the order is all there is.

    rows: most rows in a run. runs: most runs in a block. blocks: most blocks in flight. guesses: most
    guessed rows in a run. chunk: most rows of one prompt in a run. sequences: most sequences at a time.
    nexts: most sequences whose next tokens share a run (0: as many as there are rows). even: next tokens are divided
    evenly among the blocks in flight, so that every stage has its part of them.
    """

    rows: int = 512
    runs: int = 1
    blocks: int = 1
    guesses: int = 0
    chunk: int = 512
    sequences: int = 256
    nexts: int = 0
    even: bool = False


@dataclass(frozen=True)
class Demand:
    """Known tokens of a sequence that were not launched yet; ``prompt``: the sequence has emitted nothing."""

    seq: int
    known: int
    prompt: bool


@dataclass(frozen=True)
class Share:
    """So many known rows of a sequence in a run."""

    seq: int
    known: int


def fill(demands: Sequence[Demand], order: Order) -> list[list[Share]]:
    """Split demands into at most ``order.runs`` runs of at most ``order.rows`` rows; served in the order given.

    Next tokens come before prompts, and are spread evenly over the runs so that every pass of a block
    costs the same; prompts fill what is left, a chunk of one prompt at a time in each run.
    """
    nexts = [d for d in demands if not d.prompt and d.known]
    prompts = [d for d in demands if d.prompt and d.known]
    runs: list[list[Share]] = []
    if nexts:
        most = min(order.nexts or order.rows, order.rows)
        count = min(order.runs, -(-len(nexts) // most))
        nexts = nexts[: count * most]
        runs = [[] for _ in range(count)]
        for i, demand in enumerate(nexts):
            runs[i % count].append(Share(demand.seq, min(demand.known, order.chunk)))
    room = [order.rows - sum(s.known for s in run) for run in runs]
    at = 0
    for demand in prompts:
        left = demand.known
        while left:
            while at < len(runs) and room[at] <= 0:
                at += 1
            if at == len(runs):
                if len(runs) == order.runs:
                    return runs
                runs.append([])
                room.append(order.rows)
            size = min(left, room[at], order.chunk)
            runs[at].append(Share(demand.seq, size))
            room[at] -= size
            left -= size
            if size == order.chunk and left:
                at += 1
    return runs
