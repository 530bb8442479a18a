"""Make a big model out of a small one that computes the same function: benchmarks need big models, not downloads.

    python benchmarks/inflate.py small.gguf big.gguf --gigabytes 5 [--format Q4_1] [--noise 0.0] [--blocks 120]

Each block's feed-forward part gets more neurons. The added rows of gate and up are random and distinct (nothing
compresses or deduplicates); the added columns of down are zero, so what they add to the sum is exactly nothing and
the big model's text is the small one's. With ``--noise`` the added columns are random and so small that only some
of the text changes: a (target, draft) pair of any agreement. ``--blocks`` adds blocks whose output projections are
zero, for a model of more than twenty times the memory, which no thirty blocks can be. A number measured on such a
model must say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gguf_writer import Chunks, TensorSource, write_gguf
from headrace.formats.index import ModelFile, open_model
from headrace.formats.quant import dequantise, quantise
from headrace.formats.tensor import TensorInfo, row_nbytes

GROUP = 256
"""Neurons are added in multiples of this: the widest block of any format."""


def random_rows(fmt: str, rows: int, k: int, scale: float, seed: int) -> Iterator[np.ndarray]:
    """File bytes of [rows, k] random weights of about the given scale, a megabyte or so at a time."""
    random = np.random.default_rng(seed)
    step = max(1, (1 << 20) // row_nbytes(fmt, k))
    for at in range(0, rows, step):
        count = min(step, rows - at)
        yield from _random(fmt, count, k, scale, random)


def _random(fmt: str, rows: int, k: int, scale: float, random: np.random.Generator) -> Iterator[np.ndarray]:
    if fmt in ("Q4_0", "Q4_1"):  # scales and nibbles directly: many times faster than quantising
        raw = random.integers(0, 256, (rows * (k // 32), row_nbytes(fmt, 32)), np.uint8)
        step = (scale / 4.5 * random.uniform(0.8, 1.2, len(raw))).astype(np.float16)
        raw[:, :2] = step[:, None].view(np.uint8)
        if fmt == "Q4_1":
            raw[:, 2:4] = (step * np.float16(-7.5))[:, None].view(np.uint8)
        yield raw.reshape(-1)
    elif fmt == "BF16":  # random bits: signs and mantissas, and two exponents
        raw = random.integers(0, 1 << 16, rows * k, np.uint16)
        most = int(np.float32(scale).view(np.uint32)) >> 23
        yield ((raw & 0x80FF) | np.uint16((most & 0xFE) << 7)).astype("<u2").view(np.uint8)
    else:
        yield quantise(fmt, (random.standard_normal((rows, k)) * scale).astype(np.float32)).reshape(-1)


def converted(file: ModelFile, name: str, fmt: str) -> Iterator[np.ndarray]:
    """A tensor's bytes in ``fmt``, some rows at a time: the file's own where it is in that format already."""
    info = file.tensors[name]
    step = max(1, (4 << 20) // (4 * info.k))
    for at in range(0, info.n, step):
        raw = file.read(info, slice(at, min(info.n, at + step)))
        count = min(step, info.n - at)
        yield raw if info.fmt == fmt else quantise(fmt, dequantise(info.fmt, raw, count, info.k).reshape(count, -1))


def wider(file: ModelFile, name: str, fmt: str, extra: int, fill: Callable[[int, int], np.ndarray]) -> Chunks:
    """down: each row's bytes, then ``extra`` more columns from ``fill(row, rows)``."""
    info = file.tensors[name]
    size = row_nbytes(fmt, info.k)
    at = 0
    for raw in converted(file, name, fmt):
        rows = raw.reshape(-1, size)
        for start in range(0, len(rows), 16):
            part = rows[start : start + 16]
            yield np.concatenate([part, fill(at + start, len(part))], axis=1).reshape(-1)
        at += len(rows)


def inflate(
    source: Path, target: Path, nbytes: int, fmt: str | None, noise: float, seed: int = 0, total: int = 0
) -> int:
    """Write ``target``; returns the neurons a block then has.

    fmt None: each tensor keeps its format. total: blocks it then has, if more than the source's.
    """
    with open_model(source) as file:
        arch = str(file.metadata["general.architecture"])
        blocks = int(str(file.metadata[f"{arch}.block_count"]))
        ffn = int(str(file.metadata[f"{arch}.feed_forward_length"]))
        gate = file.tensors["blk.0.ffn_gate.weight"]
        width, kind = gate.k, fmt or gate.fmt
        sources = {name: name for name in file.tensors}
        for i in range(blocks, total):
            sources |= {f"blk.{i}.{n[6:]}": n for n in file.tensors if n.startswith("blk.0.")}
        blocks = max(blocks, total)
        stored = {n: fmt if fmt and t.n > 1 else t.fmt for n, t in file.tensors.items()}
        now = sum(file.tensors[n].n * row_nbytes(stored[n], file.tensors[n].k) for n in sources.values())
        extra = max(0, round((nbytes - now) / (blocks * 3 * row_nbytes(kind, width) * 1.0)) // GROUP * GROUP)
        metadata = {**file.metadata, f"{arch}.feed_forward_length": ffn + extra, f"{arch}.block_count": blocks}
        tensors: dict[str, TensorSource] = {}
        for number, (name, old) in enumerate(sources.items()):
            info, out, part = file.tensors[old], stored[old], name.split(".")[-2]
            if name != old and info.n > 1:
                tensors[name] = _added(out, info, part, extra, seed * 7919 + number)
                continue
            if part in ("ffn_gate", "ffn_up"):
                chunks = _chain(converted(file, old, out), random_rows(out, extra, width, 0.03, seed * 7919 + number))
                tensors[name] = (out, (info.n + extra, info.k), chunks)
            elif part == "ffn_down":
                chunks = wider(file, old, out, extra, _filler(out, extra, noise, seed * 7919 + number))
                tensors[name] = (out, (info.n, info.k + extra), chunks)
            else:
                tensors[name] = (out, info.shape, converted(file, old, out))
        write_gguf(target, metadata, tensors, file.types)
        return ffn + extra


def _added(fmt: str, info: TensorInfo, part: str, extra: int, seed: int) -> TensorSource:
    """A matrix of an added block: what writes into the sum is zero, the others are random."""
    n, k = info.shape
    if part in ("ffn_down", "attn_output"):
        k += extra if part == "ffn_down" else 0
        zero = quantise(fmt, np.zeros((1, k), np.float32)).reshape(-1)
        return fmt, (n, k), (zero for _ in range(n))
    n += extra if part in ("ffn_gate", "ffn_up") else 0
    return fmt, (n, k), random_rows(fmt, n, k, 0.03, seed)


def _chain(first: Iterator[np.ndarray], second: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield from first
    yield from second


def _filler(fmt: str, extra: int, noise: float, seed: int) -> Callable[[int, int], np.ndarray]:
    random = np.random.default_rng(seed)
    zero = quantise(fmt, np.zeros((1, extra), np.float32)).reshape(1, -1) if extra else np.empty((1, 0), np.uint8)

    def fill(row: int, rows: int) -> np.ndarray:
        if noise == 0 or not extra:
            return np.repeat(zero, rows, axis=0)
        return np.concatenate([r.reshape(rows, -1) for r in _random(fmt, rows, extra, noise, random)])

    return fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--gigabytes", type=float, required=True, help="size to reach, in 10^9 bytes")
    parser.add_argument("--format", dest="fmt", help="store every matrix so (Q4_0, Q4_1, Q8_0, F16, BF16)")
    parser.add_argument("--noise", type=float, default=0.0, help="scale of the added down-projection weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0, help="blocks in all, the added ones writing zeros")
    args = parser.parse_args()
    ffn = inflate(args.source, args.target, int(args.gigabytes * 1e9), args.fmt, args.noise, args.seed, args.blocks)
    print(f"{args.target}: {args.target.stat().st_size / 1e9:.2f} GB, {ffn} neurons a block")


if __name__ == "__main__":
    main()
