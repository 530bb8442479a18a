"""A Spec: every number of an architecture, and its own accounting of parameters and bytes.

A Spec is plain frozen data made from metadata (``families.py``). Metadata is hostile input, so each number is
checked here, once, whoever made it. Sizes are elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.errors import BadFile
from headrace.kernels.device import KVShape
from headrace.kernels.ops import Activation

Norms: TypeAlias = Literal["pre", "sandwich", "post", "parallel", "parallel_shared"]
"""Where a block's norms sit. pre: before attention and FFN (Llama). sandwich: also on what each of them adds
(Gemma 3). post: on the residual after each addition (OPT 350m). parallel: attention and FFN both read the block's
input, through a norm each (Falcon 40B) or one shared (Falcon 7B)."""
Shapes: TypeAlias = dict[str, tuple[int, int]]
"""Tensor name -> (n, k): n outputs, k inputs. Norm weights and biases are vectors, (1, k)."""

MAX_WIDTH = 1 << 20
MAX_BLOCKS = 4096
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 28


def require(ok: bool, what: str) -> None:
    """Raise BadFile unless ok."""
    if not ok:
        raise BadFile(f"The model's metadata can't be right: {what}.")


def _sized(name: str, value: int, low: int, high: int) -> None:
    require(low <= value <= high, f"{name} is {value}, expected {low} to {high}")


def _real(name: str, value: float, low: float, high: float) -> None:
    require(math.isfinite(value) and low <= value <= high, f"{name} is {value}, expected {low} to {high}")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: the first ``dim`` values of a head turn; ``rope.py`` makes the frequencies."""

    base: float
    dim: int
    style: Literal["half", "interleaved"] = "half"
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original: int = 0
    """Context length before scaling (llama3, yarn)."""
    low: float = 1.0
    high: float = 4.0
    """llama3: wavelengths in units of ``original``."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float | None = None
    """yarn: what cos and sin are multiplied by; None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    """One per frequency, from GGUF's rope_freqs.weight."""

    def __post_init__(self) -> None:
        _real("the rope base", self.base, 1.0 + 1e-6, 1e18)
        _sized("the rotated part of a head", self.dim, 2, 4096)
        require(self.dim % 2 == 0, f"the rotated part of a head is {self.dim}, not even")
        _real("the rope scaling factor", self.factor, 1e-3, 1e6)
        if self.scaling in ("llama3", "yarn"):
            _sized("the rope's original context", self.original, 1, MAX_CONTEXT)
        _real("low_freq_factor", self.low, 1e-3, 1e6)
        _real("high_freq_factor", self.high, 1e-3, 1e6)
        require(self.scaling != "llama3" or self.high > self.low, "high_freq_factor isn't over low_freq_factor")
        _real("beta_fast", self.beta_fast, 1e-3, 1e6)
        _real("beta_slow", self.beta_slow, 1e-3, 1e6)
        _real("the rope's attention factor", 1.0 if self.magnitude is None else self.magnitude, 1e-3, 1e3)
        require(len(self.divisors) in (0, self.dim // 2), "rope_freqs.weight has another length than the rope")
        for value in self.divisors:
            _real("a value of rope_freqs.weight", value, 1e-3, 1e9)


@dataclass(frozen=True)
class Block:
    """One transformer block: attention and a feed-forward part."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope: RopeSpec | None
    scale: float
    """Attention scores are multiplied by this."""
    eps: float
    window: int = 0
    """0: all positions; w: only the last w, the row's own included."""
    softcap: float = 0.0
    norm: Literal["rms", "layer"] = "rms"
    norms: Norms = "pre"
    activation: Activation = "silu"
    gated: bool = True
    qk_norm: bool = False
    """RMS norm of each head of q and k before the rope."""
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False

    def __post_init__(self) -> None:
        _sized("the number of heads", self.heads, 1, 1 << 16)
        _sized("the number of KV heads", self.kv_heads, 1, self.heads)
        require(self.heads % self.kv_heads == 0, f"{self.heads} heads can't share {self.kv_heads} KV heads evenly")
        _sized("the head's size", self.head_dim, 2, 4096)
        _sized("the heads' total size", self.heads * self.head_dim, 2, MAX_WIDTH)
        _sized("the FFN's size", self.ffn, 2, MAX_WIDTH)
        _real("the attention scale", self.scale, 1e-6, 1e6)
        _real("the norm's epsilon", self.eps, 0.0, 1.0)
        _sized("the window", self.window, 0, MAX_CONTEXT)
        _real("the attention softcap", self.softcap, 0.0, 1e6)
        if self.rope is not None:
            require(self.rope.dim <= self.head_dim, f"the rope turns {self.rope.dim} of {self.head_dim} values")

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Spec:
    """All numbers of one model. Layer keys: ``embed``, ``block.0`` ..., ``output``."""

    family: str
    width: int
    vocab: int
    context: int
    """The longest sequence it was made for, in tokens."""
    blocks: tuple[Block, ...]
    tied: bool
    """The output matrix is the embedding table."""
    embed_width: int
    """Width of the embedding table: ``width``, or less where a projection follows (OPT 350m)."""
    embed_scale: float = 1.0
    positions: int = 0
    """Rows of a learned position table; 0: none."""
    position_offset: int = 0
    final_norm: bool = True
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        _sized("the width", self.width, 2, MAX_WIDTH)
        _sized("the embedding's width", self.embed_width, 2, MAX_WIDTH)
        _sized("the vocabulary", self.vocab, 2, MAX_VOCAB)
        _sized("the context", self.context, 1, MAX_CONTEXT)
        _sized("the number of blocks", len(self.blocks), 1, MAX_BLOCKS)
        _real("the embedding's scale", self.embed_scale, 1e-6, 1e6)
        _sized("the position table", self.positions, 0, MAX_CONTEXT)
        if self.positions:
            _sized("the position offset", self.position_offset, 0, self.positions - 1)
            _sized("the context", self.context, 1, self.positions - self.position_offset)
        _real("the logits' softcap", self.logit_softcap, 0.0, 1e6)

    @property
    def keys(self) -> tuple[str, ...]:
        """Layer keys in order."""
        return ("embed", *(f"block.{i}" for i in range(len(self.blocks))), "output")

    def block(self, key: str) -> Block | None:
        """The block of a layer key, None for ``embed`` and ``output``."""
        return self.blocks[int(key[6:])] if key.startswith("block.") else None

    def shapes(self, key: str) -> Shapes:
        """A layer's tensors, in order of use. The tied output matrix is listed in ``output`` too."""
        block = self.block(key)
        if block is not None:
            return block_shapes(block, self.width)
        projected = self.embed_width != self.width
        if key == "embed":
            return _shapes(
                (True, "token_embd", self.vocab, self.embed_width, False),
                (projected, "project_in", self.width, self.embed_width, False),
                (self.positions > 0, "position_embd", self.positions, self.width, False),
            )
        return _shapes(
            (self.final_norm, "norm", 1, self.width, self.blocks[-1].norm == "layer"),
            (projected, "project_out", self.embed_width, self.width, False),
            (True, "output", self.vocab, self.embed_width, False),
        )

    @property
    def parameters(self) -> int:
        """Numbers in the model, a tied matrix counted once."""
        total = sum(n * k for key in self.keys for n, k in self.shapes(key).values())
        return total - (self.vocab * self.embed_width if self.tied else 0)

    def weight_bytes(self, key: str, nbytes: Callable[[str, int, int], int]) -> int:
        """Bytes of a layer's tensors where ``nbytes(name, n, k)`` says what each takes; vectors are f32.

        A tied output matrix counts in ``embed`` only.
        """
        total = 0
        for name, (n, k) in self.shapes(key).items():
            if not (self.tied and name == "output"):
                total += 4 * k if is_vector(name) else nbytes(name, n, k)
        return total

    def kv_shape(self, key: str, k_bits: int = 16, v_bits: int = 16) -> KVShape | None:
        block = self.block(key)
        return None if block is None else KVShape(block.kv_heads, block.head_dim, k_bits, v_bits)

    def kv_bytes(self, key: str, k_bits: int = 16, v_bits: int = 16) -> int:
        """Bytes one token takes in a layer's cache."""
        shape = self.kv_shape(key, k_bits, v_bits)
        return 0 if shape is None else shape.nbytes


def is_vector(name: str) -> bool:
    """Norm weights and biases: kept as f32, whatever the file has."""
    return name.endswith((".bias", "norm"))


def _shapes(*tensors: tuple[bool, str, int, int, bool]) -> Shapes:
    """Of rows (whether it is there, name, n, k, whether it has a bias)."""
    out: Shapes = {}
    for there, name, n, k, bias in tensors:
        if there:
            out[name] = n, k
            if bias:
                out[f"{name}.bias"] = 1, k if is_vector(name) else n
    return out


def block_shapes(b: Block, width: int) -> Shapes:
    """The tensors of a block."""
    layer, sandwich = b.norm == "layer", b.norms == "sandwich"
    return _shapes(
        (True, "attn_norm", 1, width, layer),
        (True, "attn_q", b.q_width, width, b.qkv_bias),
        (True, "attn_k", b.kv_width, width, b.qkv_bias),
        (True, "attn_v", b.kv_width, width, b.qkv_bias),
        (b.qk_norm, "q_norm", 1, b.head_dim, False),
        (b.qk_norm, "k_norm", 1, b.head_dim, False),
        (True, "attn_o", width, b.q_width, b.o_bias),
        (sandwich, "attn_post_norm", 1, width, layer),
        (b.norms != "parallel_shared", "ffn_norm", 1, width, layer),
        (b.gated, "ffn_gate", b.ffn, width, b.ffn_bias),
        (True, "ffn_up", b.ffn, width, b.ffn_bias),
        (True, "ffn_down", width, b.ffn, b.ffn_bias),
        (sandwich, "ffn_post_norm", 1, width, layer),
    )
