"""Minutes of real MPI jobs whose worker ranks are killed at random: the text stays, nothing is left, nothing grows.

    python benchmarks/soak.py [--minutes 10] [--ranks 3] [--seconds 20] [--seed 0] [--out FILE]

A tiny random model, ``mpirun --with-ft ulfm``. In each job of ``--seconds`` the head computes requests, one or many at
a time, greedy and sampled, while one to all of its workers are killed; it goes on with those that are left, at last
alone. Every text is compared with one process's. Prints JSON: ``wrong`` texts and breaches of ``check_integrity``
(asked: none), ``left``: processes alive 5 s after their job, ``failed``: jobs that didn't end well, ``rss_growth``:
bytes the head grew from the first request after its last loss to its end (worst job, and the median),
``files_growth``: open files likewise, ``recovery``: seconds of the requests under way at a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from helpers_mpi import command, environment  # noqa: E402
from helpers_tiny import tiny_model  # noqa: E402

PROMPTS = ["hello world", "abc" * 30, "x", "the quick brown fox", "0123456789" * 8, "end"]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"repeat_penalty": 1.3, "temperature": 1.0}]
TOKENS = 48
SETTINGS: dict[str, Any] = {"threads": 1, "context": 256}


def case(number: int) -> tuple[list[str], dict[str, Any]]:
    """The prompts of a request (one or several at a time) and how they are sampled."""
    count = (1, 3, 6)[number % 3]
    return [PROMPTS[(number + i) % len(PROMPTS)] for i in range(count)], SAMPLINGS[number // 3 % len(SAMPLINGS)]


CASES = 54


def answer(engine: Any, number: int) -> list[list[int]]:
    from headrace.run.types import Sampling

    prompts, fields = case(number)
    done = engine.generate(prompts, max_tokens=TOKENS, sampling=Sampling(**fields), ignore_eos=True)
    return [list(c.tokens) for c in done]


# --- a rank -----------------------------------------------------------------------------------------------


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child(model: Path, folder: Path, seconds: float) -> int:
    from headrace.cluster.mpi import join
    from headrace.engine import Options, load
    from headrace.ensemble import serve

    options = Options(**SETTINGS)
    with join() as link:
        (folder / f"pid{link.rank}").write_text(str(os.getpid()))
        if link.rank:
            return serve(lambda: model, options, link)
        expected = json.loads((folder.parent / "expected.json").read_text())
        told: dict[str, Any] = {"wrong": [], "samples": []}
        with load(model, options, link=link) as engine:
            (folder / "ready").touch()
            end, number = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                began = time.monotonic()
                if answer(engine, number % CASES) != expected[number % CASES]:
                    told["wrong"].append(f"request {number}: another text")
                told["wrong"] += engine.head.check_integrity()
                files = sum(1 for _ in Path("/proc/self/fd").iterdir())
                told["samples"].append([began, time.monotonic(), rss(), files, link.size])
                number += 1
        (folder / "head.json").write_text(json.dumps(told))
    return 0


# --- a job ------------------------------------------------------------------------------------------------


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def job(rnd: random.Random, model: Path, folder: Path, ranks: int, seconds: float) -> dict[str, Any]:
    """One job; what went wrong and what the head says. Nothing of it is left running."""
    folder.mkdir()
    words = (__file__, "--child", model, folder, seconds)
    started = subprocess.Popen(
        command(ranks, *words, options=["--with-ft", "ulfm"]), env=environment(), stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("wb"), start_new_session=True,
    )  # fmt: skip
    kills: list[float] = []
    processes: dict[int, int] = {}
    try:
        if not waited(lambda: (folder / "ready").exists() or started.poll() is not None, 120):
            return {"failed": "not loaded within 120 s"}
        processes = {r: int((folder / f"pid{r}").read_text()) for r in range(ranks) if (folder / f"pid{r}").exists()}
        victims = rnd.sample(range(1, ranks), rnd.randint(1, ranks - 1))
        for victim in victims:
            time.sleep(rnd.random() * 0.6 * seconds / len(victims))
            with suppress(ProcessLookupError, KeyError):
                os.kill(processes[victim], signal.SIGKILL)
                kills.append(time.monotonic())
        with suppress(subprocess.TimeoutExpired):
            started.wait(seconds + 120)
        told = json.loads((folder / "head.json").read_text()) if (folder / "head.json").exists() else None
        if told is None:
            return {"failed": (folder / "stderr").read_text()[-1500:] or "the head said nothing", "kills": kills}
        return {**told, "kills": kills}
    finally:
        waited(lambda: not any(map(alive, [started.pid, *processes.values()])), 5)
        left = [p for p in (started.pid, *processes.values()) if alive(p)]
        (folder / "left").write_text(json.dumps(left))
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        started.wait()


def waited(ready: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def summary(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    fine = [j for j in jobs if "failed" not in j]
    growth, files, recovery = [], [], []
    for j in fine:
        last = max(j["kills"], default=0.0)
        steady = [s for s in j["samples"] if s[0] > last + 1.0]
        if len(steady) > 1:
            growth.append(steady[-1][2] - steady[0][2])
            files.append(steady[-1][3] - steady[0][3])
        recovery += [end - began for began, end, *_ in j["samples"] if any(began <= k <= end for k in j["kills"])]
    return {
        "jobs": len(jobs), "kills": sum(len(j.get("kills", ())) for j in jobs), "recovery_seen": len(recovery),
        "requests": sum(len(j["samples"]) for j in fine), "wrong": [w for j in fine for w in j["wrong"]],
        "failed": [j["failed"] for j in jobs if "failed" in j], "left": sum(j["left"] for j in jobs),
        "rss_growth": {"worst": max(growth, default=None), "median": statistics.median(growth) if growth else None},
        "files_growth": max(files, default=None),
        "recovery": {"median": statistics.median(recovery), "worst": max(recovery)} if recovery else None,
    }  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=10.0)
    p.add_argument("--ranks", type=int, default=3)
    p.add_argument("--seconds", type=float, default=20.0, help="of a job")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    from headrace.engine import load

    rnd, jobs, end = random.Random(args.seed), list[dict[str, Any]](), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder / "tiny.gguf", blocks=7, text=True)
        with load(model, **SETTINGS) as engine:
            (folder / "expected.json").write_text(json.dumps([answer(engine, i) for i in range(CASES)]))
        while not jobs or time.monotonic() < end:
            here = folder / f"job{len(jobs)}"
            found = job(rnd, model, here, args.ranks, args.seconds)
            jobs.append({**found, "left": len(json.loads((here / "left").read_text()))})
    text = json.dumps({**summary(jobs), "minutes": args.minutes, "ranks": args.ranks, "seed": args.seed}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    told = json.loads(text)
    return int(bool(told["wrong"] or told["failed"] or told["left"]))


if __name__ == "__main__":
    sys.exit(main())
