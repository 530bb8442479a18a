"""The families, as data: how each one's config.json and GGUF metadata become a Spec.

A new family is an entry of ``FAMILIES`` (and a table of tensor names in ``names.py``); code is only for what an entry
can't say. Facts: the config classes and modelling files of transformers, and llama.cpp's GGUF keys
(gguf-py constants), each checked by a parity test.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headrace.errors import Unsupported
from headrace.kernels.ops import Activation
from headrace.model.keys import MISSING, Keys, off, short
from headrace.model.ropes import config_ropes, gguf_ropes
from headrace.model.spec import MAX_BLOCKS, MAX_CONTEXT, MAX_VOCAB, MAX_WIDTH, Block, Norms, Spec, require

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # fmt: skip
WINDOW_PATTERN = 6
"""Gemma 3: of six blocks the last sees everything."""


@dataclass(frozen=True)
class Family:
    """What all models of a family share. Names of config.json keys where a model may choose."""

    name: str
    config_types: tuple[str, ...]
    gguf: tuple[str, ...]
    """GGUF architectures; none: llama.cpp has no such architecture."""
    norm: Literal["rms", "layer"] = "rms"
    norms: Norms = "pre"
    gated: bool = True
    activation: Activation = "silu"
    qk_norm: bool = False
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    ffn_bias: str | bool = False
    tied: bool = False
    rope_style: Literal["half", "interleaved"] = "half"
    """In GGUF; folders of transformers always have half. The llama converter permutes rows of q and k."""
    windows: Literal["none", "all", "late", "pattern"] = "none"
    rope_base: float = 10000.0
    key: Mapping[str, str] = field(default_factory=dict)
    """Our word -> this family's key in config.json, where it isn't the usual one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys a config.json may leave out, as transformers has them."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that may only have these values."""


USUAL = {
    "width": "hidden_size", "blocks": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "context": "max_position_embeddings",
    "activation": "hidden_act", "eps": "rms_norm_eps",
}  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), ("llama",), rope_style="interleaved", qkv_bias="attention_bias",
           o_bias="attention_bias", ffn_bias="mlp_bias", defaults={"rms_norm_eps": 1e-6, "vocab_size": 32000}),
    Family("mistral", ("mistral",), (), windows="all",
           defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096}),
    Family("qwen2", ("qwen2",), ("qwen2",), qkv_bias=True, windows="late", defaults={"rms_norm_eps": 1e-6}),
    Family("qwen3", ("qwen3",), ("qwen3",), qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias",
           windows="late", defaults={"rms_norm_eps": 1e-6, "head_dim": 128}),
    Family("gemma3", ("gemma3_text", "gemma3"), ("gemma3",), norms="sandwich", qk_norm=True, tied=True,
           activation="gelu_tanh", qkv_bias="attention_bias", o_bias="attention_bias", windows="pattern",
           rope_base=1e6, key={"activation": "hidden_activation"},
           defaults={"rms_norm_eps": 1e-6, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
                     "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                     "max_position_embeddings": 131072, "sliding_window": 4096,
                     "hidden_activation": "gelu_pytorch_tanh"},
           fixed={"attn_logit_softcapping": (), "use_bidirectional_attention": (False,)}),
    Family("opt", ("opt",), (), norm="layer", gated=False, activation="relu", qkv_bias="enable_bias",
           o_bias="enable_bias", ffn_bias="enable_bias", tied=True,
           key={"ffn": "ffn_dim", "activation": "activation_function"},
           defaults={"enable_bias": True, "activation_function": "relu", "vocab_size": 50272},
           fixed={"layer_norm_elementwise_affine": (True,)}),
    Family("falcon", ("falcon",), ("falcon",), norm="layer", gated=False, activation="gelu_erf", qkv_bias="bias",
           o_bias="bias", ffn_bias="bias", tied=True,
           key={"ffn": "ffn_hidden_size", "activation": "activation", "eps": "layer_norm_epsilon",
                "kv_heads": "num_kv_heads"},
           defaults={"layer_norm_epsilon": 1e-5, "activation": "gelu", "vocab_size": 65024,
                     "max_position_embeddings": 2048},
           fixed={"alibi": (False,), "apply_residual_connection_post_layernorm": (False,)}),
)  # fmt: skip

REFUSED = ("quantization_config", "compression_config", "is_encoder_decoder", "add_cross_attention",
           "tie_encoder_decoder")  # fmt: skip
"""Keys of any config.json that, unless off, change what the weights mean."""


def supported() -> str:
    """Names for an error message."""
    return ", ".join(f.name for f in FAMILIES)


def from_config(config: Mapping[str, Any]) -> Spec:
    """A Spec from the contents of a config.json. BadFile or Unsupported, naming key and value."""
    where = "config.json"
    kind = Keys(config, where).text("model_type")
    family = next((f for f in FAMILIES if kind in f.config_types), None)
    if family is None:
        raise Unsupported(f"{where} has model_type {short(kind)}; Headrace knows {supported()}.")
    if isinstance(config.get("text_config"), Mapping):  # Gemma 3 with vision: the text model's numbers lie inside
        inner = {"tie_word_embeddings": config.get("tie_word_embeddings", True), **config["text_config"]}
        Keys({k: v for k, v in config.items() if k not in ("text_config", "tie_word_embeddings")}, where).leftovers()
        config = {**inner, "model_type": kind}
    keys = Keys({**family.defaults, **config}, where)
    for key in REFUSED:
        if not off(config.get(key)):
            raise keys.refuse(key)
    for key, values in family.fixed.items():
        keys.must(key, values)
    keys.must("partial_rotary_factor", (1, 1.0))
    spec = _config_spec(family, keys)
    keys.leftovers()
    return spec


def _config_spec(family: Family, keys: Keys) -> Spec:
    name = {**USUAL, **family.key}
    width = keys.integer(name["width"], low=2, high=MAX_WIDTH)
    count = keys.integer(name["blocks"], low=1, high=MAX_BLOCKS)
    heads = keys.integer(name["heads"], low=1, high=1 << 16)
    kv_heads, norms = heads, family.norms
    if family.name == "falcon":
        kv_heads, norms = _falcon(keys, heads)
    elif family.name != "opt":
        kv_heads = keys.integer(name["kv_heads"], heads, low=1, high=heads)
    head_dim = keys.integer("head_dim", 0 if keys.has("head_dim") else _divided(width, heads), low=2, high=4096)
    if family.name in ("falcon", "opt"):
        require(head_dim * heads == width, f"{heads} heads of {head_dim} don't make a width of {width}")
    ffn = keys.integer(name["ffn"], 4 * width if family.name == "falcon" else MISSING, low=1, high=MAX_WIDTH)
    context = keys.integer(name["context"], low=1, high=MAX_CONTEXT)
    windows = _windows(family, keys, count)
    main, local = (None, None) if family.name == "opt" else config_ropes(keys, family.rope_base, head_dim, context)
    extra: dict[str, Any] = {}
    scale = 1.0 / math.sqrt(head_dim)
    if family.name == "opt":
        norms, extra = _opt(keys, width, context)
    elif family.name == "gemma3":
        scalar = keys.number("query_pre_attn_scalar", 256.0)
        require(scalar > 0, f"query_pre_attn_scalar is {scalar}")
        scale = 1.0 / math.sqrt(scalar)
        extra = {"embed_scale": math.sqrt(width), "logit_softcap": keys.number("final_logit_softcapping", 0.0)}
    blocks = tuple(
        Block(heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, scale=scale,
              rope=local if window and family.windows == "pattern" else main,
              eps=1e-5 if family.name == "opt" else keys.number(name["eps"]), window=window, norm=family.norm,
              norms=norms, activation=_activation(family, keys, name["activation"]), gated=family.gated,
              qk_norm=family.qk_norm, qkv_bias=_chosen(keys, family.qkv_bias), o_bias=_chosen(keys, family.o_bias),
              ffn_bias=_chosen(keys, family.ffn_bias))
        for window in windows
    )  # fmt: skip
    vocab = keys.integer("vocab_size", low=2, high=MAX_VOCAB)
    tied = keys.flag("tie_word_embeddings", family.tied)
    return Spec(**{"family": family.name, "width": width, "vocab": vocab, "context": context, "blocks": blocks,
                   "tied": tied, "embed_width": width, **extra})  # fmt: skip


def _chosen(keys: Keys, choice: str | bool) -> bool:
    return choice if isinstance(choice, bool) else keys.flag(choice, False)


def _activation(family: Family, keys: Keys, key: str) -> Activation:
    if not keys.has(key):
        return family.activation
    value = keys.text(key)
    if value not in ACTIVATIONS:
        raise keys.refuse(key)
    return ACTIVATIONS[value]


def _falcon(keys: Keys, heads: int) -> tuple[int, Norms]:
    """Falcon's generations: 7B (multi_query, one norm), 40B and 180B (new_decoder_architecture, two norms), 11B."""
    stated = keys.integer("num_kv_heads", heads, low=1, high=heads)
    multi_query, parallel = keys.flag("multi_query", True), keys.flag("parallel_attn", True)
    if keys.flag("new_decoder_architecture", False):
        norms = keys.integer("num_ln_in_parallel_attn", 2, low=1, high=2)
        return stated, "parallel" if norms == 2 else "parallel_shared"
    keys.must("num_ln_in_parallel_attn", (1,))
    return 1 if multi_query else heads, "parallel_shared" if parallel else "pre"


def _opt(keys: Keys, width: int, context: int) -> tuple[Norms, dict[str, Any]]:
    """Learned positions, two rows in; OPT 350m embeds narrower and has no final norm."""
    before = keys.flag("do_layer_norm_before", True)
    return "pre" if before else "post", {
        "embed_width": keys.integer("word_embed_proj_dim", width, low=2, high=MAX_WIDTH),
        "positions": context + 2, "position_offset": 2,
        "final_norm": before and not keys.flag("_remove_final_layer_norm", False),
    }  # fmt: skip


def _windows(family: Family, keys: Keys, count: int) -> list[int]:
    """Each block's window; 0: none."""
    if family.windows == "none":
        if keys.has("layer_types") and keys.raw("layer_types") != ["full_attention"] * count:
            raise keys.refuse("layer_types")
        return [0] * count
    window = 0 if keys.null("sliding_window") else keys.integer("sliding_window", 4096, low=1, high=MAX_CONTEXT)
    if family.windows == "all":
        return [window] * count
    if family.windows == "late":
        first = keys.integer("max_window_layers", 28, low=0, high=MAX_CONTEXT)
        window = window if keys.flag("use_sliding_window", False) else 0
        sliding = [i >= first and window > 0 for i in range(count)]
    else:
        stated = keys.integer("_sliding_window_pattern", WINDOW_PATTERN, 1, MAX_BLOCKS)
        every = keys.integer("sliding_window_pattern", stated, 1, MAX_BLOCKS)
        sliding = [(i + 1) % every != 0 for i in range(count)]
    if keys.has("layer_types"):
        types = keys.raw("layer_types")
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != count or any(t not in known for t in map(str, types)):
            raise keys.refuse("layer_types")
        sliding = [known[t] for t in types]
    if any(sliding) and not window:
        raise keys.refuse("sliding_window")
    return [window if s else 0 for s in sliding]


def from_gguf(
    metadata: Mapping[str, Any], tensors: Collection[str] = (), vocab: int = 0, divisors: tuple[float, ...] = ()
) -> Spec:
    """A Spec from GGUF metadata, the names of the tensors and the rows of the embedding table.

    What metadata doesn't say (biases, a tied output, Falcon's second norm) is read off the tensor names.
    divisors: rope_freqs.weight when there is one.
    """
    keys = Keys(metadata, "the GGUF file")
    arch = keys.text("general.architecture")
    family = next((f for f in FAMILIES if arch in f.gguf), None)
    if family is None:
        raise Unsupported(f"the GGUF file has the architecture {short(arch)}; Headrace knows {supported()}.")
    keys.must("general.type", ("model",))
    a, names = arch + ".", set(tensors)
    width = keys.integer(a + "embedding_length", low=2, high=MAX_WIDTH)
    context = keys.integer(a + "context_length", low=1, high=MAX_CONTEXT)
    blocks = _gguf_blocks(family, keys, a, width, context, divisors, names)
    vocab = vocab or _gguf_vocab(keys, a)
    if keys.has(a + "vocab_size"):
        require(keys.integer(a + "vocab_size") == vocab, f"{a}vocab_size isn't the embedding table's {vocab} rows")
    extra: dict[str, Any] = {}
    if family.name == "gemma3":
        extra = {"embed_scale": math.sqrt(width), "logit_softcap": keys.number(a + "final_logit_softcapping", 0.0)}
    for key in ("use_parallel_residual", "attention.causal"):
        keys.must(a + key, (True,))
    keys.must(a + "tensor_data_layout", ("jploski", "Meta AI original pth", "reference"))
    keys.leftovers((), only=a)
    return Spec(family=family.name, width=width, vocab=vocab, context=context, blocks=blocks, embed_width=width,
                tied="output.weight" not in names if names else family.tied, **extra)  # fmt: skip


def _gguf_blocks(family: Family, keys: Keys, a: str, width: int, context: int, divisors: tuple[float, ...],
                 names: Collection[str]) -> tuple[Block, ...]:  # fmt: skip
    count = keys.integer(a + "block_count", low=1, high=MAX_BLOCKS)
    heads = keys.each(a + "attention.head_count", count, high=1 << 16)
    kv_heads = keys.each(a + "attention.head_count_kv", count, heads[0], high=1 << 16)
    ffn = keys.each(a + "feed_forward_length", count, high=MAX_WIDTH)
    head_dim = keys.integer(a + "attention.key_length", _divided(width, heads[0]), low=2, high=4096)
    keys.must(a + "attention.value_length", (head_dim,))
    eps = keys.number(f"{a}attention.layer_norm_{'rms_' if family.norm == 'rms' else ''}epsilon")
    dims = keys.integer(a + "rope.dimension_count", head_dim, low=2, high=head_dim)
    main, local = gguf_ropes(keys, a, family.rope_base, dims, context, family.rope_style, divisors)
    windows = _gguf_windows(family, keys, a, count)
    scale, norms = keys.number(a + "attention.scale", 0.0) or 1.0 / math.sqrt(head_dim), family.norms
    if family.name == "gemma3" and count == 62:
        # The 27B model scales by width / heads; GGUF has no key for it, llama.cpp knows it by its blocks too.
        scale = 1.0 / math.sqrt(_divided(width, heads[0]))
    if family.name == "falcon":
        norms = "parallel" if "blk.0.attn_norm_2.weight" in names else "parallel_shared"
    return tuple(
        Block(heads=heads[i], kv_heads=kv_heads[i], head_dim=head_dim, ffn=ffn[i], scale=scale, eps=eps,
              rope=local if windows[i] and family.windows == "pattern" else main, window=windows[i], norm=family.norm,
              norms=norms,
              activation=family.activation, gated=family.gated, qk_norm=family.qk_norm,
              qkv_bias=family.qkv_bias is True or f"blk.{i}.attn_q.bias" in names or f"blk.{i}.attn_qkv.bias" in names,
              o_bias=f"blk.{i}.attn_output.bias" in names, ffn_bias=f"blk.{i}.ffn_up.bias" in names)
        for i in range(count)
    )  # fmt: skip


def _divided(width: int, heads: int) -> int:
    require(width % heads == 0, f"a width of {width} doesn't divide into {heads} heads")
    return width // heads


def _gguf_vocab(keys: Keys, a: str) -> int:
    if keys.has(a + "vocab_size"):
        return keys.integer(a + "vocab_size", low=2, high=MAX_VOCAB)
    tokens = keys.raw("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sized):
        raise keys.bad("tokenizer.ggml.tokens", tokens, "a list of tokens")
    return len(tokens)


def _gguf_windows(family: Family, keys: Keys, a: str, count: int) -> list[int]:
    window = keys.integer(a + "attention.sliding_window", 0, high=MAX_CONTEXT)
    if family.windows != "pattern":
        return [window] * count
    key = a + "attention.sliding_window_pattern"
    flags = keys.raw(key, WINDOW_PATTERN)
    if isinstance(flags, np.ndarray):
        if flags.shape != (count,) or flags.dtype.kind not in "bui":
            raise keys.bad(key, flags.shape, f"true or false for each of {count} blocks")
        return [window if f else 0 for f in flags.tolist()]
    pattern = keys.integer(key, WINDOW_PATTERN, 1, MAX_BLOCKS)
    return [0 if (i + 1) % pattern == 0 else window for i in range(count)]
