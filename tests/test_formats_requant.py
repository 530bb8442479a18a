"""--requant: a floating-point model read as a quantised one is the model of a file in that format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reference_device
from gguf_writer import write_gguf
from headrace import setup
from headrace.engine import load
from headrace.errors import BadFile, BadRequest, OverBudget
from headrace.formats import requant
from headrace.formats.fit import FITTED, fitted
from headrace.formats.index import ModelFile, open_model
from headrace.formats.pack import PackWriter
from headrace.formats.quant import dequantise
from headrace.formats.requant import RECIPES, requantise, stored
from headrace.kernels.dispatch import make_device
from headrace.kernels.ops import Linear
from headrace.memory.stream import pack
from headrace.model.layers import load_model
from headrace.options import Options
from headrace.placement import open_file
from headrace.run import inputs
from headrace.run.inputs import WORD, squares_of_inputs
from headrace.run.score import perplexity
from headrace.run.types import Sampling
from headrace.text.tokenizer import Tokenizer
from helpers_chat import chat_model
from perplexity import by_us
from requant import expanded
from test_model_real import smollm2

LICENCE = Path(__file__).resolve().parent.parent / "LICENSE"


def written(source: Path, target: Path, requant: str, weighed: bool = False) -> Path:
    """The same model in a file whose matrices are in the formats that ``--requant`` gives them."""
    with open_model(source) as file:
        squares = squares_of_inputs(file) if weighed else {}
        tensors: dict[str, Any] = {}
        for t in file.tensors.values():
            raw, kind = file.read(t), t.fmt
            if t.n > 1:
                kind = stored(requant, t.name, t.k) or kind
                raw = fitted(kind, dequantise(t.fmt, raw, t.n, t.k), squares.get(t.name))
            tensors[t.name] = (kind, t.shape, [raw])
        write_gguf(target, file.metadata, tensors, file.types)
    return target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("requant")
    return {fmt: chat_model(folder / f"{fmt}.gguf", fmt=fmt, blocks=2) for fmt in ("F32", "F16", "BF16", "Q4_0")}


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", list(RECIPES))
def test_every_byte_is_the_written_files(
    source: str, kind: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requant, "AT_ONCE", 1000)
    truth = open_model(written(models[source], tmp_path / "w.gguf", kind))
    file = requantise(open_model(models[source]), kind)
    assert set(file.tensors) == set(truth.tensors) and file.nbytes == truth.nbytes
    for name, t in file.tensors.items():
        other = truth.tensors[name]
        assert (t.fmt, t.shape, t.nbytes) == (other.fmt, other.shape, other.nbytes)
        assert file.read(t).tobytes() == truth.read(other).tobytes()
        if t.n > 1:
            for rows in (slice(3, 29), slice(5, None, 7), np.array([9, 2, 2, t.n - 1]), slice(4, 4)):
                assert file.read(t, rows).tobytes() == truth.read(other, rows).tobytes()
    file.close()


@pytest.mark.parametrize("kind", list(RECIPES))
def test_an_engine_computes_the_same(
    kind: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(path: Path, **options: Any) -> tuple[str, Any]:
        with load(path, threads=1, context=64, packs=tmp_path, **options) as engine:
            jobs = [engine.submit(p, 12, Sampling(logprobs=2)) for p in ("one", "another text")]
            while not all(job.finish for job in jobs):
                engine.work()
            return engine.parts.name, [(job.tokens, [(c.logprob, c.top) for c in job.choices]) for job in jobs]

    truth = said(written(models["BF16"], tmp_path / "w.gguf", kind, weighed=True))[1]
    assert said(models["BF16"], requant=kind) == (f"tiny-{kind}", truth)
    assert said(models["BF16"])[1] != truth
    monkeypatch.setattr(setup, "place", lambda *args, **kinds: [1, 2])
    assert said(models["BF16"], requant=kind)[1] == truth
    assert said(models["BF16"])[1] != truth
    packs = list(tmp_path.glob("**/*.pack*")) or [p for p in tmp_path.iterdir() if p.name != "w.gguf"]
    assert len(packs) >= 2


def test_it_is_a_model_of_its_own(models: dict[str, Path]) -> None:
    def opened(kind: str | None) -> ModelFile:
        file = open_model(models["F16"])
        return file if kind is None else requantise(file, kind)

    digests = {kind: opened(kind).digest() for kind in (None, "q4", "q8")}
    assert len(set(digests.values())) == 3
    assert len({opened(kind).identity() for kind in (None, "q4", "q8")}) == 3
    assert opened("q4").digest() == digests["q4"]


def test_quantised_models_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"quantised already .* is Q4_0"):
        load(models["Q4_0"], requant="q8")
    with pytest.raises(BadRequest, match="q5 is not known"):
        load(models["F16"], requant="q5")


def test_weights_that_are_no_numbers_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with open_model(models["F32"]) as file:
        tensors: dict[str, Any] = {t.name: (t.fmt, t.shape, [file.read(t)]) for t in file.tensors.values()}
        name = "blk.1.ffn_up.weight"
        values = file.read(file.tensors[name]).view(np.float32).copy()
        values[77] = np.nan
        tensors[name] = ("F32", file.tensors[name].shape, [values])
        write_gguf(tmp_path / "nan.gguf", file.metadata, tensors, file.types)
    with pytest.raises(BadFile, match="NaN"):
        load(tmp_path / "nan.gguf", threads=1, requant="q8")


def test_inputs_are_what_the_matrices_get(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers from the reference device, where every matrix's input is looked at as it comes."""
    fed: dict[tuple[int, str], Any] = {}
    layers: list[Any] = []

    def listening(op: Any, step: Any) -> None:
        key = len(layers), op.weight
        fed[key] = fed.get(key, 0) + (step.regs[op.src].astype(np.float64) ** 2).sum(axis=0)
        original(op, step)

    original = reference_device._linear
    monkeypatch.setattr(inputs, "MOST", 48)
    with open_model(models["F32"]) as file:
        found = squares_of_inputs(file)
        monkeypatch.setitem(reference_device._RUN, Linear, listening)
        monkeypatch.setattr(inputs, "make_device", lambda **kinds: reference_device.ReferenceDevice())
        monkeypatch.setattr(inputs, "_nbytes", lambda *args: layers.append(args) or 0)
        layers.clear()
        again = squares_of_inputs(file)
        assert set(found) == set(again) == {n for n, t in file.tensors.items() if t.n > 1 and n.startswith("blk.")}
        for name, value in found.items():
            assert value.dtype == np.float32 and value.shape == (file.tensors[name].k,) and value.min() > 0
            np.testing.assert_allclose(value, again[name], rtol=1e-3)


def test_what_it_is_fitted_to_is_in_its_name(models: dict[str, Path]) -> None:
    def opened(kind: str, word: str | None) -> ModelFile:
        return requantise(open_model(models["F16"]), kind, None if word is None else (word, squares_of_inputs))

    for name in (ModelFile.digest, ModelFile.identity):
        assert len({getattr(opened("q4", word), name.__name__)() for word in (None, "1", "2")}) == 3
    assert opened("q8", "1").digest() == opened("q8", None).digest()  # nothing of it is fitted
    with open_file(models["F16"], Options(requant="q4")) as file:
        assert file.digest() == opened("q4", WORD).digest()


def test_too_little_memory_to_measure_is_refused(models: dict[str, Path]) -> None:
    with open_model(models["F16"]) as file, pytest.raises(OverBudget, match=r"MB are left; give .* or take q8"):
        squares_of_inputs(file, 10_000)


def test_threads_and_cpu_change_nothing(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST", 150)
    with open_model(models["BF16"]) as file:
        truth = squares_of_inputs(file)
        monkeypatch.setattr(inputs, "make_device", lambda **kinds: make_device(threads=1, cpu="portable"))
        monkeypatch.setattr(inputs, "RUN", 7)
        again = squares_of_inputs(file)
        assert all(truth[name].tobytes() == again[name].tobytes() for name in truth)


def test_columns_of_large_inputs_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    weigh = np.where(np.arange(512) % 16 == 0, 100, 1).astype(np.float32)
    for fmt in FITTED:
        plain, weighed = (dequantise(fmt, fitted(fmt, x, w), *x.shape) - x for w in (None, weigh))
        assert (weigh * weighed**2).sum() < 0.9 * (weigh * plain**2).sum(), fmt
        assert fitted(fmt, x, np.ones(512, np.float32)).tobytes() == fitted(fmt, x).tobytes()


def test_a_pack_begun_again_is_an_undisturbed_ones(models: dict[str, Path], tmp_path: Path) -> None:
    """Each try measures anew, and comes to the same."""

    def packed(folder: Path, tell: Callable[[str], None] | None = None) -> Path:
        with open_file(models["BF16"], Options(requant="q4")) as file:
            return pack(make_device("cpu", threads=1), load_model(file), [1, 2], folder, tell).path

    truth = packed(tmp_path / "whole")
    write = PackWriter._write_layer

    def stopping(fd: int, key: str, *rest: Any) -> str:
        if key == "block.1":
            raise KeyboardInterrupt
        return write(fd, key, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackWriter, "_write_layer", staticmethod(stopping))
        with pytest.raises(KeyboardInterrupt):
            packed(tmp_path / "parts")
    assert [p.suffix for p in sorted((tmp_path / "parts").iterdir())] == [".journal", ".part"]
    again = packed(tmp_path / "parts")
    assert (again.name, again.read_bytes()) == (truth.name, truth.read_bytes())


@pytest.mark.slow
def test_four_bits_cost_a_few_percent(tmp_path: Path) -> None:
    """SmolLM2, in an order in which its own four bits are of no help."""
    path = tmp_path / "bf16.gguf"
    expanded(smollm2(), path, True)
    ids = Tokenizer.from_metadata(open_model(path).metadata).encode(LICENCE.read_text()[:5000])[:1000]
    device = make_device("cpu", threads=2)

    def score(file: ModelFile) -> float:
        return float(np.log(perplexity(by_us(device, load_model(file), [ids[:500], ids[500:]], (16, 16)))))

    truth = score(open_model(path))
    lost = [score(requantise(open_model(path), "q4", how)) - truth for how in (None, (WORD, squares_of_inputs))]
    assert 0 < lost[1] < 0.08 and lost[1] < 0.8 * lost[0], lost
