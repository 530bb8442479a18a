"""What ``--requant`` costs: perplexity of a bf16 model, and of the same read as q8 and q4.

    python benchmarks/requant.py [--model smollm2-q4_1|gemma3-270m] [--bytes 20000] [--kinds q8 q4] [--plain] [--alike]

No package brings bf16 weights of a model that small, so they are expanded from the files there are. SmolLM2's is Q4_1
itself, and a good fit would find that grid again and lose nothing; so its channels and neurons are put in another order
first, everywhere alike: the function is the same, and the 32 weights of a block then come from 32 blocks of the file,
each with a grid of its own. (--plain leaves them as they are.) Gemma's matrices are Q5_0 and Q8_0 mostly, finer than
q4; its order is left. Losses are relative to the expanded model; errors are one standard deviation, of the text's
choice.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gguf_writer import TensorSource, write_gguf
from headrace.formats.index import ModelFile, open_model
from headrace.formats.quant import dequantise, quantise
from headrace.formats.requant import RECIPES, requantise
from headrace.kernels.dispatch import make_device
from headrace.model.layers import load_model
from headrace.run.inputs import WORD, squares_of_inputs
from model_zoo import model_path
from perplexity import by_us, pieces_of, text_of


def orders(file: ModelFile, seed: int = 0) -> dict[str, tuple[Any, Any]]:
    """Of each tensor the order of its rows and of its columns; None: as they are."""
    random = np.random.default_rng(seed)
    arch = str(file.metadata["general.architecture"])
    width = random.permutation(file.tensors["token_embd.weight"].k)
    heads = int(str(file.metadata[f"{arch}.attention.head_count"]))
    out: dict[str, tuple[Any, Any]] = {"token_embd.weight": (None, width), "output_norm.weight": (None, width)}
    for i in range(int(str(file.metadata[f"{arch}.block_count"]))):
        block = f"blk.{i}."
        neurons = random.permutation(file.tensors[f"{block}ffn_down.weight"].k)
        wide, values = (file.tensors[f"{block}{n}.weight"] for n in ("attn_output", "attn_v"))
        one = random.permutation(wide.k // heads)
        in_heads, in_values = ((np.arange(0, n, len(one))[:, None] + one).reshape(-1) for n in (wide.k, values.n))
        out |= {f"{block}{n}.weight": (None, width) for n in ("attn_norm", "ffn_norm", "attn_q", "attn_k")}
        out |= {f"{block}{n}.weight": (neurons, width) for n in ("ffn_gate", "ffn_up")}
        out[f"{block}ffn_down.weight"] = width, neurons
        out[f"{block}attn_v.weight"] = in_values, width
        out[f"{block}attn_output.weight"] = width, in_heads
    return out


def expanded(source: Path, target: Path, shuffled: bool) -> None:
    """The model with bf16 matrices."""
    with open_model(source) as file:
        order = orders(file) if shuffled else {}
        tensors: dict[str, TensorSource] = {}
        for t in file.tensors.values():
            rows, columns = order.get(t.name, (None, None))
            values = dequantise(t.fmt, file.read(t), t.n, t.k)
            values = values if rows is None else values[rows]
            values = values if columns is None else np.ascontiguousarray(values[:, columns])
            fmt = "BF16" if t.n > 1 else "F32"
            tensors[t.name] = fmt, t.shape, [quantise(fmt, values)]
        write_gguf(target, file.metadata, tensors, file.types)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-q4_1", choices=("smollm2-q4_1", "gemma3-270m"))
    parser.add_argument("--bytes", type=int, default=20000)
    parser.add_argument("--kinds", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--alike", action="store_true", help="errors of all columns alike, whatever is fed to them")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    device, source = make_device("cpu", threads=args.threads), model_path(args.model)
    result: dict[str, Any] = {"benchmark": "requant", "model": args.model, "bytes": args.bytes, "plain": args.plain}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bf16.gguf"
        expanded(source, path, args.model.startswith("smollm2") and not args.plain)
        texts = pieces_of(path, text_of(None, args.bytes))
        truth = None
        inputs = None if args.alike else (WORD, squares_of_inputs)
        for kind in ("bf16", *sorted(args.kinds, reverse=True)):
            file = open_model(path) if kind == "bf16" else requantise(open_model(path), kind, inputs)
            start = time.process_time()
            found = by_us(device, load_model(file), texts, (16, 16))
            truth = found if truth is None else truth
            lost = truth - found
            loss = float(np.exp(lost.mean())) - 1
            blocks = [t for t in file.tensors.values() if t.n > 1 and t.name.startswith("blk.")]
            result["tokens"] = len(found)
            result[kind] = {
                "perplexity": float(np.exp(-found.mean())), "loss": loss,
                "error": float(lost.std(ddof=1)) / len(lost) ** 0.5 * (1 + loss), "gigabytes": file.nbytes / 1e9,
                "bits_of_blocks": 8 * sum(t.nbytes for t in blocks) / sum(t.n * t.k for t in blocks),
                "cpu_s": round(time.process_time() - start, 1),
            }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
