"""Benchmarks' children in a memory cgroup (v1), page cache included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

GROUP = Path(f"/sys/fs/cgroup/memory/headrace-benchmark-{os.getpid()}")
COUNTS = {"failcnt": "memory.failcnt", "max_usage": "memory.max_usage_in_bytes"}


def drop(paths: Iterable[Path]) -> None:
    """Take the files (folders: all in them) out of the page cache, where one that is there already would be free."""
    os.sync()
    for path in paths:
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def launch(
    program: str, job: dict[str, Any], limit: int | None, python: str = sys.executable, seconds: float | None = None
) -> dict[str, Any]:
    """``program --child`` with the job on its standard input -> the JSON in its last line of output.

    limit: bytes of the cgroup, then ``failcnt`` and ``max_usage`` (bytes) are in the answer; None: no cgroup. A child
    that ends badly, or takes longer than ``seconds``, answers ``failed``: why. It is over when this returns.
    """
    if limit is not None:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit))

    def enter() -> None:
        if limit is not None:
            (GROUP / "cgroup.procs").write_text(str(os.getpid()))

    pipe, start = subprocess.PIPE, time.perf_counter()
    child = subprocess.Popen(
        [python, program, "--child"], stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=enter
    )
    try:
        out, err = child.communicate(json.dumps(job), timeout=seconds)
        answer = _answer(child.returncode, out, err)
    except subprocess.TimeoutExpired:
        answer = {"failed": f"still at it after {time.perf_counter() - start:.0f} s"}
    finally:
        child.kill()
        child.communicate()
        counts = {} if limit is None else {key: int((GROUP / name).read_text()) for key, name in COUNTS.items()}
        if limit is not None:
            _remove()
    return answer | counts


def _remove() -> None:
    """The group, which the system frees a moment after its last process."""
    for _ in range(50):
        with suppress(OSError):
            GROUP.rmdir()
            return
        time.sleep(0.1)


def _answer(status: int, out: str, err: str) -> dict[str, Any]:
    if status == -9:
        return {"failed": "killed for memory"}
    if status:
        last = [line for line in err.splitlines() if line.strip()] or ["no word"]
        return {"failed": f"status {status}: {last[-1][-500:]}", "said": err[-4000:]}
    return dict(json.loads(out.splitlines()[-1]))


def need(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of a child without which there is no going on."""
    if "failed" in answer:
        raise SystemExit(f"the child failed: {answer['failed']}\n{answer.get('said', '')}")
    return answer
