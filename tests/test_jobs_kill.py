"""``kill -9`` at random moments of a job: nothing is lost, nothing is done twice, the output is the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from headrace.engine import load
from headrace.jobs.batch import Batch
from helpers_chat import chat, chat_model, row, write_rows

ROWS = 200
SOURCE = Path(__file__).parent.parent / "src"


def job(model: Path, source: Path, target: Path, ready: Connection) -> None:
    """What a killed process was doing."""
    with load(model, threads=1, context=96, rows=16, caches=4, sequences=6) as engine:
        ready.send("loaded")
        Batch(engine, source, target).run()


def start(model: Path, source: Path, target: Path) -> tuple[ForkProcess, Connection]:
    """The process, and what tells that it has begun with the rows."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=job, args=(model, source, target, there))
    process.start()
    there.close()
    return process, here


def stored(state: Path, scratch: Path) -> dict[int, str]:
    """line -> result, as a copy of what the killed process left tells."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for path in state.parent.glob(f"{state.name}*"):
        shutil.copy(path, scratch / path.name)
    if not (scratch / state.name).exists():
        return {}
    db = sqlite3.connect(scratch / state.name)
    try:
        return dict(db.execute("select line, result from done"))
    except sqlite3.OperationalError:  # killed before its tables were there
        return {}
    finally:
        db.close()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes, float]:
    """(model, input, output, and seconds that an undisturbed job takes for the rows)."""
    folder = tmp_path_factory.mktemp("kill")
    model = chat_model(folder / "tiny.gguf", blocks=2)
    rows: list[object] = []
    for i in range(ROWS):
        body = {"max_tokens": 1 + i % 12, "n": 1 + (i % 9 == 0)}
        rows.append(chat(f"c{i}", f"say {i}", **body) if i % 2 else row(f"t{i}", {"prompt": f"row {i}", **body}))
    rows[17] = "no row"
    rows[18] = row("c19", {"prompt": "a name twice"})
    source = write_rows(folder / "in.jsonl", rows)  # type: ignore[arg-type]
    process, ready = start(model, source, folder / "out.jsonl")
    ready.poll(60)
    began = time.monotonic()
    process.join()
    assert process.exitcode == 0
    truth = (folder / "out.jsonl").read_bytes()
    assert truth.count(b"\n") == ROWS and truth.count(b'"response":null') == 2
    return model, source, truth, time.monotonic() - began


def disturbed(work: tuple[Path, Path, bytes, float], folder: Path, kills: int, seed: int) -> None:
    """Do the job again and again, until a process was killed at so many moments of it."""
    model, source, truth, seconds = work
    lines = truth.decode().split("\n")
    chance = random.Random(seed)
    killed = jobs = 0
    while killed < kills:
        jobs += 1
        target = folder / f"out{jobs}.jsonl"
        before: dict[int, str] = {}
        while True:
            process, ready = start(model, source, target)
            if chance.random() > 0.1:  # else killed while it loads
                ready.poll(60)
            process.join(chance.uniform(0, 4 * seconds / kills) if killed < kills else None)
            if process.exitcode is not None:
                assert process.exitcode == 0
                break
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            found = stored(target.with_name(f"{target.name}.state"), folder / "copy")
            if not target.exists():
                assert found.items() >= before.items()  # nothing that was finished is lost
                assert all(lines[line - 1] == result for line, result in found.items())
                before = found
        assert target.read_bytes() == truth
        assert sorted(p.name for p in folder.iterdir() if p.name.startswith(target.name)) == [target.name]


def test_five_kills(work: tuple[Path, Path, bytes, float], tmp_path: Path) -> None:
    disturbed(work, tmp_path, 5, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills(work: tuple[Path, Path, bytes, float], tmp_path: Path) -> None:
    disturbed(work, tmp_path, 100, 2)


def test_the_command_is_interrupted_and_goes_on(work: tuple[Path, Path, bytes, float], tmp_path: Path) -> None:
    """The command itself: Ctrl-C, a kill, and the end."""
    model, source, _, _ = work
    few = write_rows(tmp_path / "few.jsonl", source.read_bytes().splitlines()[:30])
    out = tmp_path / "out.jsonl"
    words = ["batch", str(few), "-o", str(out), "-m", str(model), "-c", "96", "-t", "1"]
    command = [sys.executable, "-m", "headrace", *words]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "HEADRACE_CACHE": str(tmp_path)}

    process = subprocess.Popen([*command, "--sequences", "1"], env=environ, stderr=subprocess.PIPE, text=True)
    state = out.with_name("out.jsonl.state")
    while not state.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    told = process.communicate()[1]
    if process.returncode != 1:  # else it was done before the signal came
        assert process.returncode == 130 and "goes on from here" in told
        assert state.exists() and not out.exists()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "30/30 rows" in done.stderr + told
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == 30 and sum(f["error"] is not None for f in found) == 2
    again = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "complete" in again.stderr
