"""A Llama's GGUF file as a Hugging Face folder, a megabyte or so of weights at a time: for others' programmes.

    python benchmarks/hf_writer.py model.gguf FOLDER [--format BF16]

One safetensors file a block. The output matrix is written out beside the embedding: some programmes want one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.formats.index import ModelFile, open_model
from headrace.formats.quant import dequantise, quantise
from headrace.formats.tensor import tensor_nbytes

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
AT_ONCE = 1 << 20


def write_folder(source: Path, folder: Path, fmt: str = "BF16") -> None:
    """fmt: BF16, F16 or F32."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_model(source) as file:
        count = int(str(file.metadata["llama.block_count"]))
        heads = int(str(file.metadata["llama.attention.head_count"]))
        width = file.tensors["token_embd.weight"].k
        output = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        shards = [
            {f"model.layers.{i}.{hf}.weight": f"blk.{i}.{ours}.weight" for ours, hf in NAMES.items()}
            for i in range(count)
        ]
        shards.append({"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"})
        shards.append({"lm_head.weight": output})
        places, total = {}, 0
        for number, names in enumerate(shards):
            name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            total += _write_shard(file, folder / name, names, fmt, width // heads)
            places |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(_config(file, fmt, heads, width)))


def _config(file: ModelFile, fmt: str, heads: int, width: int) -> dict[str, object]:
    m = file.metadata
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": width,
        "intermediate_size": m["llama.feed_forward_length"], "num_hidden_layers": m["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": m["llama.attention.head_count_kv"],
        "head_dim": width // heads, "rms_norm_eps": m["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": m["llama.rope.freq_base"], "max_position_embeddings": m["llama.context_length"],
        "vocab_size": file.tensors["token_embd.weight"].n, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[fmt],
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _write_shard(file: ModelFile, path: Path, names: Mapping[str, str], fmt: str, head_dim: int) -> int:
    header, size = {}, 0
    for name, ours in names.items():
        shape = file.tensors[ours].shape
        end = size + tensor_nbytes(fmt, shape)
        header[name] = {"dtype": fmt, "shape": list(shape), "data_offsets": [size, end]}
        size = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for ours in names.values():
            for part in _values(file, ours, head_dim):
                f.write(quantise(fmt, part).data)
    return size


def _values(file: ModelFile, name: str, head_dim: int) -> Iterator[NDArray[np.float32]]:
    """A tensor's rows, some at a time; of q and k in the order that Hugging Face has them in."""
    info = file.tensors[name]
    order = np.arange(info.n)
    if name.endswith(("attn_q.weight", "attn_k.weight")):  # GGUF: the two halves of a head interleaved
        order = order.reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    step = max(1, AT_ONCE // info.k)
    for at in range(0, info.n, step):
        rows = order[at : at + step]
        yield dequantise(info.fmt, file.read(info, rows), len(rows), info.k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", default="BF16", choices=("BF16", "F16", "F32"))
    args = parser.parse_args()
    write_folder(args.source, args.folder, args.format)


if __name__ == "__main__":
    main()
