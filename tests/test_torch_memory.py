"""Working memory of the device in PyTorch: measured, it stays within what is counted."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from headrace.formats.quant import EXPAND  # noqa: E402
from headrace.formats.tensor import BLOCKS  # noqa: E402
from headrace.kernels.device import KVShape  # noqa: E402
from headrace.kernels.ops import Act, Attend, Copy, Linear, Norm, Op, Rope, Scale, StoreKV  # noqa: E402
from headrace.kernels.torch_device import TorchDevice  # noqa: E402
from headrace.kernels.torch_formats import expand, expanding_nbytes  # noqa: E402
from headrace.kernels.torch_ops import execute  # noqa: E402
from helpers_kernels import RNG, Cache, prompt, rows_of  # noqa: E402


class Peak(TorchDispatchMode):
    """The most bytes of memory that tensors made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                at, size = storage.data_ptr(), storage.nbytes()
                if at not in given and at not in self._known:
                    self._known.add(at)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, at, size)
        return out

    def _gone(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("fmt", EXPAND)
def test_expanding_stays_within_what_is_counted(fmt: str) -> None:
    weights = 1 << 18
    width, size = BLOCKS[fmt]
    raw = torch.from_numpy(RNG(1).integers(0, 256, weights // width * size).astype(np.uint8))
    with Peak() as seen:
        expand(fmt, raw, 1024)
    assert expanding_nbytes(fmt, weights) / 4 < seen.peak <= expanding_nbytes(fmt, weights) or fmt == "F32"


@pytest.mark.parametrize("count", [1, 16, 200])
@pytest.mark.parametrize("fmt", ["Q4_1", "F16"])
def test_a_layers_run_stays_within_what_is_counted(count: int, fmt: str) -> None:
    device, heads, kv_heads, dim, width, wide = TorchDevice(), 8, 2, 64, 512, 1536
    device.at_once = 1 << 16
    shapes = {name: (fmt, n, k) for name, (n, k) in {
        "q": (heads * dim, width), "k": (kv_heads * dim, width), "v": (kv_heads * dim, width),
        "o": (width, heads * dim), "u": (wide, width), "d": (width, wide)}.items()}  # fmt: skip
    shapes["n"] = ("F32", 1, width)
    ops: list[Op] = [
        Norm("h", "x", "n"), Linear("q", "h", "q"), Linear("k", "h", "k"), Linear("v", "h", "v"),
        Rope("q", heads, dim, "half", (0.1,) * 32), Rope("k", kv_heads, dim, "half", (0.1,) * 32), StoreKV("k", "v"),
        Attend("a", "q", heads, kv_heads, dim, 0.1, softcap=3.0), Linear("x", "a", "o", accumulate=True),
        Norm("f", "x", "n"), Linear("g", "f", "u"), Linear("u", "f", "u"), Act("g", "g", "gelu_tanh", "u"),
        Linear("x", "g", "d", accumulate=True), Copy("e", "x"), Scale("e", 2.0, softcap=4.0),
    ]  # fmt: skip
    weights = {name: device.weight(*s, np.zeros(device.packed_nbytes(*s), np.uint8)) for name, s in shapes.items()}
    cache = Cache(device, KVShape(kv_heads, dim, 8, 4), 40)
    rows = rows_of([prompt(list(range(1200)), 1200 - count, 1200)])
    with Peak() as seen:
        there = device.rows(rows)
        execute(ops, {"x": device.floats(there.padded, width)}, weights, there, cache.layer, device.at_once)
    counted = device.scratch_nbytes(ops, width, count, shapes)
    assert seen.peak <= counted
    assert count < 200 or seen.peak > counted / 2
