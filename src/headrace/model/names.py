"""Where each of our tensors lies in a file: one table a family, of names without ``.weight`` or ``.bias``.

``{i}`` is the block. A folder's writer may have put a prefix before every name but the output matrix's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from headrace.errors import BadFile, Unsupported
from headrace.formats.index import ModelFile, Rows
from headrace.formats.tensor import TensorInfo, show
from headrace.model.spec import Block, Spec, is_vector


@dataclass(frozen=True)
class Source:
    """Bytes of one of our tensors: a file's tensor, stretches of its rows (None: all), and 1 added (HF Gemma norms).

    Of a vector the stretches count values.
    """

    tensor: str
    spans: tuple[tuple[int, int], ...] | None = None
    add_one: bool = False

    @property
    def rows(self) -> Rows:
        """The stretches as ``ModelFile.read`` takes them."""
        if self.spans is None:
            return None
        if len(self.spans) == 1:
            return slice(*self.spans[0])
        return np.concatenate([np.arange(a, b) for a, b in self.spans])


@dataclass(frozen=True)
class Names:
    """A naming scheme. ``fused``: how q, k, v lie in one tensor. ``ignorable``: patterns of tensors we don't need."""

    table: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)
    fused: str | None = None
    """grouped: of each KV head its queries, k, v (Falcon folders); stacked: all q, all k, all v (Falcon GGUF)."""
    add_one: tuple[str, ...] = ()
    """Our names of norm weights stored less one."""
    ignorable: tuple[str, ...] = ()


_LLAMA = {
    "token_embd": "embed_tokens", "norm": "norm", "output": "lm_head", "attn_norm": "layers.{i}.input_layernorm",
    "attn_q": "layers.{i}.self_attn.q_proj", "attn_k": "layers.{i}.self_attn.k_proj",
    "attn_v": "layers.{i}.self_attn.v_proj", "attn_o": "layers.{i}.self_attn.o_proj",
    "q_norm": "layers.{i}.self_attn.q_norm", "k_norm": "layers.{i}.self_attn.k_norm",
    "ffn_norm": "layers.{i}.post_attention_layernorm", "ffn_gate": "layers.{i}.mlp.gate_proj",
    "ffn_up": "layers.{i}.mlp.up_proj", "ffn_down": "layers.{i}.mlp.down_proj",
}  # fmt: skip
_GEMMA = _LLAMA | {
    "attn_post_norm": "layers.{i}.post_attention_layernorm", "ffn_norm": "layers.{i}.pre_feedforward_layernorm",
    "ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
}  # fmt: skip
_OPT = {
    "token_embd": "embed_tokens", "position_embd": "embed_positions", "project_in": "project_in",
    "project_out": "project_out", "norm": "final_layer_norm", "output": "lm_head",
    "attn_norm": "layers.{i}.self_attn_layer_norm", "attn_q": "layers.{i}.self_attn.q_proj",
    "attn_k": "layers.{i}.self_attn.k_proj", "attn_v": "layers.{i}.self_attn.v_proj",
    "attn_o": "layers.{i}.self_attn.out_proj", "ffn_norm": "layers.{i}.final_layer_norm",
    "ffn_up": "layers.{i}.fc1", "ffn_down": "layers.{i}.fc2",
}  # fmt: skip
_FALCON = {
    "token_embd": "word_embeddings", "norm": "ln_f", "output": "lm_head", "attn_norm": "h.{i}.input_layernorm",
    "attn_qkv": "h.{i}.self_attention.query_key_value", "attn_o": "h.{i}.self_attention.dense",
    "ffn_norm": "h.{i}.post_attention_layernorm", "ffn_up": "h.{i}.mlp.dense_h_to_4h",
    "ffn_down": "h.{i}.mlp.dense_4h_to_h",
}  # fmt: skip
_GGUF = {
    "token_embd": "token_embd", "norm": "output_norm", "output": "output", "attn_norm": "blk.{i}.attn_norm",
    "attn_q": "blk.{i}.attn_q", "attn_k": "blk.{i}.attn_k", "attn_v": "blk.{i}.attn_v", "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm", "attn_qkv": "blk.{i}.attn_qkv", "attn_o": "blk.{i}.attn_output",
    "attn_post_norm": "blk.{i}.post_attention_norm", "ffn_norm": "blk.{i}.ffn_norm", "ffn_gate": "blk.{i}.ffn_gate",
    "ffn_up": "blk.{i}.ffn_up", "ffn_down": "blk.{i}.ffn_down", "ffn_post_norm": "blk.{i}.post_ffw_norm",
}  # fmt: skip
_FALCON_40B = {
    "grouped": {"attn_norm": "h.{i}.ln_attn", "ffn_norm": "h.{i}.ln_mlp"},
    "stacked": {"attn_norm": "blk.{i}.attn_norm_2", "ffn_norm": "blk.{i}.attn_norm"},
}

_BUFFERS = ("*rotary_emb.inv_freq", "*.masked_bias")
FOLDER: Mapping[str, Names] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Names(_LLAMA, ("model.", ""), ignorable=_BUFFERS)),
    "gemma3": Names(
        _GEMMA, ("model.", "", "language_model.model.", "model.language_model."),
        add_one=("norm", "attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "q_norm", "k_norm"),
        # The picture side of Gemma 3 4B and up: text needs none of it.
        ignorable=(*_BUFFERS, "*vision_tower.*", "*multi_modal_projector.*"),
    ),
    "opt": Names(_OPT, ("model.decoder.", "decoder.", "")),
    "falcon": Names(_FALCON, ("transformer.", ""), fused="grouped", ignorable=_BUFFERS),
}  # fmt: skip
GGUF: Mapping[str, Names] = {
    name: Names(_GGUF, fused="stacked" if name == "falcon" else None, ignorable=("rope_freqs.weight",))
    for name in ("llama", "qwen2", "qwen3", "gemma3", "falcon")
}


def resolve(spec: Spec, file: ModelFile) -> dict[tuple[str, str], Source]:
    """(layer key, our name) -> Source for every tensor of the model; shapes checked, nothing in the file unexplained.

    BadFile for a missing or misshapen tensor, Unsupported for one we don't know.
    """
    scheme = (GGUF if file.kind == "gguf" else FOLDER)[spec.family]
    prefix = next((p for p in scheme.prefixes if f"{p}{scheme.table['token_embd']}.weight" in file.tensors), "")
    out: dict[tuple[str, str], Source] = {}
    for key in spec.keys:
        for name, shape in spec.shapes(key).items():
            ours = "token_embd" if name == "output" and spec.tied else name
            source = _source(scheme, spec, key, ours, prefix)
            _check_shape(file, source, shape, is_vector(name))
            out[key, name] = source
    used = {source.tensor for source in out.values()}
    ignorable = [*scheme.ignorable, *(["*lm_head.weight"] if spec.tied else [])]
    _refuse_unknown(file.tensors, used, ignorable)
    return out


def _source(scheme: Names, spec: Spec, key: str, name: str, prefix: str) -> Source:
    block = spec.block(key)
    weight, bias, _ = name.partition(".bias")
    table = scheme.table
    if block is not None and spec.family == "falcon" and block.norms == "parallel":
        table = {**table, **_FALCON_40B[scheme.fused or ""]}
    spans = None
    if scheme.fused and block is not None and weight in ("attn_q", "attn_k", "attn_v"):
        spans = fused_spans(block, weight, scheme.fused)
        weight = "attn_qkv"
    start = "" if weight == "output" else prefix
    file_name = start + table[weight].format(i=key[6:]) + (bias or ".weight")
    return Source(file_name, spans, name in scheme.add_one)


def fused_spans(block: Block, name: str, how: str) -> tuple[tuple[int, int], ...]:
    """Rows of q, k or v in a fused tensor of ``q_width + 2 * kv_width`` rows."""
    if how == "stacked":
        start = {"attn_q": 0, "attn_k": block.q_width, "attn_v": block.q_width + block.kv_width}[name]
        return ((start, start + (block.q_width if name == "attn_q" else block.kv_width)),)
    queries = block.heads // block.kv_heads
    first, heads = {"attn_q": (0, queries), "attn_k": (queries, 1), "attn_v": (queries + 1, 1)}[name]
    starts = [(group * (queries + 2) + first) * block.head_dim for group in range(block.kv_heads)]
    return tuple((s, s + heads * block.head_dim) for s in starts)


def _check_shape(file: ModelFile, source: Source, shape: tuple[int, int], vector: bool) -> None:
    info = file.tensors.get(source.tensor)
    if info is None:
        raise BadFile(f"The model lacks the tensor {show(source.tensor)}; download or convert it again.")
    wanted: tuple[int, ...] = shape[1:] if vector else shape
    found = info.shape
    if source.spans is not None and len(found) == len(wanted) and found[0] >= max(b for _, b in source.spans):
        found = (sum(b - a for a, b in source.spans), *found[1:])
    if found != wanted:
        rows = f" (of which rows {source.spans[0][0]} to {source.spans[-1][1]})" if source.spans else ""
        raise BadFile(
            f"Tensor {show(source.tensor)} has the shape {list(info.shape)}{rows} where the metadata asks for "
            f"{list(wanted)}; download or convert the model again."
        )


def _refuse_unknown(tensors: Mapping[str, TensorInfo], used: Collection[str], ignorable: Collection[str]) -> None:
    unknown = [n for n in tensors if n not in used and not any(fnmatchcase(n, p) for p in ignorable)]
    if unknown:
        names = ", ".join(show(n) for n in sorted(unknown)[:4])
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise Unsupported(
            f"The model has tensors Headrace has no use for ({names}{more}); it may be another "
            "architecture than its metadata says."
        )
