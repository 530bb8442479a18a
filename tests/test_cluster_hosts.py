"""``headrace launch`` over real hosts on this machine (``helpers_hosts``): the text of one process, whatever is lost.

Each job's head is reached over ssh only; the launcher is on a host of its own. Random moments and ten times of each:
``benchmarks/failures.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import failures
from failures import KINDS, Work, attend, start, trial, works
from helpers_chat import chat_model
from helpers_hosts import Hosts, needs_hosts
from helpers_mpi import environment
from helpers_text import smollm2

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3, "1gbit") as three:
        yield three


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Work]:
    folder = tmp_path_factory.mktemp("hosts")
    return works(folder) | {"chat": talk(chat_model(folder / "chat.gguf", blocks=7, context=4096))}


TURNS = b"hello there\nand again \\\nwith a second line\n/undo\nonce more\n"


def talk(model: Path) -> Work:
    words = ("chat", "-m", str(model), "-t", "1", "-c", "2048", "-n", "150", "--ignore-eos")
    alone = [sys.executable, "-m", "headrace", *words]
    done = subprocess.run(alone, env=environment(), input=TURNS, capture_output=True, check=True)
    assert len(done.stdout) > 100
    return Work(words, done.stdout)


def told_by(hosts: Hosts, work: Work, log: Path, *flags: str, typed: bytes = b"") -> tuple[int, bytes]:
    """(status, output) of an undisturbed job; nothing of it is left anywhere."""
    with log.open("wb") as errors:
        job = start(hosts, work, errors, *flags, stdin=subprocess.PIPE)
        try:
            text, _ = job.communicate(typed, timeout=600)
        finally:
            job.kill()
    assert hosts.left() == {}
    return job.returncode, text if work.output is None else work.output.read_bytes()


@pytest.mark.parametrize("kind", ["run", "batch", "chat"])
def test_three_hosts_write_the_text_of_one_process(
    hosts: Hosts, jobs: dict[str, Work], kind: str, tmp_path: Path
) -> None:
    work, log = jobs[kind], tmp_path / "log"
    status, text = told_by(hosts, work, log, typed=TURNS if kind == "chat" else b"")
    assert status == 0 and text == work.truth, log.read_text()


def test_five_hosts_at_a_tenth_of_the_rate(jobs: dict[str, Work], tmp_path: Path) -> None:
    """One of them with two ranks; the second time the model is a real one."""
    log = tmp_path / "log"
    with Hosts(5, "100mbit") as five:
        for kind in ("run", "batch", "chat"):
            status, text = told_by(
                five, jobs[kind], log, "--slots", "1,1,2,1,1", typed=TURNS if kind == "chat" else b""
            )
            assert status == 0 and text == jobs[kind].truth, log.read_text()
        (tmp_path / "real").mkdir()
        real = works(tmp_path / "real", smollm2())["run"]
        status, text = told_by(five, real, log)
        assert status == 0 and text == real.truth and len(text) > 200, log.read_text()


@pytest.mark.parametrize("command", ["run", "batch"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_lost_changes_nothing(hosts: Hosts, jobs: dict[str, Work], command: str, kind: str) -> None:
    found = trial(hosts, jobs[command], kind, 0.3)
    assert found["identical"] and (found["lost"], found["repeated"], found["left"]) == (0, 0, 0), found
    assert found["status"] == 0, found


def test_a_chat_goes_on_after_its_head_was_killed(hosts: Hosts, jobs: dict[str, Work], tmp_path: Path) -> None:
    """In the midst of the second answer; what was said before isn't said again, what is typed later is heard."""
    work, log, text = jobs["chat"], tmp_path / "log", bytearray()
    turns = TURNS.splitlines(keepends=True)
    with log.open("wb") as errors:
        job = start(hosts, work, errors, stdin=subprocess.PIPE)
        try:
            assert job.stdin is not None
            job.stdin.write(b"".join(turns[:3]))
            job.stdin.flush()
            attend(job, text, lambda: len(text) > len(work.truth) // 3 + 30)
            failures.rank(hosts, hosts.names[0], signal.SIGKILL)
            job.stdin.write(b"".join(turns[3:]))
            job.stdin.close()
            attend(job, text, lambda: False)
        finally:
            job.kill()
    assert job.returncode == 0 and bytes(text) == work.truth, log.read_text()
    assert "Starting again over a, b, c" in log.read_text() and hosts.left() == {}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_the_launcher_ends_everything(
    hosts: Hosts, jobs: dict[str, Work], number: signal.Signals, status: int, tmp_path: Path
) -> None:
    work, text = jobs["run"], bytearray()
    with (tmp_path / "log").open("wb") as errors:
        job = start(hosts, work, errors)
        try:
            attend(job, text, lambda: len(text) > 50)
            os.kill(job.pid, number)
            attend(job, text, lambda: False)
        finally:
            job.kill()
    assert job.wait(60) == status and len(text) < len(work.truth)
    assert work.truth.startswith(bytes(text).rstrip(b"\n"))
    assert hosts.left() == {}


def test_a_host_that_does_not_answer_is_named_at_the_start(hosts: Hosts, jobs: dict[str, Work], tmp_path: Path) -> None:
    hosts.link("b", up=False)
    try:
        with (tmp_path / "log").open("wb") as errors:
            job = start(hosts, jobs["run"], errors)
            assert job.communicate(timeout=120)[0] == b"" and job.returncode == 2
    finally:
        hosts.link("b", up=True)
    said = (tmp_path / "log").read_text()
    assert said.startswith("headrace: b can't be reached (") and said.count("\n") == 1


def test_those_left_can_be_too_small(hosts: Hosts, tmp_path: Path) -> None:
    """Refused with the numbers, once: a new start would say the same."""
    big = chat_model(tmp_path / "big.gguf", blocks=6, ffn=1 << 15, fmt="F32")
    words = ("run", "-m", str(big), "--raw", "-t", "1", "-c", "256", "-n", "8", "--ram", "90M", "hi")
    with (tmp_path / "log").open("wb") as errors:
        job = start(hosts, Work(words, b""), errors)
        assert job.communicate(timeout=600)[0] == b"" and job.returncode == 2
    said = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("headrace: ")]
    assert len(said) == 1 and "weights are 289.4 MiB" in said[0] and hosts.left() == {}
