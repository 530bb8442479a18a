"""FlexGen's six percentages as a placement of layers (Sheng et al., ICML 2023, arXiv 2303.06865)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.errors import Unsupported
from headrace.plan.plan import Place, spread
from headrace.plan.sizes import ModelCost

Percent: TypeAlias = tuple[int, int, int, int, int, int]
"""Shares of weights, cache and activations: WG WC CG CC HG HC; what is left of each pair is the disk's."""
ALL_DEVICE: Percent = (100, 0, 100, 0, 100, 0)


@dataclass(frozen=True)
class Realised:
    """The six percentages as they came out, and the places that do it."""

    places: tuple[Place, ...]
    activations: str
    percent: tuple[float, ...]


def checked(percent: Sequence[int]) -> Percent:
    """Six whole numbers, each pair at most 100 together; Unsupported otherwise."""
    if len(percent) != 6 or any(isinstance(p, bool) or not isinstance(p, int) or not 0 <= p <= 100 for p in percent):
        raise Unsupported(f"--percent takes six whole numbers of 0 to 100 (WG WC CG CC HG HC), got {list(percent)}.")
    wg, wc, cg, cc, hg, hc = percent
    for name, near, far in (("weights", wg, wc), ("cache", cg, cc), ("activations", hg, hc)):
        if near + far > 100:
            raise Unsupported(f"--percent: {name} on device and host are {near} + {far} percent, over 100.")
    return (wg, wc, cg, cc, hg, hc)


def placed(
    model: ModelCost, percent: Sequence[int], tiers: Sequence[str] = ("device", "host", "disk"),
    host_attention: bool = True,
) -> Realised:  # fmt: skip
    """The placement with each block wholly somewhere, every share within half a block of what was asked.

    The two ends go where most of the weights are. Activations lie on one tier, as in FlexGen (which takes 100s only).
    ``host_attention``: its --cpu-cache-compute, for a cache that isn't on the device.
    """
    wg, wc, cg, cc, hg, hc = checked(percent)
    shares = ((wg, wc, 100 - wg - wc), (cg, cc, 100 - cg - cc), (hg, hc, 100 - hg - hc))
    if 100 not in shares[2]:
        raise Unsupported(f"--percent: activations lie on one tier; give {hg} {hc} as 100 0, 0 100 or 0 0.")
    blocks = [i for i, layer in enumerate(model.layers) if layer.kind == "block"]
    near, counts = tiers[0], [_apportion(share, len(blocks)) for share in shares[:2]]
    weights, cache = (
        [p.weights for p in spread((Place(t, near, near, near), n) for t, n in zip(tiers, c, strict=True))]
        for c in counts
    )
    most = tiers[max(range(3), key=lambda i: (counts[0][i], -i))]
    out = [Place(most, near, near, near)] * len(model.layers)
    for i, w, c in zip(blocks, weights, cache, strict=True):
        out[i] = Place(w, near, c, near if c == near or not host_attention else tiers[1])
    if model.tied:
        out[0] = out[-1]
    real = [100 * c[i] / len(blocks) for c in counts for i in (0, 1)]
    return Realised(tuple(out), tiers[shares[2].index(100)], (*real, float(hg), float(hc)))


def comes_out(asked: Sequence[int], real: Sequence[float]) -> str:
    """A sentence for people."""
    return f"--percent {' '.join(map(str, asked))} comes out as {' '.join(f'{x:.1f}' for x in real)}."


def _apportion(share: tuple[int, int, int], count: int) -> list[int]:
    """Whole numbers in these proportions: largest remainders, ties to the nearer tier."""
    exact = [s * count / 100 for s in share]
    out = [int(e) for e in exact]
    for i in sorted(range(3), key=lambda i: (out[i] - exact[i], i))[: count - sum(out)]:
        out[i] += 1
    return out
