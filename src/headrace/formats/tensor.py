"""What the index holds of a tensor, and the sizes of every storage type there is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BadFile

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    # id: (name, weights a block, bytes a block); ggml.h enum ggml_type, block structs of ggml-common.h
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

KNOWN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         "IQ4_NL", "IQ4_XS")  # fmt: skip
"""The formats we compute with, in the order of ``enum Format`` of the kernel interface."""

BLOCKS: dict[str, tuple[int, int]] = {name: (width, size) for name, width, size in GGML_TYPES.values()}
"""Storage type -> (weights a block, bytes a block)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's place in a file. ``shape`` outermost first (NumPy's order): [..., n, k], k contiguous.

    ``nbytes`` is 0 when the type is so unknown that its size is too (``fmt`` is then "type <number>").
    """

    name: str
    fmt: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def k(self) -> int:
        """Values in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def n(self) -> int:
        """Rows: all dimensions but the last, multiplied."""
        return math.prod(self.shape[:-1])

    @property
    def row_nbytes(self) -> int:
        return self.nbytes // self.n if self.n else 0


def row_nbytes(fmt: str, k: int) -> int:
    """Bytes of a row of k values. ValueError when k isn't whole blocks, KeyError for a type without a size."""
    width, size = BLOCKS[fmt]
    if k % width:
        raise ValueError(f"{k} values are no whole number of {fmt} blocks of {width}")
    return k // width * size


def tensor_nbytes(fmt: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in file order; errors as ``row_nbytes``."""
    return math.prod(shape[:-1]) * row_nbytes(fmt, shape[-1] if shape else 1)


def check_extents(path: Path, tensors: list[TensorInfo]) -> None:
    """BadFile when two tensors of one file share bytes."""
    last = None
    for t in sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset):
        if last is not None and t.offset < last.offset + last.nbytes:
            raise BadFile(f"{path}: tensors {show(last.name)} and {show(t.name)} overlap; download it again.")
        last = t


def show(text: str) -> str:
    """A name out of a file, fit for a message: quoted, escaped, short."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 80 else quoted[:76] + "...'"
