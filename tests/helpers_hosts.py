"""Several machines on this one: network namespaces on a bridge, each with its own address, host name and process ids,
and a real sshd. Needs root. ``with Hosts(3, rate="100mbit") as hosts``; ``hosts.environment()`` and ``hosts.command``
run something on the user's side, a namespace of its own without sshd; the names are a, b, c ...

The file system is shared, as on machines with shared storage; ssh knows the hosts by a configuration file alone
(``hosts.ssh``: the words of the client), so mpirun and the program must use it for everything.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from helpers_mpi import MPIRUN, environment

TOOLS = ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd")
SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
MISSING = [tool for tool in TOOLS if shutil.which(tool, path=SBIN) is None]
needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING) or MPIRUN is None,
    reason="hosts of one's own need root, mpirun and " + ", ".join(TOOLS),
)

_COUNT = itertools.count()
SSHD = """ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
"""
SSH = """Host *
User root
IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
LogLevel ERROR
"""


def _do(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": SBIN}, check=False)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Hosts:
    """So many hosts. names; ssh: the words of an ssh client that knows them; rate: of every link, as tc writes it."""

    def __init__(self, count: int, rate: str = "") -> None:
        self.names = [chr(ord("a") + i) for i in range(count)]
        self.rate = rate
        self.folder = Path(tempfile.mkdtemp(prefix="hosts"))
        self.ssh = f"ssh -F {self.folder}/config"
        which = next(_COUNT)  # several at a time in one process, and in several
        self.tag = f"{os.getpid() % 65536:x}{which:x}"
        self.bridge = f"hr{self.tag}"
        self.net = f"10.{100 + (os.getpid() + which) % 100}.{os.getpid() // 100 % 250}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # --- coming and going -------------------------------------------------------------------------------

    def __enter__(self) -> Hosts:
        try:
            for key in ("host_key", "user_key"):
                _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd shuts its unprivileged half in
            _do("ip", "link", "add", self.bridge, "type", "bridge")
            _do("ip", "link", "set", self.bridge, "up")
            config, known, key = SSH.format(folder=self.folder), "", (self.folder / "host_key.pub").read_text()
            for i, name in enumerate(["user", *self.names]):
                self._wire(name, i + 1)
                if name != "user":
                    config += f"Host {name}\nHostName {self.address(name)}\n"
                    known += f"{self.address(name)} {key}"
            (self.folder / "config").write_text(config)
            (self.folder / "known_hosts").write_text(known)
            for name in self.names:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name in list(self._daemons):
            self.kill(name)
        for name in ["user", *self.names]:
            _do("ip", "netns", "del", self._space(name), check=False)
            _do("ip", "link", "del", self._cable(name), check=False)
        _do("ip", "link", "del", self.bridge, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _space(self, name: str) -> str:
        return f"hr{self.tag}-{name}"

    def _cable(self, name: str) -> str:
        return f"h{self.tag}-{name}"

    def address(self, name: str) -> str:
        return f"{self.net}.{1 + ['user', *self.names].index(name)}"

    def _wire(self, name: str, number: int) -> None:
        space, cable = self._space(name), self._cable(name)
        inside = ("ip", "netns", "exec", space)
        _do("ip", "netns", "add", space)
        _do("ip", "link", "add", cable, "type", "veth", "peer", "name", "net0", "netns", space)
        _do("ip", "link", "set", cable, "master", self.bridge, "up")
        _do(*inside, "ip", "addr", "add", f"{self.net}.{number}/24", "dev", "net0")
        for device in ("lo", "net0"):
            _do(*inside, "ip", "link", "set", device, "up")
        if self.rate:
            limit = ("root", "tbf", "rate", self.rate, "burst", "128kb", "latency", "100ms")
            _do("tc", "qdisc", "add", "dev", cable, *limit)
            _do(*inside, "tc", "qdisc", "add", "dev", "net0", *limit)

    def start(self, name: str) -> None:
        """Start a host's sshd, the first process of its own process ids; when it ends everything there does."""
        conf = self.folder / f"sshd_{name}"
        conf.write_text(SSHD.format(address=self.address(name), folder=self.folder))
        inside = ("ip", "netns", "exec", self._space(name), "unshare", "--uts", "--mount", "--pid", "--fork")
        ours = f'hostname {name}; exec {shutil.which("sshd", path=SBIN)} -D -f "$0"'
        words = (*inside, "--mount-proc", "--kill-child", "sh", "-c", ours, str(conf))
        with (self.folder / f"log_{name}").open("wb") as log:
            self._daemons[name] = subprocess.Popen(words, env={**os.environ, "PATH": SBIN}, stdout=log, stderr=log)
        self._await(name)

    def _await(self, name: str) -> None:
        """Until a host answers: one that was away stays unknown to its neighbours for a moment."""
        end = time.monotonic() + 60
        while subprocess.run([*self.inside("user"), *self.ssh.split(), name, "true"], capture_output=True).returncode:
            assert time.monotonic() < end, f"{name}: {(self.folder / f'log_{name}').read_text()}"
            time.sleep(0.2)

    # --- using them -------------------------------------------------------------------------------------

    def inside(self, name: str) -> list[str]:
        """Words before a command that is to run in a host's network (its own name and process ids it doesn't have)."""
        ours = ("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$0" "$@"')
        return [shutil.which("ip", path=SBIN) or "ip", "netns", "exec", self._space(name), *ours]

    def popen(self, words: Sequence[object], **more: Any) -> subprocess.Popen[bytes]:
        """A command on the user's side; its process is the command's own, and heeds Ctrl-C also where a shell in the
        background has it ignored."""
        variables: Mapping[str, str] = more.pop("env", environment())
        line = ["env", "--default-signal=INT", *self.inside("user"), *map(str, words)]
        return subprocess.Popen(line, env={**variables, "PATH": SBIN}, **more)

    def processes(self, name: str) -> dict[int, str]:
        """Process id as seen from here -> command line, of all on a host but its sshd."""
        daemon = self._daemons.get(name)
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                space = (folder / "ns/pid").readlink()
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            its = daemon is not None and space == self._of(daemon)
            if its and state not in "ZX" and not line.startswith("sshd") and "/sshd" not in line[:40]:
                found[int(folder.name)] = line
        return found

    def _of(self, daemon: subprocess.Popen[bytes]) -> Path | None:
        try:
            return Path(f"/proc/{daemon.pid}/ns/pid_for_children").readlink()
        except OSError:
            return None

    def ranks(self, name: str) -> dict[int, int]:
        """Rank -> process id of the MPI processes on a host."""
        found = {}
        for process in self.processes(name):
            try:
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for variable in variables:
                if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(variable.split(b"=")[1])] = process
        return found

    def link(self, name: str, up: bool) -> None:
        """Pull a host's cable out, or put it in."""
        _do("ip", "link", "set", self._cable(name), "up" if up else "down")
        if up:
            self._await(name)

    def kill(self, name: str) -> None:
        """A host's power cut: everything on it dies at once."""
        daemon = self._daemons.pop(name)
        daemon.send_signal(signal.SIGKILL)  # unshare's --kill-child takes the first process along, that one the rest
        daemon.wait()

    def signal(self, process: int, number: signal.Signals) -> None:
        os.kill(process, number)

    def left(self, seconds: float = 60.0) -> dict[str, dict[int, str]]:
        """What is still running on each host, once that is nothing or the time is over."""
        end = time.monotonic() + seconds
        while True:
            found = {name: some for name in self._daemons if (some := self.processes(name))}
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.2)
