"""How long a pass takes when layers are read into a few buffers while others are computed, and how long blocks take
to go round over several stages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def paced(layers: Sequence[tuple[float, float]], buffers: int, passes: int = 3) -> float:
    """Seconds of a pass in the steady state; layers: (seconds computed, seconds read; 0: it stays) in order.

    Reads follow each other in the order of use, each as soon as a buffer is free; a buffer is free when its layer has
    been computed. So a long layer between short ones (a large output matrix) hides few reads.
    """
    computed = reading = before = 0.0
    free = [0.0] * buffers
    """When each buffer is given back, in the order of use."""
    reads = 0
    for turn in range(passes):
        before = computed if turn else 0.0
        for seconds, read in layers:
            if read:
                reading = max(reading, free[reads % buffers]) + read
                computed = max(computed, reading) + seconds
                free[reads % buffers] = computed
                reads += 1
            else:
                computed += seconds
    return computed - before


def circling(stages: Sequence[tuple[float, float]], blocks: int, together: bool, hop: float, rounds: int = 12) -> float:
    """Seconds in which each of so many blocks passes all stages once, in the steady state.

    stages: of each, seconds that it computes a block, and that it reads its layers: once for all blocks that it takes
    together, which is one, or with ``together`` those that wait when it begins, as long as they are computed while it
    reads. hop: seconds from one stage to the next, and from the last to the first.
    """
    waiting: list[list[float]] = [[0.0] * blocks] + [[] for _ in stages[1:]]
    free = [0.0] * len(stages)
    ended: list[float] = []
    while len(ended) < blocks * rounds:
        starts = [max(free[i], min(queue)) if queue else math.inf for i, queue in enumerate(waiting)]
        at = min(range(len(stages)), key=lambda i: starts[i])
        computed, read = stages[at]
        here = sorted(t for t in waiting[at] if t <= starts[at])
        count = min(len(here), max(1, int(read / computed))) if together and computed else 1
        for t in here[:count]:
            waiting[at].remove(t)
        free[at] = starts[at] + max(read, count * computed)
        waiting[(at + 1) % len(stages)] += [free[at] + hop] * count
        ended += [free[at]] * count if at == len(stages) - 1 else []
    half = blocks * (rounds // 2)
    return (ended[-1] - ended[half - 1]) * blocks / (len(ended) - half)
