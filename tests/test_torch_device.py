"""The device in PyTorch: formats bit for bit, near the reference device, and the same bytes in whatever company."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.errors import Unsupported  # noqa: E402
from headrace.formats.quant import EXPAND, dequantise  # noqa: E402
from headrace.formats.tensor import BLOCKS, KNOWN  # noqa: E402
from headrace.kernels.device import KVShape, Rows  # noqa: E402
from headrace.kernels.dispatch import make_torch  # noqa: E402
from headrace.kernels.ops import Attend  # noqa: E402
from headrace.kernels.torch_device import TorchDevice  # noqa: E402
from headrace.kernels.torch_formats import expand  # noqa: E402
from headrace.kernels.torch_ops import execute  # noqa: E402
from helpers_kernels import RNG, Cache  # noqa: E402
from helpers_model import i32, load, logits_of  # noqa: E402
from helpers_tiny import VOCAB, tiny_model  # noqa: E402
from reference_device import ReferenceDevice  # noqa: E402
from test_invariance import together  # noqa: E402

TOKENS = [int(t) for t in RNG(3).integers(0, VOCAB, 300)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("fmt", EXPAND)
def test_blocks_are_expanded_bit_for_bit(fmt: str) -> None:
    """Random bytes: infinite and NaN scales and denormals too."""
    width, size = BLOCKS[fmt]
    raw = RNG(5).integers(0, 256, 7 * (512 // width) * size).astype(np.uint8)
    expected, found = dequantise(fmt, raw, 7, 512), expand(fmt, torch.from_numpy(raw), 512).numpy()
    numbers = ~np.isnan(expected)
    assert numbers.sum() > 1000 and (np.isnan(found) == ~numbers).all()
    assert (found[numbers].view(np.uint32) == expected[numbers].view(np.uint32)).all()


def test_every_known_format_is_there() -> None:
    assert set(EXPAND) == set(KNOWN)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("torch")
    return {fmt: tiny_model(folder / f"{fmt}.gguf", fmt, blocks=2) for fmt in ("Q4_1", "Q8_0", "BF16")}


@pytest.mark.parametrize(("fmt", "bits"), [("Q4_1", (16, 16)), ("Q8_0", (8, 8)), ("BF16", (8, 4)), ("Q4_1", (4, 4))])
def test_chunks_and_slot_order_change_nothing(models: dict[str, Path], fmt: str, bits: tuple[int, int]) -> None:
    device = TorchDevice()
    loaded = load(models[fmt], device)
    truth = logits_of(loaded, TOKENS, device, None, *bits)
    reference = logits_of(models[fmt], TOKENS[:40], ReferenceDevice(), None, *bits)
    # Rounding K and V to few bits makes a last bit's difference large now and then.
    share = 1e-4 if bits == (16, 16) else 2e-3
    assert np.abs(truth[:40] - reference).max() < share * np.ptp(reference)
    for chunk in (29, 64) if bits == (16, 16) else (100,):
        assert logits_of(loaded, TOKENS[:290], device, chunk, *bits, shuffle=chunk).tobytes() == truth[:290].tobytes()
    assert logits_of(loaded, TOKENS[:12], device, 1, *bits).tobytes() == truth[:12].tobytes()


@pytest.mark.parametrize("case", ["llama-untied-biases", "mistral-window", "gemma3-softcap", "opt-350m", "falcon-40b"])
def test_families_are_near_the_reference(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import test_model_parity as parity

    parity.make(case, tmp_path)
    expected = logits_of(tmp_path, parity.TOKENS, ReferenceDevice())
    parity.close(logits_of(tmp_path, parity.TOKENS, TorchDevice()), expected)


@pytest.mark.parametrize("others", [1, 20])
def test_a_row_alone_equals_it_among_others(models: dict[str, Path], others: int) -> None:
    loaded = load(models["Q4_1"], TorchDevice())
    assert together(loaded, others, (8, 4)).tobytes() == together(loaded, 0, (8, 4)).tobytes()


def test_threads_change_nothing(models: dict[str, Path]) -> None:
    found = []
    for threads in (1, 2):
        device = TorchDevice(threads=threads)
        found.append(logits_of(models["Q4_1"], TOKENS[:40], device).tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("window", [0, 9, 300])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_guess_attends_as_a_plain_row_does(window: int, softcap: float) -> None:
    """Committed slots from a list and ancestors' slots beside it, or all of it in one list: the same bytes."""
    device, shape, count = TorchDevice(), KVShape(2, 32), 520
    slots = RNG(4).permutation(544)[:count]
    cache = Cache(device, shape, 17, scatter=True)
    values = {r: RNG(i).normal(0, 1, (count, 64)).astype(np.float32) for i, r in enumerate("kv")}
    op = Attend("a", "q", 4, 2, 32, 0.2, window, softcap)

    def attended(rows: Rows, q: np.ndarray) -> bytes:
        there = device.rows(rows)
        padded = np.zeros((there.padded, 128), np.float32)
        padded[: rows.count] = q
        registers = {"q": torch.from_numpy(padded)}
        execute([op], registers, {}, there, cache.layer, device.at_once)
        return bytes(registers["a"][: rows.count].numpy().tobytes())

    def rows(position: list[int], committed: list[int]) -> Rows:
        extra = [np.asarray(slots[c : p + 1]) for p, c in zip(position, committed, strict=True)]
        starts = count + np.cumsum([0, *map(len, extra)])[:-1]
        return Rows(
            i32([0] * len(position)), i32(position), i32(slots[position]), i32([0] * len(position)), i32(committed),
            i32(starts), i32([len(e) for e in extra]), i32(np.concatenate([slots, *extra])), i32([]),
        )  # fmt: skip

    every = rows(list(range(count)), [p + 1 for p in range(count)])
    cache.layer.store(device.rows(every).slot, *(torch.from_numpy(values[r]) for r in "kv"))
    position = [3, 255, 256, 300, 519, 518]
    q = RNG(8).normal(0, 3, (len(position), 128)).astype(np.float32)
    plain = attended(rows(position, [p + 1 for p in position]), q)
    assert attended(rows(position, [0, 250, 256, 250, 519, 200]), q) == plain
    for i, p in enumerate(position):
        assert attended(rows([p], [p - p % 7]), q[i : i + 1]) == plain[512 * i : 512 * (i + 1)]


def test_what_isnt_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="torch:cpu, cuda"):
        TorchDevice("mps")
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="no CUDA device"):
            make_torch("cuda", threads=1)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "headrace.kernels.torch_device")
    with pytest.raises(Unsupported, match="pip install headrace"):
        make_torch("torch:cpu", threads=1)


def test_importing_headrace_doesnt_bring_torch() -> None:
    code = "import headrace.setup, headrace.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
