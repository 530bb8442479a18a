"""The sdist and the wheel: what is in them, and that they install and run where there is nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST = 120_000_000
"""Bytes of an install without pip, the model, and what Python compiles for itself."""


def call(*command: str | Path, **settings: str) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=settings.get("cwd"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sdist_and_wheel_install_in_a_clean_environment(tmp_path: Path) -> None:
    pytest.importorskip("build")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)  # the wheel from the sdist
    [sdist], [wheel] = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"CMakeLists.txt", "LICENSE", "README.md", "src/headrace/kernels/csrc/headrace.h"} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".gguf", ".pyc")) or name.startswith(".")]
    with zipfile.ZipFile(wheel) as archive:
        [extension] = [name for name in archive.namelist() if name.endswith(".so")]
        assert b".debug_info" not in (data := archive.read(extension)) and b".symtab" not in data
        assert not [name for name in archive.namelist() if "csrc" in name]
        assert "headrace/text/prose.txt" in archive.namelist()

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel)
    call(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip")
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    size = sum(p.stat().st_size for p in site.rglob("*") if p.is_file() and p.suffix != ".pyc")
    assert size <= MOST, f"{size / 1e6:.0f} MB"
    headrace = tmp_path / "env" / "bin" / "headrace"
    assert call(headrace, "--version", cwd=str(tmp_path)).startswith("headrace ")
    assert "kernels: " in call(headrace, "check", "--quick", cwd=str(tmp_path))
