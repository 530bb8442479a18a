"""The operations of a layer, as data: what every device understands.

A layer (``model/layers.py``) is a tuple of these; a device compiles the tuple once and then runs it once
per layer and run. Registers are named f32 arrays ``[rows, width]``; ``x`` is the residual stream and the
only one that lives from layer to layer. Weights are named by the layer's own tensor names.
Ops read and write in the order listed; ``dst`` may equal a ``src`` except for ``Linear``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu_erf", "relu"]


FEWEST = 32
"""Positions that sparse attention takes at least; with fewer, short texts suffer most (docs/log.md)."""


@dataclass(frozen=True)
class Gather:
    """dst[r] (+)= scale * table[index(r) + offset]; index is the row's token id or its position."""

    dst: str
    table: str
    index: Literal["token", "position"] = "token"
    offset: int = 0
    scale: float = 1.0
    accumulate: bool = False


@dataclass(frozen=True)
class Norm:
    """dst = normalise(src) * weight (+ bias), over each consecutive ``group`` values (0: the whole row).

    rms: x / sqrt(mean(x^2) + eps); layer: (x - mean) / sqrt(var + eps).
    """

    dst: str
    src: str
    weight: str
    bias: str | None = None
    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    group: int = 0


@dataclass(frozen=True)
class Linear:
    """dst (+)= src @ weight.T (+ bias). weight is [n, k] in any storage format; dst gets n columns."""

    dst: str
    src: str
    weight: str
    bias: str | None = None
    accumulate: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotate ``buf`` viewed as [rows, heads, head_dim] in place: the first ``2 * len(inv_freq)`` dims of a head.

    half: pairs (i, i + n); interleaved: pairs (2i, 2i + 1). angle = position * inv_freq[i], taken in f64;
    cos and sin are rounded to f32 after multiplying by ``magnitude``.
    """

    buf: str
    heads: int
    head_dim: int
    style: Literal["half", "interleaved"]
    inv_freq: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True)
class StoreKV:
    """Round k and v, [rows, kv_heads * head_dim], into the rows' slots of this layer's cache."""

    k: str
    v: str


@dataclass(frozen=True)
class Attend:
    """dst = attention of src (queries, [rows, heads * head_dim]) over each row's slot list, itself included.

    window w > 0: only positions > position - w. softcap c > 0: scores become c * tanh(s / c).
    keep < 1 (an approximation after FlexGen's sparse attention): of n others than the row's own position only the
    max(FEWEST, floor(keep * n)) of highest score are seen (and those as high as the last of them). most: positions
    there may be then, for scratch.
    """

    dst: str
    src: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    keep: float = 1.0
    most: int = 0


@dataclass(frozen=True)
class Act:
    """dst = act(src), or act(src) * up when ``up`` is given (gated)."""

    dst: str
    src: str
    kind: Activation
    up: str | None = None


@dataclass(frozen=True)
class Add:
    """dst += src."""

    dst: str
    src: str


@dataclass(frozen=True)
class Copy:
    """dst = src. ``wanted``: keep only the rows whose logits are wanted, in row order (dst is shorter)."""

    dst: str
    src: str
    wanted: bool = False


@dataclass(frozen=True)
class Scale:
    """buf *= factor, then, when softcap > 0, buf = softcap * tanh(buf / softcap)."""

    buf: str
    factor: float = 1.0
    softcap: float = 0.0


Op: TypeAlias = Gather | Norm | Linear | Rope | StoreKV | Attend | Act | Add | Copy | Scale
