"""A model of floating-point weights as a model of quantised ones, converted as it is read.

It is a model of its own: its name and its digest say so, and files derived from it (packs) are keyed by that.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadRequest
from headrace.formats.fit import FITTED, fitted
from headrace.formats.index import Derived, ModelFile, Rows, named
from headrace.formats.quant import F32, dequantise
from headrace.formats.tensor import BLOCKS, TensorInfo, show, tensor_nbytes

TABLES = re.compile(r"(.*\.)?(token_embd|output|embed_tokens|lm_head|wte|word_embeddings|embed_in|embed_out)$")
"""Embeddings and output matrices, by their names in GGUF files, Hugging Face folders and our own, less ``.weight``."""
VALUES = re.compile(r".*(attn_v|v_proj)$")
CLOSING = re.compile(r".*(ffn_down|down_proj|fc2|dense_4h_to_h)$")
"""What makes the values, and what closes a block: the matrices whose rounding costs most a bit (docs/log.md)."""
ANY = re.compile("")
RECIPES: Mapping[str, tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]] = {
    "q4": ((TABLES, ("Q8_0",)), (VALUES, ("Q8_0",)), (CLOSING, ("Q5_K", "Q5_0")), (ANY, ("Q4_K", "IQ4_NL"))),
    "q8": ((ANY, ("Q8_0",)),),
}
"""What ``--requant`` may say -> formats by name, the first whose blocks divide a row."""
FLOATS = ("F32", "F16", "BF16")
EXACT = ("position", "wpe")
"""In names of tables of positions, which are small and added to every row: they stay."""
Inputs: TypeAlias = tuple[str, Callable[[ModelFile], Mapping[str, F32]]]
AT_ONCE = 1 << 20
"""Weights converted at a time, so that it takes little memory beside the result."""


def stored(kind: str, name: str, k: int) -> str | None:
    """The format in which a matrix of this name has its rows of k values; None: as it is."""
    if any(word in name for word in EXACT):
        return None
    formats = next(formats for names, formats in RECIPES[kind] if names.match(name.removesuffix(".weight")))
    return next((fmt for fmt in formats if k % BLOCKS[fmt][0] == 0), None)


def requantise(file: ModelFile, kind: str, inputs: Inputs | None = None) -> ModelFile:
    """The same model with every matrix quantised; closing it closes ``file``.

    inputs: (what it says, in a word; tensors' inputs' mean squares), asked for when a fitted matrix is first read.

    BadRequest for a kind that isn't in ``RECIPES``, and for a model that is quantised already.
    """
    if kind not in RECIPES:
        raise BadRequest(f"--requant {kind} is not known; choose one of {', '.join(RECIPES)}.")
    tensors = {}
    for name, t in file.tensors.items():
        into = stored(kind, name, t.k) if t.n > 1 else None
        if t.n > 1 and t.fmt not in FLOATS and not any(word in name for word in EXACT):
            raise BadRequest(
                f"{t.path}: is quantised already (tensor {show(name)} is {t.fmt}), and doing so again would only lose; "
                "leave --requant out, or take the model's f16, bf16 or f32 file."
            )
        tensors[name] = replace(t, fmt=into, nbytes=tensor_nbytes(into, t.shape)) if into else t
    metadata = {**file.metadata, "general.name": f"{named(file)}-{kind}"}
    fits = any(t.fmt in FITTED for t in tensors.values())
    how = f"requantised {kind}, {sorted({(n, t.fmt) for n, t in tensors.items()})}, fitted"
    weigh = functools.cache(lambda: inputs[1](file) if inputs else {})
    how += f" to {inputs[0]}" if inputs and fits else ""
    return Requantised(file.kind, metadata, tensors, file.paths, file.types, source=file, how=how, weigh=weigh)


@dataclass(frozen=True, eq=False)
class Requantised(Derived):
    """The source in other formats; ``TensorInfo.offset`` still is its files'. weigh: tensor -> [k]."""

    weigh: Callable[[], Mapping[str, F32]] = field(kw_only=True)

    def read_into(self, info: TensorInfo, out: NDArray[np.uint8], rows: Rows = None) -> None:
        original = self.source.tensors[info.name]
        if original.fmt == info.fmt:
            self.source.read_into(original, out, rows)
            return
        wanted = np.arange(original.n) if rows is None else np.arange(original.n)[rows]
        step = max(1, AT_ONCE // original.k)
        weigh = self.weigh().get(info.name) if info.fmt in FITTED else None
        into = out.reshape(len(wanted), info.row_nbytes)
        for at in range(0, len(wanted), step):
            some = wanted[at : at + step]
            values = dequantise(original.fmt, self.source.read(original, some), len(some), original.k)
            into[at : at + step] = fitted(info.fmt, values, weigh)
