"""How long a pass takes when layers are read into a few buffers while others are computed. Pure."""

from __future__ import annotations

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
