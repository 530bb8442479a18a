"""A tiny random model file, without any other library: for tests that need a whole model and no text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gguf_writer import write_gguf
from headrace.formats.quant import quantise

WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 128, 4, 2, 32, 256, 288


def byte_tokens() -> dict[str, object]:
    """A tokenizer for VOCAB ids: unknown, begin, end, every byte, and fillers."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3] + [6] * 256
    fill = VOCAB - len(tokens)
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*tokens, *(f"word{i}" for i in range(fill))],
        "tokenizer.ggml.scores": np.zeros(VOCAB, np.float32),
        "tokenizer.ggml.token_type": np.array(types + [1] * fill, np.int32),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def tiny_model(
    path: Path, fmt: str = "Q4_0", blocks: int = 4, seed: int = 0, context: int = 2048, text: bool = False,
    ffn: int = FFN,
) -> Path:  # fmt: skip
    """A Llama of random weights in GGUF; matrices as ``fmt``, the rest F32. text: with a tokenizer."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, int]] = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    for i in range(blocks):
        shapes |= {
            f"blk.{i}.attn_q": (HEADS * HEAD, WIDTH), f"blk.{i}.attn_k": (KV_HEADS * HEAD, WIDTH),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD, WIDTH), f"blk.{i}.attn_output": (WIDTH, HEADS * HEAD),
            f"blk.{i}.ffn_gate": (ffn, WIDTH), f"blk.{i}.ffn_up": (ffn, WIDTH), f"blk.{i}.ffn_down": (WIDTH, ffn),
        }  # fmt: skip
    tensors: dict[str, tuple[str, tuple[int, ...], list[np.ndarray]]] = {}
    for name, (n, k) in shapes.items():
        values = (random.standard_normal((n, k)) * (1.5 / np.sqrt(k))).astype(np.float32)
        tensors[f"{name}.weight"] = (fmt, (n, k), [quantise(fmt, values)])
    norms = ["output_norm", *(f"blk.{i}.{n}" for i in range(blocks) for n in ("attn_norm", "ffn_norm"))]
    for name in norms:
        values = (1 + 0.1 * random.standard_normal(WIDTH)).astype(np.float32)
        tensors[f"{name}.weight"] = ("F32", (WIDTH,), [values])
    metadata: dict[str, object] = {
        "general.architecture": "llama", "llama.context_length": context, "llama.embedding_length": WIDTH,
        "llama.block_count": blocks, "llama.feed_forward_length": ffn, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD, "llama.rope.freq_base": 10000.0, "llama.vocab_size": VOCAB,
    }  # fmt: skip
    write_gguf(path, metadata | (byte_tokens() if text else {}), tensors)
    return path
