"""Perplexity on real text: our integer path, f32 arithmetic on the same weights, and llama.cpp, on the same tokens.

    python benchmarks/perplexity.py [--model smollm2-q4_1] [--bytes 20000] [--kv 16/16 8/8 8/4 4/4] [--text FILE]

llama.cpp is made to write the text by a grammar that allows nothing else; it tells the log-probability of each token
it had to choose, before the grammar. The very ids it chose are then scored here. The f32 side is the reference
device (NumPy) on the dequantised weights, K and V in f16 as everywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from headrace.formats.index import open_model
from headrace.kernels.device import Device
from headrace.kernels.dispatch import make_device
from headrace.memory.kv import HostKV, kv_shapes, parse_bits
from headrace.memory.slots import pages_for
from headrace.memory.weights import Resident
from headrace.model.layers import Model, load_model
from headrace.run.score import ScoringComputer, log_probabilities, perplexity
from model_zoo import ZOO, model_path

PIECE = 1400
"""Characters scored at a time."""


def text_of(path: Path | None, nbytes: int) -> str:
    """English prose and questions: Spec-Bench's prompts where they are, else the licence text."""
    root = Path(__file__).resolve().parent.parent
    prompts = root.parent / "shared" / "data" / "spec_bench_dev.jsonl"
    if path is not None:
        text = path.read_text()
    elif prompts.exists():
        text = "\n\n".join(t for line in prompts.open() for t in json.loads(line)["turns"])
    else:
        text = (root / "LICENSE").read_text()
    plain = "".join(c for c in text if c == "\n" or " " <= c <= "~")
    return plain[:nbytes]


def by_llamacpp(path: Path, pieces: list[str]) -> list[tuple[list[int], list[float]]]:
    """For each piece the ids (the first is given, not scored) and llama.cpp's log-probability of all but the first."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = str(path)
    p.n_ctx = 2048
    p.n_parallel = 1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(p)
    found = []
    for piece in pieces:
        words = piece.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        said = server.handle_completions(
            {"prompt": [START], "n_predict": 1500, "temperature": 0, "logprobs": 1, "cache_prompt": False,
             "grammar": f'root ::= "{words}"'}
        )  # fmt: skip
        content = said["choices"][0]["logprobs"]["content"]
        ends = [i for i, c in enumerate(content) if not c["token"] and i]
        content = content[: ends[0]] if ends else content
        found.append(([START, *(c["id"] for c in content)], [c["logprob"] for c in content]))
    return found


START = 198
"""A line break (in SmolLM2's vocabulary) to begin with."""


def by_us(device: Device, model: Model, texts: list[list[int]], bits: tuple[int, int]) -> np.ndarray:
    every = range(len(model.layers))
    weights = Resident(device, model, every)
    found = []
    for ids in texts:
        cache = HostKV(device, kv_shapes(model.layers, bits), pages_for(len(ids)))
        computer = ScoringComputer(device, model.layers, every, model.spec.width, weights, cache)
        found.append(log_probabilities(computer, ids))
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-q4_1", choices=list(ZOO))
    parser.add_argument("--bytes", type=int, default=20000)
    parser.add_argument("--kv", nargs="*", default=["8/8", "8/4", "4/4"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--no-f32", action="store_true", help="leave the slow f32 side out")
    args = parser.parse_args()
    path = model_path(args.model)
    text = text_of(args.text, args.bytes)
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    theirs = by_llamacpp(path, pieces)
    texts = [ids for ids, _ in theirs]
    model = load_model(open_model(path))
    device = make_device("cpu", threads=2)
    result: dict[str, Any] = {"benchmark": "perplexity", "model": args.model, "bytes": len(text)}
    result["tokens"] = sum(len(ids) - 1 for ids in texts)
    result["llama.cpp"] = perplexity(np.array([v for _, values in theirs for v in values]))
    result["integer path"] = perplexity(by_us(device, model, texts, (16, 16)))
    if not args.no_f32:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from reference_device import ReferenceDevice

        result["f32"] = perplexity(by_us(ReferenceDevice(), model, texts, (16, 16)))
        result["integer over f32"] = result["integer path"] / result["f32"] - 1
    result["integer over llama.cpp"] = result["integer path"] / result["llama.cpp"] - 1
    for bits in args.kv:
        value = perplexity(by_us(device, model, texts, parse_bits(bits)))
        result[f"KV {bits}"] = value
        result[f"KV {bits} over 16/16"] = value / result["integer path"] - 1
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
