"""A tensor packed part by part is the tensor packed whole, in every format and for every device's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_writer import write_gguf
from headrace.formats.index import open_model
from headrace.formats.tensor import KNOWN, row_nbytes
from headrace.kernels.device import Device
from headrace.kernels.dispatch import make_device
from headrace.memory import weights
from headrace.memory.buffers import allocate
from headrace.memory.weights import pack_tensor
from headrace.model.layers import Model, TensorPlan, load_model
from headrace.model.names import Source
from helpers_tiny import tiny_model
from reference_device import ReferenceDevice


@pytest.mark.parametrize("fmt", KNOWN)
@pytest.mark.parametrize("n", [41, 64])
@pytest.mark.parametrize("device", [make_device("cpu", threads=1), ReferenceDevice()], ids=lambda d: d.name)
def test_parts_are_the_whole(fmt: str, n: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 1280  # planes of one tile and of two have sizes that only differ by a factor
    raw = np.random.default_rng(1).integers(0, 256, n * row_nbytes(fmt, k), np.uint8)
    write_gguf(tmp_path / "one.gguf", {"general.architecture": "llama"}, {"w": (fmt, (n, k), [raw])})
    file = open_model(tmp_path / "one.gguf")
    model = Model(load_model(open_model(tiny_model(tmp_path / "tiny.gguf", blocks=1))).spec, (), file)
    plan = TensorPlan(fmt, n, k, Source("w"))
    size = device.packed_nbytes(fmt, n, k)
    whole, parts = allocate(size), allocate(size)
    parts[:] = 255
    whole[:] = 7
    device.pack(fmt, n, k, raw, whole)
    monkeypatch.setattr(weights, "CHUNK", 16 * row_nbytes(fmt, k))
    pack_tensor(device, model, plan, parts)
    used = size if device.name == "cpu" else raw.size
    assert parts[:used].tobytes() == whole[:used].tobytes()


@pytest.mark.parametrize(("first", "count"), [(4, 8), (8, 7), (40, 8), (-8, 8), (0, 7)], ids=lambda v: str(v))
def test_parts_that_dont_fit_are_refused(first: int, count: int) -> None:
    device = make_device("cpu", threads=1)
    out = allocate(device.packed_nbytes("Q8_0", 41, 64))
    with pytest.raises(ValueError, match="another size"):
        device.pack("Q8_0", 41, 64, np.zeros(count * row_nbytes("Q8_0", 64), np.uint8), out, first)
