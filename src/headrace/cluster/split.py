"""Which rank holds which layers: by hand (``--layer-split 0.1,0.4,0.5/1.0``) or evenly by weight. Pure functions.

Shares are of the model's blocks, target ranks before the slash and drafter ranks after it, in rank order. What the
shares leave over goes to the first rank of its side. The embedding goes with the first stage's blocks and the output
with the last's: only these two need them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import BadRequest
from headrace.model.layers import Layer

FLAG = "--layer-split"
SLACK = 1e-6
"""Three shares of 0.3333333 are a whole: rounding by hand is no mistake."""


@dataclass(frozen=True)
class Shares:
    """What was asked for: each rank's share of its model's blocks. draft: empty without a slash."""

    target: tuple[float, ...]
    draft: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.target) + len(self.draft)


def parse(text: str) -> Shares:
    """``0.1,0.4,0.5/1.0`` as shares. BadRequest names what is wrong with it."""
    sides = text.split("/")
    if len(sides) > 2:
        raise BadRequest(f"{FLAG} {text}: there are {len(sides) - 1} slashes; write TARGET/DRAFT, like 0.5,0.5/1.0.")
    read = [tuple(_share(text, part) for part in side.split(",")) for side in sides]
    for name, shares in zip(("target", "drafter"), read, strict=False):
        if math.fsum(shares) > 1 + SLACK:
            raise BadRequest(
                f"{FLAG} {text}: the {name}'s shares sum to {math.fsum(shares):.6g}; they must sum to 1 or less."
            )
    return Shares(*read)


def _share(text: str, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1 + SLACK:
        raise BadRequest(f"{FLAG} {text}: {part.strip()!r} is no share; each is a number from 0 to 1, like 0.25.")
    return value


def check(shares: Shares, ranks: int, drafting: bool) -> None:
    """BadRequest when the shares aren't for so many ranks, or for a draft model that is or isn't there."""
    if drafting and not shares.draft:
        raise BadRequest(
            f"{FLAG} has no slash and there is a draft model; say which ranks draft, like 0.5,0.5/1.0 "
            "(shares of the target before the slash, of the draft model after it)."
        )
    if shares.draft and not drafting:
        raise BadRequest(f"{FLAG} gives ranks to a draft model and there is none; give one, or leave the slash out.")
    if shares.ranks != ranks:
        raise BadRequest(
            f"{FLAG} is for {shares.ranks} ranks and {ranks} were started; give one share for each rank"
            + (" (before and after the slash together)." if shares.draft else ".")
        )


def by_shares(shares: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Blocks of each rank: its share rounded down; what is left over goes to the first, which may have none.

    BadRequest when another rank's share is less than a block: it would wait for nothing.
    """
    counts = [int(share * blocks + SLACK * blocks) for share in shares]
    for i, count in enumerate(counts[1:], 1):
        if count == 0:
            raise BadRequest(
                f"{FLAG}: a share of {shares[i]:g} is less than one of {blocks} blocks; give that rank at least "
                f"{1 / blocks:.4f}, or start one rank less."
            )
    counts[0] = blocks - sum(counts[1:])
    return tuple(counts)


def by_weight(weights: Sequence[float], rates: Sequence[float]) -> tuple[int, ...]:
    """Consecutive layers for each rank, at least one, so that the slowest takes as little time as it can.

    weights: cost of each layer (bytes read for a row); rates: cost each rank does in a second.
    """
    before = [0.0, *itertools.accumulate(weights)]
    return by_time(lambda rank, start, end: (before[end] - before[start]) / rates[rank], len(weights), len(rates))[0]


def by_time(seconds: Callable[[int, int, int], float], layers: int, ranks: int) -> tuple[tuple[int, ...], float]:
    """Consecutive layers for each rank, at least one, so that the slowest takes as little time as it can; that time.

    seconds: of a rank for the layers [start, end), more for more layers; inf: it can't have so many. Exact, by dynamic
    programming over the edges: best[e] is the least time in which the ranks so far do the first e layers.
    """
    if layers < ranks:
        raise BadRequest(f"{ranks} ranks were started and the model has {layers} layers; start fewer ranks.")
    best = [0.0] + [math.inf] * layers
    starts: list[list[int]] = []
    for rank in range(ranks):
        now, chosen = [math.inf] * (layers + 1), [rank] * (layers + 1)
        for end in range(rank + 1, layers - (ranks - 1 - rank) + 1):
            for start in range(end - 1, rank - 1, -1):
                own = seconds(rank, start, end)
                if own >= now[end]:
                    break  # a longer piece only takes longer
                if max(best[start], own) < now[end]:
                    now[end], chosen[end] = max(best[start], own), start
        best = now
        starts.append(chosen)
    counts, end = [], layers
    for chosen in reversed(starts):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts)), best[layers]


def ranges(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[first, end) of each rank's layers."""
    return tuple(itertools.pairwise([0, *itertools.accumulate(counts)]))


def over_ranks(
    layers: Sequence[Layer], drafts: Sequence[Layer] | None, split: str | None, ranks: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """([first, end) of each rank's layers, the target's ranks first; how many those are). A drafter (``drafts``: its
    layers) gets the last rank unless shares by hand (``split``) say otherwise; a lone rank has none to give."""
    if split is None:
        targets = ranks - 1 if drafts is not None and ranks > 1 else ranks
        edges = _edges(layers, None, targets)
        return (*edges, (0, len(drafts))) if drafts is not None and targets < ranks else edges, targets
    shares = parse(split)
    check(shares, ranks, drafting=drafts is not None)
    edges = _edges(layers, shares.target, len(shares.target))
    if drafts is not None:
        edges += _edges(drafts, shares.draft, len(shares.draft))
    return edges, len(shares.target)


def _edges(layers: Sequence[Layer], shares: Sequence[float] | None, ranks: int) -> tuple[tuple[int, int], ...]:
    """[first, end) of each rank's layers. Weights read for a row count, so the embedding, one row of it, doesn't."""
    if shares is not None:
        counts = list(by_shares(shares, len(layers) - 2))
        counts[0] += 1
        counts[-1] += 1
        return ranges(counts)
    table = layers[-1].tensors["output"]
    costs = [0.0, *(float(layer.nbytes) for layer in layers[1:])]
    costs[-1] += table.nbytes if table.shares else 0
    return ranges(by_weight(costs, [1.0] * ranks))
