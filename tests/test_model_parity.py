"""Logits of tiny random models of every family, against transformers in f32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import helpers_model as h
from headrace.formats.index import open_model
from headrace.kernels.dispatch import make_device
from headrace.model.layers import spec_of
from helpers_gguf import write_gguf
from reference_device import ReferenceDevice

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 320, 40)]
BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OPT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "ffn_dim": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 64,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 24, "sliding_window": 7, "num_hidden_layers": 4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", BASE | {"tie_word_embeddings": True}),
    "llama-untied-biases": ("Llama", BASE | {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", BASE | {"rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "Llama", BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "llama-yarn-rope": ("Llama", BASE | {"rope_parameters": YARN}),
    "llama-head-dim": ("Llama", BASE | {"head_dim": 64, "hidden_act": "gelu"}),
    "mistral-window": ("Mistral", BASE | {"sliding_window": 9}),
    "mistral-no-window": ("Mistral", BASE | {"sliding_window": None}),
    "qwen2": ("Qwen2", BASE | {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", BASE | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", BASE | {"head_dim": 64}),
    "gemma3": ("Gemma3", BASE | GEMMA | {"sliding_window_pattern": 3}),
    "gemma3-softcap": ("Gemma3", BASE | GEMMA | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 40.0,
    }),
    "gemma3-scaled-rope": ("Gemma3", BASE | GEMMA | {"sliding_window_pattern": 3, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "opt": ("OPT", OPT),
    "opt-350m": ("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-bias": ("OPT", OPT | {"enable_bias": False, "activation_function": "gelu"}),
    "falcon-7b": ("Falcon", FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon-7b-bias": ("Falcon", FALCON | {"bias": True}),
    "falcon-40b": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-many-kv": ("Falcon", FALCON | {"multi_query": False, "parallel_attn": False}),
}  # fmt: skip


def make(case: str, folder: Path) -> Any:
    """A random model with norms and biases away from one and zero and sharp attention; saved in folder."""
    family, settings = CASES[case]
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**settings)).eval().float()
    rng = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            if p.dim() == 1:
                p += 0.2 * noise
            else:
                p.copy_(noise * (0.5 if "embed" in key else p.shape[1] ** -0.5))
    model.save_pretrained(folder)
    return model


def rounded_cache() -> Any:
    """A cache that rounds K and V to f16, as ours does: the cache's bits are part of the model."""

    class Rounded(transformers.DynamicCache):  # type: ignore[misc]
        def update(self, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(k.half().float(), v.half().float(), *args, **kwargs)

    return Rounded()


def oracle(model: Any, tokens: list[int], bits: int = 32) -> np.ndarray:
    """Logits [tokens, vocab] with a cache of 32 or 16 bits."""
    model.set_attn_implementation("eager")
    cache = {"cache": rounded_cache(), "use_cache": True} if bits == 16 else {}
    with torch.no_grad():
        out = model(torch.tensor([tokens]), **cache)
    result: np.ndarray = out.logits[0].numpy()
    return result


def close(result: np.ndarray, expected: np.ndarray, share: float = 1e-4) -> None:
    """The largest difference is under this share of the range."""
    span = expected.max() - expected.min()
    assert result.shape == expected.shape and np.isfinite(result).all()
    assert span > 1
    worst = np.abs(result - expected).max() / span
    assert worst < share, f"largest difference {worst:.2e} of the range"


DEVICES: dict[str, tuple[Callable[[], Any], int]] = {
    "reference": (ReferenceDevice, 32),
    "cpu": (lambda: make_device(threads=2), 16),
    "portable": (lambda: make_device(threads=1, cpu="portable"), 16),
}
"""Devices and the bits of their caches."""


def ours(path: Path, device: str) -> np.ndarray:
    made, bits = DEVICES[device]
    return h.logits_of(path, TOKENS, made(), k_bits=bits, v_bits=bits)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_equal_transformers(case: str, device: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    close(ours(tmp_path, device), oracle(model, TOKENS, DEVICES[device][1]))
    with open_model(tmp_path) as file:
        assert spec_of(file).parameters == sum(p.numel() for p in model.parameters())


GGUF_CASES = [
    ("llama-tied", "llama"), ("llama-untied-biases", "llama"), ("llama3-rope", "llama"), ("llama-linear-rope", "llama"),
    ("llama-yarn-rope", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3-gguf", "gemma3"),
    ("falcon-7b", "falcon"), ("falcon-7b-bias", "falcon"), ("falcon-40b", "falcon"), ("falcon-11b", "falcon"),
]  # fmt: skip
# GGUF can't say the query's scale or the pattern: six blocks, of which the last sees everything.
CASES["gemma3-gguf"] = (
    "Gemma3", BASE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 7, "num_hidden_layers": 7},
)  # fmt: skip


@pytest.mark.parametrize(("case", "arch"), GGUF_CASES)
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_gguf_equals_transformers(case: str, arch: str, device: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    write_gguf(model, arch, tmp_path / "model.gguf")
    close(ours(tmp_path / "model.gguf", device), oracle(model, TOKENS, DEVICES[device][1]))


@pytest.mark.parametrize("case", ["llama-tied", "opt-350m", "gemma3", "falcon-40b"])
def test_chunks_and_slot_order_change_nothing_that_matters(case: str, tmp_path: Path) -> None:
    make(case, tmp_path)
    loaded = h.load(tmp_path, ReferenceDevice())
    whole = h.logits_of(loaded, TOKENS, loaded.device)
    close(h.logits_of(loaded, TOKENS, loaded.device, chunk=7, shuffle=3), whole)
    close(h.logits_of(loaded, TOKENS, loaded.device, chunk=1), whole)


@pytest.mark.parametrize(("bits", "share"), [((8, 8), 0.02), ((8, 4), 0.12), ((4, 4), 0.5)])
def test_narrow_caches_stay_near_and_agree(bits: tuple[int, int], share: float, tmp_path: Path) -> None:
    make("llama-tied", tmp_path)
    results = {}
    for name, device in (("reference", ReferenceDevice()), ("cpu", make_device(threads=2))):
        loaded = h.load(tmp_path, device)
        whole = h.logits_of(loaded, TOKENS, device)
        results[name] = h.logits_of(loaded, TOKENS, device, k_bits=bits[0], v_bits=bits[1])
        close(results[name], whole, share)
        assert np.abs(results[name] - whole).max() > 0
    close(results["cpu"], results["reference"], 2e-3)


@pytest.mark.parametrize("fmt", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_stored_formats_agree(fmt: str, tmp_path: Path) -> None:
    """The CPU's integer kernels round activations to 8 bit: near the reference, which doesn't."""
    write_gguf(make("llama-untied-biases", tmp_path), "llama", tmp_path / "model.gguf", fmt)
    expected = h.logits_of(tmp_path / "model.gguf", TOKENS, ReferenceDevice())
    close(h.logits_of(tmp_path / "model.gguf", TOKENS, make_device(threads=2)), expected, 1e-4 if "F" in fmt else 0.03)


@pytest.mark.parametrize("case", ["llama-untied-biases", "gemma3", "opt-350m", "falcon-40b"])
def test_folders_in_bf16(case: str, tmp_path: Path) -> None:
    """Norms and biases are widened, 1 is added after that, matrices stay bf16."""
    model = make(case, tmp_path).bfloat16()
    model.save_pretrained(tmp_path)
    # Read again, as casting back wouldn't undo what bf16 does to its rope.
    expected = oracle(type(model).from_pretrained(tmp_path, dtype=torch.float32).eval(), TOKENS, 16)
    for device in (ReferenceDevice(), make_device(threads=2)):
        loaded = h.load(tmp_path, device)
        assert {t.fmt for t in loaded.model.layers[1].tensors.values()} == {"F32", "BF16"}
        close(h.logits_of(loaded, TOKENS, device), expected)


def test_text_of_a_gemma3_with_vision(tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(**CASES["gemma3"][1])
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    model.save_pretrained(tmp_path)
    expected = oracle(model, TOKENS)
    result = h.logits_of(tmp_path, TOKENS, ReferenceDevice(), k_bits=32, v_bits=32)
    assert np.abs(result - expected).max() < 1e-4 * (expected.max() - expected.min())
