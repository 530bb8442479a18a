"""A model whose attention takes only the values that weigh most: FlexGen's sparse attention, an approximation.

It is a model of its own: its name and its digest say so. Its bytes are the original's, and so are files packed from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadRequest
from headrace.formats.index import ModelFile, Rows, named
from headrace.formats.tensor import TensorInfo


def sparsely(file: ModelFile, keep: float, most: int) -> ModelFile:
    """The same model with attention over the top ``keep`` of values (``kernels.ops.Attend``), for contexts of ``most``.

    Closing it closes ``file``. BadRequest unless 0 < keep <= 1; with 1 it is the model itself.
    """
    if not 0 < keep <= 1:
        raise BadRequest(f"--attn-sparsity is {keep}; give the fraction of values to take, over 0 and at most 1.")
    if keep == 1:
        return file
    metadata = {**file.metadata, "general.name": f"{named(file)}-sparse{keep:g}"}
    return Sparse(file.kind, metadata, file.tensors, file.paths, file.types, source=file, keep=keep, most=most)


@dataclass(frozen=True, eq=False)
class Sparse(ModelFile):
    """``source`` under another name; ``model.layers`` asks for the two numbers."""

    source: ModelFile | None = None
    keep: float = 1.0
    most: int = 0

    def read_into(self, info: TensorInfo, out: NDArray[np.uint8], rows: Rows = None) -> None:
        assert self.source is not None
        self.source.read_into(info, out, rows)

    def digest(self) -> str:
        assert self.source is not None
        return hashlib.sha256(f"{self.source.digest()} sparse attention {self.keep!r}".encode()).hexdigest()

    def identity(self) -> str:
        assert self.source is not None
        return self.source.identity()

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
