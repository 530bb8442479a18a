"""A model of floating-point weights as a model of quantised ones, converted as it is read.

It is a model of its own: its name and its digest say so, and files derived from it (packs) are keyed by that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadRequest
from headrace.formats.index import Derived, ModelFile, Rows, named
from headrace.formats.quant import dequantise, quantise
from headrace.formats.tensor import BLOCKS, TensorInfo, show, tensor_nbytes

FORMATS: Mapping[str, str] = {"q4": "Q4_1", "q8": "Q8_0"}
"""What ``--requant`` may say, and the format of the layers' matrices then."""
TABLE = "Q8_0"
"""Of the embedding and of the output matrix in either: at 4 bits they alone cost 11% perplexity on Gemma 3 270M."""
TABLES = re.compile(r"(token_embd|output)\.weight|(.*\.)?(embed_tokens|lm_head|wte|embed_in|embed_out)\.weight")
"""Their names in GGUF files and Hugging Face folders."""
FLOATS = ("F32", "F16", "BF16")
EXACT = ("position", "wpe")
"""In names of tables of positions, which are small and added to every row: they stay."""
AT_ONCE = 1 << 20
"""Weights converted at a time, so that it takes little memory beside the result."""


def requantise(file: ModelFile, kind: str) -> ModelFile:
    """The same model with every matrix quantised; closing it closes ``file``.

    BadRequest for a kind that isn't in ``FORMATS``, and for a model that is quantised already.
    """
    fmt = FORMATS.get(kind)
    if fmt is None:
        raise BadRequest(f"--requant {kind} is not known; choose one of {', '.join(FORMATS)}.")
    tensors = {}
    for name, t in file.tensors.items():
        matrix = t.n > 1 and not any(word in name for word in EXACT)
        if matrix and t.fmt not in FLOATS:
            raise BadRequest(
                f"{t.path}: is quantised already (tensor {show(name)} is {t.fmt}), and doing so again would only lose; "
                "leave --requant out, or take the model's f16, bf16 or f32 file."
            )
        into = TABLE if TABLES.fullmatch(name) else fmt
        fits = matrix and t.k % BLOCKS[into][0] == 0
        tensors[name] = replace(t, fmt=into, nbytes=tensor_nbytes(into, t.shape)) if fits else t
    metadata = {**file.metadata, "general.name": f"{named(file)}-{kind}"}
    how = f"requantised {fmt}, tables {TABLE}"
    return Requantised(file.kind, metadata, tensors, file.paths, file.types, source=file, how=how)


class Requantised(Derived):
    """The source in other formats; ``TensorInfo.offset`` still is its files'."""

    def read_into(self, info: TensorInfo, out: NDArray[np.uint8], rows: Rows = None) -> None:
        original = self.source.tensors[info.name]
        if original.fmt == info.fmt:
            self.source.read_into(original, out, rows)
            return
        wanted = np.arange(original.n) if rows is None else np.arange(original.n)[rows]
        step = max(1, AT_ONCE // original.k)
        into = out.reshape(len(wanted), info.row_nbytes)
        for at in range(0, len(wanted), step):
            some = wanted[at : at + step]
            values = dequantise(original.fmt, self.source.read(original, some), len(some), original.k)
            into[at : at + step] = quantise(info.fmt, values)
