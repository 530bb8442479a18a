"""What the environment says, read once: no other module looks at ``os.environ`` (a test checks it)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace.errors import Unsupported

HUB = "https://huggingface.co"

VARIABLES = {
    "HEADRACE_CACHE": "folder for fetched models (default: XDG_CACHE_HOME/headrace, or ~/.cache/headrace)",
    "HEADRACE_CPU": "use this kernel path and no other: portable, avx2 or avx512 (default: the best this CPU has)",
    "HF_ENDPOINT": f"the hub that `headrace pull` asks (default: {HUB})",
    "HF_TOKEN": "access token for gated models on the hub",
    "NO_COLOR": "when set, no colours on a terminal",
}
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI's mpirun
    ("PMI_SIZE", "PMI_RANK"),  # MPICH's mpiexec, and Slurm's srun --mpi=pmi2
    ("SLURM_STEP_NUM_TASKS", "PMIX_RANK"),  # srun --mpi=pmix; a step without PMIx is no MPI job
)
"""(number of ranks, this one's), as each launcher of MPI jobs says it."""
VARIABLES |= {size: f"set by a launcher of MPI jobs, with {rank}: how many ranks there are" for size, rank in LAUNCHERS}
OURS = "HEADRACE_LAUNCHER"
VARIABLES[OURS] = "set by `headrace launch` for every rank: the job's name, and which of the first ranks are left"
"""Every variable Headrace reads, and what it does; ``docs/cli.md`` is made from it."""


@dataclass(frozen=True)
class Config:
    """Settings from outside. cpu None: the best path. token: never printed."""

    cache: Path
    cpu: str | None = None
    hub: str = HUB
    token: str | None = None
    colour: bool = True
    ranks: int = 1
    """Processes of the MPI job this one is of; 1: none was started."""
    rank: int = 0
    left: tuple[int, ...] = ()
    """Under `headrace launch`: which of the ranks it began with these are."""

    def __repr__(self) -> str:
        return f"Config(cache={str(self.cache)!r}, cpu={self.cpu!r}, hub={self.hub!r}, colour={self.colour})"


def resolve(environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of this process. Unsupported names a variable whose value makes no sense."""
    env = os.environ if environ is None else environ
    cpu = env.get("HEADRACE_CPU") or None
    hub = (env.get("HF_ENDPOINT") or HUB).rstrip("/")
    if urlsplit(hub).scheme not in ("http", "https") or not urlsplit(hub).netloc:
        raise Unsupported(f"HF_ENDPOINT is {hub!r}; it must be an address like {HUB}, or unset.")
    return Config(_cache(env), cpu, hub, env.get("HF_TOKEN") or None, not env.get("NO_COLOR"), *_ranks(env), _left(env))


def _ranks(env: Mapping[str, str]) -> tuple[int, int]:
    """(ranks of the MPI job, this one's number)."""
    for size, rank in LAUNCHERS:
        if env.get(size, "").isdigit() and env.get(rank, "").isdigit():
            return int(env[size]), int(env[rank])
    return 1, 0


def _left(env: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(number) for number in env.get(OURS, "").partition(":")[2].split(",") if number.isdigit())


def passed_on(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of variables that are set here and that `headrace launch` sets for the ranks."""
    own = {OURS, *(name for pair in LAUNCHERS for name in pair)}
    return [name for name in (*VARIABLES, "PYTHONPATH") if name not in own and (environ or os.environ).get(name)]


def variables(names: Iterable[str]) -> dict[str, str]:
    """What is set here of these."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _cache(env: Mapping[str, str]) -> Path:
    given = env.get("HEADRACE_CACHE")
    if given:
        path = Path(given).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise Unsupported(f"HEADRACE_CACHE names {path}, which is no folder; set it to one, or unset it.")
        return path
    # XDG Base Directory Specification: a relative path there is invalid and to be ignored.
    base = env.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "headrace"
    if sys.platform == "win32" and env.get("LOCALAPPDATA"):
        return Path(env["LOCALAPPDATA"]) / "headrace"
    try:
        home = Path.home()
    except RuntimeError:
        raise Unsupported("There is no home folder to keep models in; set HEADRACE_CACHE to a folder.") from None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "headrace"
