"""Starting real MPI jobs in tests; and, run as a program, one rank of such a job.

``python helpers_mpi.py MODEL JSON``: JSON has prompts, max_tokens, samplings (lists of Sampling's fields), options, and
perhaps idle (seconds to do nothing), freeze (a file: rank 1 is stopped when all is done).
Rank 0 prints one JSON object: the tokens of each prompt under each sampling, what was sent, what is wrong at the end.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside this Python, nor elsewhere")


def environment() -> dict[str, str]:
    paths = [str(SRC), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root, "PYTHONPATH": os.pathsep.join(paths)}


def command(ranks: int, *words: object, options: Sequence[str] = ()) -> list[str]:
    """An mpirun command line of ``python words...`` on so many ranks of this machine."""
    assert MPIRUN is not None
    start = [MPIRUN, "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *options, sys.executable]
    return [*start, *map(str, words)]


def mpirun(ranks: int, *words: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    return subprocess.run(
        command(ranks, *words), env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def generate(ranks: int, model: Path, **asked: Any) -> dict[str, Any]:
    """This file as a program on so many ranks; its answer."""
    done = mpirun(ranks, __file__, model, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["wrong"] == []
    return dict(answer)


def tokens_of(engine: Any, asked: dict[str, Any]) -> list[list[list[int]]]:
    """For each sampling, for each prompt, the tokens."""
    from headrace.run.types import Sampling

    return [
        [
            list(done.tokens)
            for done in engine.generate(
                asked["prompts"], max_tokens=asked["max_tokens"], sampling=Sampling(**fields), ignore_eos=True
            )
        ]
        for fields in asked["samplings"]
    ]


def main() -> int:
    from headrace.cluster.mpi import join
    from headrace.engine import Options, load
    from headrace.ensemble import serve

    path, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    told = partial(print, file=sys.stderr, flush=True)
    options = Options(**{"threads": 1, "context": 512, "tell": told, **asked.get("options", {})})
    with join() as link:
        if link.rank:
            if link.rank == 1 and "freeze" in asked:
                Path(asked["freeze"]).write_text(str(os.getpid()))
            return serve(lambda: path, options, link)
        with load(path, options, link=link) as engine:
            tokens = tokens_of(engine, asked)
            time.sleep(asked.get("idle", 0) and 0.5)
            before = resource.getrusage(resource.RUSAGE_SELF)
            time.sleep(asked.get("idle", 0))
            after = resource.getrusage(resource.RUSAGE_SELF)
            answer = {
                "tokens": tokens,
                "wrong": engine.head.check_integrity(),
                "messages": {str(to): n for (to, what), n in link.sent.items() if what == "messages"},
                "bytes": {str(to): n for (to, what), n in link.sent.items() if what == "bytes"},
                "runs": engine.head._next_run,
                "guesses": vars(engine.head.counts),
                "idle": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            }
            print(json.dumps(answer), flush=True)
        if "freeze" in asked:
            os.kill(int(Path(asked["freeze"]).read_text()), signal.SIGSTOP)
    return 0


if __name__ == "__main__":
    sys.exit(main())
