"""FlexGen's published policies and results, as data.

Sources: the paper (Sheng et al., ICML 2023, arXiv 2303.06865; tables 2, 15-18, 23), its public benchmark suite
(``benchmark/flexllmgen/bench_suite.py``, ``bench_*_4x1.sh``) and ``benchmark/batch_size_table.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.plan.flexgen import ALL_DEVICE, Percent


@dataclass(frozen=True)
class Policy:
    """``rows`` x ``runs`` is its gpu batch size x number of gpu batches; ``weight4``, ``cache4``: in 4 bits.

    ``pinned``: weights in pinned host memory; ``overlap``: its overlapped loop; ``projected``: run in its debug mode
    "fewer_batch", which times ten layers of the first decoded token and multiplies.
    """

    rows: int
    runs: int
    percent: Percent
    weight4: bool = False
    cache4: bool = False
    pinned: bool = True
    overlap: bool = True
    projected: bool = True

    @property
    def host_attention(self) -> bool:
        """Its --cpu flag: set wherever the cache leaves the device uncompressed."""
        return self.percent[2] < 100 and not self.cache4


def _rows(
    size: str, compressed: bool, shapes: Mapping[int, tuple[int, int, Percent]]
) -> dict[tuple[str, int, bool], Policy]:
    weight4 = compressed and size != "30b"  # the 30B runs compress the cache only
    pinned, loop = size != "175b", size != "6.7b"  # the smallest runs without overlap, and in full
    return {
        (size, prompt, compressed): Policy(rows, runs, percent, weight4, compressed, pinned, loop, loop)
        for prompt, (rows, runs, percent) in shapes.items()
    }


_HOST: Percent = (0, 100, 0, 100, 0, 100)
_DISK: Percent = (0, 50, 0, 0, 0, 100)
POLICIES: Mapping[tuple[str, int, bool], Policy] = {
    **_rows("6.7b", False, {256: (4, 1, ALL_DEVICE), 512: (2, 1, ALL_DEVICE), 1024: (1, 1, ALL_DEVICE)}),
    **_rows("6.7b", True, {256: (128, 1, ALL_DEVICE), 512: (72, 1, ALL_DEVICE), 1024: (28, 1, ALL_DEVICE)}),
    **_rows("30b", False, {256: (160, 2, (10, 90, 0, 100, 0, 100)), 512: (48, 3, (20, 80, 0, 100, 0, 100)),
                           1024: (20, 4, (4, 96, 0, 100, 0, 100))}),
    **_rows("30b", True, {256: (128, 8, _HOST), 512: (64, 8, _HOST), 1024: (20, 12, _HOST)}),
    **_rows("175b", False, {256: (64, 8, _DISK), 512: (32, 8, _DISK), 1024: (12, 12, _DISK)}),
    **_rows("175b", True, {256: (96, 3, _HOST), 512: (48, 3, _HOST), 1024: (12, 4, _HOST)}),
}  # fmt: skip
"""(size, prompt length, 4 bit) -> policy; 32 tokens generated. None is published for 128+128."""

FOUR_NODES: Mapping[str, Policy] = {
    "6.7b": Policy(24, 1, ALL_DEVICE, overlap=False, projected=False),
    "30b": Policy(64, 3, (20, 80, 0, 100, 0, 100), projected=False),
    "175b": Policy(40, 1, _HOST, pinned=False, projected=False),
}
"""Each node's, four micro-batches in flight, 512+32."""
FOUR_NODES_PUBLISHED: Mapping[str, tuple[float, float]] = {
    "6.7b": (201.12, 764.65), "30b": (23.61, 48.94), "175b": (2.33, 3.86),
}  # fmt: skip
"""Tokens/s of the whole, and of decoding alone."""

SIZES = ("6.7b", "30b", "175b")
LENGTHS = ((256, 32), (512, 32), (1024, 32), (128, 128))
PUBLISHED: Mapping[str, Mapping[tuple[int, int], tuple[float | None, ...]]] = {
    "accelerate": {(256, 32): (50.66, 1.34, 0.02), (512, 32): (25.12, 0.62, 0.01), (1024, 32): (13.01, 0.31, 0.01),
                   (128, 128): (73.4, 1.55, 0.021)},
    "zero": {(256, 32): (14.52, 1.30, 0.01), (512, 32): (9.28, 0.60, 0.01), (1024, 32): (4.59, 0.29, None),
             (128, 128): (19.2, 1.72, 0.024)},
    "flexgen": {(256, 32): (53.29, 16.01, 1.36), (512, 32): (25.26, 7.32, 0.69), (1024, 32): (13.72, 3.50, 0.35),
                (128, 128): (106.4, 24.6, 2.41)},
    "flexgen 4-bit": {(256, 32): (56.72, 16.86, 2.26), (512, 32): (29.12, 8.70, 1.12),
                      (1024, 32): (13.18, 3.98, 0.42), (128, 128): (92.6, 39.1, 4.26)},
}  # fmt: skip
"""System -> (prompt, generated) -> tokens/s of OPT-6.7B, 30B, 175B on one T4; None: out of memory."""

ROW_BATCHES: Mapping[str, Mapping[int, tuple[tuple[int, str], ...]]] = {
    "accelerate": {256: ((4, "device"), (16, "host"), (4, "disk")), 512: ((2, "device"), (8, "host"), (2, "disk")),
                   1024: ((1, "device"), (4, "host"), (1, "disk"))},
    "zero": {256: ((32, "host"), (8, "host"), (2, "disk")), 512: ((16, "host"), (4, "host"), (1, "disk")),
             1024: ((8, "host"), (2, "host"), (1, "disk"))},
}  # fmt: skip
"""Batch and the tier of the weights (``benchmark/hf_ds/bench_hf.py``)."""
