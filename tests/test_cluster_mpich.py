"""MPICH as the MPI beneath: the same text. Its wheel is installed beside, as both bring an ``mpirun``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import helpers_mpi
from headrace.engine import Options, load
from helpers_mpi import environment, tokens_of
from helpers_tiny import tiny_model

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {
    "prompts": ["hello world", "abc" * 30], "max_tokens": 16, "samplings": [{}, {"temperature": 0.8, "seed": 3}],
}  # fmt: skip


@pytest.fixture(scope="module")
def mpiexec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HEADRACE_TEST_MPICH: a folder with bin/mpiexec and lib/libmpi.so.12; without it the wheel is fetched."""
    given = os.environ.get("HEADRACE_TEST_MPICH")
    folder = Path(given) if given else tmp_path_factory.mktemp("mpich")
    if not given:
        # A prefix, not this environment: its mpirun would take the place of Open MPI's.
        words = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--ignore-installed", "--prefix"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words, str(folder), "mpich"], capture_output=True, text=True, timeout=250
        )
        if done.returncode:
            pytest.skip(f"MPICH's wheel can't be had: {done.stderr.strip().splitlines()[-1:]}")
    assert (folder / "lib" / "libmpi.so.12").exists()
    return folder / "bin" / "mpiexec"


def start(mpiexec: Path, ranks: int, *words: object) -> tuple[list[str], dict[str, str]]:
    """Command line and environment: mpi4py's wheel takes the library it is told."""
    variables = {**environment(), "MPI4PY_LIBMPI": str(mpiexec.parent.parent / "lib" / "libmpi.so.12")}
    return [str(mpiexec), "-n", str(ranks), sys.executable, *map(str, words)], variables


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_text_is_the_same(mpiexec: Path, tmp_path: Path, ranks: int) -> None:
    model = tiny_model(tmp_path / "tiny.gguf", blocks=7, text=True)
    with load(model, Options(threads=1, context=512)) as engine:
        alone = tokens_of(engine, ASKED)
    line, variables = start(mpiexec, ranks, helpers_mpi.__file__, model, json.dumps(ASKED))
    done = subprocess.run(
        line, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == alone and answer["wrong"] == []


def test_a_killed_rank_ends_the_job(mpiexec: Path, tmp_path: Path) -> None:
    """No going on here: MPICH's mpiexec ends the job when a process dies, and names host and signal, no rank."""
    model = tiny_model(tmp_path / "long.gguf", text=True, context=1 << 16)
    words = (
        "-m",
        "headrace",
        "run",
        "-m",
        model,
        "--raw",
        "-t",
        "1",
        "-c",
        "60000",
        "-n",
        "59000",
        "--ignore-eos",
        "hi",
    )
    line, variables = start(mpiexec, 3, *words)
    job = subprocess.Popen(
        line, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert job.stdout is not None and job.stdout.read(1)
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                data = (folder / "environ").read_bytes().split(b"\0")
                line_of = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if str(model).encode() in line_of and b"PMI_SIZE=3" in data:
                found[next(int(v[9:]) for v in data if v.startswith(b"PMI_RANK="))] = int(folder.name)
        assert sorted(found) == [0, 1, 2]
        os.kill(found[1], signal.SIGKILL)
        begun = time.monotonic()
        out, _ = job.communicate(timeout=120)
        assert time.monotonic() - begun < 30, "it ends, and doesn't hang"
        assert job.returncode != 0 and b"BAD TERMINATION" in out and b"signal 9" in out, out[-600:]
    finally:
        job.kill()
        job.communicate()
