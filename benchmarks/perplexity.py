"""Perplexity on real text: our integer path, f32 arithmetic on the same weights, and llama.cpp, on the same tokens.

    python benchmarks/perplexity.py [--model smollm2-q4_1] [--bytes 20000] [--kv 16/16 8/8 8/4 4/4] [--text FILE]

llama.cpp is asked for one token after each beginning, with a bias that leaves it no choice; it tells the
log-probability from before the bias, and its cache has the beginning. The f32 side is transformers (PyTorch) with the
file's weights dequantised and everything in f32; it knows the two models that packages bring.
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
from headrace.memory.kv import PRESETS, HostKV, kv_shapes
from headrace.memory.slots import pages_for
from headrace.memory.weights import Resident
from headrace.model.layers import Model, load_model
from headrace.run.score import ScoringComputer, log_probabilities, perplexity
from headrace.text.tokenizer import Tokenizer
from model_zoo import ZOO, model_path

PIECE = 500
"""Tokens scored at a time."""


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


def pieces_of(path: Path, text: str) -> list[list[int]]:
    """The text's token ids, so many at a time, each piece with the token before it to begin with."""
    ids = Tokenizer.from_metadata(open_model(path).metadata).encode(text)
    return [ids[at : at + PIECE + 1] for at in range(0, len(ids) - 1, PIECE)]


def by_llamacpp(path: Path, pieces: list[list[int]], threads: int) -> np.ndarray:
    """llama.cpp's log-probability of each token but the pieces' first."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = str(path)
    p.n_ctx = 2048
    p.n_parallel = 1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(p)
    found = []
    for ids in pieces:
        for at in range(1, len(ids)):
            said = server.handle_completions(
                {"prompt": ids[:at], "n_predict": 1, "temperature": 0, "logprobs": 1, "cache_prompt": True,
                 "logit_bias": [[ids[at], 1000.0]]}
            )  # fmt: skip
            (token,) = said["choices"][0]["logprobs"]["content"]
            assert token["id"] == ids[at], "llama.cpp did not write the token it was made to"
            found.append(token["logprob"])
    return np.array(found)


def by_f32(path: Path, pieces: list[list[int]]) -> np.ndarray:
    """The same by transformers in f32."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from test_model_real import gemma3_oracle, smollm2_oracle

    with open_model(path) as file:
        gemma = file.metadata["general.architecture"] == "gemma3"
        oracle = (gemma3_oracle if gemma else smollm2_oracle)(file).eval()
    found = []
    with torch.no_grad():
        for ids in pieces:
            odds = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].double(), -1)
            found.append(odds[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy())
    return np.concatenate(found)


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
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    path = model_path(args.model)
    text = text_of(args.text, args.bytes)
    texts = pieces_of(path, text)
    model = load_model(open_model(path))
    device = make_device("cpu", threads=args.threads)
    result: dict[str, Any] = {"benchmark": "perplexity", "model": args.model, "bytes": len(text)}
    result["tokens"] = sum(len(ids) - 1 for ids in texts)
    result["integer path"] = perplexity(by_us(device, model, texts, (16, 16)))
    result["f32"] = perplexity(by_f32(path, texts))
    result["integer over f32"] = result["integer path"] / result["f32"] - 1
    result["llama.cpp"] = perplexity(by_llamacpp(path, texts, args.threads))
    result["integer over llama.cpp"] = result["integer path"] / result["llama.cpp"] - 1
    result["llama.cpp over f32"] = result["llama.cpp"] / result["f32"] - 1
    for bits in args.kv:
        value = perplexity(by_us(device, model, texts, PRESETS[bits]))
        result[f"KV {bits}"] = value
        result[f"KV {bits} over 16/16"] = value / result["integer path"] - 1
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
