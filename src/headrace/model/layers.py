"""From a Spec to a flat list of Layers: keys, tensors and operations. Nothing after this knows a family.

Registers: ``x`` is the residual stream; the last layer leaves the logits in ``logits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile
from headrace.formats.index import ModelFile, require_known
from headrace.formats.quant import dequantise
from headrace.formats.sparse import Sparse
from headrace.formats.tensor import row_nbytes
from headrace.kernels.device import KVShape
from headrace.kernels.ops import Act, Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV
from headrace.model import families, names, rope
from headrace.model.names import Source
from headrace.model.spec import Block, Spec, is_vector


@dataclass(frozen=True)
class TensorPlan:
    """One tensor as a device gets it: [n, k] in the file's format; norm weights and biases are F32, [1, k].

    shares: the (layer key, name) whose packed bytes this is too (a tied output matrix); count those once.
    """

    fmt: str
    n: int
    k: int
    source: Source
    shares: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in file order."""
        return self.n * row_nbytes(self.fmt, self.k)


@dataclass(frozen=True)
class Layer:
    """``embed``, ``block.0`` ..., or ``output``: what is computed with which tensors. kv: None without a cache."""

    key: str
    tensors: Mapping[str, TensorPlan]
    ops: tuple[Op, ...]
    kv: KVShape | None

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors in file order, shared ones not counted."""
        return sum(t.nbytes for t in self.tensors.values() if t.shares is None)


@dataclass(frozen=True)
class Model:
    """A model file understood: its Spec and Layers."""

    spec: Spec
    layers: tuple[Layer, ...]
    file: ModelFile


EARLY = ("rope_freqs.weight",)
"""Tensors that the Spec is read from."""


def load_model(file: ModelFile) -> Model:
    """Understand an open model with its tensors. BadFile or Unsupported names what is wrong."""
    spec = spec_of(file)
    if not file.tensors:
        raise BadFile("There are no weights here, only the configuration; give the folder or GGUF file they lie in.")
    return Model(spec, build(spec, file), file)


def spec_of(file: ModelFile) -> Spec:
    """The Spec of a model file, or of a bare config.json (which has no tensors)."""
    if file.kind != "gguf":
        config = file.metadata.get("config")
        if not isinstance(config, Mapping):
            raise BadFile("config.json isn't a JSON object; download it again.")
        return families.from_config(config)
    table = file.tensors.get("token_embd.weight")
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(_values(file, "rope_freqs.weight", 1 << 12).tolist())
    return families.from_gguf(file.metadata, file.tensors, table.n if table else 0, divisors)


def build(spec: Spec, file: ModelFile) -> tuple[Layer, ...]:
    """All layers in order, every tensor found in the file, of the right shape, in a format we compute with."""
    sources = names.resolve(spec, file)
    require_known(file, sorted({s.tensor for s in sources.values()}))
    layers = []
    for key in spec.keys:
        plans = {}
        for name, (n, k) in spec.shapes(key).items():
            source = sources[key, name]
            fmt = "F32" if is_vector(name) else file.tensors[source.tensor].fmt
            shares = ("embed", "token_embd") if name == "output" and spec.tied else None
            plans[name] = TensorPlan(fmt, n, k, source, shares)
        layers.append(Layer(key, plans, _sparse(layer_ops(spec, key), spec, file), spec.kv_shape(key)))
    return tuple(layers)


def fetch(file: ModelFile, plan: TensorPlan) -> NDArray[np.uint8]:
    """A tensor's bytes for ``Device.pack``: plan.nbytes of plan.fmt, row after row."""
    info = file.tensors[plan.source.tensor]
    if plan.n > 1:
        return file.read(info, plan.source.rows)
    values = _values(file, plan.source.tensor, info.k)
    if plan.source.spans is not None:
        values = values[plan.source.rows]
    if plan.source.add_one:
        values = values + np.float32(1)
    return np.ascontiguousarray(values).view(np.uint8)


def _values(file: ModelFile, name: str, most: int) -> NDArray[np.float32]:
    """A vector as f32."""
    info = file.tensors[name]
    require_known(file, [name])
    if info.n != 1 or info.k > most:
        raise BadFile(f"Tensor {name!r} has the shape {list(info.shape)}, expected a short vector; convert it again.")
    return dequantise(info.fmt, file.read(info), 1, info.k).reshape(-1)


def layer_ops(spec: Spec, key: str) -> tuple[Op, ...]:
    """What a layer computes."""
    block = spec.block(key)
    if block is not None:
        return _block_ops(block)
    return _embed_ops(spec) if key == "embed" else _output_ops(spec)


def _sparse(ops: tuple[Op, ...], spec: Spec, file: ModelFile) -> tuple[Op, ...]:
    """With the sparse attention that the file asks for."""
    if not isinstance(file, Sparse):
        return ops
    most = min(file.most, spec.context)
    return tuple(replace(op, keep=file.keep, most=most) if isinstance(op, Attend) else op for op in ops)


def _embed_ops(spec: Spec) -> tuple[Op, ...]:
    ops: list[Op] = []
    if spec.embed_width == spec.width:
        ops.append(Gather("x", "token_embd", scale=spec.embed_scale))
    else:
        ops += [Gather("e", "token_embd", scale=spec.embed_scale), Linear("x", "e", "project_in")]
    if spec.positions:
        ops.append(Gather("x", "position_embd", index="position", offset=spec.position_offset, accumulate=True))
    return tuple(ops)


def _output_ops(spec: Spec) -> tuple[Op, ...]:
    ops: list[Op] = [Copy("h", "x", wanted=True)]
    if spec.final_norm:
        ops.append(_norm(spec.blocks[-1], "h", "h", "norm"))
    src = "h"
    if spec.embed_width != spec.width:
        ops.append(Linear("e", "h", "project_out"))
        src = "e"
    ops.append(Linear("logits", src, "output"))
    if spec.logit_softcap:
        ops.append(Scale("logits", softcap=spec.logit_softcap))
    return tuple(ops)


def _norm(b: Block, dst: str, src: str, name: str) -> Norm:
    return Norm(dst, src, name, f"{name}.bias" if b.norm == "layer" else None, b.norm, b.eps)


def _linear(dst: str, src: str, name: str, bias: bool, accumulate: bool = False) -> Linear:
    return Linear(dst, src, name, f"{name}.bias" if bias else None, accumulate)


def _block_ops(b: Block) -> tuple[Op, ...]:
    ops: list[Op] = [] if b.norms == "post" else [_norm(b, "h", "x", "attn_norm")]
    if b.norms == "parallel":
        ops.append(_norm(b, "f", "x", "ffn_norm"))
    ops += _attention_ops(b, "x" if b.norms == "post" else "h")
    ops += _add_to_x(b, "a", "attn_o", b.o_bias, "attn_post_norm")
    if b.norms in ("pre", "sandwich"):
        ops.append(_norm(b, "f", "x", "ffn_norm"))
    elif b.norms == "post":
        ops.append(_norm(b, "x", "x", "attn_norm"))
    ops += _ffn_ops(b, {"parallel_shared": "h", "post": "x"}.get(b.norms, "f"))
    ops += _add_to_x(b, "g", "ffn_down", b.ffn_bias, "ffn_post_norm")
    if b.norms == "post":
        ops.append(_norm(b, "x", "x", "ffn_norm"))
    return tuple(ops)


def _add_to_x(b: Block, src: str, weight: str, bias: bool, post_norm: str) -> list[Op]:
    """The residual's addition, through a norm of its own in a sandwich."""
    if b.norms != "sandwich":
        return [_linear("x", src, weight, bias, accumulate=True)]
    return [_linear("o", src, weight, bias), _norm(b, "o", "o", post_norm), Add("x", "o")]


def _attention_ops(b: Block, src: str) -> list[Op]:
    """src -> a (heads' values, before the output projection)."""
    ops: list[Op] = [_linear(r, src, f"attn_{r}", b.qkv_bias) for r in "qkv"]
    if b.qk_norm:
        ops += [Norm(r, r, f"{r}_norm", eps=b.eps, group=b.head_dim) for r in "qk"]
    if b.rope is not None:
        freqs, size = rope.inv_freq(b.rope), rope.magnitude(b.rope)
        ops += [Rope(r, n, b.head_dim, b.rope.style, freqs, size) for r, n in (("q", b.heads), ("k", b.kv_heads))]
    ops.append(StoreKV("k", "v"))
    ops.append(Attend("a", "q", b.heads, b.kv_heads, b.head_dim, b.scale, b.window, b.softcap))
    return ops


def _ffn_ops(b: Block, src: str) -> list[Op]:
    """src -> g (before the down projection)."""
    if not b.gated:
        return [_linear("g", src, "ffn_up", b.ffn_bias), Act("g", "g", b.activation)]
    gate, up = _linear("g", src, "ffn_gate", b.ffn_bias), _linear("u", src, "ffn_up", b.ffn_bias)
    return [gate, up, Act("g", "g", b.activation, up="u")]
