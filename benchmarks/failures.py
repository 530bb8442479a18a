"""Losing ranks, links and hosts at random moments of a run and of a batch, over real hosts on this machine.

``python benchmarks/failures.py [--times 10] [--hosts 3] [--rate 1gbit] [--model FILE] [--kinds ...]``: as root.
Each host is a network namespace with its own sshd, host name and process ids (``tests/helpers_hosts.py``). Prints JSON:
for each command and kind how often the output was identical to one undisturbed process's, rows lost and repeated,
processes left anywhere a minute later, and seconds from the injury to the next output (a run's text, a batch's row).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from helpers_chat import chat, chat_model, row, write_rows  # noqa: E402
from helpers_hosts import Hosts  # noqa: E402
from helpers_mpi import environment  # noqa: E402

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TOKENS, ROWS = 1500, 120


def rank(hosts: Hosts, name: str, number: signal.Signals) -> None:
    for process in hosts.ranks(name).values():
        hosts.signal(process, number)


def daemon(hosts: Hosts, name: str) -> None:
    """mpirun's own process on a host."""
    for process, line in hosts.processes(name).items():
        if "prted" in line.split()[0]:
            hosts.signal(process, KILL)


KINDS: dict[str, tuple[Callable[[Hosts], Any], Callable[[Hosts], Any]]] = {
    "worker killed": (lambda h: rank(h, h.names[1], KILL), lambda h: None),
    "last killed": (lambda h: rank(h, h.names[-1], KILL), lambda h: None),
    "worker stopped": (lambda h: rank(h, h.names[1], STOP), lambda h: None),
    "worker's link down": (lambda h: h.link(h.names[1], up=False), lambda h: h.link(h.names[1], up=True)),
    "worker's daemon killed": (lambda h: daemon(h, h.names[1]), lambda h: None),
    "worker's host off": (lambda h: h.kill(h.names[1]), lambda h: h.start(h.names[1])),
    "head killed": (lambda h: rank(h, h.names[0], KILL), lambda h: None),
    "head stopped": (lambda h: rank(h, h.names[0], STOP), lambda h: None),
    "head's link down": (lambda h: h.link(h.names[0], up=False), lambda h: h.link(h.names[0], up=True)),
    "head's host off": (lambda h: h.kill(h.names[0]), lambda h: h.start(h.names[0])),
}
"""Name -> what is done to the hosts, and what undoes it."""


@dataclass(frozen=True)
class Work:
    """A command and what one process makes of it. output: the file it writes; None for standard output."""

    words: tuple[str, ...]
    truth: bytes
    output: Path | None = None

    def progress(self, text: bytes) -> int:
        """Bytes of text so far, or rows that are safe."""
        if self.output is None:
            return len(text)
        return self.whole if self.output.exists() else stored(self.output.with_name(f"{self.output.name}.state"))

    @property
    def whole(self) -> int:
        return len(self.truth) if self.output is None else self.truth.count(b"\n")


def stored(state: Path) -> int:
    """Rows that a copy of a state has; the job itself lets nobody else open it."""
    with tempfile.TemporaryDirectory() as copy:
        for path in state.parent.glob(f"{state.name}*"):
            with suppress(OSError):
                shutil.copy(path, copy)
        if not (found := Path(copy) / state.name).exists():
            return 0
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(found)) as db:
            return int(db.execute("select count(*) from done").fetchone()[0])
    return 0


def works(folder: Path, model: Path | None = None) -> dict[str, Work]:
    """A run and a batch, of a tiny model where none is given."""
    tiny = model or chat_model(folder / "tiny.gguf", blocks=7, context=1 << 13)
    raw = ("-m", str(tiny), "-t", "1", "-c", "4096")
    tokens = str(TOKENS if model is None else 150)
    run = ("run", *raw, "--raw", "-n", tokens, "--ignore-eos", "--temp", "0.7", "--seed", "3", "Once upon a time")
    rows = []
    for i in range(ROWS if model is None else 24):
        body = {"max_tokens": 30 + i % 40, "n": 1 + (i % 9 == 0)}
        rows.append(chat(f"c{i}", f"say {i}", **body) if i % 2 else row(f"t{i}", {"prompt": f"row {i}", **body}))
    source = write_rows(folder / "in.jsonl", rows)
    raw = ("-m", str(tiny), "-t", "1", "-c", "512", "--sequences", "6", "--any-model")
    batch = ("batch", str(source), *raw)
    text = subprocess.run([sys.executable, "-m", "headrace", *run], env=environment(), capture_output=True, check=True)
    alone = folder / "alone.jsonl"
    subprocess.run([sys.executable, "-m", "headrace", *batch, "-o", str(alone)], env=environment(), check=True)
    output = folder / "out.jsonl"
    return {
        "run": Work(run, text.stdout),
        "batch": Work((*batch, "-o", str(output)), alone.read_bytes(), output),
    }


def start(
    hosts: Hosts, work: Work, errors: Any, *flags: str, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """``headrace launch`` on the user's side."""
    for path in work.output.parent.glob(f"{work.output.name}*") if work.output else ():
        path.unlink()
    words = [sys.executable, "-m", "headrace", "launch", "--hosts", ",".join(hosts.names), "--ssh", hosts.ssh, *flags]
    out = subprocess.PIPE
    return hosts.popen([*words, "--", *work.words], stdin=stdin, stdout=out, stderr=errors)


def attend(job: subprocess.Popen[bytes], text: bytearray, until: Callable[[], bool], timeout: float = 600) -> None:
    """Read what comes until something is so, or the job is over."""
    assert job.stdout is not None
    end = time.monotonic() + timeout
    while not until():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing more within {timeout:.0f} s")
        if select.select([job.stdout], [], [], 0.05)[0]:
            data = os.read(job.stdout.fileno(), 1 << 16)
            if not data:
                job.wait(timeout)
                return
            text += data


def trial(hosts: Hosts, work: Work, kind: str, share: float) -> dict[str, Any]:
    """One injury when about that share of the output is there. recovered: seconds to the next of it."""
    injure, mend = KINDS[kind]
    with tempfile.TemporaryFile() as errors:
        job = start(hosts, work, errors)
        text = bytearray()
        try:
            attend(job, text, lambda: work.progress(text) >= 1 + share * work.whole)
            hit = job.poll() is None
            injure(hosts)
            began = time.monotonic()
            late = began + 0.5
            attend(job, text, lambda: time.monotonic() > late)  # what was on its way
            before = work.progress(text)
            attend(job, text, lambda: work.progress(text) > before)
            recovered = time.monotonic() - began
            attend(job, text, lambda: False)
        finally:
            mend(hosts)
            job.kill() if job.poll() is None else None
        errors.seek(0)
        told = errors.read().decode(errors="replace")
    found = bytes(text) if work.output is None else work.output.read_bytes() if work.output.exists() else b""
    left = hosts.left(60)
    return {
        "kind": kind, "hit": hit, "identical": found == work.truth, **_rows(found, work), "recovered": recovered,
        "status": job.returncode, "left": sum(map(len, left.values())), "told": told,
        "starts": told.count("Starting again"),
    }  # fmt: skip


def _rows(found: bytes, work: Work) -> dict[str, int]:
    """Rows of a batch that aren't there, and that are there twice."""
    if work.output is None:
        return {"lost": 0, "repeated": 0}
    lines = found.splitlines()
    return {"lost": len(set(work.truth.splitlines()) - set(lines)), "repeated": len(lines) - len(set(lines))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--commands", nargs="*", choices=("run", "batch"), default=("run", "batch"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="what each trial told, to standard error")
    args = parser.parse_args()
    chance, answer = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder, Hosts(args.hosts, args.rate) as hosts:
        for name, work in works(Path(folder), args.model).items():
            for kind in args.kinds if name in args.commands else ():
                some = [trial(hosts, work, kind, chance.uniform(0.05, 0.8)) for _ in range(args.times)]
                seconds = [one["recovered"] for one in some if one["hit"]]
                summed = {
                    key: sum(one[key] for one in some) for key in ("identical", "lost", "repeated", "left", "starts")
                }
                answer.append({
                    "command": name, "kind": kind, "times": len(some), "hit": len(seconds), **summed,
                    "status 0": sum(one["status"] == 0 for one in some),
                    "median s": round(statistics.median(seconds or [0]), 2),
                    "worst s": round(max(seconds, default=0), 2),
                })  # fmt: skip
                print(json.dumps(answer[-1]), file=sys.stderr, flush=True)
                for one in some if args.verbose else ():
                    print(one["told"], file=sys.stderr)
    about = {"hosts": args.hosts, "rate": args.rate, "model": str(args.model or "tiny"), "seed": args.seed}
    print(json.dumps({**about, "trials": answer}, indent=1))


if __name__ == "__main__":
    main()
