"""A whole model on one device, without the engine: one sequence, plain slot lists. For tests of kernels and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.formats.index import open_model
from headrace.kernels.device import F32, I32, PAGE, Device, Rows
from headrace.model.layers import Layer, Model, fetch, load_model


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes at a multiple of 64."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


@dataclass
class Loaded:
    """A model packed for a device."""

    model: Model
    device: Device
    weights: Mapping[str, Mapping[str, Any]]
    """Layer key -> tensor name -> the device's weight."""
    programs: Mapping[str, Any]


def load(path: str | Path, device: Device) -> Loaded:
    """Read, pack and compile all layers; a tied output shares the embedding's bytes."""
    with open_model(path) as file:
        model = load_model(file)
        weights: dict[str, dict[str, Any]] = {}
        for layer in model.layers:
            mine: dict[str, Any] = {}
            for name, plan in layer.tensors.items():
                if plan.shares is not None:
                    mine[name] = weights[plan.shares[0]][plan.shares[1]]
                    continue
                out = aligned(device.packed_nbytes(plan.fmt, plan.n, plan.k))
                device.pack(plan.fmt, plan.n, plan.k, fetch(file, plan), out)
                mine[name] = device.weight(plan.fmt, plan.n, plan.k, out)
            weights[layer.key] = mine
    programs = {layer.key: device.compile(layer.ops, model.spec.width) for layer in model.layers}
    return Loaded(model, device, weights, programs)


class Caches:
    """Every layer's pages for ``slots`` slots, at the given bits."""

    def __init__(self, loaded: Loaded, slots: int, k_bits: int = 16, v_bits: int = 16) -> None:
        self.layers: dict[str, Any] = {}
        self._memory: list[np.ndarray] = []
        pages = -(-slots // PAGE)
        for layer in loaded.model.layers:
            if layer.kv is not None:
                shape = replace(layer.kv, k_bits=k_bits, v_bits=v_bits)
                table = np.empty(pages, np.uint64)
                for i in range(pages):
                    self._memory.append(aligned(loaded.device.page_nbytes(shape)))
                    table[i] = self._memory[-1].ctypes.data
                self._memory.append(table)
                self.layers[layer.key] = loaded.device.kv_layer(shape, table)


def i32(values: Any) -> I32:
    return np.ascontiguousarray(values, dtype=np.int32)


def plain_rows(tokens: Sequence[int], start: int, slots: I32, wanted: Sequence[int] | None = None) -> Rows:
    """Rows for tokens at positions start, start + 1, ... of a sequence whose slots are listed in order."""
    count = len(tokens)
    position = np.arange(start, start + count)
    return Rows(
        token=i32(tokens), position=i32(position), slot=i32(slots[start : start + count]), base=i32(np.zeros(count)),
        base_len=i32(position + 1), extra=i32(np.zeros(count)), extra_len=i32(np.zeros(count)), lists=i32(slots),
        wanted=i32(range(count) if wanted is None else wanted),
    )  # fmt: skip


def step(loaded: Loaded, rows: Rows, caches: Caches) -> F32:
    """Rows through all layers -> logits [wanted, vocab]."""
    x = np.zeros((rows.count, loaded.model.spec.width), np.float32)
    for layer in loaded.model.layers:
        x = run_layer(loaded, layer, x, rows, caches)
    return x


def run_layer(loaded: Loaded, layer: Layer, x: F32, rows: Rows, caches: Caches) -> F32:
    out: F32 = loaded.programs[layer.key].bind(loaded.weights[layer.key]).run(x, rows, caches.layers.get(layer.key))
    return out


def logits_of(
    path: str | Path | Loaded,
    tokens: Sequence[int],
    device: Device,
    chunk: int | None = None,
    k_bits: int = 16,
    v_bits: int = 16,
    shuffle: int | None = None,
) -> F32:
    """Logits [tokens, vocab] of every position. chunk: tokens a run (None: all in one); shuffle: seed of slot order."""
    loaded = path if isinstance(path, Loaded) else load(path, device)
    caches = Caches(loaded, len(tokens), k_bits, v_bits)
    slots = np.arange(len(tokens))
    if shuffle is not None:
        np.random.default_rng(shuffle).shuffle(slots)
    size = chunk or len(tokens)
    parts = [
        step(loaded, plain_rows(tokens[at : at + size], at, i32(slots)), caches) for at in range(0, len(tokens), size)
    ]
    return np.concatenate(parts)
