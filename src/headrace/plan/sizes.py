"""What the planner needs to know of a model and of the work: bytes and multiply-adds a layer, lengths, sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from headrace.errors import Unsupported
from headrace.kernels.device import KVShape
from headrace.model.layers import Layer
from headrace.model.spec import Spec, is_vector


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes of its weights, multiply-adds a row, attention and cache.

    ``query``: heads * head_dim (attention is 4 * query FLOPs a row and position); ``kv_heads``, ``head_dim``: of the
    cache; ``window`` 0: all positions; ``live``: f32 values a row needs while the layer runs.
    ``matrices``: elements of each matrix in file order (attention's, then the FFN's); ``formats``: how each is
    stored, where that is known.
    """

    key: str
    kind: Literal["embed", "block", "output"]
    nbytes: int
    macs: int
    live: int
    query: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    matrices: tuple[int, ...] = ()
    formats: tuple[str, ...] = ()
    values: int = 0
    """f32 values a row's norms, rotations and activations touch."""

    def kv_bytes(self, k_bits: int, v_bits: int) -> int:
        """Bytes a token takes in this layer's cache."""
        return KVShape(self.kv_heads, self.head_dim, k_bits, v_bits).nbytes


@dataclass(frozen=True)
class ModelCost:
    """What the planner needs of a model. ``layers`` in the order of ``Spec.keys``."""

    name: str
    layers: tuple[LayerCost, ...]
    width: int
    vocab: int
    tied: bool = False
    """The output matrix is the embedding table; its bytes are counted in ``output``."""

    @classmethod
    def from_spec(cls, name: str, spec: Spec, nbytes: Callable[[str, int, int], int]) -> ModelCost:
        """``nbytes(tensor, n, k)``: bytes of a matrix as stored (as for ``Spec.weight_bytes``)."""
        layers = []
        for key in spec.keys:
            block, held = spec.block(key), spec.weight_bytes(key, nbytes)
            matrices = tuple(n * k for t, (n, k) in spec.shapes(key).items() if not is_vector(t))
            if spec.tied and key in ("embed", "output"):  # the table is counted where it is read whole
                table = nbytes("token_embd", spec.vocab, spec.embed_width)
                held += table if key == "output" else -table
            macs = 0 if key == "embed" else sum(matrices)
            if block is None:
                live = spec.width * 2 + (spec.vocab if key == "output" else 0)
                layers.append(LayerCost(key, "embed" if key == "embed" else "output", held, macs, live))
            else:
                live = 3 * spec.width + 2 * block.q_width + 2 * block.kv_width + (2 if block.gated else 1) * block.ffn
                layers.append(
                    LayerCost(key, "block", held, macs, live, block.q_width, block.kv_heads, block.head_dim,
                              block.window, matrices)
                )  # fmt: skip
        return cls(name, tuple(layers), spec.width, spec.vocab, spec.tied)

    @classmethod
    def from_layers(cls, name: str, spec: Spec, layers: Sequence[Layer], held: Callable[[Layer], int]) -> ModelCost:
        """Of a model whose tensors are known; ``held``: bytes of a layer's own tensors where it is computed."""
        made = cls.from_spec(name, spec, lambda t, n, k: 0)
        out = []
        for cost, layer in zip(made.layers, layers, strict=True):
            plans = [p for t, p in layer.tensors.items() if not is_vector(t)]
            block = spec.block(layer.key)
            values = spec.vocab + spec.width
            if block is not None:
                values = 2 * spec.width + block.q_width + 3 * block.kv_width + block.ffn
            cost = replace(cost, nbytes=held(layer))
            if cost.kind != "embed":
                matrices, formats = tuple(p.n * p.k for p in plans), tuple(p.fmt for p in plans)
                cost = replace(cost, values=values, matrices=matrices, formats=formats)
            out.append(cost)
        return replace(made, layers=tuple(out))

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


Objective: TypeAlias = Literal["throughput", "latency"]


@dataclass(frozen=True)
class Workload:
    """``batch`` sequences of ``prompt_len`` tokens, each answered with ``gen_len`` tokens."""

    prompt_len: int
    gen_len: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.prompt_len, self.gen_len, self.batch) < 1:
            raise Unsupported(f"a workload needs at least one prompt token, one answer token, one sequence: {self}.")
