"""A model whose attention takes only the values that weigh most: FlexGen's sparse attention, an approximation.

It is a model of its own: its name and its digest say so. Its bytes are the original's, and so are files packed from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import BadRequest
from headrace.formats.index import Derived, ModelFile, named


def sparsely(file: ModelFile, keep: float, most: int) -> ModelFile:
    """The same model with attention over the top ``keep`` of values (``kernels.ops.Attend``), for contexts of ``most``.

    Closing it closes ``file``. BadRequest unless 0 < keep <= 1; with 1 it is the model itself.
    """
    if not 0 < keep <= 1:
        raise BadRequest(f"--attn-sparsity is {keep}; give the fraction of values to take, over 0 and at most 1.")
    if keep == 1:
        return file
    metadata = {**file.metadata, "general.name": f"{named(file)}-sparse{keep:g}"}
    how = f"sparse attention {keep!r}"
    return Sparse(file.kind, metadata, file.tensors, file.paths, file.types, source=file, how=how, keep=keep, most=most)


@dataclass(frozen=True, eq=False)
class Sparse(Derived):
    """The source under another name; ``model.layers`` asks for the two numbers."""

    keep: float = field(kw_only=True)
    most: int = field(kw_only=True)

    def identity(self) -> str:
        return self.source.identity()
