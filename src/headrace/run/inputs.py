"""Which inputs of each matrix are large: what ``--requant`` weighs a weight's error by (``formats/fit.py``).

The model as it is (f16, bf16, f32) reads a text of ours, layer by layer with one layer in memory, on the CPU device,
whose numbers are the same on every machine; so are these. An error in a weight is multiplied by its input: what a
matrix's output loses is the error squared times the input squared, summed (as in llama.cpp's imatrix, and the diagonal
of what GPTQ works with, arXiv 2210.17323).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace import system
from headrace.config import resolve
from headrace.errors import OverBudget
from headrace.formats.index import ModelFile
from headrace.kernels.device import F32, Device, Rows
from headrace.kernels.dispatch import make_device
from headrace.kernels.ops import Copy, Linear, Op
from headrace.memory.kv import HostKV
from headrace.memory.slots import pages_for
from headrace.memory.weights import Resident, layer_nbytes
from headrace.model.layers import Layer, load_model
from headrace.text.prose import TEXT
from headrace.text.tokenizer import Tokenizer

RUN = 64
"""Rows at a time."""
MOST = 640
"""Tokens of the text that are read; it has about as many."""
LEAST = 1e-3
"""Of the mean square: also a weight whose input was 0 all the time keeps about its value."""
WORD = f"inputs 1 {hashlib.sha256(TEXT.encode()).hexdigest()[:16]}"
"""What they depend on besides the model; the number is of what is computed here."""


def squares_of_inputs(file: ModelFile, room: int | None = None) -> Mapping[str, F32]:
    """Tensor name in the file -> mean square of each of its inputs [k], over the mean of these; for all blocks.

    room: bytes of memory that this may take. OverBudget when it takes more.
    """
    model = load_model(file)
    device = make_device(threads=system.cores(), cpu=resolve().cpu)
    ids = np.array(Tokenizer.from_metadata(file.metadata).encode(TEXT)[: min(MOST, model.spec.context)], np.int32)
    x = np.empty((len(ids), model.spec.width), np.float32)
    found: dict[str, F32] = {}
    need = x.nbytes + max(_nbytes(device, layer, len(ids), model.spec.width) for layer in model.layers[:-1])
    if room is not None and need > room:
        raise OverBudget(
            f"--requant q4 first runs a text through the model layer by layer, which takes {need / 1e6:.0f} MB, and of "
            f"--ram {max(0, room) / 1e6:.0f} MB are left; give {(need - room) / 1e6:.0f} MB more, or take q8."
        )
    for i, layer in enumerate(model.layers[:-1]):
        weights = Resident(device, model, [i])
        cache = HostKV(device, {i: layer.kv} if layer.kv else {}, pages_for(len(ids)))
        with weights.hold(i) as held:
            for whole, ops, fed in _parts(layer.ops):
                program, total = device.compile(ops, model.spec.width).bind(held), np.zeros(1)
                for start in range(0, len(ids), RUN):
                    rows = _rows(ids, start)
                    here = x[start : start + RUN]
                    out = program.run(here if whole else here.copy(), rows, cache.layer(i, rows))
                    for row in out if fed else ():  # one after the other, so that the sum has one order
                        total = total + row.astype(np.float64) ** 2
                relative = (total / max(total.mean(), 1e-30) + LEAST).astype(np.float32)
                found |= {layer.tensors[name].source.tensor: relative for name in fed}
        cache.close()
        weights.close()
    return found


def _nbytes(device: Device, layer: Layer, tokens: int, width: int) -> int:
    """The most that a layer takes: weights, cache, what lies between its operations, and a matrix's input."""
    shapes = {name: (t.fmt, t.n, t.k) for name, t in layer.tensors.items()}
    cache = device.page_nbytes(layer.kv) * pages_for(tokens) if layer.kv else 0
    inputs = 4 * RUN * max(t.k for t in layer.tensors.values())
    return layer_nbytes(device, layer) + cache + inputs + device.scratch_nbytes(layer.ops, width, RUN, shapes)


def _parts(ops: Sequence[Op]) -> list[tuple[bool, tuple[Op, ...], list[str]]]:
    """(whether it is the whole layer, ops that return a matrix's input as if it were logits, the matrices it feeds)."""
    places: list[tuple[int, str, list[str]]] = []
    fed: dict[str, list[str]] = {}
    for at, op in enumerate(ops):
        if isinstance(op, Linear):
            if op.src not in fed:
                fed[op.src] = []
                places.append((at, op.src, fed[op.src]))
            fed[op.src].append(op.weight)
        fed.pop(str(getattr(op, "dst", getattr(op, "buf", ""))), None)
    if not places:
        return [(True, tuple(ops), [])]
    parts = [(False, (*ops[:at], Copy("logits", src)), names) for at, src, names in places]
    at, (_, begin, names) = places[-1][0], parts[-1]
    return [*parts[:-1], (True, (*begin, *ops[at:]), names)]


def _rows(ids: NDArray[np.int32], start: int) -> Rows:
    """A run of one text's tokens, each seeing those before it; token i lies in slot i."""
    token = ids[start : start + RUN]
    position, none = np.arange(start, start + len(token), dtype=np.int32), np.zeros(len(token), np.int32)
    lists = np.arange(start + len(token), dtype=np.int32)
    return Rows(token, position, position, none, position + 1, none, none, lists, lists[: len(token)])
