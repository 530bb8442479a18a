"""A job under a real Slurm of one node: ``srun`` with MPICH, ``sbatch`` with Open MPI's mpirun inside."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_mpi import MPIRUN, environment, needs_mpi
from helpers_slurm import Slurm, needs_slurm
from helpers_tiny import tiny_model
from test_cluster_mpich import mpiexec  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow, needs_slurm]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for path in (folder, folder.parent):
        path.chmod(0o755)  # munged looks at who may write above its socket
    with Slurm(folder) as running:
        yield running


def words(model: Path) -> list[str]:
    options = ["--raw", "-t", "1", "-n", "24", "--ignore-eos", "hi"]
    return [sys.executable, "-m", "headrace", "run", "-m", str(model), *options]


def alone(slurm: Slurm, model: Path) -> str:
    done = slurm.run(*words(model), **environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_srun_starts_ranks_of_mpich(slurm: Slurm, mpiexec: Path, tmp_path: Path) -> None:  # noqa: F811
    model = tiny_model(tmp_path / "tiny.gguf", blocks=7, text=True)
    library = mpiexec.parent.parent / "lib" / "libmpi.so.12"
    variables = {**environment(), "MPI4PY_LIBMPI": str(library)}
    done = slurm.run("srun", "--mpi=pmi2", "-n", "3", *words(model), **variables)
    assert done.returncode == 0, done.stderr + slurm.logs()
    assert done.stdout == alone(slurm, model)


@needs_mpi
def test_mpirun_inside_of_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    assert MPIRUN is not None and shutil.which("sh")
    model = tiny_model(tmp_path / "tiny.gguf", blocks=7, text=True)
    line = " ".join([MPIRUN, "-n", "3", "--bind-to", "none", *words(model)])
    (tmp_path / "job").write_text(f"#!/bin/sh\n{line}\n")
    where = ("-o", tmp_path / "out", "-e", tmp_path / "err")
    done = slurm.run("sbatch", "--wait", "-n", "3", *where, tmp_path / "job", **environment())
    said = (tmp_path / "err").read_text() if (tmp_path / "err").exists() else ""
    assert done.returncode == 0, done.stderr + said + slurm.logs()
    assert (tmp_path / "out").read_text() == alone(slurm, model)
