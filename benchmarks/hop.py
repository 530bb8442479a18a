"""One hop between two ranks: what is left of a round trip when the other rank's work is taken off.

    python benchmarks/hop.py [--busy 5] [--width 576] [--times 200] [--rounds 3] [--idle 10] [--out FILE]

Rank 0 sends a run of one row, rank 1 computes for ``busy`` milliseconds (sums over more than caches hold, so that
what comes after is as cold as behind real layers) and answers with a result; then rank 0 computes as long.
``hop``: half of what a round takes beyond rank 1's computing, microseconds, median of each round. ``waiting``: share
of a core that rank 0 takes while it waits for an answer. ``idle``: that of each rank while nothing is to be done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from model_zoo import tell


def compute(memory: Any, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        memory[np.random.randint(64)].sum()


def hear(link: Any) -> Any:
    while (arrival := link.receive()) is None:
        link.wait(1.0)
    return arrival


def rank(job: dict[str, Any]) -> int:
    from headrace.cluster.handshake import Ready
    from headrace.cluster.members import CONTROL
    from headrace.cluster.message import Limits
    from headrace.cluster.mpi import join
    from headrace.run.types import Append, Choice, Result, Row, RunMessage

    memory, x = np.zeros((64, 1 << 17)), np.zeros((1, job["width"]), np.float32)
    rounds, busy = job["rounds"] + 1, job["busy"] / 1e3
    with join() as link:
        Path(job["folder"], str(link.rank)).write_text(str(os.getpid()))
        link.limits[0 if link.rank else -1] = Limits()
        if link.rank:
            link.send(0, CONTROL, Ready(1))
            for _ in range(rounds * job["times"]):
                run = hear(link).message
                start = time.perf_counter()
                compute(memory, busy)
                took = time.perf_counter() - start
                link.send(0, -1, Result(0, run.run, (Choice(0, 7, took),)))
            hear(link)  # to leave
            return 0
        hear(link)
        hops, shares, number = [], [], 0
        for _ in range(rounds):
            lost, waited, used = [], 0.0, 0.0
            for _ in range(job["times"]):
                number += 1
                ops = (Append(3, (number % 999,), (number,)),)
                run = RunMessage(0, number, False, ops, (Row(3, number, number, number % 999, True),), None, x)
                start, cpu = time.perf_counter(), time.process_time()
                link.send(1, 0, run)
                choice = hear(link).message.choices[0]
                took = time.perf_counter() - start
                used += time.process_time() - cpu
                waited += took
                lost.append(took - choice.logprob)
                compute(memory, busy)
            hops.append(statistics.median(lost) / 2 * 1e6)
            shares.append(used / waited)
        pids = [Path(job["folder"], str(r)).read_text() for r in range(link.size)]
        ticks = os.sysconf("SC_CLK_TCK")

        def seconds(pid: str) -> float:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / ticks

        before, end = [seconds(pid) for pid in pids], time.monotonic() + job["idle"]
        while (left := end - time.monotonic()) > 0:
            link.wait(left)
        idle = [(seconds(pid) - a) / job["idle"] for pid, a in zip(pids, before, strict=True)]
        print(json.dumps({"hop": hops[1:], "waiting": shares[1:], "idle": idle}), flush=True)
    return 0


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        return rank(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--busy", type=float, default=5.0, help="milliseconds")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        asked = {**vars(args), "out": None, "folder": folder}
        words = [mpirun, "-n", "2", "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
        words += ["--rank", json.dumps(asked)]
        done = subprocess.run(words, env={**os.environ, **root}, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    tell({"benchmark": "hop", "busy": args.busy, "width": args.width, **answer, "loaded": os.getloadavg()[0]}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
