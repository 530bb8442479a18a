"""Write a transformers model as GGUF the way llama.cpp's converter does: names, permutations, norms, rope factors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2",
}  # fmt: skip
GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
OUTER = {"embed_tokens": "token_embd", "word_embeddings": "token_embd", "norm": "output_norm", "ln_f": "output_norm"}


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves to pairs: the llama architecture's order of q and k."""
    split: np.ndarray = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2)
    return split.reshape(w.shape)


def stack(w: np.ndarray, groups: int, queries: int) -> np.ndarray:
    """Falcon's fused rows from (queries, k, v) a group to all q, all k, all v."""
    parts = w.reshape(groups, queries + 2, -1, *w.shape[1:])
    pieces = [parts[:, :queries], parts[:, queries : queries + 1], parts[:, queries + 1 :]]
    return np.concatenate([p.reshape(-1, *w.shape[1:]) for p in pieces])


def llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    config, out = model.config, {}
    names = NAMES | (GEMMA if arch == "gemma3" else {})
    for key, p in model.state_dict().items():
        w = p.float().numpy()
        parts = key.removeprefix("model.").removeprefix("transformer.").split(".")
        if parts[0] == "lm_head":
            if not config.tie_word_embeddings:
                out["output.weight"] = w
            continue
        if parts[0] in OUTER:
            name = f"{OUTER[parts[0]]}.{parts[1]}"
        else:
            name = f"blk.{parts[1]}.{names['.'.join(parts[2:-1])]}.{parts[-1]}"
        if arch == "llama" and ".attn_q." in name:
            w = interleave(w, config.num_attention_heads)
        if arch == "llama" and ".attn_k." in name:
            w = interleave(w, config.num_key_value_heads)
        if arch == "gemma3" and "norm" in name:
            w = w + np.float32(1)
        if ".attn_qkv." in name:
            groups = falcon_kv_heads(config)
            w = stack(w, groups, config.num_attention_heads // groups)
        out[name] = w
    return out


def falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def write_gguf(model: Any, arch: str, path: Path, fmt: str = "F32") -> None:
    """The model in f32, or its matrices in ``fmt`` where rows allow it."""
    c = model.config
    w = gguf.GGUFWriter(path, arch)
    width = c.hidden_size
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(width)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.ffn_hidden_size if arch == "falcon" else c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(falcon_kv_heads(c) if arch == "falcon" else c.num_key_value_heads)
    w.add_vocab_size(c.vocab_size)
    found = tensors(model, arch)
    if arch == "falcon":
        w.add_layer_norm_eps(c.layer_norm_epsilon)
        w.add_tensor_data_layout("jploski")
    else:
        w.add_layer_norm_rms_eps(c.rms_norm_eps)
        w.add_key_length(c.head_dim if hasattr(c, "head_dim") else width // c.num_attention_heads)
        _add_rope(w, c, arch, found)
    if arch == "gemma3":
        w.add_sliding_window(c.sliding_window)
    for name, values in found.items():
        if fmt == "F32" or values.ndim == 1:
            w.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType[fmt]
            w.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _add_rope(w: Any, c: Any, arch: str, found: dict[str, np.ndarray]) -> None:
    rope = c.rope_parameters
    if arch == "gemma3":
        rope = rope["full_attention"]
    w.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, c.head_dim)
    elif kind in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
