"""Specs from metadata: accounting, frequencies, what is refused, and hostile values."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadFile, HeadraceError, Unsupported
from headrace.formats.index import ModelFile, open_model
from headrace.formats.tensor import TensorInfo
from headrace.model.families import FAMILIES, from_config, from_gguf
from headrace.model.layers import build, load_model, spec_of
from headrace.model.names import FOLDER
from headrace.model.names import GGUF as NAMES
from headrace.model.rope import inv_freq, magnitude
from headrace.model.spec import RopeSpec, Spec, is_vector

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": [128001, 128009], "pretraining_tp": 1, "attention_dropout": 0.0,
    "initializer_range": 0.02, "transformers_version": "4.43.0", "use_cache": True,
}  # fmt: skip
OPT: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 50272, "hidden_size": 12288, "ffn_dim": 49152, "num_hidden_layers": 96,
    "num_attention_heads": 96, "max_position_embeddings": 2048, "word_embed_proj_dim": 12288,
    "do_layer_norm_before": True, "activation_function": "relu", "dropout": 0.1, "_remove_final_layer_norm": False,
    "init_std": 0.006, "layerdrop": 0.0, "prefix": "</s>",
}  # fmt: skip
FALCON: dict[str, Any] = {
    "model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60,
    "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False, "alibi": False,
    "layer_norm_epsilon": 1e-5, "parallel_attn": True, "multi_query": True, "auto_map": {"AutoModel": "x"},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256,
    "vision_config": {"hidden_size": 1152}, "image_token_index": 262144, "eoi_token_index": 256000,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "sliding_window": 32768, "max_window_layers": 21, "use_sliding_window": False, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip
KNOWN = {"llama": LLAMA, "opt": OPT, "falcon": FALCON, "gemma3": GEMMA, "qwen2": QWEN2}

GGUF: dict[str, Any] = {
    "general.architecture": "llama", "general.type": "model", "llama.block_count": 2, "llama.context_length": 512,
    "llama.embedding_length": 64, "llama.feed_forward_length": 128, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 100,
    "llama.rope.dimension_count": 16, "general.name": "x", "tokenizer.ggml.model": "gpt2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama", 8030261248), ("opt", 174604468224), ("falcon", 41303293952), ("gemma3", 3880263168),
     ("qwen2", 494032768)],
)  # fmt: skip
def test_published_models_have_their_published_size(name: str, parameters: int) -> None:
    assert from_config(KNOWN[name]).parameters == parameters


def test_late_blocks_have_windows() -> None:
    on = QWEN2 | {"use_sliding_window": True}
    assert [b.window for b in from_config(on).blocks] == [0] * 21 + [32768] * 3
    assert {b.window for b in from_config(QWEN2).blocks} == {0}
    stated = from_config(on | {"layer_types": ["sliding_attention"] + ["full_attention"] * 23})
    assert [b.window for b in stated.blocks] == [32768] + [0] * 23


def test_a_config_around_a_text_config() -> None:
    assert not from_config(GEMMA | {"tie_word_embeddings": False}).tied
    assert from_config(GEMMA | {"tie_word_embeddings": True, "text_config": GEMMA["text_config"]}).tied
    with pytest.raises(Unsupported, match="unheard_of"):
        from_config(GEMMA | {"unheard_of": 3})


def test_accounting_of_llama_8b() -> None:
    spec = from_config(LLAMA)
    assert spec.keys[0] == "embed" and spec.keys[1] == "block.0" and spec.keys[-1] == "output" and len(spec.keys) == 34
    assert spec.kv_bytes("block.3") == 2 * 2 * 8 * 128 and spec.kv_bytes("embed") == 0
    assert spec.kv_bytes("block.3", 8, 4) == 8 * (4 * 34 + 4 * 20)
    matrices = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    half = spec.weight_bytes("block.0", lambda name, n, k: n * k // 2)
    assert half == matrices // 2 + 2 * 4 * 4096


def test_windows_and_ropes_alternate_and_tied_matrices_count_once() -> None:
    spec = from_config(GEMMA)
    windows = [b.window for b in spec.blocks]
    assert windows[:6] == [1024] * 5 + [0] and sum(w == 0 for w in windows) == 5
    assert spec.blocks[5].rope is not None and spec.blocks[0].rope is not None
    assert (spec.blocks[5].rope.base, spec.blocks[5].rope.factor) == (1e6, 8.0)
    assert (spec.blocks[0].rope.base, spec.blocks[0].rope.factor) == (10000.0, 1.0)
    assert spec.tied and spec.weight_bytes("output", lambda name, n, k: n * k) == 4 * 2560
    assert spec.shapes("output")["output"] == spec.shapes("embed")["token_embd"]


def test_frequencies_are_the_nearest_f32() -> None:
    for base, dim in ((10000.0, 128), (500000.0, 128), (1e6, 256), (10000.0, 64)):
        got = inv_freq(RopeSpec(base, dim))
        # Long double has 11 more bits than a double here: enough to round to f32 rightly, short of a tie.
        exact = np.longdouble(1) / np.power(np.longdouble(base), np.arange(0, dim, 2, dtype=np.longdouble) / dim)
        assert got == tuple(float(np.float32(v)) for v in exact)
        assert got[0] == 1.0


def test_scaled_frequencies() -> None:
    plain = inv_freq(RopeSpec(500000.0, 128))
    llama3 = inv_freq(RopeSpec(500000.0, 128, scaling="llama3", factor=8.0, original=8192))
    assert llama3[:20] == plain[:20] and np.allclose(np.array(llama3[-20:]) * 8, plain[-20:], rtol=1e-6)
    assert inv_freq(RopeSpec(10000.0, 8, scaling="linear", factor=4.0))[0] == 0.25
    yarn = RopeSpec(10000.0, 128, scaling="yarn", factor=4.0, original=32768)
    assert magnitude(yarn) == float(np.float32(0.1 * np.log(4.0) + 1))
    assert magnitude(replace(yarn, magnitude=2.0)) == 2.0 and magnitude(RopeSpec(1e4, 8)) == 1.0
    assert inv_freq(RopeSpec(1e4, 8, divisors=(1.0, 2.0, 4.0, 8.0)))[0] == 1.0


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", {"hidden_act": "mish"}, "hidden_act"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 3}}, "wobble"),
        ("llama", {"rope_scaling": LLAMA["rope_scaling"] | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"sliding_window": 4096}, "sliding_window"),
        ("llama", {"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ("llama", {"model_type": "mamba"}, "mamba"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ("gemma3", {"text_config": GEMMA["text_config"] | {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping"),
        ("gemma3", {"text_config": GEMMA["text_config"] | {"use_bidirectional_attention": True}}, "bidirectional"),
        ("gemma3", {"text_config": GEMMA["text_config"] | {"layer_types": ["chunked"] * 34}}, "layer_types"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 24},
         "sliding_window"),
    ],
)  # fmt: skip
def test_what_changes_the_mathematics_is_refused_by_name(name: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadraceError, match=named) as e:
        from_config(KNOWN[name] | change)
    assert isinstance(e.value, Unsupported | BadFile)


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": "float16", "unsloth_version": "2024.9", "_name_or_path": "x", "quantization_config": None},
        {"num_local_experts": 0, "use_something_new": False, "future": None},
        {"layer_types": ["full_attention"] * 32, "max_sequence_length": 2048, "prefix": "<s>"},
        {"text_config": None},
        {"rope_scaling": None}, {"head_dim": None}, {"head_dim": 128}, {"rope_scaling": {"type": "default"}},
    ],
)  # fmt: skip
def test_harmless_and_switched_off_keys_pass(change: dict[str, Any]) -> None:
    assert from_config(LLAMA | change).width == 4096


@pytest.mark.parametrize("change", [
    {"num_attention_heads": 0}, {"num_attention_heads": -4}, {"num_key_value_heads": 7}, {"hidden_size": 10**30},
    {"hidden_size": "4096"}, {"hidden_size": 4097}, {"hidden_size": True}, {"num_hidden_layers": 10**9},
    {"rms_norm_eps": float("nan")}, {"rms_norm_eps": -1.0}, {"rope_theta": 0}, {"rope_theta": float("inf")},
    {"vocab_size": 1 << 40}, {"intermediate_size": 0}, {"max_position_embeddings": 0}, {"rope_scaling": [1]},
    {"rope_theta": 10**400}, {"head_dim": 127}, {"model_type": 7}, {"tie_word_embeddings": "yes"},
    {"rope_parameters": {"full_attention": 3}}, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
])  # fmt: skip
def test_senseless_numbers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(HeadraceError) as e:
        from_config(LLAMA | change)
    assert len(str(e.value)) < 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.data(), JSON)
def test_any_value_in_any_key_gives_a_spec_or_an_error(name: str, data: st.DataObject, value: Any) -> None:
    config = dict(KNOWN[name])
    inner = config.get("text_config", config)
    key = data.draw(st.sampled_from(sorted(inner)))
    if inner is not config:
        config["text_config"] = inner | {key: value}
    else:
        config[key] = value
    with suppress(HeadraceError):
        assert isinstance(from_config(config), Spec)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(GGUF)), JSON | st.just(np.array([2, 2])) | st.just(np.array([2.5, np.nan])))
def test_any_value_in_gguf_metadata_gives_a_spec_or_an_error(key: str, value: Any) -> None:
    with suppress(HeadraceError):
        assert isinstance(from_gguf(GGUF | {key: value}), Spec)


def test_gguf_metadata() -> None:
    spec = from_gguf(GGUF)
    assert (spec.width, spec.vocab, spec.blocks[0].kv_heads, spec.blocks[1].head_dim) == (64, 100, 2, 16)
    assert spec.blocks[0].rope == RopeSpec(10000.0, 16, "interleaved")
    per_block = from_gguf(GGUF | {"llama.attention.head_count_kv": np.array([4, 1], np.int32)})
    assert [b.kv_heads for b in per_block.blocks] == [4, 1]
    for key, value in [("llama.expert_count", 8), ("llama.attention.clamp_kqv", 1.5), ("general.type", "adapter"),
                       ("llama.rope.scaling.type", "longrope"), ("general.architecture", "mamba"),
                       ("llama.attention.head_count_kv", np.array([4, 0])), ("llama.vocab_size", 7.5),
                       ("llama.vocab_size", None)]:  # fmt: skip
        with pytest.raises(HeadraceError):
            from_gguf(GGUF | {key: value})


GEMMA_GGUF = {key.replace("llama", "gemma3"): "gemma3" if value == "llama" else value for key, value in GGUF.items()}


def test_gemma_windows_in_gguf_metadata() -> None:
    gemma = GEMMA_GGUF | {"gemma3.block_count": 8, "gemma3.attention.sliding_window": 5}
    key = "gemma3.attention.sliding_window_pattern"
    assert [b.window for b in from_gguf(gemma).blocks] == [5, 5, 5, 5, 5, 0, 5, 5]
    assert [b.window for b in from_gguf(gemma | {key: 3}).blocks] == [5, 5, 0, 5, 5, 0, 5, 5]
    assert [b.window for b in from_gguf(gemma | {key: np.arange(8) % 2 == 1}).blocks] == [0, 5] * 4
    for bad in (0, -1, "6", np.array([1, 0]), np.zeros(8), [1]):
        with pytest.raises(HeadraceError, match="sliding_window_pattern"):
            from_gguf(gemma | {key: bad})


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF model of 60 kB."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in GGUF.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    spec, table = from_gguf(GGUF | {"llama.vocab_size": 100}), NAMES["llama"].table
    for layer in spec.keys:
        for name, shape in spec.shapes(layer).items():
            file_name = table[name].format(i=layer[6:]) + ".weight"
            writer.add_tensor(file_name, np.ones(shape[1:] if is_vector(name) else shape, np.float16))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_mutated_files_give_a_model_or_an_error(small_gguf: bytes, tmp_path: Path) -> None:
    path, rng, refused = tmp_path / "m.gguf", np.random.default_rng(1), 0
    path.write_bytes(small_gguf)
    with open_model(path) as file:
        assert len(load_model(file).layers) == 4
    header = small_gguf.index(b"rope_freqs") + 100
    for _ in range(400):
        raw = np.frombuffer(small_gguf, np.uint8).copy()
        for at in rng.integers(4, header, rng.integers(1, 3)):
            raw[at] = rng.choice([0, 1, 255, raw[at] ^ 1 << rng.integers(8)])
        path.write_bytes(raw.tobytes())
        try:
            with open_model(path) as file:
                load_model(file)
        except HeadraceError:
            refused += 1
    assert refused > 100


def fake(spec: Spec, path: Path, change: dict[str, TensorInfo | None]) -> ModelFile:
    """A folder's index without bytes: llama's tensors, changed."""
    table, tensors = FOLDER["llama"].table, {}
    for key in spec.keys:
        for name, shape in spec.shapes(key).items():
            file_name = ("" if name == "output" else "model.") + table[name].format(i=key[6:]) + ".weight"
            tensors[file_name] = info(file_name, shape[1:] if is_vector(name) else shape, path)
    for name, new in change.items():
        tensors.pop(name, None)
        if new is not None:
            tensors[name] = new
    return ModelFile("hf", {"config": LLAMA}, tensors, ())


def info(name: str, shape: tuple[int, ...], path: Path = Path("x"), fmt: str = "F32") -> TensorInfo:
    return TensorInfo(name, fmt, shape, path, 0, int(np.prod(shape)) * 4)


@pytest.mark.parametrize(
    ("name", "new", "error", "named"),
    [
        ("model.norm.weight", None, BadFile, "model.norm.weight"),
        ("model.norm.weight", info("model.norm.weight", (4095,)), BadFile, "4095"),
        ("model.layers.0.mlp.up_proj.weight", info("", (4096, 14336)), BadFile, "up_proj"),
        ("model.layers.0.mlp.up_proj.weight", info("", (14336, 4096), fmt="F64"), Unsupported, "F64"),
        ("model.layers.0.mlp.extra.weight", info("", (4, 4)), Unsupported, "extra"),
        ("model.layers.32.mlp.up_proj.weight", info("", (14336, 4096)), Unsupported, "layers.32"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", info("", (64,)), None, ""),
    ],
)  # fmt: skip
def test_tensors_are_checked(name: str, new: TensorInfo | None, error: type[Exception] | None, named: str) -> None:
    spec = from_config(LLAMA)
    if new is not None and new.name == "":
        new = replace(new, name=name)
    file = fake(spec, Path("x"), {name: new})
    if error is None:
        assert len(build(spec, file)) == 34
    else:
        with pytest.raises(error, match=named):
            build(spec, file)


def test_a_bare_config_has_a_spec_but_no_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with open_model(tmp_path / "config.json") as file:
        assert spec_of(file).parameters == 8030261248
        with pytest.raises(BadFile, match="no weights"):
            load_model(file)


def test_every_family_is_unique_and_has_names() -> None:
    kinds = [k for f in FAMILIES for k in f.config_types]
    assert len(set(kinds)) == len(kinds)
    assert {f.name for f in FAMILIES} == set(FOLDER)
    assert {f.name for f in FAMILIES if f.gguf} == set(NAMES)
