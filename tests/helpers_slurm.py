"""Slurm on this machine, for a test: munged, slurmctld and slurmd in a folder of their own, one node. Needs root.

``with Slurm(folder) as slurm: slurm.run("srun", "-n", "3", ...)``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
TOOLS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool, path=SBIN) is None for tool in TOOLS),
    reason="a Slurm of one's own needs root and " + ", ".join(TOOLS),
)

CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of one node with 8 CPUs on paper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir(mode=0o755)
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(host=host, folder=folder, ports=free_ports(2))
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SBIN}
        self._do("mungekey", "--create", f"--keyfile={folder}/munge.key")
        ends = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        places = [f"--{name}={folder}/munge.{end}" for name, end in ends.items()]
        self._daemon("munged", "--foreground", "--force", *places)
        end = time.monotonic() + 60
        while not (folder / "munge.socket").exists():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)
        self._daemon("slurmctld", "-D", "-f", folder / "slurm.conf")
        self._daemon("slurmd", "-D", "-f", folder / "slurm.conf")
        end = time.monotonic() + 120
        while "idle" not in self._do("sinfo", "-h", "-o", "%T", check=False):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.5)

    def run(self, *words: object, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command with Slurm's configuration, to its end."""
        environment = {**os.environ, **self.environment, **variables}
        return subprocess.run(
            list(map(str, words)), env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def _do(self, *words: object, check: bool = True) -> str:
        done = self.run(*words, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def _daemon(self, *words: object) -> None:
        with (self.folder / f"{words[0]}.out").open("wb") as log:
            environment = {**os.environ, **self.environment}
            line = list(map(str, words))
            # A group of its own: what slurmd starts is ended with it.
            self._daemons.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log, process_group=0))

    def logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in files)

    def close(self) -> None:
        if len(self._daemons) == 3:
            with suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", timeout=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
