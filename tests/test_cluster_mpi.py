"""Real MPI on this machine: the text of one process, refusals in a sentence, and no rank left behind."""

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
from helpers_mpi import command, environment, generate, mpirun, needs_mpi, tokens_of
from helpers_text import smollm2
from helpers_tiny import WIDTH, tiny_model

pytestmark = needs_mpi

ASKED: dict[str, Any] = {
    "prompts": ["hello world", "abc" * 30, "x"],
    "max_tokens": 24,
    "samplings": [{}, {"temperature": 0.8, "seed": 3}, {"repeat_penalty": 1.3, "top_k": 40, "temperature": 1.0}],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("mpi") / "tiny.gguf", blocks=7, text=True)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[list[list[int]]]:
    with load(tiny, Options(threads=1, context=512)) as engine:
        return tokens_of(engine, ASKED)


def test_two_ranks_write_the_text_of_one(tiny: Path, alone: list[list[list[int]]]) -> None:
    answer = generate(2, tiny, **ASKED)
    assert answer["tokens"] == alone
    # One message a run and hop; the last run, which only frees, may still wait for its turn.
    assert answer["runs"] - answer["messages"]["1"] in (0, 1)
    rows = 3 * 24 * 3 + 3 * sum(len(p) for p in ASKED["prompts"])
    assert answer["bytes"]["1"] < rows * (WIDTH * 4 + 120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_more_ranks_write_the_text_of_one(tiny: Path, alone: list[list[list[int]]], ranks: int) -> None:
    assert generate(ranks, tiny, **ASKED)["tokens"] == alone


@pytest.mark.slow
def test_splits_by_hand_and_narrow_runs(tiny: Path, alone: list[list[list[int]]]) -> None:
    """A first rank without blocks; chunks of a prompt one after another through the stages."""
    options = {"layer_split": "0,0.3,0.7", "rank_threads": [1, 2, 1], "rows": 7, "runs": 3}
    assert generate(3, tiny, **ASKED, options=options)["tokens"] == alone


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_real_model(ranks: int) -> None:
    asked: dict[str, Any] = {
        "prompts": ["The capital of France is", "Once upon a time"],
        "max_tokens": 32,
        "samplings": [{}, {"temperature": 0.8, "seed": 5}],
        "idle": 4,
    }
    with load(smollm2(), Options(threads=1, context=512)) as engine:
        plain = tokens_of(engine, asked)
        width, runs = engine.spec.width, engine.head._next_run
    answer = generate(ranks, smollm2(), **asked)
    assert answer["tokens"] == plain
    # Each sequence's next tokens travel in a block of their own, so that every rank has work.
    assert runs < answer["runs"] <= 2 * runs and answer["runs"] - answer["messages"]["1"] in (0, 1)
    rows = 2 * (2 * 32 + sum(len(p.split()) + 2 for p in asked["prompts"]))
    assert answer["bytes"]["1"] < 1.1 * rows * width * 4
    assert answer["idle"] < 4 * 0.05, "2% of a core is the aim, see docs/log.md; a busy loop would take all of it"


def test_a_rank_with_another_model_is_refused_in_a_sentence(tiny: Path, tmp_path: Path) -> None:
    """Rank 1 gets another file under another name: two applications in one job."""
    other = tiny_model(tmp_path / "other.gguf", blocks=7, seed=1, text=True)
    words = ("-m", "headrace", "run", "--raw", "-t", "1", "-n", "4", "hi", "-m")
    second = ("-n", "1", sys.executable, *words, str(other))
    done = subprocess.run(
        [*command(1, *words, tiny), ":", *second], env=environment(), capture_output=True, text=True, timeout=90
    )
    ours = [line for line in done.stderr.splitlines() if line.startswith("headrace:")]
    assert done.returncode == 2 and done.stdout == ""
    assert len(ours) == 1 and ours[0].startswith("headrace: Rank 1 on host ") and "another model file" in ours[0]


@pytest.mark.slow
def test_refusals_come_once_and_end_the_job(tiny: Path) -> None:
    cases = [
        (("--layer-split", "0.5,0.5,0.5"), "shares sum to 1.5"),
        (("--layer-split", "0.5,0.2,0.3"), "is for 3 ranks and 2 were started"),
        (("-t", "1,1,1"), "3 thread counts are given for 2 ranks"),
        (("--bogus",), "unrecognized arguments: --bogus"),
        (("--ram", "50M"), "budget"),
    ]
    for flags, says in cases:
        done = mpirun(2, "-m", "headrace", "run", "-m", tiny, "--raw", *flags, "hi")
        ours = [line for line in done.stderr.splitlines() if line.startswith("headrace:")]
        assert done.returncode == 2 and len(ours) == 1 and says in ours[0], done.stderr


def ranks_of(job: subprocess.Popen[Any]) -> dict[int, int]:
    """Rank -> process id, once all have started."""
    found = {}
    for child in subprocess.run(
        ["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=False
    ).stdout.split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        for variable in variables:
            if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                found[int(variable.split(b"=")[1])] = int(child)
    return found


def running(process: int) -> bool:
    """Whether it does anything: a dead one may wait for whoever inherits orphans here to take notice."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "says"),
    [
        (1, signal.SIGKILL, "rank 1 "),  # mpirun's own words
        (2, signal.SIGSTOP, "headrace: Rank 2 on host "),
        (0, signal.SIGKILL, "rank 0 "),
        (0, signal.SIGTERM, "interrupted"),
    ],
)
def test_a_lost_rank_ends_the_job(tmp_path: Path, rank: int, number: signal.Signals, says: str) -> None:
    long = tiny_model(tmp_path / "long.gguf", text=True, context=1 << 16)
    words = (
        "-m",
        "headrace",
        "run",
        "-m",
        long,
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
    job = subprocess.Popen(
        command(3, *words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None and job.stdout.read(1)
        processes = ranks_of(job)
        assert sorted(processes) == [0, 1, 2]
        start = time.monotonic()
        os.kill(processes[rank], number)
        _, err = job.communicate(timeout=60)
        assert time.monotonic() - start < 30
        assert job.returncode != 0 and says in err
        while any(map(running, processes.values())):
            assert time.monotonic() - start < 30, "a rank is left behind"
            time.sleep(0.1)
    finally:
        job.kill()


@pytest.mark.slow
def test_a_rank_that_stops_at_the_end_is_named(tiny: Path, tmp_path: Path) -> None:
    asked = {**ASKED, "prompts": ["x"], "samplings": [{}], "freeze": str(tmp_path / "pid")}
    done = mpirun(3, helpers_mpi.__file__, tiny, json.dumps(asked), timeout=60)
    assert done.returncode != 0 and json.loads(done.stdout)["tokens"]
    assert "not everybody left within 5 s: rank 1 on host" in done.stderr
    assert not running(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_each_rank_reads_its_own_layers(tiny: Path, tmp_path: Path) -> None:
    """Bytes of weights each rank packed: its layers' and no others'. The tables of a file are small beside them."""
    counted = tmp_path / "counted.py"
    counted.write_text(
        "import sys, runpy\n"
        "from headrace.formats.index import ModelFile\n"
        "read, count = ModelFile.read, [0]\n"
        "def counting(self, info, *rest):\n"
        "    found = read(self, info, *rest)\n"
        "    count[0] += found.nbytes\n"
        "    return found\n"
        "ModelFile.read = counting\n"
        "try:\n"
        "    runpy.run_module('headrace', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    print('read', count[0], file=sys.stderr)\n"
    )
    done = mpirun(2, counted, "run", "-m", tiny, "--raw", "-t", "1", "-n", "2", "--layer-split", "0,1", "hi")
    assert done.returncode == 0, done.stderr
    read = sorted(int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("read "))
    table = 288 * WIDTH * 18 // 32
    assert read[0] == table, "rank 0 has the embedding and no block"
    assert read[1] > 4 * table and len(read) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "killed"), [(3, [1]), (3, [2]), (4, [3, 1]), (2, [1])])
def test_the_others_go_on_with_the_same_text(tmp_path: Path, ranks: int, killed: list[int]) -> None:
    """With ULFM, a killed rank's layers move to the others and the sequence is computed again from its tokens."""
    long = tiny_model(tmp_path / "long.gguf", text=True, context=1 << 16)
    words = ("-m", "headrace", "run", "-m", long, "--raw", "-t", "1", "-c", "8000", "-n", "3000", "--ignore-eos", "hi")
    alone = [sys.executable, *map(str, words)]
    whole = subprocess.run(alone, env=environment(), capture_output=True, timeout=120, check=True).stdout
    started = command(ranks, *words, options=["--with-ft", "ulfm"])
    job = subprocess.Popen(started, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert job.stdout is not None
        text = b""
        processes: dict[int, int] = {}
        for rank in killed:
            want = len(text) + 200
            while len(text) < want:
                text += os.read(job.stdout.fileno(), 1 << 16)
            processes = processes or ranks_of(job)
            os.kill(processes[rank], signal.SIGKILL)
        rest, err = job.communicate(timeout=100)
    finally:
        job.kill()
    assert text + rest == whole
    assert len(text) < len(whole) - 1000, "it was killed at work"
    assert job.returncode == 0, err
    told = [line for line in err.decode().splitlines() if line.startswith("Lost: ")]
    assert len(told) == len(killed) and f"rank {killed[0]} on host" in told[0], err
    assert not any(map(running, processes.values()))


@pytest.mark.slow
def test_a_hostfile(tiny: Path, alone: list[list[list[int]]], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    assert helpers_mpi.MPIRUN is not None
    words = ["--hostfile", str(tmp_path / "hosts"), "--bind-to", "none", sys.executable, helpers_mpi.__file__]
    done = subprocess.run(
        [helpers_mpi.MPIRUN, *words, str(tiny), json.dumps(ASKED)], env=environment(), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == alone and set(answer["messages"]) >= {"1"}
