"""Rope settings out of config.json (old and new spelling) and GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from headrace.errors import Unsupported
from headrace.model.keys import Keys
from headrace.model.spec import MAX_CONTEXT, RopeSpec

LOCAL_BASE = 10000.0
"""Gemma 3's windowed blocks."""


def config_ropes(keys: Keys, base: float, head_dim: int, context: int) -> tuple[RopeSpec, RopeSpec]:
    """-> (the rope of full blocks, of windowed blocks where those have their own).

    Old: rope_theta, rope_local_base_freq, rope_scaling. New (transformers 5): rope_parameters, flat or by layer type.
    """
    new, old = keys.raw("rope_parameters", None), keys.raw("rope_scaling", None)
    theta = keys.number("rope_theta", base)
    local_theta = keys.number("rope_local_base_freq", LOCAL_BASE)
    original = keys.integer("original_max_position_embeddings", context, low=1, high=MAX_CONTEXT)
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise keys.bad(key, value, "an object")
    if new and set(new) & {"full_attention", "sliding_attention"}:
        if set(new) - {"full_attention", "sliding_attention"}:
            raise keys.refuse("rope_parameters")
        main, local = (new.get(k) or {} for k in ("full_attention", "sliding_attention"))
        if not isinstance(main, Mapping) or not isinstance(local, Mapping):
            raise keys.refuse("rope_parameters")
        return (_rope(Keys(main, "rope_parameters"), theta, head_dim, original),
                _rope(Keys(local, "rope_parameters"), local_theta, head_dim, original))  # fmt: skip
    main = new or old or {}
    return (_rope(Keys(main, "rope_parameters" if new else "rope_scaling"), theta, head_dim, original),
            RopeSpec(local_theta, head_dim))  # fmt: skip


def _rope(keys: Keys, theta: float, dim: int, original: int) -> RopeSpec:
    kind = keys.text("rope_type", keys.text("type", "default"))
    values: dict[str, Any] = {"base": keys.number("rope_theta", theta), "dim": dim}
    keys.must("partial_rotary_factor", (1, 1.0))
    if kind == "linear":
        values |= {"scaling": "linear", "factor": keys.number("factor")}
    elif kind == "llama3":
        values |= {"scaling": "llama3", "factor": keys.number("factor"), "low": keys.number("low_freq_factor"),
                   "high": keys.number("high_freq_factor")}  # fmt: skip
    elif kind == "yarn":
        # mscale belongs to DeepSeek's attention, which isn't among the families.
        keys.must("mscale", ())
        keys.must("mscale_all_dim", ())
        values |= {"scaling": "yarn", "factor": keys.number("factor"), "beta_fast": keys.number("beta_fast", 32.0),
                   "beta_slow": keys.number("beta_slow", 1.0), "truncate": keys.flag("truncate", True),
                   "magnitude": keys.number("attention_factor") if keys.has("attention_factor") else None}  # fmt: skip
    elif kind != "default":
        raise keys.refuse("rope_type" if keys.has("rope_type") else "type")
    if kind in ("llama3", "yarn"):
        values["original"] = keys.integer("original_max_position_embeddings", original, low=1, high=MAX_CONTEXT)
    keys.raw("original_max_position_embeddings", None)
    keys.leftovers(() if kind != "default" else ("factor",))
    return RopeSpec(**values)


def gguf_ropes(keys: Keys, a: str, base: float, dim: int, context: int, style: Literal["half", "interleaved"],
               divisors: tuple[float, ...]) -> tuple[RopeSpec, RopeSpec]:  # fmt: skip
    """As ``config_ropes``, from GGUF keys under ``a`` (the architecture and a dot)."""
    theta = keys.number(a + "rope.freq_base", base)
    local = RopeSpec(keys.number(a + "rope.freq_base_swa", LOCAL_BASE), dim, style)
    s = a + "rope.scaling."
    old = keys.number(a + "rope.scale_linear", 1.0)
    factor = keys.number(s + "factor", old)
    kind = keys.text(s + "type", "none" if factor in (0.0, 1.0) else "linear")
    values: dict[str, Any] = {"base": theta, "dim": dim, "style": style, "divisors": divisors}
    keys.must(s + "attn_factor", (1.0,))
    keys.must(s + "yarn_ext_factor", (1.0, -1.0))
    keys.must(s + "yarn_attn_factor", (1.0,))
    keys.raw(s + "finetuned", None)
    original = keys.integer(s + "original_context_length", context, low=0, high=MAX_CONTEXT) or context
    fast, slow = keys.number(s + "yarn_beta_fast", 32.0), keys.number(s + "yarn_beta_slow", 1.0)
    if kind == "linear":
        values |= {"scaling": "linear", "factor": factor or 1.0}
    elif kind == "yarn":
        values |= {"scaling": "yarn", "factor": factor or 1.0, "original": original, "beta_fast": fast,
                   "beta_slow": slow}  # fmt: skip
    elif kind != "none":
        raise Unsupported(f"The GGUF file sets {s + 'type'!r} to {kind[:40]!r}, which Headrace can't compute.")
    return RopeSpec(**values), local
